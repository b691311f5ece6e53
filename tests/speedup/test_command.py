"""``forerun speedup`` on a tiny target: from prompts to a page, on from each stage, and where nothing is worth it."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.plan.planner import PlanLine
from forerun.speedup import page as written_page
from forerun.speedup import prompts, run, training
from forerun.speedup.training import HeadChoice, HeadForecast, HeadShape
from speedup.conftest import Forerun

SHAPE = HeadShape(kind="eagle3", vocab_size=64, steps=2, parameters=1000, coverage=0.9)
LINE = PlanLine(k=3, tokens_per_pass=1.5, speedup=1.2, v=1.1, step_ms=10.0)
FORECAST = HeadForecast(shape=SHAPE, training_steps=2, tokens=100.0, acceptance=0.3, line=LINE, speedup=1.2)


@pytest.fixture
def trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is chosen whatever the plan says, and trained for two steps."""
    choice = HeadChoice(best=FORECAST, train=True, reason="a test wants it")
    monkeypatch.setattr(run, "choose_for", lambda *_, **__: (choice, []))
    made = training.make_recipe

    def short(kind: str, values: dict[str, Any]) -> Any:
        settings = {"steps": 2, "learning_rate": 1e-3, "dtype": "float32"}
        evaluation = {**values["evaluation"], "count": 1, "settings": {"max_tokens": 4, "nodes": 4}}
        return made(kind, {**values, "training": settings, "windows": {"length": 64}, "evaluation": evaluation})

    monkeypatch.setattr(training, "make_recipe", short)


@pytest.fixture
def words(deep_checkpoint: Path, questions: Path, tmp_path: Path) -> list[object]:
    """The command on six prompts, with answers of six tokens."""
    output = tmp_path / "out"
    return ["speedup", deep_checkpoint, "--prompts", questions, "--output", output, "-n", 6]


