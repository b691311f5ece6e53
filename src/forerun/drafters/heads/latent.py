"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) of draft heads: MTP layers and EAGLE-3's for Kimi-K2.

Parameter names are DeepSeek's on disk. Of queries and keys the last dimensions are rotated, in pairs that lie side by
side; that part of a key is one for all heads. Keys and values are kept as each head reads them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from forerun.drafters.heads.base import Angles, Attend, check_types
from forerun.drafters.heads.layers import DecoderConfig, HeadAttention, RMSNorm, rotate
from forerun.errors import ArgumentError

LATENT_EPS = 1e-6  # Epsilon of the norms inside, in DeepSeek's own layers, whatever the other norms have


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig:
    """Sizes of latent attention, named as in transformers' DeepSeek-V3."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Build the sizes from a recipe's keys. Raises ArgumentError, naming them, for those that
        are unknown or missing.
        """
        known = [one.name for one in fields(cls)]
        wrong = sorted(options.keys() - set(known)) + sorted(set(known[:4]) - options.keys())
        if wrong:
            raise ArgumentError(f"draft head: latent has {', '.join(known)}; see {', '.join(wrong)}")
        check_types(cls, options, "draft head: latent")
        return cls(**options)

    def problem(self, config: DecoderConfig) -> str | None:
        """Describe which setting of the layers does not go with it; None: all do."""
        if min(self.kv_lora_rank, self.qk_nope_head_dim, self.v_head_dim) < 1 or self.qk_rope_head_dim < 2:
            return f"latent attention has positive sizes; got {self}"
        if self.v_head_dim > self.qk_nope_head_dim + self.qk_rope_head_dim:
            return f"values of latent attention are at most as wide as keys; got {self}"
        if config.num_key_value_heads != config.num_attention_heads:
            heads = f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads"
            return f"latent attention has keys for every head; got {heads}"
        odd = [name for name in ("attention_bias", "qk_norm", "sliding_window") if getattr(config, name)]
        return f"latent attention has no {', '.join(odd)}" if odd else None


def attention(
    config: DecoderConfig, latent: LatentConfig | None, layer: int, width: int | None = None, *, eps: float
) -> nn.Module:
    """Build the attention of a layer that reads (B, N, width), H if it is None: ordinary without
    `latent`; `eps` is that of the norms inside.
    """
    if latent is None:
        return HeadAttention(config, layer, width)
    return LatentAttention(config, latent, layer, config.hidden_size if width is None else width, eps)


class LatentAttention(nn.Module):
    """Multi-head latent attention. The values are padded to the width of the keys."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig, layer: int, width: int, eps: float) -> None:
        super().__init__()
        self.layer, self.latent, self.heads = layer, latent, config.num_attention_heads
        self.scaling = query_scaling(config.rope_scaling)
        wide = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        if latent.q_lora_rank is None:
            self.q_proj = nn.Linear(width, self.heads * wide, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, latent.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(latent.q_lora_rank, eps)
            self.q_b_proj = nn.Linear(latent.q_lora_rank, self.heads * wide, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(latent.kv_lora_rank, eps)
        inside = latent.qk_nope_head_dim + latent.v_head_dim
        self.kv_b_proj = nn.Linear(latent.kv_lora_rank, self.heads * inside, bias=False)
        self.o_proj = nn.Linear(self.heads * latent.v_head_dim, config.hidden_size, bias=False)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Attend: (B, N, width) -> (B, N, H)."""
        latent = self.latent
        if latent.q_lora_rank is None:
            asked = self.q_proj(states)
        else:
            asked = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(states)))
        nope, rope = self._split(asked, latent.qk_nope_head_dim, latent.qk_rope_head_dim)
        query = torch.cat([nope, self._rotate(rope, angles)], -1) * self.scaling
        compressed, shared = self.kv_a_proj_with_mqa(states).split([latent.kv_lora_rank, latent.qk_rope_head_dim], -1)
        known = self.kv_b_proj(self.kv_a_layernorm(compressed))
        key, value = self._split(known, latent.qk_nope_head_dim, latent.v_head_dim)
        shared = self._rotate(shared.unsqueeze(1), angles).expand(-1, self.heads, -1, -1)
        key = torch.cat([key, shared], -1)
        attended = attend(self.layer, query, key, pad(value, (0, key.shape[-1] - value.shape[-1])))
        projected: Tensor = self.o_proj(attended[..., : latent.v_head_dim].flatten(2))
        return projected

    def _split(self, states: Tensor, *sizes: int) -> tuple[Tensor, ...]:
        """Split (B, N, heads * D) -> (B, heads, N, size) for each of the `sizes`."""
        heads = states.view(*states.shape[:-1], self.heads, -1).transpose(1, 2)
        return torch.split(heads, list(sizes), -1)

    def _rotate(self, states: Tensor, angles: Angles) -> Tensor:
        if self.latent.rope_interleave:  # pairs lie side by side
            states = states.reshape(*states.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return rotate(states, angles)


def query_scaling(rope: Mapping[str, Any] | None) -> float:
    """Return the factor of the queries besides one over the root of their size: DeepSeek's YaRN
    scales attention, too.
    """
    factor, all_dims = (rope or {}).get("factor") or 1.0, (rope or {}).get("mscale_all_dim") or 0.0
    return float((0.1 * all_dims * math.log(factor) + 1.0) ** 2) if factor > 1 else 1.0
