"""Tokens that only fill up a rectangle of rows and nodes are not multiplied by weights.

Rows of a batch differ in how much was drafted for them, a pass is as wide as the widest. What the linears of a pass
would spend on the rest is saved; norms and activations, which are cheap, run over all of it. Knows no model and no row
of a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

WORTH = 16
"""Tokens that must be saved: a pass over fewer is paid by reading the weights."""


class Padding:
    """Which tokens of the pass that is running are real."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        self._count = 0

    @contextmanager
    def of(self, real: Tensor) -> Iterator[None]:
        """While the block runs, `without` computes the tokens alone that are True in `real` (B, N)."""
        flat = real.flatten()
        kept = flat.nonzero().squeeze(1)
        before = self._kept, self._count
        self._kept = kept if len(flat) - len(kept) >= WORTH else None
        self._count = len(flat)
        try:
            yield
        finally:
            self._kept, self._count = before

    def without(self, rows: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """``compute(rows)`` (M, out) for rows (M, in); zeros for padding, where these are all tokens of the pass."""
        kept = self._kept
        if kept is None or len(rows) != self._count:
            return compute(rows)
        result = compute(rows.index_select(0, kept))
        return result.new_zeros(len(rows), result.shape[1]).index_copy_(0, kept, result)


PADDING = Padding()
"""Of the pass that is running; passes of a process run one after the other."""
