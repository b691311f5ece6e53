"""The token tree: parent pointers to depths, ancestor masks and paths, and the one way to build a draft.

A chain is the tree in which every parent is the node before. Knows no model and no law beyond carrying it along.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.errors import InvalidDraftError
from forerun.types import Draft, DraftRow, Drawn

if TYPE_CHECKING:
    from forerun.target.nouns import Resume


def ancestor_mask(parents: Tensor) -> Tensor:
    """Who sees whom inside the tree: (B, N, N) bool from parents (B, K); every node sees itself and its ancestors.

    The transitive closure by repeated squaring, without a host round trip.
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


def depths(parents: Tensor) -> Tensor:
    """(B, N) int64 depth of every node, root 0, from parents (B, K)."""
    return ancestor_mask(parents).sum(-1) - 1


@dataclass(frozen=True, kw_only=True)
class TokenTree:
    """One row's draft on the host: what a verification rule reads. Node 0 is the root."""

    tokens: tuple[int, ...]
    """(N,) token of each node."""
    parents: tuple[int, ...]
    """(N,) parent of each node, -1 for the root."""
    drawn: tuple[Drawn, ...]
    """(N,) how each node came about; the root is DETERMINISTIC."""
    laws: Mapping[int, Tensor]
    """node -> (V,) the law its sampled children were drawn from, over the target's vocabulary."""
    probes: frozenset[int] = frozenset()
    """Nodes that may never be accepted."""
    confidence: tuple[float, ...] = ()
    """(N,) what the drafter gave each node to survive, 1 for the root; for traces, no rule reads it. May be empty."""
    masses: Mapping[int, float] = field(default_factory=dict)
    """node -> the sum of its law, where that is known already."""

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the acceptable children of each node, in the order they were drafted."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node, parent in enumerate(self.parents):
            if parent >= 0 and node not in self.probes:
                lists[parent].append(node)
        return tuple(tuple(nodes) for nodes in lists)

    @cached_property
    def asked(self) -> tuple[tuple[int, ...], ...]:
        """(N,) the acceptable children of each node in the order that rules ask them: sampled ones, then the others."""
        if Drawn.DETERMINISTIC not in self.drawn[1:]:
            return self.children
        return tuple(
            tuple(sorted(nodes, key=lambda node: self.drawn[node] is Drawn.DETERMINISTIC)) if len(nodes) > 1 else nodes
            for nodes in self.children
        )

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
        self.probes: list[bool] = []
        self.laws: dict[int, Tensor] = {}
        self.masses: dict[int, float] = {}
        """Sums of the laws, where they are known."""
        self._given: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(
        self,
        token: int,
        parent: int,
        *,
        drawn: Drawn = Drawn.DETERMINISTIC,
        confidence: float = 1.0,
        probe: bool = False,
    ) -> int:
        """Add a child of `parent` (0 is the root) and return its node id; a DETERMINISTIC twin is returned instead of
        added."""
        twin = self._given.get((parent, token)) if drawn is Drawn.DETERMINISTIC and not probe else None
        if twin is not None:
            return twin
        self.tokens.append(token)
        self.parents.append(parent)
        self.drawn.append(drawn)
        self.confidence.append(confidence)
        self.probes.append(probe)
        node = len(self.tokens)
        if drawn is Drawn.DETERMINISTIC and not probe:
            self._given[parent, token] = node
        return node

    def add_path(self, tokens: Iterable[int], parent: int = 0, *, confidence: float = 1.0) -> int:
        """Add a chain of DETERMINISTIC nodes below `parent`, sharing what is there already; returns the last node's
        id."""
        for token in tokens:
            parent = self.add(token, parent, confidence=confidence)
        return parent

    def index_given(self) -> None:
        """Learn which DETERMINISTIC nodes there are, after the lists were filled directly; later twins are merged
        again."""
        self._given.clear()
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            if self.drawn[node - 1] is Drawn.DETERMINISTIC and not self.probes[node - 1]:
                self._given.setdefault((parent, token), node)

    def set_law(self, node: int, law: Tensor, mass: float | None = None) -> None:
        """Record the law (V,) float32 that the sampled children of `node` were drawn from, and its sum if known."""
        self.laws[node] = law
        if mass is not None:
            self.masses[node] = mass

    def only(self, nodes: Iterable[int]) -> TreeBuilder:
        """The tree of these nodes alone; the parent of each is among them."""
        ids, smaller = {0: 0}, TreeBuilder()
        for node in sorted(nodes):
            ids[node] = smaller.add(
                self.tokens[node - 1],
                ids[self.parents[node - 1]],
                drawn=self.drawn[node - 1],
                confidence=self.confidence[node - 1],
                probe=self.probes[node - 1],
            )
        smaller.laws = {ids[node]: law for node, law in self.laws.items() if node in ids}
        smaller.masses = {ids[node]: mass for node, mass in self.masses.items() if node in ids}
        return smaller

    def row(self) -> DraftRow:
        """What was collected as a row of a draft."""
        return DraftRow(
            tokens=tuple(self.tokens),
            parents=tuple(self.parents),
            drawn=tuple(self.drawn),
            confidence=tuple(self.confidence),
            probes=tuple(self.probes),
        )

    def tree(self, root: int) -> TokenTree:
        """What was collected as a tree that a rule can judge; `root` is the last committed token."""
        return _tree(root, self.row(), self.laws, {})


