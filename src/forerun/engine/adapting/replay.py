"""The replay buffer: stretches of answers with the target's hidden states, and the collector that
fills it.

The collector runs in the engine's thread. A step has just computed the states of the root and of every accepted node,
and they are all that a training objective asks of the target: nothing is run again. What comes after a stretch's
beginning counts where a step verified drafts; what stands before it is context. Tensors are copied to the host outside
of inference mode, in which nothing could be trained on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.core.sampling import Sampler
from forerun.drafters.base import DraftContext
from forerun.training.batch import FeatureBatch, TokenBatch
from forerun.types import Boundary, Source, Verdict

PIECE = 64  # Most positions of a piece
CONTEXT = 192  # Most tokens before a piece's first position that are kept with it
HELD_SHARE = 0.125  # Share of the buffer's bytes for what is held back


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPiece:
    """A stretch of one answer: S tokens, and the target's states at all but the last."""

    tokens: npt.NDArray[np.int32]  # (S,) context first
    states: Mapping[Boundary, Tensor]  # (S - 1, H) after each token; zeros where nobody reads them
    counted: npt.NDArray[np.bool_]  # (S,) a step that drafted said what the token is
    rejected: npt.NDArray[np.bool_]  # (S,) of these, a draft was rejected there
    temperature: float  # Temperature of the request; 0: it took the likeliest tokens
    held: bool  # Held back for comparing candidates; never trained on

    @property
    def positions(self) -> int:
        """Number of tokens that count."""
        return int(self.counted.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        arrays = (self.tokens, self.counted, self.rejected)
        return sum(array.nbytes for array in arrays) + sum(states.nbytes for states in self.states.values())

    def batch(self, counted: npt.NDArray[np.bool_], vocabulary: int, device: torch.device) -> FeatureBatch:
        """Pack the piece as one row of a training batch; `counted` (S,) says which tokens count,
        ids from `vocabulary` on become 0.
        """
        ids = torch.from_numpy(np.where(self.tokens < vocabulary, self.tokens, 0)).long().unsqueeze(0)
        batch = TokenBatch(
            tokens=ids,
            loss_mask=torch.from_numpy(counted).unsqueeze(0),
            documents=torch.zeros_like(ids),
            positions=torch.arange(ids.shape[1]).unsqueeze(0),
        )
        features = {boundary: pad(states, (0, 0, 0, 1)).unsqueeze(0) for boundary, states in self.states.items()}
        return FeatureBatch(batch=batch, features=features).to(device)


class ReplayBuffer:
    """The newest pieces, in two rings bounded in bytes. Safe for use by several threads."""

    def __init__(self, memory_bytes: int) -> None:
        held = int(memory_bytes * HELD_SHARE)
        self._rings = {True: deque[AnswerPiece](), False: deque[AnswerPiece]()}
        self._limits = {True: held, False: memory_bytes - held}
        self._sizes = {True: 0, False: 0}
        self._lock = threading.Lock()
        self.added = 0  # Pieces to train on that ever came in
        self.positions = 0  # Positions that ever came in, held back ones included
        self.rejected = 0  # Positions at which a draft was rejected

    def add(self, piece: AnswerPiece) -> None:
        """Add a piece; the oldest of its kind are dropped."""
        with self._lock:
            ring = self._rings[piece.held]
            ring.append(piece)
            self._sizes[piece.held] += piece.nbytes
            while self._sizes[piece.held] > self._limits[piece.held]:
                self._sizes[piece.held] -= ring.popleft().nbytes
            self.added += not piece.held
            self.positions += piece.positions
            self.rejected += int(piece.rejected.sum())

    def training(self) -> list[AnswerPiece]:
        """Return the pieces to train on, oldest first."""
        with self._lock:
            return list(self._rings[False])

    def held(self, most: int) -> list[AnswerPiece]:
        """Return the newest held back pieces, at most `most`."""
        with self._lock:
            return list(self._rings[True])[-most:]

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces."""
        return self._sizes[True] + self._sizes[False]


@dataclass(kw_only=True, slots=True)
class _Answer:
    """An answer that is being written: entries from token `start` on, one for each state that is
    known.
    """

    tokens: Sequence[int]  # Tokens known so far
    held: bool
    temperature: float
    start: int = 0
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)  # (n, H) each
    noted: list[bool] = field(default_factory=list)  # A step said what follows the entry's token
    rejected: list[bool] = field(default_factory=list)

    def add(self, states: Mapping[Boundary, Tensor], rejected: Sequence[bool], *, noted: bool) -> None:
        """Append entries."""
        for boundary, part in states.items():
            self.states.setdefault(boundary, []).append(part)
        self.noted += [noted] * len(rejected)
        self.rejected += rejected

    def trim(self) -> None:
        """Turn everything into context, and keep no more of it than that needs."""
        left = max(0, len(self.noted) - CONTEXT)
        self.states = {boundary: [torch.cat(parts)[left:].clone()] for boundary, parts in self.states.items()}
        self.start, self.noted = self.start + left, [False] * (len(self.noted) - left)
        self.rejected = list(self.noted)

    def piece(self) -> AnswerPiece | None:
        """Return the piece that was noted, or None if nothing was. A list that shrank loses its
        end.
        """
        count = max(0, min(len(self.noted), len(self.tokens) - 1 - self.start))
        if not any(self.noted[:count]):
            return None
        return AnswerPiece(
            tokens=np.array(self.tokens[self.start : self.start + count + 1], dtype=np.int32),
            states={boundary: torch.cat(parts)[:count].clone() for boundary, parts in self.states.items()},
            counted=np.array([False, *self.noted[:count]]),
            rejected=np.array([False, *self.rejected[:count]]),
            temperature=self.temperature,
            held=self.held,
        )


class Collector:
    """Fills a `ReplayBuffer` with pieces from the steps of one drafter.

    Args:
        buffer: what is filled.
        boundaries: whose states are kept; `LAST_HIDDEN` is what the target's distributions follow from.
        context: whether the drafter reads states of what comes before a position, too.
        held_every: one of so many answers is held back.
    """

    def __init__(
        self, buffer: ReplayBuffer, *, boundaries: frozenset[Boundary], context: bool, held_every: int
    ) -> None:
        self.boundaries = boundaries
        self._buffer, self._context, self._held_every = buffer, context, held_every
        self._answers: dict[int, _Answer] = {}
        self._begun = 0

    @torch.inference_mode(False)
    def extend(self, context: DraftContext) -> None:
        """Note what a drafter that reads states is shown, as `Drafter.extend` is: what no step has
        noted already.
        """
        if not self._context:
            return
        states = {key: part for key, part in context.hidden_states.items() if key in self.boundaries}
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            count = min(fresh, len(tokens) - 1)
            first = max(0, count - CONTEXT)
            part = {boundary: whole[index, first:count] for boundary, whole in states.items()}
            self._add(context, index, len(tokens) - 1 - count + first, part, [False] * (count - first), noted=False)

    @torch.inference_mode(False)
    def observe(self, context: DraftContext, verdicts: Sequence[Verdict]) -> None:
        """Note a step, with the arguments of `Drafter.observe`."""
        states = {key: part.cpu() for key, part in context.hidden_states.items() if key in self.boundaries}
        for index, verdict in enumerate(verdicts):
            count = len(verdict.path) + 1
            first = len(context.tokens[index]) - context.fresh[index] - 1
            part = {boundary: whole[index, :count] for boundary, whole in states.items()}
            rejected = [False] * (count - 1) + [verdict.kind is Source.RECOVERED]
            answer = self._add(context, index, first, part, rejected, noted=True)
            if sum(answer.noted) >= PIECE:
                self._keep(answer)

    @torch.inference_mode(False)
    def close(self, rows: Sequence[int]) -> None:
        """Close the answers of these rows, which ended, or lost tokens."""
        for row in rows:
            answer = self._answers.pop(row, None)
            if answer is not None:
                self._keep(answer)

    def _add(
        self,
        context: DraftContext,
        index: int,
        first: int,
        states: Mapping[Boundary, Tensor],
        rejected: list[bool],
        *,
        noted: bool,
    ) -> _Answer:
        """Add entries of the tokens from `first` on to a row's answer; those that are there already
        are left out.
        """
        answer = self._answer(context, index)
        end, length = answer.start + len(answer.noted), len(answer.tokens)
        if first > end or not answer.noted:  # it begins, or there is a gap
            self._keep(answer)
            lacking = 0 if self._context else min(first, CONTEXT)
            answer.start, answer.states, answer.noted, answer.rejected = first - lacking, {}, [], []
            nothing = {key: torch.zeros(lacking, part.shape[1], dtype=part.dtype) for key, part in states.items()}
            if lacking:
                answer.add(self._whole(nothing, lacking), [False] * lacking, noted=False)
            end = first
        known = end - first
        if known < len(rejected):
            fresh = {key: part[known:].to("cpu", copy=True) for key, part in states.items()}
            answer.add(self._whole(fresh, len(rejected) - known), rejected[known:], noted=noted)
        if len(answer.noted) > CONTEXT + 2 * PIECE:
            self._keep(answer)
        assert answer.start + len(answer.noted) < length, "the last token has no state yet"
        return answer

    def _whole(self, states: dict[Boundary, Tensor], count: int) -> dict[Boundary, Tensor]:
        """Fill up with zeros the states at boundaries that the drafter is not shown."""
        like = next(iter(states.values()))
        return {key: states.get(key, like.new_zeros(count, like.shape[1])) for key in self.boundaries}

    def _answer(self, context: DraftContext, index: int) -> _Answer:
        row, tokens = context.rows[index], context.tokens[index]
        answer = self._answers.get(row)
        if answer is None:
            held = self._begun % self._held_every == 0
            temperature = _temperature(context.samplers[index])
            answer = self._answers[row] = _Answer(tokens=tokens, held=held, temperature=temperature)
            self._begun += 1
        answer.tokens = tokens  # A list that grows, but for a prompt that is still being read
        return answer

    def _keep(self, answer: _Answer) -> None:
        piece = answer.piece()
        if piece is not None:
            self._buffer.add(piece)
        if answer.noted:
            answer.trim()


def _temperature(sampler: Sampler) -> float:
    asked = sampler.params.temperature
    return 1.0 if asked is None else asked
