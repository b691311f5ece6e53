"""The cost model as numbers: wall times of target passes on a grid, of drafters per level. Knows no clock, no torch.

``v(n) = T(n) / T(1)``: what a pass over n nodes costs in passes over one (docs/planning.md).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from forerun.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCost:
    """What one drafter configuration costs per proposal, wall time."""

    fixed_ms: float
    """Whatever the depth: catching up with the accepted tokens, look-ups, host work; ms."""
    level_ms: float
    """Per level of depth, ms; about 0 for drafters that copy and for those that draft all levels in one pass."""

    def __post_init__(self) -> None:
        if not (self.fixed_ms >= 0 and self.level_ms >= 0):
            raise ArgumentError(f"a drafter's cost cannot be negative, got {self.fixed_ms} and {self.level_ms} ms")

    def ms(self, depth: int) -> float:
        """A proposal down to `depth`, ms."""
        return self.fixed_ms + self.level_ms * depth


FREE = DraftCost(fixed_ms=0.0, level_ms=0.0)
"""A drafter that takes no time."""


class PassCost(Protocol):
    """Anything that says what a target pass costs: measured (`CostModel`) or from a data sheet."""

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass over `nodes` nodes in each of `rows` rows behind `context` tokens, ms."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Measured wall time of target passes over a grid of (rows, nodes per row, context)."""

    nodes: tuple[int, ...]
    """Scored nodes of a row, root included; rising, the first is 1."""
    rows: tuple[int, ...]
    """Rows of a pass, rising."""
    contexts: tuple[int, ...]
    """Committed tokens of every row, rising."""
    pass_times: tuple[tuple[tuple[float, ...], ...], ...]
    """ms, ``pass_times[context][rows][nodes]`` by index into the three grids; in nodes they never fall."""
    drafts: Mapping[str, DraftCost] = field(default_factory=dict)
    """What drafters cost, by `SpeculativeConfig.key`."""
    stairs: bool = True
    """Passes are padded up to the next measured size; False: they are not, and costs between sizes are interpolated."""

    def __post_init__(self) -> None:
        for name in ("nodes", "rows", "contexts"):
            grid = getattr(self, name)
            if not grid or list(grid) != sorted(set(grid)) or grid[0] < (0 if name == "contexts" else 1):
                raise ArgumentError(f"{name} of a cost model must be rising positive numbers, got {grid}")
        if self.nodes[0] != 1:
            raise ArgumentError(f"a cost model needs the cost of a pass over one node, got sizes {self.nodes}")
        shape = [len(self.pass_times), *{len(plane) for plane in self.pass_times}]
        widths = {len(line) for plane in self.pass_times for line in plane}
        if shape != [len(self.contexts), len(self.rows)] or widths != {len(self.nodes)}:
            raise ArgumentError("pass_times must hold one time for each context, row count and node count")
        if not all(time > 0 for plane in self.pass_times for line in plane for time in line):
            raise ArgumentError("pass_times must be positive")

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """Wall time of one pass, ms.

        Sizes between the measured ones are rounded up (`stairs`) or interpolated; rows and contexts are interpolated.
        Above the grid costs go on linearly; where only one row count was measured, a pass over B rows of N nodes
        counts as one of B * N nodes. Contexts below the grid cost what its first one does.

        Args:
            nodes: per row, root included.
            rows: rows of the pass, all of that size.
            context: committed tokens of each row.
        """
        if nodes < 1 or rows < 1 or context < 0:
            raise ArgumentError(f"a pass has at least one node and one row, got {nodes} nodes, {rows} rows, {context}")
        if len(self.rows) == 1 and rows > self.rows[0]:
            nodes, rows = -(-nodes * rows // self.rows[0]), self.rows[0]
        by_context = [
            along(self.rows, [along(self.nodes, line, nodes, stairs=self.stairs) for line in plane], rows)
            for plane in self.pass_times
        ]
        return along(self.contexts, by_context, context)

    def v(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        """``pass_ms(nodes) / pass_ms(1)`` at the same rows and context."""
        return self.pass_ms(nodes, rows, context) / self.pass_ms(1, rows, context)

    def with_draft(self, key: str, draft: DraftCost) -> CostModel:
        """The same with a drafter's cost added or replaced."""
        return replace(self, drafts={**self.drafts, key: draft})

    def record(self) -> dict[str, Any]:
        """As JSON knows it; `from_record` reads it back."""
        return {
            "nodes": list(self.nodes),
            "rows": list(self.rows),
            "contexts": list(self.contexts),
            "pass_times_ms": [[list(line) for line in plane] for plane in self.pass_times],
            "stairs": self.stairs,
            "drafts": {
                key: {"fixed_ms": draft.fixed_ms, "level_ms": draft.level_ms} for key, draft in self.drafts.items()
            },
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CostModel:
        """What `record` made.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return cls(
            nodes=tuple(record["nodes"]),
            rows=tuple(record["rows"]),
            contexts=tuple(record["contexts"]),
            pass_times=tuple(
                tuple(tuple(float(time) for time in line) for line in plane) for plane in record["pass_times_ms"]
            ),
            stairs=bool(record["stairs"]),
            drafts={key: DraftCost(**draft) for key, draft in record["drafts"].items()},
        )


def along(grid: Sequence[int], values: Sequence[float], where: float, *, stairs: bool = False) -> float:
    """`values` on a rising `grid` at `where`: the next one up (`stairs`) or interpolated.

    Below the grid its first value, above it a straight line through its last two that does not fall.
    """
    index = bisect_left(grid, where)
    if index == 0:
        return values[0]
    if index == len(grid):
        if index == 1:
            return values[0]
        slope = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return values[-1] + max(0.0, slope) * (where - grid[-1])
    if stairs or grid[index] == where:
        return values[index]
    share = (where - grid[index - 1]) / (grid[index] - grid[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])
