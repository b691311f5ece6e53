"""What a draft must be before anybody works with it: of the right form as a whole, and sound row by row.

Knows drafts, budgets and the sizes of a model. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from forerun.errors import InvalidDraftError
from forerun.tree import TreeBuilder, rebuild, stack
from forerun.types import Budget, Draft, DraftRow, Drawn

if TYPE_CHECKING:
    from forerun.target import Target

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
        return stack(builders, device=draft.tokens.device, law_ids=draft.law_ids)


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
        ("scouts", draft.scouts, shape, torch.bool),
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
    if any(scout and kind is not Drawn.GIVEN for kind, scout in zip(nodes.drawn, nodes.scouts, strict=True)):
        error = InvalidDraftError("a node was sampled and is a scout; nodes that are never accepted are given")
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
