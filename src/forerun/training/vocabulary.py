"""The loss over a vocabulary, in chunks of rows: logits are never alive for more than one chunk, forward or backward.

A plain ``cross_entropy(hidden @ weight.T, law)`` keeps several (R, V) tensors for the backward pass, and on a CPU
moving them costs more than all matrix products. Here gradients are formed in the forward pass, in the memory of the
logits and block by block, so that what lies between two products stays in the processor's cache; rows that follow the
same state of the teacher share its law. Knows nothing of models: hidden states and head weights come in, a scalar goes
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 23
"""Logits alive at once, the operand of the matrix products: 16 MB in bfloat16."""
BLOCK_ELEMENTS = 1 << 18
"""Of these, what a processor core turns into gradients at a time: 1 MB in float32, as much as its own cache holds."""


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
    """(R / G, Ht): the teacher's states after its final norm; G rows of the student in a row follow the same one."""
    weight: Tensor
    """(V, Ht): the rows of its head for the student's vocabulary."""
    bias: Tensor | None = None
    """(V,) of its head, where it has one."""
    scale: float = 1.0
    """Factor on the logits, where the model has one."""
    softcap: float | None = None
    """``cap * tanh(logits / cap)``, where the model has one."""

    def logits(self, states: Tensor) -> Tensor:
        """(r, V), in the dtype of the head, for `states` (r,), row numbers of `hidden`; neither scaled nor capped."""
        return functional.linear(self.hidden[states].to(self.weight.dtype), self.weight, self.bias)

    def law(self, logits: Tensor) -> Tensor:
        """(.., V) -> (.., V) float32, renormalised over the student's vocabulary."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap).mul_(self.softcap)
        return torch.softmax(logits, -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyLoss:
    """The loss, and how well student and target agree, row by row; 0 for rows of weight 0."""

    loss: Tensor
    """Scalar, nats, with gradients."""
    agrees: Tensor
    """(R,) float32, as the rows: 1 where both have the same likeliest token; 0 for hard targets that it misses."""
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
        teacher: gives the target law of every row, or of every G rows.
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
        group = len(hidden) // len(target.teacher.hidden) if target.teacher is not None else 1
        states, factors = hidden.reshape(-1, group, hidden.shape[-1]), target.weights.view(-1, group, 1)
        device = hidden.device.type
        working = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        head = weight.detach().to(working)
        hidden_grad = torch.zeros_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        figures = target.weights.new_zeros(3, *states.shape[:2])
        kept = factors.flatten(1).any(1).nonzero().squeeze(1)
        size = max(1, CHUNK_ELEMENTS // (group * weight.shape[0]))
        for chosen in torch.split(kept, size) if len(kept) else ():
            inputs, shares = states[chosen].to(working), factors[chosen]
            logits = (inputs.flatten(0, 1) @ head.T).view(len(chosen), group, weight.shape[0])
            figures[:, chosen] = _become_gradients(logits, chosen, target)
            gradient = logits.flatten(0, 1)
            # A row's factor goes to the narrow side of both products.
            hidden_grad[chosen] = ((gradient @ head).view_as(inputs) * shares).to(hidden_grad.dtype)
            if weight_grad is not None:
                weight_grad += gradient.T @ (inputs * shares).to(working).flatten(0, 1)
        losses, agrees, overlap = figures.flatten(1).masked_fill_(target.weights == 0, 0.0)
        context.save_for_backward(hidden_grad.view_as(hidden), *(() if weight_grad is None else (weight_grad,)))
        context.weight_dtype = weight.dtype
        context.mark_non_differentiable(agrees, overlap)
        return torch.dot(losses, target.weights), agrees, overlap

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = context.saved_tensors
        weight_grad = (saved[1] * upstream[0]).to(context.weight_dtype) if len(saved) > 1 else None
        return saved[0] * upstream[0].to(saved[0].dtype), weight_grad, None


def _become_gradients(logits: Tensor, chosen: Tensor, target: _Target) -> Tensor:
    """`logits` (n, G, V) of the groups `chosen` (n,) become the gradients of unweighted losses, block by block.

    Returns:
        (3, n, G) float32: losses, agreement, overlap.
    """
    size, group, vocabulary = logits.shape
    followed = target.teacher.logits(chosen) if target.teacher is not None and target.share else None
    ids = target.ids.view(-1, group)[chosen] if target.ids is not None else None
    cores = torch.get_num_threads() if logits.device.type == "cpu" else size
    step = max(1, cores * BLOCK_ELEMENTS // (group * vocabulary))
    found = []
    for start in range(0, size, step):
        block = slice(start, start + step)
        law = target.teacher.law(followed[block, None]) if target.teacher is not None and followed is not None else None
        wide = logits[block].float()
        found.append(_loss_and_gradient(wide, law, ids[block] if ids is not None else None, target))
        logits[block] = wide
    return torch.cat(found, 1)


def _loss_and_gradient(logits: Tensor, law: Tensor | None, ids: Tensor | None, target: _Target) -> Tensor:
    """(3, n, G): losses, agreement, overlap of `logits` (n, G, V) float32, which are overwritten with their gradient.

    `law` (n, 1, V), the teacher's; `ids` (n, G), the true tokens.
    """
    best = logits.argmax(-1, keepdim=True)
    losses = logits.gather(-1, best).squeeze(-1)
    if law is not None:
        losses -= target.share * (logits @ law.transpose(1, 2)).squeeze(-1)
    if ids is not None:
        losses -= (1 - target.share) * logits.gather(-1, ids[..., None]).squeeze(-1)
    student = torch.softmax(logits, -1, out=logits)
    losses -= student.gather(-1, best).squeeze(-1).log()
    overlap = torch.minimum(student, law).sum(-1) if law is not None else torch.zeros_like(losses)
    agrees = best.squeeze(-1).eq(law.argmax(-1) if law is not None else _given(ids)).float()
    if target.divergence is Divergence.CROSS_ENTROPY:
        if law is not None:
            student.sub_(law, alpha=target.share)
        if ids is not None:
            student.scatter_add_(-1, ids[..., None], torch.full_like(losses[..., None], target.share - 1))
    else:
        assert law is not None
        losses = _acceptance(student, law, losses, overlap, target)
    return torch.stack([losses, agrees, overlap])


def _acceptance(student: Tensor, law: Tensor, cross: Tensor, overlap: Tensor, target: _Target) -> Tensor:
    """The LK losses (n, G); `student` (n, G, V) is overwritten with the gradient of the logits."""
    below = student < law
    pull = torch.where(below, student, 0.0)
    towards = pull - student * pull.sum(-1, keepdim=True)  # the gradient of the overlap
    if target.divergence is Divergence.LK_LOG:
        safe = overlap.clamp_min(1e-6)
        student.copy_(towards.div_(-safe[..., None]))
        return safe.log().neg()
    share = torch.exp(-target.decay * overlap)
    entropy = torch.special.entr(law).sum(-1)
    student.sub_(law).mul_(share[..., None]).sub_(towards.mul_((1 - share)[..., None]))
    mixed: Tensor = share * (cross - entropy) + (1 - share) * (1 - overlap)
    return mixed


def _given(ids: Tensor | None) -> Tensor:
    assert ids is not None, "a loss needs a teacher or ids"
    return ids