def _tree(root: int, row: DraftRow, laws: Mapping[int, Tensor], masses: Mapping[int, float]) -> TokenTree:
    return TokenTree(
        tokens=(root, *row.tokens),
        parents=(-1, *row.parents),
        drawn=(Drawn.DETERMINISTIC, *row.drawn),
        laws=laws,
        probes=frozenset(node for node, probe in enumerate(row.probes, start=1) if probe),
        confidence=(1.0, *row.confidence),
        masses=masses,
    )


def stack(builders: Sequence[TreeBuilder], *, law_ids: Tensor | None = None) -> Draft:
    """One `Draft` out of one tree per row, padded to the largest; laws stay on their device, all else is here."""
    rows = tuple([builder.row() for builder in builders])
    counts = [len(row.tokens) for row in rows]
    size = max(counts, default=0)

    def padded(column: Sequence[tuple[float, ...]], dtype: torch.dtype) -> Tensor:
        filled = [(*values, *(0,) * (size - len(values))) for values in column]
        return torch.tensor(filled, dtype=dtype).view(len(rows), size)

    draft = Draft(
        tokens=padded([row.tokens for row in rows], torch.int64),
        parents=padded([row.parents for row in rows], torch.int64),
        counts=torch.tensor(counts, dtype=torch.int64),
        drawn=padded([row.drawn for row in rows], torch.uint8),
        confidence=padded([row.confidence for row in rows], torch.float32),
        probes=padded([row.probes for row in rows], torch.bool) if any(any(row.probes) for row in rows) else None,
        laws=_stack_laws(builders, size),
        law_ids=law_ids,
    )
    vars(draft)["rows"] = rows  # what `Draft.rows` would fetch
    if all(builder.laws.keys() == builder.masses.keys() for builder in builders):
        masses = {(row, node): mass for row, one in enumerate(builders) for node, mass in one.masses.items()}
        vars(draft)["masses"] = masses  # what `Draft.masses` would read
    return draft


def _stack_laws(builders: Sequence[TreeBuilder], size: int) -> Tensor | None:
    """(B, N, V): laws of different width, where drafters know vocabularies of different size, are padded with zeros."""
    recorded = [law for builder in builders for law in builder.laws.values()]
    if not recorded:
        return None
    width = max(map(len, recorded))
    laws = torch.zeros(len(builders), size + 1, width, device=recorded[0].device, dtype=recorded[0].dtype)
    for row, builder in enumerate(builders):
        for node, law in builder.laws.items():
            laws[row, node, : len(law)] = law
    return laws


