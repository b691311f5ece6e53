"""One running sequence, as a step, a rule and a drafter see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.errors import ForerunError
from forerun.types import CommittedTokens


@dataclass(kw_only=True, slots=True)
class Row:
    """One running sequence as the step sees it."""

    cache_row: int  # Row in the target's cache
    tokens: list[int]  # Prompt and output; the last one is the root, not yet in the cache. Kept as `CommittedTokens`.
    prompt_length: int
    sampler: Sampler
    seed: int
    stop_ids: frozenset[int]  # Token ids that end the answer
    tokens_left: int  # Tokens that may still be emitted, at least 1
    rule: str | None = None  # A rule asked for by name; None takes the best one for what its drafter may draft
    traced: bool = False  # Whether each node's probabilities are wanted in the `StepTrace`
    prediction: Sequence[int] = ()  # Token ids that the client expects as the answer
    cache_salt: str | None = None  # Isolation domain: what is kept of the text serves rows of the same domain only
    steps: int = 0  # Steps done so far
    drafter_errors: int = 0  # Times that a drafter failed it
    error: ForerunError | None = None  # Why it cannot go on; the others are not concerned (`errors.Isolation`)

    def __post_init__(self) -> None:
        self.tokens, self.prediction = CommittedTokens(self.tokens), tuple(self.prediction)

    def commit(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        list.extend(self.tokens, tokens)

    def shorten(self, count: int) -> None:
        """Take back the last `count` tokens."""
        list.__delitem__(self.tokens, slice(len(self.tokens) - count, None))

    def rng(self) -> Rng:
        """Return the random number generator of the coming step."""
        return Rng(self.seed, len(self.tokens))
