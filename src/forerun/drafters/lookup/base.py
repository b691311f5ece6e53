"""The base of `ngram` and `suffix`: one call of compiled code reads the texts of a batch of rows, and drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, PerDomain
from forerun.drafters.lookup.batch import (
    DEPTH,
    END,
    NODES,
    PROMPT,
    READ,
    ROOM,
    ROW,
    START,
    TEXT,
    WORK,
    Batch,
    Longs,
    address,
    whereabouts,
)
from forerun.drafters.lookup.drafts import NODE_COLUMNS, NODE_PARENT, Draft, Ints
from forerun.drafters.lookup.following import FOLLOWER, NOWHERE, REPLACEMENT_COLUMNS, REPLACEMENTS, Followers
from forerun.types import Budget

A = TypeVar("A", bound=NDArray[Any])
D = TypeVar("D")  # State of an isolation domain


class IndexedText:
    """A growing text with its index, if it has one, in one array, whose address is passed to compiled code."""

    whole: Ints

    @property
    def tokens(self) -> Ints:
        """(N,) int32, a view of the text; N is its capacity, which may exceed the number of tokens."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """The capacity of the array, in tokens."""
        raise NotImplementedError

    def make_room(self, tokens: int) -> None:
        """Move to a larger array if the capacity is below this many tokens."""
        raise NotImplementedError


class LookupDrafter(Drafter, Generic[D]):
    """The base of drafters that look up the end of a row's text. Engines that hold the texts of all rows in an array
    (vLLM, SGLang) call `chains`; forerun's engine calls it like any other drafter.
    """

    def __init__(self, domains: PerDomain[D], setup: DrafterSetup | None, *, columns: int, nodes: int) -> None:
        """Allocate the batch, with `columns` columns for each row and room for drafts of at most `nodes` nodes."""
        rows = setup.rows if setup is not None else 0
        followers = Followers(
            np.zeros((rows, FOLLOWER), np.int32), np.zeros((rows, REPLACEMENTS, REPLACEMENT_COLUMNS), np.int32)
        )
        self.batch = Batch(
            rows=np.zeros((rows, columns), np.int64),
            nodes=np.zeros((rows, 1 + nodes, NODE_COLUMNS), np.int32),
            confidence=np.zeros((rows, 1 + nodes)),
            followers=followers,
            spare=Draft.of(nodes),
            vocabulary=setup.target.vocab_size if setup is not None else 2**31 - 1,
        )
        self._where = whereabouts(self.batch)
        self._domains = domains
        self._texts: dict[int, IndexedText] = {}  # Texts by row; the batch holds their addresses
        self._domain: dict[int, D] = {}

    # --- what a method says -------------------------------------------------------------------------------------------

    def _new_text(self, tokens: int) -> IndexedText:
        """Return an empty text with room for this many tokens."""
        raise NotImplementedError

    def _point(self, row: int, domain: D) -> None:
        """Write the method's own columns of a row with an empty text."""
        raise NotImplementedError

    def _step(self, where: Longs, tokens: Ints, work: Longs, chains: Ints) -> int:
        """Run the method's compiled step, with the arguments of `lookup.ngram.step`."""
        raise NotImplementedError

    # --- rows in arrays -----------------------------------------------------------------------------------------------

    def begin(self, row: int, prompt: int, salt: str | None = None) -> None:
        """Start a row with a prompt of `prompt` tokens, which are read with the next call. Its old text is dropped."""
        if row >= len(self.batch.rows):
            self._make_rows(max(8, 2 * row))
        self._domain[row] = self._domains.of(salt)
        self._restart(row, prompt)

    def chains(self, tokens: Ints, work: Longs) -> list[list[int]]:
        """Read new tokens and draft, and return the drafted tokens. `work`, (WORK, B), says for each of B rows which of
        the `tokens` it reads, and how much is drafted.
        """
        return [chain[1 : chain[0]] for chain in self._chains(tokens, work)]

    def _chains(self, tokens: Ints, work: Longs) -> list[list[int]]:
        """Return each row's number of drafted nodes and their tokens. The drafts themselves stay in the batch."""
        chains = np.empty((work.shape[1], self.batch.nodes.shape[1]), np.int32)
        while (done := self._step(self._where, tokens, work, chains)) < work.shape[1]:
            row = int(work[ROW, done])
            self._texts[row].make_room(int(self.batch.rows[row, READ] + work[END, done] - work[START, done]))
            self._locate(row)
        return chains.tolist()

    def clear(self) -> None:
        """Drop all rows."""
        self.batch.rows[:] = 0
        self._texts.clear()
        self._domain.clear()

    def _make_rows(self, count: int) -> None:
        batch = self.batch
        self.batch = Batch(
            rows=_with_rows(batch.rows, count),
            nodes=_with_rows(batch.nodes, count),
            confidence=_with_rows(batch.confidence, count),
            followers=Followers(*(_with_rows(array, count) for array in batch.followers)),
            spare=batch.spare,
            vocabulary=batch.vocabulary,
        )
        self._where = whereabouts(self.batch)

    def _restart(self, row: int, prompt: int) -> None:
        text = self._new_text(prompt)
        self.batch.rows[row] = 0
        self.batch.rows[row, PROMPT] = prompt
        self._follow_nothing(row)
        self._texts[row] = text
        self._locate(row)
        self._point(row, self._domain[row])

    def _follow_nothing(self, row: int) -> None:
        self.batch.followers.places[row] = NOWHERE

    def _locate(self, row: int) -> None:
        text = self._texts[row]
        self.batch.rows[row, TEXT], self.batch.rows[row, ROOM] = address(text.whole), text.room

    def _shrink(self, row: int, length: int) -> None:
        """Shorten a text. It is read again from the beginning, since an index cannot remove tokens. This is linear, but
        rare.
        """
        tokens = self._texts[row].tokens[:length]
        self._restart(row, int(self.batch.rows[row, PROMPT]))
        self._chains(tokens, _work([row], [length]))

    def _compile(self) -> None:
        """Compile everything, or load it from disk, before the first request."""
        text = np.zeros(100, np.int32)  # Longer than the first array
        self.begin(0, 1)
        self.chains(text, _work([0], [len(text)], Budget(nodes=[1], depth=[1])))
        self.clear()

    # --- as a drafter -------------------------------------------------------------------------------------------------

    def extend(self, context: DraftContext) -> None:
        self._begin_new(context)
        table = self.batch.rows
        for row, tokens, fresh, prompt in zip(
            context.rows, context.tokens, context.fresh, context.prompt_lengths, strict=True
        ):
            if table[row, READ] > len(tokens) - fresh:
                self._shrink(row, len(tokens) - fresh)
            table[row, PROMPT] = prompt
        self._advance(context.rows, context.tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self._begin_new(context)
        trees = list[TokenTree]()
        nodes = self.batch.nodes
        confidence = self.batch.confidence
        drafts = self._advance(context.rows, context.tokens, budget)
        for row, text, draft in zip(context.rows, context.tokens, drafts, strict=True):
            drafted = slice(1, draft[0])
            parents, sure = nodes[row, drafted, NODE_PARENT].tolist(), confidence[row, drafted].tolist()
            trees.append(TokenTree.of(text[-1], draft[drafted], parents, sure))
        return trees

    def _begin_new(self, context: DraftContext) -> None:
        """Start the context's rows that are new."""
        for index, row in enumerate(context.rows):
            if row not in self._texts:
                self.begin(row, context.prompt_lengths[index], context.salt(index))

    def _advance(
        self, rows: Sequence[int], texts: Sequence[Sequence[int]], budget: Budget | None = None
    ) -> list[list[int]]:
        """Read the new tokens of these texts, draft, and return the result of `_chains`."""
        table = self.batch.rows
        new = [tokens[int(table[row, READ]) :] for row, tokens in zip(rows, texts, strict=True)]
        tokens = np.array([*chain.from_iterable(new)], np.int32)
        return self._chains(tokens, _work(rows, [*map(len, new)], budget))

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            if row in self._texts and length == 0:
                self._free(row)
            elif row in self._texts and length < self.batch.rows[row, READ]:
                self._shrink(row, length)

    def _free(self, row: int) -> None:
        """Drop a row."""
        self.batch.rows[row, TEXT] = 0
        del self._texts[row], self._domain[row]

    def memory_bytes(self) -> int:
        return sum(text.whole.nbytes for text in self._texts.values())


def _work(rows: Sequence[int], sizes: Sequence[int], budget: Budget | None = None) -> Longs:
    """Return the `work` array of rows that read `sizes` consecutive tokens each, and draft within a budget; with None
    nothing is drafted.
    """
    ends, none = [*accumulate(sizes)], [0] * len(sizes)
    what = {ROW: rows, START: [0, *ends[:-1]], END: ends, NODES: none, DEPTH: none}
    if budget is not None:
        what |= {NODES: budget.nodes, DEPTH: budget.depth}
    return np.array([what[column] for column in range(WORK)], np.int64)


def _with_rows(array: A, count: int) -> A:
    """Return a copy of the array with `count` rows; new ones are 0."""
    made = np.zeros((count, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made  # type: ignore[return-value]
