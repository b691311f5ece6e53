"""What a drafter's own confidence in a given node is worth: learned from which nodes the text went on with.

Only of given nodes, whose would-be acceptance follows from the committed text whether or not they were submitted. Nodes
may be of kinds that are learned apart, such as who else proposed them.
"""

from __future__ import annotations

from collections.abc import Sequence

_BINS = 10
_DRAFTER_WEIGHT = 16.0
"""Observations that the drafter's own word is worth to the shared figures."""
_SHARED_WEIGHT = 12.0
"""Observations that the shared figures are worth to a row."""
_SHARED_MEMORY = 0.5 ** (1 / 1024)
_ROW_MEMORY = 0.5 ** (1 / 128)
_MOST = 0.999
"""Nothing is certain: longer paths must be less likely than shorter ones."""

_Cells = dict[tuple[int, int], tuple[float, float]]
"""(kind, bin) -> right, tried."""


class Confidence:
    """Maps a stated confidence to the share of such nodes that survived, of all rows and of one row."""

    def __init__(self) -> None:
        self._shared: _Cells = {}
        self._rows: dict[int, _Cells] = {}

    def estimate(self, row: int, stated: float, kind: int = 0) -> float:
        """Probability that a node survives if its parent does."""
        key = _key(stated, kind)
        right, tried = self._shared.get(key, (0.0, 0.0))
        shared = (right + _DRAFTER_WEIGHT * stated) / (tried + _DRAFTER_WEIGHT)
        right, tried = self._rows.get(row, {}).get(key, (0.0, 0.0))
        return min(_MOST, (right + _SHARED_WEIGHT * shared) / (tried + _SHARED_WEIGHT))

    def learn(
        self,
        row: int,
        nodes: Sequence[tuple[int, int, float]],
        committed: Sequence[int],
        kinds: Sequence[int] = (),
    ) -> int:
        """Compare nodes (token, parent id, stated confidence), kind 0 or by `kinds`, with what followed the root.

        Returns how many of the tokens the tree held: what would have been accepted.
        """
        depths, deepest = {0: 0}, 0
        own = self._rows.setdefault(row, {})
        for node, (token, parent, stated) in enumerate(nodes, start=1):
            depth = depths.get(parent)
            if depth is None or depth >= len(committed):
                continue
            right = committed[depth] == token
            key = _key(stated, kinds[node - 1] if kinds else 0)
            _add(self._shared, key, right, _SHARED_MEMORY)
            _add(own, key, right, _ROW_MEMORY)
            if right:
                depths[node] = depth + 1
                deepest = max(deepest, depth + 1)
        return deepest

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)


def _key(stated: float, kind: int) -> tuple[int, int]:
    return kind, min(int(stated * _BINS), _BINS - 1)


def _add(cells: _Cells, key: tuple[int, int], right: bool, memory: float) -> None:
    before, tried = cells.get(key, (0.0, 0.0))
    cells[key] = (memory * before + right, memory * tried + 1.0)
