"""What `ngram` and `suffix` share: the texts of all rows are read, and drafts found in them, by one call of compiled code
for a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, PerDomain
from forerun.drafters.lookup.compiled.batch import DRAFTED, PROMPT, READ, TEXT, Batch, Longs, address
from forerun.drafters.lookup.compiled.drafts import NODE_COLUMNS, NODE_PARENT, NODE_TOKEN, Ints
from forerun.types import Budget

D = TypeVar("D")  # What is known of an isolation domain


class Text:
    """A text that grows, and its index: one array, which compiled code finds by its address."""

    whole: Ints  # Begins with how many tokens the text has

    def __len__(self) -> int:
        return int(self.whole[0])

    @property
    def tokens(self) -> Ints:
        """(N,) int32; a view, which does not grow."""
        raise NotImplementedError

    def make_room(self, tokens: int) -> None:
        """Move to a larger array where there is no room for so many tokens."""
        raise NotImplementedError


class LookupDrafter(Drafter, Generic[D]):
    """Drafts by looking up the end of a row's text. An engine that has the texts of all rows in an array calls `read`
    and `chains`; forerun's own has lists and scores trees, and calls it like any drafter."""

    def __init__(self, domains: PerDomain[D], *, columns: int, nodes: int) -> None:
        """`columns` of the batch's rows; at most so many `nodes` of a draft."""
        self.batch = Batch(
            rows=np.zeros((0, columns), np.int64),
            nodes=np.zeros((0, 1 + nodes, NODE_COLUMNS), np.int32),
            confidence=np.zeros((0, 1 + nodes)),
        )
        self._domains = domains
        self._texts: dict[int, Text] = {}  # By row, as are the domains; the batch has addresses of both
        self._domain: dict[int, D] = {}

    # --- what a method says -------------------------------------------------------------------------------------------

    def _new_text(self) -> Text:
        """An empty one."""
        raise NotImplementedError

    def _point(self, row: int, domain: D) -> None:
        """Write the further columns of a row whose text is empty."""
        raise NotImplementedError

    def _read(self, which: Longs, new: Ints, starts: Longs, ends: Longs) -> int:
        """Read ``new[starts[i] : ends[i]]`` for the rows `which`, up to the first without room; how many."""
        raise NotImplementedError

    def _draft(self, which: Longs, nodes: Longs, depths: Longs) -> None:
        """Leave a draft for each of these rows in the batch."""
        raise NotImplementedError

    # --- rows in arrays -----------------------------------------------------------------------------------------------

    def begin(self, row: int, prompt: int, salt: str | None = None) -> None:
        """A row begins, whose prompt has so many tokens; they are read next."""
        if row >= len(self.batch.rows):
            self._make_rows(max(8, 2 * row))
        self._domain[row] = self._domains.of(salt)
        self._restart(row, prompt)

    def read(self, which: Longs, new: Ints, starts: Longs, ends: Longs) -> None:
        """The texts of the rows `which`, (B,), go on with ``new[starts[i] : ends[i]]``."""
        done = self._read(which, new, starts, ends)
        while done < len(which):
            row = int(which[done])
            text = self._texts[row]
            text.make_room(int(self.batch.rows[row, READ] + ends[done] - starts[done]))
            self.batch.rows[row, TEXT] = address(text.whole)
            done += self._read(which[done:], new, starts[done:], ends[done:])

    def chains(self, which: Longs, most: Longs) -> list[list[int]]:
        """At most so many tokens for each of the rows."""
        self._draft(which, most, most)
        sizes, tokens = self.batch.rows[which, DRAFTED].tolist(), self.batch.nodes[which, :, NODE_TOKEN].tolist()
        return [row[1:size] for row, size in zip(tokens, sizes, strict=True)]

    def _make_rows(self, count: int) -> None:
        self.batch = Batch(*(with_rows(array, count) for array in self.batch))

    def _restart(self, row: int, prompt: int) -> None:
        self.batch.rows[row] = 0
        self._texts[row] = text = self._new_text()
        self.batch.rows[row, TEXT], self.batch.rows[row, PROMPT] = address(text.whole), prompt
        self._point(row, self._domain[row])

    def _shrink(self, row: int, length: int) -> None:
        """An index cannot forget a token, so of a text that becomes shorter everything is read again: linear, and
        rare."""
        if self.batch.rows[row, READ] > length:
            kept = self._texts[row].tokens[:length]
            self._restart(row, int(self.batch.rows[row, PROMPT]))
            self.read(np.array([row]), kept, np.array([0]), np.array([len(kept)]))

    def _compile(self) -> None:
        """Have everything compiled, or read from disk, before a request waits for it."""
        which, text, most = np.array([0]), np.zeros(100, np.int32), np.array([1])  # which outgrows its first array
        self.begin(0, 1)
        self.read(which, text, 0 * which, which + len(text))
        self.chains(which, most)
        LookupDrafter._free(self, 0)

    # --- as a drafter -------------------------------------------------------------------------------------------------

    def extend(self, context: DraftContext) -> None:
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            if row in self._texts:
                self._shrink(row, len(tokens) - fresh)
        self._take(context)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        which = self._take(context)
        self._draft(which, np.array(budget.nodes, np.int64), np.array(budget.depth, np.int64))
        nodes, sizes = self.batch.nodes[which], self.batch.rows[which, DRAFTED].tolist()
        columns = (nodes[..., NODE_TOKEN], nodes[..., NODE_PARENT], self.batch.confidence[which])
        trees = []
        for text, size, *drafted in zip(context.tokens, sizes, *(column.tolist() for column in columns), strict=True):
            trees.append(TokenTree.of(text[-1], *(values[1:size] for values in drafted)))
        return trees

    def _take(self, context: DraftContext) -> Longs:
        """Read what the rows' texts have beyond what is known; the rows."""
        which = np.array(context.rows, np.int64)
        for index, row in enumerate(context.rows):
            if row not in self._texts:
                self.begin(row, context.prompt_lengths[index], context.salt(index))
        known = self.batch.rows[which, READ].tolist()
        new = [tokens[read:] for tokens, read in zip(context.tokens, known, strict=True)]
        bounds = np.array([0, *accumulate(map(len, new))], np.int64)
        self.read(which, np.array([*chain.from_iterable(new)], np.int32), bounds[:-1], bounds[1:])
        return which

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            if row in self._texts and length > 0:
                self._shrink(row, length)
            elif row in self._texts:
                self._free(row)

    def _free(self, row: int) -> None:
        """Forget a row that is known."""
        self.batch.rows[row, TEXT] = 0
        del self._texts[row], self._domain[row]

    def memory_bytes(self) -> int:
        return sum(text.whole.nbytes for text in self._texts.values())


def with_rows(array: NDArray[np.generic], count: int) -> NDArray[np.generic]:
    """A copy of the array that has so many rows, the new ones 0."""
    made = np.zeros((count, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made
