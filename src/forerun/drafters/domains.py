"""What a drafter learns from text, kept apart by isolation domain (cache salt).

A draft shows what its drafter has read: through a trace, through the number of accepted tokens, through time. So
everything that is learned from text, counts included, is one of these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_DOMAINS = 256  # Domains that a drafter remembers; a request with a salt of its own makes one


class PerDomain(Generic[T]):
    """One memory for each isolation domain, from `make`, and at most `most`: the least recently used is forgotten. All
    together have at most `most_size` by `size`, but the last one used stays whatever its size."""

    def __init__(
        self,
        make: Callable[[], T],
        *,
        most: int = MOST_DOMAINS,
        size: Callable[[T], int] = lambda _: 0,
        most_size: int = 0,
    ) -> None:
        self._make, self._most, self._size, self._most_size = make, most, size, most_size
        self._kept = OrderedDict[str | None, T]()

    def of(self, salt: str | None) -> T:
        """The memory of a domain, which is now the last one used."""
        if salt in self._kept:
            self._kept.move_to_end(salt)
        else:
            self._kept[salt] = self._make()
            self.trim()
        return self._kept[salt]

    def trim(self) -> None:
        """Forget what is too much. For whoever made a memory grow; a new one is seen to by `of`."""
        kept = self._kept
        while len(kept) > 1 and (len(kept) > self._most or sum(map(self._size, kept.values())) > self._most_size):
            kept.popitem(last=False)

    def all(self) -> Iterable[T]:
        return self._kept.values()

    def __len__(self) -> int:
        return len(self._kept)
