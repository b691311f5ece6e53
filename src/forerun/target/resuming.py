"""Completes a pass that the first layers have begun, so that no layer runs twice for a token.

A drafter that exits early has run some nodes through layers 0 .. b: their states are at hand and their keys in the
slots. What is missing are the same layers for the other nodes, then the layers behind b for all. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from forerun.devices import sent
from forerun.errors import ArgumentError, ForerunError, UnsupportedModelError
from forerun.target.inputs import Nodes
from forerun.target.layers import LayerRanges, captured
from forerun.target.nouns import Plan, Resume
from forerun.tree import TreeBuilder, stack
from forerun.types import LAST_HIDDEN, Draft, Drawn, Signal

if TYPE_CHECKING:
    from forerun.target.model import Target

Place = Callable[[Nodes], dict[str, Any]]
"""The tokens of a pass -> what the base model's forward takes."""
Begin = Callable[["Target", Sequence[int], Draft], Resume]
"""(target, roots, draft) -> what has begun of that draft in row 0."""
_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest root-mean-square difference between a whole pass and its parts, in units of the logits' spread."""
_ROUGH = 1e-1
"""The same in 16 bits."""


def usable(resume: Resume | None, writes: Sequence[int], signals: Set[Signal]) -> Resume | None:
    """What of `resume` still holds: rows whose slots were written since run anew.

    None where a state below its boundary is asked for, which only a whole pass sees.

    Args:
        writes: (B,) passes over each row up to now.
    """
    if resume is None or any(signal != LAST_HIDDEN and signal < resume.boundary for signal in signals):
        return None
    pairs = zip(resume.counts, resume.stamps, writes, strict=True)
    counts = [count if stamp == now else 0 for count, stamp, now in pairs]
    return replace(resume, counts=counts) if any(counts) else None


def check(resume: Resume, nodes: Nodes, hidden_size: int, layers: int) -> None:
    """Raise ArgumentError unless the states fit the nodes (B, N) of the pass and a model of this size."""
    batch, size = nodes.ids.shape
    begun = resume.states.shape[1]
    if tuple(resume.states.shape) != (batch, begun, hidden_size) or not 1 <= begun <= size or nodes.start:
        raise ArgumentError(
            f"a pass over nodes {nodes.start}..{size - 1} of {batch} rows cannot resume states of the shape "
            f"{tuple(resume.states.shape)}; expected ({batch}, 1..{size}, {hidden_size}), root first"
        )
    if not 1 <= resume.boundary <= layers or max(resume.counts) > begun:
        raise ArgumentError(
            f"cannot resume {max(resume.counts)} nodes at boundary {resume.boundary}: there are states of {begun} "
            f"nodes, and the model has the boundaries 1..{layers}"
        )


def complete(
    ranges: LayerRanges, layers: nn.ModuleList, place: Place, nodes: Nodes, resume: Resume, signals: Set[Signal]
) -> tuple[Tensor, dict[Signal, Tensor]]:
    """What one whole pass over `nodes` would give: states (B, N, H) after the final norm, and those asked for."""
    states = _begin(ranges, place, nodes, resume)
    inputs = place(nodes)
    states = pad(states, (0, 0, 0, inputs["input_ids"].shape[1] - states.shape[1]))
    with captured(layers, signals) as caught:
        final = ranges.finish(states, inputs, start=resume.boundary)
    if resume.boundary in signals:
        caught[resume.boundary] = states
    if LAST_HIDDEN in signals:
        caught[LAST_HIDDEN] = final
    return final, caught


def _begin(ranges: LayerRanges, place: Place, nodes: Nodes, resume: Resume) -> Tensor:
    """States (B, N, H) of all nodes at the boundary; those that lack the first layers run through them now."""
    size = nodes.ids.shape[1]
    states = pad(resume.states, (0, 0, 0, size - resume.states.shape[1]))
    lacking = nodes.real & (torch.arange(size) >= torch.tensor(resume.counts).unsqueeze(1))
    if not lacking.any():
        return states
    start = int(lacking.any(0).int().argmax())
    inputs = place(replace(nodes, real=lacking, start=start))
    early = ranges.run(Plan(stop=resume.boundary), inputs, None)[:, : size - start]
    [fresh] = sent([lacking[:, start:].unsqueeze(2)], states.device)
    return torch.cat([states[:, :start], torch.where(fresh, early, states[:, start:])], dim=1)


@torch.inference_mode()
def renumber(target: Target, rows: Sequence[int], kept: Sequence[Sequence[int]]) -> None:
    """Keep of the nodes that were run in this step ``kept[i]``, rising ids, as nodes 1, 2, ... of row ``rows[i]``."""
    sources = [[target.lengths[row] + node for node in nodes] for row, nodes in zip(rows, kept, strict=True)]
    target.cache.move(rows, sources, [target.lengths[row] + 1 for row in rows])


def prove(target: Target, boundary: int) -> None:
    """Check that the first layers up to `boundary` and then the others make the whole model; errors as `compare`."""

    def root_only(trial: Target, roots: Sequence[int], _draft: Draft) -> Resume:
        states = trial.run([0], roots, stack([TreeBuilder()]), Plan(stop=boundary))
        return Resume(boundary=boundary, states=states, counts=[1], stamps=list(trial.writes))

    compare(target, root_only, (0, 0, 1))


def compare(target: Target, begin: Begin, parents: Sequence[int]) -> None:
    """Score a small tree whole, and resumed after `begin`, on a cache of its own, and compare the logits.

    Raises:
        UnsupportedModelError: the model's layers cannot be run in part, or the parts do not make the whole.
    """
    name = type(target.model).__name__
    try:
        worst = _difference(type(target)(target.model, rows=1, slots=8), begin, parents)
    except ForerunError:
        raise
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise UnsupportedModelError(
            f"{name}: its layers cannot be run in part: {type(error).__name__}: {error}"
        ) from error
    limit = _LIMITS.get(target.dtype, _ROUGH)
    if not worst <= limit:
        raise UnsupportedModelError(
            f"{name}: its layers cannot be run in part: the parts give logits that differ from a whole pass by "
            f"{worst:.2g} of their spread, {limit:g} is allowed in {target.dtype}"
        )


@torch.inference_mode()
def _difference(target: Target, begin: Begin, parents: Sequence[int]) -> float:
    """Between the logits of a tree scored whole and resumed, in units of their spread."""
    ids = [(7919 * index + 13) % target.vocab_size for index in range(3 + len(parents))]
    builder = TreeBuilder()
    for token, parent in zip(ids[3:], parents, strict=True):
        builder.add(token, parent, drawn=Drawn.IID)
    draft, roots = stack([builder]), ids[2:3]
    target.prefill([0], [ids[:2]])
    whole = target.score([0], roots, draft).logits.float()
    resume = begin(target, roots, draft)
    parts = target.score([0], roots, draft, resume=resume).logits.float()
    difference = (parts - whole).square().mean(-1).sqrt() / whole.std(-1).clamp(min=1e-9)
    return float(difference.nan_to_num(nan=torch.inf).max())
