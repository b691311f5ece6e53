"""The skip set is searched while decoding: SWIFT (arXiv 2410.06916). Knows agreement counts, no model and no tokens.

As in the paper: a fixed share of the sub-layers is skipped, the first and the last layer are kept, candidates are
random except every 25th, which a Gaussian process proposes (upper confidence bound, 2.5 standard deviations); a
candidate is judged over a window of 32 tokens by how often its likeliest token is the target's; the search ends at a
score of .95, after 1000 candidates, or when 300 in a row were no better.

Unlike the paper:
* The paper runs a candidate over the last committed tokens once more, beside decoding. Here a candidate drafts, every
  second step, and is judged at every drafted node, accepted or not, by the scores that verification computes anyway: no
  extra pass and no second set of keys, but while the search goes on half of the drafts come from candidates.
* A candidate that can no longer reach the best is dropped before its window is full.
* The best set's score goes on being measured while it drafts, so a set that was lucky once is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from forerun.drafters.skipping.gaussian import Floats, upper_bound
from forerun.drafters.skipping.search import Space, Trial, propose
from forerun.drafters.skipping.sublayers import SkipSet, evenly, every
from forerun.errors import ArgumentError

SKIP_RATIO = 0.45
WINDOW = 32
PATIENCE = 300
MAX_CANDIDATES = 1000
BAYES_EVERY = 25
GOOD_ENOUGH = 0.95
_KAPPA = 2.5
_MEMORY = 8
"""Windows after which the best set's older counts fade."""


@dataclass(slots=True)
class _Record:
    """How often a set's likeliest token was the target's."""

    skip: SkipSet
    right: float = 0.0
    judged: float = 0.0

    @property
    def score(self) -> float:
        return self.right / self.judged if self.judged else 0.0

    def add(self, right: int, judged: int) -> None:
        self.right += right
        self.judged += judged


def _optimism(mean: Floats, spread: Floats, _best: float) -> Floats:
    return upper_bound(mean, spread, _KAPPA)


class OnlineSearch:
    """Which set drafts the coming step; learns from how it did.

    Args:
        layers: of the model.
        ratio: share of all sub-layers that is skipped, 0..1.
        window: drafted nodes over which a candidate is judged.
        patience: candidates in a row that may fail before the search ends.
        seed: of the proposals.

    Raises:
        ArgumentError: with the first and the last layer kept there are not enough sub-layers to choose from.
    """

    def __init__(
        self, layers: int, ratio: float = SKIP_RATIO, *, window: int = WINDOW, patience: int = PATIENCE, seed: int = 0
    ) -> None:
        allowed = tuple(sublayer for sublayer in every(layers) if 0 < sublayer[0] < layers - 1)
        size = round(ratio * 2 * layers)
        if not 1 <= size < len(allowed):
            raise ArgumentError(
                f"skip_layers: skip_ratio {ratio:g} of {2 * layers} sub-layers is {size}; SWIFT keeps the first and "
                f"the last layer and needs 1 to {len(allowed) - 1} for a model of {layers} layers"
            )
        self.space = Space(allowed=allowed, size=size)
        self.candidates = 0
        """Judged so far."""
        self._window, self._patience = window, patience
        self._propose = partial(propose, self.space, random=np.random.default_rng(seed), acquisition=_optimism)
        self._random = np.random.default_rng(seed + 1)
        self._best = _Record(evenly(allowed, size))
        self._candidate: _Record | None = None
        self._trials: list[Trial] = []
        self._failed = 0
        self._step = 0

    @property
    def best(self) -> SkipSet:
        """The best set so far."""
        return self._best.skip

    @property
    def score(self) -> float:
        """How often its likeliest token was the target's, 0..1."""
        return self._best.score

    @property
    def done(self) -> bool:
        """Whether only the best set is used from now on."""
        found = self._best.judged >= 2 * self._window and self._best.score >= GOOD_ENOUGH
        return found or self.candidates >= MAX_CANDIDATES or self._failed >= self._patience

    def choose(self) -> SkipSet:
        """The set for the coming step: the best one, every second time a candidate."""
        self._step += 1
        if self.done or self._step % 2 or self._best.judged < self._window:
            return self._best.skip
        if self._candidate is None:
            self._candidate = _Record(self._next())
        return self._candidate.skip

    def observe(self, skip: SkipSet, right: int, judged: int) -> None:
        """A step drafted with `skip`: at `right` of `judged` nodes its likeliest token was the target's."""
        if skip == self._best.skip:
            self._best.add(right, judged)
            if self._best.judged > _MEMORY * self._window:
                self._best.right, self._best.judged = self._best.right / 2, self._best.judged / 2
        elif self._candidate is not None and skip == self._candidate.skip:
            self._candidate.add(right, judged)
            self._judge(self._candidate)

    def _judge(self, candidate: _Record) -> None:
        """Settle a candidate once its window is full, or once it cannot win any more."""
        left = max(0.0, self._window - candidate.judged)
        hopeless = (candidate.right + left) / (candidate.judged + left) <= self._best.score
        if left and not hopeless:
            return
        self.candidates += 1
        self._trials.append(Trial(candidate.skip, candidate.score))
        self._candidate = None
        if hopeless:
            self._failed += 1
            return
        self._trials.append(Trial(self._best.skip, self._best.score))
        self._best, self._failed = candidate, 0

    def _next(self) -> SkipSet:
        """A random set, every 25th time one that the trials so far speak for; never the best one itself."""
        found: SkipSet | None = None
        if self._trials and (self.candidates + 1) % BAYES_EVERY == 0:
            found = self._propose(self._trials)
        while found is None or found == self._best.skip:
            found = self.space.random(self._random)
        return found
