"""A head in its engine beside forerun: what the comparison says of an engine that answers well, badly, or not at all;
vLLM's plan, llama.cpp's conversion and its server's stream."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scipy.stats import fisher_exact

from forerun.deploy.trials import trial, try_vllm
from forerun.deploy.trials.trial import (
    EngineTrial,
    HeadDrafting,
    InstalledEngine,
    RefusedError,
    TrialAnswer,
    TrialPrompts,
    fisher,
)
from forerun.deploy.trials.try_llama_cpp import InLlamaCpp
from forerun.deploy.trials.try_vllm import InVllm
from forerun.errors import ArgumentError, ForerunError

Change = Callable[[TrialAnswer], TrialAnswer]
K = 3


def test_fisher_is_scipys() -> None:
    for one, other in product((1, 7, 40), (1, 12, 55)):
        for right in product({0, one // 3, one}, {0, other // 2, other}):
            table = [[right[0], one - right[0]], [right[1], other - right[1]]]
            expected = float(fisher_exact(table).pvalue)
            assert fisher(right, (one, other)) == pytest.approx(expected, rel=1e-6), table
    assert fisher((0, 0), (0, 5)) == 1.0


def drafting(kind: str = "eagle3") -> HeadDrafting:
    from forerun.shipped import FOLDER

    return HeadDrafting(head=str(FOLDER / "eagle3"), kind=kind, target=str(FOLDER / "target"), k=K)


class Mirror(InstalledEngine):
    """An engine that drafts as we do, but for `change`; None: it refuses."""

    title: ClassVar[str] = "Mirror"

    def __init__(self, change: Change | None) -> None:
        super().__init__(drafting(), "1.0")
        self.change, self.asked = change, list[TrialPrompts]()

    def answers(self, question: TrialPrompts) -> list[TrialAnswer]:
        self.asked.append(question)
        if self.change is None:
            raise RefusedError("ValueError: no such head")
        return [self.change(one) for one in OURS[True]]


OURS: dict[bool, list[TrialAnswer]] = {}
"""What forerun answers to these prompts, drafting with the shipped head or not: the same in every trial, asked once."""


def mirrored(monkeypatch: pytest.MonkeyPatch, change: Change | None) -> EngineTrial:
    """The shipped head, in that engine."""
    from forerun.demo import prompts

    own = trial.answer_prompts

    def answers(*arguments: Any) -> list[TrialAnswer]:
        drafting = bool(arguments[3])
        if drafting not in OURS:
            OURS[drafting] = own(*arguments)
        return list(OURS[drafting])

    engine = Mirror(change)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "answer_prompts", answers)
        found = trial.run_trial(engine, prompts=[one.text[:600] for one in prompts()[:4]], tokens=24, dtype="float32")
    (asked,) = engine.asked
    assert len(asked.prompts) == 4 and (asked.tokens, asked.dtype) == (24, "float32")
    assert asked.room == max(map(len, asked.prompts)) + 24 + K + 1
    return found


def test_an_engine_that_accepts_the_same_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mirrored(monkeypatch, lambda one: one)
    assert found.good and not found.parted and found.lengths[0] == found.lengths[1] > 1.2
    assert len(found.positions) == K and found.positions[0].drafted[0] > 20 and found.steps.agree
    assert json.loads(json.dumps(found.as_json()))["good"] is True


def test_an_engine_that_accepts_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mirrored(monkeypatch, lambda one: replace(one, accepted=[0] * len(one.accepted)))
    assert not found.good and found.worse[0].index == 0 and found.lengths[1] == 1.0
    better = mirrored(monkeypatch, lambda one: replace(one, accepted=list(one.drafted)))
    assert better.good, "more is no fault of the head"


def test_texts_that_part_are_counted_and_ends_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mirrored(monkeypatch, lambda one: replace(one, token_ids=[*one.token_ids[:-1], 9]))
    assert found.parted == 4 and found.good
    assert mirrored(monkeypatch, lambda one: replace(one, token_ids=one.token_ids[:7])).parted == 0
    assert mirrored(monkeypatch, lambda one: replace(one, token_ids=[])).parted == 4


def test_what_an_engine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = mirrored(monkeypatch, None)
    assert not found.good and "no such head" in found.refused and not found.positions


# vLLM


def planned(monkeypatch: pytest.MonkeyPatch, told: Mapping[str, Any] | None) -> list[TrialAnswer]:
    """vLLM's answers, before a vLLM that says `told`; None: it dies."""
    asked = dict[str, Any]()

    def ask(plan: Mapping[str, Any], folder: Path, python: Path) -> None:
        asked.update(plan)
        (folder / "vllm.log").write_text("Segmentation fault\n")
        if told is not None:
            (folder / "eagle3.json").write_text(json.dumps(told))

    monkeypatch.setattr(try_vllm, "ask_vllm", ask)
    monkeypatch.setattr(try_vllm, "vllm_version", lambda _: "0.32.0")
    engine = InVllm(drafting(), Path("x"))
    try:
        return engine.answers(TrialPrompts(prompts=[[1, 2]], tokens=8, dtype="float32", room=14))
    finally:
        (arm,) = asked["arms"].values()
        assert arm["target"] == drafting().target and asked["prompts"] == [[1, 2]] and asked["dtype"] == "float32"
        assert arm["vllm"]["method"] == "eagle3" and arm["vllm"]["num_speculative_tokens"] == K


