"""Texts on their way into the cache, piece by piece. Several answers to one prompt share the way.

Knows the target and answers; does not know whose turn it is, nor what drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.engine.completion import Completion
from forerun.errors import Isolation
from forerun.scores import logprobs_of
from forerun.target import Scored, Target
from forerun.types import Signal, TokenLogprob

_SCORED_AT_ONCE = 64
"""Positions of a prompt whose log-probabilities are computed together: float32 over the vocabulary for each."""


@dataclass(kw_only=True, eq=False, slots=True)
class Reading:
    """One text: a prompt or, after a preemption, prompt and output."""

    answers: list[Completion]
    """The first one's row is filled; the others, to the same prompt, copy it."""
    tokens: list[int]
    """What is to stand in the cache: of an answer that has begun, all but the last token, which is the next root."""
    requires: frozenset[Signal]
    """The hidden states that its drafter reads."""
    done: int = 0
    """Tokens in the cache."""
    known: int = 0
    """Tokens that the drafter of the first answer still holds from before."""
    states: dict[Signal, list[Tensor]] = field(default_factory=dict)
    """(M, H) of each piece that was run."""

    @classmethod
    def of(cls, answer: Completion, requires: frozenset[Signal]) -> Reading:
        """What the answer's row lacks."""
        text = answer.row.tokens[:-1] if answer.tokens else list(answer.row.tokens)
        return cls(answers=[answer], tokens=text, requires=requires)

    @property
    def row(self) -> int:
        """The cache row that is filled."""
        return self.answers[0].row.row

    @property
    def begins(self) -> bool:
        """Whether the answers have no token yet: their first ones come with the last piece."""
        return not self.answers[0].tokens

    @property
    def finished(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether the request wants the prompt's own log-probabilities, and from this reading."""
        first = self.answers[0]
        return first.request.params.prompt_logprobs is not None and self.begins and first.index == 0

    def next_piece(self, piece: int) -> list[int]:
        """The tokens up to the next multiple of `piece`."""
        return self.tokens[self.done : (self.done // piece + 1) * piece]

    def take(self, count: int, scored: Scored, place: int) -> None:
        """`count` more tokens were run, in line `place` of a pass."""
        for signal in self.requires:
            self.states.setdefault(signal, []).append(scored.signals[signal][place, :count])
        if self.scores_prompt:
            with Isolation(self.answers[0].row):
                self._score_prompt(scored.logits[place, :count])
        self.done += count

    def signals(self) -> dict[Signal, Tensor]:
        """(M, H) of all tokens that were run."""
        return {signal: torch.cat(parts) for signal, parts in self.states.items()}

    def _score_prompt(self, logits: Tensor) -> None:
        """vLLM's shape: None for the first token, then per token a dict that holds it and the likeliest.

        Args:
            logits: (M, V) of what was run now.
        """
        request = self.answers[0].request
        top = request.params.prompt_logprobs or 0
        found: list[Mapping[int, TokenLogprob] | None] = [None]
        if self.done and request.prompt_logprobs is not None:
            found = request.prompt_logprobs
        tokens = self.tokens[self.done + 1 : self.done + len(logits) + 1]
        for start in range(0, len(tokens), _SCORED_AT_ONCE):
            some = tokens[start : start + _SCORED_AT_ONCE]
            pairs = logprobs_of(logits[start : start + len(some)], some, top)
            found += [{**best, token: chosen} for token, (chosen, best) in zip(some, pairs, strict=True)]
        request.prompt_logprobs = found


def read(target: Target, readings: Sequence[Reading], piece: int) -> Tensor:
    """One pass: the next piece of each text. Rows of finished texts are copied for the answers that share them.

    Returns:
        (B, 1, V) logits after the last token of each piece.
    """
    pieces = [reading.next_piece(piece) for reading in readings]
    scored = target.prefill(
        [reading.row for reading in readings],
        pieces,
        signals=frozenset[Signal]().union(*(reading.requires for reading in readings)),
        all_logits=any(reading.scores_prompt for reading in readings),
    )
    for place, (reading, tokens) in enumerate(zip(readings, pieces, strict=True)):
        reading.take(len(tokens), scored, place)
        for answer in reading.answers[1:] if reading.finished else ():
            target.copy_row(reading.row, answer.row.row, reading.done)
    if scored.logits.shape[1] == 1:
        return scored.logits
    ends = torch.tensor([len(tokens) - 1 for tokens in pieces], device=scored.logits.device)
    return scored.logits[torch.arange(len(pieces), device=ends.device), ends].unsqueeze(1)
