"""Before drafting: how deep.

Sees running figures only, so no decision can depend on a value that is yet to be drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """How deep to draft, and what that promises."""

    tokens: int
    """Depth, at least 1."""
    ratio: float
    """Expected tokens per time over those of plain decoding."""


def best_depth(curves: Sequence[Sequence[float]], times: Sequence[float], rows: int) -> Depth:
    """The depth with the most expected tokens per time, over all rows of the step.

    Args:
        curves: of each row that drafts, the probability that depth 1, 2, ... survives; rows may end early.
        times: entry d: a step that drafts to depth d, ms; entry 0 is plain decoding. At least two entries.
        rows: of the step, whether or not they draft.
    """
    plain = rows / times[0]
    best = Depth(tokens=1, ratio=0.0)
    expected = float(rows)
    for depth in range(1, len(times)):
        expected += sum(curve[depth - 1] for curve in curves if depth <= len(curve))
        ratio = expected / times[depth] / plain
        if ratio > best.ratio:
            best = Depth(tokens=depth, ratio=ratio)
    return best