def test_vllms_answers_what_it_refuses_and_a_vllm_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    one = TrialAnswer(token_ids=[4, 5], text="ab", drafted=[3], accepted=[1])
    assert planned(monkeypatch, {"answers": [asdict(one)]}) == [one]
    with pytest.raises(RefusedError, match="no such head"):
        planned(monkeypatch, {"refused": "ValueError: no such head", "version": "0.32.0"})
    with pytest.raises(ForerunError, match=r"died:\nSegmentation fault"):
        planned(monkeypatch, None)


def test_a_vllm_of_which_nothing_is_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9.9.9", "0.32.0"):
        monkeypatch.setattr(try_vllm, "vllm_version", lambda _, version=version: version)
        engine = InVllm(drafting(), Path("x"))
        assert engine.version == version and len(engine.notes) == (version == "9.9.9")
        assert all("nothing is known of vLLM 9.9.9" in note for note in engine.notes)


def test_mtp_layers_are_tried_where_they_lie_in_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(try_vllm, "vllm_version", lambda _: "0.32.0")
    whole = replace(drafting("mtp"), head=drafting().target)
    assert InVllm(whole, Path("x")).speculation == {"method": "mtp", "num_speculative_tokens": K}
    advice = r"in the target's own checkpoint: forerun export .* --to vllm .* --output DIR, then name DIR as both"
    with pytest.raises(ArgumentError, match=advice):
        InVllm(drafting("mtp"), Path("x"))


def test_a_python_without_vllm() -> None:
    with pytest.raises(ArgumentError, match="has no vLLM; name the Python"):
        try_vllm.vllm_version(Path(sys.executable))
    with pytest.raises(ArgumentError, match="cannot be run: No such file"):
        try_vllm.vllm_version(Path("/nowhere/python"))


# llama.cpp: its converter and its server are stand-ins here, `make test-llama` has both

