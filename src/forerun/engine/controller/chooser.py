"""Who drafts for which row in one step: copies that lie ready, drafters that cost a forward pass, or nobody.

Copies are known in full: their value is that of the very nodes they propose. Of a drafter that costs a pass only past
steps are known: it is a bandit's arm, valued by an upper confidence bound on its tokens (UCB, arXiv 2505.15141), and
its cost is shared by all rows that it drafts for. Knows worths and times; no drafter, no draft, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from forerun.engine.controller.filling import Filling

_EXPLORATION = 0.5
"""Standard errors added to an arm's mean per square root of the log of steps."""
_MOST_ARMS = 4
"""Up to so many arms are also weighed in combination; more than that only one at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """What lies ready for a row."""

    arm: int
    """The drafter that most of it comes from."""
    worth: Sequence[float]
    """Entry n: expected accepted tokens if its n best nodes are submitted."""
    width: int
    """Nodes that pay."""

    @property
    def tokens(self) -> float:
        """Expected of these."""
        return self.worth[min(self.width, len(self.worth) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a drafter that costs a forward pass would bring."""

    arm: int
    depth: int
    nodes: int
    """Nodes per row, expected."""
    ms: float
    """Of its proposal, for all rows together."""
    tokens: Mapping[int, float]
    """Member -> expected accepted tokens; only members that it may draft for."""
    unread: Mapping[int, int] = field(default_factory=dict)
    """Member -> tokens that the drafter must read before its proposal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Who drafts: member -> arm; members that are missing decode plainly."""

    copies: Mapping[int, int]
    offers: Mapping[int, int]


PLAIN = Choice(copies={}, offers={})
"""Nobody drafts."""


def optimism(curve: Sequence[float], evidence: float, steps: int) -> float:
    """Tokens to add to an arm's expectation for what is not known of it.

    Args:
        curve: probability that depth 1, 2, ... survives.
        evidence: steps behind the curve.
        steps: steps so far, of all arms.
    """
    mean = sum(curve)
    square = sum((2 * depth - 1) * alive for depth, alive in enumerate(curve, start=1))
    deviation = math.sqrt(max(0.05, square - mean * mean))
    return _EXPLORATION * deviation * math.sqrt(math.log(2.0 + steps) / evidence)


def choose(
    members: int,
    copies: Mapping[int, Copy],
    offers: Sequence[Offer],
    *,
    times: Sequence[float],
    goodput: float,
    filling: Filling,
) -> Choice:
    """The choice with the largest expected gain: tokens less `goodput` times the step's time.

    Args:
        members: how many rows.
        copies: member -> what lies ready for it.
        offers: of drafters that cost a pass.
        times: entry s: a pass of size s, ms.
        goodput: tokens per ms that decoding currently yields.
        filling: what size of a pass nodes of several rows make up.
    """
    best, best_gain = PLAIN, float("-inf")
    for chosen in _subsets(offers):
        choice = _assign(members, copies, chosen)
        by_arm = {offer.arm: offer for offer in chosen}
        counts = [copies[member].width for member in choice.copies]
        counts += [by_arm[arm].nodes for arm in choice.offers.values()]
        spent = times[min(filling.size(counts), len(times) - 1)] + sum(offer.ms for offer in chosen)
        tokens = sum(copies[member].tokens for member in choice.copies)
        tokens += sum(by_arm[arm].tokens[member] for member, arm in choice.offers.items())
        gain = tokens - goodput * spent
        if gain > best_gain:
            best, best_gain = choice, gain
    return best


def _subsets(offers: Sequence[Offer]) -> list[tuple[Offer, ...]]:
    most = len(offers) if len(offers) <= _MOST_ARMS else 1
    return [chosen for size in range(most + 1) for chosen in combinations(offers, size)]


def _assign(members: int, copies: Mapping[int, Copy], offers: Sequence[Offer]) -> Choice:
    """Every row takes what promises most; the time is spent for all of them in any case."""
    by_copy, by_offer = dict[int, int](), dict[int, int]()
    for member in range(members):
        copy = copies.get(member)
        value = copy.tokens if copy is not None else 0.0
        for offer in offers:
            if offer.tokens.get(member, 0.0) > value:
                value, by_offer[member] = offer.tokens[member], offer.arm
        if member not in by_offer and copy is not None and copy.width > 0:
            by_copy[member] = copy.arm
    return Choice(copies=by_copy, offers=by_offer)
