"""Prepared data and packed windows that live in memory, and the manifest of features made from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun.losses.objective import TokenBatch
from forerun.training.features.store import FeatureManifest
from forerun.writing import TokenizerIdentity
from model.families import random_tokens

LENGTHS = (11, 3, 17, 9, 24, 1, 12)


class Documents:
    """Stands in for `PreparedData`."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.tokens = [np.array(random_tokens(length, seed=7 + i), np.int32) for i, length in enumerate(lengths)]

    @property
    def hash(self) -> str:
        return hashlib.sha256(b"".join(tokens.tobytes() for tokens in self.tokens)).hexdigest()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        return np.array([len(tokens) for tokens in self.tokens], np.int64)

    def document(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return self.tokens[index], np.ones(len(self.tokens[index]), np.uint8)

    def check_tokenizer(self, given: TokenizerIdentity) -> None:
        assert given.vocab_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    row: int
    column: int
    document: int
    offset: int
    length: int


class Windows:
    """Stands in for `PackedWindows`: the same segments at every step."""

    def __init__(self, data: Documents, segments: Sequence[Segment], shape: tuple[int, int]) -> None:
        self.data, self._segments, self.shape = data, list(segments), shape

    def segments(self, step: int, rank: int, world: int) -> list[Segment]:
        return self._segments

    def batch(self, step: int, rank: int, world: int) -> TokenBatch:
        tokens, positions = torch.zeros(self.shape, dtype=torch.int64), torch.zeros(self.shape, dtype=torch.int64)
        documents = torch.full(self.shape, -1)
        for number, segment in enumerate(self._segments):
            place = (segment.row, slice(segment.column, segment.column + segment.length))
            ids = self.data.document(segment.document)[0][segment.offset : segment.offset + segment.length]
            tokens[place] = torch.from_numpy(ids.astype(np.int64))
            documents[place] = number
            positions[place] = torch.arange(segment.length)
        return TokenBatch(tokens=tokens, loss_mask=documents >= 0, documents=documents, positions=positions)


def manifest_of(data: Documents, **changes: Any) -> FeatureManifest:
    """As of a target with boundaries 1 and 3 and hidden size 64."""
    facts: dict[str, Any] = {
        **{"target": "some/target", "target_hash": "1" * 8, "boundaries": (1, 3), "dtype": "float32"},
        **{"hidden_size": 64, "tokenizer_hash": "2" * 8, "template_hash": "3" * 8, "data_hash": data.hash},
        **{"documents": len(data), "tokens": sum(len(tokens) for tokens in data.tokens)},
    }
    return FeatureManifest(**{**facts, **changes})
