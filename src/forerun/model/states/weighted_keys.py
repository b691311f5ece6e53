"""RWKV's attention (arXiv 2305.13048): an average of the values so far in each channel, weighted by the exponentials of
their keys, whose weights decay. Its layers also mix each token with the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.model.states.convolution import shift
from forerun.model.states.node_by_node import NodeByNode
from forerun.model.states.rows import Fed, StatePass

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


FUNCTIONS: dict[str, Callable[..., Any]] = {"rwkv_linear_attention": average}
METHODS: dict[str, Callable[..., Any]] = {"extract_key_value": mix_for_attention}
FORWARDS: dict[str, Callable[..., Any]] = {"time_shift": feed_forward}
