"""The matrix of likely successors of every token, in memory and in a file. Knows no tree and no model."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.training.data.identity import TokenizerIdentity
from forerun.writing import written

log = logging.getLogger(__name__)

FORMAT = "forerun-recycling-1"
_TENSOR = "successors"


class SuccessorMatrix:
    """Of each token the last known likely successors, the likeliest first. Use `open`.

    Args:
        successors: (V, k) int32, -1 where nothing is known; known ones stand first and are distinct.
        path: where it is kept; None keeps it in memory alone.
        identity: whose token ids these are; None where nobody knows.
    """

    def __init__(self, successors: NDArray[np.int32], path: Path | None, identity: TokenizerIdentity | None) -> None:
        self.successors = successors
        self.path = path
        self.changed = False
        """Whether anything was learned since the last `save`."""
        self._identity = identity

    @classmethod
    def open(
        cls, path: Path | None, vocabulary: int, top_k: int, identity: TokenizerIdentity | None
    ) -> SuccessorMatrix:
        """The matrix in the file at `path`; an empty one where there is no file yet.

        Raises:
            ArgumentError: the file holds another number of successors, or its directory does not exist.
            DataError: the file is no matrix, or cut short.
            VocabularyMismatchError: the file belongs to another tokenizer.
        """
        if path is None or not path.exists():
            if path is not None and not path.absolute().parent.is_dir():
                raise ArgumentError(f"recycling: {path.parent} does not exist, so nothing can be kept in {path.name}")
            return cls(np.full((vocabulary, top_k), -1, np.int32), path, identity)
        successors, written = _read(path)
        own = "" if identity is None else identity.vocabulary
        if successors.shape[0] != vocabulary or (own and written and own != written):
            raise VocabularyMismatchError(
                f"{path} holds successors of {successors.shape[0]} tokens of tokenizer {written[:12] or 'unknown'}, "
                f"the target has {vocabulary} of {own[:12] or 'unknown'}; name another file for this target"
            )
        if successors.shape[1] != top_k:
            raise ArgumentError(
                f"recycling: {path} holds {successors.shape[1]} successors a token; set top_k to that instead of "
                f"{top_k}, or name another file"
            )
        return cls(successors, path, identity)

    def put(self, tokens: Sequence[int], successors: NDArray[np.int64]) -> None:
        """What the target now thinks after `tokens` (N,): rows (N, k); of equal tokens the last one counts."""
        # numpy assigns in order: the last of equal indices stays.
        self.successors[np.asarray(tokens, dtype=np.int64)] = successors
        self.changed = True

    def read(self, text: NDArray[np.int64]) -> None:
        """Learn from text alone: of each token the latest distinct successors come first, then those known before."""
        ranks = self.successors.shape[1]
        tokens, nexts = _latest_pairs(text, ranks)
        owners, first, counts = np.unique(tokens, return_index=True, return_counts=True)
        merged = np.full((len(owners), 2 * ranks), -1, np.int64)
        row = np.repeat(np.arange(len(owners)), counts)
        merged[row, np.arange(len(tokens)) - first[row]] = nexts
        merged[:, ranks:] = self.successors[owners]
        self.successors[owners] = _distinct(merged, ranks)
        self.changed = True

    def save(self) -> None:
        """Write the file if there is one to write: complete under its name, or as it was before. OSError if not."""
        if self.path is None or not self.changed:
            return
        metadata = {"format": FORMAT, "tokenizer": "" if self._identity is None else self._identity.vocabulary}
        with written(self.path) as fresh:
            fresh.write_bytes(save({_TENSOR: self.successors}, metadata))
        self.changed = False


def save_quietly(matrix: SuccessorMatrix) -> None:
    """`SuccessorMatrix.save`, for where an error would cost somebody's answer: it is logged instead."""
    try:
        matrix.save()
    except OSError as error:
        log.warning("recycling: what was learned could not be kept in %s: %s", matrix.path, error)


def _read(path: Path) -> tuple[NDArray[np.int32], str]:
    """The stored matrix, a copy in memory, and the hash of its tokenizer."""
    remedy = "delete it, or name another file"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or list(file.keys()) != [_TENSOR]:
                raise DataError(f"{path} holds no matrix of successors ({json.dumps(metadata)}); {remedy}")
            successors: NDArray[np.int32] = file.get_tensor(_TENSOR)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged ({error}); {remedy}") from error
    inside = successors.ndim == 2 and successors.size and -1 <= successors.min() <= successors.max() < len(successors)
    if not inside or successors.dtype != np.int32:
        raise DataError(f"{path} holds tokens outside its own vocabulary; {remedy}")
    return successors, str(metadata.get("tokenizer", ""))


def _latest_pairs(text: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Neighbours in the text, (tokens, successors): by token, then the latest first, at most so many of each token."""
    pairs = (text[:-1] << 32) | text[1:]
    distinct, last = np.unique(pairs[::-1], return_index=True)  # index from the end: 0 is the latest
    order = np.lexsort((last, distinct >> 32))
    tokens, nexts = distinct[order] >> 32, distinct[order] & np.int64(2**32 - 1)
    _, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    rank = np.arange(len(tokens)) - np.repeat(first, counts)
    return tokens[rank < most], nexts[rank < most]


def _distinct(rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """(M, width): the first distinct entries of each row (M, W), left aligned; -1 is no entry."""
    equal = rows[:, :, None] == rows[:, None, :]
    again = np.tril(equal, -1).any(2) | (rows < 0)
    order = np.argsort(again, axis=1, kind="stable")
    kept: NDArray[np.int64] = np.where(again, -1, rows)[np.arange(len(rows))[:, None], order][:, :width]
    return kept
