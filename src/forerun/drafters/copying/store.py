"""Past outputs as one index of bounded size, and where a running text stands in it.

SuffixDecoding's global tree (arXiv 2411.04975) as two generations of automata: new outputs enter the younger; when that
is full, the older one is dropped and the younger takes its place. Knows tokens only.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

from forerun.drafters.copying.automaton import ROOT, SEPARATOR, SuffixAutomaton


class Cursor:
    """The longest end of a growing text, at least up to the automaton's depth, that occurs in an automaton."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state, self.matched = ROOT, 0
        self._read = 0
        self._size = 0

    def follow(self, text: Sequence[int]) -> None:
        """Take in what `text` has gained; starts anew where the automaton has grown, or `text` has shrunk."""
        start, automaton = self._read, self.automaton
        if len(automaton) != self._size or not 0 <= len(text) - start <= automaton.depth:
            start = max(0, len(text) - automaton.depth)
            self.state, self.matched = ROOT, 0
        for token in text[start:]:
            self.state, self.matched = automaton.advance(self.state, self.matched, token)
        self._read, self._size = len(text), len(automaton)


class OutputStore:
    """Outputs of requests that have ended.

    An output waits until `digest` has room for it, so that a long one does not hold up a step.

    Args:
        depth: longest string whose occurrences are counted, tokens.
        tokens: most tokens held, those that wait not counted.
        requests: most outputs held.
    """

    def __init__(self, *, depth: int, tokens: int, requests: int) -> None:
        self._depth, self._tokens, self._requests = depth, tokens // 2, requests // 2
        self.generations = [SuffixAutomaton(depth)]
        """The youngest first; at most two."""
        self._held = 0
        self._waiting: deque[array[int]] = deque()
        self._reading: array[int] | None = None
        self._read = 0

    @property
    def waiting(self) -> int:
        """Tokens that are not yet in an index."""
        rest = 0 if self._reading is None else len(self._reading) - self._read
        return rest + sum(len(output) for output in self._waiting)

    @property
    def held(self) -> int:
        """Tokens of all outputs, those that wait included."""
        rest = 0 if self._reading is None else len(self._reading) - self._read
        return sum(map(len, self.generations)) + rest + sum(map(len, self._waiting))

    def add(self, output: Sequence[int]) -> None:
        """Take in an output; of one longer than half the store, only the end."""
        kept = array("i", output[max(0, len(output) + 1 - self._tokens) :])
        if len(kept) and self._requests and self._tokens > 1:
            self._waiting.append(kept)
            while self.waiting > self._tokens and len(self._waiting) > 1:
                self._waiting.popleft()

    def digest(self, most: int) -> None:
        """Index at most `most` of the tokens that wait, in the order in which they came."""
        while most > 0 and (self._reading is not None or self._waiting):
            if self._reading is None:
                self._open(self._waiting.popleft())
            assert self._reading is not None
            piece = self._reading[self._read : self._read + most]
            self.generations[0].extend(piece)
            self._read += len(piece)
            most -= len(piece)
            if self._read == len(self._reading):
                self.generations[0].extend((SEPARATOR,))
                self._reading = None

    def memory_bytes(self) -> int:
        """Bytes of all indices."""
        return sum(generation.memory_bytes() for generation in self.generations)

    def _open(self, output: array[int]) -> None:
        """Begin to read an output, in a new generation where the young one has no room for it."""
        if self._held == self._requests or len(self.generations[0]) + len(output) + 1 > self._tokens:
            self.generations = [SuffixAutomaton(self._depth), self.generations[0]]
            self._held = 0
        self._held += 1
        self._reading, self._read = output, 0
