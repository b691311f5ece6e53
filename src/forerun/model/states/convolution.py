"""Causal convolutions over the last tokens of a row: those of LFM2, and those before a scan or a delta rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from forerun.model.states.rows import Fed, Recurrence, StatePass, Tree


@dataclass
class Convolution(Recurrence):
    """Depthwise convolutions of ``K`` tokens: a row's state is its last ``K - 1`` inputs (rows, K - 1, C)."""

    inputs: Fed  # (B, N, C) alone
    weight: Tensor  # (C, K)
    bias: Tensor | None  # (C,)
    activation: str | None

    def fresh(self, rows: int) -> Tensor:
        values = self.inputs[0]
        return values.new_zeros(rows, self.weight.shape[1] - 1, values.shape[2])

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        values = torch.cat([*(earlier or ()), *inputs], dim=1)
        behind = torch.cat([state, values], dim=1)
        width = self.weight.shape[1]
        if tree.paths is None:
            windows = behind[:, tree.start :].unfold(1, width, 1)  # (B, N, C, K)
        else:
            index = tree.windows(width)
            rows = torch.arange(len(index), device=index.device).view(-1, 1, 1)
            windows = behind[rows, index].transpose(2, 3)
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        found = (windows.to(wide) * self.weight.to(wide)).sum(3)
        if self.bias is not None:
            found = found + self.bias.to(wide)
        found = found.to(self.weight.dtype)
        if self.activation is not None:
            found = ACT2FN[self.activation](found)
        return found.to(values.dtype), (values,)

    @staticmethod
    def advance(state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        behind, index = torch.cat([state, *fed], dim=1), tree.behind(state.shape[1])
        return behind.gather(1, index.unsqueeze(2).expand(-1, -1, state.shape[2]))


def convolve(
    this: StatePass,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    **_kwargs: Any,
) -> Tensor:
    """Run `causal_conv1d_fn` on (B, C, N)."""
    return this.run(Convolution((hidden_states.transpose(1, 2),), weight, bias, activation)).transpose(1, 2)


FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": convolve}
