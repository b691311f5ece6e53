"""The one door between an engine and a drafter. What a drafter does wrong costs it its drafts, never anybody an answer.

Engine, step, policy and drafters made of drafters ask a drafter through here and nowhere else. A row that a drafter
has failed, in whatever it was asked for, is closed to it: what it holds of the row is unknown from then on. It is shown
nothing of it, and its drafts for it are empty, until the row is free and begins anew.

Not held off: a drafter that runs for ever, and one that writes into the target's own cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun import tree as trees
from forerun.drafters import build
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup, warn_drafter
from forerun.errors import InvalidDraftError, of_the_process
from forerun.sampling import Sampler
from forerun.target.layers import check_signals
from forerun.tree import TreeBuilder, rebuild, stack
from forerun.types import Budget, Draft, DraftKind, DraftRow, Drawn, Signal, Verdict, empty_draft

if TYPE_CHECKING:
    from forerun.step import Scores
    from forerun.target import Target

# What a draft must be before anybody works with it: of the right form as a whole, and sound row by row.
#
# Knows drafts, budgets and the sizes of a model. Knows no drafter.


_ROUNDING = 1e-4
"""By how much a confidence, a quotient of probabilities in float32, may exceed 1."""
_KINDS = frozenset(int(kind) for kind in Drawn)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What is wrong with one row's tree."""

    error: InvalidDraftError
    kept: Sequence[int] = ()
    """Nodes that may be submitted all the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What became of a draft."""

    faults: Mapping[int, Fault]
    """By row."""
    clean: bool
    """Whether the padding may go through a pass as it is."""

    def sound(self, draft: Draft) -> Draft:
        """What of the draft may be submitted."""
        if self.clean and not self.faults:
            return draft
        builders = [TreeBuilder() for _ in draft.counts]
        for row, fault in enumerate(map(self.faults.get, range(len(builders)))):
            if fault is None:
                builders[row] = rebuild(draft, row, widen=False)
            elif fault.kept:
                builders[row] = rebuild(draft, row, widen=False).only(fault.kept)
                builders[row].confidence = [one if _likely(one) else 0.0 for one in builders[row].confidence]
        return stack(builders, law_ids=draft.law_ids)


def check(draft: Draft, budget: Budget, target: Target) -> Checked:
    """Look at a draft of a drafter that was given `budget`: every row's nodes, their number, their depth, their laws.

    Of a tree that is too large the nodes that were drawn first are kept, as many as fit and no deeper than allowed:
    neither what a node holds decides whether it is among them, nor what was drawn after it. To leave out the whole tree
    for what was drawn last would bias sampled ones.

    Raises:
        InvalidDraftError: the draft as a whole cannot be read: not a `Draft`, shapes, types, laws or states that fit
            neither each other nor the target.
    """
    _check_form(draft, len(budget.nodes))
    _check_laws(draft, target.vocab_size)
    _check_resume(draft, target)
    if draft.tokens.device.type == "cpu":
        vars(draft).pop("rows", None)  # the tensors count: that is what is scored. Elsewhere this read would be a wait
    limits = zip(draft.rows, budget.nodes, budget.depth, strict=True)
    faults = {row: _fault(nodes, target.vocab_size, most, deepest) for row, (nodes, most, deepest) in enumerate(limits)}
    return Checked(
        faults={row: fault for row, fault in faults.items() if fault is not None},
        clean=draft.size <= max(budget.nodes, default=0) and _clean(draft, target.vocab_size),
    )


def _check_form(draft: Draft, batch: int) -> None:
    if not isinstance(draft, Draft):
        raise InvalidDraftError(f"a drafter proposes a Draft, got {type(draft).__name__}; see tree.stack")
    shape = (batch, draft.size) if draft.tokens.ndim == 2 else (batch, "K")
    expected: list[tuple[str, Tensor | None, tuple[object, ...], torch.dtype]] = [
        ("counts", draft.counts, (batch,), torch.int64),
        ("tokens", draft.tokens, shape, torch.int64),
        ("parents", draft.parents, shape, torch.int64),
        ("drawn", draft.drawn, shape, torch.uint8),
        ("confidence", draft.confidence, shape, torch.float32),
        ("probes", draft.probes, shape, torch.bool),
    ]
    for name, values, wanted, dtype in expected:
        if values is not None and (tuple(values.shape) != wanted or values.dtype is not dtype):
            raise InvalidDraftError(
                f"{name} of a draft for {batch} rows must be {dtype} of the shape {wanted}, "
                f"got {values.dtype} of the shape {tuple(values.shape)}"
            )
    kinds = draft.drawn.tolist()
    for row, count in enumerate(draft.counts.tolist()):
        if not 0 <= count <= draft.size:
            raise InvalidDraftError(f"row {row}: count {count} is not in 0..{draft.size}")
        if not _KINDS.issuperset(kinds[row][:count]):
            raise InvalidDraftError(f"row {row}: a node was drawn in an unknown way, {kinds[row][:count]}; see Drawn")
        if draft.laws is None and any(kinds[row][:count]):
            raise InvalidDraftError(f"row {row}: a node was sampled, but the draft records no laws; set Draft.laws")


