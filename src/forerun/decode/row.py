"""One running sequence, for the step, the verification rules and the drafters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.errors import ForerunError
from forerun.types import CommittedTokens


@dataclass(kw_only=True, slots=True)
class Row:
    """One running sequence."""

    cache_row: int  # Row in the target's cache
    tokens: list[int]  # Prompt and output; the last one is the root, not yet in the cache. Kept as `CommittedTokens`.
    prompt_length: int
    sampler: Sampler
    seed: int
    stop_ids: frozenset[int]  # Token ids that end the output
    tokens_left: int  # Tokens that may still be emitted, at least 1
    rule: str | None = None  # Name of the requested rule; None: the best one for the drafter's kind of trees
    traced: bool = False  # Whether the `StepTrace` has each node's probabilities
    prediction: Sequence[int] = ()  # Token ids that the client expects as the output
    cache_salt: str | None = None
    """Isolation domain: what is learned from the text is used for rows of this domain only."""
    steps: int = 0  # Steps so far
    drafter_errors: int = 0  # Failures of its drafters
    error: ForerunError | None = None  # The error that ends it; other rows go on (`errors.Isolation`)

    def __post_init__(self) -> None:
        self.tokens, self.prediction = CommittedTokens(self.tokens), tuple(self.prediction)

    def commit(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        list.extend(self.tokens, tokens)

    def shorten(self, count: int) -> None:
        """Remove the last `count` tokens."""
        list.__delitem__(self.tokens, slice(len(self.tokens) - count, None))

    def rng(self) -> Rng:
        """Return the random number generator of the next step."""
        return Rng(self.seed, len(self.tokens))
