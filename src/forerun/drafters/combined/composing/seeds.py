"""Sampled requests that have a seed, seen as if they were greedy: what is drafted for them is deterministic.

What drafters learn, and who is asked for how much, depends on other requests and on the clock. Sampled drafts show that
in the text; deterministic ones are walked, and the text for a seed is plain decoding's. Knows no drafter.
"""

from __future__ import annotations

from dataclasses import replace
from weakref import WeakKeyDictionary

from forerun.drafters.base import DraftContext
from forerun.sampling import Sampler


class Seeds:
    """Keeps the greedy twin of each sampler.

    Args:
        hide: off, every context is shown as it is.
    """

    def __init__(self, *, hide: bool) -> None:
        self._hide = hide
        self._greedy = WeakKeyDictionary[Sampler, Sampler]()

    def hidden(self, context: DraftContext) -> DraftContext:
        """The context as a drafter is to see it when it proposes."""
        seen = [self.seen(sampler) for sampler in context.samplers]
        same = all(one is other for one, other in zip(seen, context.samplers, strict=True))
        return context if same else replace(context, samplers=seen)

    def seen(self, sampler: Sampler) -> Sampler:
        """The sampler as a drafter is to see it."""
        if not self._hide or _free(sampler):
            return sampler
        if sampler not in self._greedy:
            params = replace(sampler.params, temperature=0.0)
            banned, words = sampler.banned_until_min, sampler.bad_words
            self._greedy[sampler] = Sampler(params, sampler.prompt, banned_until_min=banned, bad_words=words)
        return self._greedy[sampler]


def _free(sampler: Sampler) -> bool:
    """Whether nobody asked for the same text again, or it is the same whatever is drafted."""
    return sampler.greedy or sampler.params.seed is None
