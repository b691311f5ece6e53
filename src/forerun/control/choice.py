"""Chooses which drafter drafts for which row, and which nodes are scored.

`Arm` is a drafter with its running figures; `StepState`, `StepPlan` and `Admission` are the policy's input and its
decisions of one step, before drafting and after it. The functions maximise expected accepted tokens minus the current
goodput times what the drafts cost: `best_depth` and `choose` decide before drafting, from running figures only, how
deep a drafter drafts, and which drafter drafts for which row; `allocate` decides after drafting how many of each row's
deterministic nodes are scored.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from forerun.control.costs import PassShape, Times
from forerun.control.explore import LookupTrials, ModelTrials, Survival
from forerun.control.ranking import Confidence, Ranking
from forerun.core.tree import TokenTree
from forerun.decode.row import Row
from forerun.drafters.guarded import Deferred

_MOST_ARMS = 4
"""Most drafters with a forward pass whose combinations are compared: 16 of them. Of more drafters at most one is chosen
in a step.
"""


class Bid(NamedTuple):
    """The expected contribution of an arm to a row."""

    arm: int
    nodes: int  # Nodes to score; the expected number, where nothing is drafted yet
    tokens: float  # Expected accepted tokens of these


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The bids of a drafter that costs a forward pass, from running figures only."""

    arm: int
    depth: int
    ms: float  # Time of its proposal, for all rows together
    bids: Mapping[int, Bid]  # By row, for the rows that it may draft for
    probation: bool = False  # It drafts in a trial only: it raised, its figures do not promise enough, or one runs
    trial_rows: Container[int] = ()  # Rows of the trial
    unread: Mapping[int, int] = field(default_factory=dict)  # Tokens that the drafter has not read yet, by row


@dataclass(kw_only=True, slots=True)
class Arm:
    """One drafter that the policy chooses among, with its running figures."""

    name: str
    key: str  # Key of its configuration: costs are kept under it
    drafter: Deferred
    is_lookup: bool  # Its proposal costs no forward pass, so it is queried before anything is decided
    max_depth: int  # Most tokens on one path
    needs_prediction: bool = False  # It drafts only for rows whose request has a prediction
    confidence: Confidence = field(default_factory=Confidence)  # Calibration of its deterministic nodes
    lookup_trials: LookupTrials = field(default_factory=LookupTrials)
    survival: Survival = field(default_factory=Survival)
    trials: ModelTrials = field(default_factory=ModelTrials)
    nodes_by_depth: dict[int, float] = field(default_factory=dict)
    """Recent number of nodes per row of its proposals, by their depth."""

    def renewed(self) -> Arm:
        """Return the same drafter without figures."""
        return Arm(
            name=self.name,
            key=self.key,
            drafter=self.drafter,
            is_lookup=self.is_lookup,
            max_depth=self.max_depth,
            needs_prediction=self.needs_prediction,
        )

    @property
    def catches_up(self) -> bool:
        """True if it can be shown later what it was not shown in a step: a lookup drafter that reads text only."""
        return self.is_lookup and not self.drafter.requires

    def expected_nodes(self, depth: int) -> int:
        """Return the expected nodes per row of a proposal down to `depth`: scaled from the nearest depth seen, else a
        chain.
        """
        if not self.nodes_by_depth:
            return depth
        nearest = min(self.nodes_by_depth, key=lambda seen: (abs(seen - depth), seen))
        return max(1, math.ceil(self.nodes_by_depth[nearest] * depth / nearest - 1e-9))


class StepState(NamedTuple):
    """The rows that the policy decides for in one step, by their index in the step, and the predicted times."""

    rows: Mapping[int, Row]
    max_depths: Mapping[int, int]  # Most tokens on a path; 0 where nothing may be drafted
    batch: int  # Rows of the step, those of other policies included
    context: int  # Longest text, tokens
    others_wait: bool  # Other requests wait for their first token
    pass_trial: bool  # Old measurements of passes with nodes are ignored, so that such a pass is tried again
    times: Times  # Time of the step without drafting, ms, by size of the pass
    rate: float  # Recent tokens of a row in the time of a plain step

    @property
    def goodput(self) -> float:
        """The recent tokens per ms of the whole step."""
        return self.rate * self.batch / self.times[0]


class LookupProposal(NamedTuple):
    """The trees that one lookup drafter proposed."""

    arm: int
    trees: Mapping[int, TokenTree]  # By row; rows without a draft are absent
    ms: float  # Time of the query
    rows_per_query: float  # Rows that it may draft for, per row that it was queried for


class LookupDrafts(NamedTuple):
    """The proposals of all lookup drafters, merged into one tree for each row."""

    proposals: Sequence[LookupProposal]
    merged: Mapping[int, Ranking]
    bids: Mapping[int, Bid]
    gains: Mapping[int, float]  # Expected accepted tokens of a row's merged tree, less what scoring it costs


class StepPlan(NamedTuple):
    """The decisions of one step before drafting."""

    step: StepState
    lookups: LookupDrafts
    offers: Sequence[Offer]
    assigned: Mapping[int, int]  # Row -> the arm that drafts for it

    def rows_of(self, arm: int) -> list[int]:
        """Return the rows that an arm drafts for."""
        return [row for row, chosen in self.assigned.items() if chosen == arm]

    def offer_of(self, arm: int) -> Offer | None:
        """Return the offer of an arm, if it made one."""
        return next((offer for offer in self.offers if offer.arm == arm), None)

    def accepted_offers(self) -> list[Offer]:
        """Return the offers of the arms that draft for at least one row."""
        arms = set(self.assigned.values())
        return [offer for offer in self.offers if offer.arm in arms]

    def unread_tokens(self, offer: Offer) -> int:
        """Return the tokens that a drafter must read before it drafts for the rows that are assigned to it."""
        return sum(offer.unread[row] for row in self.rows_of(offer.arm))


