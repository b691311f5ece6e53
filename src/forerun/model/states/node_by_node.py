"""Recurrences that go node by node down the paths of a tree, where no form over all nodes at once is known or pays.

States of channels, each part of which has its own decay: Mamba's selective scan (arXiv 2312.00752) and Griffin's RG-LRU
(arXiv 2402.19427). And RWKV's attention (arXiv 2305.13048): an average of the values so far in each channel, weighted
by the exponentials of their keys, whose weights decay; its layers also mix each token with the one before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.model.states.convolution import Convolution, shift
from forerun.model.states.rows import Fed, Recurrence, StatePass, Tree


@dataclass
class NodeByNode(Recurrence):
    """A state that each token moves one step on. `read_only` inputs, the last ones, do not move it."""

    inputs: Fed
    read_only = 0

    @staticmethod
    @abstractmethod
    def step(state: Tensor, *fed: Tensor) -> Tensor:
        """Return the states (B, ..) behind one token of each row, which feeds (B, ..) each."""

    @abstractmethod
    def read(self, before: Tensor, behind: Tensor, inputs: Fed) -> Tensor:
        """Return what comes out (B, N, ..) between the states (B, N, ..) before and behind each token."""

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        fed = inputs[: len(inputs) - self.read_only]
        if earlier is not None:
            fed = tuple(torch.cat(both, dim=1) for both in zip(earlier, fed, strict=True))
        rows = torch.arange(len(state), device=state.device).unsqueeze(1)
        count = fed[0].shape[1]
        order = torch.arange(1, count + 1, device=state.device)
        before = (tree.sees & ~torch.eye(count, dtype=torch.bool, device=state.device)) * order
        parents = before.amax(2)  # (B, M) the node before each, counted from 1; 0: the committed state
        states = state.new_empty(len(state), count + 1, *state.shape[1:])
        states[:, 0] = state
        for node in range(count):
            states[:, node + 1] = self.step(states[rows[:, 0], parents[:, node]], *(part[:, node] for part in fed))
        start = tree.start
        return self.read(states[rows, parents[:, start:]], states[:, start + 1 :], inputs), fed

    @classmethod
    def advance(cls, state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        for node, reached in enumerate(tree.reached.unbind(1)):
            moved = cls.step(state, *(one[:, node] for one in fed))
            state = torch.where(reached.view(-1, *[1] * (state.dim() - 1)), moved, state)
        return state


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
    writes, reads = (part.float().transpose(1, 2) for part in (B, C))
    outputs = this.run(SelectiveScan((steps * A.float(), steps * values * writes.unsqueeze(2), reads)))
    outputs = outputs.transpose(1, 2)
    if D is not None:
        outputs = outputs + hidden_states * D.unsqueeze(-1)
    if z is not None:
        outputs = outputs * functional.silu(z)
    return outputs, outputs


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
    outputs = this.run(SelectiveScan((decay, hidden_states.float().unsqueeze(3), whole)))
    return outputs.to(hidden_states.dtype), recurrent_states


_LEAST = -1e38  # The exponent of an average of nothing


@dataclass
class WeightedKeys(NodeByNode):
    """A state (rows, C, 3): numerator, denominator and the exponent that both are divided by. `inputs` are keys,
    values, logarithms of the decay, and what is added to the exponent of the token itself, (B, N, C) each.
    """

    read_only = 1

    def fresh(self, rows: int) -> Tensor:
        return self.inputs[0].new_zeros(rows, self.inputs[0].shape[2], 3)

    @staticmethod
    def step(state: Tensor, *fed: Tensor) -> Tensor:
        keys, values, decay = fed
        return _add(state, decay, keys, values)

    def read(self, before: Tensor, behind: Tensor, inputs: Fed) -> Tensor:
        keys, values, _, bonus = inputs
        found = _add(before, torch.zeros_like(keys), keys + bonus, values)
        return found[..., 0] / found[..., 1]


def _add(state: Tensor, decay: Tensor, exponents: Tensor, values: Tensor) -> Tensor:
    """Return an average that has decayed, and to which the values were added."""
    numerator, denominator, exponent = state.unbind(-1)
    old = torch.where(denominator == 0, _LEAST, exponent + decay)
    most = torch.maximum(old, exponents)
    kept, added = (old - most).exp(), (exponents - most).exp()
    return torch.stack([kept * numerator + added * values, kept * denominator + added, most], dim=-1)


def average(
    this: StatePass, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **_kwargs: Any
) -> tuple[Tensor, None]:
    """Run `rwkv_linear_attention` on (B, N, C)."""
    keys, values = key.float(), value.float()
    decay, bonus = -time_decay.float().exp(), time_first.float()
    found = this.run(WeightedKeys((keys, values, decay.expand_as(keys), bonus.expand_as(keys))))
    return found.to(key.dtype), None


def mix_for_attention(
    this: StatePass, module: Any, hidden: Tensor, state: Any = None
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Run `extract_key_value`: receptance, keys and values of tokens mixed with those before."""
    before = shift(this, hidden)
    shares = module.time_mix_receptance, module.time_mix_key, module.time_mix_value
    receptance, key, value = (hidden * share + before * (1 - share) for share in shares)
    return torch.sigmoid(module.receptance(receptance)), module.key(key), module.value(value), state


def feed_forward(this: StatePass, module: Any, hidden: Tensor, state: Any = None) -> tuple[Tensor, Any]:
    """Run RWKV's feed-forward layer, which mixes each token with the one before."""
    before = shift(this, hidden)
    shares = module.time_mix_receptance, module.time_mix_key
    receptance, key = (hidden * share + before * (1 - share) for share in shares)
    return torch.sigmoid(module.receptance(receptance)) * module.value(module.key(key).relu().square()), state


FUNCTIONS: dict[str, Callable[..., Any]] = {"mamba_selective_scan": scan, "rwkv_linear_attention": average}
METHODS: dict[str, Callable[..., Any]] = {"_rnn_scan": scan_channels, "extract_key_value": mix_for_attention}
FORWARDS: dict[str, Callable[..., Any]] = {"rg_lru": recur, "time_shift": feed_forward}
