"""Prepared documents to windows of fixed length, the same for any number of processes, at any step, without state.

Whole documents are packed best-fit; each keeps its own number, so attention stays inside it. The windows are packed
once, an epoch is a new order of them. Knows no features, no model and no files beyond `PreparedData`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from forerun.errors import ArgumentError, DataError
from forerun.training.batch import TokenBatch
from forerun.training.data.store import PreparedData

BUCKET = 2048
"""Pieces that are sorted and packed together: large enough to fill windows, small enough to stay random."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Where a run of a batch's tokens came from."""

    row: int
    """Row of the batch."""
    column: int
    """First token's place in the row."""
    document: int
    """Number in the prepared data."""
    offset: int
    """First token's place in that document; above 0 where a document longer than the window was split."""
    length: int
    """Tokens."""


class PackedWindows:
    """Batches of packed windows. ``batch(step)`` depends on the arguments and the step, on nothing else.

    The global batch is ``rows * world`` windows; rank r takes rows ``r * rows`` to ``(r + 1) * rows`` of it. So
    1 process with 8 rows and 4 processes with 2 rows see the same windows in the same order.

    Args:
        data: the documents.
        length: S, tokens per window.
        rows: B, windows per process and step.
        seed: of the packing and of every epoch's order.
        min_tokens: leave out pieces with fewer tokens to learn than this.

    Raises:
        ArgumentError: `length` below 2, `rows` or `min_tokens` below 1.
        DataError: no piece has enough tokens to learn.
    """

    def __init__(self, data: PreparedData, *, length: int, rows: int, seed: int, min_tokens: int = 1) -> None:
        if length < 2 or rows < 1 or min_tokens < 1 or seed < 0:
            raise ArgumentError(
                "windows need length >= 2, rows >= 1, min_tokens >= 1 and seed >= 0, "
                f"got {length}, {rows}, {min_tokens}, {seed}"
            )
        self.data, self.length, self.rows, self.seed = data, length, rows, seed
        self._pieces = _cut(data, length, min_tokens)
        if not len(self._pieces):
            raise DataError(
                f"no document of {data.folder} has {min_tokens} tokens to learn within a window of {length}; "
                "use longer windows or a smaller min_tokens"
            )
        self._windows = _pack(self._pieces[:, 2], length, np.random.default_rng([seed, 0]))
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Number of different windows."""
        return len(self._windows)

    @property
    def fill(self) -> float:
        """Share of the windows' places, in (0, 1], that hold tokens."""
        return float(self._pieces[:, 2].sum()) / (len(self) * self.length)

    def steps_per_epoch(self, world: int = 1) -> int:
        """Steps in which every window is seen at least once; the last is filled up with the epoch's first windows."""
        return -(-len(self) // (self.rows * world))

    def pieces(self, step: int, rank: int = 0, world: int = 1) -> list[Piece]:
        """What the rows of ``batch(step, rank, world)`` are made of, row by row, left to right.

        Raises:
            ArgumentError: a negative step, or no such rank.
        """
        if step < 0 or not 0 <= rank < world:
            raise ArgumentError(f"step must be at least 0 and rank below world, got {step}, {rank} of {world}")
        found = []
        for row, window in enumerate(self._share(step, rank, world)):
            column = 0
            for number in self._windows[window]:
                document, offset, length = (int(value) for value in self._pieces[number])
                found.append(Piece(row=row, column=column, document=document, offset=offset, length=length))
                column += length
        return found

    def batch(self, step: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """One process's rows of a step, B = `rows`, S = `length`.

        A piece's first token never counts: nothing before it may predict it.

        Raises:
            ArgumentError: a negative step, or no such rank.
        """
        shape = (self.rows, self.length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask, documents = np.zeros(shape, bool), np.full(shape, -1, np.int64)
        numbers = [0] * self.rows
        for piece in self.pieces(step, rank, world):
            ids, counted = self.data.document(piece.document)
            source = slice(piece.offset, piece.offset + piece.length)
            place = (piece.row, slice(piece.column, piece.column + piece.length))
            tokens[place] = ids[source]
            mask[place] = counted[source]
            mask[piece.row, piece.column] = False
            documents[place] = numbers[piece.row]
            positions[place] = np.arange(piece.length)
            numbers[piece.row] += 1
        return TokenBatch(
            tokens=torch.from_numpy(tokens),
            loss_mask=torch.from_numpy(mask),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
        )

    def _share(self, step: int, rank: int, world: int) -> list[int]:
        """The windows of one rank at one step."""
        epoch, step = divmod(step, self.steps_per_epoch(world))
        if self._order[0] != epoch:
            order = np.random.default_rng([self.seed, 1, epoch]).permutation(len(self))
            self._order = (epoch, order)
        first = (step * world + rank) * self.rows
        return [int(self._order[1][place % len(self)]) for place in range(first, first + self.rows)]


def _cut(data: PreparedData, length: int, min_tokens: int) -> NDArray[np.int64]:
    """(pieces, 3) int64: document, offset, length. Only what is longer than the window is split."""
    pieces = []
    for document, tokens in enumerate(data.lengths.tolist()):
        start = int(data.offsets[document])
        for offset in range(0, tokens, length):
            size = min(length, tokens - offset)
            first = start + offset
            if np.count_nonzero(data.mask[first + 1 : first + size]) >= min_tokens:
                pieces.append((document, offset, size))
    return np.array(pieces, np.int64).reshape(-1, 3)


def _pack(lengths: NDArray[np.int64], capacity: int, random: np.random.Generator) -> list[list[int]]:
    """Windows as lists of piece numbers: within shuffled buckets the longest first, each where least room is left."""
    windows: list[list[int]] = []
    order = random.permutation(len(lengths))
    for start in range(0, len(order), BUCKET):
        bucket = order[start : start + BUCKET]
        bucket = bucket[np.argsort(-lengths[bucket], kind="stable")]
        windows.extend(_best_fit([(int(piece), int(lengths[piece])) for piece in bucket], capacity))
    return windows


def _best_fit(pieces: Sequence[tuple[int, int]], capacity: int) -> list[list[int]]:
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """(room left, window), ascending."""
    for piece, length in pieces:
        place = bisect.bisect_left(rooms, (length, 0))
        if place == len(rooms):
            windows.append([piece])
            bisect.insort(rooms, (capacity - length, len(windows) - 1))
            continue
        room, window = rooms.pop(place)
        windows[window].append(piece)
        bisect.insort(rooms, (room - length, window))
    return windows
