"""EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840): a small decoder over hidden states of the target.

One module for EAGLE-1 and -2, which continue the target's last hidden state, and EAGLE-3 with its variants, which fuses
several; `EagleConfig` says which. EAGLE-3.1's ``fc_norm`` and ``norm_output`` follow its notes of May 2026."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.drafters.heads.base import Advanced, Angles, Attend, HeadConfig, SequentialHead
from forerun.drafters.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.drafters.heads.latent import LatentConfig, attention
from forerun.drafters.heads.layers import DecoderConfig, DecoderHead, HeadMLP, RMSNorm
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN

FEATURE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Variants of EAGLE-3 in how features are normed and fed back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(DecoderConfig):
    """Shape and variant of an EAGLE head; the defaults are those of the first EAGLE-3 checkpoints.

    ``generation`` 3 fuses several boundaries and predicts tokens (arXiv 2503.01840); 1 continues the target's last
    hidden state and reads its output head (EAGLE-1 and EAGLE-2, arXiv 2401.15077 and 2406.16858).
    """

    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {
        "generation",
        "hidden_size",
        "fc_bias",
    }

    generation: int = 3
    use_aux_hidden_state: bool = True
    """False: EAGLE-3's layer reads the target's last hidden state as it is, and nothing is fused
    (some of NVIDIA's).
    """
    fc_bias: bool = False  # Original EAGLE-1 heads have one; vLLM drops it without a word
    norm_before_residual: bool = False
    """True: the residual stream of the first layer is the normed feature (speculators) instead of
    the feature (EAGLE).
    """
    norm_before_fc: bool = False  # One norm over the concatenated features before they are fused (``input_norm``)
    fc_norm: bool = False  # One norm for each boundary's features before they are fused (EAGLE-3.1)
    norm_output: bool = False  # The next step reads the normed output (EAGLE-3.1), not the residual stream (EAGLE-3)
    latent: LatentConfig | None = None  # None: ordinary attention; else DeepSeek's (heads for Kimi-K2)
    next_layer_regular: bool = True
    """True: the layers above the first read the residual stream alone. False: they read the
    embedding beside it, too (DeepSpec).
    """

    @property
    def kind(self) -> str:
        return "eagle3" if self.generation == 3 else "eagle"

    @property
    def rotary_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    def problem(self) -> str | None:
        if self.generation not in (1, 3):
            return f"generation is 1 or 3, got {self.generation}"
        if self.kind != "eagle3" and (self.latent is not None or not self.next_layer_regular):
            return f"a head of the kind {self.kind} has ordinary attention, and reads the embedding in its first layer"
        if self.latent is not None and (wrong := self.latent.problem(self)):
            return wrong
        if self.generation == 1 and self.boundaries != (LAST_HIDDEN,):
            return f"an EAGLE-1 head reads the last hidden state alone, got boundaries {self.boundaries}"
        if not self.use_aux_hidden_state:
            wants = "reads the last hidden state alone, as wide as itself, and fuses nothing"
            fuses = self.generation == 1 or self.norm_before_fc or self.fc_norm or self.fc_bias
            if fuses or self.boundaries != (LAST_HIDDEN,) or self.hidden_size != self.target_hidden_size:
                return f"an EAGLE-3 head without use_aux_hidden_state {wants}; got boundaries {self.boundaries}"
        if any(boundary < 0 and boundary != LAST_HIDDEN for boundary in self.boundaries):
            return f"boundaries count layers from 0, got {self.boundaries}"
        if self.generation == 3 and not self.own_lm_head and self.hidden_size != self.target_hidden_size:
            return "a head of another hidden size than the target's needs its own lm_head"
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`; an EAGLE-1 head uses the target's output
        head unless it gets one.
        """
        found = cls.layer_fields(config)
        norms = [name for name in FEATURE_NORMS if options.get(name)]
        if kind != "eagle3" and norms:
            raise ArgumentError(f"an EAGLE-1 head has no norms around its features; leave {', '.join(norms)} away")
        if kind != "eagle3":
            found |= {"generation": 1, "boundaries": (LAST_HIDDEN,), "own_lm_head": False}
        elif options.get("use_aux_hidden_state") is False:
            found["boundaries"] = (LAST_HIDDEN,)
        elif "boundaries" not in options:
            found["boundaries"] = default_boundaries(config.num_hidden_layers)
        given: dict[str, Any] = {
            name: tuple(options[name]) for name in ("boundaries", "full_layers") if name in options
        }
        if options.get("latent"):
            latent = LatentConfig.of(options["latent"])
            heads = options.get("num_attention_heads", found["num_attention_heads"])
            given |= {"latent": latent, "num_key_value_heads": heads, "head_dim": latent.qk_rope_head_dim}
        made = ("boundaries", "full_layers", "latent")
        return found | {name: value for name, value in options.items() if name not in made} | given


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return EAGLE-3's choice for a target of at least 3 layers: after 2 layers, half, and all but
    3; distinct, in 1..n.
    """
    if num_layers < 3:
        raise ArgumentError(f"EAGLE-3 reads three boundaries; a target of {num_layers} layers has too few")
    chosen: list[int] = []
    for wanted in (2, num_layers // 2, num_layers - 3):
        free = [(abs(boundary - wanted), boundary) for boundary in range(1, num_layers + 1) if boundary not in chosen]
        chosen.append(min(free)[1])
    return tuple(sorted(chosen))


class FusedHead(DecoderHead):
    """A head with EAGLE's layers over the target's fused states, as `EagleConfig` says."""

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        width = len(config.boundaries) * config.target_hidden_size
        if config.use_aux_hidden_state:
            self.fc = nn.Linear(size + width if config.generation == 1 else width, size, bias=config.fc_bias)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.boundaries)
        self.layers = nn.ModuleList(HeadLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps) if config.generation == 3 else nn.Identity()
        self.complete()

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Fuse the target's states, see `Head.fuse`. Generation 1 reads its one boundary as it is:
        its ``fc`` also wants the embedding.
        """
        if self.config.generation == 1 or not self.config.use_aux_hidden_state:
            return features[0]
        if self.config.fc_norm:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True)]
        joined = torch.cat(list(features), dim=-1)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        fused: Tensor = self.fc(joined)
        return fused

    def through(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run all layers: embeddings (B, N, H) beside `states` (B, N, H) -> (B, N, H), the residual
        stream after them.
        """
        for layer in self.layers:
            states = layer(embeds, states, angles, attend)
        return states


class EagleHead(FusedHead, SequentialHead):
    """An EAGLE-1, EAGLE-2 or EAGLE-3 head with its variants; see `SequentialHead`."""

    Config = EagleConfig

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend, depth: int = 1) -> Advanced:
        if self.config.generation == 1:
            features = self.fc(torch.cat([embeds, features], dim=-1))
        states = self.through(embeds, features, angles, attend)
        output = self.norm(states)
        return Advanced(output if self.config.norm_output else states, output)


class Eagle3Drafter(HeadDrafter):
    """Drafts with an EAGLE-3 head: chain, fixed tree or dynamic tree."""

    name = "eagle3"


class EagleDrafter(HeadDrafter):
    """Drafts with an EAGLE-1 head: chain, fixed tree or dynamic tree."""

    name = "eagle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle2DrafterConfig(HeadDrafterConfig):
    """Options of `eagle2`: those of the other head drafters; the dynamic tree is EAGLE-2's own
    unless its size is given.
    """

    top_k: int | None = 10  # Nodes expanded per level and children looked at per node
    nodes: int = 59  # Nodes of the dynamic tree, root not counted


class Eagle2Drafter(HeadDrafter):
    """Drafts a dynamic tree with an EAGLE-1 head."""

    name = "eagle2"
    Config = Eagle2DrafterConfig


class HeadLayer(nn.Module):
    """One decoder layer. The first of an EAGLE-3 head, or each, reads token embeddings beside the
    feature.
    """

    def __init__(self, config: EagleConfig, layer: int) -> None:
        super().__init__()
        self.reads_embedding = config.generation == 3 and (layer == 0 or not config.next_layer_regular)
        self.norm_before_residual = config.norm_before_residual
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = attention(config, config.latent, layer, 2 * size if self.reads_embedding else size, eps=eps)
        self.mlp = HeadMLP(config)
        normed = config.generation == 3 or layer > 0
        self.input_layernorm: nn.Module = RMSNorm(size, eps) if normed else nn.Identity()
        if self.reads_embedding:
            self.hidden_norm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layer: `embeds` and `states` (B, N, H) -> (B, N, H), the residual stream after
        it.
        """
        if self.reads_embedding:
            normed = self.hidden_norm(states)
            inputs = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
            residual = normed if self.norm_before_residual else states
        else:
            inputs, residual = self.input_layernorm(states), states
        states = residual + self.self_attn(inputs, angles, attend)
        mixed: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return mixed
