"""Trees of deterministic nodes are ranked by how likely each path survives, merged, and pruned. Sampled nodes are
refused.

The confidences that drafters state are calibrated: the committed text shows for every node whether it was right,
submitted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.control.settings import SETTINGS
from forerun.core.acceptance import Acceptance, compare_draft
from forerun.core.tree import TokenTree

Estimate = Callable[[int, float], float]
"""A function from the drafters that proposed a node, as bits, and its stated confidence to the probability that the
target accepts it if it accepts the parent.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The nodes of a tree, ordered by their expected gain. All are deterministic: no other node may be pruned."""

    tree: TokenTree  # Its confidences are the drafters' own, not calibrated
    survival: tuple[float, ...]
    """Entry k: probability that the whole path to node k survives; 1 for the root. Siblings exclude each other, so
    together they survive no more often than their parent: the likelier ones come first.
    """
    holders: tuple[int, ...]  # (N,) drafters that proposed each node, as bits
    order: tuple[int, ...]  # Node ids by falling survival; parents come before their children
    worth: tuple[float, ...]  # Entry n: expected number of accepted tokens if the first n of `order` are submitted

    @classmethod
    def of(cls, tree: TokenTree, estimate: Estimate, holders: Sequence[int] | None = None) -> Ranking:
        """Rank a tree; without `holders` the bits are 0. Asserts that the tree holds no sampled node, because whether
        one is submitted may not depend on its value, no probe node, and no node that the target has already run.
        """
        assert tree.prunable, "only deterministic nodes may be pruned after they were drawn"
        bits, survival = holders or [0] * (tree.size + 1), [1.0] * (tree.size + 1)
        for parent, children in enumerate(tree.children):
            alone = {child: survival[parent] * estimate(bits[child], tree.confidence[child]) for child in children}
            left = survival[parent]
            for child in sorted(alone, key=lambda child: (-alone[child], child)) if len(alone) > 1 else alone:
                survival[child] = min(alone[child], left)
                left -= survival[child]
        order = _by_survival(survival)
        worth = [0.0]
        for node in order:
            worth.append(worth[-1] + survival[node])
        return cls(tree=tree, survival=tuple(survival), holders=tuple(bits), order=tuple(order), worth=tuple(worth))

    @classmethod
    def merge(cls, trees: Mapping[int, TokenTree], most: int, estimate: Estimate, *, chain: bool = False) -> Ranking:
        """Merge the trees that several drafters proposed for one row into a tree of at most `most` nodes, or into its
        best path (`chain`). Asserts as `of` does.

        Of the confidences in a path the highest counts, and `estimate` calibrates it: the highest of several is too
        high, above all where the other drafters propose something else or nothing.
        """
        joined, survival, holders = _join(trees)
        best = list(joined.best_path()[:most]) if chain else sorted(_by_survival(survival)[:most])
        pruned = joined.only(best) if len(best) < joined.size else joined
        return cls.of(pruned.seal(), estimate, [0, *(holders[node] for node in best)])

    def held(self, who: int, nodes: int) -> float:
        """Return the summed survival of those of the `nodes` best nodes that the drafter `who` proposed."""
        return sum(self.survival[node] for node in self.order[:nodes] if self.holders[node] >> who & 1)

    def worth_without(self, who: int) -> list[float]:
        """Return the `worth` without the nodes that only the drafter `who` proposed."""
        worth = [0.0]
        for node, before, after in zip(self.order, self.worth, self.worth[1:], strict=False):
            if self.holders[node] != 1 << who:
                worth.append(worth[-1] + after - before)
        return worth


def _join(trees: Mapping[int, TokenTree]) -> tuple[TokenTree, list[float], list[int]]:
    """Join trees, and return the tree, the survival of each node, and the drafters that proposed it, as bits."""
    assert all(tree.prunable for tree in trees.values()), "only deterministic nodes may be merged"
    if len(trees) == 1:
        [(who, tree)] = trees.items()
        return tree, tree.survival(), [0, *[1 << who] * tree.size]
    root = next(iter(trees.values())).tokens[0]
    tokens, parents, survival, holders, there = [root], [-1], [1.0], [0], dict[tuple[int, int], int]()
    for who, tree in trees.items():
        ids = [0]
        alive = tree.survival()
        for node in range(1, tree.size + 1):
            key = ids[tree.parents[node]], tree.tokens[node]
            twin = there.setdefault(key, len(tokens))
            if twin == len(tokens):
                tokens.append(key[1])
                parents.append(key[0])
                survival.append(0.0)
                holders.append(0)
            ids.append(twin)
            survival[twin] = max(survival[twin], alive[node])
            holders[twin] |= 1 << who
    confidence = [
        survival[node] / survival[parent] if survival[parent] > 0 else 0.0
        for node, parent in enumerate(parents)
        if node
    ]
    return TokenTree.of(root, tokens[1:], parents[1:], confidence), survival, holders


def _by_survival(survival: Sequence[float]) -> list[int]:
    """Return node ids, the likeliest first; equals keep their order, so parents precede their children."""
    return sorted(range(1, len(survival)), key=lambda node: (-survival[node], node))


class Confidence:
    """Calibrates stated confidences: counts the share of nodes with such a confidence that survived, over all rows and
    for one row, separately for each set of drafters that proposed the node.

    Only deterministic nodes are counted. The committed text shows whether they would have been accepted, also where
    they were not submitted.
    """

    def __init__(self) -> None:
        self._shared = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.long_memory)
        self._rows: dict[int, Acceptance] = {}

    def of(self, row: int) -> Estimate:
        """Return the estimate for a row's nodes. It is below 1, so that longer paths are less likely."""
        shared = self._shared
        row_counts = self._rows.get(row)

        def estimate(holders: int, stated: float) -> float:
            key = holders, min(int(10 * stated), 9)
            common = shared.estimate(key, stated)
            return min(0.999, common if row_counts is None else row_counts.estimate(key, common))

        return estimate

    def learn(self, row: int, ranking: Ranking, committed: Sequence[int]) -> int:
        """Compare a tree with the tokens committed after the root, and return how many of these it holds."""
        row_counts = self._rows.get(row)
        if row_counts is None:
            row_counts = self._rows[row] = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_memory)
        tree = ranking.tree
        deepest = 0
        for node, right in compare_draft(tree.tokens, tree.parents, committed):
            key = ranking.holders[node], min(int(10 * tree.confidence[node]), 9)
            self._shared.learn(key, right)
            row_counts.learn(key, right)
            if right:
                deepest = max(deepest, tree.depths[node])
        return deepest

    def forget(self, row: int) -> None:
        """Forget the counts of a row that is free."""
        self._rows.pop(row, None)
