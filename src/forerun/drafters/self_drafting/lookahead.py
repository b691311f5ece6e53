"""Jacobi and lookahead decoding: the target's own guesses for the tokens to come, refined by every
pass.

Jacobi decoding: a chain of guesses for the next tokens, all refined by every pass of the target.

Santilli et al., arXiv 2305.10427. The target's argmax after each token of the chain is the next
guess for the token behind it; what was guessed right is accepted, and the rest moves up. It is one
row of lookahead decoding's window, submitted and not only probed. Deterministic at every
temperature.

Lookahead decoding: the target guesses several positions at once and collects the n-grams that it
comes across.

Fu et al., arXiv 2402.02057. One pass scores the last token, a window of W Jacobi trajectories of N
- 1 tokens, and up to G guesses of N - 1 tokens. The window's elements are probes, which are never
accepted. What the target says after the newest row completes W n-grams, which go to a pool; the
guesses are the pool's n-grams that begin with the last token.

Unlike the published code the window begins as copies of the prompt, not at random, with all its
rows; it moves by as many tokens as were emitted, so that every trajectory keeps its position;
beginnings that guesses share are scored once. It is rolled by the argmax of the raw logits at every
temperature: it decides what is guessed, not what is accepted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from forerun.core.acceptance import Acceptance, Evidence, by_draft_prob
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least
from forerun.decode.scores import Scores
from forerun.types import Budget, DraftKind, Drawn, Verdict

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


Gram = tuple[int, ...]
_NGRAM_PRIOR = (0.25, 0.45, 0.6, 0.7)  # First guess that a guess's token 1, 2, ... is right if those before it were
_PRIOR_DECAY = 0.6  # Factor by which that falls from one sibling to the next older one
_POOLS = 16  # Isolation domains whose shared pools are kept: a full one takes some 6 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Options of `lookahead`; defaults are the published code's. A pass scores up to W - 1 + (N - 2) W + G (N - 1)
    nodes: 55 with the defaults. Where that is more than a step may draft, the window shrinks first, then the guesses.
    """

    window: int = 7  # W: trajectories, and n-grams collected in one step
    level: int = 5  # N: tokens of an n-gram; a guess has one less
    num_speculative_tokens: int | None = None  # Most tokens of a guess that are drafted; None: all, N - 1
    guesses: int = 7  # G: most guesses in one step, and most n-grams that are kept of those that begin with one token
    copy_text: bool = True  # Whether the n-grams of prompt and output go to the pool too
    shared_pool: bool = False  # One pool for all requests of an isolation domain, kept between them; else one each
    pool_keys: int = 8192  # Most first tokens that a pool knows; the least recently seen are forgotten

    def __post_init__(self) -> None:
        check_least("lookahead", self, num_speculative_tokens=1, window=1, level=2, guesses=1, pool_keys=1)


@dataclass(kw_only=True, slots=True)
class _LookaheadRow(WindowRow):
    pool: Pool
    copied: int = 0  # Tokens of the text whose n-grams are in the pool


class LookaheadDrafter(WindowDrafter[_LookaheadRow]):
    """Drafts Jacobi trajectories as probes, and guesses from the n-grams that they grew into."""

    name = "lookahead"
    Config = LookaheadConfig
    config: LookaheadConfig

    def __init__(self, config: LookaheadConfig, setup: DrafterSetup) -> None:
        super().__init__(config, setup)
        self._shared = PerDomain(self._new_pool, most=_POOLS)

    @property
    def depth(self) -> int:
        """Most tokens on one path: how far the window reaches, or the guesses."""
        return max(self.config.level - 1, self.config.window + self.config.level - 3)

    def extend(self, context: DraftContext) -> None:
        level, keys = self.config.level, self.config.pool_keys
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            row = self._row(context, index)
            row.copied = min(row.copied, len(tokens) - fresh)
            if self.config.copy_text:  # of a long prompt what the pool would not forget at once
                for end in range(max(row.copied + 1, level, len(tokens) - keys), len(tokens) + 1):
                    row.pool.add(tokens[end - level], tuple(tokens[end - level + 1 : end]))
                row.copied = len(tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Draft the guesses, then the window; room is kept for a window of one column."""
        trees, column = context.trees(), self.config.level - 2
        for index, (tokens, nodes, depth) in enumerate(zip(context.tokens, budget.nodes, budget.depth, strict=True)):
            row, tree = self._row(context, index), trees[index]
            row.guessed = None
            if nodes <= 0 or depth <= 0:
                continue
            spare = column if column <= min(depth, nodes) else 0
            row.guessed = Drafted(tree, row.acceptance)
            longest = min(depth, self.config.num_speculative_tokens or depth)
            self._guess(row.guessed, row.pool, nodes - spare, longest)
            row.window.fit(tokens, min(self.config.window, row.window.widest(nodes - tree.size, depth)))
            row.window.plant(tree)
        return trees

    def _collect(self, row: _LookaheadRow, new: Sequence[int]) -> None:
        for column, token in zip(row.window.columns, new, strict=False):
            row.pool.add(column[0], (*column[1:], token))

    def _new_pool(self) -> Pool:
        return Pool(per_key=self.config.guesses, keys=self.config.pool_keys)

    def _new(self, salt: str | None) -> _LookaheadRow:
        return _LookaheadRow(
            window=Window(self.config.level),
            pool=self._shared.of(salt) if self.config.shared_pool else self._new_pool(),
            acceptance=self._estimates.of(salt),
        )

    def _guess(self, guessed: Drafted, pool: Pool, nodes: int, depth: int) -> None:
        """Add the n-grams behind the root as branches, shared beginnings once, as far as `nodes`
        reach.
        """
        children = Counter[int]()
        for gram in pool.after(guessed.tokens[0]):
            parent = 0
            for position, token in enumerate(gram[:depth]):
                if guessed.tree.size >= nodes:
                    return
                before, rank = guessed.tree.size, children[parent]
                prior = _NGRAM_PRIOR[min(position, len(_NGRAM_PRIOR) - 1)] * _PRIOR_DECAY**rank
                node = guessed.add(token, parent, by_draft_prob(Drawn.DETERMINISTIC, rank, prior))
                children[parent] += guessed.tree.size > before
                parent = node


class Pool:
    """The n-grams that a request has come across: at most `per_key` continuations of each of at
    most `keys` tokens. Both bounds forget what was added longest ago; adding a continuation again
    makes it new again.
    """

    def __init__(self, per_key: int, keys: int) -> None:
        self._per_key, self._keys = per_key, keys
        self._grams: dict[int, dict[Gram, None]] = {}

    def add(self, first: int, rest: Gram) -> None:
        """Remember that `rest` may follow `first`."""
        grams = self._grams.pop(first, {})
        grams.pop(rest, None)
        grams[rest] = None
        self._grams[first] = grams
        if len(grams) > self._per_key:
            del grams[next(iter(grams))]
        if len(self._grams) > self._keys:
            del self._grams[next(iter(self._grams))]

    def after(self, first: int) -> list[Gram]:
        """Return the continuations of `first`, the most recent first."""
        return list(reversed(self._grams.get(first, {})))
