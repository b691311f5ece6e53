"""Native MTP (DeepSeek-V3, arXiv 2412.19437): the layers that a target was pretrained with to predict tokens further
ahead, drafted with as they ship; GLM-4-MoE's and MiMo's too.

Module k reads the next token's embedding beside a state, both normed, and is one decoder layer of the target's own
make: ``h' = layer(eh_proj([enorm(e); hnorm(h)]))``; ``shared_head.norm``, then the target's output head. Parameter
names are DeepSeek's on disk; see `checkpoints.mtp`.

Every token has an entry of its own in each module, which reads what the module before made of the token before it. So
one pass over what is committed runs all modules, and the nodes at depth k run those that predict from there on: module
k for the logits, the later ones for their keys. Beyond the last module that one goes on alone, on its own states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.drafters.heads.base import Advanced, Angles, Attend, SequentialHead
from forerun.drafters.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.drafters.heads.experts import Experts, ExpertsConfig, MixtureOfExperts, Router
from forerun.drafters.heads.latent import LATENT_EPS, LatentConfig, attention
from forerun.drafters.heads.layers import DecoderConfig, DecoderHead, HeadMLP, RMSNorm
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpConfig(DecoderConfig):
    """Shape of a target's MTP layers; ``num_hidden_layers`` is the number of modules, each with one
    decoder layer.
    """

    own_lm_head: bool = False
    experts: ExpertsConfig | None = None  # None: a dense feed-forward part
    latent: LatentConfig | None = None  # None: ordinary attention
    partial_rotary_factor: float = 1.0  # Share of a head's dimensions, from the first on, that is rotated

    @property
    def kind(self) -> str:
        return "mtp"

    @property
    def norm_output(self) -> bool:
        """True if a module hands its normed output on: then it reads the target's state after the
        final norm, too.
        """
        return self.boundaries == (LAST_HIDDEN,)

    @property
    def rotary_dim(self) -> int:
        if self.latent is not None:
            return self.latent.qk_rope_head_dim
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def output_bias(self) -> bool:
        return False

    def problem(self) -> str | None:
        if len(self.boundaries) != 1 or self.hidden_size != self.target_hidden_size:
            return f"it reads one state of the target, as wide as itself; got boundaries {self.boundaries}"
        if self.num_hidden_layers < 1:
            return "the target has no MTP layers"
        if self.experts is not None and (wrong := self.experts.problem()):
            return wrong
        if self.latent is not None and (wrong := self.latent.problem(self)):
            return wrong
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        raise ArgumentError(
            "MTP layers come from a target's own checkpoint and are not made anew; name one with draft.start, or train "
            "a head of another kind"
        )


class MtpHead(DecoderHead, SequentialHead):
    """The MTP modules of a target; see `SequentialHead`. A feature is the outputs of all modules,
    side by side.
    """

    Config = MtpConfig
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(MtpModule(config, layer) for layer in range(config.num_hidden_layers))
        self.complete()
        for module in self.modules():
            for weight in module.parameters(recurse=False) if isinstance(module, Experts | Router) else ():
                nn.init.normal_(weight, std=config.initializer_range)

    @property
    def feature_size(self) -> int:
        return self.config.num_hidden_layers * self.config.hidden_size

    @property
    def output_size(self) -> int:
        return self.config.hidden_size

    @property
    def unseen(self) -> tuple[int, ...]:
        return tuple(range(self.config.num_hidden_layers))  # the texts that module k learned begin k tokens later

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def read(self, embeds: Tensor, features: Tensor, before: Tensor, angles: Angles, attend: Attend) -> Advanced:
        made, states = list[Advanced](), features
        for module, earlier in zip(self.layers, before.chunk(len(self.layers), -1), strict=True):
            made.append(module(embeds, states, angles, attend))
            states = torch.cat([earlier, made[-1].feature[:, :-1]], 1)
        return Advanced(torch.cat([one.feature for one in made], -1), made[0].output)

    def advance(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend, depth: int = 1) -> Advanced:
        parts, last = list(features.chunk(len(self.layers), -1)), len(self.layers) - 1
        for layer in range(last, min(depth, last) - 1, -1):  # from the last on: each reads what its parent's entry made
            states = parts[layer - 1] if layer >= depth else parts[layer]
            made: Advanced = self.layers[layer](embeds, states, angles, attend)
            parts[layer] = made.feature
        return Advanced(torch.cat(parts, -1), made.output)


class MtpModule(nn.Module):
    """One MTP module: combines its inputs for a decoder layer, and runs it."""

    def __init__(self, config: MtpConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_output = config.norm_output
        self.enorm, self.hnorm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size, eps), RMSNorm(size, eps)
        experts = config.experts
        self.self_attn = attention(config, config.latent, layer, eps=LATENT_EPS)
        self.mlp = HeadMLP(config) if experts is None else MixtureOfExperts(config, experts)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(size, eps)})

    def forward(self, embeds: Tensor, states: Tensor, angles: Angles, attend: Attend) -> Advanced:
        """Run the module on `embeds` and `states` (B, N, H)."""
        states = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(states)], -1))
        states = states + self.self_attn(self.input_layernorm(states), angles, attend)
        states = states + self.mlp(self.post_attention_layernorm(states))
        output = self.shared_head["norm"](states)
        return Advanced(output if self.norm_output else states, output)


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpDrafterConfig(HeadDrafterConfig):
    """Options of `mtp`: those of the other head drafters; without `model` the layers of the
    target's own checkpoint draft.
    """

    num_speculative_tokens: int = 3  # May exceed the number of modules: the last one goes on


class MtpDrafter(HeadDrafter):
    """Drafts with the MTP layers of a checkpoint: chain, fixed tree or dynamic tree."""

    name = "mtp"
    Config = MtpDrafterConfig
