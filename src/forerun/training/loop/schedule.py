"""The learning rate as a function of the step. Knows no optimizer and keeps no state: resuming needs only the step."""

from __future__ import annotations

import math


def rate_factor(step: int, total: int, warmup: int, shape: str, floor: float) -> float:
    """Factor on the peak learning rate, in (0, 1] for steps below `total`.

    Linear warm-up to 1 at step ``warmup - 1``; then from 1 at step `warmup` towards `floor`, reached at step `total`
    (one after the last), on a half cosine or a line, or 1 for ever.

    Args:
        step: optimizer step, from 0.
        total: steps in all.
        warmup: steps of warm-up.
        shape: "cosine", "linear" or "constant".
        floor: share of the peak in [0, 1].
    """
    if step < warmup:
        return (step + 1) / warmup
    if shape == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if shape == "cosine" else 1 - done
    return floor + (1 - floor) * left