class Admission(NamedTuple):
    """The decisions of one step after drafting."""

    times: Times
    counts: Sequence[int] = ()  # Nodes that the target scores, by row of the step
    ranked: Mapping[int, Ranking] = {}  # Proposed trees that may be pruned, by row
    pruned: Container[int] = ()  # Rows that lost drafted nodes


NO_LOOKUPS = LookupDrafts((), {}, {}, {})


def best_depth(
    curves: Sequence[Sequence[float]], time: Callable[[int, int], float], rows: int
) -> tuple[int, int, float]:
    """Return the depth, at least 1, with the most expected tokens per time, the number of rows to draft for, and the
    speed-up over plain decoding.

    Args:
        curves: for each row that may be drafted for, the probability that depth 1, 2, ... survives; lengths may differ.
        time: time of a step, ms, by draft depth and number of rows that are drafted for; (0, 0) is plain decoding.
        rows: all rows of the step.
    """
    best, most, plain = (1, 1), 0.0, rows / time(0, 0)
    order = sorted(curves, key=sum, reverse=True)
    sums = [0.0] * len(order)
    for depth in range(1, max(map(len, order)) + 1):
        tokens = float(rows)
        for index, curve in enumerate(order):
            if depth <= len(curve):
                sums[index] += curve[depth - 1]
            tokens += sums[index]
            rate = tokens / time(depth, index + 1)
            if rate > most:
                best, most = (depth, index + 1), rate
    return *best, most / plain


def choose(
    lookups: Mapping[int, Bid], offers: Sequence[Offer], shape: PassShape, *, times: Times, goodput: float
) -> dict[int, int]:
    """Return row -> the arm that drafts for it, so that expected tokens less `goodput` times the step's time are most.

    For each subset of the offers, every row takes its highest bid; rows are added from the highest bid down, and the
    best number of them counts. Rows that are absent from the result decode plainly.

    Args:
        lookups: by row, the bid of the lookup drafters.
        offers: of drafters that cost a forward pass.
        times: time of a step, ms, by size of the pass.
        goodput: tokens per ms.
    """
    best, most = dict[int, Bid](), float("-inf")
    no_bid = Bid(-1, 0, 0.0)
    lookup_nodes = [bid.nodes for bid in lookups.values()]
    together = len(offers) if len(offers) <= _MOST_ARMS else 1
    for chosen in (subset for size in range(together + 1) for subset in combinations(offers, size)):
        ms = sum(offer.ms for offer in chosen)
        better = dict[int, Bid]()  # By row, where a bid of these offers is the highest
        for offer in chosen:
            for row, bid in offer.bids.items():
                if bid.tokens > max(lookups.get(row, no_bid).tokens, better.get(row, no_bid).tokens):
                    better[row] = bid
        order = sorted(better, key=lambda row: -better[row].tokens)
        size = shape.size(lookup_nodes)
        tokens = sum([bid.tokens for bid in lookups.values()])
        for count in range(len(order) + 1):
            if count:
                row = order[count - 1]
                lookup = lookups.get(row, no_bid)
                tokens += better[row].tokens - lookup.tokens
                size = shape.size([size, better[row].nodes - (0 if shape.padded else lookup.nodes)])
            gain = tokens - goodput * (times[size] + ms)
            if gain > most:
                best, most = {**lookups, **{row: better[row] for row in order[:count]}}, gain
    return {row: bid.arm for row, bid in sorted(best.items()) if bid.nodes > 0}


def allocate(
    worths: Sequence[Sequence[float]], shape: PassShape, *, times: Times, goodput: float, fixed: Sequence[int] = ()
) -> list[int]:
    """Return how many of its best nodes each row submits, so that expected tokens less `goodput` times the time of the
    pass are most. With padding all rows get the same width. Without it nodes are taken one by one, the most promising
    of all rows first.

    Args:
        worths: for each row, the expected accepted tokens by number of submitted nodes.
        times: time of a step, ms, by size of the pass.
        goodput: tokens per ms.
        fixed: nodes of further rows, which cannot be pruned.
    """
    least, order, total = shape.size(fixed), list[int](), 0.0
    if shape.padded:
        most = min(times.most, max((len(worth) - 1 for worth in worths), default=0))
        tokens = [sum(worth[min(width, len(worth) - 1)] for worth in worths) for width in range(most + 1)]
        width = _first_best([gain - goodput * times[max(least, width)] for width, gain in enumerate(tokens)])
        return [min(width, len(worth) - 1) for worth in worths]
    gains = [-goodput * times[least]]
    waiting = [(worth[0] - worth[1], row, 1) for row, worth in enumerate(worths) if len(worth) > 1]
    heapq.heapify(waiting)
    while waiting and least + len(order) < times.most:
        less, row, count = heapq.heappop(waiting)
        total -= less
        order.append(row)
        gains.append(total - goodput * times[least + len(order)])
        worth = worths[row]
        if count + 1 < len(worth):
            heapq.heappush(waiting, (worth[count] - worth[count + 1], row, count + 1))
    taken = Counter(order[: _first_best(gains)])
    return [taken[row] for row in range(len(worths))]


def _first_best(gains: Sequence[float]) -> int:
    most = max(gains)
    return next(index for index, gain in enumerate(gains) if gain >= most - 1e-12)
