"""What a step will cost: the calibrated figures, corrected by what the steps themselves were seen to cost.

Knows no clock: times are handed in.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import overload

from forerun.engine.controller.correction import Correction
from forerun.engine.controller.filling import Filling, Packed
from forerun.engine.cost import DraftCost, PassCost

_WINDOW = 24
"""Steps whose host work is kept."""
_CONTEXT_STEP = 256
"""Predictions are renewed when the context grows into the next multiple of this, tokens."""
_MOST_PREDICTIONS = 8192
"""Predictions kept before all are worked out anew."""
READING = 32
"""Tokens that a row's drafter may not have been shown yet and still catch up with in passing."""
COPY = DraftCost(fixed_ms=0.02, level_ms=0.0)
"""First guess for a drafter that looks things up."""


class Nominal:
    """A pass cost for where none could be measured: memory-bound, a node more costs little. Arbitrary unit.

    Ratios seen while running turn it into milliseconds.
    """

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass in units of one of a single node."""
        return 1.0 + 0.04 * (nodes * rows - 1)


class Times(Sequence[float]):
    """Entry s: a step with a pass of size s, ms; worked out when it is asked for."""

    def __init__(self, length: int, time: Callable[[int], float]) -> None:
        self._length, self._time = length, time
        self._known: dict[int, float] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, size: int) -> float: ...
    @overload
    def __getitem__(self, size: slice) -> list[float]: ...
    def __getitem__(self, size: int | slice) -> float | list[float]:
        if isinstance(size, slice):
            return [self[index] for index in range(*size.indices(self._length))]
        if not 0 <= size < self._length:
            raise IndexError(size)
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = self._time(size)
        return found


class StepCosts:
    """Times of passes and drafts in ms, for the sizes a controller weighs.

    Args:
        passes: what passes cost, over as many nodes in each row.
        drafts: what is known of drafters.
        filling: what size of a pass nodes of several rows make up.
    """

    def __init__(
        self, passes: PassCost, drafts: Mapping[str, DraftCost] | None = None, filling: Filling | None = None
    ) -> None:
        self._passes, self._drafts = passes, dict(drafts or {})
        self.filling = filling or Packed()
        self._predictions: dict[tuple[int, int, int], float] = {}
        self._pass, self._draft = Correction(), defaultdict[str, Correction](Correction)
        self._overheads: deque[float] = deque(maxlen=_WINDOW)
        self._readings = dict[str, deque[float]]()
        self.overhead_ms = 0.0
        """Host work of a step in which no drafter that costs a forward pass took part."""

    def expect(self, key: str, cost: DraftCost) -> None:
        """A first guess of a drafter's cost, where it was not calibrated."""
        self._drafts.setdefault(key, cost)

    def times(self, rows: int, context: int, nodes: int) -> Times:
        """Entry s: a pass of size s over `rows` rows of up to `nodes` drafted nodes each, and the step's host work."""

        def time(size: int) -> float:
            return self._predicted(size, rows, context) * self._pass.factor(_kind(size, rows)) + self.overhead_ms

        return Times(self.filling.most(rows, nodes) + 1, time)

    def draft_ms(self, key: str, depth: int, rows: int) -> float:
        """A proposal down to `depth` by a drafter in a step of `rows` rows that it knows the text of."""
        return self._proposal(key, depth, rows) * self._draft[key].factor((depth, rows))

    def reading_ms(self, key: str, tokens: int) -> float:
        """A drafter's first look at so many tokens; 0 while that has never been seen."""
        seen = self._readings.get(key)
        return tokens * median(seen) if seen and tokens >= READING else 0.0

    def saw_pass(self, size: int, rows: int, context: int, ms: float) -> None:
        """A pass of this size over `rows` rows, and its verification, took this long."""
        self._pass.add(_kind(size, rows), ms, self._predicted(size, rows, context))

    def saw_draft(self, key: str, depth: int, rows: int, ms: float, *, unread: int = 0) -> None:
        """A step's host work and the proposal of one drafter took this long, `unread` tokens being read before it."""
        own = ms - self.overhead_ms
        if unread >= READING:
            reading = max(0.0, own - self.draft_ms(key, depth, rows)) / unread
            self._readings.setdefault(key, deque(maxlen=_WINDOW)).append(reading)
        else:
            self._draft[key].add((depth, rows), own, self._proposal(key, depth, rows))

    def saw_overhead(self, ms: float) -> None:
        """A step's host work took this long, no drafter that costs a forward pass being among it."""
        self._overheads.append(ms)
        self.overhead_ms = median(self._overheads)

    def _proposal(self, key: str, depth: int, rows: int) -> float:
        """As calibrated on one row, growing with the rows as the target's pass does."""
        growth = self._predicted(0, rows, 0) / self._predicted(0, 1, 0) if rows > 1 else 1.0
        return self._drafts[key].ms(depth) * growth

    def _predicted(self, size: int, rows: int, context: int) -> float:
        place = size, rows, context // _CONTEXT_STEP
        found = self._predictions.get(place)
        if found is None:
            if len(self._predictions) > _MOST_PREDICTIONS:
                self._predictions.clear()
            found = self._predictions[place] = self._even(self.filling.nodes(size, rows), rows, place[2])
        return found

    def _even(self, nodes: float, rows: int, contexts: int) -> float:
        """A pass in which every row has that many drafted nodes; parts of one are interpolated."""
        whole, context = int(nodes), contexts * _CONTEXT_STEP
        below = self._passes.pass_ms(whole + 1, rows, context)
        if nodes == whole:
            return below
        return below + (nodes - whole) * (self._passes.pass_ms(whole + 2, rows, context) - below)


def _kind(size: int, rows: int) -> tuple[int, int]:
    """What passes are corrected alike: of about as many rows, and of about the same size, in steps of an eighth."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift, rows if rows < 4 else 2 ** rows.bit_length()
