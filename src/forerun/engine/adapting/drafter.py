"""A drafter whose weights change between steps: passes every call on, exchanges weights, collects
examples, watches acceptance.

All of it runs in the engine's thread but `offer`. Key-value caches are left as they are when weights change: the keys
of running rows are then those of the former weights, which can cost a little acceptance until the answer ends, where
running all contexts again would cost every running answer a pause at once. What is drafted from them is recorded with
the distribution that it was drawn from like any draft, so answers cannot tell. A row that outlives its answer, as a
reused prefix does, is computed anew: one that serves for weeks would else stay what the first weights made. A draft
model does so when the row is cut; for a head, which needs the target's states, the engine reads it again (`outdated`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from forerun.core.sampling import Sampler
from forerun.core.scores import Scores
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter
from forerun.engine.adapting.learning import Throttle
from forerun.engine.adapting.replay import Collector
from forerun.model.kernels.packing import Weights, exchange
from forerun.types import Boundary, Budget, DraftKind, Source, Verdict

log = logging.getLogger(__name__)

WINDOW = 2000  # Verified drafted tokens that speak for the weights before a swap
LOOKS = (250, 500, 1000)
"""Verified drafted tokens after a swap at which acceptance is compared; after the last one the swap
stays.
"""
LEAST_BEFORE = 100  # Fewer verified tokens before a swap can tell nothing about it
SIGNIFICANT = 3.0
"""Standard errors by which acceptance must have fallen. Tokens of an answer are not independent,
hence so many.
"""


class AdaptedDrafter(Drafter):
    """A wrapper around a drafter that learns while it serves, put on once the drafter has said what
    it needs.
    """

    name = "adapted"

    def __init__(self, drafter: Drafter, collector: Collector, throttle: Throttle) -> None:
        self.drafter, self._collector, self._throttle = drafter, collector, throttle
        self.watch = Watch()
        self.swaps = 0  # Times that offered weights were taken
        self.rollbacks = 0  # Times that the former ones came back
        self.failed = False  # Collecting raised; the drafter goes on with the weights that it has
        self._offered: Weights | None = None
        self._former: Weights | None = None
        self._changes = 0
        self._read_under: dict[int, int] = {}

    @property
    def observes(self) -> frozenset[Boundary]:
        return self._collector.boundaries

    @property
    def outdated(self) -> frozenset[int]:
        return frozenset(row for row, changes in self._read_under.items() if changes != self._changes)

    def kind(self, sampler: Sampler) -> DraftKind:
        return self.drafter.kind(sampler)

    def memory_bytes(self) -> int:
        return self.drafter.memory_bytes()

    @property
    def settled(self) -> bool:
        """True if nothing is offered, and nothing that was taken is still being watched."""
        return self._offered is None and not self.watch.pending

    def offer(self, weights: Weights) -> None:
        """Offer weights to take before the next proposal. From any thread, one offer at a time."""
        assert self._offered is None, "the last offer was not taken yet"
        self._offered = weights

    @property
    def waiting(self) -> bool:
        """True if an offer was not taken yet."""
        return self._offered is not None

    def extend(self, context: DraftContext) -> None:
        for row in context.rows:
            self._read_under.setdefault(row, self._changes)
        self._collecting(context, self._collector.extend)
        self.drafter.extend(context)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        if self._offered is not None:
            self._take(self._offered)
        return self.drafter.propose(context, budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.drafter.observe(context, verdicts, scores)
        if self.watch.saw(verdicts):
            self._roll_back()
        chosen = dict(zip(context.rows, verdicts, strict=True))
        self._collecting(context, lambda part: self._collector.observe(part, [chosen[row] for row in part.rows]))

    def _collecting(self, context: DraftContext, collect: Callable[[DraftContext], None]) -> None:
        """Collect from the rows that may be learned from; an error ends collecting."""
        indices = [index for index, adapt in enumerate(context.adapt or [True] * len(context.rows)) if adapt]
        if self.failed or not indices:
            return
        try:
            with self._throttle.paced():
                collect(context.of(indices))
        except Exception as error:
            self.failed = True
            log.warning("adaptation stopped, drafting goes on: what a step taught could not be written down: %r", error)
            log.debug("adaptation", exc_info=True)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self._collector.close(rows)
        outdated = self.outdated
        kept = [0 if row in outdated else length for row, length in zip(rows, lengths, strict=True)]
        for row, length in zip(rows, kept, strict=True):
            if length == 0:
                self._read_under.pop(row, None)
        self.drafter.truncate(rows, kept)

    def _take(self, offered: Weights) -> None:
        self._former = exchange(offered)
        self.swaps, self._changes = self.swaps + 1, self._changes + 1
        self.watch.swapped()
        self._offered = None

    def _roll_back(self) -> None:
        assert self._former is not None, "only a swap is watched"
        exchange(self._former)
        self._former, self._changes = None, self._changes + 1
        self.rollbacks += 1
        self.watch.rolled_back()  # last: whoever sees that nothing is watched must see the rollback too
        log.warning("adaptation: acceptance fell after a swap; the former weights of the drafter are back")


class Watch:
    """Watches whether drafts are really accepted as often since the last swap as before it. A
    draft's tokens behind its first rejected one are not verified.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque()
        self._accepted = self._verified = self._looks = 0
        self._before: tuple[int, int] | None = None
        self._after = (0, 0)

    @property
    def acceptance(self) -> float:
        """Share of verified tokens that were accepted, over the last `WINDOW` under the same
        weights; 0 of none.
        """
        return self._accepted / self._verified if self._verified else 0.0

    @property
    def pending(self) -> bool:
        """True if a swap is being watched."""
        return self._before is not None

    def saw(self, verdicts: Sequence[Verdict]) -> bool:
        """Count a step. Returns True if acceptance fell: the former weights must come back, and
        `rolled_back` be called.
        """
        accepted = sum(len(verdict.path) + (verdict.kind is Source.DRAFT) for verdict in verdicts)
        verified = accepted + sum(verdict.kind is Source.RECOVERED for verdict in verdicts)
        self._recent.append((accepted, verified))
        self._accepted, self._verified = self._accepted + accepted, self._verified + verified
        while self._verified - self._recent[0][1] >= WINDOW:
            oldest = self._recent.popleft()
            self._accepted, self._verified = self._accepted - oldest[0], self._verified - oldest[1]
        if self._before is None:
            return False
        self._after = (self._after[0] + accepted, self._after[1] + verified)
        if self._after[1] < LOOKS[self._looks]:
            return False
        self._looks += 1
        worse = has_fallen(self._before, self._after)
        if self._looks == len(LOOKS) and not worse:
            self._before = None
        return worse

    def swapped(self) -> None:
        """Begin to watch new weights, if there is something to compare them with."""
        self._begin((self._accepted, self._verified) if self._verified >= LEAST_BEFORE else None)

    def rolled_back(self) -> None:
        """Begin anew with the former weights, which need not prove themselves."""
        self._begin(None)

    def _begin(self, before: tuple[int, int] | None) -> None:
        self._recent.clear()
        self._accepted = self._verified = self._looks = 0
        self._before, self._after = before, (0, 0)


def has_fallen(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Return whether the second share (count, of) is significantly below the first: two
    proportions, pooled variance.
    """
    pooled = (before[0] + after[0]) / (before[1] + after[1])
    error = math.sqrt(pooled * (1 - pooled) * (1 / before[1] + 1 / after[1]))
    return after[0] / after[1] < before[0] / before[1] - SIGNIFICANT * error
