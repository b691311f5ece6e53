"""Replay: the target is made to say a given text, position by position, while everything else stays as it is.

Passes, drafts, verification and commits are real, and so is their cost; only what the target answers is given. Greedy
decoding alone, one sequence at a time. Knows no workload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from forerun.target import Scored, Target
from forerun.tree import depths
from forerun.types import Draft

_LEAD = 20.0
"""How far, in logits, the given token stands above the others."""


@contextmanager
def replaying(target: Target, text: Sequence[int]) -> Iterator[None]:
    """While open, the token that `target` likes best at place i of any sequence is ``text[i]``.

    Args:
        text: prompt and answer; behind its end the target says what it likes.
    """
    score, prefill = target.score, target.prefill

    def forced_score(rows: Sequence[int], roots: Sequence[int], draft: Draft, *, start: int = 0, **more: Any) -> Scored:
        scored = score(rows, roots, draft, start=start, **more)
        for index, row in enumerate(rows):
            for node, depth in enumerate(depths(draft.parents)[index, start:].tolist()):
                _force(scored.logits[index, node], text, target.lengths[row] + depth + 1)
        return scored

    def forced_prefill(rows: Sequence[int], tokens: Sequence[Sequence[int]], **more: Any) -> Scored:
        scored = prefill(rows, tokens, **more)
        logits = scored.logits.clone()
        for index, row in enumerate(rows):
            _force(logits[index, -1], text, target.lengths[row])
        return replace(scored, logits=logits)

    target.score, target.prefill = forced_score, forced_prefill  # type: ignore[method-assign]
    try:
        yield
    finally:
        del target.score, target.prefill


class ReplayProcessor:
    """The same for transformers' ``generate(logits_processor=[...])``."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row in scores:
            _force(row, self._text, input_ids.shape[1])
        return scores


def _force(logits: Tensor, text: Sequence[int], place: int) -> None:
    if place < len(text):
        logits[text[place]] = logits.max() + _LEAD
