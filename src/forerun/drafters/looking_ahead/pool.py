"""The n-grams that a request has come across, by their first token; the least recently seen are forgotten.

Knows no model and no window.
"""

from __future__ import annotations

Gram = tuple[int, ...]


class Pool:
    """At most `per_key` continuations of each of at most `keys` tokens.

    Both bounds forget what was added longest ago; adding a continuation again makes it new again.
    """

    def __init__(self, per_key: int, keys: int) -> None:
        self._per_key, self._keys = per_key, keys
        self._grams: dict[int, dict[Gram, None]] = {}

    def __len__(self) -> int:
        return sum(len(grams) for grams in self._grams.values())

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
        """The continuations of `first`, the most recent first."""
        return list(reversed(self._grams.get(first, {})))
