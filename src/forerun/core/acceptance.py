"""How likely a drafted token is accepted: the one estimate, learned from what the text went on with.

Whatever the rule decided, the committed text says of every node whose parent it holds whether it holds the node, too.
An estimate never reads the value of a sampled node, only what was known before it was drawn.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.types import Drawn

_NOTHING = (0.0, 0.0)
BINS, _RANKS = 10, 4  # Of probabilities and shares; of siblings
COPIED = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9)
"""First guess that a copied token is accepted after 0, 1, ... 8, from 9, from 16 and from 32 matching tokens."""
WEIGHT = 8.0  # Observations that a first guess is worth


class Evidence(NamedTuple):
    """What is known of a node before the text goes on."""

    key: Hashable  # Nodes of the same key are accepted equally often
    prior: float  # In 0..1, the first guess that the node is accepted if its parent is


class Acceptance:
    """Estimates the probability that a node is accepted if its parent is.

    Args:
        weight: observations that the prior is worth.
        memory: what an observation counts after the next one of its key.
    """

    __slots__ = ("_counts", "_memory", "_weight")

    def __init__(self, *, weight: float = WEIGHT, memory: float = 1.0) -> None:
        self._weight, self._memory = weight, memory
        self._counts: dict[Hashable, tuple[float, float]] = {}

    def estimate(self, key: Hashable, prior: float) -> float:
        """In 0..1: the share of nodes of this key that were accepted, near the prior while there are few."""
        accepted, tried = self._counts.get(key, _NOTHING)
        return (accepted + self._weight * prior) / (tried + self._weight)

    def learn(self, key: Hashable, accepted: float, tried: float = 1.0) -> None:
        """Count a node whose parent was accepted, or several."""
        before, all_before = self._counts.get(key, _NOTHING)
        self._counts[key] = (self._memory * before + accepted, self._memory * all_before + tried)

    def counts(self, key: Hashable) -> tuple[float, float]:
        """(accepted, tried) of this key."""
        return self._counts.get(key, _NOTHING)

    def fade(self, memory: float) -> None:
        """All that was seen counts `memory` times as much."""
        self._counts = {key: (memory * right, memory * tried) for key, (right, tried) in self._counts.items()}


@dataclass(kw_only=True, slots=True)
class Proposal:
    """One row's last draft, remembered until the text has gone on."""

    acceptance: Acceptance  # Said how likely the nodes are accepted, and is told what became of them
    tokens: Sequence[int]  # (N,) of each node, the root first; may go on to grow
    parents: Sequence[int]  # (N,) by node id, -1 of the root
    evidence: dict[int, Evidence] = field(default_factory=dict)  # By node; what has none was not submitted

    def learn(self, text: Sequence[int]) -> None:
        """Compare the draft with what the text went on with behind the root."""
        for node, accepted in compared(self.tokens, self.parents, text):
            if node in self.evidence:
                self.acceptance.learn(self.evidence[node].key, accepted)


def compared(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Every node that the text decides on, in order, and whether the text holds it: `tokens` and `parents` (-1 of the
    root) of each node, the root first, against what followed the root, as far as it is known."""
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
    """Evidence of a node of a model's draft, known before its value is: how it is drawn, its rank (0 for the eldest
    sibling), and of a deterministic node its own draft probability, of a sampled one the largest of the distribution
    that it is drawn from."""
    given = drawn is Drawn.DETERMINISTIC
    key = given, min(rank, _RANKS - 1), min(int(prob * BINS), BINS - 1)
    # A given token is as likely as the draft says; a sampled one is accepted where both distributions overlap.
    return Evidence(key, prob if given else (0.4 + 0.6 * prob) * 0.4**rank)


def by_match(source: str, matched: int, share: float = 1.0) -> Evidence:
    """Evidence of a token copied from `source`, before which `matched` tokens are the same here and there, those
    drafted above it included; of the positions with these tokens before, the `share` in 0..1 goes on with it."""
    bucket = bucket_of(matched)
    return Evidence((source, bucket, min(int(share * BINS), BINS - 1)), COPIED[bucket] * share)


def bucket_of(matched: int) -> int:
    """The place in `COPIED` of so many matching tokens."""
    return matched if matched <= 8 else 9 if matched < 16 else 10 if matched < 32 else 11
