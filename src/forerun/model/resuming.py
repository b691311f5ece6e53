"""Completes a pass that the first layers have begun, so that no layer runs twice for a token.

A drafter that exits early has run some nodes through layers 0 .. b: their states are at hand and their keys in the
slots. What is missing are the same layers for the other nodes, then the layers behind b for all. Knows no drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from forerun.core.tree import Resume
from forerun.devices import sent
from forerun.errors import ArgumentError
from forerun.model.inputs import Nodes
from forerun.model.layers import LayerRanges, Plan, captured
from forerun.types import LAST_HIDDEN, Signal

Place = Callable[[Nodes], dict[str, Any]]
"""The tokens of a pass -> what the base model's forward takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The `Resume` of B rows, as far as it still holds."""

    boundary: int  # Layers that the nodes have run through, at least 1
    states: Tensor  # (B, R, H) at that boundary
    counts: Sequence[int]  # (B,) how many of the R were run; 0 for a row that has to be run whole


def usable(resumes: Sequence[Resume | None], writes: Sequence[int], signals: Set[Signal]) -> Begun | None:
    """What of `resumes` still holds: rows whose slots were written since, by the passes `writes` (B,) over each row up
    to now, and those at another boundary than the first, run anew. None where a state below the boundary is asked for,
    which only a whole pass sees."""
    good = [one for one, now in zip(resumes, writes, strict=False) if one is not None and one.stamp == now]
    if not good or any(signal != LAST_HIDDEN and signal < good[0].boundary for signal in signals):
        return None
    boundary = good[0].boundary
    counts = [
        len(one.states) if one is not None and one.stamp == now and one.boundary == boundary else 0
        for one, now in zip(resumes, writes, strict=True)
    ]
    states = good[0].states.new_zeros(len(counts), max(counts), good[0].states.shape[1])
    for row, (one, count) in enumerate(zip(resumes, counts, strict=True)):
        if one is not None and count:
            states[row, :count] = one.states
    return Begun(boundary=boundary, states=states, counts=counts)


def check(begun: Begun, nodes: Nodes, hidden_size: int, layers: int) -> None:
    """Raise ArgumentError unless the states fit the nodes (B, N) of the pass and a model of this size."""
    size, shape = nodes.ids.shape[1], tuple(begun.states.shape)
    if shape[1] > size or shape[2] != hidden_size or nodes.start:
        raise ArgumentError(
            f"a pass over nodes {nodes.start}..{size - 1} cannot resume states of the shape {shape[1:]} in a row; "
            f"expected (1..{size}, {hidden_size}), root first"
        )
    if not 1 <= begun.boundary <= layers:
        raise ArgumentError(f"cannot resume at boundary {begun.boundary}; the model has the boundaries 1..{layers}")


def complete(
    ranges: LayerRanges, layers: nn.ModuleList, place: Place, nodes: Nodes, begun: Begun, signals: Set[Signal]
) -> tuple[Tensor, dict[Signal, Tensor]]:
    """What one whole pass over `nodes` would give: states (B, N, H) after the final norm, and those asked for."""
    states = _begin(ranges, place, nodes, begun)
    inputs = place(nodes)
    states = pad(states, (0, 0, 0, inputs["input_ids"].shape[1] - states.shape[1]))
    with captured(layers, signals) as caught:
        final = ranges.finish(states, inputs, start=begun.boundary)
    if begun.boundary in signals:
        caught[begun.boundary] = states
    if LAST_HIDDEN in signals:
        caught[LAST_HIDDEN] = final
    return final, caught


def _begin(ranges: LayerRanges, place: Place, nodes: Nodes, begun: Begun) -> Tensor:
    """States (B, N, H) of all nodes at the boundary; those that lack the first layers run through them now."""
    size = nodes.ids.shape[1]
    states = pad(begun.states, (0, 0, 0, size - begun.states.shape[1]))
    lacking = nodes.real & (torch.arange(size) >= torch.tensor(begun.counts).unsqueeze(1))
    if not lacking.any():
        return states
    start = int(lacking.any(0).int().argmax())
    inputs = place(replace(nodes, real=lacking, start=start))
    early = ranges.run(Plan(stop=begun.boundary), inputs, None)[:, : size - start]
    [fresh] = sent([lacking[:, start:].unsqueeze(2)], states.device)
    return torch.cat([states[:, :start], torch.where(fresh, early, states[:, start:])], dim=1)
