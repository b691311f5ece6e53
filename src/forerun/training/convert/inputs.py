"""What transformers' data collators hand to a model, as a `TokenBatch`. Knows no model."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.training.batch import TokenBatch

IGNORED = -100
"""transformers' label of a token that does not count."""


def token_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> TokenBatch:
    """A batch whose padding is at the end of each row, wherever it was.

    Args:
        input_ids: (B, S) int64.
        attention_mask: (B, S), 0 for padding; None: there is none.
        labels: (B, S), -100 where token i does not count; not shifted, as everywhere in transformers.
        loss_mask: (B, S), the same as a mask; a token counts if both say so. Without either, all count.
        position_ids: (B, S); where they do not go on by one a new document begins, which sees nothing before it.

    Raises:
        ArgumentError: a shape other than (B, S).
    """
    named = {"attention_mask": attention_mask, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    for name, values in named.items():
        if values is not None and values.shape != input_ids.shape:
            raise ArgumentError(
                f"{name} must be shaped like input_ids {tuple(input_ids.shape)}, got {tuple(values.shape)}"
            )
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    counts = real if loss_mask is None else real & loss_mask.bool()
    if labels is not None:
        counts = counts & (labels != IGNORED)
    # Stable: the real tokens of a row keep their order.
    order = torch.sort((~real).long(), dim=1, stable=True).indices
    real, counts, tokens = (values.gather(1, order) for values in (real, counts, input_ids))
    places = torch.arange(real.shape[1], device=real.device).expand_as(real)
    if position_ids is None:
        return TokenBatch(
            tokens=tokens * real, loss_mask=counts, documents=real.long() - 1, positions=torch.where(real, places, 0)
        )
    positions = position_ids.gather(1, order)
    begins = torch.ones_like(real)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    documents = torch.where(real, begins.long().cumsum(1) - 1, -1)
    return TokenBatch(
        tokens=tokens * real, loss_mask=counts, documents=documents, positions=torch.where(real, positions, 0)
    )
