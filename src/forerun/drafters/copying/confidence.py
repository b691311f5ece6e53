"""How often copied tokens turned out right, learned from what the text went on with.

A copying drafter knows, at no cost, whether a draft was right: it compares it with the text that followed, whatever the
rule accepted. Knows no way of copying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forerun.tree import TreeBuilder

_PRIOR = (0.2, 0.35, 0.5, 0.6, 0.68, 0.74, 0.78, 0.8, 0.82, 0.84, 0.87, 0.9)
"""First guess that a copied token is right after 0, 1, ... 8, from 9, from 16 and from 32 matching tokens before it."""
_PRIOR_WEIGHT = 8.0
"""How many observations the first guess is worth."""
_SHARES = 10
"""Bins of `Sign.share`."""


class Sign(NamedTuple):
    """What is known of a copied token beforehand: two tokens with like signs are right equally often."""

    source: str
    """Where it was copied from, e.g. the request's own text or that of earlier requests."""
    matched: int
    """How many tokens before it are the same here and there, those drafted above it included."""
    share: float = 1.0
    """In 0..1: the share of the places with these tokens before that go on with this one."""


class Record:
    """Estimates the probability that a copied token is right if those above it are."""

    def __init__(self) -> None:
        self._right: dict[tuple[str, int, int], float] = {}
        self._tried: dict[tuple[str, int, int], float] = {}

    def estimate(self, sign: Sign) -> float:
        """In 0..1: the share of tokens with such signs that were right, near a first guess while there are few."""
        key = _key(sign)
        right, tried = self._right.get(key, 0.0), self._tried.get(key, 0.0)
        return (right + _PRIOR_WEIGHT * _PRIOR[key[1]] * sign.share) / (tried + _PRIOR_WEIGHT)

    def learn(self, sign: Sign, right: bool) -> None:
        """Count one copied token whose predecessors were right."""
        key = _key(sign)
        self._tried[key] = self._tried.get(key, 0.0) + 1.0
        self._right[key] = self._right.get(key, 0.0) + right


class Drafted:
    """One row's draft of copied tokens, remembered until the text has gone on.

    Args:
        start: how many tokens the text had when this was drafted.
        record: of the row's domain: says how far a token may be trusted, and is told.
    """

    def __init__(self, start: int, record: Record) -> None:
        self.start, self.record = start, record
        self.tree = TreeBuilder()
        self.expected = 0.0
        """Sum of the nodes' estimated survival: how many tokens of this draft are expected to be kept."""
        self._signs: list[Sign] = []
        self._survival = [1.0]

    def add(self, token: int, parent: int, sign: Sign) -> int:
        """Add a copied token below `parent` and return its node; one that is there already stays as it is."""
        confidence = self.record.estimate(sign)
        node = self.tree.add(token, parent, confidence=confidence)
        if node > len(self._signs):
            self._signs.append(sign)
            self._survival.append(self._survival[parent] * confidence)
            self.expected += self._survival[-1]
        return node

    def teach(self, tokens: Sequence[int]) -> None:
        """Compare the draft with `tokens`, the whole text by now, as far as that reaches."""
        places = {0: self.start}
        for node, (token, parent) in enumerate(zip(self.tree.tokens, self.tree.parents, strict=True), start=1):
            place = places.get(parent)
            if place is None or place >= len(tokens):
                continue
            right = tokens[place] == token
            self.record.learn(self._signs[node - 1], right)
            if right:
                places[node] = place + 1


def _key(sign: Sign) -> tuple[str, int, int]:
    matched = sign.matched
    bucket = matched if matched <= 8 else 9 if matched < 16 else 10 if matched < 32 else 11
    return sign.source, bucket, min(int(sign.share * _SHARES), _SHARES - 1)
