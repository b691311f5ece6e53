"""Trees of deterministic nodes, ranked by how likely each path survives; merged, and pruned. Sampled nodes are refused.

What a drafter's own confidence in such a node is worth is learned from which nodes the text went on with, submitted or
not. Knows no drafter, no cost and no step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun import tree as trees
from forerun.acceptance import Acceptance, compared
from forerun.engine.policy.settings import SETTINGS
from forerun.tree import TreeBuilder
from forerun.types import Draft, DraftRow, Drawn

Estimate = Callable[[int, float], float]
"""Who proposed a node, as bits, and the confidence that was stated -> probability that it survives its parent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedTree:
    """A row's draft of deterministic nodes, ranked: the only thing that may be pruned."""

    nodes: tuple[tuple[int, int, float], ...]
    """(token, parent id, stated confidence) of node 1, 2, ..."""
    survival: tuple[float, ...]
    """Entry k: probability that the whole path to node k survives; 1 for the root."""
    holders: tuple[int, ...]
    """Who proposed node 1, 2, ..., as bits."""
    order: tuple[int, ...]
    """Node ids by falling survival; parents come before their children."""
    worth: tuple[float, ...]
    """Entry n: expected number of accepted tokens if the first n of `order` are submitted."""

    @classmethod
    def of(cls, draft: Draft, row: int, estimate: Estimate) -> RankedTree:
        """Rank a row of a draft, proposed by nobody in particular (bits 0).

        Raises:
            AssertionError: the row holds a sampled node, whose fate may not depend on its value; a probe; or nodes
                that have already run.
        """
        assert prunable(draft, row), "only deterministic nodes may be pruned after they were drawn"
        nodes = draft.rows[row]
        return cls._ranked(
            list(zip(nodes.tokens, nodes.parents, nodes.confidence, strict=True)), [0] * len(nodes.tokens), estimate
        )

    @classmethod
    def merged(cls, found: Mapping[int, DraftRow], most: int, estimate: Estimate) -> RankedTree:
        """Trees of one row, by who proposed them, as one of at most `most` nodes.

        The surest of those that hold a path says how likely it is, and `estimate` what that is worth: the surest of
        several is too sure, above all where the others hold something else or nothing.

        Raises:
            AssertionError: as `of`, but for nodes that have already run.
        """
        nodes, survival, holders = list[tuple[int, int]](), [1.0], [0]
        known = dict[tuple[int, int], int]()
        for who, row in found.items():
            assert not any(row.probes) and not any(row.drawn), "only deterministic nodes may be merged"
            ids, alive = [0], [1.0]
            for token, parent, confidence in zip(row.tokens, row.parents, row.confidence, strict=True):
                key = ids[parent], token
                twin = known.setdefault(key, len(survival))
                if twin == len(survival):
                    nodes.append((token, key[0]))
                    survival.append(0.0)
                    holders.append(0)
                ids.append(twin)
                alive.append(alive[parent] * min(1.0, confidence))
                survival[twin] = max(survival[twin], alive[-1])
                holders[twin] |= 1 << who
        new, named = {0: 0}, list[tuple[int, int, float]]()
        best = sorted(_by_survival(survival)[:most])
        for node in best:
            new[node] = len(new)
            token, parent = nodes[node - 1]
            named.append((token, new[parent], survival[node] / survival[parent] if survival[parent] > 0 else 0.0))
        return cls._ranked(named, [holders[node] for node in best], estimate)

    @classmethod
    def _ranked(cls, nodes: Sequence[tuple[int, int, float]], holders: Sequence[int], estimate: Estimate) -> RankedTree:
        survival = [1.0]
        for (_, parent, stated), bits in zip(nodes, holders, strict=True):
            survival.append(survival[parent] * estimate(bits, stated))
        order, left, total, worth = _by_survival(survival), survival[:], 0.0, [0.0]
        for node in order:  # siblings exclude each other: together they cannot survive more often than their parent
            parent = nodes[node - 1][1]
            gain = min(survival[node], left[parent])
            left[parent] -= gain
            total += gain
            worth.append(total)
        return cls(
            nodes=tuple(nodes),
            survival=tuple(survival),
            holders=tuple(holders),
            order=tuple(order),
            worth=tuple(worth),
        )

    def held(self, who: int, nodes: int) -> float:
        """How much of what its best nodes bring, so many of them, one of those who proposed it holds."""
        return sum(self.survival[node] for node in self.order[:nodes] if self.holders[node - 1] >> who & 1)

    def builder(self) -> TreeBuilder:
        """The tree as it is proposed."""
        made = TreeBuilder()
        for token, parent, stated in self.nodes:
            made.add(token, parent, confidence=stated)
        return made


def _by_survival(survival: Sequence[float]) -> list[int]:
    """Node ids, the likeliest first; of equals the one that came first, so parents precede their children."""
    return sorted(range(1, len(survival)), key=lambda node: (-survival[node], node))


def prunable(draft: Draft, row: int) -> bool:
    """Whether a row may lose nodes: all are deterministic, none is a probe, none has already run through any layer."""
    nodes = draft.rows[row]
    return draft.resume is None and not any(nodes.probes) and all(kind is Drawn.DETERMINISTIC for kind in nodes.drawn)


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


class Confidence:
    """What a stated confidence is worth: the share of such nodes that survived, of all rows and of one row.

    Of deterministic nodes only, whose would-be acceptance follows from the committed text whether or not they were
    submitted. Nodes may be of kinds that are learned apart, such as who proposed them.
    """

    def __init__(self) -> None:
        self._shared = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.node_memory)
        self._rows: dict[int, Acceptance] = {}

    def of(self, row: int) -> Estimate:
        """What it says of a row's nodes: below 1, for longer paths must be less likely."""
        shared, own = self._shared, self._rows.get(row)

        def estimate(holders: int, stated: float) -> float:
            key = holders, min(int(10 * stated), 9)
            common = shared.estimate(key, stated)
            return min(0.999, common if own is None else own.estimate(key, common))

        return estimate

    def learn(self, row: int, tree: RankedTree, committed: Sequence[int]) -> int:
        """Compare a tree with what followed the root: how many of these tokens it held."""
        own = self._rows.get(row)
        if own is None:
            own = self._rows[row] = Acceptance(weight=SETTINGS.weight, memory=SETTINGS.row_node_memory)
        tokens, parents, stated = zip(*tree.nodes, strict=True)
        depths = {0: 0}
        for node, right in compared(tokens, parents, committed):
            key = tree.holders[node - 1], min(int(10 * stated[node - 1]), 9)
            self._shared.learn(key, right)
            own.learn(key, right)
            if right:
                depths[node] = depths[parents[node - 1]] + 1
        return max(depths.values())

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)
