"""The costs of a target's pass and of a drafter's proposal, and the predicted time of a step made
of them.

`CostModel` is a pass over n nodes, by rows and context, as `measuring` found it; `DraftCost` a drafter's fixed and per
level. The planner reads them, too; ``v(n) = T(n) / T(1)`` is what a pass costs in passes over one node
(docs/planning.md). `StepCosts` predicts steps, corrected by what they were seen to take. Costs are a staircase:
`PassShape` says which nodes of which rows make up one stair. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median, median_low
from typing import Protocol

from forerun.control.settings import SETTINGS
from forerun.errors import ArgumentError

# --- numbers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """The cost of one drafter configuration per proposal, in wall time."""

    fixed_ms: float  # Whatever the depth: catching up with the accepted tokens, look-ups, host work; ms
    level_ms: float
    """Cost per level of depth, ms; about 0 for drafters that copy and for those that draft all
    levels in one pass.
    """

    def __post_init__(self) -> None:
        if not (self.fixed_ms >= 0 and self.level_ms >= 0):
            raise ArgumentError(f"a drafter's cost cannot be negative, got {self.fixed_ms} and {self.level_ms} ms")

    def ms(self, depth: int) -> float:
        """Return the cost of a proposal down to `depth`, ms."""
        return self.fixed_ms + self.level_ms * depth


FREE = DraftCost(fixed_ms=0.0, level_ms=0.0)


class PassCost(Protocol):
    """Anything that knows what a target pass costs: measured (`CostModel`), nominal, or from a data
    sheet.
    """

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return the wall time of one pass over `nodes` nodes in each of `rows` rows behind
        `context` tokens, ms.
        """


@dataclass(frozen=True)
class Nominal:
    """An assumed pass cost, used until one is measured. Its unit is a plain pass; ratios seen while
    running make milliseconds of it.
    """

    slope: float = 0.04  # Cost of each further node, in passes over one

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

    def __post_init__(self) -> None:
        for name in ("nodes", "rows", "contexts"):
            grid = getattr(self, name)
            if not grid or list(grid) != sorted(set(grid)) or grid[0] < (0 if name == "contexts" else 1):
                raise ArgumentError(f"{name} of a cost model must be rising positive numbers, got {grid}")
        if self.nodes[0] != 1:
            raise ArgumentError(f"a cost model needs the cost of a pass over one node, got sizes {self.nodes}")
        lines = [line for plane in self.pass_times_ms for line in plane]
        shape = [len(self.pass_times_ms), *{len(plane) for plane in self.pass_times_ms}, *{len(line) for line in lines}]
        if shape != [len(self.contexts), len(self.rows), len(self.nodes)]:
            raise ArgumentError("pass_times_ms must hold one time for each context, row count and node count")
        if not all(time > 0 for line in lines for time in line):
            raise ArgumentError("pass_times_ms must be positive")

    def pass_ms(self, nodes: float, rows: int = 1, context: int = 0) -> float:
        """Return the wall time of one pass, ms. Sizes between the measured ones are rounded up
        (`stairs`) or interpolated; rows and contexts are interpolated. Above the grid costs grow
        linearly; if only one row count was measured, B rows of N nodes count as B * N nodes.
        Contexts below the grid cost what its first one does.
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
    """Look up `values` on a rising `grid` at `where`: the next one up (`stairs`) or interpolated.
    Below the grid it is the first value, above it a straight line through the last two that does
    not fall.
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


@dataclass(frozen=True, slots=True)
class PassShape:
    """How the drafted nodes of several rows add up to the size of one pass. If padding is computed
    like everything else, it is that of the widest row; if it is left out (see
    `Target.computes_padding`), the nodes of all rows.
    """

    padded: bool = False

    def size(self, counts: Sequence[int]) -> int:
        """Return the size of a pass over `counts` drafted nodes, by row."""
        return max(counts, default=0) if self.padded else sum(counts)

    def even(self, rows: int, nodes: int) -> int:
        """Return the size of a pass of `rows` rows in which each has `nodes` drafted nodes."""
        return nodes if self.padded else rows * nodes

    def nodes(self, size: int, rows: int) -> float:
        """Return the drafted nodes that each of `rows` rows would have in a pass of this size."""
        return size if self.padded else size / rows


