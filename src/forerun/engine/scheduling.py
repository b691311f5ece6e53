"""Who is next: for a row, for a pass over prompts, and to give its row back. Policy alone; `core` carries it out.

Knows answers and prompts; does not know the cache, nor what drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.engine.completion import Completion, Request
from forerun.engine.reading import Reading
from forerun.errors import ArgumentError
from forerun.target.model import PIECE


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """Limits of an engine. The names are vLLM's where it has one."""

    max_num_batched_tokens: int = 2 * PIECE
    """Most prompt tokens of a pass, tokens; such a pass and a decoding step take turns. More of them cost as much each,
    and all prompts of a pass wait for its end. Prompts are read in pieces that end at multiples of this, or of 512
    where it is more, whatever else runs."""
    enable_prefix_caching: bool = True
    """Whether a row that is free still serves the prompts that begin with what it held."""
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
    def piece(self) -> int:
        """Prompts are cut at multiples of this many tokens."""
        return min(PIECE, self.max_num_batched_tokens)


def next_in_line(waiting: Sequence[Completion], running: Sequence[Completion]) -> Completion:
    """The answer that gets the next row.

    One that was preempted comes first. Otherwise the client with the fewest rows is next, of its users the one with the
    fewest, of its requests likewise, and among equals the oldest. So a request of 64 answers, or a client's burst, gets
    every row that nobody else wants and not one more; and whoever holds no row is served in the order of arrival. What
    a client calls its users takes rows from its own users alone. When it is a client's turn, its own priorities decide
    which of its requests goes first.
    """
    held = Counter(group for answer in running for group in _groups(answer.request))

    def place(answer: Completion) -> tuple[bool, list[int], int]:
        return answer.preemptions == 0, [held[group] for group in _groups(answer.request)], answer.order

    first = min(waiting, key=place)
    own = [answer for answer in waiting if _client(answer) == _client(first)]
    return min(own, key=lambda answer: (answer.preemptions == 0, answer.request.priority, *place(answer)))


def _client(answer: Completion) -> str:
    return answer.request.client or answer.request.id


def _groups(request: Request) -> tuple[tuple[str | None, ...], ...]:
    """Whom rows are shared among, the widest first; a request that no client was named for stands for itself."""
    if request.client is None:
        return (("", request.id),) * 3
    return (request.client,), (request.client, request.user), ("", request.id)


def youngest(running: Sequence[Completion]) -> Completion:
    """The answer that is preempted: the one that came last."""
    return max(running, key=lambda answer: answer.order)


def pass_of(readings: Sequence[Reading], piece: int, budget: int) -> list[Reading]:
    """Whose next pieces the coming pass runs: from the head of the line, at least one, padded to `budget` at most.

    Args:
        readings: the oldest first.
        piece: length of a whole piece, tokens.
        budget: tokens.
    """
    chosen, widest = list[Reading](), 0
    for reading in readings:
        widest = max(widest, len(reading.next_piece(piece)))
        if chosen and (len(chosen) + 1) * widest > budget:
            break
        chosen.append(reading)
    return sorted(chosen, key=lambda reading: reading.row)
