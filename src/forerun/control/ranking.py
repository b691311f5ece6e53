"""Trees of deterministic nodes, ranked by how likely each path survives; merged, and pruned.
Sampled nodes are refused.

What a drafter's own confidence in such a node is worth is learned from which nodes the text went on with, submitted or
not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance, compare_draft
from forerun.core.tree import TokenTree

Estimate = Callable[[int, float], float]
"""Maps who proposed a node, as bits, and the stated confidence to the probability that it survives
its parent.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The nodes of a tree with their expected gain. All are deterministic: nothing else may be
    pruned.
    """

    tree: TokenTree  # Its confidences are those that were stated
    survival: tuple[float, ...]  # Entry k: probability that the whole path to node k survives; 1 for the root
    holders: tuple[int, ...]  # (N,) who proposed each node, as bits
    order: tuple[int, ...]  # Node ids by falling survival; parents come before their children
    worth: tuple[float, ...]  # Entry n: expected number of accepted tokens if the first n of `order` are submitted

    @classmethod
    def of(cls, tree: TokenTree, estimate: Estimate, holders: Sequence[int] | None = None) -> Ranking:
        """Rank a tree; without `holders` its nodes have no proposer (bits 0). Asserts that the tree
        holds no sampled node, whose fate may not depend on its value, no probe, and no nodes that
        have already run.
        """
        assert tree.prunable, "only deterministic nodes may be pruned after they were drawn"
        bits, survival = holders or [0] * (tree.size + 1), [1.0]
        for node in range(1, tree.size + 1):
            survival.append(survival[tree.parents[node]] * estimate(bits[node], tree.confidence[node]))
        order, left, total, worth = _by_survival(survival), survival[:], 0.0, [0.0]
        for node in order:  # siblings exclude each other: together they cannot survive more often than their parent
            parent = tree.parents[node]
            gain = min(survival[node], left[parent])
            left[parent] -= gain
            total += gain
            worth.append(total)
        return cls(tree=tree, survival=tuple(survival), holders=tuple(bits), order=tuple(order), worth=tuple(worth))

    @classmethod
    def merge(cls, found: Mapping[int, TokenTree], most: int, estimate: Estimate, *, chain: bool = False) -> Ranking:
        """Merge trees of one row, by who proposed them, into one of at most `most` nodes, or its
        best path (`chain`). Asserts as `of` does. The surest of those that hold a path says how
        likely it is, and `estimate` what that is worth: the surest of several is too sure, above
        all where the others hold something else or nothing.
        """
        joined, survival, holders = _join(found)
        best = list(joined.best_path()[:most]) if chain else sorted(_by_survival(survival)[:most])
        kept = joined.only(best) if len(best) < joined.size else joined
        return cls.of(kept.seal(), estimate, [0, *(holders[node] for node in best)])

    def held(self, who: int, nodes: int) -> float:
        """Return how much of the gain of its `nodes` best nodes one of the proposers holds."""
        return sum(self.survival[node] for node in self.order[:nodes] if self.holders[node] >> who & 1)

    def worth_without(self, who: int) -> list[float]:
        """Return the `worth` of the nodes that not only this proposer holds."""
        found = [0.0]
        for node, before, after in zip(self.order, self.worth, self.worth[1:], strict=False):
            if self.holders[node] != 1 << who:
                found.append(found[-1] + after - before)
        return found


def _join(found: Mapping[int, TokenTree]) -> tuple[TokenTree, list[float], list[int]]:
    """Join trees: returns the tree, the survival of each node, and who proposed it."""
    assert all(tree.prunable for tree in found.values()), "only deterministic nodes may be merged"
    if len(found) == 1:
        [(who, tree)] = found.items()
        return tree, tree.survival(), [0, *[1 << who] * tree.size]
    root = next(iter(found.values())).tokens[0]
    tokens, parents, survival, holders, there = [root], [-1], [1.0], [0], dict[tuple[int, int], int]()
    for who, tree in found.items():
        ids, alive = [0], tree.survival()
        for node in range(1, tree.size + 1):
            place = ids[tree.parents[node]], tree.tokens[node]
            twin = there.setdefault(place, len(tokens))
            if twin == len(tokens):
                tokens.append(place[1])
                parents.append(place[0])
                survival.append(0.0)
                holders.append(0)
            ids.append(twin)
            survival[twin] = max(survival[twin], alive[node])
            holders[twin] |= 1 << who
    above = [survival[parent] for parent in parents[1:]]
    sure = [own / whole if whole > 0 else 0.0 for own, whole in zip(survival[1:], above, strict=True)]
    return TokenTree.of(root, tokens[1:], parents[1:], sure), survival, holders


def _by_survival(survival: Sequence[float]) -> list[int]:
    """Return node ids, the likeliest first; of equals the one that came first, so parents precede
    their children.
    """
    return sorted(range(1, len(survival)), key=lambda node: (-survival[node], node))


class Confidence:
    """Calibrates stated confidences: the share of nodes with such a confidence that survived, over
    all rows and of one row.

    Of deterministic nodes only, whose would-be acceptance follows from the committed text whether or not they were
    submitted. Nodes may be of kinds that are learned apart, such as who proposed them.
    """

    def __init__(self) -> None:
        self._shared = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.long_memory)
        self._rows: dict[int, Acceptance] = {}

    def of(self, row: int) -> Estimate:
        """Return the estimate for a row's nodes: below 1, for longer paths must be less likely."""
        shared, own = self._shared, self._rows.get(row)

        def estimate(holders: int, stated: float) -> float:
            key = holders, min(int(10 * stated), 9)
            common = shared.estimate(key, stated)
            return min(0.999, common if own is None else own.estimate(key, common))

        return estimate

    def learn(self, row: int, ranking: Ranking, committed: Sequence[int]) -> int:
        """Compare a tree with what followed the root, and return how many of these tokens it held."""
        own = self._rows.get(row)
        if own is None:
            own = self._rows[row] = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_memory)
        tree, deepest = ranking.tree, 0
        for node, right in compare_draft(tree.tokens, tree.parents, committed):
            key = ranking.holders[node], min(int(10 * tree.confidence[node]), 9)
            self._shared.learn(key, right)
            own.learn(key, right)
            if right:
                deepest = max(deepest, tree.depths[node])
        return deepest

    def forget(self, row: int) -> None:
        """Forget a row that is free."""
        self._rows.pop(row, None)
