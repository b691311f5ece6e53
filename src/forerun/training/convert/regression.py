"""EAGLE-1's objective (arXiv 2401.15077), unrolled like EAGLE-3's: tokens, and on request the target's features.

Knows no optimiser and no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from forerun.drafters.heads.eagle import EagleHead
from forerun.errors import ArgumentError
from forerun.training.objectives.eagle3 import Eagle3Objective, Eagle3Settings, FrozenTarget, Unrolled
from forerun.training.vocabulary import VocabularyLoss

TOKEN_SHARE = 0.1
"""Weight of the cross-entropy beside the regression's 1, as in EAGLE's own training."""


class Eagle1Objective(Eagle3Objective):
    """The loss of an EAGLE-1 head on a batch of features.

    With `regression` the head's features are pulled towards the target's (smooth L1, mean over the entries), beside a
    tenth of the cross-entropy; without, there is the cross-entropy alone.
    """

    def __init__(self, head: EagleHead, target: FrozenTarget, settings: Eagle3Settings, *, regression: bool) -> None:
        if head.config.generation != 1:
            raise ArgumentError("this is the objective of EAGLE-1 heads; the head is EAGLE-3's")
        self.head, self.target, self.settings, self.regression = head, target, settings, regression

    def _loss(self, steps: Sequence[Unrolled], weights: Tensor, last: Tensor) -> VocabularyLoss:
        found = super()._loss(steps, weights, last)
        if not self.regression:
            return found
        loss = TOKEN_SHARE * found.loss
        for step, weight in zip(steps, found.weights, strict=True):
            # What comes around at the end of a row is not counted.
            wanted = torch.roll(last, -(step.step + 1), dims=1)
            distance = smooth_l1_loss(step.output.float(), wanted.float(), reduction="none").mean(-1)
            loss = loss + (distance * weight).sum()
        return dataclasses.replace(found, loss=loss)
