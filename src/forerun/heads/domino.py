"""Domino (arXiv 2605.29707): DFlash's block, whose depths a small recurrent network over the tokens above corrects.

The network (``prefix_gru``) reads the embeddings of the root and of what is drafted below it; what a narrow layer
(``embed_proj``) makes of its state and the block's output is added to a depth's logits. Parameter names are those on
disk.

Domino's objective (arXiv 2605.29707) is DFlash's blocks, each depth after the token that really
came above it.

Two losses, of the corrected logits and of those of the block alone: ``(1 - l) corrected + l block``. l falls from
`base_start` to 0, so that the block is good before it is corrected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from forerun.heads.base import Above
from forerun.heads.dflash import BlockDrafterConfig, BlockOutputs, DFlashConfig, DFlashSettings
from forerun.heads.drafting import HeadDrafter
from forerun.heads.dspark import Corrected, FollowingHead, FollowingObjective
from forerun.losses.chunked_loss import VocabularyLoss
from forerun.losses.objective import FeatureBatch, Fraction, Share
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class DominoConfig(DFlashConfig):
    """Shape of a Domino head; the defaults are those of the published checkpoints."""

    LEAST: ClassVar[Mapping[str, int]] = {**DFlashConfig.LEAST, "emb_dim": 1, "gru_hidden_dim": 1}
    kind: ClassVar[str] = "domino"
    sample_from_anchor: bool = True
    emb_dim: int = 256  # Width of the layer between both states and the logits
    gru_hidden_dim: int = 1024  # Size of the recurrent network's state
    pure_draft_prefix_len: int = 1  # First depths that are not corrected

    def problem(self) -> str | None:
        # This is asked before the block's size is known to make sense.
        if not 0 <= self.pure_draft_prefix_len < max(1, self.block_size):
            return f"pure_draft_prefix_len must be in 0..{self.block_size - 1}, got {self.pure_draft_prefix_len}"
        return DFlashConfig.problem(self)


class DominoHead(FollowingHead):
    """A Domino head, see `BlockHead`. A fresh one corrects nothing: it is a DFlash head."""

    Config = DominoConfig
    config: DominoConfig

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        self.prefix_gru = PrefixGru(config)
        inside = nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False)
        outside = nn.Linear(config.emb_dim, config.draft_vocab_size, bias=False)
        nn.init.normal_(inside.weight, std=config.initializer_range)
        nn.init.zeros_(outside.weight)
        self.embed_proj = nn.Sequential(inside, nn.SiLU(), outside)

    def correct(self, states: Tensor, above: Above) -> Corrected:
        memory = self.prefix_gru(above.embed(above.tokens).to(states.dtype), above.memory)
        if above.depth < self.config.pure_draft_prefix_len:
            return Corrected(states.new_zeros(*memory.shape[:2], self.config.emb_dim), memory)
        read = torch.cat([states.expand(-1, memory.shape[1], -1), memory], -1)
        return Corrected(self.embed_proj[1](self.embed_proj[0](read)), memory)

    @property
    def correction(self) -> nn.Linear:
        return self.embed_proj[2]  # type: ignore[return-value]


class PrefixGru(nn.Module):
    """A step of ``torch.nn.GRU`` of one layer without biases, with its parameter names."""

    def __init__(self, config: DominoConfig) -> None:
        super().__init__()
        size, bound = config.gru_hidden_dim, config.gru_hidden_dim**-0.5
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, config.hidden_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, embeds: Tensor, memory: Tensor | None) -> Tensor:
        """Advance the state: embeddings (B, N, H) of tokens and the state (B, N, G) above them,
        None being zero -> (B, N, G).
        """
        if memory is None:
            memory = embeds.new_zeros(*embeds.shape[:-1], self.weight_hh_l0.shape[1])
        reset, keep, new = linear(embeds, self.weight_ih_l0).chunk(3, -1)
        old_reset, old_keep, old_new = linear(memory, self.weight_hh_l0).chunk(3, -1)
        reset, keep = (reset + old_reset).sigmoid(), (keep + old_keep).sigmoid()
        new = (new + reset * old_new).tanh()
        return new + keep * (memory - new)


class DominoDrafter(HeadDrafter):
    """Drafts with a Domino head: a chain, a fixed tree or a dynamic tree."""

    name = "domino"
    Config = BlockDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class DominoSettings(DFlashSettings):
    """Anchors, weights and divergence of the objective, and how long the
    block's own loss counts.
    """

    base_start: Share = 1.0
    """Share of the block's own loss in the first batch, in [0, 1]."""
    base_until: Fraction = 0.5
    """Share of the run after which the block's share is 0, in (0, 1]; until then it falls linearly.
    """


class DominoObjective(FollowingObjective):
    """The loss of a Domino head on a batch of features; in evaluation of the
    corrected logits alone.
    """

    Settings: ClassVar[type[DominoSettings]] = DominoSettings
    head: DominoHead
    settings: DominoSettings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        last = batch.features[LAST_HIDDEN]
        vocabulary_loss = self._of_blocks(*self.corrected(blocks, batch), weights, blocks, last)
        share = self.share(batch.done) if self.head.training else 0.0
        if not share:
            return vocabulary_loss
        base = self._of_blocks(blocks.output, self.output_head(), weights, blocks, last)
        return dataclasses.replace(
            vocabulary_loss,
            loss=(1 - share) * vocabulary_loss.loss + share * base.loss,
            weights=(1 - share) * vocabulary_loss.weights + share * base.weights,
        )

    def share(self, done: float) -> float:
        """Return the share of the block's own loss where the share `done` of the run is over."""
        return self.settings.base_start * max(0.0, 1 - done / self.settings.base_until)
