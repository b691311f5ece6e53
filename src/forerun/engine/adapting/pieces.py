"""Pieces of answers with the target's laws at their positions, and the bounded store that keeps them.

numpy on purpose: what the engine computes in inference mode could not be trained on, and arrays tell their bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PIECE = 64
"""Most positions of a piece."""
CONTEXT = 192
"""Most tokens before a piece's first position that are kept with it."""
HELD_SHARE = 0.125
"""Of the store's bytes, for what is held back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of one answer, and the target's laws at M of its positions."""

    tokens: npt.NDArray[np.int32]
    """(S,) what was read, context first."""
    places: npt.NDArray[np.int32]
    """(M,) after which of the tokens each law stands."""
    ids: npt.NDArray[np.int32]
    """(M, k) the likeliest tokens, best first."""
    probs: npt.NDArray[np.float16]
    """(M, k) their probabilities at `temperature`, before any other processing; what is missing to 1 is the rest's."""
    rejected: npt.NDArray[np.bool_]
    """(M,) where a draft was rejected."""
    temperature: float
    """Of the request. At 0 the laws are those of temperature 1, and a draft is right if it is the likeliest token."""
    held: bool
    """Kept for judging candidates; never trained on."""

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        arrays = (self.tokens, self.places, self.ids, self.probs, self.rejected)
        return sum(array.nbytes for array in arrays)


class Store:
    """The newest pieces, in two rings bounded in bytes. Safe for use by several threads."""

    def __init__(self, memory_bytes: int) -> None:
        held = int(memory_bytes * HELD_SHARE)
        self._rings = {True: deque[Piece](), False: deque[Piece]()}
        self._limits = {True: held, False: memory_bytes - held}
        self._sizes = {True: 0, False: 0}
        self._lock = threading.Lock()
        self.added = 0
        """Pieces to train on that ever came in."""
        self.positions = 0
        """Positions that ever came in, held back ones included."""
        self.rejected = 0
        """Those of them where a draft was rejected."""

    def add(self, piece: Piece) -> None:
        """Keep a piece; the oldest of its kind give way."""
        with self._lock:
            ring = self._rings[piece.held]
            ring.append(piece)
            self._sizes[piece.held] += piece.nbytes
            while self._sizes[piece.held] > self._limits[piece.held]:
                self._sizes[piece.held] -= ring.popleft().nbytes
            self.added += not piece.held
            self.positions += len(piece.places)
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
