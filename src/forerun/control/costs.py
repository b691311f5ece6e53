"""The cost of a target's pass, of a drafter's proposal, and of a step that is predicted from both.

`CostModel` holds the measured time T(n) of a pass over n nodes, by rows and context, and `DraftCost` a drafter's fixed
cost and its cost per draft depth. The planner reads them, too; ``v(n) = T(n) / T(1)`` is the cost of a pass relative to
one over a single node (docs/planning.md). `StepCosts` predicts the time of a step and corrects it by measured times.
Costs are a staircase; `PassShape` says how the nodes of several rows add up to one size. Imports no torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from statistics import median
from typing import Protocol

from forerun.control.settings import SETTINGS
from forerun.errors import ArgumentError

# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """The cost of one drafter configuration per proposal, in wall time."""

    fixed_ms: float  # Cost at any depth: catching up with the accepted tokens, look-ups, host work; ms
    level_ms: float
    """Cost per draft depth, ms; about 0 for lookup drafters and for those that draft all depths in one pass."""

    def __post_init__(self) -> None:
        if not (self.fixed_ms >= 0 and self.level_ms >= 0):
            raise ArgumentError(f"a drafter's cost cannot be negative, got {self.fixed_ms} and {self.level_ms} ms")

    def ms(self, depth: int) -> float:
        """Return the cost of a proposal down to `depth`, ms."""
        return self.fixed_ms + self.level_ms * depth


FREE = DraftCost(fixed_ms=0.0, level_ms=0.0)


class PassCost(Protocol):
    """The interface of a target's pass costs: measured (`CostModel`), nominal, or from a data sheet."""

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return the wall time of one pass over `nodes` nodes in each of `rows` rows behind
        `context` tokens, ms.
        """


@dataclass(frozen=True)
class Nominal:
    """An assumed pass cost, used until one is measured. Its unit is a plain pass; ratios measured at run time turn it
    into milliseconds.
    """

    slope: float = 0.04  # Cost of each further node, in passes over one node

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        return 1.0 + self.slope * (nodes * rows - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Measured wall time of target passes over a grid of (rows, nodes per row, context)."""

    nodes: tuple[int, ...]  # Scored nodes of a row, root included; rising, the first is 1
    rows: tuple[int, ...]  # Rows of a pass, rising
    contexts: tuple[int, ...]  # Committed tokens of every row, rising
    pass_times_ms: tuple[tuple[tuple[float, ...], ...], ...]
    """Times ``pass_times_ms[context][rows][nodes]`` by index into the three grids; in nodes they
    never fall.
    """
    drafts: dict[str, DraftCost] = field(default_factory=dict)  # Costs of drafters, by `SpeculativeConfig.key`
    stairs: bool = True
    """True: passes are padded up to the next measured size. False: they are not, and costs between
    sizes are interpolated.
    """

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return the wall time of one pass, ms. Sizes between the measured ones are rounded up (`stairs`) or
        interpolated; rows and contexts are interpolated. Above the grid costs grow linearly; if only one row count was
        measured, B rows of N nodes count as B * N nodes. Contexts below the grid cost as much as its first one.
        """
        if nodes < 1 or rows < 1 or context < 0:
            raise ArgumentError(f"a pass has at least one node and one row, got {nodes} nodes, {rows} rows, {context}")
        if len(self.rows) == 1 and rows > self.rows[0]:
            nodes, rows = -(-nodes * rows // self.rows[0]), self.rows[0]
        by_context = [
            along(self.rows, [along(self.nodes, line, nodes, stairs=self.stairs) for line in plane], rows)
            for plane in self.pass_times_ms
        ]
        return along(self.contexts, by_context, context)

    def v(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return ``pass_ms(nodes) / pass_ms(1)`` at the same rows and context."""
        return self.pass_ms(nodes, rows, context) / self.pass_ms(1, rows, context)

    def with_draft(self, key: str, draft: DraftCost) -> CostModel:
        """Return a copy with a drafter's cost added or replaced."""
        return replace(self, drafts={**self.drafts, key: draft})


