"""Finds nodes of a scored tree by the tokens that lead to them.

What the target says after a node depends on the tokens before it alone. So a drafter that knows which tokens it asked
about needs no node ids, and copes with a tree that was cut, merged with another or numbered anew. Knows no drafter.
"""

from __future__ import annotations

from forerun.tree import TokenTree


class Paths:
    """The nodes of a tree as a trie: nodes that hold the same tokens from the root on count as one."""

    def __init__(self, tree: TokenTree) -> None:
        self._below: dict[tuple[int, int], int] = {}
        first = [0]
        for node in range(1, tree.size + 1):
            first.append(self._below.setdefault((first[tree.parents[node]], tree.tokens[node]), node))

    def child(self, node: int | None, token: int) -> int | None:
        """The node that holds `token` below `node`, probes included; None if it was not scored, or `node` is None."""
        return None if node is None else self._below.get((node, token))
