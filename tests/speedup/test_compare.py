"""Speed-ups with intervals, from answers with made-up times."""

import pytest

from forerun.speedup import page
from forerun.speedup.compare import (
    PLAIN,
    STANDSTILL_S,
    AnswerTiming,
    PauseDetector,
    SpeedupArm,
    mean_speedup,
    summarise,
    summarise_arm,
)


def timing(digest: str, arm: str, seconds: float, *, category: str = "chat", tokens: int = 100) -> AnswerTiming:
    return AnswerTiming(
        digest=digest,
        category=category,
        arm=arm,
        temperature=0.0,
        tokens=tokens,
        passes=tokens // 2 if arm != PLAIN else tokens,
        seconds=seconds,
        decode_s=seconds,
        same=True,
        empty=False,
        circle=False,
    )


TIMINGS = [
    one
    for number in range(10)
    for one in (
        timing(f"p{number}", PLAIN, 2.0, category="chat" if number % 2 else "code"),
        timing(f"p{number}", "suffix", 1.0 + 0.1 * (number % 5), category="chat" if number % 2 else "code"),
    )
]


def test_speedup_and_interval() -> None:
    found = summarise_arm(TIMINGS, "suffix", 0.0)
    assert found is not None and found["prompts"] == 10
    assert found["speedup"] == pytest.approx(20 / 12, abs=1e-3) and found["tokens_per_pass"] == 2.0
    low, high = found["speedup_interval"]
    assert 1.4 < low < found["speedup"] < high < 2.0
    assert found["worst_prompt"] == pytest.approx(2 / 1.4, abs=1e-3) and found["slower_prompts"] == 0


def test_few_prompts_have_no_interval_and_none_have_no_figures() -> None:
    found = summarise_arm(TIMINGS[:4], "suffix", 0.0)
    assert found is not None and found["speedup_interval"] is None
    assert summarise_arm(TIMINGS, "suffix", 1.0) is None
    assert (
        summarise_arm([timing("p", PLAIN, 1.0, tokens=1), timing("p", "suffix", 1.0, tokens=1)], "suffix", 0.0) is None
    )


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
        "prompts": 60,
        "plain_tokens_per_second": then,
        "empty": 0,
        "circles": 0,
        "figures": {},
        "over_free": {},
    }
    said = list(page._certainty({"machine": {"tokens_per_second": 100.0}, "comparison": comparison}))
    assert any("the machine was busy: plain decoding made 40 tokens/s" in one for one in said) is busy
