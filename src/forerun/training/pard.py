"""PARD's objective (arXiv 2504.18583), with PARD-2's weights (2605.08632), lets a draft model learn
to draft from masks.

Entry i, at depth 0, is token i, and predicts token i + 1 as any causal LM does. Its mask of depth d stands at position
i + d, sees the tokens up to i of its document and its own masks up to d, and predicts token i + 1 + d; deeper ones are
of fewer entries: `conditional_drop`.

PARD learns the data's tokens, which the target should have written. PARD-2 learns the target's distribution beside
them, and weighs a prediction by how likely the target itself goes on as the data does up to there (confidence-adaptive
tokens): what stands behind an unlikely token is hardly ever reached. Its states of the target are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.drafters.draft_models.pard import mask_token
from forerun.errors import ArgumentError
from forerun.losses.chunked_loss import hard_loss
from forerun.losses.objective import (
    Count,
    DistanceSettings,
    FeatureBatch,
    Fraction,
    FrozenTarget,
    LossReport,
    Masked,
    Natural,
    NotNegative,
    Share,
    shift_left,
)
from forerun.model.support import refuse_stateful
from forerun.training.distill import DraftModelObjective
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PardSettings(DistanceSettings):
    """Depths, conditional drop, and what is learnt; the defaults are those of
    AMD's recipe for PARD.
    """

    depths: Natural = 8
    """Tokens that an entry learns to predict, at most."""
    keep: Fraction = 0.7
    """Share of the entries at a depth that goes on to the next one."""
    floor: Share = 0.2
    """Least share of a row's entries at any depth."""
    data_weight: NotNegative = 1.0
    """Weight of the cross-entropy of the data's tokens in the loss; PARD-2: 0.1."""
    target_weight: NotNegative = 0.0
    """Weight of the `divergence` from the target's distributions; PARD-2: 1."""
    confidence: bool = False
    """Confidence-adaptive tokens of PARD-2: a prediction weighs the target's probability of the
    data's tokens up to itself.
    """
    mask_token: Count | None = None
    """Id that a mask reads; None: the model's own, or the first that the tokenizer does not use (`pard.mark`)."""

    def __post_init__(self) -> None:
        DistanceSettings.__post_init__(self)
        if not self.data_weight and not self.target_weight:
            raise ArgumentError("objective: data_weight and target_weight are both 0; there is nothing to learn")


class PardObjective(DraftModelObjective):
    """The loss of a PARD model on a batch of features, whose state after the
    final norm is read.
    """

    Settings: ClassVar[type[PardSettings]] = PardSettings
    settings: PardSettings

    def __init__(self, draft: Any, target: FrozenTarget, settings: PardSettings | None = None) -> None:
        """Take `draft`, a transformers causal LM; UnsupportedModelError for recurrent states."""
        refuse_stateful(
            draft,
            "PARD learns all depths in one pass, in which masks of many entries stand behind each other, and a state "
            "would flow from one into the next. forerun train distill trains it as a draft model",
        )
        super().__init__(draft, target, settings)

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all counted predictions, how often a chain got to each
        depth, and the overlap there.
        """
        settings, (masked, states) = self.settings, self.masked(batch)
        weights = self._weights(masked, batch)
        following = masked.following(batch.features[LAST_HIDDEN])
        vocabulary_loss = self.distance(self.draft, states, weights, following, frozen=not settings.target_weight)
        loss = settings.target_weight * vocabulary_loss.loss
        if settings.data_weight:
            hidden, weight = self.draft.linear(states, len(self.target.lm_head))
            targets = masked.following(shift_left(batch.batch.tokens, 1, 0)).flatten()
            loss = loss + settings.data_weight * hard_loss(hidden, weight, weights.flatten(), targets).loss
        agrees, overlap = (part.view(weights.shape) for part in (vocabulary_loss.agrees, vocabulary_loss.overlap))
        return LossReport(loss=loss, weight=weights.sum(), metrics=masked.metrics(agrees, overlap, settings))

    def masked(self, batch: FeatureBatch) -> tuple[Masked, Tensor]:
        """Return what is computed, and the model's states (B, N, H) after its final norm."""
        masked = Masked.of(batch.batch, self.settings, 0, random=self.parameters_module().training)
        return masked, self.draft.masked(batch.batch, masked, mask_token(self.draft.model))

    def _weights(self, masked: Masked, batch: FeatureBatch) -> Tensor:
        """Return the weights (B, N) float32 of each prediction, 0 where it does not count."""
        weights = masked.counted.float()
        if not self.settings.confidence:
            return weights
        next_token = shift_left(batch.batch.tokens, 1, 0)
        chances = self.target.chances(batch.features[LAST_HIDDEN], next_token)
        reached = [torch.ones_like(chances)]
        for depth in range(1, self.settings.depths):
            reached.append(reached[-1] * shift_left(chances, depth - 1, 1.0))
        return weights * masked.pick(torch.stack(reached, 1))
