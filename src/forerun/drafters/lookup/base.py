"""What `ngram` and `suffix` share: one call of compiled code reads the texts of a batch of rows, another one drafts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, PerDomain
from forerun.drafters.lookup.compiled.batch import PROMPT, READ, ROOM, TEXT, Asked, Batch, Gained, Longs, address
from forerun.drafters.lookup.compiled.drafts import NODE_COLUMNS, NODE_PARENT, Ints
from forerun.types import Budget

A = TypeVar("A", bound=NDArray[Any])
D = TypeVar("D")  # What is known of an isolation domain


class Text:
    """A text that grows, and its index if it has one: one array, which compiled code finds by its address."""

    whole: Ints

    @property
    def tokens(self) -> Ints:
        """(N,) int32, the text, and room behind it where N is more than its tokens are; a view."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """Tokens that the array has room for."""
        raise NotImplementedError

    def make_room(self, tokens: int) -> None:
        """Move to a larger array where there is no room for so many."""
        raise NotImplementedError


class LookupDrafter(Drafter, Generic[D]):
    """Drafts by looking up the end of a row's text. An engine that has the texts of all rows in an array calls `read`
    and `chains`; forerun's own has lists and scores trees, and calls it like any drafter."""

    def __init__(self, domains: PerDomain[D], setup: DrafterSetup | None, *, columns: int, nodes: int) -> None:
        """`columns` of the batch's rows; at most so many `nodes` of a draft."""
        self.batch = Batch(
            rows=np.zeros((0, columns), np.int64),
            nodes=np.zeros((0, 1 + nodes, NODE_COLUMNS), np.int32),
            confidence=np.zeros((0, 1 + nodes)),
        )
        self._vocabulary = setup.target.vocab_size if setup is not None else 2**31 - 1
        self._domains = domains
        self._texts: dict[int, Text] = {}  # By row, as are the domains; the batch has addresses of both
        self._domain: dict[int, D] = {}

    # --- what a method says -------------------------------------------------------------------------------------------

    def _new_text(self, tokens: int) -> Text:
        """An empty one, with room for so many."""
        raise NotImplementedError

    def _point(self, row: int, domain: D) -> None:
        """Write the further columns of a row whose text is empty."""
        raise NotImplementedError

    def _read(self, which: Longs, gained: Gained) -> int:
        """Read for the rows `which` up to the first without room; how many."""
        raise NotImplementedError

    def _draft(self, which: Longs, asked: Asked) -> None:
        """Leave a draft for each of the rows `which` in the batch."""
        raise NotImplementedError

    # --- rows in arrays -----------------------------------------------------------------------------------------------

    def begin(self, row: int, prompt: int, salt: str | None = None) -> None:
        """A row begins, whose prompt has so many tokens; they are read next."""
        if row >= len(self.batch.rows):
            self._make_rows(max(8, 2 * row))
        self._domain[row] = self._domains.of(salt)
        self._restart(row, prompt)

    def read(self, which: Longs, tokens: Ints, starts: Longs, ends: Longs) -> None:
        """The texts of the rows `which`, (B,), go on with ``tokens[starts[i] : ends[i]]``."""
        done = self._read(which, Gained(tokens, starts, ends))
        while done < len(which):
            row = int(which[done])
            self._texts[row].make_room(int(self.batch.rows[row, READ] + ends[done] - starts[done]))
            self._locate(row)
            done += self._read(which[done:], Gained(tokens, starts[done:], ends[done:]))

    def chains(self, which: Longs, most: Longs) -> list[list[int]]:
        """At most so many tokens for each of the rows."""
        return [chain[1 : chain[0]] for chain in self._drafts(which, most, most)]

    def _drafts(self, which: Longs, nodes: Longs, depths: Longs) -> list[list[int]]:
        """Of each row's draft, which is left in the batch, how many nodes it has, and the tokens of these."""
        chains = np.empty((len(which), self.batch.nodes.shape[1]), np.int32)
        self._draft(which, Asked(nodes, depths, chains, self._vocabulary))
        return chains.tolist()

    def clear(self) -> None:
        """Forget all rows, whatever state they are in."""
        self.batch.rows[:] = 0
        self._texts.clear()
        self._domain.clear()

    def _make_rows(self, count: int) -> None:
        rows, nodes, confidence = self.batch
        self.batch = Batch(with_rows(rows, count), with_rows(nodes, count), with_rows(confidence, count))

    def _restart(self, row: int, prompt: int) -> None:
        text = self._new_text(prompt)
        self.batch.rows[row] = 0
        self.batch.rows[row, PROMPT] = prompt
        self._texts[row] = text
        self._locate(row)
        self._point(row, self._domain[row])

    def _locate(self, row: int) -> None:
        text = self._texts[row]
        self.batch.rows[row, TEXT], self.batch.rows[row, ROOM] = address(text.whole), text.room

    def _shrink(self, row: int, length: int) -> None:
        """Of a text that becomes shorter everything is read again, since an index cannot forget a token: linear, and
        rare."""
        kept = self._texts[row].tokens[:length]
        self._restart(row, int(self.batch.rows[row, PROMPT]))
        self.read(np.array([row]), kept, np.array([0]), np.array([length]))

    def _compile(self) -> None:
        """Have everything compiled, or read from disk, before a request waits for it."""
        which, text, most = np.array([0]), np.zeros(100, np.int32), np.array([1])  # which outgrows its first array
        self.begin(0, 1)
        self.read(which, text, 0 * which, which + len(text))
        self.chains(which, most)
        self.clear()

    # --- as a drafter -------------------------------------------------------------------------------------------------

    def extend(self, context: DraftContext) -> None:
        which = self._begun(context)
        for row, read, tokens, fresh in zip(
            context.rows, self._sizes(which), context.tokens, context.fresh, strict=True
        ):
            if read > len(tokens) - fresh:
                self._shrink(row, len(tokens) - fresh)
        self.batch.rows[which, PROMPT] = context.prompt_lengths
        self._take(which, context.tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        which = self._begun(context)
        if self._sizes(which) != [len(tokens) for tokens in context.tokens]:
            self._take(which, context.tokens)
        found = self._drafts(which, np.array(budget.nodes, np.int64), np.array(budget.depth, np.int64))
        parents, likely = self.batch.nodes[which, :, NODE_PARENT].tolist(), self.batch.confidence[which].tolist()
        return [
            TokenTree.of(text[-1], draft[1 : draft[0]], above[1 : draft[0]], sure[1 : draft[0]])
            for text, draft, above, sure in zip(context.tokens, found, parents, likely, strict=True)
        ]

    def _begun(self, context: DraftContext) -> Longs:
        """The context's rows; those that are not known begin."""
        for index, row in enumerate(context.rows):
            if row not in self._texts:
                self.begin(row, context.prompt_lengths[index], context.salt(index))
        return np.array(context.rows, np.int64)

    def _sizes(self, which: Longs) -> list[int]:
        """Tokens of each text that were read."""
        return self.batch.rows[which, READ].tolist()  # type: ignore[no-any-return]

    def _take(self, which: Longs, texts: Sequence[Sequence[int]]) -> None:
        """Read what these texts have beyond what is known."""
        new = [tokens[read:] for tokens, read in zip(texts, self._sizes(which), strict=True)]
        bounds = np.array([0, *accumulate(map(len, new))], np.int64)
        self.read(which, np.array([*chain.from_iterable(new)], np.int32), bounds[:-1], bounds[1:])

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            if row in self._texts and length == 0:
                self._free(row)
            elif row in self._texts and length < self.batch.rows[row, READ]:
                self._shrink(row, length)

    def _free(self, row: int) -> None:
        """Forget a row that is known."""
        self.batch.rows[row, TEXT] = 0
        del self._texts[row], self._domain[row]

    def memory_bytes(self) -> int:
        return sum(text.whole.nbytes for text in self._texts.values())


def with_rows(array: A, count: int) -> A:
    """A copy of the array that has so many rows, the new ones 0."""
    made = np.zeros((count, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made  # type: ignore[return-value]
