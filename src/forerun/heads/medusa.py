"""Medusa-1 (arXiv 2401.10774): an output head for each token further ahead, all from one state of the target.

What depth k holds does not depend on the tokens above it, so all depths are one pass, and the likeliest paths are known
without another.

Medusa-1's objective (arXiv 2401.10774) lets each depth learn the token that really came, by
cross-entropy.

From the state of token i, depth k predicts token i + 2 + k; it weighs decay^k. The data are the target's own answers,
so the tokens are its choices.

Medusa's own format: three keys in ``config.json``, tensors ``DEPTH.LAYER.*`` in ``medusa_lm_head.safetensors``.

The sizes are those of the tensors. vLLM (to 0.32, ``MedusaConfig``, ``models/medusa.py``) reads the tensors by the same
names, and wants keys for the sizes and the biases, without which it drops these; they are written, too. The published
``medusa_lm_head.pt`` is a pickle and is refused.

How serving engines treat Medusa heads: vLLM drafted with them up to 0.32, today's engines do
not.

From vLLM 0.32, which was run with one (``tests_vllm``), 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4, llama.cpp and
LMDeploy 0.18.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from forerun.errors import CheckpointError, refuse
from forerun.heads.base import HeadConfig, ParallelHead, leave_away
from forerun.heads.drafting import BestFirstDrafter, HeadDrafterConfig
from forerun.heads.engines import (
    DRAFT_HERE,
    NO_SUCH_DRAFTER,
    Destination,
    Engines,
    Trait,
    always,
    plainly_named,
    vllm_line,
)
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written, make_config
from forerun.heads.keys import Keys
from forerun.heads.start import Seen
from forerun.losses.chunked_loss import hard_loss
from forerun.losses.objective import (
    FeatureBatch,
    Fraction,
    HeadObjective,
    LossReport,
    ObjectiveSettings,
    chain_metrics,
    mark_counted,
    run_or_checkpoint,
    shift_left,
)
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaConfig(HeadConfig):
    """Shape of a Medusa head."""

    kind: ClassVar[str] = "medusa"
    num_heads: int = 5  # Output heads: tokens drafted beyond the target's own
    num_layers: int = 1  # Residual blocks before each

    def __post_init__(self) -> None:
        away = leave_away(draft__vocab_size=self.reduced_vocabulary, boundaries=self.boundaries != (LAST_HIDDEN,))
        refuse(
            (
                self.num_heads < 1 or self.num_layers < 0,
                f"Medusa head: num_heads must be at least 1 and num_layers at least 0, got {self.num_heads} and "
                f"{self.num_layers}",
            ),
            (
                bool(away),
                f"Medusa head: it proposes all of the target's tokens and reads its last hidden state; {away}",
            ),
        )

    @property
    def max_depth(self) -> int | None:
        return self.num_heads

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"boundaries": (LAST_HIDDEN,), **options}


class MedusaHead(ParallelHead):
    """A Medusa head: some residual blocks and an output head for each depth; see `ParallelHead`."""

    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size, vocab = config.target_hidden_size, config.vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size) for _ in range(config.num_layers)), nn.Linear(size, vocab, bias=False))
            for _ in range(config.num_heads)
        )

    @property
    def weight(self) -> Tensor:
        return self.output_weight(0)

    def output_weight(self, depth: int) -> Tensor:
        """Return the weight (V, H) of the output head of that depth."""
        return self.heads[depth][-1].weight  # type: ignore[index]

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Let each depth predict at first what the target's own output head predicts."""
        for depth in range(self.config.num_heads):
            self.output_weight(depth).copy_(model.get_output_embeddings().weight.float())

    def fit(self, seen: Seen) -> None:
        """Let each depth read what comes nearest to the target's last state there."""
        for depth in range(self.config.num_heads):
            weight = self.output_weight(depth)
            weight.copy_(weight @ seen.nearest(lambda batch: batch.features[LAST_HIDDEN].float(), depth + 1))

    def scales(self) -> Sequence[nn.Parameter]:
        return [self.heads[depth][-1].weight for depth in range(self.config.num_heads)]  # type: ignore[index]

    def states(self, features: Tensor, depths: int) -> Tensor:
        return torch.stack([head[:-1](features) for head in self.heads[:depths]], -2)  # type: ignore[index]

    def logits(self, states: Tensor) -> Tensor:
        pairs = zip(self.heads, states.unbind(-2), strict=False)
        return torch.stack([head[-1](state) for head, state in pairs], -2)  # type: ignore[index]


class ResBlock(nn.Module):
    """Computes ``x + SiLU(W x + b)``; a fresh one does nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Apply the block: (.., H) -> (.., H)."""
        return states + silu(self.linear(states))


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaDrafterConfig(HeadDrafterConfig):
    """Options of `medusa`: those of the other head drafters; without another tree the likeliest
    `nodes` paths are drafted.
    """

    draw: str = "deterministic"  # By default the likeliest paths are taken at any temperature


