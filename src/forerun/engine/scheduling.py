"""The scheduler decides which completion gets the next row, which is preempted, and which prompts are prefilled next.

It only decides; `core` carries the decisions out. The rules are:

* Rows: the client with the fewest rows gets the next one. If no row is free, it preempts a completion of a client that
  has at least two rows more.
* Prefill passes: the client of whom the fewest prompt tokens were prefilled comes first, and of its prompts the one
  with the fewest tokens left. Prompts that end in the pass share it; a longer one is cut into chunks.
* Chunk size: a pass is so short that no other request waits for it longer than `MAX_GAP` decoding steps.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from forerun.decode.scores import logprobs_of
from forerun.engine.completion import Completion, Request
from forerun.errors import Isolation, refuse_below
from forerun.model import Scored, Target
from forerun.model.target import PREFILL_CHUNK
from forerun.types import Boundary, TokenLogprob

CUT = 8  # Prompts are cut at multiples of this many tokens, or of the limit where it is less
MAX_GAP = 2.75
"""Most decoding steps that the next token of a running completion, or a prompt that has just arrived, waits for a
prefill pass, a decoding step of its own included. Beside running completions a prefill pass therefore takes less than
two decoding steps: for SmolLM2-135M in bfloat16 on two cores 24 tokens of an empty context, 8 after 3,500.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """The limits of an engine, with vLLM's names where it has them."""

    max_num_batched_tokens: int | None = PREFILL_CHUNK
    """Most prompt tokens of a prefill pass, which alternates with decoding steps. None: on a CPU as many as `MAX_GAP`
    allows, by measured times, else 512."""
    whole_chunks: bool = False
    """True: prompts are cut only at multiples of 512, or of the limit where it is less, independent of other
    requests.
    """
    enable_prefix_caching: bool = True  # Whether free rows keep their content for prompts with that prefix
    kv_cache_tokens: int | None = None
    """Most tokens in all rows together, cached prefixes included; None: rows x slots. Drafted nodes come on top while a
    step runs. It limits use, not allocation: the cache has rows x slots from the first pass on. On a CPU only slots
    that were written take memory; on CUDA all of them do."""

    def __post_init__(self) -> None:
        refuse_below("", self, max_num_batched_tokens=1, kv_cache_tokens=2)


# --- rows -------------------------------------------------------------------------------------------------------------


def next_in_line(waiting: Sequence[Completion], running: Sequence[Completion]) -> Completion:
    """Return the waiting completion that gets the next row.

    It belongs to the client with the fewest rows, of its users to the one with the fewest, and of those requests to the
    one with the fewest; among equals a completion that has already begun comes first, then the prompt that is `due`. So
    a request with 64 completions, or a client's burst, gets all rows that no other client wants, and no more. Users and
    priorities only matter among the requests of one client.
    """
    held = _held(running)

    def rank(completion: Completion) -> tuple[list[int], bool, int, int]:
        rows = [held[group] for group in _groups(completion.request)]
        return rows, not completion.tokens, due(completion.request), completion.order

    first = min(waiting, key=rank)
    of_client = [completion for completion in waiting if _groups(completion.request)[0] == _groups(first.request)[0]]
    return min(
        of_client, key=lambda completion: (not completion.tokens, completion.request.priority, *rank(completion))
    )


def completion_to_preempt(
    completion: Completion, running: Sequence[Completion], lengths: Sequence[int]
) -> Completion | None:
    """Return the running completion to preempt for `completion`, or None if it has to wait.

    A completion is preempted if its client (among users of one client: its user; of one user: its request) has at least
    two rows more than that of `completion`. If nothing of it has been prefilled yet, one row more suffices, if the
    other prompt is due earlier; among those of one client their priorities come first. It is taken from the holder of
    the most rows: the one with the fewest tokens to prefill again, by `lengths`, the tokens in each row of the cache;
    among equals the youngest.
    """
    held = _held(running)
    own_groups = _groups(completion.request)
    candidates = list[tuple[int, int, int, Completion]]()
    for other in running:
        pairs = zip(_groups(other.request), own_groups, strict=True)
        theirs, ours = next(((held[group], held[own]) for group, own in pairs if group != own), (0, 0))
        length = lengths[other.row.cache_row]
        kin = _groups(other.request)[0] == own_groups[0]  # Of one client, so that priorities count
        turn, other_turn = ((kin * one.request.priority, due(one.request)) for one in (completion, other))
        if theirs >= ours + 2 or (theirs > ours and not length and turn < other_turn):
            candidates.append((-theirs, length, -other.order, other))
    return min(candidates, key=lambda one: one[:3])[3] if candidates else None


