"""The scheduler's choices: who gets the next row, whose prefill runs next, who is preempted; and the prefills.

Policy and bookkeeping alone; `core` carries it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.scores import logprobs_of
from forerun.engine.completion import Completion, Request
from forerun.errors import ArgumentError, Isolation
from forerun.model import Scored, Target
from forerun.model.target import PIECE
from forerun.types import Boundary, TokenLogprob


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """Limits of an engine. The names are vLLM's where it has one."""

    max_num_batched_tokens: int = 2 * PIECE
    """Most prompt tokens of a pass, tokens; such a pass and a decoding step take turns. More of them cost as much each,
    and all prompts of a pass wait for its end. Prompts are read in chunks that end at multiples of this, or of 512
    where it is more, whatever else runs."""
    enable_prefix_caching: bool = True  # Whether a free row still serves the prompts that begin with what it held
    kv_cache_tokens: int | None = None
    """Most tokens that all rows together hold, prefixes kept for reuse included; None: rows x slots. Drafted nodes come
    on top while a step runs. What is dropped can be held again, not given back: the cache has rows x slots from the
    first pass on. A CPU gives memory only to slots that were ever written; on CUDA all of it is taken at once."""

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 1:
            raise ArgumentError(f"max_num_batched_tokens must be at least 1, got {self.max_num_batched_tokens}")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < 2:
            raise ArgumentError(f"kv_cache_tokens must be at least 2, got {self.kv_cache_tokens}")

    @property
    def chunk(self) -> int:
        """Prompts are cut at multiples of this many tokens."""
        return min(PIECE, self.max_num_batched_tokens)


def next_in_line(waiting: Sequence[Completion], running: Sequence[Completion]) -> Completion:
    """The answer that gets the next row.

    One that was preempted comes first. Otherwise the client with the fewest rows is next, of its users the one with the
    fewest, of its requests likewise, and among equals the oldest: a request of 64 answers, or a client's burst, gets
    every row that nobody else wants and not one more. What a client calls its users takes rows from its own users
    alone, and its priorities decide which of its requests goes first when it is its turn.
    """
    held = Counter(group for answer in running for group in _groups(answer.request))

    def rank(answer: Completion) -> tuple[bool, list[int], int]:
        return answer.preemptions == 0, [held[group] for group in _groups(answer.request)], answer.order

    first = min(waiting, key=rank)
    own = [answer for answer in waiting if _groups(answer.request)[0] == _groups(first.request)[0]]
    return min(own, key=lambda answer: (answer.preemptions == 0, answer.request.priority, *rank(answer)))


def _groups(request: Request) -> tuple[tuple[str | None, ...], ...]:
    """Whom rows are shared among, the widest first; a request that no client was named for stands for itself."""
    if request.client is None:
        return (("", request.id),) * 3
    return (request.client,), (request.client, request.user), ("", request.id)


def pass_of(prefills: Sequence[Prefill], chunk: int, budget: int) -> list[Prefill]:
    """Whose next chunks, of `chunk` tokens, the coming pass runs: from the head of the line (the oldest come first) at
    least one, padded to `budget` tokens at most."""
    chosen, widest = list[Prefill](), 0
    for prefill in prefills:
        widest = max(widest, len(prefill.next_chunk(chunk)))
        if chosen and (len(chosen) + 1) * widest > budget:
            break
        chosen.append(prefill)
    return sorted(chosen, key=lambda prefill: prefill.row)


# --- prefills ---------------------------------------------------------------------------------------------------------

_SCORED_AT_ONCE = 64  # Positions whose log-probabilities are computed together: each takes float32 over the vocabulary


@dataclass(kw_only=True, eq=False, slots=True)
class Prefill:
    """A prompt or, after a preemption, prompt and output, on its way into the cache; answers to one prompt share it."""

    answers: list[Completion]  # The first one's row is filled; the others, to the same prompt, copy it
    tokens: list[int]
    """What is to stand in the cache: of an answer that has begun, all but the last token, which is the next root."""
    requires: frozenset[Boundary]  # The hidden states that its drafter reads
    done: int = 0  # Tokens in the cache
    known: int = 0  # Tokens that the drafter of the first answer has been shown, or still holds from before
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)
    """(M, H) of each chunk that was run, from the last token that is known on."""

    @property
    def row(self) -> int:
        return self.answers[0].row.cache_row

    @property
    def begins(self) -> bool:
        """Whether the answers have no token yet: their first ones come with the last chunk."""
        return not self.answers[0].tokens

    @property
    def finished(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def shared(self) -> bool:
        """Whether several answers read it, or may yet: their drafters are shown it when it has been read."""
        return self.answers[0].request.params.n > 1

    @property
    def scores_prompt(self) -> bool:
        """Whether the request wants the prompt's own log-probabilities, and from this prefill."""
        first = self.answers[0]
        return first.request.params.prompt_logprobs is not None and self.begins and first.index == 0

    def next_chunk(self, chunk: int) -> list[int]:
        """The tokens up to the next multiple of `chunk`."""
        return self.tokens[self.done : (self.done // chunk + 1) * chunk]

    def take(self, count: int, scored: Scored, line: int) -> None:
        """`count` more tokens were run, in `line` of a pass."""
        for boundary in self.requires:
            self.states.setdefault(boundary, []).append(scored.hidden_states[boundary][line, :count])
        if self.scores_prompt:
            with Isolation(self.answers[0].row):
                self._score_prompt(scored.logits[line, :count])
        self.done += count

    def hidden_states(self) -> dict[Boundary, Tensor]:
        """(M, H) of all tokens that were run since its drafter was last shown some."""
        return {boundary: torch.cat(parts) for boundary, parts in self.states.items()}

    def shown(self) -> None:
        """Its drafter knows all that was run. Of the hidden states the last is kept: that before the next token."""
        self.known = self.done
        self.states = {boundary: [parts[-1][-1:].clone()] for boundary, parts in self.states.items()}

    def _score_prompt(self, logits: Tensor) -> None:
        """In vLLM's shape, from logits (M, V) of what was run now: None for the first token, then per token a dict that
        holds it and the likeliest."""
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


def run_prefills(target: Target, prefills: Sequence[Prefill], chunk: int) -> Tensor:
    """One pass: the next chunk of each prefill, and (B, 1, V) the logits after their last tokens. Rows of finished ones
    are copied for the answers that share them."""
    chunks = [prefill.next_chunk(chunk) for prefill in prefills]
    scored = target.prefill(
        [prefill.row for prefill in prefills],
        chunks,
        boundaries=frozenset[Boundary]().union(*(prefill.requires for prefill in prefills)),
        all_logits=any(prefill.scores_prompt for prefill in prefills),
    )
    for line, (prefill, tokens) in enumerate(zip(prefills, chunks, strict=True)):
        prefill.take(len(tokens), scored, line)
        for answer in prefill.answers[1:] if prefill.finished else ():
            target.copy_row(prefill.row, answer.row.cache_row, prefill.done)
    if scored.logits.shape[1] == 1:
        return scored.logits
    ends = torch.tensor([len(tokens) - 1 for tokens in chunks], device=scored.logits.device)
    return scored.logits[torch.arange(len(chunks), device=ends.device), ends].unsqueeze(1)