class MedusaDrafter(BestFirstDrafter):
    """Drafts with a Medusa head."""

    name = "medusa"
    Config = MedusaDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaSettings(ObjectiveSettings):
    """The weights of the objective."""

    decay: Fraction = 0.8
    """Base of the depths' weights: depth k weighs decay^k."""


class MedusaObjective(HeadObjective):
    """The loss of a Medusa head on a batch of features."""

    Settings: ClassVar[type[MedusaSettings]] = MedusaSettings
    head: MedusaHead
    settings: MedusaSettings

    def states(self, batch: FeatureBatch) -> Tensor:
        """Return what the output heads read, (B, S, depths, H); depth k of entry i predicts token i
        + 2 + k.
        """
        depths, again = self.head.config.num_heads, self.settings.gradient_checkpointing
        return run_or_checkpoint(lambda features: self.head.states(features, depths), self.fused(batch), again=again)

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all depths and counted tokens, and how often a chain got to
        each depth.
        """
        tokens, losses, weights = batch.batch, list[Tensor](), list[Tensor]()
        counts, agrees = list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.states(batch).unbind(2)):
            counts.append(mark_counted(tokens, depth))
            shares = counts[-1] * self.settings.decay**depth
            following = shift_left(tokens.tokens, depth + 2, 0)
            output = self.head.output_weight(depth)
            vocabulary_loss = hard_loss(
                states.flatten(0, 1),
                output,
                shares.flatten(),
                following.flatten(),
                temperature=self.target.temperature,
            )
            losses.append(vocabulary_loss.loss)
            weights.append(vocabulary_loss.weights.sum())
            agrees.append(vocabulary_loss.agrees.view_as(shares))
        return LossReport(
            loss=torch.stack(losses).sum(),
            weight=torch.stack(weights).sum(),
            metrics=chain_metrics(torch.stack(counts), torch.stack(agrees)),
        )


# Its files
HEADS, LAYERS, TARGET = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
ENGINE = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
"""Keys and values that vLLM looks for."""
NAME = re.compile(r"(?:medusa_head\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))")


class MedusaFormat(Format):
    """Heads of FasterDecoding/Medusa, as safetensors."""

    name = "medusa"
    weights = "medusa_lm_head.safetensors"

    def recognises(self, config: Config) -> bool:
        return HEADS in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        heads, layers = keys.integer(HEADS), keys.integer(LAYERS, 1)
        keys.pass_over(TARGET, "hidden_size", "vocab_size", *ENGINE)
        canonical = {}
        for stored, tensor in tensors.items():
            name = NAME.fullmatch(stored)
            if name is None:
                raise CheckpointError(f"the tensor {stored} is none of a Medusa head; expected DEPTH.LAYER.weight")
            canonical[f"heads.{name[1]}"] = tensor
        output = canonical.get(f"heads.0.{layers}.weight")
        if output is None or output.dim() != 2:
            raise CheckpointError(f"there is no output head 0.{layers}.weight after {layers} layers ({LAYERS})")
        vocab_size, size = output.shape
        head = make_config(
            MedusaConfig,
            num_heads=heads,
            num_layers=layers,
            target_hidden_size=size,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size,
            boundaries=(LAST_HIDDEN,),
            extra=keys.rest(),
        )
        return HeadCheckpoint(config=head, tensors=canonical)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
        keys = {TARGET: target.name_or_path, HEADS: config.num_heads, LAYERS: config.num_layers, **sizes, **ENGINE}
        tensors = {name.removeprefix("heads."): tensor for name, tensor in checkpoint.tensors.items()}
        return {**config.extra, **keys}, tensors


# What serving engines make of it
ENGINE_FACTS = Engines(
    traits=(
        Trait(
            always,
            "a Medusa head",
            [("check", "vllm", "drafts a chain with it up to 0.32, with model runner V1; 0.33 has no such drafter")],
            f"serve with vLLM 0.32, or {DRAFT_HERE}",
        ),
        Trait(always, "a Medusa head", [("fails", "sglang trtllm llama.cpp lmdeploy", NO_SUCH_DRAFTER)], DRAFT_HERE),
        Trait(
            always,
            "a Medusa head",
            [("check", "modelopt", "trains such heads, but is not known to read this format")],
            "train on with forerun",
        ),
    ),
    destinations={
        "vllm": Destination(
            title="vLLM",
            engine="vllm",
            command=lambda launch: vllm_line(
                launch.target.name_or_path,
                method="medusa",
                model=str(plainly_named(launch)),
                num_speculative_tokens=launch.head.config.num_heads,
            ),
            counting="`num_speculative_tokens` counts drafted tokens: at most the head's depths.",
        )
    },
)
