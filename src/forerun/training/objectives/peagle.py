"""P-EAGLE's objective (arXiv 2602.01469): all depths of all entries in one pass, deeper ones of fewer entries.

Entry i, at depth 0, reads as in EAGLE-3 the embedding of token i + 1 beside the target's state of token i, and predicts
token i + 2. Its mask of depth d stands at position i + d, sees the entries up to i of its document and its own masks up
to d, and predicts token i + 2 + d. Conditional drop (COD): a row keeps the share max(keep^d, floor) of its entries at
depth d, random ones of those that it kept at d - 1; every prediction weighs the same, so that early depths count more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from forerun.drafters.heads.peagle import PEagleHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch, LossReport, TokenBatch
from forerun.training.objectives.base import DecoderObjective, DecoderSettings, ahead, counted, evenly
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleSettings(DecoderSettings):
    """Depths, conditional drop and divergence of the objective."""

    depths: int = 8
    """Tokens that an entry learns to predict, at most."""
    keep: float = 0.8
    """Of the entries at a depth, the share that goes on to the next one."""
    floor: float = 0.2
    """The least share of a row's entries at any depth."""

    def __post_init__(self) -> None:
        if self.depths < 1:
            raise ArgumentError(f"objective: depths must be at least 1, got {self.depths}")
        if not 0 < self.keep <= 1 or not 0 <= self.floor <= 1:
            raise ArgumentError(
                f"objective: keep must be in (0, 1] and floor in [0, 1], got {self.keep} and {self.floor}"
            )

    def share(self, depth: int) -> float:
        """Of a row's entries, those that are kept at a depth."""
        return max(self.keep**depth, self.floor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """What the head gave at all depths of a batch, N in a row: depth 0 first, of every entry, then depth by depth."""

    entries: Tensor  # (B, N) int64: the entry that each belongs to
    depths: Tensor  # (N,) int64
    counted: Tensor  # (B, N) bool
    output: Tensor  # (B, N, H): what the output head reads


class PEagleObjective(DecoderObjective):
    """The loss of a P-EAGLE head on a batch of features."""

    Settings: ClassVar[type[PEagleSettings]] = PEagleSettings
    head: PEagleHead
    settings: PEagleSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """The sum over all counted predictions, and how often a chain got to each depth."""
        masked, last = self.masked(batch), batch.features[LAST_HIDDEN]
        index = (masked.entries + masked.depths + 1).clamp_max(last.shape[1] - 1)
        states = last.gather(1, index.unsqueeze(-1).expand(-1, -1, last.shape[-1]))
        found = self.divergence(
            masked.output.flatten(0, 1), self.output_head(), masked.counted.flatten().float(), states
        )
        agrees, overlap = (part.view(masked.counted.shape) for part in (found.agrees, found.overlap))
        drafted, survives = torch.ones_like(batch.batch.loss_mask), torch.ones_like(batch.batch.positions).float()
        metrics: dict[str, tuple[Tensor, Tensor]] = {}
        for depth in range(self.settings.depths):
            here = masked.depths == depth
            entries, seen = masked.entries[:, here], masked.counted[:, here]
            drafted = torch.zeros_like(drafted).scatter(1, entries, drafted.gather(1, entries) & seen)
            survives = torch.zeros_like(survives).scatter(1, entries, survives.gather(1, entries) * agrees[:, here])
            metrics[f"acceptance_{depth}"] = ((survives * drafted).sum(), drafted.sum().float())
            metrics[f"overlap_{depth}"] = ((overlap[:, here] * seen).sum(), seen.sum().float())
        return LossReport(loss=found.loss, weight=found.weights.sum(), metrics=metrics)

    def masked(self, batch: FeatureBatch) -> Masked:
        """The head's outputs at all depths."""
        tokens, config = batch.batch, self.head.config
        entries, depths, kept = self._drop(tokens)
        fused = self.fused(batch)
        behind = entries.shape[1] - fused.shape[1]
        ids = torch.cat([ahead(tokens.tokens, 1, 0), entries.new_full((len(entries), behind), config.mask_token_id)], 1)
        positions = tokens.positions.gather(1, entries) + depths
        seen = {window: self._visible(tokens, entries, depths, window) for window in set(self.head.windows)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = seen[self.head.windows[layer]].unsqueeze(1)
            query, key = query.to(value.dtype), key.to(value.dtype)
            return scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2)

        def run(embeds: Tensor, fused: Tensor) -> Tensor:
            masks = self.head.masked().to(fused.dtype).expand(len(fused), behind, -1)
            features = torch.cat([fused, masks], 1)
            return self.head.read(embeds, features, self.head.angles(positions, embeds), attend)

        embeds = self.embed(ids).to(fused.dtype)
        kept_less = self.settings.gradient_checkpointing
        output = checkpoint(run, embeds, fused, use_reentrant=False) if kept_less else run(embeds, fused)
        each = torch.stack([counted(tokens, depth) for depth in range(self.settings.depths)], 1)
        here = each[torch.arange(len(entries), device=entries.device).unsqueeze(1), depths, entries]
        return Masked(entries=entries, depths=depths, counted=here & kept, output=output)

    def _drop(self, tokens: TokenBatch) -> tuple[Tensor, Tensor, Tensor]:
        """(B, N) entries and (N,) depths of all that is computed, and (B, N) what of it the row has kept: all at depth
        0; behind it, of the entries whose next prediction counts, random ones, in evaluation evenly spread ones."""
        usable = counted(tokens, 1)
        order = evenly(usable, self.head.training).masked_fill(~usable, -1.0).argsort(1, descending=True)
        index = torch.arange(usable.shape[1], device=usable.device)
        entries, depths, kept = [index.expand_as(order)], [torch.zeros_like(index)], [torch.ones_like(usable)]
        counts = usable.sum(1, keepdim=True)
        for depth in range(1, self.settings.depths):
            share = self.settings.share(depth)
            most = math.ceil(share * int(counts.max()))
            entries.append(order[:, :most])
            depths.append(torch.full_like(index[:most], depth))
            kept.append(index[:most] < (share * counts).ceil())
        return torch.cat(entries, 1), torch.cat(depths), torch.cat(kept, 1)

    def _visible(self, tokens: TokenBatch, entries: Tensor, depths: Tensor, window: int | None) -> Tensor:
        """(B, N, N) bool: what each sees of all, in layers of a window."""
        documents = tokens.documents.gather(1, entries)
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        before = (depths == 0) & (entries.unsqueeze(1) <= entries.unsqueeze(2))
        own = (entries.unsqueeze(1) == entries.unsqueeze(2)) & (depths.unsqueeze(0) <= depths.unsqueeze(1))
        seen = same & (before | own)
        if window is not None:
            places = entries + depths
            seen &= places.unsqueeze(2) - places.unsqueeze(1) < window
        return seen
