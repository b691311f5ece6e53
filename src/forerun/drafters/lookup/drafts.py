"""Acceptance estimates and nodes of looked-up tokens, for compiled code; and the compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import numba
import numpy as np
from numpy.typing import NDArray

from forerun.core import acceptance
from forerun.core.acceptance import BINS, COPIED, WEIGHT, bucket_of
from forerun.core.tree import TokenTree

P = ParamSpec("P")
R = TypeVar("R")
Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

SEPARATOR = -1  # Separates two texts in one automaton; never drafted and never matched
NONE = -1


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with numba. The result is cached beside the source, or in the user's cache folder, if either
    is writable.
    """
    try:
        made: Callable[P, R] = numba.njit(cache=True)(function)
    except RuntimeError:  # No folder is writable
        made = numba.njit(function)
    return made


def _forget_stale(folder: Path, *others: Path) -> None:
    """Delete a folder's compiled results if any source file has changed. numba only checks a function's own file, not
    those of the functions that it calls.
    """
    newest = max(source.stat().st_mtime for source in (*folder.glob("*.py"), *others))
    for cached in folder.glob("__pycache__/*.nb?"):
        with suppress(OSError):  # Another process has deleted them, or they belong to another user
            if cached.stat().st_mtime < newest:
                cached.unlink()


_forget_stale(Path(__file__).parent, Path(acceptance.__file__))

# --- arrays that grow, and an index by open addressing ----------------------------------------------------------------

MIX = 0x1E3779B97F4A7C15  # An odd number of 61 bits: multiplication by it is a hash whose upper bits are well mixed


def room_for(tokens: int) -> int:
    """Return the capacity to allocate for a text of `tokens` tokens, which will grow."""
    return max(64, tokens + tokens // 2)


@compiled
def slots_for(entries: int) -> int:
    """Return the size of a hash index for `entries` entries: a power of two, at most half full. Empty slots hold
    NONE.
    """
    size = 1
    while size < 2 * entries:
        size *= 2
    return size


@compiled
def slot_of(slots: Ints, mixed: np.int64) -> int:
    """Return the slot at which probing for an entry begins."""
    return int((mixed >> 29) & (len(slots) - 1))


# --- what is known of a drafted token ---------------------------------------------------------------------------------

SOURCES = ("request", "store", "followed", "guessed", "ngram")
"""Sources of looked-up tokens, as `by_match` names them: the longest match in the text itself or in an earlier output,
the position that a follower has found or guessed, an n-gram's earlier occurrence.
"""
REQUEST, STORE, FOLLOWED, GUESSED, NGRAM = range(len(SOURCES))
KEYS = len(SOURCES) * len(COPIED) * BINS
NODE_TOKEN, NODE_PARENT, NODE_KEY = 0, 1, 2  # Columns of a draft's nodes; node 0 is the root
NODE_COLUMNS = 3


class Draft(NamedTuple):
    """Memory for a row's drafted nodes, root included, which compiled code fills."""

    nodes: Ints  # (N, NODE_COLUMNS); the root's row is unused
    confidence: Floats  # (N,)

    @classmethod
    def of(cls, most: int) -> Draft:
        """Allocate memory for at most `most` nodes besides the root."""
        return cls(np.empty((1 + most, NODE_COLUMNS), np.int32), np.empty(1 + most))

    def first(self, size: int) -> Draft:
        """Return the first `size` nodes, root included."""
        return Draft(self.nodes[:size], self.confidence[:size])

    def tree(self, root: int) -> TokenTree:
        """Return the nodes as a tree with this root token."""
        tokens, parents = self.nodes[1:, NODE_TOKEN].tolist(), self.nodes[1:, NODE_PARENT].tolist()
        return TokenTree.of(root, tokens, parents, self.confidence[1:].tolist())


def zero_counts() -> Floats:
    """Return zero counts (KEYS, 2) of accepted and tried nodes by key."""
    return np.zeros((KEYS, 2))


_bucket = compiled(bucket_of)


@compiled
def evidence(source: int, matched: int, share: float) -> tuple[int, float]:
    """Return (key, prior) as `forerun.core.acceptance.by_match` does; the key is a number below KEYS."""
    bucket = _bucket(matched)
    key = (source * len(COPIED) + bucket) * BINS + min(int(share * BINS), BINS - 1)
    return key, COPIED[bucket] * share


@compiled
def estimate(counts: Floats, key: int, prior: float) -> float:
    """Return the estimate of `forerun.core.acceptance.Acceptance` from counts (KEYS, 2) of accepted and tried nodes."""
    return float((counts[key, 0] + WEIGHT * prior) / (counts[key, 1] + WEIGHT))


@compiled
def likelihood(counts: Floats, source: int, matched: int, share: float) -> tuple[int, float]:
    """Return the key of `evidence`, and the estimated acceptance of such a node."""
    key, prior = evidence(source, matched, share)
    return key, estimate(counts, key, prior)


@compiled
def put(draft: Draft, node: int, token: int, parent: int, key: int, likely: float) -> None:
    """Write a node."""
    draft.nodes[node, NODE_TOKEN], draft.nodes[node, NODE_PARENT], draft.nodes[node, NODE_KEY] = token, parent, key
    draft.confidence[node] = likely


@compiled
def learn(nodes: Ints, text: Ints, counts: Floats) -> None:
    """Count the acceptance of every node whose parent agrees with `text`, the tokens that followed the root."""
    depths = np.full(len(nodes), NONE, np.int64)
    depths[0] = 0
    for node in range(1, len(nodes)):
        depth = depths[nodes[node, NODE_PARENT]]
        if depth == NONE or depth >= len(text):
            continue
        key = nodes[node, NODE_KEY]
        counts[key, 1] += 1.0
        if text[depth] == nodes[node, NODE_TOKEN]:
            depths[node] = depth + 1
            counts[key, 0] += 1.0
