"""How the nodes of several rows make up the size of one pass, and which of them are worth their place in it.

Where padding is computed like everything else a pass is as wide as its widest row; where it is left out, only the
nodes of all rows together count. Knows worths and times; no drafter, no draft, no clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Protocol


class Filling(Protocol):
    """A pass and its padding. A pass's size is in drafted nodes."""

    def size(self, counts: Sequence[int]) -> int:
        """Of a pass over `counts` drafted nodes, by row."""
        ...

    def most(self, rows: int, nodes: int) -> int:
        """The size of a pass of `rows` rows in which each has `nodes` drafted nodes."""
        ...

    def nodes(self, size: int, rows: int) -> float:
        """Drafted nodes that each of `rows` rows would have in a pass of this size."""
        ...

    def best(
        self, worths: Sequence[Sequence[float]], *, times: Sequence[float], goodput: float, fixed: Sequence[int] = ()
    ) -> list[int]:
        """How many of its best nodes each row submits.

        Args:
            worths: of each row, the expected number of accepted tokens by nodes submitted.
            times: entry s: a pass of size s, ms.
            goodput: tokens per ms that decoding currently yields.
            fixed: nodes of further rows, which cannot be taken away.
        """
        ...


class Padded:
    """A pass is as wide as its widest row: a size is a width, and every row may fill it."""

    def size(self, counts: Sequence[int]) -> int:
        return max(counts, default=0)

    def most(self, rows: int, nodes: int) -> int:
        return nodes

    def nodes(self, size: int, rows: int) -> float:
        return size

    def best(
        self, worths: Sequence[Sequence[float]], *, times: Sequence[float], goodput: float, fixed: Sequence[int] = ()
    ) -> list[int]:
        """Every row fills the width that gains most."""
        least = self.size(fixed)
        most = min(len(times) - 1, max((len(worth) - 1 for worth in worths), default=0))
        tokens = [sum(worth[min(width, len(worth) - 1)] for worth in worths) for width in range(most + 1)]
        width = _best([gain - goodput * times[max(least, width)] for width, gain in enumerate(tokens)])
        return [min(width, len(worth) - 1) for worth in worths]


class Packed:
    """Padding is left out: a size counts the nodes of all rows, and the one that promises most comes next."""

    def size(self, counts: Sequence[int]) -> int:
        return sum(counts)

    def most(self, rows: int, nodes: int) -> int:
        return rows * nodes

    def nodes(self, size: int, rows: int) -> float:
        return size / rows

    def best(
        self, worths: Sequence[Sequence[float]], *, times: Sequence[float], goodput: float, fixed: Sequence[int] = ()
    ) -> list[int]:
        """The nodes that gain most together, whoever's they are."""
        least = self.size(fixed)
        gains, rows = [-goodput * times[min(least, len(times) - 1)]], list[int]()
        waiting = [(worth[0] - worth[1], row, 1) for row, worth in enumerate(worths) if len(worth) > 1]
        heapq.heapify(waiting)
        tokens = 0.0
        while waiting and least + len(gains) < len(times):
            less, row, count = heapq.heappop(waiting)
            tokens -= less
            rows.append(row)
            gains.append(tokens - goodput * times[least + len(rows)])
            worth = worths[row]
            if count + 1 < len(worth):
                heapq.heappush(waiting, (worth[count] - worth[count + 1], row, count + 1))
        taken = rows[: _best(gains)]
        return [taken.count(row) for row in range(len(worths))]


def _best(gains: Sequence[float]) -> int:
    """The first of those that gain most."""
    best = 0
    for index, gain in enumerate(gains):
        if gain > gains[best] + 1e-12:
            best = index
    return best
