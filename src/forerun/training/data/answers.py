"""Answers that flatter or waste a training: those that run in circles, and those that say next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from forerun.training.data.store import UNWRITTEN, PreparedData

SAMPLED = 2000  # Documents that are looked at
MANY = 0.05  # Share of them above which something is said


def about_answers(data: PreparedData) -> Iterator[str]:
    """Yield a sentence where many answers of the data run in circles or say nothing."""
    looked = range(0, len(data), max(1, len(data) // SAMPLED))
    circles = silent = 0
    for index in looked:
        tokens, mask = data.document(index)
        written = tokens[(mask != 0) & (tokens != UNWRITTEN)]
        circles += runs_in_circles(written)
        silent += 0 < len(written) <= 2
    if circles > MANY * len(looked):
        yield (
            f"{circles / len(looked):.0%} of the answers run in circles. These are easy to foresee, so figures look "
            "better than they are where the target answers well: let it answer at a temperature above 0, or with fewer "
            "tokens (forerun data regenerate)."
        )
    if silent > MANY * len(looked):
        yield (
            f"{silent / len(looked):.0%} of the answers have two tokens at most, of which there is little to learn: "
            "look at the chat template and at the prompts."
        )


def runs_in_circles(tokens: NDArray[np.int32], longest: int = 32) -> bool:
    """Return whether the last tokens repeat the same few, at most `longest`, three times and 48 tokens long."""
    for period in range(1, longest + 1):
        span = max(48, 3 * period)
        if len(tokens) >= span and np.array_equal(tokens[-span + period :], tokens[-span:-period]):
            return True
    return False
