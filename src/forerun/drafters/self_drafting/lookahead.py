"""Jacobi decoding: a chain of guesses for the next tokens, all refined by every pass of the target.

Santilli et al., arXiv 2305.10427. The target's argmax after each token of the chain is the next guess for the token
behind it; what was guessed right is accepted, and the rest moves up. It is one row of lookahead decoding's window,
submitted and not only probed. Deterministic at every temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from forerun.core.acceptance import Acceptance, Evidence
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least
from forerun.types import Budget, DraftKind, Verdict

if TYPE_CHECKING:
    from forerun.core.scores import Scores

_PRIOR = 0.15  # First guess that a token is right if those before it were
RowOf = TypeVar("RowOf", bound="WindowRow")


@dataclass(frozen=True, kw_only=True, slots=True)
class JacobiConfig:
    """Options of `jacobi`."""

    num_speculative_tokens: int = 8  # Tokens that are guessed at once

    def __post_init__(self) -> None:
        check_least("jacobi", self, num_speculative_tokens=1)


@dataclass(kw_only=True, slots=True)
class WindowRow:
    """The state of one row of a drafter with a window."""

    window: Window
    acceptance: Acceptance
    guessed: Drafted | None = None  # The last guesses, until the target has spoken


class WindowDrafter(Drafter, Generic[RowOf]):
    """The base of drafters with a window, which every pass of the target refines; a method says how
    a row begins.
    """

    def __init__(self, config: Any, setup: DrafterSetup) -> None:
        self.config = config
        self._rows: dict[int, RowOf] = {}
        self._estimates = PerDomain(Acceptance)

    def _new(self, salt: str | None) -> RowOf:
        raise NotImplementedError

    def _row(self, context: DraftContext, index: int) -> RowOf:
        row_id = context.rows[index]
        if row_id not in self._rows:
            self._rows[row_id] = self._new(context.salt(index))
        return self._rows[row_id]

    def _collect(self, row: RowOf, new: Sequence[int]) -> None:
        """Take note that columns have just grown by the `new` tokens, see `Window.read`."""

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        for index, (tokens, verdict) in enumerate(zip(context.tokens, verdicts, strict=True)):
            row, emitted = self._row(context, index), len(verdict.path) + 1
            if row.guessed is not None:
                row.guessed.learn(tokens[-emitted:])
                row.guessed = None
                new = row.window.read(scores.trees[index], partial(scores.raw_argmax, index))
                self._collect(row, new)
                row.window.roll(new, emitted)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif row_id in self._rows:
                self._rows[row_id].guessed = None


class JacobiDrafter(WindowDrafter[WindowRow]):
    """Guesses the next tokens, and takes the target's corrections of wrong guesses as its next
    ones.
    """

    name = "jacobi"
    Config = JacobiConfig
    config: JacobiConfig

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row, parent = self._row(context, index), 0
            length = max(0, min(self.config.num_speculative_tokens, nodes, depth))
            row.window.fit(tokens, length + 1)
            row.guessed = Drafted(trees[index], row.acceptance)
            for position, column in enumerate(row.window.columns[1:]):
                parent = row.guessed.add(column[0], parent, Evidence(position, _PRIOR))
        return trees

    def _new(self, salt: str | None) -> WindowRow:
        return WindowRow(window=Window(level=2), acceptance=self._estimates.of(salt))


class Window:
    """Lookahead decoding's window (arXiv 2402.02057) of one sequence: W columns of Jacobi trajectories, N - 1 rows.

    Element (r, j) stands r + j positions after the last committed token, which is element (0, 0). Row 0, the oldest, is
    a chain; column j, its rows 1 and up, hangs from row 0's element j. As a token tree that is the published mask: an
    element of row r >= 1 sees the text, row 0 up to column j, and its own column up to itself. One row (N = 2) is plain
    Jacobi decoding. `level` is N >= 2, the length of the n-grams that columns grow into.
    """

    def __init__(self, level: int) -> None:
        self._rows = level - 1
        self._base = self._cursor = 0
        self.columns: list[list[int]] = []  # The columns as they were fitted last, each of N - 1 tokens

    def widest(self, nodes: int, depth: int) -> int:
        """Return the most columns that stay within so many nodes and so deep; W columns are W - 1 +
        (N - 2) W nodes.
        """
        return max(0, min((nodes + 1) // self._rows, depth - self._rows + 2))

    def fit(self, tokens: Sequence[int], width: int) -> None:
        """Make the window `width` columns that start at the text's last token. Columns that fell
        behind the text are dropped, and new ones begin as copies of the text, read from its
        beginning on: a guess that needs no randomness.
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
        """Return the token by which each column grows, `choose` of its end, up to the first column
        that was not scored.
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
        """Move the window on: each column loses its oldest token and gains its entry of `new`, and
        columns move left as the text grows. Row r + 1 becomes row r, one position nearer: exactly
        where it belongs if one token was emitted. Every further one skips a column. Columns that
        `new`, as `read` gave it, does not reach are dropped; if it is empty, the window was not
        scored and the next `fit` drops what is late.
        """
        if new:
            grown = [[*column[1:], token] for column, token in zip(self.columns, new, strict=False)]
            self.columns = grown[emitted - 1 :]
            self._base += emitted
