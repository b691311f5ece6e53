"""Kangaroo's objective (arXiv 2404.18911) pulls the adapter's distributions towards the target's,
by cross-entropy.

The adapter drafts through the target's own output head, as in the published ``train.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from forerun.drafters.heads.base import AdapterHead
from forerun.errors import UnsupportedModelError
from forerun.training.batch import FeatureBatch, LossReport, Objective, working_dtype
from forerun.training.chunked_loss import soft_loss
from forerun.training.objectives.base import DistanceSettings, FrozenTarget, mark_counted, run_or_checkpoint
from forerun.training.objectives.eagle3 import blocks_of, ttt_attention
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class KangarooSettings(DistanceSettings):
    """`KangarooSettings` are the divergence of the objective."""


class KangarooObjective(Objective):
    """A `KangarooObjective` is the loss of an adapter on a batch of features."""

    Settings: ClassVar[type[KangarooSettings]] = KangarooSettings

    def __init__(self, head: AdapterHead, target: FrozenTarget, settings: KangarooSettings | None = None) -> None:
        """Check the target; UnsupportedModelError if it caps its logits, which must be a linear map
        of states.
        """
        self.head, self.target, self.settings = head, target, settings or KangarooSettings()
        if target.softcap is not None:
            raise UnsupportedModelError(
                f"kangaroo: the target caps its logits (final_logit_softcapping: {target.softcap:g}), which an adapter "
                "that drafts through its output head cannot be trained for; train eagle3"
            )

    def parameters_module(self) -> nn.Module:
        return self.head

    def outputs(self, batch: FeatureBatch) -> Tensor:
        """Return what the output head reads, (B, S, H); entry i predicts token i + 1."""
        tokens, [boundary] = batch.batch, self.head.config.boundaries
        blocks = {window: blocks_of(tokens.documents, window) for window in self.head.windows}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return ttt_attention(query, key, value, (), blocks[self.head.windows[layer]])

        def run(features: Tensor) -> Tensor:
            return self.head.adapt(features, self.head.angles(tokens.positions, features), attend)

        states = batch.features[boundary]
        features = self.head.fuse([states.to(working_dtype(states.device, self.head.weight.dtype))])
        found: Tensor = run_or_checkpoint(run, features, again=self.settings.gradient_checkpointing)
        return found

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all counted tokens, how often the likeliest token is the target's,
        and the overlap.
        """
        counts, settings = mark_counted(batch.batch, -1), self.settings
        hidden, weight = self.target.linear(self.outputs(batch))
        teacher = self.target.teacher(batch.features[LAST_HIDDEN], None)
        shares = counts.flatten().float()
        found = soft_loss(
            hidden, weight.detach(), shares, teacher, settings.divergence, settings.lk_decay, mix=settings.mix
        )
        seen = counts.sum().float()
        metrics = {"acceptance_0": (found.agrees.sum(), seen), "overlap_0": (found.overlap.sum(), seen)}
        return LossReport(loss=found.loss, weight=found.weights.sum(), metrics=metrics)
