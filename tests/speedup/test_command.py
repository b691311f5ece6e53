"""``forerun speedup`` on a tiny target: from prompts to a page, on from each stage, and where nothing is worth it."""

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.cli.speedup import parse_budget
from forerun.errors import ArgumentError
from forerun.plan.planner import PlanLine
from forerun.speedup import page as written_page
from forerun.speedup import prompts, run, training
from forerun.speedup.budget import StageBudget
from forerun.speedup.settings import SpeedupRequest
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
    for stage in run.STAGES:
        stopped = forerun(*words)
        assert stopped.code == 130 and f"stopped in the stage {stage.name!r} ({stage.words})" in stopped.err
        assert "the same command goes on there" in stopped.err
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


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("1h30m", 5400.0), ("1D", 86400.0), ("1h 30m 5s", 5405.0)]
)
def test_a_budget_is_a_time(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("kind", [(), ("--kind", "eagle3")])
def test_a_budget_below_the_least_work_is_refused_with_one_that_would_do(
    forerun: Forerun, words: list[object], kind: tuple[str, ...]
) -> None:
    ran = forerun(*words, *kind, "--budget", "1s")
    assert ran.code == 2 and "--budget 0.0167m is too short: plain decoding makes 95.2 tokens/s here" in ran.err
    assert ("answers" in ran.err) is bool(kind), "without a head nothing is answered"
    [enough] = re.findall(r"Give at least --budget (\d+m)", ran.err)
    assert forerun(*words, *kind, "--budget", enough, "--dry-run").code == 0


def test_seconds_of_an_interrupted_attempt_count(
    forerun: Forerun, words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def stop(self: run.SpeedupRun) -> dict[str, Any]:
        clock[0] += 100.0
        raise KeyboardInterrupt

    stages = [replace(one, work=stop) if one.name == "answers" else one for one in run.STAGES]
    request = SpeedupRequest(
        model=str(words[1]), output=tmp_path / "out", budget_s=1800.0, prompts=(Path(str(words[3])),)
    )
    with monkeypatch.context() as interrupted:
        interrupted.setattr(run, "STAGES", tuple(stages))
        for _ in range(2):
            assert forerun(*words).code == 130
    again = run.SpeedupRun(replace(request, max_tokens=6), lambda: None, None)  # type: ignore[arg-type, return-value]
    assert again.spent() == 200.0 and again._time_for("answers") == pytest.approx(again.allotted()["answers"] - 200)
    planned = {one["stage"]: one["minutes"] * 60 for one in again.plan() if not one["done"]}
    assert sum(planned.values()) == pytest.approx(1800 - 200, abs=5), "what is left is divided"


@pytest.mark.parametrize(("each_s", "counts"), [(10.0, [20, 40, 40]), (500.0, [8, 8, 8])])
def test_trial_prompts_leave_most_of_the_time_to_those_that_are_learned(
    each_s: float, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fifth of 1,000 seconds; a model that is too slow for that completes one row of each part."""
    clock, began = [0.0], list[int]()

    def answer(asked: Any, _llm: object, *, concurrency: int, go_on: Any) -> None:
        began.append(0)
        while go_on():
            began[-1] += 1
            clock[0] += each_s

    monkeypatch.setattr(prompts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(prompts, "_ask", lambda *_: SimpleNamespace(resumed=0, written=0))
    monkeypatch.setattr(prompts, "with_engine", answer)
    some = [prompts.SpeedupPrompt(digest=str(number), category="all", entry={"text": "a"}) for number in range(200)]
    request = SpeedupRequest(model="m", output=tmp_path, budget_s=4000.0)
    parts: dict[str, Any] = {"trial": some, "train": some}
    prompts.answer_prompts(None, parts, tmp_path, request, seconds=1000.0, last_s=each_s, tell=print)  # type: ignore[arg-type]
    assert began == counts


def test_a_slow_model_compares_shorter_completions_within_the_budget(tmp_path: Path) -> None:
    """The stages of any budget above the least add up to it, and what each is to do fits."""
    machine = {"pass_ms": 500.0, "v": [[1, 1.0], [8, 1.3], [64, 2.0]], "seconds": 20.0}
    for budget_s, head in ((1800.0, False), (7200.0, True), (86400.0, True)):
        request = SpeedupRequest(model="m", output=tmp_path, budget_s=budget_s)
        budget = StageBudget.of(machine, request, free_arms=5)
        assert budget.trains is head
        budget.check()
        shares = {stage.name: stage.share for stage in run.STAGES if stage.share and stage.name != "prompts"}
        allotted = budget.allot(shares, head=head)
        rest = (1 - sum(shares.values())) * (budget_s - budget.total(head=head))
        assert sum(allotted.values()) + rest + machine["seconds"] == pytest.approx(budget_s)  # type: ignore[operator]
        count = 10 * (4 if head else 2) * 2
        tokens = budget.tokens_within(allotted["comparison"], count, least=24, most=128)
        assert 24 <= tokens <= 128 and count * (tokens * 0.5 + 2.0) <= allotted["comparison"]
    assert tokens == 128
    with pytest.raises(ArgumentError, match="plain decoding makes 2 tokens/s here, and the least work takes"):
        StageBudget.of(machine, replace(request, budget_s=600.0), free_arms=5).check()


def test_without_prompts_they_are_drawn_from_the_model(
    forerun: Forerun, deep_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run says how long that takes, and does not do it; nothing is learned of the built-in mix."""
    words = ["speedup", deep_checkpoint, "--output", tmp_path / "out", "--dry-run", "--json"]
    stages = json.loads(forerun(*words).out)["stages"]
    assert [(one["minutes"], one["done"]) for one in stages if one["stage"] == "prompts"] == [
        (pytest.approx(1.2, abs=0.1), False)
    ]
    monkeypatch.setattr(run, "SETTINGS", replace(run.SETTINGS, most_drawn=12))
    monkeypatch.setattr(run.SpeedupRun, "_share", lambda *_: 0.0)
    monkeypatch.setattr(run.SpeedupRun, "_time_for", lambda *_: 100.0)
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
        (("--budget", "soon"), "--budget is a time such as 90s, 30m"),
        (("--budget", "1h30"), "--budget is a time such as 90s, 30m"),
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
