"""DSpark (arXiv 2607.05147): DFlash's block, in which each token depends on the one before it.

A low-rank table adds to a depth's logits what the token above it changes (``markov_head``), and a linear layer says how
likely a token drawn there is accepted (``confidence_head``), so that a draft ends where it stops paying. Both read the
tokens above a depth only, never the one that is drawn there. Parameter names are those on disk.

DSpark's objective (arXiv 2607.05147) is DFlash's blocks, each depth after the token that really
came above it.

Cross-entropy to the target's distribution and total variation from it, 0.1 to 0.9, and for the confidence head the
binary cross-entropy to the acceptance that the depth really has: the overlap of the two distributions.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from forerun.errors import find_problem
from forerun.heads.base import Above, Followed
from forerun.heads.dflash import (
    BlockDrafterConfig,
    BlockOutputs,
    DFlashConfig,
    DFlashHead,
    DFlashObjective,
    DFlashSettings,
)
from forerun.heads.drafting import HeadDrafter
from forerun.losses.chunked_loss import Divergence, VocabularyLoss
from forerun.losses.objective import FeatureBatch, NotNegative
from forerun.types import LAST_HIDDEN

GATES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig(DFlashConfig):
    """Shape of a DSpark head; the defaults are those of DeepSeek's checkpoints."""

    kind: ClassVar[str] = "dspark"
    block_size: int = 7
    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    """The factor of the table: ``vanilla`` none, ``gated`` a gate that reads the block's output,
    ``rnn`` a state of all tokens above.
    """
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True  # It reads the table's row of the token above, too

    def problem(self) -> str | None:
        return find_problem(
            (
                self.markov_rank < 1,
                f"markov_rank must be at least 1, got {self.markov_rank}; without a table it is a DFlash head",
            ),
            (
                self.markov_head_type not in GATES,
                f"markov_head_type must be one of {', '.join(GATES)}, got {self.markov_head_type!r}",
            ),
        ) or DFlashConfig.problem(self)


@dataclass(frozen=True, slots=True)
class Corrected:
    """The state of a correction, which `FollowingHead.correction` maps to logits."""

    state: Tensor  # (B, N, r)
    memory: Tensor | None  # (B, N, M) of all tokens above, where the head keeps one


class FollowingHead(DFlashHead):
    """A block head whose depths' logits are corrected by the tokens above them, by one product of a
    cheap state.
    """

    @abstractmethod
    def correct(self, states: Tensor, above: Above) -> Corrected:
        """Return the correction of the nodes at a depth, whose block outputs are `states` (B, N,
        H), or (B, 1, H) where they are alike.
        """

    @property
    @abstractmethod
    def correction(self) -> nn.Linear:
        """Maps (B, N, r) of `correct` to what is added to logits (B, N, Vd)."""

    def follow(self, logits: Tensor, states: Tensor, above: Above) -> Followed:
        corrected = self.correct(states, above)
        return Followed(logits + self.correction(corrected.state), corrected.memory)


class DSparkHead(FollowingHead):
    """A DSpark head, see `BlockHead`."""

    Config = DSparkConfig
    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config)
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(config.hidden_size + rank, 1)})

    def correct(self, states: Tensor, above: Above) -> Corrected:
        return self.markov_head(states.expand(-1, above.tokens.shape[1], -1), above.tokens, above.memory)

    @property
    def correction(self) -> nn.Linear:
        return self.markov_head.markov_w2

    def follow(self, logits: Tensor, states: Tensor, above: Above) -> Followed:
        sure = self.confidence(states, above.tokens)
        return replace(
            FollowingHead.follow(self, logits, states, above), acceptance=None if sure is None else sure.sigmoid()
        )

    def confidence(self, states: Tensor, tokens: Tensor) -> Tensor | None:
        """Return (B, N) logits of the probability that a token drawn from the `states` (B, N or 1,
        H) of a depth, after the `tokens` (B, N) above it, is accepted; None without such a head.
        """
        if not self.config.enable_confidence_head:
            return None
        read = states.expand(-1, tokens.shape[1], -1)
        if self.config.confidence_head_with_markov:
            read = torch.cat([read, self.markov_head.markov_w1(tokens).to(read.dtype)], -1)
        logits: Tensor = self.confidence_head["proj"](read)
        return logits.squeeze(-1)


