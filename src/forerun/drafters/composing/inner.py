"""An inner level of a cascade: a draft model as the target of a cheaper drafter, and the rows that it advances.

What the inner level emits is the outer level's draft, so its draws are the outer level's draft draws. Knows the step's
rows and coins. Knows no drafter and no rule.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.nn.functional import pad

from forerun.sampling import Coins, Sampler
from forerun.step import Row
from forerun.target import Resume, Scored, Target
from forerun.types import Draft, Signal


class InnerCoins(Coins):
    """Coins of an inner step: the token it draws for a position is the outer level's draft draw for it.

    So a cascade proposes the very chain that its draft model would sample by itself, whoever drafts inside. What the
    inner drafter draws comes from the next stream.
    """

    def __init__(self, row: InnerRow) -> None:
        self._row, self._place = row, len(row.tokens) - row.begun
        super().__init__(row.outer.seed, row.outer.position + self._place, row.outer.draft_stream + 1)

    def draw(self, law: Tensor, depth: int = 0) -> int:
        """A token from `law` (V,), which is remembered as the law of its place."""
        place = self._place + depth
        self._row.laws[place] = law
        token = self._row.drawn[place] = self._row.outer.drafted(law, place)
        return token


@dataclass(kw_only=True, slots=True)
class InnerRow(Row):
    """A sequence whose next tokens an inner level drafts."""

    outer: Coins
    """Of the outer level's step."""
    begun: int
    """Committed tokens when the draft began."""
    laws: dict[int, Tensor] = field(default_factory=dict)
    """Place in the chain -> (V,) the law that its token was drawn from; empty at temperature 0."""
    drawn: dict[int, int] = field(default_factory=dict)
    """Place in the chain -> that token."""
    certainty: list[float] = field(default_factory=list)
    """At temperature 0: the draft model's probability of each token of the chain."""

    def coins(self) -> Coins:
        return InnerCoins(self)

    def end(self) -> None:
        """The last step failed: the chain ends behind what it drew, whose fate may not depend on what followed."""
        self.shorten(1)
        while (token := self.drawn.get(len(self.chain))) is not None:
            self.commit([token])

    @property
    def chain(self) -> list[int]:
        """What was drafted."""
        return self.tokens[self.begun :]


def inner_sampler(sampler: Sampler) -> Sampler:
    """A greedy request's sampler, as one that also tells how probable each token was; any other one unchanged."""
    if not sampler.greedy:
        return sampler
    params = replace(sampler.params, logprobs=0, logprobs_mode="raw_logprobs")
    return Sampler(params, sampler.prompt, banned_until_min=sampler.banned_until_min, bad_words=sampler.bad_words)


class DraftTarget(Target):
    """A draft model that is scored in the token ids of another model."""

    def speak(self, vocabulary: int) -> None:
        """Give logits over `vocabulary` ids: padding is dropped, ids that this model lacks are impossible."""
        self.known, self.vocab_size = self.vocab_size, vocabulary

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """The tokens; ids that this model lacks read as 0."""
        return [token if token < self.known else 0 for token in tokens]

    def score(
        self,
        rows: Sequence[int],
        roots: Sequence[int],
        draft: Draft,
        *,
        start: int = 0,
        signals: Set[Signal] = frozenset(),
        resume: Resume | None = None,
    ) -> Scored:
        scored = super().score(rows, roots, draft, start=start, signals=signals, resume=resume)
        missing = self.vocab_size - scored.logits.shape[-1]
        logits = scored.logits[..., : self.vocab_size]
        return replace(scored, logits=pad(logits, (0, missing), value=-float("inf")) if missing > 0 else logits)
