"""DFlash (arXiv 2602.06036): a block of tokens in one pass, over keys and values made of the target's hidden states.

A block is the root and masks behind it. Each layer's keys and values are its projection of the fused states of what is
committed, and behind them those of the block, in which every place sees every other. Parameter names are those on disk.

DFlash's objective (arXiv 2602.06036) predicts blocks behind random anchors, each in one pass.

An anchor is a token of an answer: the root of a block. The block sees the states of what stands before its anchor in
the same document, and itself. Depth k, from 0, predicts token anchor + 1 + k: its distribution is pulled towards the
target's. Early depths weigh more, since a draft ends where it
first fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from forerun.drafters.vocabulary import spare_token
from forerun.errors import find_problem
from forerun.heads.base import Angles, Attend, BlockHead, HeadConfig
from forerun.heads.drafting import BestFirstDrafter, HeadDrafterConfig
from forerun.heads.layers import DecoderConfig, DecoderHead, DecoderLayer, RMSNorm
from forerun.heads.start import Fitting, Seen, fit_last
from forerun.losses.chunked_loss import DraftPaths, VocabularyLoss
from forerun.losses.objective import (
    DecoderObjective,
    DecoderSettings,
    FeatureBatch,
    LossReport,
    Natural,
    Share,
    TokenBatch,
    chain_metrics,
    mark_counted,
    order_evenly,
    run_or_checkpoint,
)
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashConfig(DecoderConfig):
    """Shape of a DFlash head; the defaults are those of z-lab's checkpoints."""

    kind: ClassVar[str] = "dflash"
    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET - {"boundaries"} | {"hidden_size"}

    LEAST: ClassVar[Mapping[str, int]] = {**DecoderConfig.LEAST, "block_size": 2}

    mask_token_id: int  # Stands for what is not known yet; one of the target's tokens that no text holds
    block_size: int = 16  # Tokens of a block, the root's place included
    sample_from_anchor: bool = False
    """True: the root's own position predicts the token after it (DSpark). False: each mask predicts
    its own token.
    """
    is_causal: bool = False  # Positions of a block see none behind them, in any layer
    causal_windows: bool = False  # As `is_causal`, but only in layers with a sliding window (speculators)
    num_hidden_layers: int = 5
    qk_norm: bool = True
    own_lm_head: bool = False

    @property
    def max_depth(self) -> int | None:
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    def problem(self) -> str | None:
        return find_problem(
            (
                not 0 <= self.mask_token_id < self.vocab_size,
                f"mask_token_id must be one of the target's {self.vocab_size} tokens, got {self.mask_token_id}",
            ),
            (
                any(boundary < 0 for boundary in self.boundaries),
                f"boundaries count layers from 0, got {self.boundaries}",
            ),
        ) or DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`. Without a mask token it is the padding
        token, or the last one.
        """
        fields = cls.layer_fields(config) | dict(options)
        layers = fields.setdefault("num_hidden_layers", min(5, config.num_hidden_layers))
        fields.setdefault("boundaries", spread_boundaries(config.num_hidden_layers, layers))
        fields.setdefault("mask_token_id", spare_token(config))
        return fields | {name: tuple(fields[name]) for name in ("boundaries", "full_layers") if name in fields}


def spread_boundaries(num_layers: int, count: int) -> tuple[int, ...]:
    """Return `count` boundaries of a target of `num_layers`, evenly from 2 to all but two layers,
    as z-lab spreads them; fewer if it has too few layers.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    last = max(1, num_layers - 3)
    return tuple(sorted({round(1 + step * (last - 1) / (count - 1)) + 1 for step in range(count)}))


class DFlashHead(DecoderHead, BlockHead):
    """A DFlash head, see `BlockHead`."""

    Config = DFlashConfig
    config: DFlashConfig
    layer: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.boundaries) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(self.layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm: nn.Module = RMSNorm(size, eps)
        self.complete()

    @property
    def places(self) -> int:
        return self.config.block_size

    @property
    def first(self) -> int:
        return 0 if self.config.sample_from_anchor else 1

    def causal(self, layer: int) -> bool:
        return self.config.is_causal or (self.config.causal_windows and self.config.window(layer) is not None)

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return self.hidden_norm(self.fc(torch.cat(list(features), dim=-1)))

    def fit(self, seen: Seen) -> None:
        """Let ``fc`` read every dimension of the target's states alike, outliers as well, and their mean not at all."""

        def read(batch: FeatureBatch) -> Tensor:
            return torch.cat([batch.features[boundary].float() for boundary in self.config.boundaries], -1)

        self.fc.weight.copy_(seen.evened(self.fc.weight, read))

    def context(self, features: Tensor, angles: Angles) -> list[tuple[Tensor, Tensor]]:
        return [layer.self_attn.entries(features, angles) for layer in self.layers]  # type: ignore[union-attr, operator]

    def block(self, embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
        states = embeds
        for layer in self.layers:
            states = layer(states, angles, attend)
        return self.norm(states)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockDrafterConfig(HeadDrafterConfig):
    """Options of drafters with a block head: those of the other head drafters. Without another tree
    the likeliest `nodes` paths are drafted.
    """

    num_speculative_tokens: int = 16  # Most tokens on one path; at most what the head's block holds


class DFlashDrafter(BestFirstDrafter):
    """Drafts with a DFlash head."""

    name = "dflash"
    Config = BlockDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class DFlashSettings(DecoderSettings):
    """Anchors, weights and divergence of the objective."""

    anchors: Natural = 64
    """Blocks in a row of tokens, at most."""
    smoothing: Share = 0.5
    """Smoothing of the weights by which each depth weighs what it brings (D-PACE, arXiv
    2605.18810).

    They follow the acceptance that the head has: an acceptance q counts (1 - smoothing) q +
    smoothing.
    """
    gamma: Annotated[float, Field(gt=0, allow_inf_nan=True)] | None = None
    """With gamma, depth k weighs exp(-k / gamma) instead, whatever the head does. The paper: 4 for
    blocks of 8, 7 for 16.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOutputs:
    """The blocks of a batch, A in a row."""

    anchors: Tensor  # (B, A) int64: index of each root in its row
    counted: Tensor  # (B, A, K) bool: depth k predicts a token that counts
    output: Tensor  # (B, A, K, H): what the output head reads at depth k


class DFlashObjective(DecoderObjective):
    """The loss of a DFlash head on a batch of features."""

    Settings: ClassVar[type[DFlashSettings]] = DFlashSettings
    head: DFlashHead
    settings: DFlashSettings

    def __call__(self, batch: FeatureBatch) -> LossReport:
        """Return the weighted sum over all blocks and counted depths, and how often a chain got to
        each depth.
        """
        blocks = self.blocks(batch)
        depths = blocks.counted.shape[-1]
        gamma = math.inf if self.settings.gamma is None else self.settings.gamma
        weights = torch.tensor([math.exp(-depth / gamma) for depth in range(depths)], device=blocks.output.device)
        vocabulary_loss = self._loss(blocks, blocks.counted * weights, batch)
        agrees, overlap = (
            part.view(blocks.counted.shape).movedim(-1, 0) for part in (vocabulary_loss.agrees, vocabulary_loss.overlap)
        )
        return LossReport(
            loss=vocabulary_loss.loss,
            weight=vocabulary_loss.weights.sum(),
            metrics=chain_metrics(blocks.counted.movedim(-1, 0), agrees, overlap),
        )

    def fit(self, batches: Sequence[FeatureBatch]) -> None:
        """Fit the last feed-forward part: what is in a place otherwise, the embedding of its token or of the mask, is
        a confident prediction of that very token.
        """

        def run(batch: FeatureBatch) -> Fitting:
            blocks = self.blocks(batch)
            following = self.behind(blocks, batch.features[LAST_HIDDEN]).view(*blocks.counted.shape, -1)
            return Fitting(lambda states: self._predicting(states, blocks)[blocks.counted], following[blocks.counted])

        fit_last(self.head.layers[-1].mlp.down_proj, self.head.norm, batches, run)  # type: ignore[union-attr, arg-type]

    def _predicting(self, states: Tensor, blocks: BlockOutputs) -> Tensor:
        """Return those of `states` (B, A * b, W) that predict a depth: (B, A, K, W)."""
        first, depths = self.head.first, blocks.counted.shape[-1]
        return states.view(*blocks.anchors.shape, self.head.places, -1)[:, :, first : first + depths]

    def blocks(self, batch: FeatureBatch) -> BlockOutputs:
        """Return the head's outputs behind the anchors."""
        tokens, config = batch.batch, self.head.config
        anchors, chosen = self._anchors(tokens)
        fused = self.fused(batch)
        context = self.head.context(fused, self.head.angles(tokens.positions, fused))
        size, depths = self.head.places, config.max_depth
        assert depths is not None, "a block has so many depths"
        ids = torch.full((*anchors.shape, size), self.head.mask_token, device=anchors.device)
        ids[..., 0] = tokens.tokens.gather(1, anchors)
        places = torch.arange(size, device=anchors.device)
        positions = (tokens.positions.gather(1, anchors).unsqueeze(-1) + places).flatten(1)
        seen = {layer: self._visible(tokens, anchors, positions, layer) for layer in range(config.num_hidden_layers)}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = (torch.cat(pair, 2) for pair in zip(context[layer], (key, value), strict=True))
            attended = scaled_dot_product_attention(
                query.to(values.dtype), keys.to(values.dtype), values, seen[layer].unsqueeze(1), enable_gqa=True
            )
            return attended.transpose(1, 2)

        def run(embeds: Tensor) -> Tensor:
            return self.head.block(embeds, self.head.angles(positions, embeds), attend)

        embeds = self.embed(ids.flatten(1)).to(fused.dtype)
        output = run_or_checkpoint(run, embeds, again=self.settings.gradient_checkpointing)
        output = output.view(*anchors.shape, size, -1)[:, :, self.head.first : self.head.first + depths]
        each = torch.stack([mark_counted(tokens, depth - 1).gather(1, anchors) for depth in range(depths)], -1)
        return BlockOutputs(anchors=anchors, counted=each & chosen.unsqueeze(-1), output=output)

    def _anchors(self, tokens: TokenBatch) -> tuple[Tensor, Tensor]:
        """Return indices (B, A) of roots, rising, and which of them are in use.

        They are random ones of those whose next token counts; in evaluation evenly spaced ones.
        """
        usable = mark_counted(tokens, -1) & (tokens.positions > 0)
        order = order_evenly(usable, self.head.training).masked_fill(~usable, -1.0)
        best = order.topk(min(self.settings.anchors, usable.shape[1]), dim=1).indices
        anchors = best.sort(dim=1).values
        return anchors, usable.gather(1, anchors)

    def _visible(self, tokens: TokenBatch, anchors: Tensor, positions: Tensor, layer: int) -> Tensor:
        """Return (B, A * b, S + A * b) bool: what the places of the blocks see of the row and of
        all blocks, in a layer.
        """
        size, window = self.head.places, self.head.config.window(layer)
        index = torch.arange(tokens.tokens.shape[1], device=anchors.device)
        root = anchors.repeat_interleave(size, 1)
        same = tokens.documents.unsqueeze(1) == tokens.documents.gather(1, root).unsqueeze(2)
        before = same & (index < root.unsqueeze(2))
        block = torch.arange(root.shape[1], device=anchors.device) // size
        beside = (block.unsqueeze(0) == block.unsqueeze(1)).expand(len(root), -1, -1)
        if self.head.causal(layer):
            beside = beside.tril()
        if window is not None:
            before = before & (positions.unsqueeze(2) - tokens.positions.unsqueeze(1) < window)
            beside = beside & (positions.unsqueeze(2) - positions.unsqueeze(1) < window)
        return torch.cat([before, beside], 2)

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        """Return the loss of all blocks at once, in the order of `weights` (B, A, K)."""
        return self._of_blocks(blocks.output, self.output_head(), weights, blocks, batch.features[LAST_HIDDEN])

    def _of_blocks(
        self, output: Tensor, weight: Tensor, weights: Tensor, blocks: BlockOutputs, last: Tensor
    ) -> VocabularyLoss:
        """Return the loss of `output` (B, A, K, H) through `weight` (Vd, H) from the target, whose
        states `last` are (B, S, Ht).
        """
        states = self.behind(blocks, last)
        paths = DraftPaths(weights.shape[-1], self.settings.smoothing) if self.settings.gamma is None else None
        return self.divergence(output.flatten(0, 2), weight, weights.flatten(), states, paths)

    def behind(self, blocks: BlockOutputs, last: Tensor) -> Tensor:
        """Return the target's state, (B, A * K, Ht) of `last` (B, S, Ht), from which it predicts
        each depth's token.
        """
        index = self._places_above(blocks, last.shape[1])
        return last.gather(1, index.unsqueeze(-1).expand(-1, -1, last.shape[-1]))

    def above(self, blocks: BlockOutputs, batch: FeatureBatch) -> Tensor:
        """Return the token (B * A, K) that came before each depth's: the root above the first."""
        tokens = batch.batch.tokens
        return tokens.gather(1, self._places_above(blocks, tokens.shape[1])).view(blocks.counted.shape).flatten(0, 1)

    def _places_above(self, blocks: BlockOutputs, length: int) -> Tensor:
        """Return the index (B, A * K) of the token above each depth's in rows of so many tokens."""
        depths = torch.arange(blocks.counted.shape[-1], device=blocks.anchors.device)
        return (blocks.anchors.unsqueeze(-1) + depths).clamp_max(length - 1).flatten(1)