def test_from_a_model_to_a_page_and_on_from_every_stage(
    forerun: Forerun, words: list[object], trains: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stage is stopped once at its beginning; the same command goes on there and does nothing twice."""
    began = list[str]()
    do = run.SpeedupRun._do

    def stop_once(self: run.SpeedupRun, stage: run.SpeedupStage) -> None:
        began.append(stage.name)
        if began.count(stage.name) == 1:
            raise KeyboardInterrupt
        do(self, stage)

    monkeypatch.setattr(run.SpeedupRun, "_do", stop_once)
    for _ in run.STAGES:
        assert forerun(*words).code == 130
    ran = forerun(*words, "--json")
    assert ran.code == 0, ran.err
    assert began == [name for stage in run.STAGES for name in (stage.name, stage.name)]
    [line] = ran.out.splitlines()
    found = json.loads(line)
    assert found["trained"] and found["worth_it"] is (found["drafter"] != "plain")
    assert set(found["serve"]) == {"forerun", "vllm", "sglang", "llamacpp"}
    out = tmp_path / "out"
    assert (out / "head" / "config.json").is_file()
    assert set(json.loads((out / "comparison.json").read_text())["figures"]) >= {"eagle3", "auto + eagle3"}
    page, text = (out / "page.html").read_text(), (out / "page.md").read_text()
    assert page.count("<svg") >= 3 and "http" not in page.replace("http-equiv", "") and "<script" not in page
    for said in ("eagle3", "draw", "tell", "held-out prompts", "A test wants it", "intervals are wide"):
        assert said in page and said in text
    again = forerun(*words)
    assert again.code == 0 and "page:" in again.out and "/8" not in again.err
    _nothing_is_worth_it(forerun, words, out, monkeypatch)
    before = len(began)
    assert forerun(*words, "--budget", "2h", "--kind", "eagle3").code == 0
    assert began[before:] == ["choice", "training", "comparison", "result"]


def _nothing_is_worth_it(forerun: Forerun, words: list[object], out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with another budget, where no drafter helps and no head is expected to: a result, and no error."""
    choice = HeadChoice(best=FORECAST, train=False, reason="no head is worth its training")
    monkeypatch.setattr(run, "choose_for", lambda *_, **__: (choice, []))
    monkeypatch.setattr(written_page, "mean_speedup", lambda figures: 0.5)
    ran = forerun(*words, "--budget", "2h")
    assert ran.code == 0 and "completions that are written stay" in ran.err
    assert "nothing is worth it: with the best, " in ran.out and "and no head was trained" in ran.out
    assert "forerun: forerun serve" in ran.out and "--drafter" not in ran.out.split("vllm:")[0]
    page = (out / "page.html").read_text()
    assert "nothing is worth it here" in page and "No head is worth its training" in page


def test_a_dry_run_measures_and_says_what_would_be_done(forerun: Forerun, words: list[object], tmp_path: Path) -> None:
    ran = forerun(*words, "--dry-run", "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert [one["stage"] for one in found["stages"]] == [stage.name for stage in run.STAGES]
    assert found["minutes"] == pytest.approx(30, abs=1) and [one["done"] for one in found["stages"]][:3] == [
        True,
        True,
        False,
    ]
    assert not (tmp_path / "out" / "answers").exists()
    assert "train it" in forerun(*words, "--dry-run").out


def test_without_prompts_they_are_drawn_from_the_model(
    forerun: Forerun, deep_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run says how long that takes, and does not do it; nothing is learned of the built-in mix."""
    words = ["speedup", deep_checkpoint, "--output", tmp_path / "out", "--dry-run", "--json"]
    stages = json.loads(forerun(*words).out)["stages"]
    assert [(one["minutes"], one["done"]) for one in stages if one["stage"] == "prompts"] == [(1.2, False)]
    monkeypatch.setattr(run, "SETTINGS", replace(run.SETTINGS, most_drawn=12))
    monkeypatch.setattr(run.SpeedupRun, "_share", lambda *_: 0.0)
    assert forerun(*words).code == 0
    found = json.loads((tmp_path / "out" / "prompts.json").read_text())
    assert (found["train"], found["trial"], found["held_out"]) == (5, 1 + 16, 6 + 32)
    assert "12 prompts were drawn from the model itself" in found["notes"][0]
    learned = (tmp_path / "out" / "prompts" / "train.jsonl").read_text().splitlines()
    assert {json.loads(line)["category"] for line in learned} == {"drawn"}


def test_a_full_disk_loses_nothing(
    forerun: Forerun, words: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as full:

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(prompts, "write_file", refuse)
        full.setattr(prompts.AnswerRun, "finish", refuse)
        ran = forerun(*words)
    assert ran.code == 2 and "the disk is full" in ran.err and "the same command goes on there" in ran.err
    out = tmp_path / "out"
    assert (out / "prompts.json").is_file() and not (out / "answers.json").exists()
    assert not [path for path in out.rglob("*partial")]


def test_another_model_or_prompt_is_refused(
    forerun: Forerun, words: list[object], questions: Path, tmp_path: Path
) -> None:
    assert forerun(*words, "--dry-run").code == 0
    questions.write_text(questions.read_text().replace("draw", "show"))
    ran = forerun(*words, "--dry-run")
    assert ran.code == 2 and "holds a run with other settings: prompts was" in ran.err
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    ran = forerun(*words[:4], "--output", tmp_path / "taken")
    assert ran.code == 2 and "is no run of forerun speedup" in ran.err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--budget", "soon"), "--budget is a time such as 30m"),
        (("--prompts", "nowhere.jsonl"), "there is no file nowhere.jsonl"),
        (("--from-traffic", "nowhere"), "holds no recorded traffic"),
        (("--kind", "distill"), "trains something else"),
    ],
)
def test_bad_input(forerun: Forerun, deep_checkpoint: Path, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    ran = forerun("speedup", deep_checkpoint, "--output", tmp_path / "out", *more)
    assert ran.code == 2 and said in ran.err


def test_answers_that_are_empty_or_circular_are_spoken_of() -> None:
    notes = prompts._notes(empty=3, circles=4, total=10)
    assert "30% of the completions are empty" in notes[0] and "40% of the completions end in a circle" in notes[1]
    assert not prompts._notes(empty=0, circles=0, total=10)
