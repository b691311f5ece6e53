"""The loss over a vocabulary, in chunks of rows: logits are never alive for more than one chunk, forward or backward.

A plain ``cross_entropy(hidden @ weight.T, law)`` keeps several (R, V) tensors for the backward pass, and on a CPU
moving them costs more than all matrix products. Here gradients are formed in the forward pass, while a chunk's logits
are in the cache. Knows nothing of models: hidden states and head weights come in, a scalar goes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 21
"""Logits alive at once: 8 MB in float32."""


class Divergence(StrEnum):
    """How far the student's law is from the target's."""

    CROSS_ENTROPY = "cross_entropy"
    """``-sum_v p log q``: forward KL up to a constant."""
    LK = "lk"
    """``w * KL + (1 - w) * (1 - a)``, a = ``sum_v min(p, q)``, w = ``exp(-decay * a)`` held constant (2602.23881)."""
    LK_LOG = "lk_log"
    """``-log a``: the likelihood of acceptance itself (arXiv 2602.23881)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """Where soft targets come from: their logits are formed chunk by chunk, like the student's."""

    hidden: Tensor
    """(R, Ht): the teacher's states after its final norm."""
    weight: Tensor
    """(V, Ht): the rows of its head for the student's vocabulary."""
    bias: Tensor | None = None
    """(V,) of its head, where it has one."""
    scale: float = 1.0
    """Factor on the logits, where the model has one."""
    softcap: float | None = None
    """``cap * tanh(logits / cap)``, where the model has one."""

    def law(self, rows: Tensor) -> Tensor:
        """(r, V) float32, renormalised over the student's vocabulary."""
        logits = functional.linear(self.hidden[rows].to(self.weight.dtype), self.weight, self.bias)
        logits = logits.float().mul_(self.scale)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap).mul_(self.softcap)
        return torch.softmax(logits, -1, out=logits)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyLoss:
    """The loss, and how well student and target agree, row by row; 0 for rows of weight 0."""

    loss: Tensor
    """Scalar, nats, with gradients."""
    agrees: Tensor
    """(R,) float32: 1 where both have the same likeliest token; 0 for hard targets that it misses."""
    overlap: Tensor
    """(R,) float32: ``sum_v min(p, q)``, the chance that a sampled draft is kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """What the rows should predict."""

    weights: Tensor
    teacher: Teacher | None
    ids: Tensor | None
    share: float
    divergence: Divergence
    decay: float


def soft_loss(
    hidden: Tensor,
    weight: Tensor,
    row_weights: Tensor,
    teacher: Teacher,
    divergence: Divergence = Divergence.CROSS_ENTROPY,
    decay: float = 3.0,
) -> VocabularyLoss:
    """``sum_r row_weights[r] * divergence(teacher law of row r, student law of row r)`` in nats.

    Args:
        hidden: (R, H), the student's states as its head reads them.
        weight: (V, H), the student's head; gets a gradient if it asks for one.
        row_weights: (R,) float32; rows of weight 0 cost nothing.
        teacher: gives the target law of every row.
        decay: of the KL share of `Divergence.LK`, per unit of acceptance.
    """
    target = _Target(weights=row_weights, teacher=teacher, ids=None, share=1.0, divergence=divergence, decay=decay)
    return _apply(hidden, weight, target)


def hard_loss(
    hidden: Tensor, weight: Tensor, row_weights: Tensor, ids: Tensor, teacher: Teacher | None = None, share: float = 0.0
) -> VocabularyLoss:
    """``sum_r row_weights[r] * -log student(ids[r])`` in nats; `share` of the target mass follows `teacher` instead.

    Args:
        hidden: (R, H); weight: (V, H); row_weights: (R,) float32; ids: (R,) int64, the true tokens.
        teacher: with `share` in (0, 1], the law that takes that share of the one-hot target's mass.
    """
    target = _Target(
        weights=row_weights,
        teacher=teacher,
        ids=ids,
        share=share if teacher is not None else 0.0,
        divergence=Divergence.CROSS_ENTROPY,
        decay=0.0,
    )
    return _apply(hidden, weight, target)


def _apply(hidden: Tensor, weight: Tensor, target: _Target) -> VocabularyLoss:
    loss, agrees, overlap = _ChunkedLoss.apply(hidden, weight, target)  # type: ignore[no-untyped-call]
    return VocabularyLoss(loss=loss, agrees=agrees, overlap=overlap)


class _ChunkedLoss(torch.autograd.Function):
    """The loss of a linear head; the gradients are ready when the forward pass is."""

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, target: _Target) -> tuple[Tensor, Tensor, Tensor]:
        kept = target.weights.nonzero().squeeze(1)
        device = hidden.device.type
        working = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        head = weight.detach().to(working)
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        agrees, overlap = target.weights.new_zeros(len(hidden)), target.weights.new_zeros(len(hidden))
        for rows in torch.split(kept, max(1, CHUNK_ELEMENTS // weight.shape[0])):
            inputs = hidden[rows].to(working)
            logits = (inputs @ head.T).float()
            losses, agrees[rows], overlap[rows] = _loss_and_gradient(logits, rows, target)
            loss += losses
            gradient = logits.to(working)
            hidden_grad[rows] = (gradient @ head).to(hidden_grad.dtype)
            if weight_grad is not None:
                weight_grad += gradient.T @ inputs
        context.save_for_backward(hidden_grad, *(() if weight_grad is None else (weight_grad,)))
        context.weight_dtype = weight.dtype
        context.mark_non_differentiable(agrees, overlap)
        return loss, agrees, overlap

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = context.saved_tensors
        weight_grad = (saved[1] * upstream[0]).to(context.weight_dtype) if len(saved) > 1 else None
        return saved[0] * upstream[0].to(saved[0].dtype), weight_grad, None


def _loss_and_gradient(logits: Tensor, rows: Tensor, target: _Target) -> tuple[Tensor, Tensor, Tensor]:
    """The weighted loss of one chunk, agreement and overlap; `logits` (r, V) is overwritten with its gradient."""
    factors = target.weights[rows]
    normalizer, best = logits.logsumexp(-1), logits.argmax(-1)
    law = target.teacher.law(rows) if target.teacher is not None and target.share else None
    ids = target.ids[rows] if target.ids is not None else None
    losses = normalizer.clone()
    if law is not None:
        losses -= target.share * torch.linalg.vecdot(law, logits)
    if ids is not None:
        losses -= (1 - target.share) * logits.gather(1, ids[:, None]).squeeze(1)
    torch.exp(logits.sub_(normalizer[:, None]), out=logits)  # the student's law
    overlap = torch.minimum(logits, law).sum(-1) if law is not None else torch.zeros_like(losses)
    agrees = best.eq(law.argmax(-1) if law is not None else _given(ids)).float()
    if target.divergence is Divergence.CROSS_ENTROPY:
        if law is not None:
            logits.sub_(law, alpha=target.share)
        if ids is not None:
            logits.scatter_add_(1, ids[:, None], torch.full_like(normalizer[:, None], target.share - 1))
    else:
        assert law is not None
        losses = _acceptance(logits, law, losses, overlap, target)
    logits.mul_(factors[:, None])
    return (losses * factors).sum(), agrees, overlap


def _acceptance(student: Tensor, law: Tensor, cross: Tensor, overlap: Tensor, target: _Target) -> Tensor:
    """The LK losses (r,); `student` (r, V) is overwritten with the gradient of the logits."""
    below = student < law
    pull = torch.where(below, student, 0.0)
    towards = pull - student * pull.sum(-1, keepdim=True)  # the gradient of the overlap
    if target.divergence is Divergence.LK_LOG:
        safe = overlap.clamp_min(1e-6)
        student.copy_(towards.div_(-safe[:, None]))
        return safe.log().neg()
    share = torch.exp(-target.decay * overlap)
    entropy = torch.special.entr(law).sum(-1)
    student.sub_(law).mul_(share[:, None]).sub_(towards.mul_((1 - share)[:, None]))
    mixed: Tensor = share * (cross - entropy) + (1 - share) * (1 - overlap)
    return mixed


def _given(ids: Tensor | None) -> Tensor:
    assert ids is not None, "a loss needs a teacher or ids"
    return ids
