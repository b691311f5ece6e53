"""The scheduler's choices: who gets the next row, whose prompts the next pass reads, who is
preempted; and prefills.

Policy and bookkeeping alone; `core` carries it out. The whole rule in three sentences. *Rows*: whoever holds the fewest
is next, and where none is free takes one from whoever holds at least two more. *Passes*: the prompts of the client of
whom the fewest tokens were read go first, of its prompts the one with the fewest left; what ends in the pass shares it,
and a longer prompt is cut. *Cuts*: a pass is so short that nobody waits longer than `MAX_GAP` decoding steps for it.
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

CUT = 8  # Prompts are cut at multiples of so many tokens, or of the limit where it is less
MAX_GAP = 2.75
"""Most decoding steps that a running answer's next token, or a prompt that has just come, waits for
a pass over prompts, a step of its own included; with the way to the client it is three. So a pass
takes less than two beside a stream: of SmolLM2-135M in bfloat16 on two cores 24 tokens behind none,
8 behind 3,500.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduling:
    """Limits of an engine. The names are vLLM's where it has one."""

    max_num_batched_tokens: int | None = PREFILL_CHUNK
    """Most prompt tokens of a pass; such a pass and a decoding step take turns. None: on a CPU, where every token of a
    pass costs, as many as `MAX_GAP` allows by what passes take, else 512."""
    whole_chunks: bool = False
    """True: prompts are cut only at multiples of 512, or of the limit where it is less, whatever
    else runs.
    """
    enable_prefix_caching: bool = True  # Whether a free row still serves the prompts that begin with what it held
    kv_cache_tokens: int | None = None
    """Most tokens that all rows together hold, prefixes kept for reuse included; None: rows x slots. Drafted nodes come
    on top while a step runs. What is dropped can be held again, not given back: the cache has rows x slots from the
    first pass on. A CPU gives memory only to slots that were ever written; on CUDA all of it is taken at once."""

    def __post_init__(self) -> None:
        refuse_below("", self, max_num_batched_tokens=1, kv_cache_tokens=2)


# --- rows -------------------------------------------------------------------------------------------------------------


def next_in_line(waiting: Sequence[Completion], running: Sequence[Completion]) -> Completion:
    """Return the answer that gets the next row.

    The client with the fewest rows is next, of its users the one with the fewest, of its requests likewise; among
    equals an answer that has begun, then the prompt that is `due`: a request of 64 answers, or a client's burst, gets
    every row that nobody else wants and not one more. What a client calls its users takes rows from its own users
    alone, and its priorities decide which of its requests goes first when it is its turn.
    """
    held = _held(running)

    def rank(answer: Completion) -> tuple[list[int], bool, int, int]:
        rows = [held[group] for group in _groups(answer.request)]
        return rows, not answer.tokens, due(answer.request), answer.order

    first = min(waiting, key=rank)
    own = [answer for answer in waiting if _groups(answer.request)[0] == _groups(first.request)[0]]
    return min(own, key=lambda answer: (not answer.tokens, answer.request.priority, *rank(answer)))


def row_for(answer: Completion, running: Sequence[Completion], lengths: Sequence[int]) -> Completion | None:
    """Return the running answer that gives its row to `answer`; None where it has to wait.

    It is one of whoever holds the most rows, if that still holds as many as the other without it: among clients, users
    of one client, and requests of one user. Of its answers the one goes that has least to be read again, by `lengths`,
    the tokens in each row of the cache; among equals the youngest. One of which nothing has been read makes room for a
    prompt that would be read before it, too.
    """
    held, own = _held(running), _groups(answer.request)
    found = list[tuple[int, int, int, Completion]]()
    for other in running:
        pairs = zip(_groups(other.request), own, strict=True)
        theirs, ours = next(((held[group], held[mine]) for group, mine in pairs if group != mine), (0, 0))
        length = lengths[other.row.cache_row]
        if theirs >= ours + 2 or (theirs > ours and not length and due(answer.request) < due(other.request)):
            found.append((-theirs, length, -other.order, other))
    return min(found, key=lambda one: one[:3])[3] if found else None


def due(request: Request, done: int = 0) -> int:
    """Return when a prompt is read, of which `done` tokens have been: a client's lowest comes
    first. The fewer are left the sooner, and each token that was read since the request came counts
    as one less, so that none waits for ever.
    """
    return request.arrived + len(request.prompt_tokens) - done


