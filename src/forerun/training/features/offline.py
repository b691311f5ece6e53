"""Stored features for packed windows: the same `FeatureBatch` as `online` gives, without a target in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from forerun.errors import DataError
from forerun.training.batch import FeatureBatch, TokenBatch
from forerun.training.features.store import FeatureStore
from forerun.types import LAST_HIDDEN, Signal


class PieceLike(Protocol):
    """Where a stretch of a document stands in a batch."""

    @property
    def row(self) -> int: ...
    @property
    def column(self) -> int: ...
    @property
    def document(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class Windows(Protocol):
    """Packed windows by step; `forerun.training.data` has them."""

    def batch(self, step: int, rank: int, world: int) -> TokenBatch:
        """The tokens of one process's share of a step."""
        ...

    def pieces(self, step: int, rank: int, world: int) -> Sequence[PieceLike]:
        """Which documents they come from."""
        ...


class OfflineFeatures:
    """Reads packed windows' features from a store.

    Features were extracted from whole documents. A piece that begins within its document (offset > 0) therefore gets
    states that saw everything before it, where `OnlineFeatures` would only see the piece: nearer to what the head
    meets when it drafts, and why the two agree exactly only for pieces with offset 0.
    """

    def __init__(self, store: FeatureStore, windows: Windows, *, dtype: torch.dtype | None = None) -> None:
        """Features of `windows` from `store`, which must be of the same prepared data.

        Args:
            dtype: of the features; by default as stored, and bfloat16 for float8.
        """
        self.store, self.windows, self._dtype = store, windows, dtype

    @property
    def boundaries(self) -> tuple[Signal, ...]:
        """Those stored, without `LAST_HIDDEN`."""
        return self.store.manifest.boundaries

    def features(self, step: int, rank: int = 0, world: int = 1) -> FeatureBatch:
        """The batch of a step with its features (B, S, Ht), zero at padding; on the CPU.

        Raises:
            DataError: a piece is not in the store, or reaches beyond its document's features.
        """
        batch = self.windows.batch(step, rank, world)
        rows, size = batch.tokens.shape
        found: dict[Signal, torch.Tensor] = {}
        for piece in self.windows.pieces(step, rank, world):
            if piece.column < 0 or piece.column + piece.length > size or not 0 <= piece.row < rows:
                raise DataError(f"step {step}: a piece of document {piece.document} lies outside the batch")
            states = self.store.read(piece.document, piece.offset, piece.length, dtype=self._dtype)
            for signal, values in states.items():
                if signal not in found:
                    found[signal] = values.new_zeros(rows, size, values.shape[-1])
                found[signal][piece.row, piece.column : piece.column + piece.length] = values
        if LAST_HIDDEN not in found:
            raise DataError(f"step {step}: no piece of any document is in the batch")
        return FeatureBatch(batch=batch, features=found)
