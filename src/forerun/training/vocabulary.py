"""The loss over a vocabulary, in chunks of rows: logits are never alive for more than one chunk, forward or backward.

A plain ``cross_entropy(hidden @ weight.T, law)`` keeps several (R, V) tensors for the backward pass, and on a CPU moving
them costs more than all matrix products. Here gradients are formed in the forward pass, while a chunk's logits are in
the cache. Knows nothing of models: hidden states and head weights come in, a scalar goes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 21
"""Logits alive at once: 8 MB in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """Where soft targets come from: their logits are formed chunk by chunk, like the student's."""

    hidden: Tensor
    """(R, Ht): the teacher's states after its final norm."""
    weight: Tensor
    """(V, Ht): the rows of its head for the student's vocabulary."""
    scale: float = 1.0
    """Factor on the logits, where the model has one."""


def soft_cross_entropy(hidden: Tensor, weight: Tensor, row_weights: Tensor, teacher: Teacher) -> Tensor:
    """``sum_r row_weights[r] * H(teacher law of row r, student law of row r)`` in nats, a scalar.

    Args:
        hidden: (R, H), the student's states as its head reads them.
        weight: (V, H), the student's head; gets a gradient if it asks for one.
        row_weights: (R,) float32; rows of weight 0 cost nothing.
        teacher: gives the target law of every row.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    return _apply(hidden, weight, row_weights, nothing, teacher.hidden, teacher.weight, teacher.scale, 1.0)


def hard_cross_entropy(
    hidden: Tensor, weight: Tensor, row_weights: Tensor, ids: Tensor, teacher: Teacher | None = None, share: float = 0.0
) -> Tensor:
    """``sum_r row_weights[r] * -log student(ids[r])`` in nats; `share` of the target mass follows `teacher` instead.

    Args:
        hidden: (R, H); weight: (V, H); row_weights: (R,) float32; ids: (R,) int64, the true tokens.
        teacher: with `share` in (0, 1], the law that takes that share of the one-hot target's mass.
    """
    if teacher is None:
        return _apply(hidden, weight, row_weights, ids, hidden[:0], weight[:0], 1.0, 0.0)
    return _apply(hidden, weight, row_weights, ids, teacher.hidden, teacher.weight, teacher.scale, share)


def _apply(*arguments: object) -> Tensor:
    loss: Tensor = _LinearCrossEntropy.apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Soft or hard cross-entropy of a linear head; the gradients are ready when the forward pass is."""

    @staticmethod
    def forward(
        context: Any,
        hidden: Tensor,
        weight: Tensor,
        row_weights: Tensor,
        ids: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        scale: float,
        share: float,
    ) -> Tensor:
        kept = row_weights.nonzero().squeeze(1)
        chunks = kept.split(max(1, CHUNK_ELEMENTS // weight.shape[0]))
        device = hidden.device.type
        working = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        head = weight.detach().to(working)
        hidden_grad = torch.zeros_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in chunks:
            inputs = hidden[rows].to(working)
            logits = (inputs @ head.T).float()
            law = None
            if share:
                law = (teacher_hidden[rows].to(teacher_weight.dtype) @ teacher_weight.T).float().mul_(scale)
                law = torch.softmax(law, -1, out=law)
            factors = row_weights[rows]
            loss += _loss_and_gradient(logits, law, ids[rows] if len(ids) else None, factors, share)
            gradient = logits.to(working)
            hidden_grad[rows] = (gradient @ head).float()
            if weight_grad is not None:
                weight_grad += gradient.T @ inputs
        context.save_for_backward(hidden_grad, *(() if weight_grad is None else (weight_grad,)))
        context.dtypes = (hidden.dtype, weight.dtype)
        return loss

    @staticmethod
    def backward(context: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = [grad * upstream for grad in context.saved_tensors]
        weight_grad = saved[1].to(context.dtypes[1]) if len(saved) > 1 else None
        return saved[0].to(context.dtypes[0]), weight_grad, None, None, None, None, None, None


def _loss_and_gradient(logits: Tensor, law: Tensor | None, ids: Tensor | None, factors: Tensor, share: float) -> Tensor:
    """The weighted loss of one chunk; `logits` (R, V) float32 is overwritten with its gradient."""
    normalizer = logits.logsumexp(-1)
    losses = normalizer.clone()
    if law is not None:
        losses -= share * torch.linalg.vecdot(law, logits)
    if ids is not None:
        losses -= (1 - share) * logits.gather(1, ids[:, None]).squeeze(1)
    torch.exp(logits.sub_(normalizer[:, None]), out=logits)
    if law is not None:
        logits.sub_(law, alpha=share)
    if ids is not None:
        logits.scatter_add_(1, ids[:, None], torch.full_like(normalizer[:, None], share - 1))
    logits.mul_(factors[:, None])
    return (losses * factors).sum()
