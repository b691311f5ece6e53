"""Every verb on a tiny model: data on stdout, the rest on stderr, one clear line and exit code 2 for bad input."""

import io
import json
import logging
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import pytest
from cyclopts import App
from transformers import AutoModelForCausalLM

from cli.conftest import Forerun
from forerun import LLM, SamplingParams, SpeculativeConfig
from forerun.cli import Terminated, build_app, console, serve, session
from forerun.drafters import methods
from forerun.engine.drafting import DrafterPool
from forerun.errors import ArgumentError
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
from forerun.heads.medusa import MedusaConfig, MedusaHead
from forerun.plan.assumptions import DEVICES
from forerun.serve.session import Session

PROMPT = "the cat sat on the mat and the cat sat on the"


VALUES = {str: ("ngram", "auto"), Path: (Path("a"), Path("b")), int: (5, 7), float: (5.0, 7.0)}


def verbs(app: App, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    """All verbs of an application that do something, those within others, too."""
    for name in [one for one in app if not one.startswith("-")]:
        if app[name].default_command is not None:
            yield (*names, name), app[name]
        yield from verbs(app[name], (*names, name))


def test_a_target_that_could_be_the_only_word_needs_no_option() -> None:
    """As MODEL of most verbs; where files, a kind or a head come first, it has one."""
    places = {
        names: {one.name: one.index for one in verb.assemble_argument_collection() if one.name != "*"}
        for names, verb in verbs(build_app())
    }
    firsts = {names: [name for name, index in of.items() if index == 0] for names, of in places.items()}
    alone = {names for names, first in firsts.items() if first == ["--target"]}
    assert alone == {("features",), ("data", "draw-prompts"), ("heads",)}
    assert all(first for names, first in firsts.items() if "--target" in places[names])


def test_every_list_option_of_every_verb_takes_a_list() -> None:
    """As in vLLM: ``--api-key k1 k2``."""
    app, tried = build_app(), set[str]()
    for names, verb in verbs(app):
        arguments = verb.assemble_argument_collection()
        required = [one for one in arguments if one.required or one.name == "--target"]  # Of several, one is needed
        needed = [one.name for one in required if one.index is None and one.name != "*"]
        model = ["x" for one in arguments if one.index == 0 or (one.index is not None and one.required)]
        for option in arguments:
            if option.index is None and get_origin(option.hint) is tuple:
                values = VALUES[get_args(option.hint)[0]]
                given = [word for name in needed if name != option.name for word in (name, "x")]
                _, bound, _ = app.parse_args([*names, *model, *given, option.name, *map(str, values)])
                assert repr(values) in repr(bound), (names, option.name)
                tried.add(option.name)
    assert {"--api-key", "--served-model-name", "--stop", "--drafter-option", "--rows", "--engine"} <= tried


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_breaks_no_name_and_has_groups(forerun: Forerun, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    groups = ["Parameters", "Model", "Drafting", "Sampling", "Capacity", "API", "Access", "Network", "Logs"]
    app = build_app()
    for names, verb in verbs(app):
        ran = forerun(*names, "--help")
        words = set(ran.out.split())
        arguments = verb.assemble_argument_collection(default_parameter=app.default_parameter)
        options = [name for one in arguments for name in one.names if name.startswith("--")]
        assert ran.code == 0 and [name for name in options if name not in words] == []
        shown = [title for title in re.findall(r"╭─ (\w+) ─", ran.out) if title not in ("Arguments", "Commands")]
        assert shown == [title for title in groups if title in shown], names
        assert names != ("serve",) or shown == [title for title in groups if title != "Sampling"]


def test_help_of_shared_options_says_what_the_verb_does(forerun: Forerun) -> None:
    said = {
        verb: " ".join(forerun(verb, "--help").out.replace("│", " ").split()) for verb in ("certify", "demo", "plan")
    }
    assert "--dtype STR float32 if not given or auto" in said["certify"]
    assert "auto if not given, suffix for the demo model" in said["demo"] and "Demo model only: let" in said["demo"]
    device = said["plan"].partition("--device STR")[2].partition("--backend")[0]
    assert [name for name in DEVICES if name not in device] == []


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    llm = LLM(checkpoint, max_num_seqs=1)
    return llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]


def test_generate_prints_the_text_and_nothing_else(forerun: Forerun, checkpoint: Path, expected: Any) -> None:
    ran = forerun(
        *("generate", checkpoint, "--raw", "-p", PROMPT, "-t", 0, "-n", 24),
        *("--drafter", "ngram", "--no-adaptive", "--show-draft"),
    )
    assert ran.code == 0 and ran.out == expected.text + "\n"
    assert "tokens per pass" in ran.err and "accepted draft" not in ran.err and "\x1b" not in ran.out + ran.err


def test_loading_says_what_it_does_for_whom(
    forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[str]()

    @contextmanager
    def telling(_beginning: str) -> Iterator[Callable[[str], None]]:
        yield told.append

    monkeypatch.setattr(console, "telling", telling)
    ran = forerun("generate", checkpoint, "-p", PROMPT, "-n", 2)
    assert f"{checkpoint}: float32 on CPU, ready in " in ran.err
    assert any("GB of weights" in one for one in told) and any("checking" in one for one in told)
    count = len(told)
    assert forerun("generate", checkpoint, "-p", PROMPT, "-n", 2, "--json").err == ""
    log = logging.getLogger("forerun.model.prepare")
    assert len(told) == 2 * count and not log.handlers and log.level == logging.NOTSET


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], ["torch", "numpy", "transformers", "pydantic"]),
        (
            ["generate", "MODEL", "-p", PROMPT, "-n", "2"],
            ["numba", "pydantic", "fastapi", "uvicorn", "datasets", "sklearn", "pandas", "gguf"],
        ),
    ],
    ids=["help", "generate"],
)
def test_nothing_is_imported_that_is_not_needed(checkpoint: Path, arguments: list[str], unwanted: list[str]) -> None:
    words = [str(checkpoint) if one == "MODEL" else one for one in arguments]
    code = f"import sys; from forerun.cli import main; assert main({words!r}) == 0; "
    code += f"print([name for name in {unwanted!r} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == "[]", (ran.stdout, ran.stderr)


