"""The acceptance estimate: the probability that the target accepts a drafted token, learned from the text so far.

A node counts as accepted if the committed text contains it after its parent, whatever the verification rule decided.
An estimate never depends on the token of a sampled node, only on what was known before it was drawn.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.types import Drawn

_NOTHING = (0.0, 0.0)
BINS, _RANKS = 10, 4  # Bins of probabilities and shares; ranks of siblings that are counted separately
COPIED = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9)
"""Prior acceptance of a looked-up token after 0, 1, ... 8 matching tokens, then from 9, 16 and 32 matching tokens
on.
"""
WEIGHT = 8.0  # Observations that a prior counts for


class Evidence(NamedTuple):
    """The evidence for a node before it is verified: the key that it is counted under, and a prior."""

    key: Hashable  # Nodes with the same key are assumed to be accepted equally often
    prior: float  # Prior probability, in 0..1, that the node is accepted if its parent is


class Acceptance:
    """Estimates the probability that a node is accepted if its parent is.

    Args:
        weight: observations that the prior counts for.
        memory: decay of a key's counts with each further observation.
    """

    __slots__ = ("_counts", "_memory", "_weight")

    def __init__(self, *, weight: float = WEIGHT, memory: float = 1.0) -> None:
        self._weight, self._memory = weight, memory
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, key: Hashable, prior: float) -> float:
        """Return the estimated acceptance, in 0..1: the key's accepted share, blended with `prior` while counts are
        few.
        """
        accepted, tried = self._counts.get(key, _NOTHING)
        return (accepted + self._weight * prior) / (tried + self._weight)

    def learn(self, key: Hashable, accepted: float, tried: float = 1.0) -> None:
        """Count `tried` nodes whose parent was accepted, of which `accepted` were accepted
        themselves.
        """
        before, all_before = self._counts.get(key, _NOTHING)
        self._counts[key] = (self._memory * before + accepted, self._memory * all_before + tried)

    def counts(self, key: Hashable) -> tuple[float, float]:
        """Return the counts (accepted, tried) of this key."""
        return self._counts.get(key, _NOTHING)

    def fade(self, memory: float) -> None:
        """Decay all counts by the factor `memory`."""
        self._counts = {key: (memory * right, memory * tried) for key, (right, tried) in self._counts.items()}


@dataclass(kw_only=True, slots=True)
class Proposal:
    """One row's last draft, kept until the text that follows its root is known."""

    acceptance: Acceptance  # The estimate that the nodes' confidences are from, and that learns from the outcome
    tokens: Sequence[int]  # (N,) token of each node, root first; may still grow
    parents: Sequence[int]  # (N,) parent of each node, -1 for the root
    evidence: dict[int, Evidence] = field(default_factory=dict)  # By node; nodes without evidence were not submitted

    def learn(self, text: Sequence[int]) -> None:
        """Compare the draft with the tokens that followed its root, and count each node whose parent was accepted."""
        for node, accepted in compare_draft(self.tokens, self.parents, text):
            if node in self.evidence:
                self.acceptance.learn(self.evidence[node].key, accepted)


def compare_draft(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield, in order, every node whose parent was accepted, and whether the node was accepted, too. `tokens` and
    `parents` (-1 for the root) describe the draft, root first; `text` are the tokens that followed the root so far.
    """
    depths = {0: 0}
    for node in range(1, len(tokens)):
        depth = depths.get(parents[node])
        if depth is None or depth >= len(text):
            continue
        accepted = text[depth] == tokens[node]
        if accepted:
            depths[node] = depth + 1
        yield node, accepted


def by_draft_prob(drawn: Drawn, rank: int, prob: float) -> Evidence:
    """Return the evidence for a node that a model drafted, which does not depend on a sampled token: how the node is
    drawn, its rank among its siblings (0 for the first), and a draft probability: the node's own if it is
    deterministic, the largest of its distribution if it is sampled.
    """
    deterministic = drawn is Drawn.DETERMINISTIC
    key = deterministic, min(rank, _RANKS - 1), min(int(prob * BINS), BINS - 1)
    # A deterministic token is as likely as the draft says; a sampled one is accepted where both distributions overlap.
    return Evidence(key, prob if deterministic else (0.4 + 0.6 * prob) * 0.4**rank)


def by_match(source: str, matched: int, share: float = 1.0) -> Evidence:
    """Return the evidence for a token that was looked up in `source` after `matched` matching tokens, drafted ones
    above it included. `share`, in 0..1, is the fraction of positions with this context that continue with the token.
    """
    bucket = bucket_of(matched)
    return Evidence((source, bucket, min(int(share * BINS), BINS - 1)), COPIED[bucket] * share)


def bucket_of(matched: int) -> int:
    """Return the index in `COPIED` for a number of matching tokens."""
    return matched if matched <= 8 else 9 if matched < 16 else 10 if matched < 32 else 11


RankAcceptance = Sequence[Sequence[float]]
"""``[d][r]`` is the probability that the child of rank r at depth d + 1 is the accepted one if its
parent was; ranks do not rise.

Siblings exclude each other, so a line sums to at most 1. Greater depths have the last line's values; further ranks
have 0.
"""


class TreeNode(NamedTuple):
    """A drafted node of a `best_tree`."""

    parent: int  # Number of the parent, counted from 1; 0 is the root
    level: int
    survival: float


def best_tree(acceptance: RankAcceptance, *, nodes: int, depth: int) -> list[TreeNode]:
    """Return the tree of at most `nodes` nodes and depth `depth` with the most expected accepted tokens.

    Its first n nodes are the best tree of n nodes, because the likeliest open child is taken each time. This is exact,
    because a child survives no more often than its parent or an earlier sibling (Sequoia's dynamic programme, arXiv
    2402.12374, finds the same tree; DDTree, 2604.12989, uses the same argument).
    """
    taken: list[TreeNode] = []
    count = itertools.count()
    open_nodes = [(-_rank_rate(acceptance, 0, 0), next(count), 0, 0, 0, 1.0)]
    while open_nodes and len(taken) < nodes:
        negative, _, parent, level, rank, above = heapq.heappop(open_nodes)
        if negative == 0 or level >= depth:
            continue
        taken.append(TreeNode(parent, level + 1, -negative))
        sibling = above * _rank_rate(acceptance, level, rank + 1)
        child = -negative * _rank_rate(acceptance, level + 1, 0)
        heapq.heappush(open_nodes, (-sibling, next(count), parent, level, rank + 1, above))
        heapq.heappush(open_nodes, (-child, next(count), len(taken), level + 1, 0, -negative))
    return taken


def _rank_rate(acceptance: RankAcceptance, depth: int, rank: int) -> float:
    line = acceptance[min(depth, len(acceptance) - 1)]
    return line[rank] if rank < len(line) else 0.0
