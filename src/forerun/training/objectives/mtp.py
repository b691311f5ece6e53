"""FastMTP's objective (arXiv 2509.18362) trains one MTP module, which drafts several tokens, on its
own states.

The module is unrolled K times as in `eagle3`; at depth k, from 0, entry i predicts token i + 2 + k of the data, which
the target itself should have written (``forerun data regenerate``). The loss is the cross-entropy, depth k weighing
beta^k, normalised to sum 1. Embedding and output head are the target's and stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field

from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch, LossReport
from forerun.training.chunked_loss import hard_loss
from forerun.training.objectives.base import (
    FrozenTarget,
    ObjectiveSettings,
    chain_metrics,
    check_unrolling,
    shift_left,
    unrolled_weights,
)
from forerun.training.objectives.eagle3 import Eagle3Objective


@dataclass(frozen=True, kw_only=True, slots=True)
class MtpSettings(ObjectiveSettings):
    """`MtpSettings` are depths and their weights; the defaults are the paper's."""

    steps: int = 3
    """K, the number of times that the module is unrolled."""
    decay: float = 0.6
    """Base of the depths' weights, beta: depth k weighs beta^k, normalised to sum 1."""
    flex_attention: bool = False
    """On CUDA: FlexAttention, see `Eagle3Settings`."""
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Uniform noise on the target's states, see `DecoderSettings`."""

    def __post_init__(self) -> None:
        check_unrolling(self.steps, self.decay)

    @property
    def weights(self) -> list[float]:
        """Return the weights (K,) of the depths, summing to 1."""
        return unrolled_weights(self.steps, self.decay)


class MtpObjective(Eagle3Objective):
    """An `MtpObjective` is the loss of a target's only MTP module on a batch of features."""

    kind: ClassVar[str] = "mtp"
    Settings: ClassVar[type[Any]] = MtpSettings
    settings: Any

    def __init__(self, head: Any, target: FrozenTarget, settings: MtpSettings | None = None) -> None:
        super().__init__(head, target, settings)  # type: ignore[arg-type]
        if (count := head.config.num_hidden_layers) > 1:
            raise ArgumentError(
                f"one MTP module is trained to draft several tokens, this target brings {count}, one for each; keep "
                "them as they are, or start from a checkpoint with num_nextn_predict_layers 1"
            )
        if target.softcap is not None or target.scale != 1.0 or target.bias is not None:
            raise ArgumentError("the target scales, caps or shifts its logits, which this objective does not")

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all depths and counted tokens, and how often a chain got to
        each depth.
        """
        steps, tokens = list(self.unroll(batch)), batch.batch.tokens
        wanted = torch.stack([shift_left(tokens, step.step + 2, 0) for step in steps])
        counts = torch.stack([step.counted for step in steps])
        shares = counts * torch.tensor(self.settings.weights, device=tokens.device).view(-1, 1, 1)
        outputs = torch.stack([step.output for step in steps])
        found = hard_loss(
            outputs.flatten(0, 2),
            self.output_head(),
            shares.flatten(),
            wanted.flatten(),
            temperature=self.target.temperature,
        )
        metrics = chain_metrics(counts, found.agrees.view_as(shares))
        return LossReport(loss=found.loss, weight=found.weights.sum(), metrics=metrics)
