"""Static optimal trees: which shape to draft, from how often the first, second, ... sibling is accepted.

`best_tree` is Sequoia's dynamic programme (arXiv 2402.12374), `best_size` its choice of size by measured time;
`likeliest_nodes` is OPT-Tree's choice of nodes from known path probabilities (arXiv 2406.17276). Pure functions of
numbers: they know no model, no draft and no clock.

A tree is its ``parents``: entry k is the parent of node k + 1, 0 the root, level by level and the eldest sibling first:
what option ``tree`` of the drafters takes (`forerun.drafters.tree_options`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from forerun.errors import ArgumentError


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticTree:
    """A shape and what it promises."""

    parents: tuple[int, ...]
    expected: float
    """Accepted tokens per step, the bonus not counted."""

    @property
    def depth(self) -> int:
        """Most tokens on a path."""
        return max(depths_of(self.parents), default=0)


def best_tree(acceptance: Sequence[float], nodes: int, depth: int) -> StaticTree:
    """The tree of at most `nodes` nodes and `depth` levels with the most accepted tokens.

    A node's probability of acceptance depends on its rank among its siblings alone, given that its parent is accepted.

    Args:
        acceptance: entry b: probability that the sibling of rank b is the accepted one; sums to at most 1.
        nodes: most nodes, the root not counted.
        depth: most levels below the root.

    Raises:
        ArgumentError: probabilities outside 0..1 or summing to more than 1, or a negative size.
    """
    chances = tuple(float(chance) for chance in acceptance)
    if nodes < 0 or depth < 0:
        raise ArgumentError(f"a tree has at least 0 nodes and levels, got {nodes} and {depth}")
    if any(not 0 <= chance <= 1 for chance in chances) or sum(chances) > 1 + 1e-6:
        raise ArgumentError(f"acceptance by rank must be probabilities that sum to at most 1, got {chances}")

    @cache
    def best(left: int, levels: int, rank: int) -> tuple[float, int]:
        """Most accepted tokens below a node whose siblings before `rank` are settled; nodes for the next sibling."""
        if left == 0 or levels == 0 or rank == len(chances):
            return 0.0, 0
        found = 0.0, 0
        for size in range(1, left + 1):
            below = best(size - 1, levels - 1, 0)[0]
            value = chances[rank] * (1 + below) + best(left - size, levels, rank + 1)[0]
            if value > found[0] + 1e-12:
                found = value, size
        return found

    return StaticTree(parents=_laid_out(best, nodes, depth), expected=best(nodes, depth, 0)[0])


_Best = Callable[[int, int, int], tuple[float, int]]
"""(nodes left, levels left, rank of the next sibling) -> (accepted tokens, nodes of that sibling's subtree)."""


def _laid_out(best: _Best, nodes: int, depth: int) -> tuple[int, ...]:
    """The programme's tree as parents, level by level."""
    parents = list[int]()
    level = [(0, nodes)]
    for levels in range(depth, 0, -1):
        following = list[tuple[int, int]]()
        for parent, share in level:
            left, rank = share, 0
            size = best(left, levels, rank)[1]
            while size:
                parents.append(parent)
                following.append((len(parents), size - 1))
                left -= size
                rank += 1
                size = best(left, levels, rank)[1]
        level = following
    return tuple(parents)


def best_size(acceptance: Sequence[float], pass_ms: Sequence[float], level_ms: float, depth: int) -> StaticTree:
    """The tree with the most tokens per time; the empty tree is plain decoding.

    Args:
        acceptance: as in `best_tree`.
        pass_ms: entry n: a target pass over n drafted nodes, ms.
        level_ms: drafting one level, ms.
        depth: most levels.

    Raises:
        ArgumentError: as `best_tree`, or no time is given.
    """
    if not pass_ms:
        raise ArgumentError("pass_ms needs at least the time of a pass without a draft")
    best, best_rate = StaticTree(parents=(), expected=0.0), 1 / pass_ms[0]
    for levels in range(1, depth + 1):
        for nodes in range(1, len(pass_ms)):
            tree = best_tree(acceptance, nodes, levels)
            rate = (1 + tree.expected) / (pass_ms[len(tree.parents)] + level_ms * tree.depth)
            if rate > best_rate * (1 + 1e-12):
                best, best_rate = tree, rate
    return best


def likeliest_nodes(parents: Sequence[int], probabilities: Sequence[float], nodes: int) -> tuple[int, ...]:
    """The `nodes` node ids with the likeliest paths, rising; a parent is always among them.

    Under a draft that agrees with the target this is the subtree with the most accepted tokens.

    Args:
        parents: of a larger tree; entry k is the parent of node k + 1.
        probabilities: entry k: of node k + 1 given its parent, in 0..1.
        nodes: most to keep.

    Raises:
        ArgumentError: the lengths differ, or a parent does not come before its child.
    """
    if len(parents) != len(probabilities):
        raise ArgumentError(f"{len(parents)} parents and {len(probabilities)} probabilities; give one of each a node")
    path = [1.0]
    for node, (parent, probability) in enumerate(zip(parents, probabilities, strict=True), start=1):
        if not 0 <= parent < node:
            raise ArgumentError(f"node {node} has parent {parent}; a parent comes before its child")
        path.append(path[parent] * probability)
    ranked = sorted(range(1, len(path)), key=lambda node: (-path[node], node))
    return tuple(sorted(ranked[:nodes]))


def depths_of(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of node 1, 2, ..."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found[1:])
