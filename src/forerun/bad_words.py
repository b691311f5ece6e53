"""Token sequences that may not be produced: which tokens would end one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence


class BadWords:
    """Words by the token before their last: a place in a text looks only at those that may end there.

    Args:
        words: token ids, none of them empty.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._always = [word[0] for word in words if len(word) == 1]
        self._after = defaultdict[int, list[tuple[int, ...]]](list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append(word)

    def ends(self, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        """The tokens that would end a word behind a prompt and an output."""
        found = list(self._always)
        for word in self._after.get((output or prompt or (-1,))[-1], ()):
            missing = max(len(word) - 1 - len(output), 0)
            tail = (*prompt[max(len(prompt) - missing, 0) :], *output[len(output) - len(word) + 1 + missing :])
            if tail == word[:-1]:
                found.append(word[-1])
        return found
