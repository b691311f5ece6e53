"""Medusa-2's objective (arXiv 2401.10774) trains the target and its Medusa heads together, the
heads alone first.

``L_LM + w * sum_k decay^k L_k``: the target's own loss beside the heads' (`objectives.medusa`). Heads that know nothing
would spoil the target, so that it stands still until they have learnt something; then its learning rate and the weight
w of the heads' loss rise from 0. The heads' learning rate is larger than the target's. By default L_LM is the distance
to the target as it was, the paper's self-distillation; the paper has that target as a LoRA that is switched off, here
its frozen copy stands beside the one that learns.
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
    """`Medusa2Settings` are the two stages, and how heads and target weigh."""

    learn_from: Literal["target", "data"] = "target"
    """Source of the target's labels: its distributions as they were, which keeps its answers; or
    the data's tokens.
    """
    heads_first: Share = 0.5
    """Share of the run in which the heads learn alone; 0 with a `draft.start` that has learnt already."""
    warmup: Share = 0.1
    """Share of the run, after that, in which the target's learning rate and the heads' weight rise from 0."""
    head_weight: Positive = 0.2
    """Weight of the heads' loss beside the target's own."""
    head_rate: Positive = 4.0
    """Learning rate of the heads, as a multiple of the target's (`training.learning_rate`)."""


class TargetAndHead(nn.Module):
    """`TargetAndHead` is a causal LM and a head for it."""

    model: Any
    head: MedusaHead

    def __init__(self, model: Any, head: Any) -> None:
        super().__init__()
        self.model, self.head = model, head


class Medusa2Objective(Objective):
    """A `Medusa2Objective` is the loss of a target and its Medusa heads on a batch of features of
    the target as it was.
    """

    Settings: ClassVar[type[Medusa2Settings]] = Medusa2Settings

    def __init__(self, module: TargetAndHead, target: FrozenTarget, settings: Medusa2Settings | None = None) -> None:
        """Take `module`, which is trained, and `target`, the model in it as it was; errors as in
        `DraftStates`.
        """
        self.module, self.target, self.settings = module, target, settings or Medusa2Settings()
        self.reader = DraftStates(module.model, gradient_checkpointing=self.settings.gradient_checkpointing)
        self.heads = MedusaObjective(module.head, target, self.settings)

    def parameters_module(self) -> nn.Module:
        return self.module

    def joint(self, done: float) -> float | None:
        """Return how far the target has joined in, in 0..1, where the share `done` of the run is
        over; None: not at all.
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
            own = self.reader.loss(states, counts, batch, self.target, self.settings.learn_from)
            loss = own.loss + joint * self.settings.head_weight * heads.loss
            known = seen if self.settings.learn_from == "target" else torch.zeros_like(seen)
            target = {
                "loss": (own.loss.detach(), seen),
                "agrees": (own.agrees.sum(), known),
                "overlap": (own.overlap.sum(), known),
            }
        return LossReport(
            loss=loss,
            weight=seen,
            metrics={**heads.metrics, **{f"target_{name}": pair for name, pair in target.items()}},
        )
