"""Medusa-2's objective (arXiv 2401.10774): the heads are trained alone first, then together with the target.

The loss is ``L_LM + w * sum_k decay^k L_k``: the target's own loss and the heads' (`heads.medusa`). Untrained heads
would damage the target, so it is frozen until they have learned something; then its learning rate and the weight w of
the heads' loss rise from 0. The heads' learning rate is larger than the target's. By default L_LM is the distance to
the original target, the paper's self-distillation. The paper gets the original by switching a LoRA off; here it is a
frozen copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from forerun.heads.medusa import MedusaHead, MedusaObjective, MedusaSettings
from forerun.losses.objective import FeatureBatch, FrozenTarget, LossReport, Objective, Positive, Share, mark_counted
from forerun.training.distill import DraftStates
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Medusa2Settings(MedusaSettings):
    """Settings of the two stages, and the weights of heads and target."""

    learn_from: Literal["target", "data"] = "target"
    """Source of the target's labels: the original target's distributions, which preserve its outputs, or the data's
    tokens.
    """
    heads_first: Share = 0.5
    """Share of the run in which the heads learn alone; 0 with a trained `draft.start`."""
    warmup: Share = 0.1
    """Share of the run, after that, in which the target's learning rate and the heads' weight rise from 0."""
    head_weight: Positive = 0.2
    """Weight of the heads' loss beside the target's own."""
    head_rate: Positive = 4.0
    """Learning rate of the heads, as a multiple of the target's (`training.learning_rate`)."""


class TargetAndHead(nn.Module):
    """A causal LM together with a head for it."""

    model: Any
    head: MedusaHead

    def __init__(self, model: Any, head: Any) -> None:
        super().__init__()
        self.model, self.head = model, head


class Medusa2Objective(Objective):
    """The loss of a target and its Medusa heads on a batch with features of the original target."""

    Settings: ClassVar[type[Medusa2Settings]] = Medusa2Settings

    def __init__(self, module: TargetAndHead, target: FrozenTarget, settings: Medusa2Settings | None = None) -> None:
        """Take the trained `module` and the original `target`. Raises as `DraftStates` does."""
        self.module, self.target, self.settings = module, target, settings or Medusa2Settings()
        self.reader = DraftStates(module.model, gradient_checkpointing=self.settings.gradient_checkpointing)
        self.heads = MedusaObjective(module.head, target, self.settings)

    def parameters_module(self) -> nn.Module:
        return self.module

    def joint(self, done: float) -> float | None:
        """Return the weight of joint training, in 0..1, after the share `done` of the run; None while the target is
        frozen.
        """
        since = done - self.settings.heads_first
        if since < 0:
            return None
        return min(1.0, since / self.settings.warmup) if self.settings.warmup else 1.0

    def rates(self, done: float) -> Mapping[str, float]:
        return {"model.": self.joint(done) or 0.0, "head.": self.settings.head_rate}

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the loss, and how often a chain got to each depth.

        Once the target has joined in, the metrics have ``target_loss``, its own loss, and, if it
        learns from itself as it was, ``target_agrees`` and ``target_overlap`` with that.
        """
        counts, joint = mark_counted(batch.batch, -1), self.joint(batch.done)
        seen = counts.sum().float()
        target: dict[str, tuple[Tensor, Tensor]] = {}
        if joint is None:
            heads = self.heads(batch)
            # Every parameter has a gradient, so that other processes need not wait for it.
            untouched = torch.stack([weight.sum() for weight in self.module.model.parameters()]).sum()
            loss = self.settings.head_weight * heads.loss + 0.0 * untouched
            nothing = torch.zeros_like(seen)
            target = dict.fromkeys(("loss", "agrees", "overlap"), (nothing, nothing))
        else:
            states = self.reader.states(batch.batch)
            heads = self.heads(replace(batch, features={LAST_HIDDEN: states}))
            target_loss = self.reader.loss(states, counts, batch, self.target, self.settings.learn_from)
            loss = target_loss.loss + joint * self.settings.head_weight * heads.loss
            known = seen if self.settings.learn_from == "target" else torch.zeros_like(seen)
            target = {
                "loss": (target_loss.loss.detach(), seen),
                "agrees": (target_loss.agrees.sum(), known),
                "overlap": (target_loss.overlap.sum(), known),
            }
        return LossReport(
            loss=loss,
            weight=seen,
            metrics={**heads.metrics, **{f"target_{name}": pair for name, pair in target.items()}},
        )
