"""The EAGLE head as a module: hidden states of the target and the next token in, the feature after it and logits out.

One class for EAGLE-1/2 and EAGLE-3 with its variants; `EagleConfig` says which. Sources: arXiv 2401.15077, 2503.01840,
and the EAGLE-3.1 notes of May 2026 (``fc_norm``, ``norm_output``). Used as it is by drafting and by training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.drafters.heads.config import EagleConfig
from forerun.drafters.heads.recompute import Angles, gated, rms_norm, rotate

# The decoder layer of a draft head. How it attends is the caller's business: over a cache, or over unrolled steps.
#
# Parameter names are those on disk (``self_attn.q_proj``, ``hidden_norm``, ...). What is cheap to compute keeps only
# its inputs for the backward pass (`forerun.drafters.heads.recompute`). Knows no cache, no mask and no trainer.


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


@dataclass(frozen=True, slots=True)
class Advanced:
    """What one pass of the head gives for each position."""

    feature: Tensor
    """(B, N, H): what the next step reads in place of the target's feature."""
    output: Tensor
    """(B, N, H): what the output head reads."""


class EagleHead(nn.Module):
    """Entry i reads the embedding of token i + 1 and the feature of token i at position i; predicts token i + 2."""

    d2t: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        width = len(config.boundaries) * config.target_hidden_size
        self.fc = nn.Linear(size + width if config.generation == 1 else width, size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries)
        self.layers = nn.ModuleList(HeadLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps) if config.generation == 3 else nn.Identity()
        if config.own_lm_head:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.rotary = Rotary(config)
        self._initialize()

    @property
    def token_ids(self) -> Tensor:
        """(Vd,) the target's id of each token of the draft vocabulary."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    @torch.no_grad()
    def set_vocabulary(self, token_ids: Tensor) -> None:
        """Let entry j of the output head mean ``token_ids[j]`` (Vd,) of the target."""
        self.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """The target's states at the boundaries, (B, N, Ht) each -> (B, N, H), what the first step reads.

        Generation 1 reads its one boundary as it is: its ``fc`` also wants the embedding.
        """
        if self.config.generation == 1:
            return features[0]
        if self.config.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def angles(self, positions: Tensor, like: Tensor) -> Angles:
        """Cosines and sines (B, N, D) of `positions` (B, N), in the dtype of `like`."""
        cosine, sine = self.rotary(like, positions)
        return cosine, sine

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Advanced:
        """One pass: embeddings (B, N, H) of the next tokens beside their features (B, N, H)."""
        states = features
        if self.config.generation == 1:
            states = self.fc(torch.cat([embeds, features], dim=-1))
        for layer in self.layers:
            states = layer(embeds, states, angles, attend)
        output = self.norm(states)
        return Advanced(output if self.config.norm_output else states, output)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters by name, without a frozen copy of the target's embedding."""
        return {name: weight for name, weight in self.named_parameters() if weight.requires_grad}

    @torch.no_grad()
    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)


class Rotary(LlamaRotaryEmbedding):  # type: ignore[misc]
    """Frequencies stay float32 whatever the head is turned into: in bfloat16, far positions would fall together.

    Raises:
        KeyError, TypeError, ValueError: a parameter of `EagleConfig.rope_scaling` is missing or makes no sense.
    """

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(_rotary_config(config))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        moved: Rotary = super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)
        return moved


def _rotary_config(config: EagleConfig) -> LlamaConfig:
    rope = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
