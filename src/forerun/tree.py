"""The token tree: parent pointers to depths, ancestor masks and paths, and the one way to build a draft.

A chain is the tree in which every parent is the node before. Knows no model and no law beyond carrying it along.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from forerun.errors import InvalidDraftError
from forerun.types import Draft, Drawn


def ancestor_mask(parents: Tensor) -> Tensor:
    """Who sees whom inside the tree: (B, N, N) bool from parents (B, K); every node sees itself and its ancestors.

    The transitive closure by repeated squaring, without a host round trip.
    """
    batch, drafted = parents.shape
    nodes = drafted + 1
    reach = torch.eye(nodes, device=parents.device).repeat(batch, 1, 1)
    if drafted:
        reach[:, 1:].scatter_(2, parents.unsqueeze(-1), 1.0)
    steps = 1
    while steps < drafted:
        reach = (reach @ reach).clamp_(max=1.0)
        steps *= 2
    return reach > 0


def depths(parents: Tensor) -> Tensor:
    """(B, N) int64 depth of every node, root 0, from parents (B, K)."""
    return ancestor_mask(parents).sum(-1) - 1


def check(draft: Draft, vocabulary: int) -> None:
    """Refuse a draft that is no tree or leaves the vocabulary.

    Raises:
        InvalidDraftError: naming the row, the node and what is wrong with it.
    """
    for row, count in enumerate(draft.counts.tolist()):
        if not 0 <= count <= draft.size:
            raise InvalidDraftError(f"row {row}: count {count} is not in 0..{draft.size}")
        tokens, parents = draft.tokens[row, :count].tolist(), draft.parents[row, :count].tolist()
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            if not 0 <= parent < node:
                expected = f"a parent comes before its child (0..{node - 1}), 0 is the root"
                raise InvalidDraftError(f"row {row}: node {node} has parent {parent}; {expected}")
            if not 0 <= token < vocabulary:
                raise InvalidDraftError(
                    f"row {row}: node {node} holds token {token}, outside the vocabulary of {vocabulary}"
                )


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """One row's draft on the host: what a verification rule reads. Node 0 is the root."""

    tokens: tuple[int, ...]
    """(N,) token of each node."""
    parents: tuple[int, ...]
    """(N,) parent of each node, -1 for the root."""
    drawn: tuple[Drawn, ...]
    """(N,) how each node came about; the root is GIVEN."""
    laws: Mapping[int, Tensor]
    """node -> (V,) the law its sampled children were drawn from, over the target's vocabulary."""
    scouts: frozenset[int] = frozenset()
    """Nodes that may never be accepted."""

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the acceptable children of each node, in the order they were drafted."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0 and node not in self.scouts:
                lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """(N,) depth of each node, root 0."""
        result: list[int] = []
        for parent in self.parents:
            result.append(result[parent] + 1 if parent >= 0 else 0)
        return tuple(result)

    @property
    def size(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.tokens) - 1

    def path(self, node: int) -> tuple[int, ...]:
        """Node ids from the root's child down to `node`; empty for the root."""
        nodes: list[int] = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def kinds(self) -> frozenset[Drawn]:
        """How the drafted nodes came about."""
        return frozenset(self.drawn[1:])


class TreeBuilder:
    """Collects one row's nodes in topological order. The one way for a drafter to make a tree on the host."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.drawn: list[Drawn] = []
        self.confidence: list[float] = []
        self.scouts: list[bool] = []
        self.laws: dict[int, Tensor] = {}
        self._given: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self, token: int, parent: int, *, drawn: Drawn = Drawn.GIVEN, confidence: float = 1.0, scout: bool = False
    ) -> int:
        """Add a child of `parent` (0 is the root) and return its node id; a GIVEN twin is returned instead of added."""
        twin = self._given.get((parent, token)) if drawn is Drawn.GIVEN and not scout else None
        if twin is not None:
            return twin
        self.tokens.append(token)
        self.parents.append(parent)
        self.drawn.append(drawn)
        self.confidence.append(confidence)
        self.scouts.append(scout)
        node = len(self.tokens)
        if drawn is Drawn.GIVEN and not scout:
            self._given[parent, token] = node
        return node

    def add_path(self, tokens: Iterable[int], parent: int = 0, *, confidence: float = 1.0) -> int:
        """Add a chain of GIVEN nodes below `parent`, sharing what is there already; returns the last node's id."""
        for token in tokens:
            parent = self.add(token, parent, confidence=confidence)
        return parent

    def set_law(self, node: int, law: Tensor) -> None:
        """Record the law (V,) float32 that the sampled children of `node` were drawn from."""
        self.laws[node] = law

    def tree(self, root: int) -> TokenTree:
        """What was collected as a tree that a rule can judge; `root` is the last committed token."""
        return TokenTree(
            tokens=(root, *self.tokens),
            parents=(-1, *self.parents),
            drawn=(Drawn.GIVEN, *self.drawn),
            laws=self.laws,
            scouts=frozenset(node for node, scout in enumerate(self.scouts, start=1) if scout),
        )


