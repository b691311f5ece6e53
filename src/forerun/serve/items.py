"""An answer's items (texts, reasoning, calls) as events, for APIs that open and close each of them. Knows no API."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forerun.serve.tools.incoming import Kind, Piece

Event = dict[str, Any]


class ItemWriter(ABC):
    """Puts pieces of an answer together to items, one after the other.

    Args:
        new_call_id: makes an id for a call.
    """

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.new_call_id = new_call_id
        self.done: list[dict[str, Any]] = []
        """Items that are closed."""
        self.kind: Kind | None = None
        """Of the open item; None where none is open."""
        self.item: dict[str, Any] = {}
        """The open item."""
        self.text = ""
        """What there is of its text, or of a call's arguments."""

    def add(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        """Events for these pieces."""
        for piece in pieces:
            if piece.kind is Kind.CALL:
                yield from self._begin(Kind.ARGUMENTS, piece.text)
                continue
            if piece.kind is not self.kind:
                yield from self._begin(piece.kind, "")
            self.text += piece.text
            yield self.delta(piece)

    def close(self) -> Iterator[Event]:
        """Events that end the open item, if there is one."""
        if self.kind is not None:
            yield from self.closing(self.kind)
            self.done.append(self.item)
            self.kind = None

    def _begin(self, kind: Kind, name: str) -> Iterator[Event]:
        yield from self.close()
        self.kind, self.text = kind, ""
        yield from self.opening(kind, name)

    @abstractmethod
    def opening(self, kind: Kind, name: str) -> Iterator[Event]:
        """Make the `item` of that kind, and the events that open it; `name`: of the function, where it is a call."""

    @abstractmethod
    def delta(self, piece: Piece) -> Event:
        """The event for more of the open item's text."""

    @abstractmethod
    def closing(self, kind: Kind) -> Iterator[Event]:
        """Complete the `item`, and the events that close it."""
