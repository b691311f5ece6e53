"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, which draft all depths in one pass.

The entry of the root predicts the token after it, as in EAGLE-3. Behind it stands a mask for each further depth: the
embedding of ``mask_token_id`` beside a learned ``mask_hidden`` in the place of the target's states, which is fused as
they are. A mask sees what is committed and the masks before it. Parameter names are those on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.drafters.heads.base import Angles, Attend, BlockHead
from forerun.drafters.heads.dflash import BlockDrafterConfig
from forerun.drafters.heads.drafting import BestFirstDrafter
from forerun.drafters.heads.eagle import EagleConfig, FusedHead
from forerun.drafters.heads.layers import spare_token


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleConfig(EagleConfig):
    """Shape and variant of a P-EAGLE head; the defaults are those of AWS's checkpoints."""

    FROM_TARGET: ClassVar[frozenset[str]] = EagleConfig.FROM_TARGET | {"norm_output"}

    mask_token_id: int  # Stands for what is not known yet (``ptd_token_id``); one of the target's tokens
    num_hidden_layers: int = 4
    own_embedding: bool = True  # The embedding is trained, that of the mask with it

    @property
    def kind(self) -> str:
        return "peagle"

    def problem(self) -> str | None:
        if self.generation != 3:
            return f"its layers are EAGLE-3's; got generation {self.generation}"
        if not 0 <= self.mask_token_id < self.vocab_size:
            return f"mask_token_id must be one of the target's {self.vocab_size} tokens, got {self.mask_token_id}"
        return EagleConfig.problem(self)

    @classmethod
    def fields_for(cls, kind: str, config: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields, see `HeadConfig.fields_for`. Without a mask token it is the padding
        token, or the last one.
        """
        return {"mask_token_id": spare_token(config)} | EagleConfig.fields_for("eagle3", config, options)


class PEagleHead(FusedHead, BlockHead):
    """A P-EAGLE head, see `BlockHead`; its block has no place for the root."""

    Config = PEagleConfig
    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(config.boundaries) * config.target_hidden_size))

    @property
    def places(self) -> None:
        return None

    @property
    def first(self) -> int:
        return 0

    @property
    def mask_token(self) -> int:
        return self.config.mask_token_id

    def causal(self, layer: int) -> bool:
        return True

    def masked(self) -> Tensor:
        """Return (1, 1, H), what a mask reads in the place of a feature from `fuse`."""
        return self.fuse(self.mask_hidden.chunk(len(self.config.boundaries), -1))

    def read(self, embeds: Tensor, features: Tensor, angles: Angles, attend: Attend) -> Tensor:
        output: Tensor = self.norm(self.through(embeds, features, angles, attend))
        return output

    def block(self, embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
        return self.read(embeds, self.masked().to(embeds.dtype).expand_as(embeds), angles, attend)


@dataclass(frozen=True, kw_only=True, slots=True)
class PEagleDrafterConfig(BlockDrafterConfig):
    """Options of `peagle`: those of the other drafters of blocks."""

    num_speculative_tokens: int = 8  # Most tokens on one path; trained for 8 to 10 in public checkpoints


class PEagleDrafter(BestFirstDrafter):
    """Drafts with a P-EAGLE head."""

    name = "peagle"
    Config = PEagleDrafterConfig
