"""EAGLE-2's dynamic tree (arXiv 2406.16858): expand the likeliest paths level by level, then keep the likeliest nodes.

Every node is given, so any rule for deterministic drafts is exact. All levels are chosen on the device; the host sees
the finished trees once. Knows no model: logits come from a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.core.acceptance import Acceptance, by_draft_prob
from forerun.core.tree import TokenTree
from forerun.devices import fetched
from forerun.drafters.domains import PerDomain
from forerun.drafters.growth import DraftVocabulary
from forerun.drafters.levels import Submitted
from forerun.types import Drawn

Descend = Callable[[Tensor, Tensor], Tensor]
"""(tokens (B, F), places of their parents in the level before (B, F)) -> raw logits (B, F, V')."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expanded:
    """The likeliest nodes of every row, best first."""

    order: Tensor
    """(B, n) place of each node in the pool: parents come before children."""
    tokens: Tensor
    """(B, n) the target's token ids."""
    parents: Tensor
    """(B, n) place of the parent in the pool, plus one; 0 is the root."""
    probabilities: Tensor
    """(B, n) of the token after its parent, by the drafter."""
    depths: Tensor
    """(B, n) from 1."""
    ranks: Tensor
    """(B, n) among its siblings, likeliest 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicTree:
    """How wide, how deep and how large; what a probability is worth is learned while decoding."""

    depth: int
    """Most tokens on a path."""
    top_k: int
    """Nodes expanded per level, and children looked at per node."""
    nodes: int
    """Nodes kept, root not counted."""
    stop_below: float = 0.0
    """Grow no deeper once every open path is less likely than this; 0 never asks (asking waits for the device)."""
    estimates: PerDomain[Acceptance] = field(default_factory=lambda: PerDomain(Acceptance))

    @property
    def run(self) -> int:
        """Most nodes that the model runs: the leaves are drawn, not run."""
        return self.top_k * (self.depth - 1)

    def grow(self, logits: Tensor, descend: Descend, vocabulary: DraftVocabulary | None, depth: int) -> Expanded:
        """Expand from the logits (B, 1, V') after the roots to at most `depth` levels; keep the likeliest nodes."""
        pool = _Pool(logits, self.top_k)
        scores, places = pool.scores[0], torch.zeros_like(pool.tokens[0])
        tokens, ids = pool.tokens[0], torch.arange(1, pool.width + 1, device=logits.device).expand_as(scores)
        for level in range(2, depth + 1):
            if self.stop_below and float(scores.max().exp()) < self.stop_below:
                break
            named = tokens if vocabulary is None else vocabulary.token_ids[tokens]
            first = pool.size + 1
            pool.add(descend(named, places), scores, ids, level)
            scores, best = pool.scores[-1].topk(min(self.top_k, pool.scores[-1].shape[1]), dim=1)
            places, tokens = best // pool.width, pool.tokens[-1].gather(1, best)
            ids = first + best
        return pool.best(self.nodes, vocabulary)

    def cut(
        self, root: int, grown: Sequence[tuple[float, ...]], nodes: int, depth: int, salt: str | None = None
    ) -> tuple[TokenTree, Submitted]:
        """One row's tree from its columns (see `columns`): the likeliest nodes that its budget allows.

        Args:
            salt: the row's isolation domain.
        """
        tree, acceptance, ids = TokenTree(root), self.estimates.of(salt), {0: 0}
        submitted = Submitted(tokens=tree.tokens, parents=tree.parents, acceptance=acceptance)
        chosen = [column for column in grown if column[4] <= depth][:nodes]
        for place, token, parent, probability, _, rank in sorted(chosen):
            if int(parent) not in ids:  # only where rounding gave a child its parent's score
                continue
            evidence = by_draft_prob(Drawn.DETERMINISTIC, int(rank), probability)
            node = tree.add(int(token), ids[int(parent)], confidence=acceptance.estimate(*evidence))
            ids[int(place) + 1] = node
            submitted.evidence[node] = evidence
        return tree, submitted


def columns(grown: Expanded) -> list[list[tuple[float, ...]]]:
    """(B, n, 6) on the host: place, token, parent, probability, depth, rank of each node; one transfer."""
    fields = (grown.order, grown.tokens, grown.parents, grown.probabilities, grown.depths, grown.ranks)
    rows = zip(*(part.tolist() for part in fetched(fields)), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


class _Pool:
    """Every node that was looked at, level by level."""

    def __init__(self, logits: Tensor, top_k: int) -> None:
        self.width = min(top_k, logits.shape[-1])
        self.tokens: list[Tensor] = []
        self.scores: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._logs: list[Tensor] = []
        self._depths: list[int] = []
        none = torch.zeros(len(logits), 1, dtype=torch.float32, device=logits.device)
        self.add(logits, none, none.long(), 1)

    @property
    def size(self) -> int:
        return sum(part.shape[1] for part in self.tokens)

    def add(self, logits: Tensor, scores: Tensor, ids: Tensor, depth: int) -> None:
        """The likeliest children of a level: logits (B, F, V'), the parents' scores (B, F) and node ids (B, F)."""
        logs = logits.float().log_softmax(-1).topk(self.width, dim=-1)
        self.tokens.append(logs.indices.flatten(1))
        self._logs.append(logs.values.flatten(1))
        self.scores.append((scores.unsqueeze(-1) + logs.values).flatten(1))
        self._parents.append(ids.unsqueeze(-1).expand_as(logs.indices).flatten(1))
        self._depths.append(depth)

    def best(self, nodes: int, vocabulary: DraftVocabulary | None) -> Expanded:
        tokens, parents, logs = (torch.cat(parts, dim=1) for parts in (self.tokens, self._parents, self._logs))
        depths = torch.cat(
            [torch.full_like(part, depth) for part, depth in zip(self.tokens, self._depths, strict=True)], dim=1
        )
        order = torch.cat(self.scores, dim=1).topk(min(nodes, tokens.shape[1]), dim=1).indices
        named = tokens if vocabulary is None else vocabulary.token_ids[tokens]
        return Expanded(
            order=order,
            tokens=named.gather(1, order),
            parents=parents.gather(1, order),
            probabilities=logs.gather(1, order).exp(),
            depths=depths.gather(1, order),
            ranks=order % self.width,
        )
