"""Searches the subsets of a model's sub-layers for the best one: Bayesian optimisation. Knows values, no model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.drafters.self_drafting.skipping.gaussian import Floats, GaussianProcess, expected_improvement
from forerun.drafters.self_drafting.skipping.sublayers import SkipSet, Sublayer, evenly
from forerun.errors import ArgumentError

Acquisition = Callable[[Floats, Floats, float], Floats]
"""(mean (m,), standard deviation (m,), best value) -> (m,) how much each is worth trying."""

_POOL = 384
"""Random subsets among which the next one is chosen; as many neighbours of the best come on top."""
_ENUMERABLE = 10
"""Up to so many sub-layers every subset is in the pool."""
_REMEMBERED = 300
"""Most trials that the Gaussian process is fitted to: the best half and the latest half."""
_SHARES = (0.25, 0.5, 0.375, 0.125, 0.625)
"""Of the sub-layers, skipped at even distances in the first trials."""
_RANDOM_STARTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Space:
    """Which subsets may be proposed."""

    allowed: tuple[Sublayer, ...]
    """Sub-layers that may be skipped, in order."""
    size: int | None = None
    """How many are skipped; None: any number but none and all."""

    def __post_init__(self) -> None:
        least = 1 if self.size is None else self.size
        if not 1 <= least < len(self.allowed):
            raise ArgumentError(
                f"skip_layers: {least} of {len(self.allowed)} sub-layers that may be skipped leaves nothing to search"
            )

    def vector(self, skip: SkipSet) -> Floats:
        """(d,) of 0 and 1."""
        return np.array([float(sublayer in skip) for sublayer in self.allowed])

    def random(self, random: np.random.Generator) -> SkipSet:
        """Any subset; without a fixed size every size is equally likely."""
        size = int(random.integers(1, len(self.allowed))) if self.size is None else self.size
        return frozenset(self.allowed[place] for place in random.permutation(len(self.allowed))[:size])

    def neighbour(self, skip: SkipSet, random: np.random.Generator) -> SkipSet:
        """One or two sub-layers exchanged; without a fixed size, one added or removed as well."""
        inside, outside = sorted(skip), sorted(set(self.allowed) - skip)
        found = set(skip)
        for _ in range(int(random.integers(1, 3))):
            leave = self.size is not None or random.random() < 2 / 3
            enter = self.size is not None or not leave or random.random() < 0.5
            if leave:
                found.discard(inside[int(random.integers(len(inside)))])
            if enter and outside:
                found.add(outside[int(random.integers(len(outside)))])
        valid = len(found) == self.size if self.size is not None else 0 < len(found) < len(self.allowed)
        return frozenset(found) if valid else skip

    def all(self) -> list[SkipSet]:
        """Every subset, where they are few."""
        sizes = range(1, len(self.allowed)) if self.size is None else [self.size]
        return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(self.allowed, size)]


@dataclass(frozen=True, slots=True)
class Trial:
    """One subset that was valued."""

    skip: SkipSet
    value: float
    """Larger is better."""


def propose(
    space: Space, trials: Sequence[Trial], random: np.random.Generator, acquisition: Acquisition
) -> SkipSet | None:
    """The untried subset that is most worth trying by what a Gaussian process says; None if all were tried."""
    tried = {trial.skip for trial in trials}
    pool = [skip for skip in _pool(space, trials, random) if skip not in tried]
    if not pool:
        return None
    known = _remembered(trials)
    process = GaussianProcess(
        np.stack([space.vector(trial.skip) for trial in known]), np.array([trial.value for trial in known])
    )
    mean, spread = process.predict(np.stack([space.vector(skip) for skip in pool]))
    return pool[int(acquisition(mean, spread, max(trial.value for trial in trials)).argmax())]


class Search:
    """Bayesian optimisation by expected improvement, after a few subsets at even distances and at random."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self.space = space
        self.trials: list[Trial] = []
        self._random = np.random.default_rng(seed)
        self._starts = _starts(space, self._random)

    @property
    def best(self) -> Trial | None:
        """The best so far; None before the first."""
        return max(self.trials, key=lambda trial: trial.value, default=None)

    def ask(self) -> SkipSet | None:
        """What to value next; None if every subset was."""
        if len(self.trials) < len(self._starts):
            return self._starts[len(self.trials)]
        return propose(self.space, self.trials, self._random, expected_improvement)

    def tell(self, skip: SkipSet, value: float) -> None:
        """A subset's value."""
        self.trials.append(Trial(skip, value))


def _starts(space: Space, random: np.random.Generator) -> list[SkipSet]:
    count = len(space.allowed)
    sizes = [space.size] if space.size is not None else [max(1, round(share * count)) for share in _SHARES]
    even = [evenly(space.allowed, size) for size in sizes]
    return list(dict.fromkeys([*even, *(space.random(random) for _ in range(_RANDOM_STARTS))]))


def _pool(space: Space, trials: Sequence[Trial], random: np.random.Generator) -> list[SkipSet]:
    if len(space.allowed) <= _ENUMERABLE:
        return space.all()
    leaders = sorted(trials, key=lambda trial: -trial.value)[:3]
    near = [space.neighbour(leader.skip, random) for leader in leaders for _ in range(_POOL // 3)]
    return list(dict.fromkeys([*near, *(space.random(random) for _ in range(_POOL))]))


def _remembered(trials: Sequence[Trial]) -> list[Trial]:
    if len(trials) <= _REMEMBERED:
        return list(trials)
    latest = list(trials[-_REMEMBERED // 2 :])
    return sorted(trials[: -_REMEMBERED // 2], key=lambda trial: -trial.value)[: _REMEMBERED // 2] + latest
