"""Trees weighed by what they are expected to bring, and joined under one node budget.

Knows how nodes were drawn. Knows no drafter, no model and no rule.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.tree import TreeBuilder
from forerun.types import Drawn


def path_probabilities(builder: TreeBuilder) -> list[float]:
    """(N,) estimated probability that a node survives, root first: the confidences along its path, a probe's 0."""
    found = [1.0]
    for parent, confidence, probe in zip(builder.parents, builder.confidence, builder.probes, strict=True):
        found.append(0.0 if probe else found[parent] * min(max(confidence, 0.0), 1.0))
    return found


def expected_tokens(builder: TreeBuilder) -> float:
    """Drafted tokens that are expected to be kept."""
    return sum(path_probabilities(builder)[1:])


def draws(builder: TreeBuilder) -> bool:
    """Whether any node was sampled."""
    return any(kind is not Drawn.DETERMINISTIC for kind in builder.drawn)


def join(base: TreeBuilder, others: Sequence[TreeBuilder], nodes: int) -> TreeBuilder:
    """`base` whole and in its own numbering, then the deterministic nodes of the others, the likeliest first, up to
    `nodes`.

    Nodes that hold the same tokens from the root on become one, whose confidence is the largest. A deterministic node
    whose token a sampled sibling holds is left out, and what follows it hangs from that sibling. Sampled nodes of the
    others are left out with all below them: which deterministic nodes there are never decides whether a sampled one is
    submitted. Probe nodes come last, as far as there is room.
    """
    whole = copy(base)
    places = [graft(whole, other, 0, since=len(base)) for other in others]
    tree = _pruned(whole, len(base), nodes)
    for other, place in zip(others, places, strict=True):
        _add_scouts(tree, other, place, nodes)
    return tree.builder


def copy(builder: TreeBuilder) -> TreeBuilder:
    """The same tree, to be added to."""
    made = TreeBuilder()
    made.tokens, made.parents, made.drawn = list(builder.tokens), list(builder.parents), list(builder.drawn)
    made.confidence, made.probes, made.laws = list(builder.confidence), list(builder.probes), dict(builder.laws)
    made.masses = dict(builder.masses)
    made.index_given()
    return made


def graft(tree: TreeBuilder, other: TreeBuilder, below: int, *, since: int) -> dict[int, int]:
    """Hang the deterministic nodes of `other` below a node of `tree`, twins only once; other's node -> tree's node.

    Args:
        since: nodes of `tree` up to this one keep the confidence that they have.
    """
    there: dict[tuple[int, int], int] = {}
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if not tree.probes[node - 1]:
            there.setdefault((parent, token), node)
    place = {0: below}
    for node, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True), start=1):
        if parent not in place or other.probes[node - 1] or other.drawn[node - 1] is not Drawn.DETERMINISTIC:
            continue
        confidence = other.confidence[node - 1]
        twin = there.get((place[parent], token))
        if twin is None:
            twin = there[place[parent], token] = tree.add(token, place[parent], confidence=confidence)
        elif twin > since:
            tree.confidence[twin - 1] = max(tree.confidence[twin - 1], confidence)
        place[node] = twin
    return place


class _Kept:
    """A pruned tree, and where the nodes of the whole one went."""

    def __init__(self, base: TreeBuilder) -> None:
        self.builder = base
        self.where = {node: node for node in range(len(base) + 1)}


def _pruned(whole: TreeBuilder, fixed: int, nodes: int) -> _Kept:
    """The first `fixed` nodes and the likeliest of the rest; no node is likelier than its parent."""
    likely = path_probabilities(whole)
    rest = sorted(range(fixed + 1, len(whole) + 1), key=lambda node: (-likely[node], node))
    base = copy(whole)
    for values in (base.tokens, base.parents, base.drawn, base.confidence, base.probes):
        del values[fixed:]
    base.index_given()
    kept = _Kept(base)
    for node in sorted(rest[: max(0, nodes - fixed)]):
        parent = kept.where[whole.parents[node - 1]]
        kept.where[node] = base.add(whole.tokens[node - 1], parent, confidence=whole.confidence[node - 1])
    return kept


def _add_scouts(tree: _Kept, other: TreeBuilder, place: dict[int, int], nodes: int) -> None:
    where = {node: tree.where[twin] for node, twin in place.items() if twin in tree.where}
    for node, (token, parent) in enumerate(zip(other.tokens, other.parents, strict=True), start=1):
        if len(tree.builder) >= nodes:
            return
        if other.probes[node - 1] and parent in where:
            where[node] = tree.builder.add(token, where[parent], probe=True)
