"""DFlash 2 (z-lab, https://inco.ai/blog/dflash2): DFlash's block with convolutions in it, and a selector of paths.

A convolution around each attention and feed-forward part lets a place of the block read those before it; its kernels
are learned ones and what a projection of the state adds. Of the likeliest tokens of a depth, the candidates, the
selector scores each after the token above it; a token that is no candidate is not drafted. Parameter names are those on
disk.

DFlash 2's objective is DFlash's for the block, and the selector's cross-entropy over the
candidates.

z-lab publishes no training; NeMo AutoModel and speculators train the selector on the data's token. Here it learns the
target's distribution among the candidates, after the token that really came above, with the block's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint

from forerun.errors import find_problem
from forerun.heads.base import Above, Angles, Attend, Followed
from forerun.heads.dflash import (
    BlockDrafterConfig,
    BlockOutputs,
    DFlashConfig,
    DFlashHead,
    DFlashObjective,
    DFlashSettings,
)
from forerun.heads.drafting import HeadDrafter
from forerun.heads.layers import DecoderLayer
from forerun.losses.chunked_loss import VocabularyLoss, chunk_elements
from forerun.losses.objective import FeatureBatch, NotNegative
from forerun.types import LAST_HIDDEN

BEHIND = 1e4  # How far the logit of a token that is no candidate falls: its probability is 0, and finite it stays


@dataclass(frozen=True, kw_only=True, slots=True)
class DFlash2Config(DFlashConfig):
    """Shape of a DFlash 2 head; the defaults are those of the published checkpoints."""

    kind: ClassVar[str] = "dflash2"
    block_size: int = 8
    conv_kernel_size: int = 2  # Places that a convolution reads: its own, and those before it in the block
    conv_group_size: int = 16  # Channels that share what is added to the learned kernel
    selector_rank: int = 256
    selector_top_k: int = 16  # Candidates of a depth

    def problem(self) -> str | None:
        return find_problem(
            (
                not 1 <= self.conv_kernel_size <= max(1, self.block_size),
                f"conv_kernel_size must be in 1..{self.block_size}, the block's places; got {self.conv_kernel_size}",
            ),
            (
                self.conv_group_size < 1 or self.hidden_size % self.conv_group_size,
                f"conv_group_size must divide the hidden size {self.hidden_size}, got {self.conv_group_size}",
            ),
            (
                self.selector_rank < 1,
                f"selector_rank must be at least 1, got {self.selector_rank}; without a selector it is a DFlash head",
            ),
            (
                not 1 <= self.selector_top_k <= self.draft_vocab_size,
                f"selector_top_k must be in 1..{self.draft_vocab_size}, got {self.selector_top_k}",
            ),
        ) or DFlashConfig.problem(self)


class BlockConvolution(nn.Module):
    """Two convolutions over the positions of each block, one before and one after the part they
    enclose.
    """

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        size, self.taps = config.hidden_size, config.conv_kernel_size
        self.block, self.group = config.block_size, config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * self.taps * (size // self.group), bias=False)

    def forward(self, states: Tensor, inside: Callable[[Tensor], Tensor]) -> Tensor:
        """Convolve (B, A * b, H) of A blocks -> (B, A * b, H). Both kernels follow from the input."""
        added = self.kernel_projection(states).view(*states.shape[:-1], 2, self.taps, -1)
        added = added.repeat_interleave(self.group, -1)
        before, after = (self.base_kernel.to(states.dtype) + added).unbind(-3)
        return self._convolve(inside(self._convolve(states, before)), after)

    def _convolve(self, states: Tensor, kernel: Tensor) -> Tensor:
        """Apply a kernel (B, A * b, taps, H); positions before a block count as 0."""
        blocks = states.view(len(states), -1, self.block, states.shape[-1])
        read = [pad(blocks[:, :, : self.block - tap], (0, 0, tap, 0)) for tap in range(self.taps)]
        return (torch.stack(read, -2).flatten(1, 2) * kernel).sum(-2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with a convolution around each of its parts."""

    def __init__(self, config: DFlash2Config, layer: int) -> None:
        super().__init__(config, layer)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, states: Tensor, angles: Angles, attend: Attend) -> Tensor:
        def attended(normed: Tensor) -> Tensor:
            return self.self_attn(normed, angles, attend)

        states = states + self.attention_conv(self.input_layernorm(states), attended)
        return states + self.mlp_conv(self.post_attention_layernorm(states), self.mlp)