def test_generate_json_with_every_way_to_name_a_drafter(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path, expected: Any
) -> None:
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 3, "adaptive": False}
    ways: list[list[object]] = [
        ["--speculative-config", json.dumps(config)],
        ["--drafter", "draft_model", "--drafter-model", draft_checkpoint, "-k", 3, "--no-adaptive"],
    ]
    for way in ways:
        words = ("--raw", "-p", PROMPT, "-t", 0, "-n", 24, "--json", "--show-draft")
        ran = forerun("generate", checkpoint, *words, *way)
        answer = json.loads(ran.out)
        assert ran.code == 0 and (answer["text"], answer["token_ids"]) == (expected.text, expected.token_ids)
        assert answer["finish_reason"] == expected.finish_reason
        assert [token["id"] for token in answer["tokens"]] == expected.token_ids
        speculation = answer["speculation"]
        assert speculation["steps"] > 0 and len(speculation["acceptance_per_depth"]) == 3
        assert speculation["mean_acceptance_length"] > 1 and speculation["accepted"] <= speculation["drafted"]


@pytest.mark.parametrize("verb", ["generate", "serve"])
@pytest.mark.parametrize(
    ("words", "adaptive"), [([], True), (["--adaptive"], True), (["--no-adaptive"], False), (["-k", 3], True)]
)
def test_a_drafter_adapts_unless_it_is_told_not_to(
    forerun: Forerun, monkeypatch: pytest.MonkeyPatch, verb: str, words: list[object], adaptive: bool
) -> None:
    asked = list[SpeculativeConfig | None]()

    def load(model: str, speculative: dict[str, Any]) -> NoReturn:
        asked.append(SpeculativeConfig.parse(speculative))
        raise ArgumentError("nothing is loaded here")

    monkeypatch.setattr(session, "load", lambda model, _, speculative, **more: load(model, speculative))
    monkeypatch.setattr("forerun.serve.logs.configure_logging", lambda settings: None)
    monkeypatch.setattr(serve, "_load", lambda model, _, options: load(model, options["speculative_config"]))
    more = ["-p", PROMPT] if verb == "generate" else ["--port", 0]
    assert forerun(verb, "demo", *more, "--drafter", "ngram", *words).code in (1, 2)
    (config,) = asked
    assert config is not None and config.adaptive is adaptive


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["Qwen/Qwen3-0.6B"], "Qwen/Qwen3-0.6B"),
        (["demo"], "demo"),
        (["here/model/"], "model"),
        (["here/tiny.Q4_1.gguf"], "tiny.Q4_1"),
        (["here/model", "--served-model-name", "mine", "--served-model-name", "ours"], "mine"),
    ],
)
def test_a_model_is_served_under_the_name_that_clients_know(
    forerun: Forerun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], name: str
) -> None:
    """Several, and always the path that the server was started with, and the name of the folder or of the file."""
    served, names = list[str](), list[str]()

    def run(session: Session, **_: object) -> int:
        served.append(session.settings.model_name)
        names.extend(session.names)
        return 0

    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    (tmp_path / "here" / "model" / "config.json").write_text("{}")
    (tmp_path / "here" / "tiny.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("forerun.serve.logs.configure_logging", lambda settings: None)
    monkeypatch.setattr("forerun.serve.server.run", run)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda *_, **__: None)  # The hub has it
    assert forerun("serve", *words, "--port", 0).code == 0 and served == [name]
    path = Path(words[0])
    own = [path.stem, *([path.name] if path.suffix == ".gguf" else [])] if "here" in words[0] else [name]
    assert names == list(dict.fromkeys([*words[2::2], *own, words[0]]))


