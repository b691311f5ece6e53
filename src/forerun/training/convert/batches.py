"""The batches of a converted model: transformers' arguments as a `TokenBatch`, with padding at the end of each row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forerun.errors import ArgumentError
from forerun.losses.objective import TokenBatch

IGNORED = -100  # transformers' label of a token that does not count


def token_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> TokenBatch:
    """Return a batch whose padding is at the end of each row, wherever it was; each argument is (B, S), or
    ArgumentError.

    Args:
        attention_mask: 0 for padding.
        labels: -100 where token i does not count; not shifted, as everywhere in transformers.
        loss_mask: the same as a mask; a token counts if both say so. Without either, all count.
        position_ids: where they do not rise by one, a new document begins, which attends to nothing before it.
    """
    named = {"attention_mask": attention_mask, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
    for name, values in named.items():
        if values is not None and values.shape != input_ids.shape:
            raise ArgumentError(
                f"{name} must be shaped like input_ids {tuple(input_ids.shape)}, got {tuple(values.shape)}"
            )
    real = real_tokens(input_ids, attention_mask)
    counts = real if loss_mask is None else real & loss_mask.bool()
    counts = counts if labels is None else counts & (labels != IGNORED)
    order = padding_order(input_ids, attention_mask)
    real, counts, tokens = (values.gather(1, order) for values in (real, counts, input_ids))
    index = torch.arange(real.shape[1], device=real.device).expand_as(real)
    positions = index if position_ids is None else position_ids.gather(1, order)
    begins = torch.ones_like(real)
    begins[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    return TokenBatch(
        tokens=tokens * real,
        loss_mask=counts,
        documents=torch.where(real, begins.long().cumsum(1) - 1, -1),
        positions=torch.where(real, positions, 0),
    )


def refuse_context_parallel() -> None:
    """Raise ArgumentError inside PyTorch's ``context_parallel``, which gives each process only a part of every row."""
    # It replaces the attention function within its context.
    if str(functional.scaled_dot_product_attention.__module__).startswith("torch.distributed"):
        raise ArgumentError(
            "a head does not learn under context parallelism (cp_size above 1): each process would see a part of each "
            "window. For long windows use gradient_checkpointing_enable(), a smaller eagle_ttt_steps, or FSDP "
            "(dp_shard_size); `forerun train` also has target_parallel=tp and a sliding_window"
        )


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return (B, S) bool: the token is not padding."""
    return torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()


def padding_order(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the order (B, S) that moves padding to the end of each row and keeps that of the real tokens."""
    return torch.sort((~real_tokens(input_ids, attention_mask)).long(), dim=1, stable=True).indices
