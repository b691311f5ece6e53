"""A suffix automaton over a growing text: every string that occurs in it, how often, and what
followed. Blumer et al. 1985, as in SAM-Decoding (arXiv 2411.10666), with the occurrence counts of
SuffixDecoding (arXiv 2411.04975). The work per token is done in `compiled.suffixes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from forerun.drafters.lookup.base import IndexedText
from forerun.drafters.lookup.compiled import suffixes
from forerun.drafters.lookup.compiled.drafts import NONE, SEPARATOR, Ints, room_for

_NUMBERS = count(1)


class SuffixAutomaton(IndexedText):
    """A suffix automaton: all substrings of a text, one state for those that end at the same
    positions.

    A token is appended in amortised O(1), and counted in O(`depth`) at worst: how often a string occurs is known for
    strings of at most `depth` >= 2 tokens. One flat array of 32 bits holds states and transitions; the token of a
    state's transition along its first occurrence is read from the text, so that only branchings need an entry of their
    own: 92 to 190 bytes per token, and while the array grows twice that.
    """

    def __init__(self, depth: int, tokens: int = 0) -> None:
        """Make the automaton of the empty text, with room for so many tokens."""
        self.number = next(_NUMBERS)  # No two have the same
        self.whole = _empty(tokens)
        self.arrays = suffixes.parts_of(self.whole)
        suffixes.start(self.arrays, depth)

    def __len__(self) -> int:
        return int(self.whole[suffixes.SIZE])

    @property
    def tokens(self) -> Ints:
        return self.arrays.tokens[: len(self)]

    @property
    def room(self) -> int:
        return len(self.arrays.tokens)

    def extend(self, tokens: Sequence[int] | Ints) -> None:
        """Append tokens to the text."""
        self.make_room(len(self) + len(tokens))
        suffixes.extend(self.arrays, np.asarray(tokens, np.int32))

    def make_room(self, tokens: int) -> None:
        if tokens > self.room:
            whole = _empty(tokens)
            larger = suffixes.parts_of(whole)
            larger.head[: suffixes.ROOM] = self.arrays.head[: suffixes.ROOM]
            for old, new in zip(self.arrays[1:-1], larger[1:-1], strict=True):
                new[: len(old)] = old
            suffixes.reindex(larger, 0)
            self.whole, self.arrays = whole, larger


def _empty(tokens: int) -> Ints:
    """Allocate an array with room for so many tokens and more, the index empty."""
    room = room_for(tokens)
    whole = np.empty(suffixes.size_of(room), np.int32)
    whole[: suffixes.HEAD] = 0
    whole[suffixes.ROOM] = room
    suffixes.parts_of(whole).slots.fill(NONE)
    return whole


class OutputStore:
    """Outputs of requests that have ended, in one index of at most so many `tokens` and `requests`.
    SuffixDecoding's global tree (arXiv 2411.04975) as two generations of automata: new outputs
    enter the younger; when that is full, the older one is dropped and the younger takes its place.
    """

    def __init__(self, *, depth: int, tokens: int, requests: int) -> None:
        self._depth, self._tokens, self._requests = depth, tokens // 2, requests // 2
        self.generations = [SuffixAutomaton(depth)]  # The youngest first; at most two
        self._outputs = 0  # Outputs in the younger generation

    @property
    def held(self) -> int:
        """Tokens of all outputs."""
        return sum(map(len, self.generations))

    def add(self, output: Sequence[int] | Ints) -> None:
        """Add an output; of one longer than half the store, only the end."""
        kept = np.asarray(output[max(0, len(output) + 1 - self._tokens) :], np.int32)
        if not len(kept) or not self._requests or self._tokens <= 1:
            return
        if self._outputs == self._requests or len(self.generations[0]) + len(kept) + 1 > self._tokens:
            self.generations, self._outputs = [SuffixAutomaton(self._depth), self.generations[0]], 0
        self.generations[0].extend(np.append(kept, np.int32(SEPARATOR)))
        self._outputs += 1

    def memory_bytes(self) -> int:
        return sum(generation.whole.nbytes for generation in self.generations)
