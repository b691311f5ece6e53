"""Which ranks of a token's successors are right how often, and the tree that is best by these rates.

A tree is a set of paths (rank at depth 1, rank at depth 2, ...). A path survives with the product of its ranks' rates,
so the n likeliest paths are found greedily; the same argument as for DDTree's marginals (arXiv 2604.12989). Knows
numbers, no tokens and no model.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_MEASURED = (
    (0.50, 0.090, 0.040, 0.030, 0.016, 0.014, 0.012, 0.010),
    (0.57, 0.095, 0.044, 0.034, 0.019, 0.013, 0.012, 0.010),
)
"""How often the text's next token had each rank in its predecessor's row: below the root, and below a node that was
right. Of all eight ranks, drafted or not; mean of T = 0 and T = 0.8 on the demo target, 18 shipped prompts of 500
tokens continued by 128, seed 1, one matrix for all (4,600 places)."""
WEIGHT = 32.0
"""Observations that the measured rate is worth."""


def measured(depth: int, ranks: int) -> NDArray[np.float64]:
    """(depth, ranks): the probability that the successor of some rank is the text's, given that its parent is."""
    known = np.array(_MEASURED)
    rows = np.minimum(np.arange(depth), len(known) - 1)
    columns = np.arange(ranks)
    # Beyond what was measured a rate halves with every rank.
    beyond = 0.5 ** np.maximum(columns - known.shape[1] + 1, 0)
    rates: NDArray[np.float64] = known[rows][:, np.minimum(columns, known.shape[1] - 1)] * beyond
    return rates


class RankedNode(NamedTuple):
    """A node of a tree of ranks."""

    rank: int
    """Which successor of its parent's token it holds."""
    parent: int
    """Place of the parent in the tree, -1 for the root."""
    depth: int
    """1 for children of the root."""


def paying(rates: NDArray[np.float64], pass_ms: Callable[[int], float], most: int) -> int:
    """Nodes of the best tree, at most `most`, that yields most tokens for its time.

    Args:
        rates: (depth, ranks), see `best_tree`.
        pass_ms: of a pass with so many drafted nodes.
    """
    tokens, best, alive = 1.0, (1.0 / pass_ms(0), 0), list[float]()
    for count, node in enumerate(best_tree(rates, most), start=1):
        above = alive[node.parent] if node.parent >= 0 else 1.0
        alive.append(above * float(rates[node.depth - 1, node.rank]))
        tokens += alive[-1]
        best = max(best, (tokens / pass_ms(count), count))
    return max(1, best[1])


def best_tree(rates: NDArray[np.float64], nodes: int) -> list[RankedNode]:
    """The `nodes` paths of largest product of `rates` (depth, ranks), by falling product; all if there are fewer.

    Every beginning of it is the best tree of its size. A node comes after its parent, and after its siblings of
    smaller rank.
    """
    falling = np.argsort(-rates, axis=1, kind="stable")
    tree = list[RankedNode]()
    # (-probability, order of entry, place in the falling order, parent, probability of the parent)
    heap = [(-float(rates[0, falling[0, 0]]), 0, 0, -1, 1.0)]
    entered = 1
    while heap and len(tree) < nodes:
        negative, _, place, parent, above = heapq.heappop(heap)
        depth = 0 if parent < 0 else tree[parent].depth
        tree.append(RankedNode(int(falling[depth, place]), parent, depth + 1))
        if place + 1 < rates.shape[1]:
            rate = float(rates[depth, falling[depth, place + 1]])
            heapq.heappush(heap, (-above * rate, entered, place + 1, parent, above))
        if depth + 1 < len(rates):
            rate = float(rates[depth + 1, falling[depth + 1, 0]])
            heapq.heappush(heap, (negative * rate, entered + 1, 0, len(tree) - 1, -negative))
        entered += 2
    return tree
