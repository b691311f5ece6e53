"""Jacobi and lookahead decoding: the target itself guesses the next tokens, and refines the guesses with every pass.

Jacobi decoding (Santilli et al., arXiv 2305.10427): a chain of guesses for the next tokens. The target's argmax after
each token of the chain is the next guess for the token after it. Right guesses are accepted, and the others move up. It
is one row of lookahead decoding's window whose tokens are submitted. Drafts are deterministic at every temperature.

Lookahead decoding (Fu et al., arXiv 2402.02057): one pass scores the last token, a window of W Jacobi trajectories of
N - 1 tokens, and up to G guesses of N - 1 tokens. The window's elements are probe nodes, which are never accepted. The
target's tokens after the newest row complete W n-grams, which go to a pool. The guesses are the pool's n-grams that
begin with the last token.

There are three differences from the published code. The window starts with tokens of the prompt instead of random
tokens, and with all its rows. It moves by as many tokens as were emitted, so that every trajectory keeps its position.
Prefixes that guesses share are scored once. The window advances by the argmax of the raw logits at every temperature,
because it only decides what is guessed, not what is accepted.
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

_PRIOR = 0.15  # Prior probability that a guess is right if those before it are
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
    guessed: Drafted | None = None  # The last guesses, until they are verified


class WindowDrafter(Drafter, Generic[RowOf]):
    """The base of drafters with a window, which every pass of the target refines."""

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
        """Process the `new` tokens by which columns have grown, see `Window.read`."""

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
    """Guesses the next tokens; the target's corrections of wrong guesses are the next guesses."""

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

    Element (r, j) is r + j positions after the last committed token, which is element (0, 0). Row 0, the oldest, is a
    chain; the further rows of column j are a chain below row 0's element j. As a token tree this is the published mask:
    an element of row r >= 1 attends to the text, to row 0 up to column j, and to its own column up to itself. One row
    (N = 2) is plain Jacobi decoding. `level` is N >= 2, the length of the n-grams that columns become.
    """

    def __init__(self, level: int) -> None:
        self._rows = level - 1
        self._base = self._cursor = 0
        self.columns: list[list[int]] = []  # The columns, each of N - 1 tokens

    def widest(self, nodes: int, depth: int) -> int:
        """Return the most columns that fit `nodes` nodes and `depth`; W columns are W - 1 + (N - 2) W nodes."""
        return max(0, min((nodes + 1) // self._rows, depth - self._rows + 2))

    def fit(self, tokens: Sequence[int], width: int) -> None:
        """Resize the window to `width` columns from the text's last token on. Columns that the text has passed are
        dropped; new ones start with tokens from the beginning of the text, which needs no randomness.
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
        """Return the token by which each column grows: `choose` of its last node, up to the first column that was not
        scored.
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
        """Advance the window: each column drops its oldest token and appends its entry of `new`, and columns move left
        as the text grows. Row r + 1 becomes row r, one position nearer, which is right if one token was emitted; every
        further token skips a column. Columns without an entry in `new` are dropped. If `new` is empty, the window was
        not scored, and the next `fit` drops the columns that the text has passed.
        """
        if new:
            grown = [[*column[1:], token] for column, token in zip(self.columns, new, strict=False)]
            self.columns = grown[emitted - 1 :]
            self._base += emitted


Gram = tuple[int, ...]
_NGRAM_PRIOR = (0.25, 0.45, 0.6, 0.7)
"""Prior probability that token 1, 2, ... of a guess is right if those before it are."""
_PRIOR_DECAY = 0.6  # Factor for each older sibling
_POOLS = 16  # Isolation domains whose shared pools are kept: a full pool takes about 6 MB


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadConfig:
    """Options of `lookahead`, with the published code's defaults. A pass scores up to W - 1 + (N - 2) W + G (N - 1)
    nodes, 55 with the defaults. If a step may draft fewer, first the window shrinks, then the guesses.
    """

    window: int = 7  # W: trajectories, and n-grams collected in one step
    level: int = 5  # N: tokens of an n-gram; a guess has one less
    num_speculative_tokens: int | None = None  # Most tokens of a guess that are drafted; None: all, N - 1
    guesses: int = 7  # G: most guesses in one step, and most n-grams in the pool for each first token
    copy_text: bool = True  # Whether the n-grams of prompt and output are added to the pool, too
    shared_pool: bool = False  # One lasting pool for all requests of an isolation domain; else one for each request
    pool_keys: int = 8192  # Most first tokens in a pool; the least recently seen one is dropped

    def __post_init__(self) -> None:
        check_least("lookahead", self, num_speculative_tokens=1, window=1, level=2, guesses=1, pool_keys=1)


@dataclass(kw_only=True, slots=True)
class _LookaheadRow(WindowRow):
    pool: Pool
    copied: int = 0  # Tokens of the text whose n-grams have been added to the pool


class LookaheadDrafter(WindowDrafter[_LookaheadRow]):
    """Drafts Jacobi trajectories as probe nodes, and guesses from the n-grams that they became."""

    name = "lookahead"
    Config = LookaheadConfig
    config: LookaheadConfig

    def __init__(self, config: LookaheadConfig, setup: DrafterSetup) -> None:
        super().__init__(config, setup)
        self._shared = PerDomain(self._new_pool, most=_POOLS)

    @property
    def depth(self) -> int:
        """Most tokens on one path, of the window or of a guess."""
        return max(self.config.level - 1, self.config.window + self.config.level - 3)

    def extend(self, context: DraftContext) -> None:
        level, keys = self.config.level, self.config.pool_keys
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            row = self._row(context, index)
            row.copied = min(row.copied, len(tokens) - fresh)
            if self.config.copy_text:  # Only the end of a long prompt: the pool would drop the rest at once
                for end in range(max(row.copied + 1, level, len(tokens) - keys), len(tokens) + 1):
                    row.pool.add(tokens[end - level], tuple(tokens[end - level + 1 : end]))
                row.copied = len(tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Draft the guesses, then the window, for which at least one column is reserved."""
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
        """Add the n-grams that begin with the root's token as branches with common prefixes, up to `nodes` nodes."""
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
    """N-grams by first token: at most `per_key` continuations for each of at most `keys` tokens. Beyond both limits the
    least recently added one is dropped.
    """

    def __init__(self, per_key: int, keys: int) -> None:
        self._per_key, self._keys = per_key, keys
        self._grams: dict[int, dict[Gram, None]] = {}

    def add(self, first: int, rest: Gram) -> None:
        """Add the n-gram of `first` and `rest`."""
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
