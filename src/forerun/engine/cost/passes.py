"""Times passes of a target over a grid of sizes, within a time budget. Knows no drafter and no disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from forerun.engine.cost.model import CostModel, along
from forerun.errors import ArgumentError
from forerun.target import Target
from forerun.tree import TreeBuilder, stack
from forerun.types import Draft

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes that are measured by default, root included."""
CONTEXTS = (64, 2048)
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

    def points(self) -> list[Point]:
        """All of them, the cheapest first."""
        every = [(c, r, n) for c in self.contexts for r in self.rows for n in self.nodes]
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
        repeats: passes of each size; the median counts.
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
        for row in chosen:
            target.lengths[row] = 0
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
    drafts = {nodes: _chain(nodes) for nodes in grid.nodes}
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


def _chain(nodes: int) -> Draft:
    builder = TreeBuilder()
    builder.add_path([index % 97 for index in range(nodes - 1)])
    return stack([builder])


def _repeat(draft: Draft, rows: int) -> Draft:
    return Draft(
        tokens=draft.tokens.expand(rows, -1),
        parents=draft.parents.expand(rows, -1),
        counts=draft.counts.expand(rows),
        drawn=draft.drawn.expand(rows, -1),
    )


def _model(grid: Grid, samples: dict[Point, list[float]], *, stairs: bool) -> CostModel:
    """Medians in ms; what was left out is extrapolated in nodes, whole lines and planes with one size are dropped."""
    ms = {point: 1e3 * median(times) for point, times in samples.items()}
    known = {(c, r): [n for n in grid.nodes if (c, r, n) in ms] for c in grid.contexts for r in grid.rows}
    least = min(2, len(grid.nodes))
    rows = [r for r in grid.rows if len(known[grid.contexts[0], r]) >= least]
    contexts = [c for c in grid.contexts if all(len(known[c, r]) >= least for r in rows)]
    return CostModel(
        nodes=grid.nodes,
        rows=tuple(rows),
        contexts=tuple(contexts),
        pass_times=tuple(
            tuple(
                tuple(along(known[c, r], [ms[c, r, n] for n in known[c, r]], nodes) for nodes in grid.nodes)
                for r in rows
            )
            for c in contexts
        ),
        stairs=stairs,
    )
