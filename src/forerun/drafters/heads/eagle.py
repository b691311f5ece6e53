"""The EAGLE head as a module: hidden states of the target and the next token in, the feature after it and logits out.

One class for EAGLE-1/2 and EAGLE-3 with its variants; `EagleConfig` says which. Sources: arXiv 2401.15077, 2503.01840,
and the EAGLE-3.1 notes of May 2026 (``fc_norm``, ``norm_output``). Used as it is by drafting and by training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from forerun.drafters.heads.config import EagleConfig
from forerun.drafters.heads.layer import Attend, HeadLayer, RMSNorm
from forerun.drafters.heads.lean import Angles


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
