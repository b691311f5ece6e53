"""Kangaroo (arXiv 2404.18911): the target's first layers and an adapter, one layer of attention,
draft.

A drafted token runs through the target's layers 0 .. E in the slot in which it is scored. The adapter stands in for the
other layers: ``h + Attention(norm(h))`` of the state h at boundary E, over what is committed and drafted before, then a
norm of its own and the target's output head. The states at E go along with a chain or a fixed tree, so that no layer
runs twice for a token (`self_drafting.early_exit`); the adapter's own cache holds keys and values of one layer.

Kangaroo's objective (arXiv 2404.18911) pulls the adapter's distributions towards the target's,
by cross-entropy.

The adapter drafts through the target's own output head, as in the published ``train.py``.

Kangaroo's own format (Equationliu/Kangaroo, ``kangaroo/adapter.py``): a Llama's keys in
``config.json``, for one layer, and tensors ``layers.0.input_layernorm``,
``layers.0.self_attn.*_proj`` and ``norm``.

Its file does not say after how many layers of the target the adapter stands, which its code is told on the command line
(``--exitlayer``): here it is the key ``exit_layer``, which also tells these files from an EAGLE head's. The published
``pytorch_model.bin`` is a pickle and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup
from forerun.drafters.drawing import Children
from forerun.drafters.self_drafting.early_exit import leave
from forerun.drafters.trees import FixedTree
from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError, find_problem
from forerun.heads import decoders
from forerun.heads.base import AdapterHead, Angles, Attend, HeadConfig, leave_away
from forerun.heads.drafting import HeadDrafter, HeadDrafterConfig
from forerun.heads.engines import DRAFT_HERE, EVERY, NO_SUCH_DRAFTER, Engines, Trait, always
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.heads.keys import Keys
from forerun.heads.layers import DecoderConfig, DecoderHead, HeadAttention, RMSNorm
from forerun.heads.runner import AdapterRunner
from forerun.losses.chunked_loss import soft_loss
from forerun.losses.objective import (
    DistanceSettings,
    FeatureBatch,
    FrozenTarget,
    HeadObjective,
    LossReport,
    mark_counted,
    run_or_checkpoint,
)
from forerun.losses.unrolled_attention import attend_documents
from forerun.model import TransformersTarget
from forerun.model.partial import prove
from forerun.types import LAST_HIDDEN, Budget

EXIT = 2  # Layers of the target that draft: what the paper takes for Vicuna 7B


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooConfig(DecoderConfig):
    """Shape of an adapter; ``boundaries`` is the one after the layers that draft, ``(E,)``."""

    kind: ClassVar[str] = "kangaroo"
    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "mlp_bias"),
        *("own_embedding", "own_lm_head"),
    }

    own_lm_head: bool = False

    def problem(self) -> str | None:
        away = leave_away(
            draft__vocab_size=self.reduced_vocabulary,
            hidden_size=self.hidden_size != self.target_hidden_size,
            own_lm_head=self.own_lm_head,
        )
        return find_problem(
            (
                len(self.boundaries) != 1 or self.boundaries[0] < 1,
                f"boundaries is the one after the layers that draft, such as ({EXIT},); got {self.boundaries}",
            ),
            (self.num_hidden_layers != 1, f"an adapter has one layer, got num_hidden_layers {self.num_hidden_layers}"),
            (
                bool(away),
                f"it proposes all of the target's tokens through the target's output head; {away}",
            ),
        ) or DecoderConfig.problem(self)

    def check_target(self, model: Any) -> None:
        """Check that the target's layers can be run in part, see `HeadConfig.check_target`."""
        prove(TransformersTarget(model, rows=1, slots=8), self.boundaries[0])

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

    def context(self, features: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        layer: Any = self.layers[0]
        return [layer.self_attn.entries(layer.input_layernorm(features), angles)]

    def adapt(self, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return self.norm(self.layers[0](features, angles, attend))


class AdapterLayer(nn.Module):
    """A decoder layer without its feed-forward part."""

    def __init__(self, config: KangarooConfig) -> None:
        super().__init__()
        self.self_attn = HeadAttention(config, 0)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        """Run the layer: (B, N, H) -> (B, N, H)."""
        return states + self.self_attn(self.input_layernorm(states), angles, attend)


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
        prove(self.runner.target, self.boundary)

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
                drafts.append((row, by_row[row], self._drafted[row]))
            leave(runner.target, self.boundary, drafts, torch.cat(runner.ran, dim=1))


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooSettings(DistanceSettings):
    """The divergence of the objective."""


class KangarooObjective(HeadObjective):
    """The loss of an adapter on a batch of features."""

    Settings: ClassVar[type[KangarooSettings]] = KangarooSettings

    def __init__(self, head: AdapterHead, target: FrozenTarget, settings: KangarooSettings | None = None) -> None:
        """Check the target; UnsupportedModelError if it caps its logits, which must be a linear map
        of states.
        """
        super().__init__(head, target, settings)
        if target.softcap is not None:
            raise UnsupportedModelError(
                f"kangaroo: the target caps its logits (final_logit_softcapping: {target.softcap:g}), which an adapter "
                "that drafts through its output head cannot be trained for; train eagle3"
            )

    def outputs(self, batch: FeatureBatch) -> Tensor:
        """Return what the output head reads, (B, S, H); entry i predicts token i + 1."""
        tokens = batch.batch
        attend = attend_documents(tokens.documents, self.head.windows)

        def run(features: Tensor) -> Tensor:
            return self.head.adapt(features, self.head.angles(tokens.positions, features), attend)

        return run_or_checkpoint(run, self.fused(batch), again=self.settings.gradient_checkpointing)

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all counted tokens, how often the likeliest token is the target's,
        and the overlap.
        """
        counts, settings = mark_counted(batch.batch, -1), self.settings
        hidden, weight = self.target.linear(self.outputs(batch))
        teacher = self.target.teacher(batch.features[LAST_HIDDEN], None)
        shares = counts.flatten().float()
        vocabulary_loss = soft_loss(
            hidden, weight.detach(), shares, teacher, settings.divergence, settings.lk_decay, mix=settings.mix
        )
        seen = counts.sum().float()
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics={
                "acceptance_0": (vocabulary_loss.agrees.sum(), seen),
                "overlap_0": (vocabulary_loss.overlap.sum(), seen),
            },
        )


# Its files
EXIT_KEY = "exit_layer"
ARCHITECTURE = "LlamaForCausalLM"  # Named so in the published files, although it is none


class KangarooFormat(Format):
    """Adapters of Equationliu/Kangaroo, as safetensors."""

    name = "kangaroo"

    def recognises(self, config: Config) -> bool:
        return EXIT_KEY in config

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        return not any(name.startswith("model.") for name in names)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        exit_layer, fields = keys.integer(EXIT_KEY), decoders.read_layers(keys)
        keys.pass_over("architectures", "tie_word_embeddings")
        if num_layers is not None and not 1 <= exit_layer < num_layers:
            raise CheckpointError(
                f"{EXIT_KEY} of config.json is {exit_layer}: expected 1..{num_layers - 1} for a target of {num_layers} "
                "layers"
            )
        return decoders.make_head(
            KangarooConfig,
            decoders.to_canonical(tensors),
            **fields,
            qk_norm=False,
            target_hidden_size=fields["hidden_size"],
            draft_vocab_size=fields["vocab_size"],
            boundaries=(exit_layer,),
            extra=keys.rest(),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        keys = {
            "architectures": [ARCHITECTURE],
            **decoders.write_layers(config),
            "torch_dtype": decoders.dtype_name(checkpoint),
            EXIT_KEY: config.boundaries[0],
        }
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "d2t"}
        return {**config.extra, **keys}, tensors


# What serving engines make of it
ENGINE_FACTS = Engines(
    traits=(Trait(always, "a Kangaroo adapter", [("fails", EVERY, NO_SUCH_DRAFTER)], DRAFT_HERE),),
)
