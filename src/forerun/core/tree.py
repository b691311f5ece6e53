"""The token tree: a drafter builds it, the target scores it, a rule verifies it, and a trace shows it.

In a chain every node's parent is the node before. The structure, a few numbers per node, is on the host; the
distributions that sampled nodes were drawn from are tensors. A batch is packed once, on its way to the device
(`forerun.model.inputs.Nodes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.devices import send_ints, widest
from forerun.types import Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """States of a tree's first nodes, which ran through the target's first layers while they were drafted, in the slots
    in which they are scored. Scoring runs only the remaining layers of these nodes.
    """

    boundary: int  # Number of layers that they have run through, at least 1
    states: Tensor  # (R, H) at that boundary, of the tree's first R nodes, root included
    stamp: int  # `Target.writes` of the row after they were run: after another write to its slots they are run again


class TokenTree:
    """One sequence's draft. Node 0 is the root, the last committed token, which is not drafted.

    A drafter adds nodes, parents before their children. The engine scores a read-only copy, made by `seal`. Only
    `Drawn.DETERMINISTIC` siblings are merged: a token that was sampled twice is two nodes, since merging them would
    bias the output.

    Args:
        root: the last committed token.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]  # (N,) token of each node
        self.parents = [-1]  # (N,) parent of each node, -1 for the root
        self.depths = [0]  # (N,) depth of each node, root 0
        self.drawn = [Drawn.DETERMINISTIC]  # (N,) how each node was drawn; the root is DETERMINISTIC
        self.confidence = [1.0]
        """(N,) the drafter's estimate, in 0..1, that a node is accepted if its parent is; 1 for the root."""
        self.probes: set[int] = set()  # Nodes that are scored for the drafter's own use and never accepted
        self.draft_probs: dict[int, Tensor] = {}
        """By node, the distribution (V,) float32 that its sampled children were drawn from; V is at most the target's
        vocabulary.
        """
        self.masses: dict[int, float] = {}  # node -> the sum of its `draft_probs`, where known; see `masses_of`
        self.resume: Resume | None = None  # Layers that the first nodes have already run through in this step
        self._twins: dict[tuple[int, int], int] | None = {}

    @classmethod
    def of(
        cls, root: int, tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float] | None = None
    ) -> TokenTree:
        """Build a tree of deterministic nodes 1, 2, ... without duplicates; parents are node ids."""
        tree, size = cls(root), len(tokens)
        tree.tokens += tokens
        tree.parents += parents
        tree.drawn *= size + 1
        tree.confidence += [1.0] * size if confidence is None else confidence
        for parent in parents:
            tree.depths.append(tree.depths[parent] + 1)
        tree._twins = None
        return tree

    @property
    def size(self) -> int:
        """Number of drafted nodes, without the root."""
        return len(self.tokens) - 1

    def __repr__(self) -> str:
        return f"TokenTree(tokens={list(self.tokens)}, parents={list(self.parents)})"

    # --- building -----------------------------------------------------------------------------------------------------

    def add(
        self,
        token: int,
        parent: int,
        *,
        drawn: Drawn = Drawn.DETERMINISTIC,
        confidence: float = 1.0,
        probe: bool = False,
    ) -> int:
        """Add a child of `parent` and return its node id. If `parent` already has this DETERMINISTIC child, return that
        child's id.
        """
        mergeable = drawn is Drawn.DETERMINISTIC and not probe
        twins = self._twins_by_token()
        if mergeable and (twin := twins.get((parent, token))) is not None:
            return twin
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.drawn.append(drawn)
        self.confidence.append(confidence)
        if mergeable:
            twins[parent, token] = node
        elif probe:
            self.probes.add(node)
        return node

    def add_path(self, tokens: Iterable[int], parent: int = 0, *, confidence: float = 1.0) -> int:
        """Add a chain of DETERMINISTIC nodes below `parent`, reuse existing nodes, and return the last one."""
        for token in tokens:
            parent = self.add(token, parent, confidence=confidence)
        return parent

    def set_probs(self, node: int, probs: Tensor, mass: float | None = None) -> None:
        """Record the distribution (V,) float32 that the sampled children of `node` were drawn from,
        and its sum if known.
        """
        self.draft_probs[node] = probs
        if mass is not None:
            self.masses[node] = mass

    def copy(self) -> TokenTree:
        """Return a copy of the tree that can be modified."""
        tree = self.only(range(1, len(self.tokens)))
        tree.resume = self.resume
        return tree

    def seal(self) -> TokenTree:
        """Make the tree read-only and return it, so that writing to it raises an error instead of changing the
        output.
        """
        for name in _COLUMNS:
            vars(self)[name] = tuple(getattr(self, name))
        vars(self)["probes"] = frozenset(self.probes)
        self.__class__ = _Sealed
        return self

    def only(self, nodes: Iterable[int]) -> TokenTree:
        """Return the tree with only the root and these nodes; the parent of each must be among them."""
        chosen = [0, *sorted(nodes)]
        new = {node: position for position, node in enumerate(chosen)}
        tree = TokenTree(self.tokens[0])
        for name in _COLUMNS:
            column = getattr(self, name)
            setattr(tree, name, [column[node] for node in chosen])
        tree.parents = [-1, *(new[parent] for parent in tree.parents[1:])]
        tree.probes = {new[node] for node in self.probes if node in new}
        tree.draft_probs = {new[node]: probs for node, probs in self.draft_probs.items() if node in new}
        tree.masses = {new[node]: mass for node, mass in self.masses.items() if node in new}
        tree._twins = None
        return tree

    def _twins_by_token(self) -> dict[tuple[int, int], int]:
        """Return the deterministic node at each (parent, token)."""
        if self._twins is None:
            self._twins = {}
            for node in range(1, len(self.tokens)):
                if self.drawn[node] is Drawn.DETERMINISTIC and node not in self.probes:
                    self._twins.setdefault((self.parents[node], self.tokens[node]), node)
        return self._twins

    # --- reading a finished tree --------------------------------------------------------------------------------------

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the children of each node, without probe nodes, in the order in which they were drafted."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0 and node not in self.probes:
                lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    @cached_property
    def tried(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the children of each node, without probe nodes, in the order in which rules try them: sampled ones
        first.
        """
        if Drawn.DETERMINISTIC not in self.drawn[1:]:
            return self.children
        return tuple(
            tuple(sorted(nodes, key=lambda node: self.drawn[node] is Drawn.DETERMINISTIC)) if len(nodes) > 1 else nodes
            for nodes in self.children
        )

    @cached_property
    def _by_token(self) -> dict[tuple[int, int], int]:
        children = dict[tuple[int, int], int]()
        first = [0]  # (N,) the first node with the same tokens from the root on
        for node in range(1, len(self.tokens)):
            first.append(children.setdefault((first[self.parents[node]], self.tokens[node]), node))
        return children

    def child(self, node: int | None, token: int) -> int | None:
        """Return the first child of `node` with `token`, probe nodes included, or None. Nodes with the same tokens from
        the root on are treated as the first of them, so that a drafter finds its nodes again in a tree that was pruned,
        merged or renumbered.
        """
        return None if node is None else self._by_token.get((node, token))

    def path(self, node: int) -> tuple[int, ...]:
        """Return the node ids from the root's child down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    @property
    def sampled(self) -> bool:
        """True if any node was sampled."""
        return self.drawn.count(Drawn.DETERMINISTIC) < len(self.drawn)

    @property
    def prunable(self) -> bool:
        """True if nodes may be pruned after they were drawn: all are deterministic, none is a probe node, and none has
        run through any layer yet.
        """
        return self.resume is None and not self.probes and not self.sampled

    def survival(self) -> list[float]:
        """Return (N,) the estimated probability that each node is accepted: the product of confidences along its path;
        0 for a probe node.
        """
        survival = [1.0]
        for node in range(1, len(self.tokens)):
            confidence = 0.0 if node in self.probes else min(max(self.confidence[node], 0.0), 1.0)
            survival.append(survival[self.parents[node]] * confidence)
        return survival

    def best_path(self) -> tuple[int, ...]:
        """Return the path with the most expected accepted tokens: the largest sum of survival probabilities."""
        if max(self.depths) == self.size:
            return tuple(range(1, self.size + 1))
        survival, gains = self.survival(), [0.0] * len(self.tokens)
        for node in range(1, len(self.tokens)):
            gains[node] = gains[self.parents[node]] + survival[node]
        return self.path(max(range(len(self.tokens)), key=gains.__getitem__))


class _Sealed(TokenTree):
    """A read-only tree, made by `TokenTree.seal`. It is a separate class, because a check in `TokenTree` would slow
    down every tree.
    """

    def seal(self) -> TokenTree:
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: this tree is read-only; modify a `copy()` of it")


_COLUMNS = ("tokens", "parents", "depths", "drawn", "confidence")


def join(base: TokenTree, others: Sequence[TokenTree], nodes: int) -> TokenTree:
    """Merge trees: all of `base` with its numbering, then the likeliest deterministic nodes of the others, up to
    `nodes` in all.

    Nodes with the same tokens from the root on become one, with the largest confidence. A deterministic node with the
    token of a sampled sibling is dropped, and its descendants are attached to that sibling. Sampled nodes of the other
    trees are dropped with everything below them: which deterministic nodes exist must not decide whether a sampled node
    is submitted. Probe nodes come last, as far as there is room.
    """
    whole = base.copy()
    mappings = [graft(whole, other, 0, since=base.size) for other in others]
    survival = whole.survival()
    added = sorted(range(base.size + 1, whole.size + 1), key=lambda node: (-survival[node], node))
    chosen = [*range(base.size + 1), *sorted(added[: max(0, nodes - base.size)])]
    new = {node: position for position, node in enumerate(chosen)}
    tree = whole.only(chosen[1:])
    tree.resume = base.resume
    for other, mapped in zip(others, mappings, strict=True):
        in_tree = {node: new[twin] for node, twin in mapped.items() if twin in new}
        for node in sorted(other.probes):
            if tree.size < nodes and other.parents[node] in in_tree:
                in_tree[node] = tree.add(other.tokens[node], in_tree[other.parents[node]], probe=True)
    return tree


def graft(tree: TokenTree, other: TokenTree, below: int, *, since: int) -> dict[int, int]:
    """Attach the deterministic nodes of `other` below a node of `tree`, without duplicates. Return a map from nodes of
    `other` to nodes of `tree`. Nodes of `tree` up to `since` keep their confidence.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(1, tree.size + 1):
        if node not in tree.probes:
            children.setdefault((tree.parents[node], tree.tokens[node]), node)
    mapped = {0: below}
    for node in range(1, other.size + 1):
        parent, token = other.parents[node], other.tokens[node]
        if parent not in mapped or node in other.probes or other.drawn[node] is not Drawn.DETERMINISTIC:
            continue
        confidence = other.confidence[node]
        twin = children.get((mapped[parent], token))
        if twin is None:
            twin = children[mapped[parent], token] = tree.add(token, mapped[parent], confidence=confidence)
        elif twin > since:
            tree.confidence[twin] = max(tree.confidence[twin], confidence)
        mapped[node] = twin
    return mapped


def prune(trees: Sequence[TokenTree], keep: Mapping[int, Sequence[int]]) -> list[TokenTree]:
    """Return the trees; those in `keep` (by index) are reduced to these nodes, whose parents must be among them."""
    assert all(trees[row].prunable for row in keep), "only deterministic nodes may be pruned after they were drawn"
    return [tree.only(keep[row]).seal() if row in keep else tree for row, tree in enumerate(trees)]


def without(tree: TokenTree, wrong: Mapping[int, float]) -> TokenTree:
    """Return the tree without the sampled children of these nodes and everything below them, none of which has run yet.
    Their ancestors stay: whether a node is submitted must not depend on its own token.
    """
    sound = {0}
    for node in range(1, tree.size + 1):
        parent = tree.parents[node]
        if parent in sound and (tree.drawn[node] is Drawn.DETERMINISTIC or parent not in wrong):
            sound.add(node)
    return tree.only(sound - {0})


def masses_of(probs: Tensor) -> Tensor:
    """Return the sums (..) of (.., V) in the device's widest float type; NaN if a number is negative."""
    sums = probs.sum(-1, dtype=widest(probs.device))
    return torch.where(probs.amin(-1) >= 0, sums, torch.nan)


def fetch_masses(trees: Sequence[TokenTree]) -> dict[int, int]:
    """Fill in the missing `masses` of all trees with one read from the device, or with none if nothing was sampled.
    Return, by index of a tree, its first node whose token has the probability 0 in one of the distributions read.
    """
    unknown = [
        (index, node) for index, tree in enumerate(trees) for node in tree.draft_probs if node not in tree.masses
    ]
    if not unknown:
        return {}
    rows = {place: row for row, place in enumerate(unknown)}
    drawn = [
        (index, node)
        for index, tree in enumerate(trees)
        for node, how in enumerate(tree.drawn)
        if how is not Drawn.DETERMINISTIC and (index, tree.parents[node]) in rows
    ]
    probs = torch.stack([trees[index].draft_probs[node] for index, node in unknown])
    chosen = [
        rows[index, trees[index].parents[node]] * probs.shape[1] + trees[index].tokens[node] for index, node in drawn
    ]
    masses = masses_of(probs)
    read = torch.cat([masses, probs.flatten()[send_ints(chosen, probs.device)].to(masses.dtype)]).tolist()
    for (index, node), mass in zip(unknown, read[: len(unknown)], strict=True):
        trees[index].masses[node] = mass
    impossible = dict[int, int]()
    for (index, node), prob in zip(drawn, read[len(unknown) :], strict=True):
        if prob == 0:
            impossible.setdefault(index, node)
    return impossible


def ancestor_mask(parents: Tensor) -> Tensor:
    """Return (B, N, N) bool, which node attends to which, from the parents (B, K) of nodes 1, 2, ...: every node
    attends to itself and its ancestors. It is the transitive closure by repeated squaring, without a host round trip.
    """
    batch, drafted = parents.shape
    nodes = drafted + 1
    reach = torch.eye(nodes, dtype=torch.float32, device=parents.device).repeat(batch, 1, 1)
    if drafted:
        reach[:, 1:].scatter_(2, parents.unsqueeze(-1), 1.0)
    steps = 1
    while steps < drafted:
        reach = (reach @ reach).clamp_(max=1.0)
        steps *= 2
    return reach > 0
