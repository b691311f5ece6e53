"""Drafts of copied tokens: a chain of the likeliest continuation, or a tree of the likeliest nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from forerun.core.acceptance import Acceptance, Evidence, Proposal
from forerun.core.tree import TokenTree

Position = TypeVar("Position")

_PRIOR = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9)
"""First guess that a copied token is accepted after 0, 1, ... 8, from 9, from 16 and from 32 matching tokens before
it."""
_SHARES = 10
"""Bins of the share of continuations."""


def by_match(source: str, matched: int, share: float = 1.0) -> Evidence:
    """Evidence of a copied token.

    Args:
        source: where it was copied from, e.g. the request's own text or that of earlier requests.
        matched: tokens before it that are the same here and there, those drafted above it included.
        share: in 0..1, of the positions with these tokens before that go on with this one.
    """
    bucket = matched if matched <= 8 else 9 if matched < 16 else 10 if matched < 32 else 11
    return Evidence((source, bucket, min(int(share * _SHARES), _SHARES - 1)), _PRIOR[bucket] * share)


class Copied:
    """One row's draft of copied tokens.

    Args:
        tree: of the root alone.
        start: how many tokens the text had when this was drafted.
        acceptance: of the row's domain.
    """

    def __init__(self, tree: TokenTree, start: int, acceptance: Acceptance) -> None:
        self.start, self.tree = start, tree
        self.expected = 0.0
        """How many tokens of this draft are expected to be accepted."""
        self._proposal = Proposal(acceptance=acceptance, tokens=self.tree.tokens, parents=self.tree.parents)
        self._survival = [1.0]

    def add(self, token: int, parent: int, evidence: Evidence) -> int:
        """Add a copied token below `parent` and return its node; one that is there already stays as it is."""
        confidence = self._proposal.acceptance.estimate(*evidence)
        node = self.tree.add(token, parent, confidence=confidence)
        if node not in self._proposal.evidence:
            self._proposal.evidence[node] = evidence
            self._survival.append(self._survival[parent] * confidence)
            self.expected += self._survival[-1]
        return node

    def learn(self, tokens: Sequence[int]) -> None:
        """Compare the draft with `tokens`, the whole text by now."""
        self._proposal.learn(tokens[self.start :])


class Branch(NamedTuple):
    """One way on from a position."""

    token: int
    evidence: Evidence
    position: object
    """Where this token leads."""


def grow(
    position: Position,
    branches: Callable[[Position], Sequence[Branch]],
    acceptance: Acceptance,
    *,
    root: int,
    start: int,
    nodes: int,
    depth: int,
) -> Copied:
    """The `nodes` nodes of largest estimated survival below `position`, at most `depth` deep.

    Args:
        position: where the text stands in an index.
        branches: the ways on from a position, at most one for each token; only one makes a chain.
        acceptance: says how far each token may be trusted.
        root: the text's last token.
        start: how many tokens the text has.
        nodes: most nodes.
        depth: most tokens on one path.
    """
    copied = Copied(TokenTree(root), start, acceptance)
    heap: list[tuple[float, int, int, int, Branch]] = []
    serial = 0
    parent, level, survival = 0, 0, 1.0
    while copied.tree.size < nodes:
        if level < depth:
            for branch in branches(position):
                serial += 1
                reached = survival * acceptance.estimate(*branch.evidence)
                heapq.heappush(heap, (-reached, serial, parent, level + 1, branch))
        if not heap:
            break
        negative, _, above, level, branch = heapq.heappop(heap)
        parent = copied.add(branch.token, above, branch.evidence)
        survival, position = -negative, branch.position  # type: ignore[assignment]
    return copied