def select(draft: Draft, rows: Sequence[int]) -> Draft:
    """A draft for some of its rows, in that order, as (B', ...) tensors."""
    if list(rows) == list(range(len(draft.counts))):
        return draft
    index = list(rows)

    def pick(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[index]

    begun = draft.resume
    if begun is not None:
        counts, stamps = [begun.counts[row] for row in index], [begun.stamps[row] for row in index]
        begun = replace(begun, states=begun.states[index], counts=counts, stamps=stamps)
    return Draft(
        tokens=draft.tokens[index],
        parents=draft.parents[index],
        counts=draft.counts[index],
        drawn=draft.drawn[index],
        laws=pick(draft.laws),
        law_ids=draft.law_ids,
        confidence=pick(draft.confidence),
        probes=pick(draft.probes),
        resume=begun,
    )


def gather(drafts: Sequence[tuple[Sequence[int], Draft]], batch: int) -> Draft:
    """One draft for `batch` rows out of several: each comes with the rows it speaks for; other rows draft nothing.

    Laws stay narrow where all drafts that have laws share one `law_ids`; else they are widened to token ids.
    """
    if len(drafts) == 1 and list(drafts[0][0]) == list(range(batch)):
        return drafts[0][1]
    law_ids = _shared_law_ids([draft for _, draft in drafts])
    builders = [TreeBuilder() for _ in range(batch)]
    for rows, draft in drafts:
        for index, row in enumerate(rows):
            builders[row] = rebuild(draft, index, widen=law_ids is None)
    stacked = stack(builders, law_ids=law_ids)
    begun = [(rows, draft.resume) for rows, draft in drafts if draft.resume is not None]
    return resuming(stacked, _joined(begun, batch, stacked.size + 1)) if begun else stacked


def resuming(draft: Draft, resume: Resume) -> Draft:
    """The draft, and what its first nodes have run through; what was fetched of it stays."""
    other = replace(draft, resume=resume)
    vars(other).update({name: vars(draft)[name] for name in ("rows", "masses") if name in vars(draft)})
    return other


def _joined(begun: Sequence[tuple[Sequence[int], Resume]], batch: int, most: int) -> Resume:
    """What the drafts have begun, over a step's `batch` rows of at most so many nodes; those at another boundary than
    the first run anew."""
    first = begun[0][1]
    alike = [(rows, resume) for rows, resume in begun if resume.boundary == first.boundary]
    size = min(most, max(resume.states.shape[1] for _, resume in alike))
    states = first.states.new_zeros(batch, size, first.states.shape[2])
    counts, stamps = [0] * batch, [0] * batch
    for rows, resume in alike:
        known = resume.states[:, :size]
        states[list(rows), : known.shape[1]] = known
        for row, count, stamp in zip(rows, resume.counts, resume.stamps, strict=True):
            counts[row], stamps[row] = count, stamp
    return replace(first, states=states, counts=counts, stamps=stamps)


def _shared_law_ids(drafts: Sequence[Draft]) -> Tensor | None:
    """The one `law_ids` of all drafts that have laws; None if they differ or there is none."""
    ids = [draft.law_ids for draft in drafts if draft.laws is not None]
    first = ids[0] if ids else None
    same = first is not None and all(other is not None and torch.equal(other, first) for other in ids)
    return first if same else None


def rebuild(draft: Draft, row: int, vocabulary: int | None = None, *, widen: bool = True) -> TreeBuilder:
    """One row of a draft as a builder again.

    Args:
        draft: with rows as they were stacked.
        row: which of them.
        vocabulary: laws are padded with zeros to this width; None leaves them as wide as their largest token id asks.
        widen: map laws through `law_ids` to token ids; False keeps them over `law_ids`.

    Raises:
        InvalidDraftError: a node has sampled children but the draft records no law for it.
    """
    builder, nodes = TreeBuilder(), draft.rows[row]
    builder.tokens, builder.parents, builder.drawn = list(nodes.tokens), list(nodes.parents), list(nodes.drawn)
    builder.confidence, builder.probes = list(nodes.confidence), list(nodes.probes)
    builder.index_given()
    builder.laws = _laws(draft, row, vocabulary, widen=widen)
    known = vars(draft).get("masses", {})
    builder.masses = {node: known[row, node] for node in builder.laws if (row, node) in known}
    return builder


def _laws(draft: Draft, row: int, vocabulary: int | None, *, widen: bool = True) -> dict[int, Tensor]:
    """The laws of a row's nodes that have sampled children."""
    nodes, laws = draft.rows[row], dict[int, Tensor]()
    sampled = {
        parent for parent, kind in zip(nodes.parents, nodes.drawn, strict=True) if kind is not Drawn.DETERMINISTIC
    }
    for node in sorted(sampled):
        if draft.laws is None:
            raise InvalidDraftError(f"row {row}: node {node} has sampled children but the draft records no law for it")
        law = draft.laws[row, node]
        laws[node] = _wide_law(law, draft.law_ids, vocabulary) if widen else law
    return laws


def _wide_law(law: Tensor, law_ids: Tensor | None, vocabulary: int | None) -> Tensor:
    """The law over token ids, zero where the drafter does not know the token."""
    if law_ids is None:
        missing = 0 if vocabulary is None else vocabulary - len(law)
        return torch.nn.functional.pad(law, (0, missing)) if missing > 0 else law
    wide = law.new_zeros(vocabulary if vocabulary is not None else int(law_ids.max()) + 1)
    return wide.index_copy_(0, law_ids.to(law.device), law)


def token_trees(draft: Draft, roots: Sequence[int], vocabulary: int) -> list[TokenTree]:
    """The draft as one host tree per row; `roots` holds each row's last committed token."""
    masses: list[dict[int, float]] = [{} for _ in roots]
    for (row, node), mass in draft.masses.items():
        masses[row][node] = mass
    return [
        _tree(root, nodes, _laws(draft, row, vocabulary), masses[row])
        for row, (root, nodes) in enumerate(zip(roots, draft.rows, strict=True))
    ]


def without(draft: Draft, wrong: Container[tuple[int, int]]) -> Draft:
    """The draft without the sampled children of these (row, node), and all below them; nothing of it has run yet."""
    builders = []
    for row in range(len(draft.counts)):
        builder, kept = rebuild(draft, row, widen=False), {0}
        for child, (parent, drawn) in enumerate(zip(builder.parents, builder.drawn, strict=True), start=1):
            if parent in kept and (drawn is Drawn.DETERMINISTIC or (row, parent) not in wrong):
                kept.add(child)
        builders.append(builder.only(kept - {0}))
    return stack(builders, law_ids=draft.law_ids)
