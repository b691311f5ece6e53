"""Kangaroo (arXiv 2404.18911): the target's first layers and an adapter, one layer of attention,
draft.

A drafted token runs through the target's layers 0 .. E in the slot in which it is scored. The adapter stands in for the
other layers: ``h + Attention(norm(h))`` of the state h at boundary E, over what is committed and drafted before, then a
norm of its own and the target's output head. The states at E go along with a chain or a fixed tree, so that no layer
runs twice for a token (`self_drafting.early_exit`); the adapter's own cache holds keys and values of one layer.
Checkpoints: `checkpoints.kangaroo`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, DrafterSetup
from forerun.drafters.drawing import Children
from forerun.drafters.heads.base import AdapterHead, Angles, Attend, HeadConfig
from forerun.drafters.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.drafters.heads.layers import DecoderConfig, DecoderHead, HeadAttention, RMSNorm
from forerun.drafters.heads.runner import AdapterRunner
from forerun.drafters.self_drafting.early_exit import leave
from forerun.drafters.trees import FixedTree
from forerun.errors import ArgumentError
from forerun.model.partial import prove
from forerun.types import Budget

EXIT = 2  # Layers of the target that draft: what the paper takes for Vicuna 7B


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooConfig(DecoderConfig):
    """Shape of an adapter; ``boundaries`` is the one after the layers that draft, ``(E,)``."""

    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "mlp_bias"),
        *("own_embedding", "own_lm_head"),
    }

    own_lm_head: bool = False

    @property
    def kind(self) -> str:
        return "kangaroo"

    def problem(self) -> str | None:
        if len(self.boundaries) != 1 or self.boundaries[0] < 1:
            return f"boundaries is the one after the layers that draft, such as ({EXIT},); got {self.boundaries}"
        if self.num_hidden_layers != 1:
            return f"an adapter has one layer, got num_hidden_layers {self.num_hidden_layers}"
        if self.reduced_vocabulary or self.hidden_size != self.target_hidden_size or self.own_lm_head:
            return (
                "it proposes all of the target's tokens through the target's output head; leave draft.vocab_size and "
                "hidden_size away"
            )
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`."""
        found = cls.layer_fields(config) | dict(options)
        found.setdefault("boundaries", (min(EXIT, config.num_hidden_layers - 1),))
        return found | {name: tuple(found[name]) for name in ("boundaries", "full_layers") if name in found}


class KangarooHead(DecoderHead, AdapterHead):
    """A Kangaroo adapter, see `AdapterHead`."""

    Config = KangarooConfig
    config: KangarooConfig

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([AdapterLayer(config)])
        self.norm: nn.Module = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.complete()

    @property
    def recordable(self) -> bool:
        return False  # the target's layers are run in part

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def context(self, features: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        layer: Any = self.layers[0]
        return [layer.self_attn.entries(layer.input_layernorm(features), angles)]

    def adapt(self, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        output: Tensor = self.norm(self.layers[0](features, angles, attend))
        return output


class AdapterLayer(nn.Module):
    """A decoder layer without its feed-forward part."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, 0)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layer: (B, N, H) -> (B, N, H)."""
        mixed: Tensor = states + self.self_attn(self.input_layernorm(states), angles, attend)
        return mixed


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooDrafterConfig(HeadDrafterConfig):
    """Options of `kangaroo`: those of the other head drafters, and the second exit."""

    num_speculative_tokens: int = 6  # Length of the chain, or most tokens on one path of a tree
    exit_below: float = 0.6
    """Least probability of the likeliest next token: a chain or fixed tree grows no deeper once
    none of its last nodes reaches it; 0: never. What was drafted up to there is submitted. A
    dynamic tree has `stop_below`.
    """

    def __post_init__(self) -> None:
        HeadDrafterConfig.__post_init__(self)
        if not 0 <= self.exit_below < 1:
            raise ArgumentError(f"kangaroo: exit_below must be in [0, 1), got {self.exit_below}")


class KangarooDrafter(HeadDrafter):
    """Drafts with the target's first layers and an adapter: chain, fixed tree or dynamic tree."""

    name = "kangaroo"
    Config = KangarooDrafterConfig
    config: KangarooDrafterConfig
    runner: AdapterRunner

    def __init__(self, config: KangarooDrafterConfig, setup: DrafterSetup) -> None:
        """Build the drafter. Besides the errors of every head drafter it raises ArgumentError if no
        layer is left to verify, and UnsupportedModelError if the target's layers cannot be run in
        part.
        """
        super().__init__(config, setup)
        self.boundary, layers = self.head.config.boundaries[0], setup.target.num_layers
        if self.boundary >= layers:
            raise ArgumentError(f"kangaroo: the head exits after {self.boundary} layers, the target has {layers}")
        prove(setup.target, self.boundary)

    def stopped(self, children: Children) -> list[bool]:
        if not self.config.exit_below:
            return []
        # The figure of a sampled node is that of the distribution it was drawn from, whatever was drawn.
        surest: list[float] = children.confidence.flatten(1).amax(1).tolist()
        return [sure < self.config.exit_below for sure in surest]

    def _fixed(self, tree: FixedTree, context: DraftContext, budget: Budget, trees: list[TokenTree]) -> None:
        runner = self.runner
        runner.shape, runner.ran = tree.shape, []
        try:
            super()._fixed(tree, context, budget, trees)
        finally:
            runner.shape = None
        if runner.ran:
            by_row, drafts = dict(zip(context.rows, trees, strict=True)), []
            for row in runner.rows:
                submitted = self._rows[row].submitted
                assert submitted is not None, "it was drafted just now"
                drafts.append((row, by_row[row], submitted))
            leave(runner.target, self.boundary, drafts, torch.cat(runner.ran, dim=1))