class CandidateSelector(nn.Module):
    """Scores the candidates of a depth after the token above it."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        rank = config.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.draft_vocab_size, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        for weight in (self.predecessor_codebook, self.hidden_projection.weight):
            nn.init.normal_(weight, std=config.initializer_range)

    def forward(self, logits: Tensor, ids: Tensor, states: Tensor, tokens: Tensor) -> Tensor:
        """Return scores (B, F, k) from logits and head's ids (B, F or 1, k) of the candidates, the
        block's outputs (B, F or 1, H) and the `tokens` (B, F) above.
        """
        gate = embedding(tokens, self.predecessor_codebook).to(states.dtype) * self.hidden_projection(states)
        successors = embedding(ids, self.successor_codebook).to(states.dtype)
        return logits + (successors @ gate.unsqueeze(-1)).squeeze(-1)


class DFlash2Head(DFlashHead):
    """A DFlash 2 head, see `BlockHead`. A fresh one is a DFlash head of which only the candidates
    are drafted.
    """

    Config = DFlash2Config
    config: DFlash2Config
    layer: ClassVar[type[DecoderLayer]] = ConvolvedLayer

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.candidate_selector = CandidateSelector(config)
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                nn.init.zeros_(module.kernel_projection.weight)
                nn.init.ones_(module.base_kernel[:, 0])

    def follow(self, logits: Tensor, states: Tensor, above: Above) -> Followed:
        unary, ids = logits.topk(self.config.selector_top_k, -1)
        scores = self.candidate_selector(unary, ids, states, above.tokens)
        width = above.tokens.shape[1]
        others = (logits - BEHIND).expand(-1, width, -1)
        return Followed(others.scatter(-1, ids.expand(-1, width, -1), scores), above.memory)


class DFlash2Drafter(HeadDrafter):
    """Drafts with a DFlash 2 head: a chain, a fixed tree or a dynamic tree."""

    name = "dflash2"
    Config = BlockDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class DFlash2Settings(DFlashSettings):
    """Anchors, weights and divergence of the block, and the weight of the
    selector.
    """

    selector_weight: NotNegative = 1.0
    """Weight of the selector's loss."""


class DFlash2Objective(DFlashObjective):
    """The loss of a DFlash 2 head on a batch of features; its metrics are
    of what the selector drafts.
    """

    Settings: ClassVar[type[DFlash2Settings]] = DFlash2Settings
    head: DFlash2Head
    settings: DFlash2Settings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        vocabulary_loss = super()._loss(blocks, weights, batch)
        losses, agrees, overlap = self._rate(blocks, vocabulary_loss.weights, batch)
        return dataclasses.replace(
            vocabulary_loss,
            loss=vocabulary_loss.loss + self.settings.selector_weight * (losses * vocabulary_loss.weights).sum(),
            agrees=agrees,
            overlap=overlap,
        )

    def _rate(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return, (R,) each, the selector's cross-entropy, whether its likeliest token is the
        target's, and its acceptance.

        They are of all blocks and depths, 0 where `weights` (R,) are.
        """
        output = blocks.output.flatten(0, 2)
        above = self.above(blocks, batch).flatten()
        weight = self.output_head()
        last = batch.features[LAST_HIDDEN]
        reduced = self.head.config.reduced_vocabulary
        teacher = self.target.teacher(self.behind(blocks, last), self.head.token_ids if reduced else None)
        rows = weights.nonzero().squeeze(1)
        rows = rows if len(rows) else rows.new_zeros(1)  # the loss reaches the selector where nothing counts, too
        figures = []
        for chosen in torch.split(rows, max(1, chunk_elements(rows.device) // max(len(weight), len(teacher.weight)))):
            with torch.no_grad():
                ids = (output[chosen] @ weight.T.to(output.dtype)).topk(self.head.config.selector_top_k, -1).indices
                probs = teacher.probs(teacher.logits(chosen))
            read = output[chosen], ids, above[chosen], probs.full.gather(-1, ids), probs.best
            figures.append(checkpoint(self._score, *read, use_reentrant=False))
        found = [torch.zeros_like(weights).index_put((rows,), torch.cat(parts)) for parts in zip(*figures, strict=True)]
        return found[0], found[1].detach(), found[2].detach()

    def _score(self, output: Tensor, ids: Tensor, above: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, ...]:
        """Return, (r,) each, loss, agreement, acceptance of candidates `ids` (r, k) with the
        target's `probs` (r, k).
        """
        logits = (self.output_head()[ids].to(output.dtype) @ output.unsqueeze(-1)).squeeze(-1)
        scores = self.head.candidate_selector(
            logits.unsqueeze(1), ids.unsqueeze(1), output.unsqueeze(1), above.unsqueeze(1)
        ).squeeze(1)
        logs = (scores.float() / self.target.temperature).log_softmax(-1)
        distribution = probs / probs.sum(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny)
        drafted = self.head.token_ids[ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)]
        return -(distribution * logs).sum(-1), drafted.eq(best).float(), torch.minimum(logs.exp(), probs).sum(-1)
