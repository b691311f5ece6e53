"""Growing a draft from an index: a chain of the likeliest continuation, or a tree of the likeliest nodes.

Knows neither the index nor what a place in it is.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from forerun.drafters.copying.confidence import Drafted, Record, Sign

Place = TypeVar("Place")


class Branch(NamedTuple):
    """One way on from a place."""

    token: int
    sign: Sign
    place: object
    """Where this token leads."""


def grow(
    place: Place,
    branches: Callable[[Place], Sequence[Branch]],
    record: Record,
    *,
    start: int,
    nodes: int,
    depth: int,
) -> Drafted:
    """The `nodes` nodes of largest estimated survival below `place`, at most `depth` deep.

    Args:
        place: where the text stands in an index.
        branches: the ways on from a place, at most one for each token; only one makes a chain.
        record: says how far each token may be trusted.
        start: how many tokens the text has.
        nodes: most nodes.
        depth: most tokens on one path.
    """
    drafted = Drafted(start, record)
    heap: list[tuple[float, int, int, int, Branch]] = []
    serial = 0
    parent, level, survival = 0, 0, 1.0
    while len(drafted.tree) < nodes:
        if level < depth:
            for branch in branches(place):
                serial += 1
                reached = survival * record.estimate(branch.sign)
                heapq.heappush(heap, (-reached, serial, parent, level + 1, branch))
        if not heap:
            break
        negative, _, above, level, branch = heapq.heappop(heap)
        parent = drafted.add(branch.token, above, branch.sign)
        survival, place = -negative, branch.place  # type: ignore[assignment]
    return drafted
