"""States of channels, each part of which has its own decay: Mamba's selective scan (arXiv 2312.00752) and Griffin's
RG-LRU (arXiv 2402.19427).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional

from forerun.model.states.convolution import Convolution
from forerun.model.states.node_by_node import NodeByNode
from forerun.model.states.rows import Fed, StatePass


@dataclass
class SelectiveScan(NodeByNode):
    """A state (rows, C, S). `inputs` are logarithms of the decay per unit of time (B, N, C, S), what flows in
    (B, N, C, S), and what reads the state (B, N, S).
    """

    read_only = 1

    def fresh(self, rows: int) -> Tensor:
        return self.inputs[1].new_zeros(rows, *self.inputs[1].shape[2:])

    @staticmethod
    def step(state: Tensor, *fed: Tensor) -> Tensor:
        decay, inflow = fed
        return state * decay.exp() + inflow

    def read(self, before: Tensor, behind: Tensor, inputs: Fed) -> Tensor:
        return (behind * inputs[2].unsqueeze(2)).sum(3)


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


def recur(this: StatePass, module: Any, input_states: Tensor, position_ids: Tensor, **_kwargs: Any) -> Any:
    """Run the recurrent block of Griffin: a convolution and an RG-LRU, and a gate."""
    weight, bias = module.conv_1d.weight[:, 0], module.conv_1d.bias
    states = this.run(Convolution((module.linear_x(input_states),), weight.shape[1], weight, bias, None))
    states = module.rg_lru(states, position_ids)
    return module.linear_out(states * module.act_fn(module.linear_y(input_states))), None


def scan_channels(
    this: StatePass,
    _module: Any,
    hidden_states: Tensor,
    recurrent_gate: Tensor,
    reset: Tensor,
    recurrent_states: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run `_rnn_scan` on (B, N, C)."""
    decay = (recurrent_gate * ~reset).float().log().unsqueeze(3)
    whole = decay.new_ones(*decay.shape[:2], 1)
    found = this.run(SelectiveScan((decay, hidden_states.float().unsqueeze(3), whole)))
    return found.to(hidden_states.dtype), recurrent_states


FUNCTIONS: dict[str, Callable[..., Any]] = {"mamba_selective_scan": scan}
METHODS: dict[str, Callable[..., Any]] = {"_rnn_scan": scan_channels}
FORWARDS: dict[str, Callable[..., Any]] = {"rg_lru": recur}