def _check_laws(draft: Draft, vocabulary: int) -> None:
    if draft.laws is None:
        return
    width = draft.laws.shape[-1]
    if draft.laws.shape[:-1] != (len(draft.counts), draft.size + 1) or not draft.laws.is_floating_point():
        expected = f"floats of the shape ({len(draft.counts)}, {draft.size + 1}, V)"
        raise InvalidDraftError(
            f"the laws are {draft.laws.dtype} of the shape {tuple(draft.laws.shape)}, expected {expected}: one per "
            "node, root first"
        )
    if draft.law_ids is None and width > vocabulary:
        raise InvalidDraftError(f"the laws are over {width} tokens, the target's vocabulary has {vocabulary}")
    if draft.law_ids is not None and (
        draft.law_ids.shape != (width,) or not 0 <= int(draft.law_ids.min()) <= int(draft.law_ids.max()) < vocabulary
    ):
        raise InvalidDraftError(
            f"law_ids must hold {width} target token ids below {vocabulary}, one per entry of the laws"
        )


def _check_resume(draft: Draft, target: Target) -> None:
    if draft.resume is None:
        return
    batch, states, boundary = len(draft.counts), draft.resume.states, draft.resume.boundary
    shape, sizes = tuple(states.shape), (batch, target.hidden_size)
    fits = len(shape) == 3 and (shape[0], shape[2]) == sizes and 1 <= shape[1] <= draft.size + 1
    if not fits or not 1 <= boundary <= target.num_layers or states.dtype is not target.dtype:
        raise InvalidDraftError(
            f"the draft resumes {states.dtype} states of the shape {shape} at boundary {boundary}, expected "
            f"{target.dtype} of ({batch}, 1..{draft.size + 1}, {target.hidden_size}), root first, at a boundary of "
            f"1..{target.num_layers}"
        )
    counts, stamps = draft.resume.counts, draft.resume.stamps
    if len(counts) != batch or len(stamps) != batch or not all(0 <= count <= shape[1] for count in counts):
        raise InvalidDraftError(
            f"the draft resumes {list(counts)} nodes with the stamps {list(stamps)}, expected {batch} of each, one per "
            f"row, and at most the {shape[1]} nodes that have states"
        )


def _fault(nodes: DraftRow, vocabulary: int, most: int, deepest: int) -> Fault | None:
    """What is wrong with one row's tree; None for nothing."""
    depths = [0]
    for node, parent in enumerate(nodes.parents, start=1):
        if not 0 <= parent < node:
            expected = f"a parent comes before its child (0..{node - 1}), 0 is the root"
            return Fault(error=InvalidDraftError(f"node {node} has parent {parent}; {expected}"))
        depths.append(depths[parent] + 1)
    if any(probe and kind is not Drawn.DETERMINISTIC for kind, probe in zip(nodes.drawn, nodes.probes, strict=True)):
        error = InvalidDraftError("a node was sampled and is a probe; nodes that are never accepted are deterministic")
        return Fault(error=error)
    for node, token in enumerate(nodes.tokens, start=1):
        if not 0 <= token < vocabulary:
            error = InvalidDraftError(f"node {node} holds token {token}, outside the vocabulary of {vocabulary}")
            return Fault(error=error)
    kept = [node for node, depth in enumerate(depths[: most + 1]) if 0 < depth <= deepest]
    if len(kept) < len(nodes.tokens):
        asked = f"{most} nodes and {deepest} tokens on a path"
        error = InvalidDraftError(f"{len(nodes.tokens)} nodes, {max(depths)} deep, exceed the budget of {asked}")
        return Fault(error=error, kept=kept)
    for node, confidence in enumerate(nodes.confidence, start=1):
        if not _likely(confidence):
            error = InvalidDraftError(f"node {node} has confidence {confidence}; a probability is from 0 to 1")
            return Fault(error=error, kept=kept)
    return None


def _likely(confidence: float) -> bool:
    return 0 <= confidence <= 1 + _ROUNDING


def _clean(draft: Draft, vocabulary: int) -> bool:
    """Whether nodes beyond a row's count, too, hold tokens of the vocabulary and parents that precede them."""
    if draft.tokens.device.type != "cpu" or all(len(row.tokens) == draft.size for row in draft.rows):
        return True
    tokens, parents = draft.tokens.numpy(), draft.parents.numpy()
    inside = tokens.min() >= 0 and tokens.max() < vocabulary
    return bool(inside and parents.min() >= 0 and (parents <= np.arange(draft.size)).all())


T = TypeVar("T")


class Guarded(Drafter):
    """A drafter that does not raise, drafts nothing that it may not, and counts when the one inside tried.

    Args:
        drafter: what is inside. What it says of itself (`depth`, `requires`, `watches`, ...) is asked once.
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
        self._top_ids = self._told("top_ids", int, 0)
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
    def top_ids(self) -> int:
        return self._top_ids

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
