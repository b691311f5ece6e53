"""EAGLE-1's objective (arXiv 2401.15077) learns the target's next feature, by regression, and its
next token.

The head reads the target's own features with noise on them, as it reads its own, inexact ones when it drafts. Its
output is pulled towards the target's feature of the next token (smooth L1, mean over the entries), and through the
output head towards its probabilities. With several steps it is unrolled as in `eagle3`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from forerun.errors import ArgumentError
from forerun.training.chunked_loss import VocabularyLoss
from forerun.training.objectives.eagle3 import Eagle3Objective, Eagle3Settings, UnrolledStep


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleSettings(Eagle3Settings):
    """`EagleSettings` are steps, weights and noise of the objective; the defaults are the paper's."""

    steps: int = 1
    """Times that the head is unrolled; beyond the first on its own features."""
    regression_weight: float = 1.0
    """Weight of the distance to the target's features."""
    token_weight: float = 0.1
    """Weight of the cross-entropy, or of what `divergence` says."""
    noise: float = 0.1
    """Uniform noise on the target's states, see `DecoderSettings`."""

    def __post_init__(self) -> None:
        Eagle3Settings.__post_init__(self)
        if min(self.regression_weight, self.token_weight, self.noise) < 0:
            raise ArgumentError("objective: regression_weight, token_weight and noise must not be negative")
        if not self.regression_weight + self.token_weight:
            raise ArgumentError("objective: one of regression_weight and token_weight must be positive")


class EagleObjective(Eagle3Objective):
    """An `EagleObjective` is the loss of an EAGLE-1 head on a batch of features, noisy while the
    head is in training mode.
    """

    kind: ClassVar[str] = "eagle"
    Settings: ClassVar[type[EagleSettings]] = EagleSettings
    settings: EagleSettings

    def _loss(self, steps: Sequence[UnrolledStep], weights: Tensor, last: Tensor) -> VocabularyLoss:
        found = super()._loss(steps, weights, last)
        loss = self.settings.token_weight * found.loss
        for step, weight in zip(steps, found.weights, strict=True):
            # What comes around at the end of a row is not counted.
            wanted = torch.roll(last, -(step.step + 1), dims=1)
            distance = smooth_l1_loss(step.output.float(), wanted.float(), reduction="none").mean(-1)
            loss = loss + self.settings.regression_weight * (distance * weight).sum()
        return dataclasses.replace(found, loss=loss)
