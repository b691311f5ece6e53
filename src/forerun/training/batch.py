"""What a training step reads: tokens, which of them count, whose document they are, and the target's hidden states.

Also the dtype in which it is computed, whatever dtype the states came in.

Knows no model, no file and no objective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.types import Signal


def working_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of matrix products on `device`: autocast's where one is open, `otherwise` where not."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Packed windows: B rows of S tokens. A row may hold several documents and end in padding."""

    tokens: Tensor
    """(B, S) int64."""
    loss_mask: Tensor
    """(B, S) bool: the token was written by the assistant, so predicting it counts. False for padding."""
    documents: Tensor
    """(B, S) int64: number of the document within the row, from 0; -1 for padding. Attention stays inside one."""
    positions: Tensor
    """(B, S) int64: place within the document, from 0."""

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same on another device."""
        return TokenBatch(
            tokens=self.tokens.to(device),
            loss_mask=self.loss_mask.to(device),
            documents=self.documents.to(device),
            positions=self.positions.to(device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureBatch:
    """A `TokenBatch` and what the target thought of it."""

    batch: TokenBatch
    features: Mapping[Signal, Tensor]
    """boundary -> (B, S, Ht); `LAST_HIDDEN` is the state after the final norm, which gives the target's law."""
