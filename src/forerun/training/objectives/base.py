"""What objectives share: settings, the frozen target, and the shifts between a state and the token it predicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.training.batch import TokenBatch
from forerun.training.chunked_loss import Teacher


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSettings:
    """Settings of every objective; a kind of head adds its own."""

    gradient_checkpointing: bool = False
    """Compute the layers once more in the backward pass instead of keeping their insides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenTarget:
    """What an objective needs of the target besides its features; never trained."""

    embedding: nn.Module  # Token ids -> (.., H), as the target embeds them
    lm_head: Tensor  # (V, Ht) weight of the output head
    bias: Tensor | None = None  # (V,) of the output head
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> FrozenTarget:
        """From a transformers causal LM."""
        config = model.config.get_text_config()
        scale = getattr(config, "logit_scale", None) or 1.0
        scaling = getattr(config, "logits_scaling", None) or 1.0
        return cls(
            embedding=model.get_input_embeddings(),
            lm_head=model.get_output_embeddings().weight,
            bias=getattr(model.get_output_embeddings(), "bias", None),
            scale=scale / scaling,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def teacher(self, states: Tensor, token_ids: Tensor | None) -> Teacher:
        """The target's probabilities after `states` (.., Ht); `token_ids` (Vd,): what the head knows, None: all."""
        return Teacher(
            hidden=states.flatten(0, -2),
            weight=self.lm_head.detach(),
            tokens=token_ids,
            bias=None if self.bias is None else self.bias.detach(),
            scale=self.scale,
            softcap=self.softcap,
        )


def ahead(values: Tensor, steps: int, fill: float) -> Tensor:
    """(B, S, ..) moved `steps` to the left; what is missing on the right is `fill`."""
    moved = torch.full_like(values, fill)
    if steps < values.shape[1]:
        moved[:, : values.shape[1] - steps] = values[:, steps:]
    return moved


def behind(values: Tensor, steps: int) -> Tensor:
    """(B, S, ..) moved `steps` to the right; what is missing on the left is 0."""
    kept = values[:, : max(0, values.shape[1] - steps)]
    return torch.cat([torch.zeros_like(values[:, : values.shape[1] - kept.shape[1]]), kept], 1)


def counted(batch: TokenBatch, step: int) -> Tensor:
    """(B, S) bool: token i + 2 + step exists in the same document and counts."""
    wanted = ahead(batch.loss_mask, step + 2, False)
    return wanted & (ahead(batch.documents, step + 2, -1) == batch.documents) & (batch.documents >= 0)
