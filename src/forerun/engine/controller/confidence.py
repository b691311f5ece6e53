"""What a drafter's own confidence in a deterministic node is worth: learned from which nodes the text went on with.

Only of deterministic nodes, whose would-be acceptance follows from the committed text whether or not they were
submitted. Nodes may be of kinds that are learned apart, such as who else proposed them.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.acceptance import Acceptance, compared

_BINS = 10
_DRAFTER_WEIGHT = 16.0
"""Observations that the drafter's own word is worth to the shared figures."""
_SHARED_WEIGHT = 12.0
"""Observations that the shared figures are worth to a row."""
_SHARED_MEMORY = 0.5 ** (1 / 1024)
_ROW_MEMORY = 0.5 ** (1 / 128)
_MOST = 0.999
"""Nothing is certain: longer paths must be less likely than shorter ones."""


class Confidence:
    """Maps a stated confidence to the share of such nodes that survived, of all rows and of one row."""

    def __init__(self) -> None:
        self._shared = Acceptance(weight=_DRAFTER_WEIGHT, memory=_SHARED_MEMORY)
        self._rows: dict[int, Acceptance] = {}

    def estimate(self, row: int, stated: float, kind: int = 0) -> float:
        """Probability that a node survives if its parent does."""
        key = _key(stated, kind)
        shared = self._shared.estimate(key, stated)
        return min(_MOST, self._rows[row].estimate(key, shared) if row in self._rows else shared)

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
        if row not in self._rows:
            self._rows[row] = Acceptance(weight=_SHARED_WEIGHT, memory=_ROW_MEMORY)
        tokens, parents = [token for token, _, _ in nodes], [parent for _, parent, _ in nodes]
        depths = {0: 0}
        for node, right in compared(tokens, parents, committed):
            key = _key(nodes[node - 1][2], kinds[node - 1] if kinds else 0)
            self._shared.learn(key, right)
            self._rows[row].learn(key, right)
            if right:
                depths[node] = depths[parents[node - 1]] + 1
        return max(depths.values())

    def forget(self, row: int) -> None:
        """The row is free."""
        self._rows.pop(row, None)


def _key(stated: float, kind: int) -> tuple[int, int]:
    return kind, min(int(stated * _BINS), _BINS - 1)