def _held(running: Sequence[Completion]) -> Counter[tuple[str | None, ...]]:
    """Count the rows of each group."""
    return Counter(group for answer in running for group in set(_groups(answer.request)))


def _groups(request: Request) -> tuple[tuple[str | None, ...], ...]:
    """Return the groups among whom rows are shared, the widest first; a request that no client was
    named for is a group of its own.
    """
    if request.client is None:
        return (("", request.id),) * 3
    return (request.client,), (request.client, request.user), ("", request.id)


# --- passes over prompts ----------------------------------------------------------------------------------------------


_SPARSE = 4  # Rows x longest piece of a pass, which its masks are as large as, over its budget, where padding is free
_ASSUMED = 64  # Tokens of a pass while nothing was measured


class PrefillQueue:
    """A queue that decides which prompts the next pass reads, and how much of each.

    The client of whom the fewest prompt tokens were read comes first (a virtual token counter: Sheng et al., OSDI
    2024); one that comes back starts with as many as the least of those in line. Of its prompts the one goes first that
    has the fewest tokens left, see `due`. Prompts that end in the pass share it; a longer one is cut, and only where it
    stands first: nobody's short prompt waits for the end of a long one.

    Args:
        padded: whether a pass costs what its longest piece costs in every row.
    """

    def __init__(self, limits: Scheduling, *, padded: bool) -> None:
        self._limits, self._padded = limits, padded
        self.clock = 0  # Prompt tokens that were read
        self._read = dict[str | None, int]()  # Virtual token counters, by client, of those that have any credit
        self._in_line = frozenset[str | None]()

    def next_pass(self, prefills: Sequence[Prefill], budget: int) -> list[tuple[Prefill, list[int]]]:
        """Return prompts and the next tokens of each, `budget` together, in the order of their rows; at least one."""
        self._lift(prefills)
        chosen, left, widest = list[tuple[Prefill, list[int]]](), budget, 0
        for prefill in sorted(prefills, key=lambda one: (self._read[one.request.client], due(one.request, one.done))):
            piece = self._piece(prefill, left, budget)
            ends, longest = prefill.done + len(piece) == len(prefill.tokens), max(widest, len(piece))
            wide = self._padded or any(one.scores_prompt for one in (prefill, *(other for other, _ in chosen)))
            fits = len(piece) <= left and (len(chosen) + 1) * longest <= (budget if wide else _SPARSE * budget)
            if not chosen or (ends and fits):
                chosen.append((prefill, piece))
                left, widest = left - len(piece), longest
        self._charge(chosen)
        return sorted(chosen, key=lambda one: one[0].row)

    def _piece(self, prefill: Prefill, left: int, budget: int) -> list[int]:
        """Return the prompt's next tokens, `left` at most, or up to the first place where it may be
        cut.
        """
        unit, done = min(PREFILL_CHUNK if self._limits.whole_chunks else CUT, budget), prefill.done
        end = done + left
        return prefill.tokens[done : end if end >= len(prefill.tokens) else max(end // unit, done // unit + 1) * unit]

    def _lift(self, prefills: Sequence[Prefill]) -> None:
        """Deny clients that have come since the last pass any credit for the time before."""
        in_line = frozenset(prefill.request.client for prefill in prefills)
        staying = [self._read[client] for client in in_line & self._in_line]
        floor, kept = min(staying, default=0), self._read if staying else {}
        self._read = {client: read for client, read in kept.items() if read > floor} | {
            client: max(floor, kept.get(client, 0)) for client in in_line
        }
        self._in_line = in_line

    def _charge(self, chosen: Sequence[tuple[Prefill, list[int]]]) -> None:
        read = Counter[str | None]()
        for prefill, piece in chosen:
            read[prefill.request.client] += len(piece)
        for client, count in read.items():
            self._read[client] += max(2 * CUT, count)  # A pass over fewer costs as much
        self.clock += max(2 * CUT, read.total())


class PassTimes:
    """Decides how many prompt tokens a pass may have, from what recent passes took: it takes a
    decoding step, which reads the weights as well, and so much for each token.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=33)  # Times of decoding steps, s
        self._passes: deque[tuple[int, float]] = deque(maxlen=9)  # Over prompts: tokens, s

    def add_step(self, seconds: float) -> None:
        """Record a decoding step."""
        self._steps.append(seconds)

    def add_pass(self, tokens: int, seconds: float) -> None:
        """Record a pass over prompts; one over very few tokens tells nothing of what each costs."""
        if tokens >= CUT:
            self._passes.append((tokens, seconds))

    def tokens(self, *, beside: bool) -> int:
        """Return how many tokens keep within `MAX_GAP`, a multiple of `CUT`; `beside` says that a
        step comes in between.
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
    """A prompt or, after a preemption, prompt and output, on its way into the cache; answers to one
    prompt share it.
    """

    answers: list[Completion]  # The first one's row is filled; the others, to the same prompt, copy it
    tokens: list[int]
    """Tokens that are to stand in the cache: of an answer that has begun, all but the last token,
    which is the next root.
    """
    requires: frozenset[Boundary]  # The hidden states that its drafter reads
    done: int = 0  # Tokens in the cache
    known: int = 0  # Tokens that the drafter of the first answer has been shown, or still holds from before
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)
    """Hidden states (M, H) of each chunk that was run, from the last known token on."""

    @property
    def row(self) -> int:
        return self.answers[0].row.cache_row

    @property
    def request(self) -> Request:
        return self.answers[0].request

    @property
    def begins(self) -> bool:
        """True if the answers have no token yet: their first ones come with the last chunk."""
        return not self.answers[0].tokens

    @property
    def finished(self) -> bool:
        return self.done == len(self.tokens)

    @property
    def shared(self) -> bool:
        """True if several answers read it, or may yet: their drafters are shown it when it has been
        read.
        """
        return self.answers[0].request.params.n > 1

    @property
    def scores_prompt(self) -> bool:
        """True if the request wants the prompt's own log-probabilities, and from this prefill."""
        first = self.answers[0]
        return first.request.params.prompt_logprobs is not None and self.begins and first.index == 0

    def take(self, count: int, scored: Scored, line: int) -> None:
        """Record that `count` more tokens were run, in `line` of a pass."""
        for boundary in self.requires:
            self.states.setdefault(boundary, []).append(scored.hidden_states[boundary][line, :count])
        if self.scores_prompt:
            with Isolation(self.answers[0].row):
                self._score_prompt(scored.logits[line, :count])
        self.done += count

    def hidden_states(self) -> dict[Boundary, Tensor]:
        """Return the hidden states (M, H) of all tokens that were run since its drafter was last
        shown some.
        """
        return {boundary: torch.cat(parts) for boundary, parts in self.states.items()}

    def shown(self) -> None:
        """Note that its drafter knows all that was run. The last hidden state is kept: that before
        the next token.
        """
        self.known = self.done
        self.states = {boundary: [parts[-1][-1:].clone()] for boundary, parts in self.states.items()}

    def _score_prompt(self, logits: Tensor) -> None:
        """Store log-probabilities in vLLM's shape, from logits (M, V) of what was run now: None for
        the first token, then per token a dict that holds it and the likeliest.
        """
        request = self.answers[0].request
        top = request.params.prompt_logprobs or 0
        found: list[Mapping[int, TokenLogprob] | None] = [None]
        if self.done and request.prompt_logprobs is not None:
            found = request.prompt_logprobs
        tokens = self.tokens[self.done + 1 : self.done + len(logits) + 1]
        pairs = logprobs_of(logits[: len(tokens)], tokens, top)
        found += [{**best, token: chosen} for token, (chosen, best) in zip(tokens, pairs, strict=True)]
        request.prompt_logprobs = found


def run_prefills(target: Target, pieces: Sequence[tuple[Prefill, list[int]]]) -> Tensor:
    """Run one pass: the next tokens of each prefill; returns (B, 1, V) the logits after the last
    ones. Rows of finished ones are copied for the answers that share them.
    """
    scored = target.prefill(
        [prefill.row for prefill, _ in pieces],
        [tokens for _, tokens in pieces],
        boundaries=frozenset[Boundary]().union(*(prefill.requires for prefill, _ in pieces)),
        all_logits=any(prefill.scores_prompt for prefill, _ in pieces),
    )
    for line, (prefill, tokens) in enumerate(pieces):
        prefill.take(len(tokens), scored, line)
        for answer in prefill.answers[1:] if prefill.finished else ():
            target.copy_row(prefill.row, answer.row.cache_row, prefill.done)
    if scored.logits.shape[1] == 1:
        return scored.logits
    ends = torch.tensor([len(tokens) - 1 for _, tokens in pieces], device=scored.logits.device)
    return scored.logits[torch.arange(len(pieces), device=ends.device), ends].unsqueeze(1)