class MarkovHead(nn.Module):
    """The table and its factor. A fresh one corrects nothing."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, self.gate = config.markov_rank, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.gate == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.gate == "rnn":
            self.joint_proj = nn.Linear(config.hidden_size + 2 * rank, 3 * rank)
        nn.init.normal_(self.markov_w1.weight, std=config.initializer_range)
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, states: Tensor, tokens: Tensor, memory: Tensor | None) -> Corrected:
        """Return the correction for `states` (B, N, H) of a depth, the `tokens` (B, N) above it,
        and the `memory` (B, N, r) of what is above.
        """
        row = self.markov_w1(tokens).to(states.dtype)
        if self.gate == "vanilla":
            return Corrected(row, None)
        if self.gate == "gated":
            return Corrected(row * self.gate_proj(torch.cat([states, row], -1)).sigmoid(), None)
        memory = torch.zeros_like(row) if memory is None else memory
        keep, new, out = self.joint_proj(torch.cat([memory, row, states], -1)).chunk(3, -1)
        keep = keep.sigmoid()
        return Corrected(out.tanh(), keep * memory + (1 - keep) * new.tanh())


class DSparkDrafter(HeadDrafter):
    """Drafts with a DSpark head: a chain, a fixed tree or a dynamic tree."""

    name = "dspark"
    Config = BlockDrafterConfig


# What it learns
@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkSettings(DFlashSettings):
    """Anchors, weights and divergence of the objective; the defaults are
    DeepSeek's.
    """

    divergence: Annotated[Divergence, Field(strict=False)] = Divergence.MIXED
    confidence_weight: NotNegative = 1.0
    """Weight of the confidence head's loss."""


class FollowingObjective(DFlashObjective):
    """The base of objectives of heads whose depths are corrected by the tokens that
    really came above them.
    """

    head: FollowingHead

    def corrected(self, blocks: BlockOutputs, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
        """Return outputs (B, A, K, H + r) and weights (Vd, H + r) whose product is the corrected
        logits.
        """
        output, above = blocks.output.flatten(0, 1), self.above(blocks, batch)
        states, memory = list[Tensor](), None
        for depth in range(output.shape[1]):
            here = slice(depth, depth + 1)
            step = self.head.correct(output[:, here], Above(above[:, here], depth, memory, self.embed))
            memory = step.memory
            states.append(step.state)
        # The correction is a product like the output head's, so both are one.
        both = torch.cat([output, torch.cat(states, 1)], -1).view(*blocks.output.shape[:-1], -1)
        return both, torch.cat([self.output_head(), self.head.correction.weight], 1)


class DSparkObjective(FollowingObjective):
    """The loss of a DSpark head on a batch of features."""

    Settings: ClassVar[type[DSparkSettings]] = DSparkSettings
    head: DSparkHead
    settings: DSparkSettings

    def _loss(self, blocks: BlockOutputs, weights: Tensor, batch: FeatureBatch) -> VocabularyLoss:
        vocabulary_loss = self._of_blocks(*self.corrected(blocks, batch), weights, blocks, batch.features[LAST_HIDDEN])
        confidence = self.head.confidence(blocks.output.flatten(0, 1), self.above(blocks, batch))
        if confidence is None:
            return vocabulary_loss
        errors = binary_cross_entropy_with_logits(
            confidence.float().flatten(), vocabulary_loss.overlap, reduction="none"
        )
        return dataclasses.replace(
            vocabulary_loss,
            loss=vocabulary_loss.loss + self.settings.confidence_weight * (errors * vocabulary_loss.weights).sum(),
        )
