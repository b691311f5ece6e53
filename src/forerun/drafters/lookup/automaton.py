"""A suffix automaton over a growing text: every string that occurs in it, how often, and what followed. Blumer et al.
1985, as in SAM-Decoding (arXiv 2411.10666), with the occurrence counts of SuffixDecoding (arXiv 2411.04975). What runs
for every token is in `compiled.suffixes`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.drafters.lookup.compiled import suffixes
from forerun.drafters.lookup.compiled.drafts import SEPARATOR, Ints, empty_slots, room_for
from forerun.drafters.lookup.compiled.suffixes import ROOT, Arrays


class SuffixAutomaton:
    """All substrings of a text, one state for those that end at the same positions.

    A token is appended in amortised O(1), and counted in O(`depth`) at worst: how often a string occurs is known for
    strings of at most `depth` >= 2 tokens. Flat arrays of 32 bits hold states and transitions; the token of a state's
    transition along its first occurrence is read from the text, so that only branchings need an entry of their own: 92
    to 190 bytes per token, and while the arrays grow twice that.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.arrays = _made(0)
        suffixes.start(self.arrays, depth)
        self._size = 0
        self.repeated = ROOT, 0
        """State and length of the longest suffix of the text that occurs in it before its end too."""

    def __len__(self) -> int:
        return self._size

    @property
    def tokens(self) -> Ints:
        """(N,) int32, the text; a view, which does not grow."""
        return self.arrays.tokens[: self._size]

    def extend(self, tokens: Sequence[int] | Ints) -> None:
        """Append tokens to the text."""
        needed = self._size + len(tokens)
        if needed > len(self.arrays.tokens):
            larger = _made(needed)
            for old, new in zip(self.arrays[:-1], larger[:-1], strict=True):
                new[: len(old)] = old
            self.arrays = larger
            suffixes.reindex(larger, 0)
        self.repeated = suffixes.extend(self.arrays, np.asarray(tokens, np.int32))
        self._size = needed

    def place(self, state: int) -> int:
        """Index in the text behind the first occurrence of the state's strings."""
        return int(self.arrays.states[state, suffixes.END])

    def memory_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(values.nbytes for values in self.arrays)


def _made(tokens: int) -> Arrays:
    """Arrays for so many tokens and more, the index empty."""
    room = room_for(tokens)
    return Arrays(
        head=np.zeros(suffixes.HEAD, np.int32),
        tokens=np.empty(room, np.int32),
        states=np.empty((2 * room, suffixes.STATE_COLUMNS), np.int32),
        edges=np.empty((room, suffixes.EDGE_COLUMNS), np.int32),
        slots=empty_slots(room),
    )


class Cursor:
    """The longest end of a growing text, at least up to the automaton's depth, that occurs in an automaton."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state, self.matched = ROOT, 0
        self._read = 0
        self._size = 0

    def follow(self, text: Ints) -> None:
        """Take in what `text` has gained; starts anew where the automaton has grown, or `text` has shrunk."""
        start, automaton = self._read, self.automaton
        if len(automaton) != self._size or not 0 <= len(text) - start <= automaton.depth:
            start = max(0, len(text) - automaton.depth)
            self.state, self.matched = ROOT, 0
        self.state, self.matched = suffixes.follow(automaton.arrays, text[start:], self.state, self.matched)
        self._read, self._size = len(text), len(automaton)


class OutputStore:
    """Outputs of requests that have ended, in one index of at most so many `tokens` and `requests`. SuffixDecoding's
    global tree (arXiv 2411.04975) as two generations of automata: new outputs enter the younger; when that is full, the
    older one is dropped and the younger takes its place."""

    def __init__(self, *, depth: int, tokens: int, requests: int) -> None:
        self._depth, self._tokens, self._requests = depth, tokens // 2, requests // 2
        self.generations = [SuffixAutomaton(depth)]  # The youngest first; at most two
        self._outputs = 0  # In the younger one
        self.read = 0  # Tokens ever taken in

    @property
    def held(self) -> int:
        """Tokens of all outputs."""
        return sum(map(len, self.generations))

    def add(self, output: Sequence[int] | Ints) -> None:
        """Take in an output; of one longer than half the store, only the end."""
        kept = np.asarray(output[max(0, len(output) + 1 - self._tokens) :], np.int32)
        if not len(kept) or not self._requests or self._tokens <= 1:
            return
        if self._outputs == self._requests or len(self.generations[0]) + len(kept) + 1 > self._tokens:
            self.generations, self._outputs = [SuffixAutomaton(self._depth), self.generations[0]], 0
        self.generations[0].extend(np.append(kept, np.int32(SEPARATOR)))
        self._outputs += 1
        self.read += len(kept)

    def memory_bytes(self) -> int:
        return sum(generation.memory_bytes() for generation in self.generations)
