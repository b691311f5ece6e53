"""The planner's costs say how much to draft at each batch size, and what it costs to draft the same
at every one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from forerun.errors import ArgumentError
from forerun.plan import theory
from forerun.plan.planner import PlanLoad, plan_tree


class Stretch(NamedTuple):
    """A `Stretch` is a range of batch sizes, `first` to `last` inclusive, at which `k` tokens are
    drafted.
    """

    first: int
    last: int
    k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A `Forecast` holds what the planner says of a deployment."""

    load: PlanLoad
    max_batch: int  # Most sequences that the server decodes together
    ranks: theory.RankAcceptance | None = None  # Acceptance by depth and rank, where it was given

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ArgumentError(f"--max-batch must be at least 1, got {self.max_batch}")

    def speedup(self, k: int, rows: int) -> float:
        """Return the speed-up over plain decoding, with chains of `k` in a batch of `rows`."""
        return self.load.predict(k, rows).speedup

    def best_k(self, k: int, rows: int) -> int:
        """Return the draft length up to `k` that is fastest in a batch of `rows`; 0 where none
        gains what can be measured.
        """
        best = max(range(k + 1), key=lambda length: self.speedup(length, rows))
        return best if self.speedup(best, rows) >= theory.WORTH else 0

    def stretches(self, k: int) -> tuple[Stretch, ...]:
        """Return the best length up to `k` for every batch size from 1 to `max_batch`.

        It never rises with the batch, as TensorRT-LLM wants it.
        """
        lengths, most = list[int](), k
        for rows in range(1, self.max_batch + 1):
            most = self.best_k(most, rows)
            lengths.append(most)
        return tuple(_runs(lengths))

    def fixed_cost(self, k: int) -> str | None:
        """Say in words what drafting `k` tokens at every batch costs; None where that is best
        anyway.
        """
        best = self.best_k(k, self.max_batch)
        if best == k:
            return None
        fixed, chosen = self.speedup(k, self.max_batch), self.speedup(best, self.max_batch)
        return (
            f"at batch {self.max_batch} K = {k} is predicted at {fixed:.2f} x plain decoding, K = {best} {chosen:.2f} x"
        )

    def chain_cost(self, k: int, nodes: int) -> str | None:
        """Say in words what a chain of `k` loses against the best tree of up to `nodes` nodes at
        batch 1; None if unknown.
        """
        if self.ranks is None:
            return None
        tree = plan_tree(self.load, self.ranks, nodes=nodes, depth=k)
        return (
            f"at batch 1 the chain is predicted at {self.speedup(k, 1):.2f} x plain decoding, a tree of "
            f"{len(tree.parents)} nodes {tree.speedup:.2f} x"
        )


def _runs(lengths: list[int]) -> Iterator[Stretch]:
    first = 1
    for k, group in groupby(lengths):
        last = first + len(list(group)) - 1
        yield Stretch(first, last, k)
        first = last + 1
