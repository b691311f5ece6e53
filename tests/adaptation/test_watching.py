"""The share of time, and whether acceptance fell."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from forerun.engine.adapting.adaptation import _start_single_threaded
from forerun.engine.adapting.drafter import LOOKS, WINDOW, Watch, has_fallen
from forerun.engine.adapting.learning import Throttle
from forerun.types import Source, Verdict


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_work_stays_within_its_share(share: float) -> None:
    clock, rng = Clock(), random.Random(0)
    throttle = Throttle(share, threading.Event(), now=lambda: clock.now, wait=clock.wait)
    for _ in range(20):
        with throttle.paced() as pause:
            for _ in range(rng.randrange(6)):
                clock.now += rng.random()
                assert pause() is False
                assert throttle.used <= share + 1e-9
        clock.now += rng.choice([0, 0, 30])  # nothing to do for a while earns no credit
    assert throttle.busy > 0


def test_work_of_another_thread_is_paid_for_too() -> None:
    clock = Clock()
    throttle = Throttle(0.25, threading.Event(), now=lambda: clock.now, wait=clock.wait)
    with throttle.paced():
        clock.now += 1
    with throttle.paced() as pause:
        clock.now += 1
        pause()
    assert clock.now == pytest.approx(8) and throttle.busy == pytest.approx(2)


def test_a_rest_ends_when_it_is_time_to_end() -> None:
    ending = threading.Event()
    throttle = Throttle(1e-6, ending)
    threading.Timer(0.05, ending.set).start()
    with throttle.paced() as pause:
        sum(range(100_000))
        assert pause() is True


def step(accepted: int, kind: Source = Source.RECOVERED) -> list[Verdict]:
    return [Verdict(path=tuple(range(1, accepted + 1)), next_token=0, kind=kind)]


def test_what_is_judged() -> None:
    watch = Watch()
    watch.saw([*step(3), *step(2, Source.BONUS), *step(0, Source.TARGET), *step(1, Source.DRAFT)])
    assert watch.acceptance == pytest.approx(7 / 8)  # 3 of 4, 2 of 2, nothing, 1 and the token that ended the answer


def run(before: float, after: float, seed: int) -> bool:
    """A swap between two rates; whether it was found to be worse."""
    watch, rng = Watch(), random.Random(seed)
    for _ in range(WINDOW):
        assert not watch.saw(step(1, Source.BONUS) if rng.random() < before else step(0))
    watch.swapped()
    worse = False
    while watch.pending and not worse:
        worse = watch.saw(step(1, Source.BONUS) if rng.random() < after else step(0))
    if worse:
        watch.rolled_back()
    assert not watch.pending
    return worse


def test_a_fall_is_noticed_and_chance_is_not() -> None:
    assert all(run(0.6, 0.45, seed) for seed in range(20))
    assert sum(run(0.6, 0.6, seed) for seed in range(20)) <= 1
    assert not any(run(0.6, 0.7, seed) for seed in range(20))


def test_two_shares() -> None:
    assert has_fallen((600, 1000), (400, 1000)) and not has_fallen((600, 1000), (590, 1000))
    assert not has_fallen((0, 1000), (0, 1000)) and not has_fallen((10, 10), (9, 10))


def test_nothing_to_compare_with_is_not_watched() -> None:
    watch = Watch()
    watch.saw(step(50))
    watch.swapped()
    assert not watch.pending and watch.acceptance == 0
    assert LOOKS[-1] <= WINDOW


def test_the_thread_has_one_intra_op_thread_and_all_others_keep_theirs() -> None:
    before, found = torch.get_num_threads(), dict[str, int]()
    torch.set_num_threads(3)
    try:
        work = _start_single_threaded(lambda: found.update(own=torch.get_num_threads()), "a test")
        work.join()
        later = threading.Thread(target=lambda: found.update(later=torch.get_num_threads()))
        later.start()
        later.join()
        assert (found["own"], found["later"], torch.get_num_threads()) == (1, 3, 3)
    finally:
        torch.set_num_threads(before)
