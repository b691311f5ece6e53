"""Medusa-1 (arXiv 2401.10774): an output head for each token further ahead, all from one state of the target.

What depth k holds does not depend on the tokens above it, so all depths are one pass, and the likeliest paths are known
without another. Checkpoints are in `checkpoints.medusa`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from forerun.drafters.heads.base import HeadConfig, ParallelHead
from forerun.drafters.heads.drafting import BestFirstDrafter, HeadDrafterConfig
from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaConfig(HeadConfig):
    """Shape of a Medusa head."""

    num_heads: int = 5  # Output heads: tokens drafted beyond the target's own
    num_layers: int = 1  # Residual blocks before each

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_layers < 0:
            got = f"{self.num_heads} and {self.num_layers}"
            raise ArgumentError(f"Medusa head: num_heads must be at least 1 and num_layers at least 0, got {got}")
        if self.reduced_vocabulary or self.boundaries != (LAST_HIDDEN,):
            raise ArgumentError(
                "Medusa head: it proposes all of the target's tokens and reads its last hidden state; leave "
                "draft.vocab_size and boundaries away"
            )

    @property
    def kind(self) -> str:
        return "medusa"

    @property
    def max_depth(self) -> int | None:
        return self.num_heads

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"boundaries": (LAST_HIDDEN,), **options}


class MedusaHead(ParallelHead):
    """A Medusa head: some residual blocks and an output head for each depth; see `ParallelHead`."""

    Config = MedusaConfig
    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        size, vocab = config.target_hidden_size, config.vocab_size
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size) for _ in range(config.num_layers)), nn.Linear(size, vocab, bias=False))
            for _ in range(config.num_heads)
        )

    @property
    def weight(self) -> Tensor:
        return self.output_weight(0)

    def output_weight(self, depth: int) -> Tensor:
        """Return the weight (V, H) of the output head of that depth."""
        weight: Tensor = self.heads[depth][-1].weight  # type: ignore[index]
        return weight

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Let each depth predict at first what the target's own output head predicts."""
        for depth in range(self.config.num_heads):
            self.output_weight(depth).copy_(model.get_output_embeddings().weight.float())

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def states(self, features: Tensor, depths: int) -> Tensor:
        return torch.stack([head[:-1](features) for head in self.heads[:depths]], -2)  # type: ignore[index]

    def logits(self, states: Tensor) -> Tensor:
        pairs = zip(self.heads, states.unbind(-2), strict=False)
        return torch.stack([head[-1](state) for head, state in pairs], -2)  # type: ignore[index]


class ResBlock(nn.Module):
    """Computes ``x + SiLU(W x + b)``; a fresh one does nothing."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Apply the block: (.., H) -> (.., H)."""
        return states + silu(self.linear(states))


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaDrafterConfig(HeadDrafterConfig):
    """Options of `medusa`: those of the other head drafters; without another tree the likeliest
    `nodes` paths are drafted.
    """

    draw: str = "deterministic"  # By default the likeliest paths are taken at any temperature


class MedusaDrafter(BestFirstDrafter):
    """Drafts with a Medusa head."""

    name = "medusa"
    Config = MedusaDrafterConfig
