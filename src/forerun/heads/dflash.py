"""DFlash (arXiv 2602.06036): a block of tokens in one pass, over keys and values made of the target's hidden states.

A block is the root and masks behind it. Each layer's keys and values are its projection of the fused states of what is
committed, and behind them those of the block, in which every place sees every other. Parameter names are those on disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.drafters.heads.base import Angles, Attend, BlockHead, HeadConfig
from forerun.drafters.heads.drafting import BestFirstDrafter, HeadDrafterConfig
from forerun.drafters.heads.layers import DecoderConfig, DecoderHead, DecoderLayer, RMSNorm, spare_token


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(DecoderConfig):
    """Shape of a DFlash head; the defaults are those of z-lab's checkpoints."""

    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {"hidden_size"}

    LEAST: ClassVar[Mapping[str, int]] = {**DecoderConfig.LEAST, "block_size": 2}

    mask_token_id: int  # Stands for what is not known yet; one of the target's tokens that no text holds
    block_size: int = 16  # Tokens of a block, the root's place included
    sample_from_anchor: bool = False
    """True: the root's own position predicts the token after it (DSpark). False: each mask predicts
    its own token.
    """
    is_causal: bool = False  # Positions of a block see none behind them, in any layer
    causal_windows: bool = False  # As `is_causal`, but only in layers with a sliding window (speculators)
    num_hidden_layers: int = 5
    qk_norm: bool = True
    own_lm_head: bool = False

    @property
    def kind(self) -> str:
        return "dflash"

    @property
    def max_depth(self) -> int | None:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def problem(self) -> str | None:
        if not 0 <= self.mask_token_id < self.vocab_size:
            return f"mask_token_id must be one of the target's {self.vocab_size} tokens, got {self.mask_token_id}"
        if any(boundary < 0 for boundary in self.boundaries):
            return f"boundaries count layers from 0, got {self.boundaries}"
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`. Without a mask token it is the padding
        token, or the last one.
        """
        found = cls.layer_fields(config) | dict(options)
        layers = found.setdefault("num_hidden_layers", min(5, config.num_hidden_layers))
        found.setdefault("boundaries", spread_boundaries(config.num_hidden_layers, layers))
        found.setdefault("mask_token_id", spare_token(config))
        return found | {name: tuple(found[name]) for name in ("boundaries", "full_layers") if name in found}


def spread_boundaries(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` boundaries of a target of `num_layers`, evenly from 2 to all but two layers,
    as z-lab spreads them; fewer if it has too few layers.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    last = max(1, num_layers - 3)
    return tuple(sorted({round(1 + step * (last - 1) / (count - 1)) + 1 for step in range(count)}))


class DFlashHead(DecoderHead, BlockHead):
    """A DFlash head, see `BlockHead`."""

    Config = DFlashConfig
    config: DFlashConfig
    layer: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.boundaries) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(self.layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps)
        self.complete()

    @property
    def places(self) -> int:
        return self.config.block_size

    @property
    def first(self) -> int:
        return 0 if self.config.sample_from_anchor else 1

    @property
    def mask_token(self) -> int:
        return self.config.mask_token_id

    def causal(self, layer: int) -> bool:
        return self.config.is_causal or (self.config.causal_windows and self.config.window(layer) is not None)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        fused: Tensor = self.hidden_norm(self.fc(torch.cat(list(features), dim=-1)))
        return fused

    def context(self, features: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        return [layer.self_attn.entries(features, angles) for layer in self.layers]  # type: ignore[union-attr, operator]

    def block(self, embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
        states = embeds
        for layer in self.layers:
            states = layer(states, angles, attend)
        output: Tensor = self.norm(states)
        return output


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDrafterConfig(HeadDrafterConfig):
    """Options of drafters with a block head: those of the other head drafters. Without another tree
    the likeliest `nodes` paths are drafted.
    """

    num_speculative_tokens: int = 16  # Most tokens on one path; at most what the head's block holds


class DFlashDrafter(BestFirstDrafter):
    """Drafts with a DFlash head."""

    name = "dflash"
    Config = BlockDrafterConfig
