"""The decoder layer of a draft head. How it attends is the caller's business: over a cache, or over unrolled steps.

Parameter names are those on disk (``self_attn.q_proj``, ``hidden_norm``, ...). What is cheap to compute keeps only its
inputs for the backward pass (`forerun.drafters.heads.lean`). Knows no cache, no mask and no trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from forerun.drafters.heads.config import EagleConfig
from forerun.drafters.heads.lean import Angles, gated, rms_norm, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query (B, heads, N, D), key and value (B, groups, N, D)) -> (B, N, heads, D). Keys are already rotated."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        """(.., size) -> (.., size) in the dtype of `states`."""
        return rms_norm(states, self.weight, self.eps)


class HeadAttention(nn.Module):
    """Projections around an attention that somebody else computes."""

    def __init__(self, config: EagleConfig, layer: int, width: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """(B, N, width) -> (B, N, H)."""
        shape = (*states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        value = self.v_proj(states).view(shape).transpose(1, 2)
        attended = attend(self.layer, rotate(query, angles), rotate(key, angles), value)
        projected: Tensor = self.o_proj(attended.flatten(2))
        return projected


class HeadMLP(nn.Module):
    """Gated feed-forward part."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.activation: Any = ACT2FN[config.hidden_act]

    def forward(self, states: Tensor) -> Tensor:
        """(.., H) -> (.., H)."""
        result: Tensor = self.down_proj(gated(self.activation, self.gate_proj(states), self.up_proj(states)))
        return result


class HeadLayer(nn.Module):
    """One decoder layer. The first of an EAGLE-3 head reads token embeddings beside the feature."""

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        self.reads_embedding = config.generation == 3 and layer == 0
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = HeadAttention(config, layer, 2 * size if self.reads_embedding else size)
        self.mlp = HeadMLP(config)
        if config.generation == 3 or layer > 0:
            self.input_layernorm: nn.Module = RMSNorm(size, eps)
        else:
            self.input_layernorm = nn.Identity()
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """`embeds` and `states` (B, N, H) -> (B, N, H), the residual stream after the layer."""
        if self.reads_embedding:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            residual = normed if self.norm_before_residual else states
        else:
            inputs, residual = self.input_layernorm(states), states
        states = residual + self.self_attn(inputs, angles, attend)
        mixed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed
