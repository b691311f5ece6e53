"""Many continuations merged into one trie, of which the most frequent nodes are kept. Knows arrays, no files."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.datastore.format import SEPARATOR

_LOW = np.int64(2**32 - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trie:
    """The kept nodes, the most frequent first, which puts parents before their children."""

    tokens: list[int]
    parents: list[int]
    """Node ids: node k + 1 is entry k, 0 is the root."""
    counts: list[int]
    """Continuations that run through the node."""


@dataclass(slots=True)
class _Nodes:
    """Nodes found so far, in order of their ids."""

    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    parents: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, keys: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        self.tokens = np.concatenate([self.tokens, keys & _LOW])
        self.parents = np.concatenate([self.parents, keys >> 32])
        self.counts = np.concatenate([self.counts, counts])


def merge(continuations: NDArray[np.uint32], nodes: int) -> Trie:
    """The `nodes` most frequent nodes of the trie of some continuations.

    Args:
        continuations: (H, D), each ended early by a `SEPARATOR`.
        nodes: most nodes to keep, at least 1. Of equally frequent ones the shallower is kept, then the one whose
            parent, then whose token is the smaller.
    """
    found = _Nodes()
    owner = np.zeros(len(continuations), np.int64)  # node that each continuation has run through last
    alive = continuations
    for depth in range(continuations.shape[1]):
        keys = (owner << 32) | alive[:, depth]
        distinct, counts = np.unique(keys, return_counts=True)
        kept = ((distinct & _LOW) != SEPARATOR) & (counts > _floor(found.counts, nodes))
        distinct, counts = distinct[kept], counts[kept]
        if not len(distinct):
            break
        before = len(found.tokens)
        found.add(distinct, counts)
        place = np.searchsorted(distinct, keys).clip(max=len(distinct) - 1)
        lives = distinct[place] == keys
        owner, alive = before + 1 + place[lives], alive[lives]
    return _best(found, nodes)


def _floor(counts: NDArray[np.int64], nodes: int) -> int:
    """What a deeper node's count must exceed: so many nodes at least as frequent and shallower are there already."""
    return int(np.partition(counts, -nodes)[-nodes]) if len(counts) >= nodes else 0


def _best(found: _Nodes, nodes: int) -> Trie:
    order = np.argsort(-found.counts, kind="stable")[:nodes]
    names = np.zeros(len(found.tokens) + 1, np.int64)
    names[order + 1] = np.arange(1, len(order) + 1)
    return Trie(
        tokens=found.tokens[order].tolist(),
        parents=names[found.parents[order]].tolist(),
        counts=found.counts[order].tolist(),
    )