CONVERTER = """
import sys, pathlib
from conversion import base
from {module} import {name}

def main():
    words = sys.argv[1:]
    target = words[words.index("--target-model-dir") + 1] if "--target-model-dir" in words else None
    split = base.TextModel().get_vocab_base_pre(None)
    pathlib.Path(words[words.index("--outfile") + 1]).write_text(f"{{words[0]}} {{target}} {{split}}")
"""
BASE = """
class TextModel:
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("not recognized")
"""
SERVER = """#!{python}
import http.server, json, sys

words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("version: 9.9 (build 3, commit abc)", file=sys.stderr))
if open(words[words.index("-md") + 1]).read().startswith("bad"):
    print("starting\\nE init: no ctx_other (this warning is normal)")
    sys.exit(print("E srv load: error loading model: wrong number of tensors"))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"][0] == 1 and asked["n_predict"] == 6 and asked["temperature"] == 0
        self.send_response(200)
        self.end_headers()
        counts = [(0, 0), (3, 2), (3, 2), (3, 2), (6, 2), (6, 2)]
        for token, (drafted, accepted) in enumerate(counts):
            timings = {{"draft_n": drafted, "draft_n_accepted": accepted}} if drafted else {{}}
            part = {{"tokens": [token], "content": chr(97 + token), "timings": timings, "stop": False}}
            self.wfile.write(b"data: " + json.dumps(part).encode() + b"\\n\\n")
        self.wfile.write(b'data: {{"stop": true, "tokens": [], "content": ""}}\\n\\n')

    def log_message(self, *_):
        pass


address = ("127.0.0.1", int(words[words.index("--port") + 1]))
http.server.ThreadingHTTPServer(address, Handler).serve_forever()
"""


def sources(folder: Path, module: str = "math", name: str = "pi") -> Path:
    """A directory laid out as llama.cpp's."""
    (folder / "build" / "bin").mkdir(parents=True)
    (folder / "conversion").mkdir()
    (folder / "conversion" / "__init__.py").touch()
    (folder / "conversion" / "base.py").write_text(BASE)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER.format(module=module, name=name))
    server = folder / "build" / "bin" / "llama-server"
    server.write_text(SERVER.format(python=sys.executable))
    server.chmod(0o755)
    return folder


QUESTION = TrialPrompts(prompts=[[1, 2], [1, 3, 5]], tokens=6, dtype="float32", room=20)


def test_llama_cpp_is_converted_for_served_and_read_step_by_step(tmp_path: Path) -> None:
    engine = InLlamaCpp(drafting(), sources(tmp_path / "llama.cpp"), Path(sys.executable))
    assert engine.version == "9.9 (build 3, commit abc)" and engine.way == "draft-eagle3"
    found = engine.answers(QUESTION)
    assert found == [TrialAnswer(token_ids=[0, 1, 2, 3, 4, 5], text="abcdef", drafted=[3, 3], accepted=[2, 0])] * 2
    assert "does not know this tokenizer" in engine.notes[0]


def test_what_llama_cpp_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = sources(tmp_path / "llama.cpp")
    (tmp_path / "bad").mkdir()
    monkeypatch.chdir(tmp_path)
    bad = replace(drafting(), head="bad")
    with pytest.raises(RefusedError, match=r"its server: E srv load: error loading model: wrong number of tensors"):
        InLlamaCpp(bad, here, Path(sys.executable)).answers(QUESTION)
    odd = sources(tmp_path / "odd", "math", "no_such_name")
    with pytest.raises(RefusedError, match="its converter: ImportError: cannot import name"):
        InLlamaCpp(drafting(), odd, Path(sys.executable)).answers(QUESTION)


def test_what_llama_cpp_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    python = Path(sys.executable)
    poor = sources(tmp_path / "poor", "no_such_module", "name")
    with pytest.raises(ForerunError, match="No module named 'no_such_module'; install it, or name another: --python"):
        InLlamaCpp(drafting(), poor, python).answers(QUESTION)
    (poor / "build" / "bin" / "llama-server").unlink()
    with pytest.raises(ArgumentError, match="no llama-server on the path; build it"):
        InLlamaCpp(drafting(), poor, python)
    for nowhere in (None, tmp_path):
        with pytest.raises(ArgumentError, match=r"is no directory of llama.cpp.s sources .*: --llama-cpp DIR"):
            InLlamaCpp(drafting(), nowhere, python)
    with pytest.raises(ArgumentError, match="does not draft with a medusa head; it does with draft_model, eag"):
        InLlamaCpp(drafting("medusa"), poor, python)
    with pytest.raises(ArgumentError, match="owner/name is no directory"):
        InLlamaCpp(replace(drafting(), target="owner/name"), poor, python)
    with pytest.raises(ArgumentError, match=r"in the target's own checkpoint: forerun export .* --to llama.cpp"):
        InLlamaCpp(drafting("mtp"), poor, python)


