"""Medusa-1's objective (arXiv 2401.10774) lets each depth learn the token that really came, by
cross-entropy.

From the state of token i, depth k predicts token i + 2 + k; it weighs decay^k. The data are the target's own answers,
so the tokens are its choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.drafters.heads.medusa import MedusaHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch, LossReport, Objective, working_dtype
from forerun.training.chunked_loss import hard_loss
from forerun.training.objectives.base import (
    FrozenTarget,
    ObjectiveSettings,
    chain_metrics,
    mark_counted,
    run_or_checkpoint,
    shift_left,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaSettings(ObjectiveSettings):
    """`MedusaSettings` are the weights of the objective."""

    decay: float = 0.8
    """Base of the depths' weights: depth k weighs decay^k."""

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise ArgumentError(f"objective: decay must be in (0, 1], got {self.decay}")


class MedusaObjective(Objective):
    """A `MedusaObjective` is the loss of a Medusa head on a batch of features."""

    Settings: ClassVar[type[MedusaSettings]] = MedusaSettings

    def __init__(self, head: MedusaHead, target: FrozenTarget, settings: MedusaSettings | None = None) -> None:
        self.head, self.target, self.settings = head, target, settings or MedusaSettings()

    def parameters_module(self) -> nn.Module:
        return self.head

    def states(self, batch: FeatureBatch) -> Tensor:
        """Return what the output heads read, (B, S, depths, H); depth k of entry i predicts token i
        + 2 + k.
        """
        features = self.head.fuse([batch.features[boundary] for boundary in self.head.config.boundaries])
        features = features.to(working_dtype(features.device, self.head.weight.dtype))
        depths = self.head.config.num_heads
        again = self.settings.gradient_checkpointing
        found: Tensor = run_or_checkpoint(lambda features: self.head.states(features, depths), features, again=again)
        return found

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all depths and counted tokens, and how often a chain got to
        each depth.
        """
        tokens, losses, weights = batch.batch, list[Tensor](), list[Tensor]()
        counts, agrees = list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.states(batch).unbind(2)):
            counts.append(mark_counted(tokens, depth))
            shares = counts[-1] * self.settings.decay**depth
            wanted = shift_left(tokens.tokens, depth + 2, 0)
            output = self.head.output_weight(depth)
            found = hard_loss(
                states.flatten(0, 1),
                output,
                shares.flatten(),
                wanted.flatten(),
                temperature=self.target.temperature,
            )
            losses.append(found.loss)
            weights.append(found.weights.sum())
            agrees.append(found.agrees.view_as(shares))
        metrics = chain_metrics(torch.stack(counts), torch.stack(agrees))
        return LossReport(loss=torch.stack(losses).sum(), weight=torch.stack(weights).sum(), metrics=metrics)
