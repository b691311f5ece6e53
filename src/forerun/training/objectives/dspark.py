"""DSpark's objective (arXiv 2607.05147) is DFlash's blocks, each depth after the token that really
came above it.

Cross-entropy to the target's distribution and total variation from it, 0.1 to 0.9, and for the confidence head the
binary cross-entropy to the acceptance that the depth really has: the overlap of the two distributions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from forerun.drafters.heads.base import Above
from forerun.drafters.heads.dspark import DSparkHead, FollowingHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch
from forerun.training.chunked_loss import Divergence, VocabularyLoss
from forerun.training.objectives.dflash import BlockOutputs, DFlashObjective, DFlashSettings
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkSettings(DFlashSettings):
    """`DSparkSettings` are anchors, weights and divergence of the objective; the defaults are
    DeepSeek's.
    """

    divergence: Divergence = Divergence.MIXED
    confidence_weight: float = 1.0
    """Weight of the confidence head's loss."""

    def __post_init__(self) -> None:
        DFlashSettings.__post_init__(self)
        if self.confidence_weight < 0:
            raise ArgumentError(f"objective: confidence_weight must not be negative, got {self.confidence_weight}")


class FollowingObjective(DFlashObjective):
    """A `FollowingObjective` has what heads share whose depths are corrected by the tokens that
    really came above them.
    """

    head: FollowingHead

    def corrected(self, blocks: BlockOutputs, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        """Return outputs (B, A, K, H + r) and weights (Vd, H + r) whose product is the corrected
        logits.
        """
        output, above = blocks.output.flatten(0, 1), self.above(blocks, batch)
        states, memory = list[Tensor](), None
        for depth in range(output.shape[1]):
            here = slice(depth, depth + 1)
            step = self.head.correct(output[:, here], Above(above[:, here], depth, memory, self.embed))
            memory = step.memory
            states.append(step.state)
        # The correction is a product like the output head's, so both are one.
        both = torch.cat([output, torch.cat(states, 1)], -1).view(*blocks.output.shape[:-1], -1)
        return both, torch.cat([self.output_head(), self.head.correction.weight], 1)


class DSparkObjective(FollowingObjective):
    """A `DSparkObjective` is the loss of a DSpark head on a batch of features."""

    Settings: ClassVar[type[DSparkSettings]] = DSparkSettings
    head: DSparkHead
    settings: DSparkSettings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        found = self._of_blocks(*self.corrected(blocks, batch), weights, blocks, batch.features[LAST_HIDDEN])
        said = self.head.confidence(blocks.output.flatten(0, 1), self.above(blocks, batch))
        if said is None:
            return found
        errors = binary_cross_entropy_with_logits(said.float().flatten(), found.overlap, reduction="none")
        loss = found.loss + self.settings.confidence_weight * (errors * found.weights).sum()
        return dataclasses.replace(found, loss=loss)
