"""Distillation pulls a draft model's distributions towards the target's (DistillSpec, arXiv
2310.08461).

AdaSPEC (arXiv 2510.19779) leaves tokens out that so small a model cannot learn: a reference, a draft model that was
distilled before, shows by how much each token's loss can fall, and only the share with the most to gain counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError
from forerun.losses.chunked_loss import VocabularyLoss, hard_loss, soft_loss, working_dtype
from forerun.losses.objective import (
    DistanceSettings,
    FeatureBatch,
    Fraction,
    FrozenTarget,
    LossReport,
    Masked,
    Objective,
    TokenBatch,
    mark_counted,
)
from forerun.model.layers import base_of
from forerun.model.load import LoadOptions
from forerun.model.masks import MaskStyle, additive
from forerun.model.prepare import open_named
from forerun.model.support import reads_apart, text_config
from forerun.training.features.online import PackedPass
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillSettings(DistanceSettings):
    """How the distance to the target is measured, and which tokens count."""

    reference: str | None = None
    """AdaSPEC: directory or hub id of a draft model that was distilled before; None: all tokens count."""
    keep: Fraction = 0.4
    """Share of each window's tokens that count with a `reference`."""


class DraftStates:
    """Runs a causal LM over packed windows: its last states, and its output head as
    one matrix.
    """

    def __init__(self, model: Any, *, gradient_checkpointing: bool = False) -> None:
        """Check the model; UnsupportedModelError for unknown attention, or logits that are not linear
        in states.
        """
        self.model, self._base, self._style = model, base_of(model), MaskStyle.of(text_config(model))
        self._apart = reads_apart(model)
        self._check()
        if gradient_checkpointing:
            # transformers has renamed it.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})

    def states(self, batch: TokenBatch) -> Tensor:
        """Return the states (B, S, H) after the final norm; each document sees itself alone."""
        one = PackedPass.of(batch, self._style, self._dtype(batch), apart=self._apart)
        return one.restore(self._base(**one.inputs).last_hidden_state)

    def masked(self, batch: TokenBatch, masked: Masked, mask_token: int) -> Tensor:
        """Return the states (B, N, H) after the final norm, of all that is `masked`: tokens at
        depth 0, then the mask token.
        """
        rows = len(batch.tokens)
        behind = masked.entries.shape[1] - batch.tokens.shape[1]
        ids = torch.cat([batch.tokens, batch.tokens.new_full((rows, behind), mask_token)], 1)
        mask = additive(masked.sees(batch), self._style, masked.positions, masked.positions, self._dtype(batch))
        inputs = {"input_ids": ids, "position_ids": masked.positions, "attention_mask": mask}
        return self._base(**inputs, use_cache=False).last_hidden_state

    def linear(self, states: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Return `FrozenTarget.linear` of the model's own output head as it is now."""
        return FrozenTarget.of(self.model).linear(states, vocabulary)

    def loss(
        self, states: Tensor, counts: Tensor, batch: FeatureBatch, target: FrozenTarget, learn_from: str
    ) -> VocabularyLoss:
        """Return the loss of its `states` (B, S, H) where `counts` (B, S).

        It is the cross-entropy to the `target` as it was, or, as `learn_from` says, to the data.
        """
        hidden, weight = self.linear(states, len(target.lm_head))
        shares = counts.flatten().float()
        if learn_from == "data":
            return hard_loss(hidden, weight, shares, batch.batch.tokens.roll(-1, 1).flatten())
        return soft_loss(hidden, weight, shares, target.teacher(batch.features[LAST_HIDDEN], None))

    def _dtype(self, batch: TokenBatch) -> torch.dtype:
        return working_dtype(batch.tokens.device, self.model.dtype)

    @torch.no_grad()
    def _check(self) -> None:
        """Compare with what the model computes itself."""
        ids = torch.arange(2, device=self.model.device).unsqueeze(0)
        with torch.autocast(self.model.device.type, enabled=False):
            logits = self.model(input_ids=ids, use_cache=False).logits[0].float()
            states = self._base(input_ids=ids, use_cache=False).last_hidden_state
            states, weight = self.linear(states, logits.shape[-1])
        softcap = FrozenTarget.of(self.model).softcap
        error = float((states.float() @ weight.float().T - logits).abs().max() / logits.abs().max().clamp_min(1e-9))
        if softcap is not None or not error < 2e-2:
            why = f"capped (final_logit_softcapping: {softcap})" if softcap else f"off by {error:.1%} otherwise"
            raise UnsupportedModelError(
                f"{self.model.config.model_type} cannot be distilled: its logits must be a linear map of its last "
                f"states, and are {why}"
            )


class DraftModelObjective(Objective):
    """The base of the objectives of draft models: the model that is trained, and its
    distance to the target.
    """

    Settings: ClassVar[type[DistanceSettings]]
    settings: Any

    def __init__(self, draft: Any, target: FrozenTarget, settings: Any = None) -> None:
        """Take `draft`, a transformers causal LM."""
        self.target, self.settings = target, settings or self.Settings()
        self.draft = DraftStates(draft, gradient_checkpointing=self.settings.gradient_checkpointing)

    def parameters_module(self) -> nn.Module:
        return self.draft.model

    def distance(
        self, draft: DraftStates, states: Tensor, shares: Tensor, following: Tensor, *, frozen: bool = False
    ) -> VocabularyLoss:
        """Return the distance of `draft` after its `states` (B, N, H) from the target after
        `following` (B, N, Ht).

        Predictions have the weights `shares` (B, N); `frozen`: the forward divergence, without a
        gradient.
        """
        hidden, weight = draft.linear(states, len(self.target.lm_head))
        vocabulary = len(weight)
        fewer = torch.arange(vocabulary, device=weight.device) if vocabulary < len(self.target.lm_head) else None
        teacher = self.target.teacher(following, fewer)
        weights = shares.flatten().float()
        if frozen:
            return soft_loss(hidden.detach(), weight.detach(), weights, teacher)
        settings = self.settings
        return soft_loss(hidden, weight, weights, teacher, settings.divergence, settings.lk_decay, mix=settings.mix)


class DistillObjective(DraftModelObjective):
    """The loss of a draft model on a batch of features, whose state after
    the final norm is read.
    """

    Settings: ClassVar[type[DistillSettings]] = DistillSettings
    settings: DistillSettings

    def __init__(self, draft: Any, target: FrozenTarget, settings: DistillSettings | None = None) -> None:
        """Take `draft`, a transformers causal LM, and load the reference beside it."""
        super().__init__(draft, target, settings)
        self.reference: DraftStates | None = None
        if self.settings.reference is not None:
            options = LoadOptions(dtype=target.lm_head.dtype, device=str(draft.device))
            self.reference = DraftStates(open_named(self.settings.reference, options).requires_grad_(False))

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all counted tokens, how often the draft's likeliest token is the
        target's, and the overlap.
        """
        counts, last = mark_counted(batch.batch, -1), batch.features[LAST_HIDDEN]
        states = self.draft.states(batch.batch)
        shares = counts
        figures: VocabularyLoss | None = None
        if self.reference is not None:
            figures = self.distance(self.draft, states.detach(), counts, last, frozen=True)
            learnt = self.distance(self.reference, self._of_reference(batch.batch), counts, last, frozen=True)
            shares = most_to_gain(
                figures.losses.view_as(counts), learnt.losses.view_as(counts), counts, self.settings.keep
            )
        vocabulary_loss = self.distance(self.draft, states, shares, last)
        figures = figures or vocabulary_loss
        seen = counts.sum().float()
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics={"acceptance_0": (figures.agrees.sum(), seen), "overlap_0": (figures.overlap.sum(), seen)},
        )

    @torch.no_grad()
    def _of_reference(self, batch: TokenBatch) -> Tensor:
        assert self.reference is not None, "there is one where it is asked"
        return self.reference.states(batch)


def most_to_gain(losses: Tensor, learnt: Tensor, counts: Tensor, share: float) -> Tensor:
    """Return AdaSPEC's filter, (B, S) bool: the `share` of each row's counted tokens with the most
    to gain.

    They are the tokens (at least one a row) where `losses` exceed those of the reference, `learnt`,
    by most; of equals the first.
    """
    gain = (losses - learnt).masked_fill(~counts, -math.inf)
    kept = (counts.sum(1, keepdim=True) * share).ceil()
    rank = gain.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < kept) & counts
