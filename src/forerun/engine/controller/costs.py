"""What a step will cost: the calibrated figures, corrected by what the steps themselves were seen to cost.

Medians of recent ratios between seen and predicted, so a garbage collection or a prompt that was caught up with moves
nothing. Knows no clock: times are handed in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from statistics import median

from forerun.engine.cost import DraftCost, PassCost

_WINDOW = 12
"""Ratios kept of each size."""
_STALE = 512
"""Additions after which a ratio no longer counts."""
_POOLED_WEIGHT = 3.0
"""Observations that the ratio of all sizes together is worth to one size."""
_CONTEXT_STEP = 256
"""Predictions are renewed when the context grows into the next multiple of this, tokens."""
_LEAST_MS = 1e-3
COPY = DraftCost(fixed_ms=0.02, level_ms=0.0)
"""First guess for a drafter that looks things up."""


class Nominal:
    """A pass cost for where none could be measured: memory-bound, a node more costs little. Arbitrary unit.

    Ratios seen while running turn it into milliseconds.
    """

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass in units of one of a single node."""
        return 1.0 + 0.04 * (nodes * rows - 1)


class Correction:
    """Seen over predicted, by size, leaning on all sizes together while a size has been seen seldom."""

    def __init__(self) -> None:
        self._pooled: deque[float] = deque(maxlen=2 * _WINDOW)
        self._sizes: dict[Hashable, deque[tuple[int, float]]] = {}
        self._ratios: dict[Hashable, float] = {}
        self._count = 0
        self.pooled = 1.0
        """The ratio of sizes that were never seen."""

    def add(self, size: Hashable, seen: float, predicted: float) -> None:
        """Take in one figure; both above 0."""
        self._count += 1
        ratio = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS)
        self._pooled.append(ratio)
        self.pooled = median(self._pooled)
        own = self._sizes.setdefault(size, deque(maxlen=_WINDOW))
        own.append((self._count, ratio))
        while own[0][0] < self._count - _STALE:
            own.popleft()
        middle = median(ratio for _, ratio in own)
        self._ratios[size] = (len(own) * middle + _POOLED_WEIGHT * self.pooled) / (len(own) + _POOLED_WEIGHT)

    def ratio(self, size: Hashable) -> float:
        """To multiply a prediction with."""
        return self._ratios.get(size, self.pooled)


class StepCosts:
    """Times of passes and drafts in ms, for the sizes a controller weighs."""

    def __init__(self, passes: PassCost, drafts: Mapping[str, DraftCost] | None = None) -> None:
        self._passes, self._drafts = passes, dict(drafts or {})
        self._tables: dict[tuple[int, int], list[float]] = {}
        self._pass, self._draft = Correction(), dict[str, Correction]()
        self._overheads: deque[float] = deque(maxlen=2 * _WINDOW)
        self.overhead_ms = 0.0
        """Host work of a step in which no drafter that costs a forward pass took part."""

    def expect(self, key: str, cost: DraftCost) -> None:
        """A first guess of a drafter's cost, where it was not calibrated."""
        self._drafts.setdefault(key, cost)

    def times(self, rows: int, context: int, most: int) -> list[float]:
        """Entry n, n = 0 .. `most`: a pass over n drafted nodes in each of `rows` rows, and the step's host work."""
        predicted = self._predicted(rows, context, most)
        pooled, overhead, correction = self._pass.pooled, self.overhead_ms, self._pass
        found = [time * pooled + overhead for time in predicted[: most + 1]]
        for nodes in range(min(most + 1, len(found))):
            ratio = correction.ratio((nodes, rows))
            if ratio != pooled:
                found[nodes] = predicted[nodes] * ratio + overhead
        return found

    def draft_ms(self, key: str, depth: int) -> float:
        """A proposal down to `depth` by a drafter."""
        correction = self._draft.get(key)
        return self._drafts[key].ms(depth) * (correction.ratio(depth) if correction is not None else 1.0)

    def saw_pass(self, nodes: int, rows: int, context: int, ms: float) -> None:
        """A pass over `nodes` drafted nodes per row, and its verification, took this long."""
        self._pass.add((nodes, rows), ms, self._predicted(rows, context, nodes)[nodes])

    def saw_draft(self, key: str, depth: int, ms: float) -> None:
        """A step's host work and the proposal of one drafter took this long."""
        own = max(_LEAST_MS, ms - self.overhead_ms)
        self._draft.setdefault(key, Correction()).add(depth, own, self._drafts[key].ms(depth))

    def saw_overhead(self, ms: float) -> None:
        """A step's host work took this long, no drafter that costs a forward pass being among it."""
        self._overheads.append(ms)
        self.overhead_ms = median(self._overheads)

    def _predicted(self, rows: int, context: int, most: int) -> list[float]:
        key = rows, context // _CONTEXT_STEP
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > 64:
                self._tables.clear()
            table = self._tables[key] = []
        while len(table) <= most:
            table.append(self._passes.pass_ms(len(table) + 1, rows, key[1] * _CONTEXT_STEP))
        return table
