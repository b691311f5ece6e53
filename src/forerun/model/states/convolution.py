"""The last tokens of a row: causal convolutions, as LFM2's and those before a scan or a delta rule, and layers that mix
a token with those before (RWKV; ZAYA's compressed convolutional attention, arXiv 2510.04476).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from forerun.model.states.rows import Fed, Recurrence, StatePass, Tree


@dataclass
class TokenWindow(Recurrence):
    """The last `size` inputs up to each token (B, N, size, C): a row's state is its last ``size - 1`` inputs."""

    inputs: Fed  # (B, N, C) alone
    size: int

    def fresh(self, rows: int) -> Tensor:
        values = self.inputs[0]
        return values.new_zeros(rows, self.size - 1, values.shape[2])

    def run(self, state: Tensor, inputs: Fed, earlier: Fed | None, tree: Tree) -> tuple[Tensor, Fed]:
        values = torch.cat([*(earlier or ()), *inputs], dim=1)
        behind = torch.cat([state, values], dim=1)
        if tree.paths is None:
            windows = behind[:, tree.start :].unfold(1, self.size, 1).transpose(2, 3)
        else:
            index = tree.windows(self.size)
            rows = torch.arange(len(index), device=index.device).view(-1, 1, 1)
            windows = behind[rows, index]
        return self.read(windows), (values,)

    def read(self, windows: Tensor) -> Tensor:
        """Return what comes out for windows (B, N, size, C)."""
        return windows

    @staticmethod
    def advance(state: Tensor, fed: Fed, tree: Tree) -> Tensor:
        behind, index = torch.cat([state, *fed], dim=1), tree.behind(state.shape[1])
        return behind.gather(1, index.unsqueeze(2).expand(-1, -1, state.shape[2]))


@dataclass
class Convolution(TokenWindow):
    """Depthwise convolutions."""

    weight: Tensor  # (C, size)
    bias: Tensor | None  # (C,)
    activation: str | None

    def read(self, windows: Tensor) -> Tensor:
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        outputs = (windows.to(wide) * self.weight.t().to(wide)).sum(2)
        if self.bias is not None:
            outputs = outputs + self.bias.to(wide)
        outputs = outputs.to(self.weight.dtype)
        if self.activation is not None:
            outputs = ACT2FN[self.activation](outputs)
        return outputs.to(windows.dtype)


def shift(this: StatePass, values: Tensor) -> Tensor:
    """Return the input (B, N, C) of the token before each."""
    return this.run(TokenWindow((values,), 2))[:, :, 0]


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
    inputs = (hidden_states.transpose(1, 2),)
    return this.run(Convolution(inputs, weight.shape[1], weight, bias, activation)).transpose(1, 2)


def project(this: StatePass, module: Any, hidden_states: Tensor, *_args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run ZAYA's projection: queries and keys that two convolutions have mixed, values half of which are those of the
    token before, (B, N, heads, dim) each.
    """
    queries, keys = module.q_proj(hidden_states), module.k_proj(hidden_states)
    windows = this.run(TokenWindow((torch.cat([queries, keys], dim=2),), module.conv_kernel_size + 1))
    mixed = module.conv_qk_grouped(module.conv_qk_depthwise(windows.flatten(0, 1).transpose(1, 2)))
    values = torch.cat([module.v_proj_current(hidden_states), module.v_proj_delayed(shift(this, hidden_states))], dim=2)
    shape = *hidden_states.shape[:2], -1, module.head_dim
    queries, keys, mixed, values = (part.reshape(shape) for part in (queries, keys, mixed, values))
    heads = queries.shape[2]
    groups = module.num_key_value_groups
    rest = (queries + keys.repeat_interleave(groups, dim=2)) * 0.5
    shared = rest.view(*shape[:2], -1, groups, module.head_dim).mean(3)
    return mixed[:, :, :heads] + rest, mixed[:, :, heads:] + shared, values


def convolve_dynamically(
    this: StatePass, module: Any, hidden_states: Tensor, dynamic_input: Tensor, *, cache_offset: int = 0, **_kwargs: Any
) -> Tensor:
    """Run Inkling 2's convolution, whose weights come from each token; a layer that runs again has other states."""
    this.enter(id(module), cache_offset)
    values, size, heads = hidden_states.float(), module.conv_kernel_size, module.num_heads
    fresh = module.weight_proj(dynamic_input).float().view(*values.shape[:2], heads, 1, size)
    weights = module.static_weight.float().t().view(heads, -1, size) + fresh
    windows = this.run(TokenWindow((values,), size)).flip(2).transpose(2, 3)
    outputs = (windows.reshape(*values.shape[:2], heads, -1, size) * weights).sum(4).view(values.shape)
    return ((outputs + values) / (2 * size + 1) ** 0.5).to(hidden_states.dtype)


def convolve_dilated(this: StatePass, module: Any, hidden_states: Tensor, *_args: Any) -> Tensor:
    """Run `_short_conv`, a dilated convolution, on (B, N, C)."""
    windows = this.run(TokenWindow((hidden_states,), module.short_conv_state_len + 1))
    found: Tensor = functional.silu(module.conv1d(windows.flatten(0, 1).transpose(1, 2)))
    return found.view(hidden_states.shape)


def look_back(this: StatePass, module: Any, token_ids: Tensor, shift: int) -> Tensor:
    """Run `_shift_right_ignore_eos` on what the model takes for the tokens so far: return the tokens that stand `shift`
    before those of the pass, or the end of a text where one lies between.
    """
    if shift == 0:
        return token_ids
    this.enter(id(module), shift)
    ids, end, fill = token_ids[:, module.context_len :], module.eos_token_id, module.context_len
    windows = this.run(TokenWindow((ids.unsqueeze(2) - end,), shift + 1)).squeeze(3) + end  # Behind nothing: an end
    ended = (windows[:, :, :-1] == end).any(2)
    return functional.pad(torch.where(ended, end, windows[:, :, 0]), (fill, 0), value=end)


FUNCTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_fn": convolve}
METHODS: dict[str, Callable[..., Any]] = {
    "_short_conv": convolve_dilated,
    "_shift_right_ignore_eos": look_back,
}
FORWARDS: dict[str, Callable[..., Any]] = {"conv_qk_grouped": project, "static_weight": convolve_dynamically}
