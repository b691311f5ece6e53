"""These functions take what maximises expected accepted tokens minus the current goodput times what it costs.

`best_depth` and `choose` decide before drafting, from running figures alone: how deep a drafter goes, and who drafts
for which row. `allocate` decides after it, among deterministic nodes: how many of each row's best ones are scored.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from forerun.control.costs import PassShape, Times

_MOST_ARMS = 4  # Most drafters with a forward pass that are weighed in combination, 16 at most; of more one at a time


class Bid(NamedTuple):
    """The expected contribution of an arm to a row."""

    arm: int
    nodes: int  # Scored for it; expected, where nothing is drafted yet
    tokens: float  # Expected to be accepted of these


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The expected contribution of a drafter that costs a forward pass, from running figures alone."""

    arm: int
    depth: int
    ms: float  # Time of its proposal, for all rows together
    bids: Mapping[int, Bid]  # Bids by row, only for those that it may draft for
    doubted: bool = False  # Its figures speak against it: where it drafts, little is known of it
    tried: Container[int] = ()  # Rows that it may draft for on trial
    unread: Mapping[int, int] = field(default_factory=dict)  # Tokens that its drafter has yet to read, by row


def best_depth(
    curves: Sequence[Sequence[float]], time: Callable[[int, int], float], rows: int
) -> tuple[int, int, float]:
    """Return the depth, at least 1, with the most expected tokens per time, how many rows draft
    then, and the ratio to plain decoding's tokens per time.

    Args:
        curves: of each row that may draft, the probability that depth 1, 2, ... survives; rows may end early.
        time: of (depth, rows that draft): the step, ms; of (0, 0) plain decoding.
        rows: of the step, whether or not they draft.
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
    copies: Mapping[int, Bid], offers: Sequence[Offer], shape: PassShape, *, times: Times, goodput: float
) -> dict[int, int]:
    """Return row -> the arm that drafts for it, with the largest gain: expected tokens less
    `goodput` (tokens per ms) times the step's time. With each subset of the offers every row takes
    what promises it most, those first to which that is most; rows that are missing decode plainly.

    Args:
        copies: by row, what drafters that copy hold ready.
        offers: of drafters that cost a pass.
        times: by size of the pass, ms.
    """
    best, most = dict[int, Bid](), float("-inf")
    none, own = Bid(-1, 0, 0.0), [bid.nodes for bid in copies.values()]
    together = len(offers) if len(offers) <= _MOST_ARMS else 1
    for chosen in (subset for size in range(together + 1) for subset in combinations(offers, size)):
        ms, better = sum(offer.ms for offer in chosen), dict[int, Bid]()
        for offer in chosen:
            for row, bid in offer.bids.items():
                if bid.tokens > max(copies.get(row, none).tokens, better.get(row, none).tokens):
                    better[row] = bid
        order = sorted(better, key=lambda row: -better[row].tokens)
        size, tokens = shape.size(own), sum([bid.tokens for bid in copies.values()])
        for count in range(len(order) + 1):
            if count:
                row = order[count - 1]
                held = copies.get(row, none)
                tokens += better[row].tokens - held.tokens
                size = shape.size([size, better[row].nodes - (0 if shape.padded else held.nodes)])
            gain = tokens - goodput * (times[size] + ms)
            if gain > most:
                best, most = {**copies, **{row: better[row] for row in order[:count]}}, gain
    return {row: bid.arm for row, bid in sorted(best.items()) if bid.nodes > 0}


def allocate(
    worths: Sequence[Sequence[float]], shape: PassShape, *, times: Times, goodput: float, fixed: Sequence[int] = ()
) -> list[int]:
    """Return how many of its best nodes each row submits, so that tokens less `goodput` times the
    pass's time are most. With padding every row fills the width that gains most; else the most
    promising node comes next, whichever row it is in.

    Args:
        worths: of each row, the expected number of accepted tokens by nodes submitted.
        times: by size of the pass, ms.
        fixed: nodes of further rows, which cannot be taken away.
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
