"""The two-dimensional window of lookahead decoding (arXiv 2402.02057): W columns of Jacobi trajectories, N - 1 rows.

Element (r, j) stands r + j positions after the last committed token, which is element (0, 0). Row 0 is a chain; column
j, its rows 1 and up, hangs from row 0's element j. As a token tree that is the published mask: an element of row
r >= 1 sees the text, row 0 up to column j, and its own column up to itself. With one row (N = 2) the window is plain
Jacobi decoding (arXiv 2305.10427). Knows no pool, no drafter and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forerun.tree import TokenTree


class Window:
    """One sequence's window. A column holds the token of row 0, the oldest, to that of row N - 2, the newest.

    Args:
        level: N >= 2, the length of the n-grams that columns grow into.
    """

    def __init__(self, level: int) -> None:
        self._rows = level - 1
        self._base = 0
        self._cursor = 0
        self.columns: list[list[int]] = []
        """The columns as they were fitted last, each of N - 1 tokens."""

    def widest(self, nodes: int, depth: int) -> int:
        """The most columns that stay within so many nodes and so deep; W columns are W - 1 + (N - 2) W nodes."""
        return max(0, min((nodes + 1) // self._rows, depth - self._rows + 2))

    def fit(self, tokens: Sequence[int], width: int) -> None:
        """Make it `width` columns that start at the text's last token.

        Columns that fell behind the text are dropped, and new ones begin as copies of the text, read from its
        beginning on: a guess, as every beginning of a Jacobi iteration is, and one that needs no randomness.
        """
        late = len(tokens) - self._base
        self.columns = self.columns[late:width] if late >= 0 else []
        while len(self.columns) < width:
            self.columns.append([tokens[(self._cursor + row) % len(tokens)] for row in range(self._rows)])
            self._cursor = (self._cursor + 1) % len(tokens)
        if self.columns:
            self.columns[0][0] = tokens[-1]
        self._base = len(tokens)

    def plant(self, tree: TokenTree) -> None:
        """Add the window to a tree as probes: row 0 first, then column by column."""
        heads = [0]
        for column in self.columns[1:]:
            heads.append(tree.add(column[0], heads[-1], probe=True))
        for head, column in zip(heads, self.columns, strict=False):
            parent = head
            for token in column[1:]:
                parent = tree.add(token, parent, probe=True)

    def read(self, tree: TokenTree, choose: Callable[[int], int]) -> list[int]:
        """The token that each column goes on with, left to right, up to the first column that was not scored.

        Args:
            choose: node -> the target's choice after it.
        """
        found, head = list[int](), 0
        for index, column in enumerate(self.columns):
            below = tree.child(head, column[0]) if index else head
            node = below
            for token in column[1:]:
                node = tree.child(node, token)
            if below is None or node is None:
                break
            found.append(choose(node))
            head = below
        return found

    def roll(self, new: Sequence[int], emitted: int) -> None:
        """Each column loses its oldest token and gains its entry of `new`; columns move left as the text grows.

        Row r + 1 becomes row r, one position nearer: exactly where it belongs if one token was emitted. Every further
        one passes a column. Columns that `new` does not reach are dropped.

        Args:
            new: as `read` gave it; empty if the window was not scored, and then the next `fit` drops what is late.
            emitted: tokens that the step committed, at least 1.
        """
        if new:
            grown = [[*column[1:], token] for column, token in zip(self.columns, new, strict=False)]
            self.columns = grown[emitted - 1 :]
            self._base += emitted
