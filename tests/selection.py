"""What `make test` runs of many cases that are alike: one of each kind. `make test-slow` runs the others."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def slow(*values: Any) -> list[Any]:
    """As parameters of slow tests."""
    return [pytest.param(*(value if isinstance(value, tuple) else [value]), marks=pytest.mark.slow) for value in values]


def one_of_each(values: Iterable[T], kind: Callable[[T], Hashable], turn: int = 0) -> list[Any]:
    """All values as parameters, slow but for one of each kind. Which one is the `turn`: tests that look at other things
    take others, so that most values are met by some."""
    listed = list(values)
    many, seen, found = Counter(map(kind, listed)), Counter[Hashable](), list[Any]()
    for value in listed:
        own = kind(value)
        found += [pytest.param(value)] if seen[own] == turn % many[own] else slow(value)
        seen[own] += 1
    return found


def in_turn(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """Each value with one of the others, which take turns, as parameters; with the rest it is slow."""
    return [
        (value, other) if place % len(others) == number else slow((value, other))[0]
        for place, value in enumerate(values)
        for number, other in enumerate(others)
    ]


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """All values as parameters, slow but for each `count`-th."""
    return [value if place % count == 0 else slow(value)[0] for place, value in enumerate(values)]
