"""Tokens that only fill up a rectangle of rows and nodes are not run: a pass runs its real tokens behind each other.

Rows of a batch differ in how much was drafted for them, a pass is as wide as the widest. To all layers its real tokens
are one sequence; attention alone stands them back in their rows, where their keys are. Knows no model and no row of a
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

WORTH = 16
"""Tokens that must be saved: a pass over fewer is paid by reading the weights."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Where the M real tokens of a pass stand among its B rows of N."""

    kept: Tensor
    """(M,) int64 index into B * N, rising."""
    rows: int
    nodes: int

    @classmethod
    def worth(cls, real: Tensor) -> Flat | None:
        """Of `real` (B, N) bool; None where little is padding."""
        if real.numel() < WORTH:
            return None
        kept = real.flatten().nonzero().squeeze(1)
        return cls(kept, *real.shape) if real.numel() - len(kept) >= WORTH else None

    def flatten(self, values: Tensor) -> Tensor:
        """(B, N, ..) -> (1, M, ..)"""
        return values.flatten(0, 1).index_select(0, self.kept.to(values.device)).unsqueeze(0)

    def restore(self, values: Tensor) -> Tensor:
        """(1, M, ..) -> (B, N, ..), zeros for padding."""
        whole = values.new_zeros(self.rows * self.nodes, *values.shape[2:])
        whole.index_copy_(0, self.kept.to(values.device), values[0])
        return whole.view(self.rows, self.nodes, *values.shape[2:])


class Running:
    """The pass that is running; passes of a process run one after the other."""

    def __init__(self) -> None:
        self.flat: Flat | None = None
        self.rows: Tensor | None = None

    @contextmanager
    def of(self, flat: Flat | None, rows: Tensor | None) -> Iterator[None]:
        """While the block runs, tokens of the pass stand as `flat` says (None: as a rectangle), and attention selects
        their `rows` (B,) among those of the cache (None: it is handed theirs)."""
        before = self.flat, self.rows
        self.flat, self.rows = flat, rows
        try:
            yield
        finally:
            self.flat, self.rows = before


RUNNING = Running()
"""What attention asks."""
