"""Times passes of a target over a grid of sizes, within a time budget. Knows no drafter and no disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forerun.engine.cost.model import CostModel, along
from forerun.errors import ArgumentError
from forerun.target import Target
from forerun.tree import TreeBuilder, stack
from forerun.types import Draft

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes that are measured by default, root included."""
CONTEXTS = (64, 512, 2048)
"""Committed tokens that are measured by default, as far as they fit; the cost of attention is a line between them."""
REPEATS = 7
SECONDS = 10.0
"""Time budget of a measurement; large passes that would break it are left out and extrapolated."""
Tell = Callable[[str], None]
Point = tuple[int, int, int]
"""(context, rows, nodes)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What is measured, cut down to what a target can hold."""

    nodes: tuple[int, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def fitting(
        cls, target: Target, *, rows: Sequence[int], nodes: Sequence[int], contexts: Sequence[int] | None
    ) -> Grid:
        """The sizes that fit the target's slots and context, duplicates removed.

        Raises:
            ArgumentError: a size below 1, or more rows than the target has.
        """
        if not rows or not nodes or min(*rows, *nodes, 1) < 1 or max(rows) > target.rows:
            raise ArgumentError(f"rows must be in 1..{target.rows} and node counts at least 1, got {rows} and {nodes}")
        room = min(target.slots, target.max_length)
        sizes = sorted({1, *(size for size in nodes if size < room)})
        wanted = CONTEXTS if contexts is None else contexts
        fitting = sorted({max(0, min(context, room - sizes[-1])) for context in wanted})
        return cls(nodes=tuple(sizes), rows=tuple(sorted(set(rows))), contexts=tuple(fitting))

    def within(self, other: Grid) -> bool:
        """Whether `other` holds all of these sizes."""
        pairs = ((self.nodes, other.nodes), (self.rows, other.rows), (self.contexts, other.contexts))
        return all(set(mine) <= set(theirs) for mine, theirs in pairs)

    def joined(self, other: Grid, *, rows: int) -> Grid:
        """The sizes of both, of at most `rows` rows."""
        return Grid(
            nodes=tuple(sorted({*self.nodes, *other.nodes})),
            rows=tuple(sorted({*self.rows, *(count for count in other.rows if count <= rows)})),
            contexts=tuple(sorted({*self.contexts, *other.contexts})),
        )

    @property
    def sparse(self) -> tuple[int, ...]:
        """Sizes that are measured behind further contexts: what a longer context adds is smooth in the nodes."""
        return tuple(sorted({self.nodes[0], *(n for n in self.nodes if n in (4, 16, 64)), self.nodes[-1]}))

    def points(self) -> list[Point]:
        """What is measured, the cheapest first."""
        every = [(self.contexts[0], r, n) for r in self.rows for n in self.nodes]
        every += [(c, r, n) for c in self.contexts[1:] for r in self.rows for n in self.sparse]
        return sorted(every, key=lambda point: (point[1] * point[2], point))


def measure(
    target: Target,
    *,
    rows: Sequence[int] = (1,),
    nodes: Sequence[int] = NODES,
    contexts: Sequence[int] | None = None,
    repeats: int = REPEATS,
    seconds: float = SECONDS,
    tell: Tell | None = None,
) -> CostModel:
    """Time passes on rows of the target that are free; the others are not touched.

    One pass is what one step of the engine asks of the target: from token ids to the argmax of every node on the host,
    and the commit. Sizes take turns. The rows are free again afterwards; what stands in their slots is overwritten.
    Contexts are only announced, not prefilled: the cost of attention does not depend on what it reads.

    Args:
        target: with at least ``max(rows)`` rows that hold no token.
        rows: how many rows a pass has; see `CostModel.pass_ms` for what follows from one entry.
        nodes: scored nodes of a row, root included; 1 is added.
        contexts: committed tokens of each row; default `CONTEXTS`, as far as they fit.
        repeats: passes of each size; the lower quartile counts.
        seconds: stop adding passes after this long; the smallest sizes are measured in any case.
        tell: told how far it is.

    Raises:
        ArgumentError: too few free rows, or a size out of range.
    """
    grid = Grid.fitting(target, rows=rows, nodes=nodes, contexts=contexts)
    chosen = free_rows(target, grid.rows[-1])
    try:
        samples = _sample(target, chosen, grid, repeats, seconds, tell or (lambda _: None))
    finally:
        target.truncate(chosen, [0] * len(chosen))
    return _model(grid, samples, stairs=bool(target.buckets.nodes))


def free_rows(target: Target, count: int) -> list[int]:
    """`count` rows that hold no token, neighbours where there are such: the cache reads those without a copy.

    Raises:
        ArgumentError: there are fewer.
    """
    free = [row for row, length in enumerate(target.lengths) if length == 0]
    if len(free) < count:
        raise ArgumentError(f"{count} free rows are needed to measure, the target has {len(free)}; measure before use")
    runs = [free[start : start + count] for start in range(len(free) - count + 1)]
    return min(runs, key=lambda run: run[-1] - run[0])


def _sample(
    target: Target, rows: Sequence[int], grid: Grid, repeats: int, seconds: float, tell: Tell
) -> dict[Point, list[float]]:
    """Wall times in seconds. The first round, with a warm-up of each size, decides what fits the budget."""
    deadline = time.perf_counter() + seconds
    samples: dict[Point, list[float]] = {}
    drafts = {nodes: _chain(nodes, min(97, target.vocab_size)) for nodes in grid.nodes}
    rate = 0.0
    for point in grid.points():
        tokens = point[1] * point[2]
        needed = point[0] == grid.contexts[0] and point[1] == grid.rows[0] and point[2] in grid.nodes[:2]
        if not needed and time.perf_counter() + 2 * rate * tokens > deadline:
            continue
        tell(f"{point[2]} nodes in {point[1]} rows behind {point[0]} tokens")
        _time(target, rows, point, drafts)
        samples[point] = [_time(target, rows, point, drafts)]
        rate = samples[point][0] / tokens
    for turn in range(1, repeats):
        tell(f"round {turn + 1} of {repeats}")
        for point, times in samples.items():
            if time.perf_counter() > deadline:
                return samples
            times.append(_time(target, rows, point, drafts))
    return samples


@torch.inference_mode()
def _time(target: Target, rows: Sequence[int], point: Point, drafts: dict[int, Draft]) -> float:
    context, count, nodes = point
    used = list(rows[:count])
    for row in used:
        target.lengths[row] = context
    draft = _repeat(drafts[nodes], count)
    roots = [(7919 * row + 13) % target.vocab_size for row in used]
    began = time.perf_counter()
    # The argmax on the host is what a greedy step reads; on an accelerator it also waits for the pass to end.
    target.score(used, roots, draft).logits.argmax(-1).tolist()
    target.commit(used, [()] * count)
    return time.perf_counter() - began


def _chain(nodes: int, vocabulary: int) -> Draft:
    builder = TreeBuilder()
    builder.add_path([index % vocabulary for index in range(nodes - 1)])
    return stack([builder])


def _repeat(draft: Draft, rows: int) -> Draft:
    return Draft(
        tokens=draft.tokens.expand(rows, -1),
        parents=draft.parents.expand(rows, -1),
        counts=draft.counts.expand(rows),
        drawn=draft.drawn.expand(rows, -1),
    )


def _model(grid: Grid, samples: dict[Point, list[float]], *, stairs: bool) -> CostModel:
    """Times in ms; sizes that were left out are filled in, row counts and contexts with too few sizes are dropped."""
    ms = {point: 1e3 * _quiet(times) for point, times in samples.items()}
    known = {(c, r): [n for n in grid.nodes if (c, r, n) in ms] for c in grid.contexts for r in grid.rows}
    least = min(2, len(grid.nodes))
    rows = [r for r in grid.rows if len(known[grid.contexts[0], r]) >= least]
    contexts = [c for c in grid.contexts if all(len(known[c, r]) >= least for r in rows)]
    first = {r: _line(known[contexts[0], r], ms, (contexts[0], r), grid.nodes) for r in rows}
    planes = []
    for c in contexts:
        plane = []
        for r in rows:
            sizes = known[c, r]
            extra = [ms[c, r, n] - first[r][grid.nodes.index(n)] for n in sizes]
            line = [base + along(sizes, extra, n) for base, n in zip(first[r], grid.nodes, strict=True)]
            plane.append(tuple(first[r] if c == contexts[0] else rising(line)))
        planes.append(tuple(plane))
    return CostModel(
        nodes=grid.nodes, rows=tuple(rows), contexts=tuple(contexts), pass_times=tuple(planes), stairs=stairs
    )


def _line(sizes: list[int], ms: dict[Point, float], where: tuple[int, int], nodes: Sequence[int]) -> list[float]:
    """The times of all sizes, extrapolated where none were measured."""
    times = [ms[(*where, n)] for n in sizes]
    return rising([along(sizes, times, n) for n in nodes])


def _quiet(times: Sequence[float]) -> float:
    """The lower quartile: what else runs on the machine can only add to a time."""
    return sorted(times)[(len(times) - 1) // 4]


def rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators): a pass over more nodes is not cheaper."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (low, many), (high, more) = pools.pop(-2), pools.pop()
            pools.append(((low * many + high * more) / (many + more), many + more))
    return [value for value, count in pools for _ in range(count)]
