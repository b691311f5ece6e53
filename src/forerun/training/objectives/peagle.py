"""P-EAGLE's objective (arXiv 2602.01469) trains all depths of all entries in one pass, deeper ones
of fewer entries.

Entry i, at depth 0, reads as in EAGLE-3 the embedding of token i + 1 beside the target's state of token i, and predicts
token i + 2. Its mask of depth d stands at position i + d, sees the entries up to i of its document and its own masks up
to d, and predicts token i + 2 + d: `conditional_drop`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from forerun.drafters.heads.peagle import PEagleHead
from forerun.training.batch import FeatureBatch, LossReport
from forerun.training.objectives.base import DecoderObjective, DecoderSettings, run_or_checkpoint, shift_left
from forerun.training.objectives.conditional_drop import Masked, check_drop
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleSettings(DecoderSettings):
    """`PEagleSettings` are depths, conditional drop and divergence of the objective."""

    depths: int = 8
    """Tokens that an entry learns to predict, at most."""
    keep: float = 0.8
    """Share of the entries at a depth that goes on to the next one."""
    floor: float = 0.2
    """Least share of a row's entries at any depth."""

    def __post_init__(self) -> None:
        check_drop(self)


class PEagleObjective(DecoderObjective):
    """A `PEagleObjective` is the loss of a P-EAGLE head on a batch of features."""

    Settings: ClassVar[type[PEagleSettings]] = PEagleSettings
    head: PEagleHead
    settings: PEagleSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the sum over all counted predictions, and how often a chain got to each depth."""
        masked, output = self.masked(batch)
        states = masked.following(batch.features[LAST_HIDDEN])
        found = self.divergence(output.flatten(0, 1), self.output_head(), masked.counted.flatten().float(), states)
        agrees, overlap = (part.view(masked.counted.shape) for part in (found.agrees, found.overlap))
        metrics = masked.metrics(agrees, overlap, self.settings)
        return LossReport(loss=found.loss, weight=found.weights.sum(), metrics=metrics)

    def masked(self, batch: FeatureBatch) -> tuple[Masked, Tensor]:
        """Return what is computed, and the head's outputs (B, N, H), which the output head reads."""
        tokens, config = batch.batch, self.head.config
        masked = Masked.of(tokens, self.settings, 1, random=self.head.training)
        fused = self.fused(batch)
        rows, behind = len(fused), masked.entries.shape[1] - fused.shape[1]
        ids = torch.cat(
            [shift_left(tokens.tokens, 1, 0), masked.entries.new_full((rows, behind), config.mask_token_id)], 1
        )
        positions, every = masked.positions, masked.sees(tokens)
        apart = positions.unsqueeze(2) - positions.unsqueeze(1)
        seen = {window: every if window is None else every & (apart < window) for window in set(self.head.windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = seen[self.head.windows[layer]].unsqueeze(1)
            query, key = query.to(value.dtype), key.to(value.dtype)
            return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

        def run(embeds: Tensor, fused: Tensor) -> Tensor:
            masks = self.head.masked().to(fused.dtype).expand(rows, behind, -1)
            features = torch.cat([fused, masks], 1)
            return self.head.read(embeds, features, self.head.angles(positions, embeds), attend)

        embeds = self.embed(ids).to(fused.dtype)
        return masked, run_or_checkpoint(run, embeds, fused, again=self.settings.gradient_checkpointing)
