"""What is worth training, prompts in every form, and speed-ups with intervals."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig

from forerun.control.costs import CostModel, DraftCost
from forerun.engine.llm import LLM
from forerun.errors import DataError
from forerun.speedup import page, training
from forerun.speedup.compare import (
    PLAIN,
    STANDSTILL_S,
    AnswerTiming,
    PauseDetector,
    SpeedupArm,
    mean_speedup,
    ratio_interval,
    summarise,
    summarise_arm,
)
from forerun.speedup.prompts import read_prompts, split_prompts, take_turns
from forerun.speedup.settings import MIX
from forerun.speedup.training import (
    FreeSpeed,
    HeadChoice,
    HeadShape,
    TrainingBudget,
    TrainingProbe,
    choose_head,
    expected_acceptance,
    forecast_head,
)
from forerun.writing import TokenizerIdentity
from speedup.conftest import Forerun

COST = CostModel(nodes=(1, 64), rows=(1,), contexts=(64,), pass_times_ms=(((10.0, 12.0),),), stairs=False)
SHAPE = HeadShape(kind="eagle3", vocab_size=8192, steps=3, parameters=10_000_000, coverage=0.98)
PROBE = TrainingProbe(shape=SHAPE, step_s=1.0, counted=400.0, draft=DraftCost(fixed_ms=0.5, level_ms=0.5))
PLENTY = TrainingBudget(seconds=28_800.0, tokens=2_000_000, target_parameters=135_000_000)
NONE_FREE = {"chat": FreeSpeed(speedup=1.0, share=1.0)}


def chosen(budget: TrainingBudget, free: dict[str, FreeSpeed], *, forced: bool = False) -> HeadChoice:
    shapes = [SHAPE, replace(SHAPE, steps=7), replace(SHAPE, vocab_size=None, parameters=33_000_000, coverage=1.0)]
    return choose_head([forecast_head(one, PROBE, budget, COST, free) for one in shapes], free, budget, forced=forced)


def test_an_untrained_head_is_timed_as_a_trained_one_is_served(
    monkeypatch: pytest.MonkeyPatch, deep_checkpoint: Path
) -> None:
    repacked, timed = [], []
    monkeypatch.setattr(training, "repack", repacked.append)
    monkeypatch.setattr(training, "build_beside", lambda llm, kind, options: options["model"])
    monkeypatch.setattr(training, "measure_draft", lambda target, drafter, text, depth: timed.append(drafter))
    with LLM(deep_checkpoint, max_model_len=64) as llm:
        text = SimpleNamespace(lengths=np.array([3]), document=lambda index: [np.array([1, 2, 3])])
        training._time_drafts(llm, replace(SHAPE, vocab_size=None), text)
    assert timed and timed == repacked


def test_a_long_budget_trains_and_says_what_is_expected() -> None:
    found = chosen(PLENTY, NONE_FREE)
    assert found.train and "draft vocabulary 8,192 tokens" in found.reason and "is expected to have" in found.reason
    record = found.record()
    assert record["expected_speedup"] > 1.5 and record["training_steps"] == pytest.approx(28_800, rel=0.01)


def test_a_budget_too_short_for_any_head() -> None:
    found = chosen(replace(PLENTY, seconds=50.0), NONE_FREE)
    assert not found.train and "the budget is too short for any head: 50 training steps" in found.reason
    assert chosen(replace(PLENTY, seconds=50.0), NONE_FREE, forced=True).train
    assert not chosen(replace(PLENTY, seconds=0.0), NONE_FREE, forced=True).train


def test_nothing_is_trained_where_copying_is_as_good() -> None:
    found = chosen(PLENTY, {"edit": FreeSpeed(speedup=5.0, share=1.0)})
    assert not found.train and "no head is worth its training" in found.reason


def test_a_head_pays_for_the_categories_that_copying_leaves() -> None:
    both = {"edit": FreeSpeed(speedup=5.0, share=1.0), "chat": FreeSpeed(speedup=1.0, share=1.0)}
    assert chosen(PLENTY, both).train


def test_few_answers_are_said_to_be_few() -> None:
    found = chosen(replace(PLENTY, tokens=4_000), {"chat": FreeSpeed(speedup=1.3, share=1.0)})
    assert not found.train and "More prompts help most" in found.reason


def test_more_tokens_are_accepted_more_often() -> None:
    rates = [expected_acceptance(10.0**power) for power in range(10)]
    assert rates == sorted(rates) and rates[0] == 0.0 and rates[-1] < 1


def timing(digest: str, arm: str, seconds: float, *, category: str = "chat", tokens: int = 100) -> AnswerTiming:
    return AnswerTiming(
        **{"digest": digest, "category": category, "arm": arm, "temperature": 0.0, "tokens": tokens},
        **{"passes": tokens // 2 if arm != PLAIN else tokens, "seconds": seconds, "decode_s": seconds, "same": True},
        **{"empty": False, "circle": False},
    )


TIMINGS = [
    timing(f"p{number}", arm, seconds, category="chat" if number % 2 else "code")
    for number in range(10)
    for arm, seconds in ((PLAIN, 2.0), ("suffix", 1.0 + 0.1 * (number % 5)))
]


def test_speedup_and_interval() -> None:
    found = summarise_arm(TIMINGS, "suffix", 0.0)
    assert found is not None and found["prompts"] == 10
    assert found["speedup"] == pytest.approx(20 / 12, abs=1e-3) and found["tokens_per_pass"] == 2.0
    low, high = found["speedup_interval"]
    assert 1.4 < low < found["speedup"] < high < 2.0
    assert found["worst_prompt"] == pytest.approx(2 / 1.4, abs=1e-3) and found["slower_prompts"] == 0


def test_intervals_hold_what_they_promise() -> None:
    """Of ten prompts whose lengths and gains differ, 95 % intervals hold the true speed-up at least 93 times of 100;
    the best of four comparisons, all without a gain, is seldom called sure."""
    rng = np.random.default_rng(1)

    def draw(count: int, gain: float) -> tuple[Any, Any]:
        tokens = rng.integers(16, 129, count).astype(float)
        return (tokens, 0.1 + 0.02 * tokens), (0.1 + 0.02 * tokens * np.exp(-gain - rng.normal(0, 0.3, count)), tokens)

    above, below = draw(1_000_000, 0.2)
    true = above[0].sum() * above[1].sum() / (below[0].sum() * below[1].sum())
    found = [ratio_interval(*draw(10, 0.2)) for _ in range(1000)]
    assert 0.93 <= np.mean([one is not None and one[0] <= true <= one[1] for one in found]) < 0.97
    even = [[ratio_interval(*draw(10, 0.045), 1 - 0.05 / 4) for _ in range(4)] for _ in range(200)]
    assert np.mean([any(one is not None and one[0] > 1 for one in four) for four in even]) < 0.08, "17 % without"


def test_a_winner_needs_ten_prompts_and_more_than_the_best_of_several() -> None:
    arms = [SpeedupArm(name=PLAIN), SpeedupArm(name="suffix", speculative={"method": "suffix"})]
    [figures] = summarise(TIMINGS, arms)["suffix"].values()
    low = figures["all"]["speedup_interval"][0]
    assert figures["all"]["speedup_sure"] == low > 1, "one comparison"
    two = summarise_arm(TIMINGS, "suffix", 0.0, comparisons=2)
    assert two is not None and 1 < two["speedup_sure"] < low
    few = summarise_arm([one for one in TIMINGS if one.digest != "p0"], "suffix", 0.0)
    assert few is not None and few["speedup_interval"] is not None and few["speedup_sure"] is None


def test_few_prompts_have_no_interval_and_none_have_no_figures() -> None:
    found = summarise_arm(TIMINGS[:4], "suffix", 0.0)
    assert found is not None and found["speedup_interval"] is None
    assert summarise_arm(TIMINGS, "suffix", 1.0) is None
    assert summarise_arm([timing("p", arm, 1.0, tokens=1) for arm in (PLAIN, "suffix")], "suffix", 0.0) is None


def test_by_category() -> None:
    figures = summarise(TIMINGS, [SpeedupArm(name=PLAIN), SpeedupArm(name="suffix", speculative={"method": "suffix"})])
    assert set(figures["suffix"]["0"]["categories"]) == {"chat", "code"}
    assert mean_speedup(figures["suffix"]) == pytest.approx(20 / 12, abs=1e-3)


def test_a_process_that_was_stopped_notices_it() -> None:
    with PauseDetector() as still:
        pass
    assert still.longest_s < STANDSTILL_S
    with PauseDetector() as still:
        still._last -= 60  # Nothing ran for a minute
    assert still.longest_s >= 60


@pytest.mark.parametrize(("then", "busy"), [(40.0, True), (90.0, False)])
def test_a_machine_that_had_other_work_is_told_of(then: float, busy: bool) -> None:
    comparison = {
        **{"prompts": 60, "plain_tokens_per_second": then, "empty": 0, "circles": 0, "figures": {}, "over_free": {}},
    }
    said = list(page._certainty({"machine": {"tokens_per_second": 100.0}, "comparison": comparison}))
    assert any("the machine was busy: plain decoding made 40 tokens/s" in one for one in said) is busy


def written(path: Path, *entries: object) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_the_built_in_mix_has_six_categories_and_holds_out_half() -> None:
    prompts, skipped = read_prompts([MIX], template=True)
    assert len(prompts) == 48 and skipped == 0
    assert set(Counter(prompt.category for prompt in prompts).values()) == {8}
    split = split_prompts(prompts)
    assert (len(split.train), len(split.trial), len(split.held_out)) == (20, 4, 24)
    assert set(Counter(prompt.category for prompt in split.held_out).values()) == {4}


def test_the_split_follows_from_the_text_alone(tmp_path: Path) -> None:
    entries = [{"source": f"c{number % 3}", "prompt": f"question {number}"} for number in range(60)]
    one, _ = read_prompts([written(tmp_path / "one.jsonl", *entries)], template=True)
    other, _ = read_prompts([written(tmp_path / "other.jsonl", *reversed(entries), entries[0])], template=True)
    assert take_turns(one) == take_turns(other)
    assert split_prompts(one) == split_prompts(other)
    assert {prompt.category for prompt in one} == {"c0", "c1", "c2"}


def test_answers_are_left_out_and_what_asks_nothing_is_skipped(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    path = written(
        tmp_path / "some.jsonl", asked, {"messages": [{"role": "assistant", "content": "ho"}]}, {"text": "x"}
    )
    prompts, skipped = read_prompts([path], template=True)
    assert skipped == 1 and [prompt.entry for prompt in prompts] == [
        {"messages": [{"role": "user", "content": "hi"}]},
        {"text": "x"},
    ]
    plain, _ = read_prompts([path], template=False)
    assert plain[0].entry == {"text": "hi"}


def test_what_a_server_recorded_keeps_its_answers(tmp_path: Path) -> None:
    line = {"prompt_token_ids": [1, 2], "token_ids": [3, 4], "vocabulary": "v"}
    [prompt], _ = read_prompts([written(tmp_path / "some.jsonl", line)], template=True)
    assert prompt.answered and prompt.entry == line
    assert type(prompt).parse(prompt.line) == prompt


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    prompts, _ = read_prompts([written(tmp_path / "some.jsonl", {"prompt": "a"}, {"prompt": "b"})], template=True)
    with pytest.raises(DataError, match="2 different prompts are too few"):
        split_prompts(prompts)
    with pytest.raises(DataError, match="no entry could be used"):
        read_prompts(
            [written(tmp_path / "none.jsonl", {"messages": [{"role": "assistant", "content": "x"}]})], template=True
        )


@pytest.fixture
def copied(deep_checkpoint: Path, tmp_path: Path) -> Path:
    """The target, to be changed."""
    return Path(shutil.copytree(deep_checkpoint, tmp_path / "copied"))


def test_a_model_that_answers_nothing(forerun: Forerun, copied: Path, questions: Path, tmp_path: Path) -> None:
    """Whatever it says first ends the answer."""
    GenerationConfig(eos_token_id=list(range(200)), pad_token_id=1).save_pretrained(copied)
    out = tmp_path / "out"
    ran = forerun("speedup", copied, "--prompts", questions, "--output", out, "-n", 6, "--json")
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert not found["worth_it"] and not found["trained"] and "nothing is worth it" in found["words"]
    assert (out / "page.html").is_file()


def test_without_a_template_the_text_goes_on(forerun: Forerun, copied: Path, questions: Path, tmp_path: Path) -> None:
    (copied / "chat_template.jinja").unlink()
    ran = forerun("speedup", copied, "--prompts", questions, "--output", tmp_path / "out", "--dry-run")
    assert ran.code == 0 and "the model has no chat template: it goes on with the text of each prompt" in ran.err
    lines = (tmp_path / "out" / "prompts" / "train.jsonl").read_text().splitlines()
    assert lines and all("text" in json.loads(line) for line in lines)


def test_recorded_traffic_needs_no_answers(forerun: Forerun, deep_checkpoint: Path, tmp_path: Path) -> None:
    vocabulary = TokenizerIdentity.of(AutoTokenizer.from_pretrained(deep_checkpoint)).vocabulary
    traffic = tmp_path / "traffic"
    traffic.mkdir()
    said = [
        {"prompt_token_ids": [20 + number, 30], "token_ids": [40, 41, 42], "vocabulary": vocabulary}
        for number in range(6)
    ]
    (traffic / "unnamed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in said))
    ran = forerun(
        "speedup", deep_checkpoint, "--from-traffic", traffic, "--output", tmp_path / "out", "-n", 3, "--json"
    )
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "out" / "answers.json").read_text())["answered"] == 3
