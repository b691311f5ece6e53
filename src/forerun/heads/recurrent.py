"""The objective of recurrent heads (Hydra, MLP speculator) trains each depth after the tokens that
really came above it.

From the state of token i, depth k reads the tokens i + 1 .. i + 1 + k and predicts token i + 2 + k: its distribution is
pulled towards the target's there. That is Hydra++'s teacher loss (arXiv 2402.05109); the MLP speculator's second stage
(arXiv 2404.19124) learns tokens that the target sampled, of which this is the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from forerun.heads.base import RecurrentHead
from forerun.losses.chunked_loss import soft_loss
from forerun.losses.objective import (
    DistanceSettings,
    FeatureBatch,
    HeadObjective,
    LossReport,
    chain_metrics,
    mark_counted,
    run_or_checkpoint,
    shift_left,
)
from forerun.losses.unrolled_attention import attend_documents
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentSettings(DistanceSettings):
    """`RecurrentSettings` are the divergence of the objective; all depths weigh the same."""


class RecurrentObjective(HeadObjective):
    """A `RecurrentObjective` is the loss of a recurrent head on a batch of features."""

    Settings: ClassVar[type[RecurrentSettings]] = RecurrentSettings
    head: RecurrentHead
    settings: RecurrentSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all depths and counted predictions, and how often a chain got to each
        depth.
        """
        tokens, last, losses, weights = batch.batch, batch.features[LAST_HIDDEN], list[Tensor](), list[Tensor]()
        counts, agrees, overlap = list[Tensor](), list[Tensor](), list[Tensor]()
        for depth, states in enumerate(self.outputs(batch)):
            seen, output, (weight, bias) = mark_counted(tokens, depth), states, self.head.output_head(depth)
            if bias is not None:  # as one more entry of every state, which is 1
                output = torch.cat([states, torch.ones_like(states[..., :1])], -1)
                weight = torch.cat([weight, bias.unsqueeze(1)], 1)
            found = soft_loss(
                output.flatten(0, 1),
                weight,
                seen.flatten().float(),
                self.target.teacher(shift_left(last, depth + 1, 0.0), None),
                self.settings.divergence,
                self.settings.lk_decay,
                mix=self.settings.mix,
            )
            losses.append(found.loss)
            weights.append(found.weights.sum())
            counts.append(seen)
            agrees.append(found.agrees.view_as(seen))
            overlap.append(found.overlap.view_as(seen))
        return LossReport(
            loss=torch.stack(losses).sum(),
            weight=torch.stack(weights).sum(),
            metrics=chain_metrics(torch.stack(counts), torch.stack(agrees), torch.stack(overlap)),
        )

    def outputs(self, batch: FeatureBatch) -> tuple[Tensor, ...]:
        """Return what the output head reads by depth, (B, S, H) each; entry i predicts token i + 2
        + depth.
        """
        tokens, depths = batch.batch, self.head.config.max_depth
        assert depths is not None, "a recurrent head has weights for so many depths"
        attend = attend_documents(tokens.documents, self.head.windows)

        def run(features: Tensor) -> tuple[Tensor, ...]:
            memory, found = self.head.prefix(features, tokens.positions, attend), list[Tensor]()
            for depth in range(depths):
                embeds = self.embed(shift_left(tokens.tokens, depth + 1, 0), depth).to(features.dtype)
                stepped = self.head.step(depth, embeds, memory)
                memory = stepped.memory
                found.append(stepped.output)
            return tuple(found)

        return run_or_checkpoint(run, self.fused(batch), again=self.settings.gradient_checkpointing)
