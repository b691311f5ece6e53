"""The one door between an engine and a drafter. What a drafter does wrong costs it its drafts, never anybody an answer.

Engine, step, controller and drafters made of drafters ask a drafter through here and nowhere else. A row that a drafter
has failed, in whatever it was asked for, is closed to it: what it holds of the row is unknown from then on. It is shown
nothing of it, and its drafts for it are empty, until the row is free and begins anew.

Not held off: a drafter that runs for ever, and one that writes into the target's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from forerun import tree as trees
from forerun.drafters import build
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, warn_drafter
from forerun.drafters.checking import check
from forerun.errors import of_the_process
from forerun.sampling import Sampler
from forerun.target.capture import check_signals
from forerun.types import Budget, Draft, DraftKind, Signal, Verdict, empty_draft

if TYPE_CHECKING:
    from forerun.step import Scores

T = TypeVar("T")


class Guarded(Drafter):
    """A drafter that does not raise, drafts nothing that it may not, and counts when the one inside tried.

    Args:
        drafter: what is inside. What it says of itself (`depth`, `requires`, `watches`, `remembers`) is asked once.
        method: its name in messages.
        setup: what it was built from.
    """

    name = "guarded"

    def __init__(self, drafter: Drafter, method: str, setup: DrafterSetup) -> None:
        self.drafter, self.method = drafter, method
        self.failed = False
        """It failed since this was last set to False."""
        self._target, self._failures = setup.target, setup.failures
        self._closed = set[int]()
        self._useless = False
        """It cannot say what it needs: it is asked for nothing."""
        self._owed = 0
        """Failures that belong to no row; the next one that it is asked for counts them."""
        self._depth = self._told("depth", _depth, None)
        self._requires = self._told("requires", self._signals, frozenset[Signal]())
        self._watches = self._told("watches", _flag, otherwise=False)
        self._remembers = self._told("remembers", _flag, otherwise=False)

    @classmethod
    def built(cls, method: str, options: Mapping[str, Any], setup: DrafterSetup) -> Guarded:
        """A registered drafter with these options; errors as `forerun.drafters.build`."""
        return cls(build(method, options, setup), method, setup)

    @property
    def depth(self) -> int | None:
        return self._depth

    @property
    def requires(self) -> frozenset[Signal]:
        return self._requires

    @property
    def watches(self) -> bool:
        return self._watches

    @property
    def remembers(self) -> bool:
        return self._remembers

    def extend(self, context: DraftContext) -> None:
        """Show it committed tokens, with the signals that it reads and no others. A closed row may begin anew."""
        for row, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            if row in self._closed and fresh >= len(tokens):
                self.truncate([row], [0])  # which failed when the row became free, or was not asked for
        if places := self._open(context):
            part = self._seen(context, places)
            with self._guarding(part.rows, "to read committed tokens"):
                self.drafter.extend(part)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        """Its trees, as far as they are sound; empty ones for all other rows."""
        batch, places = len(context.rows), self._open(context)
        if not places:
            return empty_draft(batch)
        limits = Budget(
            nodes=tuple([budget.nodes[place] for place in places]),
            depth=tuple([budget.depth[place] for place in places]),
        )
        part = self._seen(context, places)
        with self._guarding(part.rows, "to propose"):
            draft = self.drafter.propose(part, limits)
            checked = check(draft, limits, self._target)
            for row, error in part.failures.items():
                self._fail([row], "to propose", error)
            for place, fault in checked.faults.items():
                self._fail([part.rows[place]], "to propose", fault.error)
            return trees.gather([(places, checked.sound(draft))], batch)
        return empty_draft(batch)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        if places := self._open(context):
            part = self._seen(context, places)
            with self._guarding(part.rows, "to learn from a step"):
                self.drafter.observe(part, [verdicts[place] for place in places], scores.of(places))

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows shrink; those that become free are open to it again."""
        asked = {row: n for row, n in zip(rows, lengths, strict=True) if n == 0 or row not in self._closed}
        with self._guarding(list(asked), "to forget"):
            if asked and not self._useless:
                self.drafter.truncate(list(asked), list(asked.values()))
            self._closed.difference_update(row for row, length in asked.items() if length == 0)

    def memory_bytes(self) -> int:
        """What it says; 0 where that is no number of bytes."""
        return self._asked("memory_bytes()", self.drafter.memory_bytes, _bytes, 0)

    def kind(self, sampler: Sampler) -> DraftKind:
        """What it says; what is safe for any drafter where that is no `DraftKind`."""
        return self._asked("kind()", partial(self.drafter.kind, sampler), _kind, DraftKind())

    # --- the door ---------------------------------------------------------------------------------------------------

    def _open(self, context: DraftContext) -> list[int]:
        """Places of the context's rows that are not closed to it."""
        places = [place for place, row in enumerate(context.rows) if row not in self._closed]
        if places and self._owed:
            self._failures.add([context.rows[places[0]]] * self._owed)
            self._owed = 0
        if places and self._useless:
            self._close([context.rows[place] for place in places])
            return []
        return places

    def _seen(self, context: DraftContext, places: Sequence[int]) -> DraftContext:
        part = context.of(places)
        signals = {signal: part.signals[signal] for signal in self._requires if signal in part.signals}
        return replace(part, signals=signals, failures={})

    @contextmanager
    def _guarding(self, rows: Sequence[int], task: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if of_the_process(error):
                raise
            self._fail(rows, task, error)

    def _fail(self, rows: Sequence[int], task: str, error: BaseException) -> None:
        warn_drafter(self.method, task, repr(error))
        self._close(rows)

    def _asked(self, name: str, ask: Callable[[], Any], read: Callable[[Any], T], otherwise: T) -> T:
        """What it says when it is asked; a failure belongs to no row."""
        try:
            return read(ask())
        except BaseException as error:
            if of_the_process(error):
                raise
            warn_drafter(self.method, f"to answer {name}", repr(error))
            self._owed += 1
            return otherwise

    def _close(self, rows: Sequence[int]) -> None:
        self.failed = True
        self._closed.update(rows)
        self._failures.add(rows)

    def _told(self, name: str, read: Callable[[Any], T], otherwise: T) -> T:
        """What it says of itself. Where that is nonsense nobody knows what to show it, and it is asked for nothing."""
        before = self._owed
        told = self._asked(name, lambda: getattr(self.drafter, name), read, otherwise)
        self._useless = self._useless or self._owed > before
        return told

    def _signals(self, told: Any) -> frozenset[Signal]:
        signals = frozenset[Signal](told)
        if signals:
            check_signals(signals, self._target.num_layers)
        return signals


def _flag(told: Any) -> bool:
    if not isinstance(told, bool):
        raise TypeError(f"expected True or False, got {told!r}")
    return told


def _depth(told: Any) -> int | None:
    if told is not None and (not isinstance(told, int) or told < 1):
        raise TypeError(f"expected a number of tokens or None, got {told!r}")
    return told


def _bytes(told: Any) -> int:
    if not isinstance(told, int) or told < 0:
        raise TypeError(f"expected a number of bytes, got {told!r}")
    return told


def _kind(told: Any) -> DraftKind:
    if not isinstance(told, DraftKind):
        raise TypeError(f"expected a DraftKind, got {told!r}")
    return told