def along(grid: Sequence[int], values: Sequence[float], where: float, *, stairs: bool = False) -> float:
    """Return the value at `where` on a rising `grid`: the next value up (`stairs`), or interpolated. Below the grid it
    is the first value; above it, a straight line through the last two values, which does not fall.
    """
    index = bisect_left(grid, where)
    if index == 0 or len(grid) == 1:
        return values[0]
    if index == len(grid):
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return values[-1] + max(0.0, slope) * (where - grid[-1])
    share = 1.0 if stairs else (where - grid[index - 1]) / (grid[index] - grid[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


# --- prediction -------------------------------------------------------------------------------------------------------

_CONTEXT_STEP = 256  # Predictions are renewed when the context grows into the next multiple of this, tokens
_LEAST_MS = 1e-3
_STALE = 1024  # Steps after which plain passes are measured again
_LOOKUP_OVERHEAD = 2.0  # First guess of what querying lookup drafters adds to a step, relative to their own time
READING = 32  # From this many new tokens on, more than a step commits, a drafter reads a text: timed separately
TimeKey = tuple[int, int]  # (drafted nodes of a pass or depth of a proposal, rows): what a time is kept under


@dataclass(frozen=True, slots=True)
class PassShape:
    """How the drafted nodes of several rows add up to the size of one pass. If the target computes padding
    (`Target.computes_padding`), the size is the nodes of the widest row, else the nodes of all rows.
    """

    padded: bool = False

    def size(self, counts: Sequence[int]) -> int:
        """Return the size of a pass over `counts` drafted nodes, by row."""
        return max(counts, default=0) if self.padded else sum(counts)

    def size_of_equal_rows(self, rows: int, nodes: int) -> int:
        """Return the size of a pass of `rows` rows in which each has `nodes` drafted nodes."""
        return nodes if self.padded else rows * nodes

    def nodes(self, size: int, rows: int) -> float:
        """Return the drafted nodes that each of `rows` rows would have in a pass of this size."""
        return size if self.padded else size / rows


class Times(dict[int, float]):
    """The time of a step, ms, by the size of its pass, computed on demand: `curve` returns the function from size to
    time. Sizes above `most` have the time of `most`.
    """

    def __init__(self, most: int, curve: Callable[[], Callable[[int], float]]) -> None:
        self.most, self._curve = most, curve
        self._time: Callable[[int], float] | None = None

    def __missing__(self, size: int) -> float:
        if self._time is None:
            self._time = self._curve()
        found = self[size] = self._time(size) if size <= self.most else self[self.most]
        return found


class SeenTimes:
    """Times by size, corrected by the ratios of measured to predicted times.

    * Other processes can only add to a time, often ten times as much. So of the latest ratios of a size the lower
      quartile counts. A new size starts with one ratio as predicted; of old ratios the quartile is kept, as one ratio.
    * A machine's pace changes. So a size that has not been seen of late follows the plain passes: its time is scaled by
      what they have become since.
    * More nodes never make a pass quicker. So a smaller size never counts more than what a larger one was measured at.
    * Between measured sizes times are interpolated along the prediction; above the largest they grow with it.
    """

    def __init__(self) -> None:
        self._ratios = dict[TimeKey, deque[float]]()  # The latest of each (nodes, rows)
        self._low = dict[TimeKey, float]()  # Their lower quartile
        self._first_step, self._latest_step = dict[TimeKey, int](), dict[TimeKey, int]()  # When each was seen
        self._plain_then = dict[TimeKey, float]()  # The lower quartile of plain passes of as many rows at that time
        self._sizes = defaultdict[int, list[int]](list)  # Rising, by rows
        self._latest: TimeKey | None = None
        self.steps = 0  # Decoding steps, whether or not they have a figure

    def add(self, key: TimeKey, seen: float, predict: Callable[[int], float]) -> None:
        """Record one measured time, ms, of `key`: drafted nodes or depth, and rows. `predict` returns the predicted
        time of a number of nodes, or of a depth.
        """
        (nodes, rows), ratios = key, self._ratios.get(key)
        if ratios is None:
            ratios = deque(maxlen=SETTINGS.window)
            if self._ratios:
                ratios.append(self.curve(rows, predict)(nodes) / max(predict(nodes), _LEAST_MS))
            insort(self._sizes[rows], nodes)
            self._ratios[key], self._first_step[key] = ratios, self.steps
        elif not self._fresh(key):
            ratios.clear()
            ratios.append(self._low[key])
        ratios.append(max(seen, _LEAST_MS) / max(predict(nodes), _LEAST_MS))
        self._low[key] = sorted(ratios)[(len(ratios) - 1) // 4]
        self._latest, self._latest_step[key] = key, self.steps
        if (0, rows) in self._low:
            self._plain_then[key] = self._low[0, rows]

    def curve(
        self, rows: int, predict: Callable[[int], float], *, trial: Callable[[int], float] | None = None
    ) -> Callable[[int], float]:
        """Return the time of a pass of `rows` rows, ms, as a function of its nodes. In a trial old measurements of
        passes with nodes are ignored, and `trial` predicts what has none.
        """
        assume = trial or predict
        sizes, times, least = list[int](), list[float](), math.inf
        for nodes in reversed(self._sizes[rows]):
            outdated = trial is not None and nodes > 0 and not self._fresh((nodes, rows))
            if not outdated:
                least = min(least, self._low[nodes, rows] * self._pace((nodes, rows)) * predict(nodes))
                sizes.append(nodes)
                times.append(least)
        if not sizes:  # Passes of other numbers of rows say how fast the machine is
            pace = self._low[self._latest] if self._latest is not None and not trial else 1.0
            return lambda nodes: pace * assume(nodes)
        sizes.reverse()
        times.reverse()

        def time(nodes: int) -> float:
            index = bisect_left(sizes, nodes)
            if index == len(sizes) or (index == 0 and sizes[0] != nodes):
                index = min(index, len(sizes) - 1)
                return times[index] * assume(nodes) / max(assume(sizes[index]), _LEAST_MS)
            if sizes[index] == nodes:
                return times[index]
            low, high = assume(sizes[index - 1]), assume(sizes[index])
            share = (assume(nodes) - low) / (high - low) if high > low else 1.0
            return times[index - 1] + share * (times[index] - times[index - 1])

        return time

    def plain_is_due(self, rows: int, predict: Callable[[int], float]) -> bool:
        """Return whether plain passes of `rows` rows should be measured again: they never were, more steps
        have passed since the last measurement than from the first to the last, or passes with nodes are quicker now, so
        that something must have slowed the plain ones down.
        """
        plain = 0, rows
        if plain not in self._low:
            return True
        measured_for, unseen = self._latest_step[plain] - self._first_step[plain], self.steps - self._latest_step[plain]
        if unseen > min(_STALE, 1 + measured_for):
            return True
        return not self._fresh(plain) and self.curve(rows, predict)(0) < self._low[plain] * predict(0)

    def _pace(self, key: TimeKey) -> float:
        """Return the factor of a size's time: what plain passes take now over what they took when it was last seen."""
        then = self._plain_then.get(key)
        return 1.0 if then is None or self._fresh(key) else self._low[0, key[1]] / then

    def _fresh(self, key: TimeKey) -> bool:
        return self._latest_step[key] > self.steps - SETTINGS.interval


class StepCosts:
    """Predicts the times of passes and drafts, ms, and corrects them by the measured times that it is told.

    Args:
        passes: the cost of passes with equally many nodes in each row.
        drafts: the cost of drafters, calibrated or guessed, by key.
        shape: how the nodes of several rows add up to the size of a pass.
    """

    def __init__(
        self, passes: PassCost, drafts: Mapping[str, DraftCost] | None = None, shape: PassShape = PassShape()
    ) -> None:
        self._drafts, self.shape = dict(drafts or {}), shape
        self._calibrated = lru_cache(maxsize=8192)(
            lambda size, rows, context: passes.pass_ms(1 + shape.nodes(size, rows), rows, context)
        )
        self._pass, self._draft = SeenTimes(), defaultdict[str, SeenTimes](SeenTimes)
        self.passes = defaultdict[tuple[int, int], deque[float]](lambda: deque(maxlen=SETTINGS.window))
        """Latest times of passes, ms, by (context, nodes of all rows, roots and padding included)."""
        self._seen = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=SETTINGS.window))
        """The latest figures under three kinds of keys: "host", a plain step's host work in ms, and "lookup", what
        querying lookup drafters adds to a step relative to their own time (both by the approximate number of rows);
        "reading", the time in ms in which a drafter reads a token, by the drafter's key.
        """

    def times(self, rows: int, context: int, nodes: int, *, trial: bool = False) -> Times:
        """Return, by size, the time of a pass over `rows` rows of up to `nodes` drafted nodes each, and a plain step's
        host work. The time of querying lookup drafters is not included: it is spent whatever is submitted afterwards.
        In a trial old measurements of passes with nodes are ignored, and nodes cost no more than `Nominal` says: a
        price that was measured in a bad moment must not keep itself from being measured again.
        """

        nominal = Nominal()

        def predict(size: int) -> float:
            return self._predicted(size, rows, context)

        def predict_in_trial(size: int) -> float:
            share = nominal.pass_ms(1 + self.shape.nodes(size, rows), rows) / nominal.pass_ms(1, rows)
            return min(predict(size), share * predict(0))

        def curve() -> Callable[[int], float]:
            host = self.host_ms(rows)
            time = self._pass.curve(_about(rows), predict, trial=predict_in_trial if trial else None)
            return lambda size: time(size) + host

        return Times(self.shape.size_of_equal_rows(rows, nodes), curve)

    def draft_ms(self, key: str, depth: int, rows: int, *, trial: bool = False) -> float:
        """Return the time of a drafter's proposal down to `depth`, ms, in a step of `rows` rows whose text it has read.
        In a trial old measurements are ignored.
        """
        predict = partial(self._proposal, key, rows=rows)
        return self._draft[key].curve(rows, predict, trial=predict if trial else None)(depth)

    def reading_ms(self, key: str, tokens: int) -> float:
        """Return the time in which a drafter reads `tokens` tokens, ms; 0 until it is measured."""
        return tokens * self._latest(("reading", key), 0.0) if tokens >= READING else 0.0

    def plain_is_due(self, rows: int) -> bool:
        """Return whether a plain step of about `rows` rows should be measured. Everything is compared with plain
        decoding: if it were never measured, a wrong assumption could justify drafting at every step, and so persist.
        """
        about = _about(rows)
        never = not self._seen["host", about]
        return never or self._pass.plain_is_due(about, lambda size: self._predicted(size, rows, 0))

    def saw_pass(self, size: int, rows: int, context: int, ms: float) -> None:
        """Record that a pass of this size over `rows` rows, and its verification, took this long."""
        nodes = round(rows * (1 + self.shape.nodes(size, rows)))
        self.passes[context // _CONTEXT_STEP * _CONTEXT_STEP, nodes].append(ms)
        for seen in (self._pass, *self._draft.values()):
            seen.steps += 1
        self._pass.add(_alike(size, rows), ms, lambda size: self._predicted(size, rows, context))

    def saw_draft(self, key: str, depth: int, rows: int, ms: float, *, unread: int = 0) -> None:
        """Record that a drafter's proposal took this long, including reading `unread` tokens before it."""
        if unread >= READING:
            self._seen["reading", key].append(max(0.0, ms - self.draft_ms(key, depth, rows)) / unread)
        else:
            self._draft[key].add((depth, rows), ms, partial(self._proposal, key, rows=rows))

    def host_ms(self, rows: int) -> float:
        """Return the host work of a step of about `rows` rows without a drafter, ms; 0 until it is measured."""
        return self._latest(("host", _about(rows)), 0.0)

    def lookup_ms(self, rows: int, ms: float) -> float:
        """Return what querying lookup drafters adds to a step if their own work takes `ms`: the rest is merging and
        ranking their trees, handing them over, and learning from them.
        """
        return ms * self._latest(("lookup", _about(rows)), _LOOKUP_OVERHEAD)

    def saw_host(self, ms: float, rows: int, *, lookup_ms: float) -> None:
        """Record that the host work of a step without a drafter's forward pass took this long. `lookup_ms` is the own
        time of the lookup drafters, 0 if none was queried.
        """
        if lookup_ms == 0.0:
            self._seen["host", _about(rows)].append(ms)
        else:
            self._seen["lookup", _about(rows)].append(max(1.0, (ms - self.host_ms(rows)) / lookup_ms))

    def _latest(self, key: Hashable, unseen: float) -> float:
        seen = self._seen.get(key)
        return median(seen) if seen else unseen

    def _proposal(self, key: str, depth: int, rows: int) -> float:
        """Return the cost of a proposal: the one calibrated on one row, scaled to the rows as the target's pass is."""
        growth = self._predicted(0, rows, 0) / self._predicted(0, 1, 0) if rows > 1 else 1.0
        return self._drafts[key].ms(depth) * growth

    def _predicted(self, size: int, rows: int, context: int) -> float:
        return self._calibrated(size, rows, context // _CONTEXT_STEP * _CONTEXT_STEP)


def _alike(size: int, rows: int) -> TimeKey:
    """Return the key under which a pass is corrected: its size in steps of an eighth, and its rows, rounded up."""
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift, _about(rows)


def _about(rows: int) -> int:
    return rows if rows < 4 else 2 ** rows.bit_length()
