"""How much copying drafters are asked for follows what is taken of it."""

from __future__ import annotations

from forerun.engine.controller.asking import Reach


def test_a_row_that_takes_all_is_offered_twice_as_many() -> None:
    reach, asked = Reach(), list[int]()
    for _ in range(4):
        asked.append(reach.nodes())
        reach.took(reach.nodes())
    assert asked == [16, 32, 64, 128]


def test_it_comes_down_slowly_and_never_below_a_few() -> None:
    reach = Reach()
    reach.took(100)
    for _ in range(10):
        reach.took(0)
    assert 100 < reach.nodes() < 200
    for _ in range(100):
        reach.took(0)
    assert reach.nodes() == 16