def stack(
    builders: Sequence[TreeBuilder], *, device: torch.device | str = "cpu", law_ids: Tensor | None = None
) -> Draft:
    """One `Draft` out of one tree per row, padded to the largest."""
    size = max((len(builder) for builder in builders), default=0)

    def pad(name: str, dtype: torch.dtype) -> Tensor:
        rows = [list(getattr(b, name)) + [0] * (size - len(b)) for b in builders]
        return torch.tensor(rows, dtype=dtype, device=device).view(len(builders), size)

    return Draft(
        tokens=pad("tokens", torch.int64),
        parents=pad("parents", torch.int64),
        counts=torch.tensor([len(builder) for builder in builders], dtype=torch.int64, device=device),
        drawn=pad("drawn", torch.uint8),
        confidence=pad("confidence", torch.float32),
        scouts=pad("scouts", torch.bool) if any(any(b.scouts) for b in builders) else None,
        laws=_stack_laws(builders, size, device),
        law_ids=law_ids,
    )


def _stack_laws(builders: Sequence[TreeBuilder], size: int, device: torch.device | str) -> Tensor | None:
    widths = {len(law) for builder in builders for law in builder.laws.values()}
    if not widths:
        return None
    laws = torch.zeros(len(builders), size + 1, widths.pop(), device=device)
    for row, builder in enumerate(builders):
        for node, law in builder.laws.items():
            laws[row, node] = law
    return laws


def gather(drafts: Sequence[tuple[Sequence[int], Draft]], batch: int) -> Draft:
    """One draft for `batch` rows out of several: each comes with the rows it speaks for; other rows draft nothing."""
    if len(drafts) == 1 and list(drafts[0][0]) == list(range(batch)):
        return drafts[0][1]
    builders = [TreeBuilder() for _ in range(batch)]
    for rows, draft in drafts:
        for index, row in enumerate(rows):
            builders[row] = rebuild(draft, index)
    return stack(builders)


def rebuild(draft: Draft, row: int, vocabulary: int | None = None) -> TreeBuilder:
    """One row of a draft as a builder again, laws widened to the target's vocabulary where `law_ids` maps them."""
    builder = TreeBuilder()
    count = int(draft.counts[row])
    builder.tokens = draft.tokens[row, :count].tolist()
    builder.parents = draft.parents[row, :count].tolist()
    builder.drawn = [Drawn(kind) for kind in draft.drawn[row, :count].tolist()]
    builder.confidence = [1.0] * count if draft.confidence is None else draft.confidence[row, :count].tolist()
    builder.scouts = [False] * count if draft.scouts is None else draft.scouts[row, :count].tolist()
    sampled = {parent for parent, kind in zip(builder.parents, builder.drawn, strict=True) if kind is not Drawn.GIVEN}
    for node in sampled:
        builder.laws[node] = _wide_law(draft, row, node, vocabulary)
    return builder


def _wide_law(draft: Draft, row: int, node: int, vocabulary: int | None) -> Tensor:
    if draft.laws is None:
        raise InvalidDraftError(f"row {row}: node {node} has sampled children but the draft records no law for it")
    law = draft.laws[row, node]
    if draft.law_ids is None:
        return law
    wide = law.new_zeros(vocabulary if vocabulary is not None else int(draft.law_ids.max()) + 1)
    return wide.index_copy_(0, draft.law_ids, law)


def token_trees(draft: Draft, roots: Sequence[int], vocabulary: int) -> list[TokenTree]:
    """The draft as one host tree per row; `roots` holds each row's last committed token."""
    draft = _to_host(draft)
    return [rebuild(draft, row, vocabulary).tree(root) for row, root in enumerate(roots)]


def _to_host(draft: Draft) -> Draft:
    """Everything but the laws on the host, in one place; laws stay where they are."""
    if draft.tokens.device.type == "cpu":
        return draft
    scouts = None if draft.scouts is None else draft.scouts.cpu()
    confidence = None if draft.confidence is None else draft.confidence.cpu()
    return Draft(
        tokens=draft.tokens.cpu(),
        parents=draft.parents.cpu(),
        counts=draft.counts.cpu(),
        drawn=draft.drawn.cpu(),
        laws=draft.laws,
        law_ids=draft.law_ids,
        confidence=confidence,
        scouts=scouts,
    )