def test_generate_reads_pipe_and_chat_template(
    forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    plain = forerun("generate", checkpoint, "--raw", "-t", 0, "-n", 8, "--json")
    chat = forerun("generate", checkpoint, "-p", PROMPT, "-t", 0, "-n", 8, "--json")
    llm = LLM(checkpoint, max_num_seqs=1)
    talk = llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=8))[0].outputs[0]
    assert json.loads(chat.out)["token_ids"] == talk.token_ids != json.loads(plain.out)["token_ids"]


def test_a_lossy_rule_is_called_lossy(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    """Medusa's typical acceptance, which nobody gets who does not ask for it."""
    lm = AutoModelForCausalLM.from_pretrained(checkpoint)
    head = MedusaHead.initial(lm, MedusaConfig.for_target("medusa", lm, options={"num_heads": 2}))
    write_head(HeadCheckpoint.of(head), tmp_path / "head", "medusa", TargetFacts.of(lm.config, checkpoint))
    drafter = ("--drafter", "medusa", "--drafter-model", tmp_path / "head", "-t", 0.8, "--max-tokens", 8, "--seed", 1)
    for rule, told in (("typical", True), ("sample_walk", False)):
        ran = forerun("generate", checkpoint, "-p", PROMPT, *drafter, "--no-adaptive", "--rule", rule)
        assert ran.code == 0, ran.err
        assert ("the rule typical is LOSSY" in ran.err, "LOSSY rule typical" in ran.err) == (told, told)


def test_debug_shows_the_traceback(forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_DEBUG", "1")
    with pytest.raises(ValueError, match="temperature"):
        forerun("generate", checkpoint, "-p", "x", "-t", -1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_in_a_stream_are_clean_ends(
    number: signal.Signals, forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LLM.stream

    def interrupted(self: LLM, *arguments: Any, **options: Any) -> Iterator[Any]:
        chunks = whole(self, *arguments, **options)
        yield next(chunks)
        signal.raise_signal(number)

    monkeypatch.setattr(LLM, "stream", interrupted)
    former = signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell starts background jobs without it
    try:
        ran = forerun("generate", checkpoint, "-p", PROMPT, "-t", 0)
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert ran.code == 130 and ran.out.endswith("\n") and "Traceback" not in ran.err
    assert ran.err.endswith("stopped before it was done\n") and signal.getsignal(signal.SIGTERM) is former


def test_drafters_json_is_the_registry(forerun: Forerun) -> None:
    listed = json.loads(forerun("drafters", "--json").out)
    assert [entry["name"] for entry in listed] == list(methods())
    assert all(set(entry) >= {"name", "needs_training", "summary"} for entry in listed)
    table = forerun("drafters").out
    assert all(name in table for name in methods()) and "lossless" not in table


def test_doctor(forerun: Forerun) -> None:
    found = json.loads(forerun("doctor", "--json").out)
    assert found["packages"]["torch"] and found["memory"]["total GiB"] > 0 and found["number formats"]["float32"]
    assert "transformers" in forerun("doctor").out


def test_chat(forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        *("/help", "the cat", "/spec on", "/drafter ngrm", "/drafter ollama:x", "/drafter ngram", "the dog"),
        *("/spec off", "/stats"),
        *("/reset", "/stat", "/system Be brief.", "/temperature 0.5", "/temperature warm", "/quit"),
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    ran = forerun("chat", checkpoint, "-t", 0, "-n", 6)
    llm = LLM(checkpoint, max_num_seqs=1)
    [first] = llm.chat([{"role": "user", "content": "the cat"}], SamplingParams(temperature=0, max_tokens=6))
    assert ran.code == 0 and ran.out.startswith(first.outputs[0].text + "\n")
    told = [
        *("/drafter NAME", "no drafter yet", "Did you mean 'ngram'?", "Ollama keeps no model 'x:latest'"),
        *("drafting with ngram", "2 completions"),
        *(
            "forgotten",
            "mean '/stats'",
            "another system message",
            "sampling: temperature 0.5",
            "0 for greedy, got 'warm'",
        ),
    ]
    assert [words for words in told if words not in ran.err] == []


def test_ctrl_c_in_a_chat_stops_what_runs_and_twice_at_the_prompt_leaves(
    forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed: list[str | KeyboardInterrupt] = [KeyboardInterrupt(), "/drafter ngram", "hi", "/stats"]

    def ask(*_: object) -> str:
        line = typed.pop(0)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rich.console.Console.input", ask)
    monkeypatch.setattr(DrafterPool, "ensure", lambda _, config: None if config is None else interrupted())
    monkeypatch.setattr(LLM, "stream_chat", interrupted)
    typed += [KeyboardInterrupt(), KeyboardInterrupt()]
    ran = forerun("chat", checkpoint)
    assert ran.code == 0 and not typed
    assert ran.err.count("so does Ctrl-C once more") == 2 and ran.err.count("nothing of it is kept") == 2
    assert "0 completions" in ran.err
    typed += [Terminated()]
    assert forerun("chat", checkpoint).code == 130


def test_a_file_of_prompts_gives_a_line_each(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    asked = [{"prompt": "the cat"}, {"messages": [{"role": "user", "content": "the dog"}]}]
    file.write_text("\n".join(map(json.dumps, asked)))
    words = ("generate", checkpoint, "--json", "-t", 0, "-n", 3)
    ran = forerun(*words, "--prompt-file", file)
    assert ran.code == 0, ran.err
    alone = forerun(*words, "-p", "the dog")
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert len(answers) == 2 and answers[1]["token_ids"] == json.loads(alone.out)["token_ids"]


CONFIGURED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}


@pytest.mark.parametrize(
    ("configured", "words", "said"),
    [
        ({}, [], "sampling: temperature 1, since the checkpoint has none (-t 0 is greedy)"),
        (CONFIGURED, [], "sampling: temperature 0.6, top_p 0.9, top_k 20 from its generation_config.json"),
        (CONFIGURED, ["-t", 0.7], "sampling: temperature 0.7; top_p 0.9, top_k 20 from its generation_config.json"),
        (CONFIGURED, ["-t", 0], "greedy (temperature 0)"),
        ({}, ["--top-p", 0.5, "-t", 1], "sampling: temperature 1, top_p 0.5"),
    ],
)
def test_a_line_says_how_the_model_is_asked(
    forerun: Forerun, checkpoint: Path, tmp_path: Path, configured: dict[str, Any], words: list[Any], said: str
) -> None:
    """With or without its template, and with which sampling by whose wish; the words of one test of the class."""
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    file = model / "generation_config.json"
    ends = json.loads(file.read_text())["eos_token_id"] if file.exists() else None
    file.write_text(json.dumps({"eos_token_id": ends, **configured}))
    ran = forerun("generate", model, "-p", PROMPT, "-n", 2, *words)
    assert ran.code == 0, ran.err
    assert f"the prompt is a user's message in the chat template (--raw: as it stands); {said}" in ran.err
    if not configured:
        raw = forerun("generate", model, "-p", PROMPT, "-n", 2, "--raw", *words)
        assert f"the prompt is continued as it stands; {said}" in raw.err