class Times(dict[int, float]):
    """Maps the size of a pass to the time of a step with it, ms, computed by `time` at the first
    look-up; sizes above `most` take as long as that.
    """

    def __init__(self, most: int, time: Callable[[int], float]) -> None:
        self.most, self._time = most, time

    def __missing__(self, size: int) -> float:
        found = self[size] = self._time(size) if size <= self.most else self[self.most]
        return found


class Correction:
    """Correction factors for predictions: the machine's recent pace, common to all sizes, times
    each size's own factor.

    The pace is quick, so a size that was not seen for long follows when the machine becomes slower; what a size has of
    its own is slow. Sizes that are new lean on their neighbours: a nominal cost whose slope is wrong is far off for
    large passes and little for small ones. They tell nothing of the pace: else one that is dearer than predicted would
    seem to say that all have become so. Medians, so a garbage collection moves nothing; and an accident among the first
    figures is believed for a few steps only.
    """

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=SETTINGS.pace_window)  # The pace by each of the latest figures
        self._seen: dict[tuple[int, int], deque[tuple[int, float]]] = {}
        self._own: dict[tuple[int, int], float] = {}  # Median of the ratios kept of a size, the pace taken out
        self._sizes = defaultdict[int, list[int]](list)  # By rows: 0 (plain), and sizes that are not new; rising
        self._tried = dict[int, tuple[int, int]]()  # Latest size with nodes by number of rows, and the count then
        self._family = dict[bool, float]()  # Median of the own ones of plain passes, and of all others
        self._count = 0
        self._pace = 1.0
        self.steps = 0  # Decoding steps, whether or not they have a figure
        self._latest_step = dict[tuple[int, int], int]()  # Step in which each size was last seen

    def add(self, size: tuple[int, int], seen: float, predicted: float) -> None:
        """Record one measured time."""
        self._count += 1
        ratio, (nodes, rows) = max(seen, _LEAST_MS) / max(predicted, _LEAST_MS), size
        if size in self._seen and not self._fresh(size) and ratio < SETTINGS.quicker * self.factor(size):
            for old in [one for one in self._seen if one[1] == rows and not self._fresh(one)]:
                self.forget(old)  # Those times were slow by accident: nothing is quick by accident
            if not self._seen:
                self._latest.clear()
        figures, new = self._seen.setdefault(size, deque(maxlen=SETTINGS.window)), SETTINGS.new
        if len(figures) >= new or all(len(others) < new for others in self._seen.values()):
            self._latest.append(ratio / self._own.get(size, 1.0))
            self._pace = median(self._latest)
        figures.append((self._count, ratio / self._pace))
        self._latest_step[size] = self.steps
        while figures[0][0] < self._count - SETTINGS.stale:
            figures.popleft()
        ratios = sorted(ratio for _, ratio in figures)
        self._own[size] = median_low(ratios if len(ratios) > new else ratios[:-1] or ratios)  # Accidents take longer
        if nodes:
            self._tried[rows] = nodes, self._count
        if nodes == 0 or len(figures) >= new:
            if nodes not in self._sizes[rows]:
                insort(self._sizes[rows], nodes)
            same = [self._own[n, r] for r, sizes in self._sizes.items() for n in sizes if (n == 0) == (nodes == 0)]
            self._family[nodes == 0] = median(same)

    def forget(self, size: tuple[int, int]) -> None:
        """Forget everything that was seen of this size."""
        if self._seen.pop(size, None):
            del self._own[size]
            self._sizes[size[1]] = [nodes for nodes in self._sizes[size[1]] if nodes != size[0]]

    def known(self, size: tuple[int, int]) -> int:
        """Return the number of figures of this size that still count."""
        return sum(count > self._count - SETTINGS.stale for count, _ in self._seen.get(size, ()))

    def factor(self, size: tuple[int, int], *, trial: bool = False) -> float:
        """Return the factor to multiply a prediction with; in a trial nothing counts that was seen
        of a size with nodes long ago.
        """
        nodes, rows = size
        if trial and not self._fresh(size):
            return self._pace * self._around(nodes, rows, trial=True) if any(map(self._fresh, self._seen)) else 1.0
        many, around = len(self._seen.get(size, ())), self._around(nodes, rows)
        if nodes and many < SETTINGS.new and any(self._sizes[rows]):
            own = min(self._own.get(size, 1.0), SETTINGS.accident * around)
            around = (many * own + around) / (many + 1)
        return self._pace * around

    def _fresh(self, size: tuple[int, int]) -> bool:
        """Return whether a size was seen recently; plain passes always count as if they were."""
        return size[0] == 0 or (size in self._seen and self._latest_step[size] > self.steps - SETTINGS.interval)

    def _around(self, nodes: int, rows: int, *, trial: bool = False) -> float:
        """Return a size's own factor, if it is not new; else that of neighbouring sizes of as many
        rows, in proportion. Beyond the largest of these the factor stays; if there is none, all
        rows tell, or in a trial none.
        """
        sizes = [one for one in self._sizes[rows] if self._fresh((one, rows))] if trial else self._sizes[rows]
        if not any(sizes[-1:]):  # All sizes are new
            tried, count = self._tried.get(rows, (0, 0))
            sizes = [*sizes, tried] if tried and count >= self._count - SETTINGS.doubted else sizes
        if not sizes or (nodes > 0 and sizes[-1] == 0):  # A pass with nodes is to plain ones as predicted
            return (
                (not trial and self._family.get(nodes == 0)) or self._own.get((0, rows)) or self._family.get(True, 1.0)
            )
        place = min(bisect_left(sizes, nodes), len(sizes) - 1)
        low, high = sizes[max(0, place - 1)], sizes[place]
        share = (nodes - low) / (high - low) if low < nodes < high else 1.0
        return (1 - share) * self._own[low, rows] + share * self._own[high, rows]


