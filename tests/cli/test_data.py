"""``forerun data``, ``datastore`` and ``features``: figures, one JSON object if asked for, one error for bad input."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from bench.scripted import Script, scripted
from cli.conftest import Forerun, Ran
from engine.conftest import byte_llama, tiny_tokenizer
from forerun.cli import console
from forerun.cli.features import _read_by
from forerun.drafters.kinds import KINDS, kind_named
from forerun.drafters.lookup.rest import Datastore
from forerun.heads.dflash import spread_boundaries
from forerun.training.data.store import PreparedData, write_prepared
from forerun.training.features.online import OnlineFeatures, reference_states
from forerun.training.features.store import FeatureStore
from forerun.types import LAST_HIDDEN
from forerun.writing import TokenizerIdentity
from mtp_targets import Checkpoint

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + '\n{"broken\n' + json.dumps({"text": "the cat"}) + "\n")
    return path


def test_prepare_writes_data_and_says_what_is_in_it(forerun: Forerun, chats: Path, tmp_path: Path) -> None:
    arguments: list[Any] = ["data", "prepare", chats, "--target", "demo", "--skip-bad", "--draft-vocab-size", 4000]
    arguments += ["--chat-template-kwargs", '{"enable_thinking": false}']
    ran = forerun(*arguments, "--output", tmp_path / "a", "--json")
    said = json.loads(ran.out)
    assert ran.code == 0 and ran.out.count("\n") == 1 and "line 2" in ran.err
    data = PreparedData(tmp_path / "a")
    assert (said["documents"], said["tokens"], said["skipped"]) == (2, data.num_tokens, 1)
    assert said["hash"] == data.hash and 0 < said["draft_vocabulary"]["coverage"] <= 1
    assert data.tokenizer.name == "demo"
    assert data.manifest["options"]["chat_template_kwargs"] == {"enable_thinking": False}
    words = forerun(*arguments, "--output", tmp_path / "b")
    assert words.code == 0 and "2 documents" in words.out and "covers" in words.out and "1 records skipped" in words.out


def test_progress_in_a_file_says_how_fast_it_goes_and_what_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "LINE_EVERY_S", 0.0)
    with console.progress_bar("answering") as update:
        update(completed=4, total=10)  # those of an earlier run
        update(completed=6, total=10, description="answering at 7 tokens/s")
    first, second = capsys.readouterr().err.splitlines()
    assert "answering: 4 of 10 after" in first and "left" not in first
    assert "answering at 7 tokens/s: 6 of 10 after" in second and second.endswith("left")


def test_regenerate_here_then_prepare(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": f"the cat sat on {word}"}) + "\n" for word in ("the mat", "a log")))
    arguments: list[Any] = ["data", "regenerate", source, "--target", checkpoint, "--output", output]
    arguments += ["--prompt-tokens", 3, "-n", 6, "-t", 0, "--drafter", "ngram", "--json"]
    first = json.loads(forerun(*arguments, "--limit", 1).out)
    assert (first["written"], first["total"], first["answers"]) == (1, 1, 1)
    ran = forerun(*arguments)
    second = json.loads(ran.out)
    assert ran.code == 0 and (second["written"], second["resumed"], second["total"]) == (1, 1, 2)
    done = forerun("data", "prepare", output, "--target", checkpoint, "--output", tmp_path / "data", "--json")
    assert done.code == 0 and 0 < json.loads(done.out)["counted_tokens"] < json.loads(done.out)["tokens"]
    other = tmp_path / "other" / checkpoint.name  # another model of the same name
    byte_llama(1, tiny_tokenizer()).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    refused = forerun(*(other if word is checkpoint else word for word in arguments))
    assert refused.code == 2 and "under other settings: weights was" in refused.err
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    for line in lines:
        del line["asked"]["weights"]  # as earlier versions wrote them
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = forerun(*arguments)
    assert (
        json.loads(older.out)["resumed"] == 2 and "2 completions in" in older.err and "count as this one's" in older.err
    )


def answering(body: dict[str, Any]) -> tuple[int, str]:
    """Everything is answered with its length, and what contains "no" is refused."""
    asked, thinking = body["messages"][-1]["content"], body.get("chat_template_kwargs", {}).get("thinking", "")
    message = {"role": "assistant", "content": f"{len(asked)}{thinking}"}
    answer = {"choices": [{"message": message, "finish_reason": "stop"}]}
    return 422 if "no" in asked else 200, json.dumps(answer)


@pytest.fixture
def server() -> Iterator[str]:
    with scripted(Script(answering)) as url:
        yield url


def test_regenerate_at_an_endpoint(forerun: Forerun, server: str, tmp_path: Path) -> None:
    pytest.importorskip("httpx")
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "four"}\n{"prompt": "not this"}\n')
    arguments: list[Any] = ["data", "regenerate", source, "--endpoint", server, "--model", "m", "--output", output]
    ran = forerun(*arguments)
    assert ran.code == 1 and "1 records written" in ran.out and "1 records failed" in ran.out
    assert "in.jsonl, line 2" in ran.err and "422" in ran.err
    written = json.loads(output.read_text())
    assert written["messages"] == [{"role": "user", "content": "four"}, {"role": "assistant", "content": "4"}]
    limited = forerun(*arguments, "--limit", 1)
    assert limited.code == 0 and "1 were there already" in limited.out
    output.unlink()
    forerun(*arguments, "--limit", 1, "--chat-template-kwargs", '{"thinking": "on"}')
    assert json.loads(output.read_text())["messages"][1]["content"] == "4on"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "the cat sat on the mat"}) + '\n{"broken\n')
    return path


def test_build_writes_a_datastore_that_generate_takes_for_this_target_alone(
    forerun: Forerun, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "store"
    ran = forerun("datastore", "build", corpus, "--target", checkpoint, "--output", output, "--skip-bad", "--json")
    said = json.loads(ran.out)
    store = Datastore.open(output)
    assert ran.code == 0 and "line 2" in ran.err
    assert (said["documents"], said["tokens"], said["skipped"]) == (1, store.manifest.tokens, 1)
    assert said["tokenizer_sha256"] == store.manifest.tokenizer.vocabulary and said["sources"] == 1
    options = ["--drafter", "rest", "--drafter-option", f"datastore={output}", "-n", "4", "-t", "0", "--json"]
    assert forerun("generate", checkpoint, "--prompt", "the cat sat", *options).code == 0
    refused = forerun("generate", "demo", "--prompt", "import os", *options)
    assert refused.code == 2 and "built with the tokenizer of" in refused.err and refused.out == ""


def test_info_says_what_build_said(forerun: Forerun, checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "store"
    built = forerun("datastore", "build", corpus, "--tokenizer", checkpoint, "--output", output, "--skip-bad")
    told = forerun("datastore", "info", output, "--verify")
    assert built.code == told.code == 0 and built.out.startswith(told.out) and "1 documents" in told.out
    as_json = json.loads(forerun("datastore", "info", output, "--json").out)
    assert as_json["places"] == as_json["tokens"] - 1


TEXTS = ["the cat sat on the mat", "the dog", "the dog sat on the log and the cat sat on the dog", "a mat"]


@pytest.fixture(scope="module")
def prepared(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "prepared"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    documents = [(ids, [True] * len(ids)) for ids in tokenizer(TEXTS)["input_ids"]]
    write_prepared(folder, documents, TokenizerIdentity.of(tokenizer))
    return folder


@pytest.fixture
def store(forerun: Forerun, checkpoint: Path, prepared: Path, tmp_path: Path) -> Callable[..., Ran]:
    def run(*more: object, target: Path = checkpoint, output: str = "features") -> Ran:
        common: list[object] = [target, "--data", prepared, "--output", tmp_path / output, "--yes"]
        return forerun("features", *common, *more)

    return run


def test_features_are_the_targets_and_their_size_is_said(
    store: Callable[..., Ran], checkpoint: Path, tmp_path: Path
) -> None:
    ran = store("--boundaries", "0,1", "--dtype", "float32", "--batch-tokens", 40, "--json")
    assert ran.code == 0, ran.err
    facts = json.loads(ran.out)
    assert facts["documents"] == 4 and facts["bytes"] == facts["tokens"] * 3 * 32 * 4
    assert f"4 documents, {facts['tokens']} tokens x 384 bytes (boundaries 0, 1 and the last state" in ran.err
    assert [check["boundary"] for check in facts["probe"]] == [0, 1, -1]
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    features = FeatureStore(tmp_path / "features")
    for document, text in enumerate(TEXTS):
        own = reference_states(model, tokenizer(text)["input_ids"])
        for signal, states in features.read(document).items():
            torch.testing.assert_close(states, own[signal], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "eagle2", "medusa", "dflash", "dspark"])
def test_a_kind_is_stored_where_its_untrained_head_reads(
    kind: str, store: Callable[..., Ran], checkpoint: Path, tmp_path: Path
) -> None:
    ran = store("--kind", kind, "--json", "--no-probe")
    assert ran.code == 0, ran.err
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint)
    wanted = kind_named(kind).head.Config.for_target(kind, model).boundaries
    assert json.loads(ran.out)["boundaries"] == [boundary for boundary in wanted if boundary != LAST_HIDDEN]
    assert bool(json.loads(ran.out)["boundaries"]) == (kind in ("dflash", "dspark"))
    own = json.loads(store("--kind", kind, "--boundaries", "1", "--json", "--no-probe", output="own").out)
    assert own["boundaries"] == [1], "`--boundaries` says otherwise"


def test_every_trainable_kind_can_be_asked_for() -> None:
    config = LlamaConfig(num_hidden_layers=32)
    found = {kind.name: _read_by(kind, config, "") for kind in KINDS.values() if kind.in_target is None}
    assert found["eagle3"] == found["peagle"] == (2, 16, 29)
    assert found["medusa"] == found["distill"] == found["layerskip"] == (LAST_HIDDEN,)
    assert found["kangaroo"] == (2,) and found["medusa2"] == (LAST_HIDDEN,)
    assert found["dflash"] == found["dspark"] == spread_boundaries(32, 5) == (2, 9, 16, 23, 30)


def test_mtp_layers_are_read_where_their_checkpoint_says(tmp_path: Path) -> None:
    for family, expected in {"glm": (LAST_HIDDEN,), "mimo": (2,)}.items():
        folder = tmp_path / family
        Checkpoint(family, folder)
        assert _read_by(kind_named("mtp"), None, str(folder)) == expected


def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(
    store: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--boundaries", "1", "--batch-tokens", 1, "--no-probe"]
    run, ran_documents = OnlineFeatures.documents, []

    def interrupted(self: OnlineFeatures, documents: Any) -> Any:
        ran_documents.append(documents)
        if len(ran_documents) == 3:
            raise KeyboardInterrupt
        return run(self, documents)

    monkeypatch.setattr(OnlineFeatures, "documents", interrupted)
    stopped = store(*arguments)
    assert stopped.code == 130 and "stopped after 2 documents" in stopped.err
    done = store(*arguments)
    assert done.code == 0 and len(ran_documents) == 3 + 2 and "are there" in done.err
    assert len(FeatureStore(tmp_path / "features")) == 4
    again = store(*arguments)
    assert again.code == 0 and len(ran_documents) == 5
    other = store("--boundaries", "2")
    assert other.code == 2 and "boundaries: stored 1, wanted 2" in other.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--boundaries", "1,3"], "no layer boundary 3: expected 0..2"),
        (["--boundaries", "two"], "--boundaries takes numbers"),
        ([], "a target of 2 layers has too few"),
        (["--kind", "dflsh"], "unknown kind of head 'dflsh'"),
        (["--kind", "mtp"], "brings no MTP layers"),
        (["--boundaries", "1", "--dtype", "int4"], "bfloat16, float8, float16 or float32, not 'int4'"),
        (["--boundaries", "1", "--batch-tokens", "0"], "must be above 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    store: Callable[..., Ran], tmp_path: Path, arguments: list[str], message: str
) -> None:
    ran = store(*arguments)
    assert ran.code == 2 and message in ran.err and not (tmp_path / "features").exists()


def test_data_that_is_not_there_or_of_another_tokenizer_is_refused(
    forerun: Forerun, store: Callable[..., Ran], checkpoint: Path, prepared: Path, tmp_path: Path
) -> None:
    ran = forerun("features", "--target", checkpoint, "--data", "nowhere", "--output", tmp_path / "features")
    assert ran.code == 2 and "there is no directory nowhere" in ran.err
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_tokens(["<unheard>"])
    tokenizer.save_pretrained(other)
    ran = store("--boundaries", "1", target=other)
    assert ran.code == 2 and "was prepared with the tokenizer" in ran.err and not (tmp_path / "features").exists()


def test_without_vllm_its_source_is_refused(store: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    ran = store("--boundaries", "1", "--source", "vllm")
    assert ran.code == 2 and "needs the package vllm" in ran.err


def test_a_full_disk_is_foreseen(store: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    ran = store("--boundaries", "1")
    assert ran.code == 2 and "has 100 bytes free" in ran.err and not (tmp_path / "features").exists()
