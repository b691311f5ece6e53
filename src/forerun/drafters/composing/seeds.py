"""Sampled requests that have a seed, seen as if they were greedy: what is drafted for them is deterministic.

What drafters learn, and who is asked for how much, depends on other requests and on the clock. Sampled drafts show that
in the text; deterministic ones are walked, and the text for a seed is plain decoding's. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forerun.drafters.base import DraftContext
from forerun.sampling import Sampler


class Seeds:
    """Keeps the greedy twin of each row's sampler.

    Args:
        hide: off, every context is shown as it is.
    """

    def __init__(self, *, hide: bool) -> None:
        self._hide = hide
        self._greedy: dict[int, tuple[Sampler, Sampler]] = {}

    def hidden(self, context: DraftContext) -> DraftContext:
        """The context as a drafter is to see it when it proposes."""
        if not self._hide or all(map(_free, context.samplers)):
            return context
        rows = zip(context.rows, context.samplers, strict=True)
        return replace(context, samplers=[s if _free(s) else self._as_greedy(row, s) for row, s in rows])

    def forget(self, rows: Sequence[int]) -> None:
        """These rows are free."""
        for row in rows:
            self._greedy.pop(row, None)

    def _as_greedy(self, row: int, sampler: Sampler) -> Sampler:
        known = self._greedy.get(row)
        if known is None or known[0] is not sampler:
            params = replace(sampler.params, temperature=0.0)
            banned, words = sampler.banned_until_min, sampler.bad_words
            known = (sampler, Sampler(params, sampler.prompt, banned_until_min=banned, bad_words=words))
            self._greedy[row] = known
        return known[1]


def _free(sampler: Sampler) -> bool:
    """Whether nobody asked for the same text again, or it is the same whatever is drafted."""
    return sampler.greedy or sampler.params.seed is None
