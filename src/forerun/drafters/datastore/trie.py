"""Many continuations merged into one trie, of which the most frequent nodes are kept. Knows arrays, no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.datastore.format import SEPARATOR

_LOW = 2**32 - 1
_FEW = 24
"""So many continuations are merged faster in plain Python than by arrays."""


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
    """Nodes found so far, in order of their ids: node k + 1 is entry k."""

    most: int
    """How many will be kept."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def floor(self) -> int:
        """What a deeper node's count must exceed: so many shallower ones are at least as frequent already."""
        if len(self.counts) < self.most:
            return 0
        return int(np.partition(self.counts, -self.most)[-self.most])

    def add(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Further nodes; a key is a parent's id and, in the lower 32 bits, a token."""
        self.tokens.extend([key & _LOW for key in keys])
        self.parents.extend([key >> 32 for key in keys])
        self.counts.extend(counts)

    def best(self) -> Trie:
        """The most frequent ones, under new ids."""
        order = np.argsort(-np.array(self.counts, dtype=np.int64), kind="stable")[: self.most].tolist()
        names = {0: 0, **{node + 1: place for place, node in enumerate(order, start=1)}}
        return Trie(
            tokens=[self.tokens[node] for node in order],
            parents=[names[self.parents[node]] for node in order],
            counts=[self.counts[node] for node in order],
        )


def merge(continuations: NDArray[np.uint32], nodes: int) -> Trie:
    """The `nodes` most frequent nodes of the trie of some continuations.

    Args:
        continuations: (H, D), each ended early by a `SEPARATOR`.
        nodes: most nodes to keep, at least 1. Of equally frequent ones the shallower is kept, then the one whose
            parent, then whose token is the smaller.
    """
    found = _Nodes(nodes)
    alive = continuations.astype(np.int64)
    owner = np.zeros(len(alive), np.int64)  # node that each continuation has run through last
    for depth in range(alive.shape[1]):
        if len(alive) <= _FEW:
            _merge_few(alive[:, depth:].tolist(), owner.tolist(), found)
            break
        keys = (owner << 32) | alive[:, depth]
        distinct, counts = np.unique(keys, return_counts=True)
        kept = ((distinct & _LOW) != SEPARATOR) & (counts > found.floor())
        distinct, counts = distinct[kept], counts[kept]
        if not len(distinct):
            break
        first = len(found.tokens) + 1
        found.add(distinct.tolist(), counts.tolist())
        place = np.searchsorted(distinct, keys).clip(max=len(distinct) - 1)
        lives = distinct[place] == keys
        owner, alive = first + place[lives], alive[lives]
    return found.best()


def _merge_few(rows: list[list[int]], owner: list[int], found: _Nodes) -> None:
    """The same, without arrays; `rows` are what is left of the continuations."""
    for depth in range(len(rows[0]) if rows else 0):
        keys = [(node << 32) | row[depth] for node, row in zip(owner, rows, strict=True)]
        floor = found.floor()
        counts = {
            key: count for key, count in sorted(Counter(keys).items()) if count > floor and key & _LOW != SEPARATOR
        }
        names = {key: node for node, key in enumerate(counts, start=len(found.tokens) + 1)}
        found.add(list(counts), list(counts.values()))
        rows = [row for row, key in zip(rows, keys, strict=True) if key in names]
        owner = [names[key] for key in keys if key in names]
        if not rows:
            return
