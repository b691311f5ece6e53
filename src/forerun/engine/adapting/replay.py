"""The replay buffer: stretches of answers with the target's distributions at their positions, and who fills it.

The collector runs in the engine's thread. Of every row it looks at the committed path: the root and the accepted nodes,
the last of which is where the draft was rejected, if it was. One selection, one softmax, one top-k and one transfer to
the host for the whole batch and step. Arrays are numpy's on purpose: what the engine computes in inference mode could
not be trained on, and arrays tell their bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from forerun.core.sampling import Sampler
from forerun.core.scores import Scores
from forerun.drafters.base import DraftContext
from forerun.types import Source, Verdict

PIECE = 64  # Most positions of a piece
CONTEXT = 192  # Most tokens before a piece's first position that are kept with it
HELD_SHARE = 0.125  # Of the buffer's bytes, for what is held back


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of one answer, and the target's distributions at M of its positions."""

    tokens: npt.NDArray[np.int32]  # (S,) what was read, context first
    positions: npt.NDArray[np.int32]  # (M,) after which of the tokens each distribution stands
    ids: npt.NDArray[np.int32]  # (M, k) the likeliest tokens, best first
    probs: npt.NDArray[np.float16]
    """(M, k) their probabilities at `temperature`, before any other processing; what is missing to 1 is the rest's."""
    rejected: npt.NDArray[np.bool_]  # (M,) where a draft was rejected
    temperature: float
    """Of the request. At 0 the probabilities are of temperature 1, and a draft is right if it is the likeliest."""
    held: bool  # Held back for comparing candidates; never trained on

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        arrays = (self.tokens, self.positions, self.ids, self.probs, self.rejected)
        return sum(array.nbytes for array in arrays)


class ReplayBuffer:
    """The newest pieces, in two rings bounded in bytes. Safe for use by several threads."""

    def __init__(self, memory_bytes: int) -> None:
        held = int(memory_bytes * HELD_SHARE)
        self._rings = {True: deque[Piece](), False: deque[Piece]()}
        self._limits = {True: held, False: memory_bytes - held}
        self._sizes = {True: 0, False: 0}
        self._lock = threading.Lock()
        self.added = 0  # Pieces to train on that ever came in
        self.positions = 0  # Positions that ever came in, held back ones included
        self.rejected = 0  # Those of them where a draft was rejected

    def add(self, piece: Piece) -> None:
        """Keep a piece; the oldest of its kind are dropped."""
        with self._lock:
            ring = self._rings[piece.held]
            ring.append(piece)
            self._sizes[piece.held] += piece.nbytes
            while self._sizes[piece.held] > self._limits[piece.held]:
                self._sizes[piece.held] -= ring.popleft().nbytes
            self.added += not piece.held
            self.positions += len(piece.positions)
            self.rejected += int(piece.rejected.sum())

    def training(self) -> list[Piece]:
        """Those to train on, oldest first."""
        with self._lock:
            return list(self._rings[False])

    def held(self, most: int) -> list[Piece]:
        """The newest held back ones, at most so many."""
        with self._lock:
            return list(self._rings[True])[-most:]

    @property
    def nbytes(self) -> int:
        """Of all that is kept."""
        return self._sizes[True] + self._sizes[False]


@dataclass(kw_only=True, slots=True)
class _Answer:
    """An answer that is being written."""

    tokens: Sequence[int]  # The row's live list
    held: bool
    temperature: float
    positions: list[int] = field(default_factory=list)  # Absolute: the distribution after token ``tokens[position]``
    ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    probs: list[npt.NDArray[np.float16]] = field(default_factory=list)
    rejected: list[bool] = field(default_factory=list)

    def piece(self) -> Piece | None:
        """What was noted, which is then forgotten; None where that is nothing. A list that shrank loses its end."""
        count = sum(position < len(self.tokens) for position in self.positions)
        positions, rejected = self.positions[:count], self.rejected[:count]
        ids, probs = self.ids, self.probs
        self.positions, self.rejected, self.ids, self.probs = [], [], [], []
        if not positions:
            return None
        start = max(0, positions[0] + 1 - CONTEXT)
        return Piece(
            tokens=np.array(self.tokens[start : positions[-1] + 1], dtype=np.int32),
            positions=np.array(positions, dtype=np.int32) - start,
            ids=np.concatenate(ids)[:count],
            probs=np.concatenate(probs)[:count],
            rejected=np.array(rejected),
            temperature=self.temperature,
            held=self.held,
        )


class Collector:
    """Fills a `ReplayBuffer` with pieces from the steps of one drafter.

    Args:
        top_k: tokens kept of each distribution.
        held_every: one answer of so many is held back, the first one too.
        readable: tokens that the drafter's vocabulary has; others teach it nothing, but count as the rest.
    """

    def __init__(self, buffer: ReplayBuffer, *, top_k: int, held_every: int, readable: int) -> None:
        self._buffer, self._top_k, self._held_every, self._readable = buffer, top_k, held_every, readable
        self._answers: dict[int, _Answer] = {}
        self._begun = 0

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        """Note a step, as `Drafter.observe` is shown it."""
        ids, probs = self._top_probs(context, verdicts, scores)
        start = 0
        for index, verdict in enumerate(verdicts):
            count = len(verdict.path) + 1
            answer = self._answer(context, index)
            first = len(context.tokens[index]) - context.fresh[index] - 1
            answer.positions.extend(range(first, first + count))
            answer.ids.append(ids[start : start + count])
            answer.probs.append(probs[start : start + count])
            answer.rejected.extend([False] * (count - 1) + [verdict.kind is Source.RECOVERED])
            start += count
            if len(answer.positions) >= PIECE:
                self._keep(answer)

    def close(self, rows: Sequence[int]) -> None:
        """These rows' answers ended, or lost tokens."""
        for row in rows:
            answer = self._answers.pop(row, None)
            if answer is not None:
                self._keep(answer)

    def _answer(self, context: DraftContext, index: int) -> _Answer:
        row, tokens = context.rows[index], context.tokens[index]
        answer = self._answers.get(row)
        if answer is None or answer.tokens is not tokens:
            self.close([row])
            held = self._begun % self._held_every == 0
            temperature = _temperature(context.samplers[index])
            answer = self._answers[row] = _Answer(tokens=tokens, held=held, temperature=temperature)
            self._begun += 1
        return answer

    def _keep(self, answer: _Answer) -> None:
        piece = answer.piece()
        if piece is not None:
            self._buffer.add(piece)

    def _top_probs(
        self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """(M, k) tokens and probabilities at the nodes of all rows' committed paths, row after row."""
        positions = [(index, node) for index, verdict in enumerate(verdicts) for node in (0, *verdict.path)]
        device = scores.logits.device
        rows, nodes = torch.tensor(positions, device=device).unbind(1)
        heats = [_temperature(sampler) or 1.0 for sampler in context.samplers]
        temperatures = torch.tensor([heats[index] for index, _ in positions], dtype=torch.float32, device=device)
        logits = scores.logits[rows, nodes].float() / temperatures.unsqueeze(1)
        known = torch.log_softmax(logits, -1)[:, : self._readable]
        top, ids = known.topk(min(self._top_k, known.shape[-1]), dim=-1)
        return ids.cpu().numpy().astype(np.int32), top.exp().cpu().numpy().astype(np.float16)


def _temperature(sampler: Sampler) -> float:
    given = sampler.params.temperature
    return 1.0 if given is None else given
