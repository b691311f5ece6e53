"""The prefix cache keeps the content of free rows; a prompt that begins alike is prefilled only from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.model import Target
from forerun.model.recordings import FREE, bucket

BLOCK = 16
"""Tokens of a block, as in vLLM. Prompts share prefixes in whole blocks only: otherwise the latency of a prompt would
reveal, token by token, how much of another request's prompt a guess has right.
"""
_FEW = FREE // 8  # A recorded pass over a few tokens of each row runs at least this many rows
CachedText = tuple[Sequence[int], str | None]  # The content of a row's slots, and its isolation domain


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """A row of the cache for a sequence."""

    row: int
    shared: int  # Tokens that the row holds already
    drafter: str | None  # Key of the drafter that still has a state for the row
    known: int = 0
    """Number of tokens that the drafter may keep: one more than are shared, because the hidden state of the last shared
    token is gone, and the token after it is the next one to be run.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class _FreeRow:
    tokens: Sequence[int] = ()
    salt: str | None = None
    drafter: str | None = None
    writes: int = 0
    """`Target.writes` of the row when it became free. If a pass has written to it since, for a measurement, its content
    is lost.
    """
    used: int = 0  # Counter value when it became free, for least recently used


class PrefixCache:
    """The free rows of a target and their content. A prompt that begins with a row's content is prefilled only from the
    end of the common prefix on.
    """

    def __init__(self, target: Target, *, enabled: bool) -> None:
        self._target, self.enabled = target, enabled
        self._free = {row: _FreeRow() for row in range(target.rows)}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Tokens kept in free rows."""
        return sum(len(free.tokens) for free in self._free.values())

    def release(self, row: int, held: CachedText, drafter: str | None) -> None:
        """Free a row. Its content stays in the slots, with the state that `drafter` has of it, if one is given."""
        self._clock += 1
        self._target.truncate([row], [0])
        self._free[row] = _FreeRow(
            tokens=list(held[0]), salt=held[1], drafter=drafter, writes=self._target.writes[row], used=self._clock
        )

    def disown(self, drafter: str) -> list[int]:
        """Return the free rows of which a drafter keeps a state, and forget that it does; the tokens stay."""
        rows = [row for row, free in self._free.items() if free.drafter == drafter]
        self._free |= {row: replace(self._free[row], drafter=None) for row in rows}
        return rows

    def drop(self, most: int) -> list[tuple[int, str]]:
        """Keep at most `most` tokens, those used most recently. Return the rows that were emptied and whose drafter has
        a state to drop, with the drafter's key.
        """
        forgotten = []
        for row, free in sorted(self._free.items(), key=lambda entry: entry[1].used):
            if self.held <= most:
                break
            self._free[row] = _FreeRow(used=free.used)
            if free.drafter is not None:
                forgotten.append((row, free.drafter))
        return forgotten

    def acquire(
        self,
        tokens: Sequence[int],
        running: Mapping[int, CachedText],
        *,
        salt: str | None = None,
        drafter: str | None = None,
        needs_drafter: bool = False,
    ) -> Allocation:
        """Allocate the free row with the longest prefix of the tokens. If a running row has a longer one, that
        is copied to a free row. Without any prefix, it is the row that keeps the busy rows adjacent (the cache reads
        adjacent rows without a copy), and of several such rows the one used least recently.

        Args:
            tokens: of the sequence; at least one of them has to be run.
            running: content of the busy rows.
            salt: isolation domain; rows of another domain are not reused.
            drafter: key of the drafter that will draft for the row.
            needs_drafter: the drafter reads hidden states, so a prefix is useless without the drafter's own state of
                it.
        """
        row, length = self._find_free(tokens, salt, drafter if needs_drafter else None)
        source, copied = -1, 0
        if self.enabled and not needs_drafter:
            source, copied = self._find_running(tokens, running, salt)
        if length < max(1, copied):
            row = min(self._free, key=lambda row: (*self._row_span((*running, row)), self._free[row].used, row))
            length = 0
        free = self._free.pop(row)
        self._target.restore(row, length)  # Its slots still hold the tokens, see `_FreeRow.writes`
        self._target.clear(row)
        if copied > length:
            self._target.copy_row(source, row, copied)
            return Allocation(row=row, shared=copied, drafter=free.drafter)
        known = length + 1 if length and free.drafter == drafter else 0
        return Allocation(row=row, shared=length, drafter=free.drafter, known=known)

    def _find_free(self, wanted: Sequence[int], salt: str | None, drafter: str | None) -> tuple[int, int]:
        """Return the free row with the longest reusable prefix, and that prefix's length; only of rows with a state of
        `drafter`, if it is not None.
        """
        shared = dict[int, int]()
        for row, free in self._free.items():
            lost = free.writes != self._target.writes[row] or (drafter is not None and free.drafter != drafter)
            shared[row] = 0 if lost or free.salt != salt else self._reusable(row, free.tokens, wanted)
        best = max(shared, key=lambda row: shared[row])
        return best, shared[best]

    def _find_running(
        self, wanted: Sequence[int], running: Mapping[int, CachedText], salt: str | None
    ) -> tuple[int, int]:
        """Return the busy row with the longest reusable prefix, and that prefix's length; (-1, 0) if there is none."""
        shared = {
            row: self._reusable(row, tokens, wanted) for row, (tokens, domain) in running.items() if domain == salt
        }
        source = max(shared, key=lambda row: shared[row], default=-1)
        return source, shared.get(source, 0)

    def _reusable(self, row: int, held: Sequence[int], wanted: Sequence[int]) -> int:
        """Return how many of the wanted tokens a sequence can reuse from a row that holds, or held, the tokens
        `held`.
        """
        return self._target.reusable(row, _common(held, wanted))

    def _row_span(self, rows: Sequence[int]) -> tuple[int, int]:
        """Return the distance between the first and the last busy row, and, where passes are recorded, the number of
        rows that these run: all up to the last busy one, rounded up to a power of two and at least `_FEW`.
        """
        return max(rows) - min(rows), max(_FEW, bucket(max(rows) + 1)) if self._target.records else 0


def _common(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Return the length of the common prefix, in tokens, rounded down to whole blocks. The last common token is
    excluded, because it has to be run again.
    """
    pairs = enumerate(zip(held, wanted, strict=False))
    length = next((index for index, (left, right) in pairs if left != right), min(len(held), len(wanted)))
    return max(0, length - 1) // BLOCK * BLOCK
