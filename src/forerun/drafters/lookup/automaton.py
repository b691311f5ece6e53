"""A suffix automaton over a growing text: every string that occurs in it, how often, and what followed. Blumer et al.
1985, as in SAM-Decoding (arXiv 2411.10666), with the occurrence counts of SuffixDecoding (arXiv 2411.04975)."""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

SEPARATOR = -1  # Stands between two texts in one automaton; never drafted, never matched
ROOT = 0  # The state of the empty string
NONE = -1
_WIDTH = 1 << 32  # More than there are token ids: (state, token) as one number
_ROOM = 16  # Room is made for so many states at once, or for one to every so many that there are
_INT_BYTES = 60  # Two boxed numbers: key and value of one entry of the dictionary of transitions


class SuffixAutomaton:
    """All substrings of a text, one state for those that end at the same positions.

    A token is appended in amortised O(1), and counted in O(`depth`) at worst: how often a string occurs is known for
    strings of at most `depth` >= 2 tokens. Flat arrays of 32 bits hold the states; the token of a state's transition
    along its first occurrence is read from the text, so that only branchings need an entry in a dictionary. Measured on
    source code: about 110 bytes per token; at most about 450.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.tokens = array("i")  # The text
        self._states = 0  # How many there are; the arrays that follow are longer
        self._length = array("i")  # Of each state: tokens of its longest string
        self._link = array("i")  # State of the longest suffix that occurs at more positions
        self._end = array("i")  # How many tokens of the text end with the first occurrence
        self._count = array("i")  # Occurrences; right where the state's shortest string has at most `depth` tokens
        self._first = array("i")  # Target of the transition that the first occurrence takes
        self._best = array("i")  # Of the most frequent transition, the most recent of equals; else of the first one
        self._edges = array("i")  # First entry of the list of further transitions
        self._targets = array("i")
        self._next = array("i")  # Of each further transition: its target, and the next in its state's list
        self._index: dict[int, int] = {}  # (state, token) to further transition
        self._link[self._new(0, 0)] = NONE
        self._last = ROOT
        self._deep, self._deep_length = ROOT, 0  # State of the text's last `depth` tokens, and how many these are

    def __len__(self) -> int:
        return len(self.tokens)

    def step(self, state: int, token: int) -> int:
        """The state after `token`, NONE where the text does not go on like this."""
        end = self._end[state]
        if end < len(self.tokens) and self.tokens[end] == token:
            return self._first[state]
        edge = self._index.get(state * _WIDTH + token)
        return NONE if edge is None else self._targets[edge]

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """From the longest match of one text in this one to that of the text and `token`: its state and length."""
        following = self.step(state, token)
        while following == NONE and state != ROOT:
            state = self._link[state]
            matched = self._length[state]
            following = self.step(state, token)
        return (ROOT, 0) if following == NONE else (following, matched + 1)

    def repeated(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that occurs in it before its end too."""
        state = max(self._link[self._last], ROOT)
        return state, self._length[state]

    def shorter(self, state: int) -> tuple[int, int]:
        """State and length of the longest suffix of the state's strings that occurs at more positions."""
        state = self._link[state]
        return state, self._length[state]

    def suffixes(self) -> set[int]:
        """The states that hold the text's end: each has one occurrence that is not followed by anything."""
        found, state = {ROOT}, self._deep
        while state != ROOT:
            found.add(state)
            state = self._link[state]
        return found

    def token(self, state: int) -> int:
        """The last token of the state's strings."""
        return self.tokens[self._end[state] - 1]

    def place(self, state: int) -> int:
        """Index in the text behind the first occurrence of the state's strings."""
        return self._end[state]

    def count(self, state: int) -> int:
        """How often the state's strings of at most `depth` tokens occur; of the root, the text's length."""
        return self._count[state]

    def counted(self, state: int) -> bool:
        """Whether it is known how often the state's strings go on with each token."""
        return state == ROOT or self._length[self._link[state]] + 2 <= self.depth

    def likeliest(self, state: int) -> int:
        """The state after the most frequent next token, the most recent of equals; NONE where nothing follows. Where
        the state is not `counted`: after the next token of its first occurrence."""
        return self._best[state]

    def following(self, state: int, most: int) -> list[int]:
        """The states after at most `most` next tokens, those that occurred first and those that came up last."""
        found = [] if self._first[state] == NONE else [self._first[state]]
        edge = self._edges[state]
        while edge != NONE and len(found) < most:
            found.append(self._targets[edge])
            edge = self._next[edge]
        return [target for target in found if self.token(target) != SEPARATOR]

    def memory_bytes(self) -> int:
        """Bytes of arrays and dictionary."""
        arrays = (self.tokens, self._length, self._link, self._end, self._count, self._first, self._best, self._edges)
        held = sum(sys.getsizeof(values) for values in (*arrays, self._targets, self._next))
        return held + sys.getsizeof(self._index) + _INT_BYTES * len(self._index)

    def _new(self, length: int, end: int) -> int:
        """A state without transitions; its link is the root."""
        state = self._states
        if state == len(self._length):
            more = _ROOM + state // _ROOM
            for values in (self._length, self._end, self._link, self._count):
                values.extend(array("i", [0]) * more)
            for values in (self._first, self._best, self._edges):
                values.extend(array("i", [NONE]) * more)
        self._states = state + 1
        self._length[state], self._end[state] = length, end
        return state

    def _add_edge(self, state: int, token: int, target: int) -> None:
        self._index[state * _WIDTH + token] = len(self._targets)
        self._targets.append(target)
        self._next.append(self._edges[state])
        self._edges[state] = len(self._targets) - 1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.tokens.append(token)
            made = self._new(len(self.tokens), len(self.tokens))
            self._first[self._last] = made
            if token != SEPARATOR:
                self._best[self._last] = made
            state = self._link[self._last]
            while state != NONE:
                target = self.step(state, token)
                if target != NONE:
                    if self._length[target] != self._length[state] + 1:
                        target = self._split(state, target, token)
                    self._link[made] = target
                    break
                self._add_edge(state, token, made)
                state = self._link[state]
            self._last = made
            self._tally(token)

    def _split(self, state: int, target: int, token: int) -> int:
        """A state of its own for those strings of `target` that are suffixes of the text: these occur once more."""
        twin = self._new(self._length[state] + 1, self._end[target])
        for values in (self._link, self._count, self._first, self._best):
            values[twin] = values[target]
        edge = self._edges[target]
        while edge != NONE:
            self._add_edge(twin, self.token(self._targets[edge]), self._targets[edge])
            edge = self._next[edge]
        self._link[target] = twin
        if self._deep == target and self._deep_length <= self._length[twin]:
            self._deep = twin
        while state != NONE and self.step(state, token) == target:
            if self.tokens[self._end[state]] == token:
                self._first[state] = twin
            else:
                self._targets[self._index[state * _WIDTH + token]] = twin
            if self._best[state] == target:
                self._best[state] = twin
            state = self._link[state]
        return twin

    def _tally(self, token: int) -> None:
        """Count the strings that end with the new token, and keep `_best` right for what stood before it."""
        link, length, count = self._link, self._length, self._count
        before, after = self._deep, self.step(self._deep, token)
        if self._deep_length < self.depth:
            self._deep_length += 1
        elif length[link[after]] >= self.depth:
            after = link[after]
        self._deep = state = after
        while state != ROOT:
            count[state] += 1
            state = link[state]
        count[ROOT] += 1
        if token != SEPARATOR:
            self._elect(before if self.counted(before) else link[before], after)

    def _elect(self, before: int, after: int) -> None:
        """For each suffix that stood before the new token: does it now follow most often? `before` and `after` are the
        states of the longest such suffix whose continuations are counted, and that ends with the token."""
        link, length, count, best = self._link, self._length, self._count, self._best
        while before != NONE:
            size = length[link[before]] + 2 if before != ROOT else 1
            while length[link[after]] >= size:
                after = link[after]
            known = best[before]
            if known == NONE or count[after] >= count[known]:
                best[before] = after
            before = link[before]


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
    """Outputs of requests that have ended, in one index of at most so many `tokens` and `requests`. SuffixDecoding's
    global tree (arXiv 2411.04975) as two generations of automata: new outputs enter the younger; when that is full, the
    older one is dropped and the younger takes its place. An output waits until `digest` has room for it, so that a long
    one does not hold up a step."""

    def __init__(self, *, depth: int, tokens: int, requests: int) -> None:
        self._depth, self._tokens, self._requests = depth, tokens // 2, requests // 2
        self.generations = [SuffixAutomaton(depth)]  # The youngest first; at most two
        self._held = 0  # Outputs in the younger one
        self._waiting: deque[array[int]] = deque()
        self._begun = False  # The first of these is partly read

    @property
    def waiting(self) -> int:
        """Tokens that are not yet in an index."""
        return sum(map(len, self._waiting))

    @property
    def held(self) -> int:
        """Tokens of all outputs, those that wait included."""
        return sum(map(len, self.generations)) + self.waiting

    def add(self, output: Sequence[int]) -> None:
        """Take in an output; of one longer than half the store, only the end."""
        kept = array("i", output[max(0, len(output) + 1 - self._tokens) :])
        if len(kept) and self._requests and self._tokens > 1:
            self._waiting.append(kept)
            while self.waiting > self._tokens and len(self._waiting) > 1 + self._begun:
                del self._waiting[int(self._begun)]

    def digest(self, most: int) -> None:
        """Index at most `most` of the tokens that wait, in the order in which they came."""
        while most > 0 and self._waiting:
            output = self._waiting[0]
            if not self._begun:
                if self._held == self._requests or len(self.generations[0]) + len(output) + 1 > self._tokens:
                    self.generations, self._held = [SuffixAutomaton(self._depth), self.generations[0]], 0
                self._held, self._begun = self._held + 1, True
            piece = output[:most]
            self.generations[0].extend(piece)
            del output[:most]
            most -= len(piece)
            if not output:
                self.generations[0].extend((SEPARATOR,))
                self._waiting.popleft()
                self._begun = False

    def memory_bytes(self) -> int:
        return sum(generation.memory_bytes() for generation in self.generations)
