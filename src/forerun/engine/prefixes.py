"""Free rows, and what still stands in their slots: a prompt that begins with it need not read that part again.

Knows the target's rows; does not know requests, nor what a drafter is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.target import Target

BLOCK = 16
"""Tokens, vLLM's size. Beginnings are shared in whole blocks: the time of a prompt would else tell, token by token, how
far a guess at another one is right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A free row."""

    tokens: Sequence[int] = ()
    """What its slots hold."""
    salt: str | None = None
    """Isolation domain of what its slots hold."""
    drafter: str | None = None
    """Key of the drafter that has not forgotten the row."""
    writes: int = 0
    """`Target.writes` when the row became free: a pass that has written to it since, to measure, made it worthless."""
    used: int = 0
    """Rises with every row that becomes free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What is to be read, and what may serve it."""

    tokens: Sequence[int]
    salt: str | None = None
    """Isolation domain: what rows of another hold is as good as unknown."""
    drafter: str | None = None
    """Key of the drafter that will work for the row."""
    needs_drafter: bool = False
    """Without the drafter's own state of the prefix, the target's is of no use: it reads hidden states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A row for an answer."""

    row: int
    shared: int = 0
    """Tokens that the row holds already."""
    drafter: str | None = None
    """Key of the drafter that has not forgotten the row."""
    known: int = 0
    """Of these tokens that drafter may keep so many: one more than are shared, for the hidden state of the last shared
    token is gone, and the token behind it is the next that is run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """A row that is in use."""

    tokens: Sequence[int]
    """What its slots hold."""
    salt: str | None = None
    """Isolation domain of that."""


class Prefixes:
    """The free rows of a target."""

    def __init__(self, target: Target, *, enabled: bool) -> None:
        self._target, self.enabled = target, enabled
        self._free = {row: _Kept() for row in range(target.rows)}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Tokens kept in free rows."""
        return sum(len(kept.tokens) for kept in self._free.values())

    def release(self, row: int, held: Busy, drafter: str | None) -> None:
        """A row becomes free; its slots hold what they held, and so does the state of `drafter`, where one is named."""
        self._clock += 1
        self._target.truncate([row], [0])
        writes = self._target.writes[row]
        self._free[row] = _Kept(
            tokens=list(held.tokens), salt=held.salt, drafter=drafter, writes=writes, used=self._clock
        )

    def drop(self, most: int) -> list[tuple[int, str]]:
        """Keep at most so many tokens, those used last. Returns the rows to be forgotten, with their drafters' keys."""
        forgotten = []
        for row, kept in sorted(self._free.items(), key=lambda entry: entry[1].used):
            if self.held <= most:
                break
            self._free[row] = _Kept(used=kept.used)
            if kept.drafter is not None:
                forgotten.append((row, kept.drafter))
        return forgotten

    def seat(self, wish: Wish, running: Mapping[int, Busy]) -> Seat:
        """Take a row: the one that holds most of the wanted text or, if a running row holds more, a copy of that.

        Without either, the row that keeps the busy ones side by side (the cache reads neighbours without a copy), and
        of several such rows the one that was used least recently.

        Args:
            wish: at least one token of it is left to be read.
            running: what the busy rows hold.
        """
        shared = {row: self._shared(row, wish) for row in self._free}
        best = max(shared, key=lambda row: shared[row])
        lenders = {row: busy for row, busy in running.items() if busy.salt == wish.salt and not wish.needs_drafter}
        copied = {row: _common(busy.tokens, wish.tokens) for row, busy in lenders.items()}
        source = max(copied, key=lambda row: copied[row], default=None)
        if source is not None and self.enabled and copied[source] > shared[best]:
            seat = self._take(self._quiet(running), 0, wish)
            self._target.copy_row(source, seat.row, copied[source])
            return Seat(row=seat.row, shared=copied[source], drafter=seat.drafter)
        if shared[best]:
            return self._take(best, shared[best], wish)
        return self._take(self._quiet(running), 0, wish)

    def _shared(self, row: int, wish: Wish) -> int:
        kept = self._free[row]
        if kept.salt != wish.salt:
            return 0
        if kept.writes != self._target.writes[row] or (wish.needs_drafter and kept.drafter != wish.drafter):
            return 0
        return _common(kept.tokens, wish.tokens)

    def _take(self, row: int, shared: int, wish: Wish) -> Seat:
        kept = self._free.pop(row)
        self._target.lengths[row] = shared  # Its slots still hold them: see `_Kept.writes`.
        self._target.clear(row)
        known = shared + 1 if shared and kept.drafter == wish.drafter else 0
        return Seat(row=row, shared=shared, drafter=kept.drafter, known=known)

    def _quiet(self, busy: Mapping[int, object]) -> int:
        def place(row: int) -> tuple[int, int, int]:
            span = max((*busy, row)) - min((*busy, row))
            return span, self._free[row].used, row

        return min(self._free, key=place)


def _common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Whole blocks of the common beginning, in tokens; its last token is no part of them: its state is needed anew."""
    pairs = enumerate(zip(held, wanted, strict=False))
    length = next((place for place, (left, right) in pairs if left != right), min(len(held), len(wanted)))
    return max(0, length - 1) // BLOCK * BLOCK
