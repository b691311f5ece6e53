"""Conditional drop (COD) lets a drafter that drafts all depths in one pass learn deeper ones from
fewer entries.

Otherwise eight depths would be eight times the text (PARD, arXiv 2504.18583; P-EAGLE, 2602.01469).

All entries of a row are at depth 0. At depth d a row keeps the share max(keep^d, floor) of its
entries, random ones of those that it kept at d - 1: an entry's mask stands d positions behind it,
and sees the entries up to it and its own masks up to d. All go through the layers in one pass.
Every prediction weighs the same, so that early depths count more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.training.batch import TokenBatch
from forerun.training.objectives.base import mark_counted, order_evenly

Metrics = dict[str, tuple[Tensor, Tensor]]


class DropSettings(Protocol):
    """`DropSettings` are the settings of an objective with conditional drop."""

    @property
    def depths(self) -> int:
        """Return the most tokens that an entry learns to predict."""

    @property
    def keep(self) -> float:
        """Return the share of the entries at a depth that goes on to the next one."""

    @property
    def floor(self) -> float:
        """Return the least share of a row's entries at any depth."""


def check_drop(settings: DropSettings) -> None:
    """Raise ArgumentError unless the settings make sense."""
    if settings.depths < 1:
        raise ArgumentError(f"objective: depths must be at least 1, got {settings.depths}")
    if not 0 < settings.keep <= 1 or not 0 <= settings.floor <= 1:
        raise ArgumentError(
            f"objective: keep must be in (0, 1] and floor in [0, 1], got {settings.keep} and {settings.floor}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Masked:
    """`Masked` is what is computed of a batch at all depths, N in a row: depth 0 first, of every
    entry, then depth by depth.
    """

    entries: Tensor  # (B, N) int64: the entry that each belongs to
    depths: Tensor  # (N,) int64
    counted: Tensor  # (B, N) bool: the row has kept it, and what it predicts counts
    positions: Tensor  # (B, N) int64, within the document
    ahead: int  # Entry i predicts token i + 1 + `ahead` at depth 0, and token i + 1 + `ahead` + d at depth d

    @classmethod
    def of(cls, tokens: TokenBatch, settings: DropSettings, ahead: int, *, random: bool) -> Self:
        """Choose what is computed of a batch.

        Of the entries whose next prediction counts a depth has `random` ones, or always the same
        ones, which cover the row evenly.
        """
        usable = mark_counted(tokens, ahead)
        order = order_evenly(usable, random).masked_fill(~usable, -1.0).argsort(1, descending=True)
        index = torch.arange(usable.shape[1], device=usable.device)
        entries, depths, kept = [index.expand_as(order)], [torch.zeros_like(index)], [torch.ones_like(usable)]
        counts = usable.sum(1, keepdim=True)
        for depth in range(1, settings.depths):
            share = max(settings.keep**depth, settings.floor)
            most = math.ceil(share * int(counts.max()))
            entries.append(order[:, :most])
            depths.append(torch.full_like(index[:most], depth))
            kept.append(index[:most] < (share * counts).ceil())
        which, depth_of = torch.cat(entries, 1), torch.cat(depths)
        counts_at = torch.stack([mark_counted(tokens, depth + ahead - 1) for depth in range(settings.depths)], 1)
        return cls(
            entries=which,
            depths=depth_of,
            counted=torch.cat(kept, 1) & _pick(counts_at, depth_of, which),
            positions=tokens.positions.gather(1, which) + depth_of,
            ahead=ahead,
        )

    def pick(self, values: Tensor) -> Tensor:
        """Pick (B, N) from values (B, depths, S) by depth and entry."""
        return _pick(values, self.depths, self.entries)

    def following(self, values: Tensor) -> Tensor:
        """Pick (B, N, ..) from (B, S, ..): the state that the target's distribution of each
        prediction comes from.
        """
        index = (self.entries + self.depths + self.ahead).clamp_max(values.shape[1] - 1)
        return values[torch.arange(len(values), device=values.device).unsqueeze(1), index]

    def sees(self, tokens: TokenBatch) -> Tensor:
        """Return (B, N, N) bool: what each sees of all, but for windows."""
        documents, entries, depths = tokens.documents.gather(1, self.entries), self.entries, self.depths
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        before = (depths == 0) & (entries.unsqueeze(1) <= entries.unsqueeze(2))
        own = (entries.unsqueeze(1) == entries.unsqueeze(2)) & (depths.unsqueeze(0) <= depths.unsqueeze(1))
        return same & (before | own)

    def metrics(self, agrees: Tensor, overlap: Tensor, settings: DropSettings) -> Metrics:
        """Return ``acceptance_D``, how often a chain of the likeliest tokens got to depth D, and
        ``overlap_D``.

        ``overlap_D`` is the chance that a token drawn there is accepted. Both come from the
        agreement and the overlap of each, (B, N).
        """
        drafted = torch.ones_like(self.counted[:, self.depths == 0])
        survives, metrics = drafted.float(), Metrics()
        for depth in range(settings.depths):
            here = self.depths == depth
            entries, seen = self.entries[:, here], self.counted[:, here]
            drafted = torch.zeros_like(drafted).scatter(1, entries, drafted.gather(1, entries) & seen)
            survives = torch.zeros_like(survives).scatter(1, entries, survives.gather(1, entries) * agrees[:, here])
            metrics[f"acceptance_{depth}"] = ((survives * drafted).sum(), drafted.sum().float())
            metrics[f"overlap_{depth}"] = ((overlap[:, here] * seen).sum(), seen.sum().float())
        return metrics


def _pick(values: Tensor, depths: Tensor, entries: Tensor) -> Tensor:
    """Pick (B, N) from (B, depths, S) at `depths` (N,) and `entries` (B, N)."""
    return values[torch.arange(len(values), device=values.device).unsqueeze(1), depths, entries]
