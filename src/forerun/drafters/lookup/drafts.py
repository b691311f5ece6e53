"""Evidence, acceptance counts and nodes of copied tokens, for compiled code; and the compiler."""

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

SEPARATOR = -1  # Stands between two texts in one automaton; never drafted, never matched
NONE = -1


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function with numba; the result is kept beside the source, or in the user's cache,
    where either can be written.
    """
    try:
        made: Callable[P, R] = numba.njit(cache=True)(function)
    except RuntimeError:  # No folder to keep it in
        made = numba.njit(function)
    return made


def _forget_stale(folder: Path, *others: Path) -> None:
    """Delete compiled results of a folder if a file of it or another has changed. numba looks at a
    function's own file alone, not at those of the functions that it calls.
    """
    newest = max(source.stat().st_mtime for source in (*folder.glob("*.py"), *others))
    for kept in folder.glob("__pycache__/*.nb?"):
        with suppress(OSError):  # Another process was faster, or they belong to somebody else
            if kept.stat().st_mtime < newest:
                kept.unlink()


_forget_stale(Path(__file__).parent, Path(acceptance.__file__))

# --- arrays that grow, and an index by open addressing ----------------------------------------------------------------

MIX = 0x1E3779B97F4A7C15  # An odd number of 61 bits: what is multiplied by it is spread over the upper ones


def room_for(tokens: int) -> int:
    """Return how many tokens to make room for where so many are needed: a text goes on."""
    return max(64, tokens + tokens // 2)


@compiled
def slots_for(entries: int) -> int:
    """Return the size of an index of so many entries: a power of two, at least half of it empty;
    empty slots hold NONE.
    """
    size = 1
    while size < 2 * entries:
        size *= 2
    return size


@compiled
def slot_of(slots: Ints, mixed: np.int64) -> int:
    """Return the slot at which the search for an entry begins."""
    return int((mixed >> 29) & (len(slots) - 1))


# --- what is known of a drafted token ---------------------------------------------------------------------------------

SOURCES = ("request", "store", "followed", "guessed", "ngram")
"""Sources that a token is copied from, as `by_match` names them: the longest match in the text
itself or in an earlier answer, the place that a follower has found or guessed, the place of an
n-gram.
"""
REQUEST, STORE, FOLLOWED, GUESSED, NGRAM = range(len(SOURCES))
KEYS = len(SOURCES) * len(COPIED) * BINS
NODE_TOKEN, NODE_PARENT, NODE_KEY = 0, 1, 2  # Columns of a draft's nodes, the root first
NODE_COLUMNS = 3


class Draft(NamedTuple):
    """Room for the nodes drafted for a row, the root first, which compiled code fills."""

    nodes: Ints  # (N, NODE_COLUMNS), the root's row unused
    confidence: Floats  # (N,)

    @classmethod
    def of(cls, most: int) -> Draft:
        """Allocate room for so many nodes besides the root."""
        return cls(np.empty((1 + most, NODE_COLUMNS), np.int32), np.empty(1 + most))

    def first(self, size: int) -> Draft:
        """Return the first so many nodes, the root included."""
        return Draft(self.nodes[:size], self.confidence[:size])

    def tree(self, root: int) -> TokenTree:
        """Return the nodes as a tree below this token."""
        tokens, parents = self.nodes[1:, NODE_TOKEN].tolist(), self.nodes[1:, NODE_PARENT].tolist()
        return TokenTree.of(root, tokens, parents, self.confidence[1:].tolist())


def unseen() -> Floats:
    """Return empty counts (KEYS, 2) of accepted and tried nodes by key."""
    return np.zeros((KEYS, 2))


_bucket = compiled(bucket_of)


@compiled
def evidence(source: int, matched: int, share: float) -> tuple[int, float]:
    """Return (key, prior) as `forerun.core.acceptance.by_match` does, with a number below KEYS for
    a key.
    """
    bucket = _bucket(matched)
    key = (source * len(COPIED) + bucket) * BINS + min(int(share * BINS), BINS - 1)
    return key, COPIED[bucket] * share


@compiled
def estimate(counts: Floats, key: int, prior: float) -> float:
    """Return the estimate of `forerun.core.acceptance.Acceptance` from (KEYS, 2) counts: accepted,
    tried.
    """
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
    """Count, for every node of a draft whose parent the text holds, whether it holds the node too;
    `text` is what followed the root.
    """
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
