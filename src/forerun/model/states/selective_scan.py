"""Mamba's selective scan (arXiv 2312.00752): each channel has a state, and each part of that its own decay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.model.states.rows import Fed, Recurrence, StatePass, Tree


@dataclass
class SelectiveScan(Recurrence):
    """A state (rows, C, S). `inputs` are logarithms of the decay per unit of time (B, N, C, S), what flows in
    (B, N, C, S), and what reads the state (B, N, S).
    """

    inputs: Fed

    def fresh(self, rows: int) -> Tensor:
        return self.inputs[1].new_zeros(rows, *self.inputs[1].shape[2:])

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        decay, inflow = inputs[:2]
        if earlier is not None:
            decay, inflow = torch.cat([earlier[0], decay], dim=1), torch.cat([earlier[1], inflow], dim=1)
        rows, count = torch.arange(len(state), device=state.device), decay.shape[1]
        order = torch.arange(1, count + 1, device=state.device)
        before = (tree.sees & ~torch.eye(count, dtype=torch.bool, device=state.device)) * order
        parents = before.amax(2)  # (B, M) the node before each, counted from 1; 0: the committed state
        states = torch.cat([state.unsqueeze(1), inflow.new_empty(inflow.shape)], dim=1)
        for node in range(count):
            states[:, node + 1] = states[rows, parents[:, node]] * decay[:, node].exp() + inflow[:, node]
        found = (states[:, tree.start + 1 :] * inputs[2].unsqueeze(2)).sum(3)
        return found, (decay, inflow)

    @staticmethod
    def advance(state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        decay, inflow = fed
        reached = tree.reached.view(len(state), -1, 1, 1)
        for node in range(decay.shape[1]):
            state = torch.where(reached[:, node], state * decay[:, node].exp() + inflow[:, node], state)
        return state


def scan(
    this: StatePass,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run `mamba_selective_scan` on (B, C, N)."""
    steps = dt if delta_bias is None else dt + delta_bias.to(dt.dtype).unsqueeze(-1)
    steps = (functional.softplus(steps) if delta_softplus else steps).float().transpose(1, 2).unsqueeze(3)
    values = hidden_states.float().transpose(1, 2).unsqueeze(3)
    writes, reads = (one.float().transpose(1, 2) for one in (B, C))
    found = this.run(SelectiveScan((steps * A.float(), steps * values * writes.unsqueeze(2), reads)))
    found = found.transpose(1, 2)
    if D is not None:
        found = found + hidden_states * D.unsqueeze(-1)
    if z is not None:
        found = found * functional.silu(z)
    return found, found


FUNCTIONS: dict[str, Callable[..., Any]] = {"mamba_selective_scan": scan}