def due(request: Request, done: int = 0) -> int:
    """Return the sort key of a prompt of which `done` tokens are prefilled; of a client's prompts the smallest comes
    first. It is the number of tokens left, plus those that the engine had prefilled when the request arrived: so older
    requests come forward, and none waits for ever.
    """
    return request.arrived + len(request.prompt_tokens) - done


def _held(running: Sequence[Completion]) -> Counter[tuple[str | None, ...]]:
    """Count the rows of each group."""
    return Counter(group for completion in running for group in set(_groups(completion.request)))


def _groups(request: Request) -> tuple[tuple[str | None, ...], ...]:
    """Return the groups of a request among which rows are shared: client, user, request. A request without a client is
    a group of its own.
    """
    if request.client is None:
        return (("", request.id),) * 3
    return (request.client,), (request.client, request.user), ("", request.id)


# --- passes over prompts ----------------------------------------------------------------------------------------------


_SPARSE = 4  # Where padding is free: most rows x longest chunk of a pass (its masks' size), relative to its budget
_ASSUMED = 64  # Tokens of a pass until times are measured


class PrefillQueue:
    """Decides which prompts the next pass prefills, and how many tokens of each.

    The client of whom the fewest prompt tokens were prefilled comes first (a virtual token counter: Sheng et al., OSDI
    2024). One that comes back starts with the smallest counter of the waiting ones. Of its prompts the one with the
    fewest tokens left comes first, see `due`. Prompts that end in the pass share it. A longer one is cut, and runs only
    if it comes first: no short prompt waits for the end of a long one.

    Args:
        padded: whether all rows of a pass cost as much as its longest chunk.
    """

    def __init__(self, limits: Scheduling, *, padded: bool) -> None:
        self._limits, self._padded = limits, padded
        self.clock = 0  # Prompt tokens prefilled so far
        self._read = dict[str | None, int]()  # Virtual token counters by client
        self._in_line = frozenset[str | None]()

    def next_pass(self, prefills: Sequence[Prefill], budget: int) -> list[tuple[Prefill, list[int]]]:
        """Return prompts and the next tokens of each, at most `budget` in all but at least one, ordered by row."""
        self._lift(prefills)
        chosen, left, widest = list[tuple[Prefill, list[int]]](), budget, 0

        def rank(prefill: Prefill) -> tuple[int, int]:
            return self._read[prefill.request.client], due(prefill.request, prefill.done)

        for prefill in sorted(prefills, key=rank):
            piece = self._piece(prefill, left, budget)
            ends = prefill.done + len(piece) == len(prefill.tokens)
            longest = max(widest, len(piece))
            wide = self._padded or any(each.scores_prompt for each in (prefill, *(other for other, _ in chosen)))
            fits = len(piece) <= left and (len(chosen) + 1) * longest <= (budget if wide else _SPARSE * budget)
            if not chosen or (ends and fits):
                chosen.append((prefill, piece))
                left, widest = left - len(piece), longest
        self._charge(chosen)
        return sorted(chosen, key=lambda pair: pair[0].row)

    def _piece(self, prefill: Prefill, left: int, budget: int) -> list[int]:
        """Return the prompt's next tokens: at most `left`, but at least up to the first position where it may be
        cut.
        """
        unit, done = min(PREFILL_CHUNK if self._limits.whole_chunks else CUT, budget), prefill.done
        end = done + left
        return prefill.tokens[done : end if end >= len(prefill.tokens) else max(end // unit, done // unit + 1) * unit]

    def _lift(self, prefills: Sequence[Prefill]) -> None:
        """Raise the counters of clients that have come since the last pass, so that being idle earns no credit."""
        in_line = frozenset(prefill.request.client for prefill in prefills)
        staying = [self._read[client] for client in in_line & self._in_line]
        floor = min(staying, default=0)
        counters = self._read if staying else {}
        self._read = {client: read for client, read in counters.items() if read > floor} | {
            client: max(floor, counters.get(client, 0)) for client in in_line
        }
        self._in_line = in_line

    def _charge(self, chosen: Sequence[tuple[Prefill, list[int]]]) -> None:
        read = Counter[str | None]()
        for prefill, piece in chosen:
            read[prefill.request.client] += len(piece)
        for client, count in read.items():
            self._read[client] += max(2 * CUT, count)  # Shorter passes cost as much
        self.clock += max(2 * CUT, read.total())


class PassTimes:
    """Decides how many prompt tokens a pass may have, from the times of recent passes. A pass is modelled as a decoding
    step, which reads the weights, too, and a time for each token.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=33)  # Times of decoding steps, s
        self._passes: deque[tuple[int, float]] = deque(maxlen=9)  # Over prompts: tokens, s

    def add_step(self, seconds: float) -> None:
        """Record a decoding step."""
        self._steps.append(seconds)

    def add_pass(self, tokens: int, seconds: float) -> None:
        """Record a prefill pass; very short ones are ignored, because they do not show the time for each token."""
        if tokens >= CUT:
            self._passes.append((tokens, seconds))

    def tokens(self, *, beside: bool) -> int:
        """Return how many tokens fit in `MAX_GAP`, a multiple of `CUT`; `beside` says that decoding steps come in
        between.
        """
        if not self._steps or not self._passes:
            return _ASSUMED
        step = median(self._steps)
        each = median(max(seconds - step, 0.0) / tokens for tokens, seconds in self._passes)
        room = (MAX_GAP - beside - 1) * step
        most = PREFILL_CHUNK if room >= PREFILL_CHUNK * each else int(room / each)
        return max(CUT, most // CUT * CUT)


# --- prefills ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, slots=True)
class Prefill:
    """The prefill of a prompt or, after a preemption, of prompt and output. Completions of one request share it."""

    completions: list[Completion]  # The first one's row is filled, and then copied for the others
    tokens: list[int]
    """The tokens to write to the cache; after a preemption all but the last token, which is the next root."""
    requires: frozenset[Boundary]  # The hidden states that its drafter reads
    done: int = 0  # Tokens in the cache
    known: int = 0  # Tokens that the first completion's drafter has read, now or for a cached prefix
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)
    """Hidden states (M, H) of each chunk that was run, from the last `known` token on."""

    @property
    def row(self) -> int:
        return self.completions[0].row.cache_row

    @property
    def request(self) -> Request:
        return self.completions[0].request

    @property
    def begins(self) -> bool:
        """True if the completions have no token yet: the last chunk gives their first ones."""
        return not self.completions[0].tokens

    @property
    def finished(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def shared(self) -> bool:
        """True if the request has several completions: their drafters read the prompt when the prefill has finished."""
        return self.completions[0].request.params.n > 1

    @property
    def scores_prompt(self) -> bool:
        """True if this prefill has to compute the prompt's log-probabilities."""
        first = self.completions[0]
        return first.request.params.prompt_logprobs is not None and self.begins and first.index == 0

    def take(self, count: int, scored: Scored, line: int) -> None:
        """Record that `count` more tokens were run, as row `line` of a pass."""
        for boundary in self.requires:
            self.states.setdefault(boundary, []).append(scored.hidden_states[boundary][line, :count])
        if self.scores_prompt:
            with Isolation(self.completions[0].row):
                self._score_prompt(scored.logits[line, :count])
        self.done += count

    def hidden_states(self) -> dict[Boundary, Tensor]:
        """Return the hidden states (M, H) of all tokens that were run since its drafter last read some."""
        return {boundary: torch.cat(parts) for boundary, parts in self.states.items()}

    def mark_read(self) -> None:
        """Note that its drafter has read all tokens that were run. The last hidden state is kept for the next token."""
        self.known = self.done
        self.states = {boundary: [parts[-1][-1:].clone()] for boundary, parts in self.states.items()}

    def _score_prompt(self, logits: Tensor) -> None:
        """Store log-probabilities in vLLM's form, from the logits (M, V) of the latest chunk: None for the first token,
        then for each token a dict with it and the likeliest ones.
        """
        request = self.completions[0].request
        top = request.params.prompt_logprobs or 0
        logprobs: list[Mapping[int, TokenLogprob] | None] = [None]
        if self.done and request.prompt_logprobs is not None:
            logprobs = request.prompt_logprobs
        tokens = self.tokens[self.done + 1 : self.done + len(logits) + 1]
        pairs = logprobs_of(logits[: len(tokens)], tokens, top)
        logprobs += [{**best, token: chosen} for token, (chosen, best) in zip(tokens, pairs, strict=True)]
        request.prompt_logprobs = logprobs


def run_prefills(target: Target, pieces: Sequence[tuple[Prefill, list[int]]]) -> Tensor:
    """Run the next tokens of each prefill in one pass, and return the logits (B, 1, V) after the last ones. Rows of
    finished prefills are copied for the completions that share them.
    """
    scored = target.prefill(
        [prefill.row for prefill, _ in pieces],
        [tokens for _, tokens in pieces],
        boundaries=frozenset[Boundary]().union(*(prefill.requires for prefill, _ in pieces)),
        all_logits=any(prefill.scores_prompt for prefill, _ in pieces),
    )
    for line, (prefill, tokens) in enumerate(pieces):
        prefill.take(len(tokens), scored, line)
        for completion in prefill.completions[1:] if prefill.finished else ():
            target.copy_row(prefill.row, completion.row.cache_row, prefill.done)
    if scored.logits.shape[1] == 1:
        return scored.logits
    ends = torch.tensor([len(tokens) - 1 for _, tokens in pieces], device=scored.logits.device)
    return scored.logits[torch.arange(len(pieces), device=ends.device), ends].unsqueeze(1)
