"""Domino's objective (arXiv 2605.29707) is DFlash's blocks, each depth after the token that really
came above it.

Two losses, of the corrected logits and of those of the block alone: ``(1 - l) corrected + l block``. l falls from
`base_start` to 0, so that the block is good before it is corrected.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from forerun.drafters.heads.domino import DominoHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch
from forerun.training.chunked_loss import VocabularyLoss
from forerun.training.objectives.dflash import BlockOutputs, DFlashSettings
from forerun.training.objectives.dspark import FollowingObjective
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DominoSettings(DFlashSettings):
    """`DominoSettings` are anchors, weights and divergence of the objective, and how long the
    block's own loss counts.
    """

    base_start: float = 1.0
    """Share of the block's own loss in the first batch, in [0, 1]."""
    base_until: float = 0.5
    """Share of the run after which the block's share is 0, in (0, 1]; until then it falls linearly.
    """

    def __post_init__(self) -> None:
        DFlashSettings.__post_init__(self)
        if not 0 <= self.base_start <= 1:
            raise ArgumentError(f"objective: base_start must be in [0, 1], got {self.base_start}")
        if not 0 < self.base_until <= 1:
            raise ArgumentError(f"objective: base_until must be in (0, 1], got {self.base_until}")


class DominoObjective(FollowingObjective):
    """A `DominoObjective` is the loss of a Domino head on a batch of features; in evaluation of the
    corrected logits alone.
    """

    Settings: ClassVar[type[DominoSettings]] = DominoSettings
    head: DominoHead
    settings: DominoSettings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        last = batch.features[LAST_HIDDEN]
        found = self._of_blocks(*self.corrected(blocks, batch), weights, blocks, last)
        share = self.share(batch.done) if self.head.training else 0.0
        if not share:
            return found
        base = self._of_blocks(blocks.output, self.output_head(), weights, blocks, last)
        loss = (1 - share) * found.loss + share * base.loss
        return dataclasses.replace(found, loss=loss, weights=(1 - share) * found.weights + share * base.weights)

    def share(self, done: float) -> float:
        """Return the share of the block's own loss where the share `done` of the run is over."""
        return self.settings.base_start * max(0.0, 1 - done / self.settings.base_until)