def test_a_server_that_ends_while_it_answers_is_said(tmp_path: Path) -> None:
    here = sources(tmp_path / "llama.cpp")
    server = here / "build" / "bin" / "llama-server"
    server.write_text(
        server.read_text().replace(
            "asked = json", "import os; print('GGML_ASSERT(n) failed', flush=True); os._exit(6); asked = json"
        )
    )
    with pytest.raises(RefusedError, match=r"its server: GGML_ASSERT\(n\) failed"):
        InLlamaCpp(drafting(), here, Path(sys.executable)).answers(QUESTION)


# The doctor


@pytest.mark.parametrize(("words", "k"), [((), 3), (("-k", "2"), 2)])
def test_a_head_is_tried_with_as_many_tokens_as_it_drafts(
    words: tuple[str, ...], k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from forerun.cli import main
    from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
    from forerun.heads.medusa import MedusaConfig, MedusaHead
    from forerun.types import LAST_HIDDEN

    facts = TargetFacts.read("demo")
    sizes = {"target_hidden_size": facts.hidden_size, "boundaries": (LAST_HIDDEN,)}
    sizes |= {"vocab_size": facts.vocab_size, "draft_vocab_size": facts.vocab_size}
    head = HeadCheckpoint.of(MedusaHead(MedusaConfig(num_heads=3, num_layers=1, **sizes)))
    folder, asked = write_head(head, tmp_path / "head", "medusa", facts), list[InstalledEngine]()

    def tried(engine: InstalledEngine, **_: Any) -> EngineTrial:
        asked.append(engine)
        return EngineTrial(engine="vLLM", version="0.32.0", refused="ValueError: not here")

    monkeypatch.setattr(trial, "run_trial", tried)
    monkeypatch.setattr(try_vllm, "vllm_version", lambda _: "0.32.0")
    assert main(["doctor", str(folder), "--target", "demo", "--run", *words]) == 1, capsys.readouterr().err
    (engine,) = asked
    assert isinstance(engine, InVllm) and engine.drafting.k == engine.speculation["num_speculative_tokens"] == k
    assert main(["doctor", str(folder), "--target", "demo", "--run", "-k", "4"]) == 2
    assert "drafts 3 tokens on one path, 4 were requested" in capsys.readouterr().err


def test_what_the_doctor_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from forerun.cli import main

    asked = ["doctor", "demo-eagle3", "--target", "demo", "--run"]
    assert (
        main([*asked, "--engine", "sglang"]) == 2 and "in vllm or llama.cpp, not in sglang" in capsys.readouterr().err
    )
    assert main([*asked, "--engine", "vllm", "--engine", "llama.cpp"]) == 2
    assert main(["doctor", "--run"]) == 2
    assert main(asked) == 2 and "has no vLLM" in capsys.readouterr().err
    assert main([*asked, "--engine", "llama.cpp"]) == 2 and "--llama-cpp DIR" in capsys.readouterr().err
    made = mirrored(monkeypatch, lambda one: replace(one, accepted=[0] * len(one.accepted)))
    monkeypatch.setattr(trial, "run_trial", lambda *_, **__: made)
    monkeypatch.setattr(try_vllm, "vllm_version", lambda _: "0.32.0")
    assert main(asked) == 1
    shown = capsys.readouterr()
    assert "mean acceptance length" in shown.out and "Mirror 1.0 accepts less" in shown.err
    assert main([*asked, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["run"]["worse"] == [one.index for one in made.worse]
    refused = replace(made, refused="ValueError: no", positions=(), notes=("an odd tokenizer",))
    monkeypatch.setattr(trial, "run_trial", lambda *_, **__: refused)
    assert main(asked) == 1
    said = capsys.readouterr().err
    assert "does not draft with it: ValueError: no" in said and "an odd tokenizer" in said