class StepCosts:
    """Times of passes and drafts in ms, for the sizes that the policy weighs. The caller passes
    measured times in.

    Args:
        passes: what passes cost, over as many nodes in each row.
        drafts: what drafters cost, calibrated or guessed, by key.
        shape: what size of a pass nodes of several rows make up.
    """

    def __init__(
        self, passes: PassCost, drafts: Mapping[str, DraftCost] | None = None, shape: PassShape = PassShape()
    ) -> None:
        self._drafts, self.shape = dict(drafts or {}), shape
        self._calibrated = lru_cache(maxsize=8192)(
            lambda size, rows, context: passes.pass_ms(1 + shape.nodes(size, rows), rows, context)
        )
        self._pass, self._draft = Correction(), defaultdict[str, Correction](Correction)
        self.passes = defaultdict[tuple[int, int, int], deque[float]](lambda: deque(maxlen=SETTINGS.window))
        """Latest times of passes, ms, by (context, rows, scored nodes of a row), where each row has
        as many.
        """
        self._seen = defaultdict[Hashable, deque[float]](lambda: deque(maxlen=SETTINGS.window))
        """Latest figures of a plain step's host work in ms; of what asking drafters that copy adds,
        over the time that they take themselves (both by about how many rows); and of a drafter's
        first look at a token in ms, by its key.
        """

    def times(self, rows: int, context: int, nodes: int, *, trial: bool = False) -> Times:
        """Return, by size, the time of a pass over `rows` rows of up to `nodes` drafted nodes each,
        and a plain step's host work. The time of asking those that copy is not included: it is
        spent whatever is then submitted. In a trial, what was seen long ago of passes with nodes
        does not count.
        """
        host, factors = self.host_ms(rows), dict[tuple[int, int], float]()

        def time(size: int) -> float:
            alike = _alike(size, rows)
            if alike not in factors:
                factors[alike] = self._pass.factor(alike, trial=trial)
            return self._predicted(size, rows, context) * factors[alike] + host

        return Times(self.shape.even(rows, nodes), time)

    def draft_ms(self, key: str, depth: int, rows: int, *, trial: bool = False) -> float:
        """Return the time of a proposal down to `depth` by a drafter in a step of `rows` rows whose
        text it knows. In a trial, what was seen long ago does not count.
        """
        return self._proposal(key, depth, rows) * self._draft[key].factor((depth, rows), trial=trial)

    def reading_ms(self, key: str, tokens: int) -> float:
        """Return the time of a drafter's first look at so many tokens; 0 while that has never been
        seen.
        """
        return tokens * self._latest(("reading", key), 0.0) if tokens >= SETTINGS.reading else 0.0

    def plain_is_due(self, rows: int) -> bool:
        """Return whether plain decoding of about so many rows has been seen too seldom. Everything
        is held against it: an assumed cost that no step ever corrects would continue to justify the
        nodes that keep it from being seen.
        """
        return min(len(self._seen["host", _about(rows)]), self._pass.known(_alike(0, rows))) < SETTINGS.plain_steps

    def saw_pass(self, size: int, rows: int, context: int, ms: float) -> None:
        """Record that a pass of this size over `rows` rows, and its verification, took this long."""
        plain, nodes = _alike(0, rows), 1 + self.shape.nodes(size, rows)
        if nodes == int(nodes):
            self.passes[context // _CONTEXT_STEP * _CONTEXT_STEP, rows, int(nodes)].append(ms)
        for correction in (self._pass, *self._draft.values()):
            correction.steps += 1
        if size and ms < SETTINGS.quicker * self._predicted(0, rows, context) * self._pass.factor(plain):
            self._pass.forget(plain)  # Nodes make no pass quicker: the plain ones ran into something
        self._pass.add(_alike(size, rows), ms, self._predicted(size, rows, context))

    def saw_draft(self, key: str, depth: int, rows: int, ms: float, *, unread: int = 0) -> None:
        """Record that the proposal of one drafter took this long, with `unread` tokens read before
        it.
        """
        if unread >= SETTINGS.reading:
            self._seen["reading", key].append(max(0.0, ms - self.draft_ms(key, depth, rows)) / unread)
        else:
            self._draft[key].add((depth, rows), ms, self._proposal(key, depth, rows))

    def host_ms(self, rows: int) -> float:
        """Return the host work of a step of so many rows in which no drafter is asked; 0 while that
        was never seen.
        """
        return self._latest(("host", _about(rows)), 0.0)

    def lookup_ms(self, rows: int, ms: float) -> float:
        """Return what asking drafters that copy adds to a step if they themselves take `ms` for it:
        the rest is merging, ranking and handing over their trees, and learning from them.
        """
        return ms * self._latest(("lookup", _about(rows)), SETTINGS.lookup_overhead)

    def saw_host(self, ms: float, rows: int, *, lookup_ms: float) -> None:
        """Record that the host work of a step without a drafter's forward pass took this long.
        `lookup_ms` is the share that drafters which copy took themselves, 0 if none was asked.
        """
        if lookup_ms == 0.0:
            self._seen["host", _about(rows)].append(ms)
        else:
            self._seen["lookup", _about(rows)].append(max(1.0, (ms - self.host_ms(rows)) / lookup_ms))

    def _latest(self, key: Hashable, unseen: float) -> float:
        seen = self._seen.get(key)
        return median(seen) if seen else unseen

    def _proposal(self, key: str, depth: int, rows: int) -> float:
        """Return the cost of a proposal as calibrated on one row, growing with the rows as the
        target's pass does.
        """
        growth = self._predicted(0, rows, 0) / self._predicted(0, 1, 0) if rows > 1 else 1.0
        return self._drafts[key].ms(depth) * growth

    def _predicted(self, size: int, rows: int, context: int) -> float:
        return self._calibrated(size, rows, context // _CONTEXT_STEP * _CONTEXT_STEP)


def _alike(size: int, rows: int) -> tuple[int, int]:
    """Return the key of passes that are corrected alike: of about as many rows, and of about the
    same size, in steps of an eighth.
    """
    shift = max(0, size.bit_length() - 4)
    return size >> shift << shift, _about(rows)


def _about(rows: int) -> int:
    return rows if rows < 4 else 2 ** rows.bit_length()
