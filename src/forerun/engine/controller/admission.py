"""After drafting: which of the drafted nodes the target shall score. Only deterministic nodes are ever taken away.

A node is worth its place if its probability of surviving exceeds the running goodput times what it costs. Costs are
staircases, so the rule is applied to sizes of a pass (`filling`): rank each row's nodes by the probability that their
whole path survives, take for each size the best prefixes that fit, and choose the size that gains most. Size 0 is plain
decoding. Knows no drafter and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun import tree as trees
from forerun.tree import TreeBuilder
from forerun.types import Draft, Drawn

Estimate = Callable[[float], float]
"""A drafter's stated confidence -> probability that the node survives if its parent does."""
Agreed = Callable[[int, float], float]
"""Who holds a node, as bits, and the confidence of the surest of them -> probability that it survives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenTree:
    """A row's draft of deterministic nodes, ranked: the only thing that may be pruned. Sampled nodes cannot become
    one."""

    nodes: tuple[tuple[int, int, float], ...]
    """(token, parent id, stated confidence) of node 1, 2, ..."""
    survival: tuple[float, ...]
    """Entry k: probability that the whole path to node k survives; 1 for the root."""
    order: tuple[int, ...]
    """Node ids by falling survival; parents come before their children."""
    worth: tuple[float, ...]
    """Entry n: expected number of accepted tokens if the first n of `order` are submitted."""
    holders: tuple[int, ...] = ()
    """Of a joined tree: who proposed the path to node 1, 2, ..., as bits; empty where only one did."""

    @classmethod
    def of(cls, draft: Draft, row: int, estimate: Estimate) -> GivenTree:
        """Rank a row of a draft.

        Raises:
            AssertionError: the row holds a sampled node, whose fate may not depend on its value; a probe; or nodes
                that have already run.
        """
        assert prunable(draft, row), "only deterministic nodes may be pruned after they were drawn"
        nodes, survival = draft.rows[row], [1.0]
        for parent, confidence in zip(nodes.parents, nodes.confidence, strict=True):
            survival.append(survival[parent] * estimate(confidence))
        return cls._ranked(list(zip(nodes.tokens, nodes.parents, nodes.confidence, strict=True)), survival)

    @classmethod
    def joined(cls, trees: Mapping[int, GivenTree], most: int, estimate: Agreed) -> GivenTree:
        """Trees of one row, by who proposed them, as one of at most `most` nodes.

        The surest of those that hold a path says how likely it is, and `estimate` what that is worth: the surest of
        several is too sure, above all where the others hold something else or nothing.
        """
        nodes, survival, holders = _overlaid(trees, most)
        kept = {0: 0}
        for node in sorted(_by_survival(survival)[:most]):
            kept[node] = len(kept)
        named, alive, held = list[tuple[int, int, float]](), [1.0], list[int]()
        for node in list(kept)[1:]:
            token, parent = nodes[node - 1]
            stated = survival[node] / survival[parent] if survival[parent] > 0 else 0.0
            named.append((token, kept[parent], stated))
            alive.append(alive[kept[parent]] * estimate(holders[node], stated))
            held.append(holders[node])
        return cls._ranked(named, alive, held)

    @classmethod
    def _ranked(
        cls, nodes: Sequence[tuple[int, int, float]], survival: Sequence[float], holders: Sequence[int] = ()
    ) -> GivenTree:
        order = _by_survival(survival)
        return cls(
            nodes=tuple(nodes),
            survival=tuple(survival),
            order=tuple(order),
            worth=_worth([parent for _, parent, _ in nodes], survival, order),
            holders=tuple(holders),
        )

    def expected(self, nodes: int) -> float:
        """Tokens that its best nodes bring, so many of them or all."""
        return self.worth[min(nodes, len(self.worth) - 1)]

    def builder(self) -> TreeBuilder:
        """The tree as it is proposed."""
        made = TreeBuilder()
        for token, parent, stated in self.nodes:
            made.add(token, parent, confidence=stated)
        return made


def prunable(draft: Draft, row: int) -> bool:
    """Whether a row may lose nodes: all are deterministic, none is a probe, none has already run through any layer."""
    nodes = draft.rows[row]
    return draft.resume is None and not any(nodes.probes) and all(kind is Drawn.DETERMINISTIC for kind in nodes.drawn)


def _overlaid(trees: Mapping[int, GivenTree], most: int) -> tuple[list[tuple[int, int]], list[float], list[int]]:
    """The best `most` nodes of each tree over each other: (token, parent id); then with the root, how likely the surest
    tree thinks each path, and whose it is, as bits."""
    nodes, survival, holders = list[tuple[int, int]](), [1.0], [0]
    there = dict[tuple[int, int], int]()
    for who, tree in trees.items():
        place = {0: 0}
        for node in tree.order[:most]:
            token, parent, _ = tree.nodes[node - 1]
            key = place[parent], token
            twin = place[node] = there.setdefault(key, len(survival))
            if twin == len(survival):
                nodes.append((token, key[0]))
                survival.append(0.0)
                holders.append(0)
            survival[twin] = max(survival[twin], tree.survival[node])
            holders[twin] |= 1 << who
    return nodes, survival, holders


def _by_survival(survival: Sequence[float]) -> list[int]:
    """Node ids, the likeliest first; of equals the one that came first, so parents precede their children."""
    return sorted(range(1, len(survival)), key=lambda node: (-survival[node], node))


def _worth(parents: Sequence[int], survival: Sequence[float], order: Sequence[int]) -> tuple[float, ...]:
    """Running sums; siblings exclude each other, so together they cannot survive more often than their parent."""
    left, total, found = list(survival), 0.0, [0.0]
    for node in order:
        parent = parents[node - 1]
        gain = min(survival[node], left[parent])
        left[parent] -= gain
        total += gain
        found.append(total)
    return tuple(found)


def prune(draft: Draft, keep: Mapping[int, Sequence[int]]) -> Draft:
    """The draft with only these nodes in these rows; other rows stay as they are.

    Args:
        keep: row -> node ids, with every kept node's parent among them.
    """
    builders = [trees.rebuild(draft, row, widen=False) for row in range(len(draft.counts))]
    for row, nodes in keep.items():
        assert prunable(draft, row), "only deterministic nodes may be pruned after they were drawn"
        builders[row] = builders[row].only(nodes)
    return trees.stack(builders, law_ids=draft.law_ids)
