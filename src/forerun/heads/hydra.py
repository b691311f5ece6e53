"""Hydra (arXiv 2402.05109): Medusa's output heads, each of which also reads the tokens drafted above it.

Depth k reads the state of the token before the root beside the embeddings of the k + 1 tokens since. In Hydra++ that
state has passed a decoder layer of the head's own, which sees all that is committed. Checkpoints: `checkpoints.hydra`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from forerun.drafters.heads.base import Attend, HeadConfig, RecurrentHead, Stepped
from forerun.drafters.heads.drafting import HeadDrafter
from forerun.drafters.heads.layers import DecoderConfig, DecoderHead, DecoderLayer, RMSNorm
from forerun.drafters.heads.medusa import ResBlock
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class HydraConfig(DecoderConfig):
    """Shape of a Hydra head; the defaults are those of Hydra++."""

    FROM_TARGET: ClassVar[frozenset[str]] = HeadConfig.FROM_TARGET | {"hidden_size", "own_embedding", "own_lm_head"}

    LEAST: ClassVar[Mapping[str, int]] = {**DecoderConfig.LEAST, "num_hidden_layers": 0}

    num_hidden_layers: int = 1  # Layers of the prefix: 1 is Hydra++, 0 Hydra
    num_heads: int = 4  # Tokens drafted beyond the target's own, each by an output head of its own
    num_layers: int = 4  # Residual blocks before each output head; those after the first share their weights
    own_lm_head: bool = False

    @property
    def kind(self) -> str:
        return "hydra"

    @property
    def max_depth(self) -> int | None:
        return self.num_heads

    def problem(self) -> str | None:
        if self.num_heads < 1 or self.num_layers < 1:
            return f"num_heads and num_layers must be at least 1, got {self.num_heads} and {self.num_layers}"
        if self.num_hidden_layers not in (0, 1):
            return f"num_hidden_layers is 1 (Hydra++) or 0 (Hydra), got {self.num_hidden_layers}"
        if self.reduced_vocabulary or self.boundaries != (LAST_HIDDEN,) or self.hidden_size != self.target_hidden_size:
            return (
                "it proposes all of the target's tokens and reads its last hidden state and its embeddings; leave "
                "draft.vocab_size, boundaries and hidden_size away"
            )
        return DecoderConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        found = cls.layer_fields(config) | {"boundaries": (LAST_HIDDEN,), **options}
        return found | {"full_layers": tuple(found.get("full_layers", ()))}


class HydraHead(DecoderHead, RecurrentHead):
    """A Hydra head, see `RecurrentHead`."""

    Config = HydraConfig
    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size, layers = config.hidden_size, config.num_hidden_layers
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(layers))
        self.norm: nn.Module = RMSNorm(size, config.rms_norm_eps) if layers else nn.Identity()
        self.heads = nn.ModuleList(HydraBlocks(config, depth) for depth in range(config.num_heads))
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.vocab_size) for _ in range(config.num_heads))
        self.complete()

    @property
    def weight(self) -> Tensor:
        return self.output_head(0)[0]

    def start_as(self, model: Any, token_ids: Tensor | None) -> None:
        """Let each depth predict at first what the target's own output head predicts from the
        prefix.
        """
        target = model.get_output_embeddings()
        for blocks, lm_head in zip(self.heads, self.lm_heads, strict=True):
            lm_head.weight.copy_(target.weight.float())  # type: ignore[operator]
            if getattr(target, "bias", None) is not None:
                lm_head.bias.copy_(target.bias.float())  # type: ignore[operator]
            blocks.start()  # type: ignore[operator]

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        return features[0]

    def prefix(self, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        states = features
        if self.config.num_hidden_layers:
            angles = self.angles(positions, features)
            for layer in self.layers:
                states = layer(states, angles, attend)
        output: Tensor = self.norm(states)
        return output

    def step(self, depth: int, embeds: Tensor, memory: Tensor) -> Stepped:
        joined = torch.cat([memory, embeds], -1)
        return Stepped(memory=joined, output=self.heads[depth](joined))

    def logits(self, output: Tensor, depth: int = 0) -> Tensor:
        found: Tensor = self.lm_heads[depth](output)
        return found

    def output_head(self, depth: int) -> tuple[Tensor, Tensor | None]:
        lm_head: Any = self.lm_heads[depth]
        return lm_head.weight, lm_head.bias


class HydraBlocks(nn.Module):
    """The residual blocks of a depth: one that maps state and embeddings to the width of one state,
    then one block that is applied again and again, as in the published code.
    """

    def __init__(self, config: HydraConfig, depth: int) -> None:
        super().__init__()
        size, self.more = config.hidden_size, config.num_layers - 1
        self.first = JoiningBlock((depth + 2) * size, size)
        if self.more:
            self.rest = ResBlock(size)

    def start(self) -> None:
        """Initialise the blocks to pass the prefix on."""
        nn.init.eye_(self.first.res_connection.weight)
        nn.init.zeros_(self.first.linear.weight)
        if self.more:
            nn.init.zeros_(self.rest.linear.weight)

    def forward(self, joined: Tensor) -> Tensor:
        """Apply the blocks: (.., (depth + 2) * H) -> (.., H)."""
        states: Tensor = self.first(joined)
        for _ in range(self.more):
            states = self.rest(states)
        return states


class JoiningBlock(nn.Module):
    """Computes ``R x + c + SiLU(W x + b)``, narrower than its input."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, size)
        self.res_connection = nn.Linear(width, size)

    def forward(self, joined: Tensor) -> Tensor:
        """Apply the block: (.., width) -> (.., size)."""
        narrowed: Tensor = self.res_connection(joined) + silu(self.linear(joined))
        return narrowed


class HydraDrafter(HeadDrafter):
    """Drafts with a Hydra head: chain, fixed tree or dynamic tree."""

    name = "hydra"
