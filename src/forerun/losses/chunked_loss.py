"""Computes the loss over a vocabulary in chunks of rows, so that only one chunk's
logits are ever alive.

A plain ``cross_entropy(hidden @ weight.T, probs)`` keeps several (R, V) tensors for the backward
pass, and on a CPU moving them costs more than all matrix products. Here gradients are formed in the
forward pass, in the memory of the logits and block by block, so that intermediate results stay in
the cache; rows that follow the same state of the teacher share its probabilities. The teacher's
probability of tokens that the student does not know is lost, and counts so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 23  # Logits alive at once on a CPU, the operand of the matrix products: 16 MB in bfloat16
DEVICE_CHUNKS = 8  # Factor on a GPU, whose launches cost the same whatever their size
PRODUCT_ELEMENTS = 1 << 20  # Of the output head's gradient that are formed at a time on a CPU: 2 MB in bfloat16
BLOCK_ELEMENTS = 1 << 18  # Logits that a core turns into gradients at a time: 1 MB in float32, which fits its cache


class Divergence(StrEnum):
    """Measures how far the student's probabilities q are from the target's p.

    KL and cross-entropy are infinite where q is 0 and p is not: they are taken against p
    renormalised over the student's tokens. The acceptance a is of p as it is.
    """

    CROSS_ENTROPY = "cross_entropy"  # ``-sum_v p log q``: forward KL up to a constant
    LK = "lk"  # ``w * KL + (1 - w) * (1 - a)``, a = ``sum_v min(p, q)``, w = ``exp(-decay * a)``, without gradient
    LK_LOG = "lk_log"  # ``-log a``: the likelihood of acceptance itself (arXiv 2602.23881)
    MIXED = "mixed"  # ``mix * KL + (1 - mix) * (1 - a)``; 1 - a is the total variation (DSpark)
    # DistillSpec's (arXiv 2310.08461) are finite wherever p has no zeros, and take p as it is.
    REVERSE_KL = "reverse_kl"  # ``sum_v q log(q / p)``
    JENSEN_SHANNON = "jensen_shannon"  # ``(KL(p, m) + KL(q, m)) / 2``, m = (p + q) / 2: at most log 2
    TOTAL_VARIATION = "total_variation"  # ``1 - a``, which is ``sum_v |p - q| / 2``


def chunk_elements(device: torch.device) -> int:
    """Return the number of logits that are alive at once."""
    return CHUNK_ELEMENTS if device.type == "cpu" else DEVICE_CHUNKS * CHUNK_ELEMENTS


def soft_loss(
    hidden: Tensor,
    weight: Tensor,
    row_weights: Tensor,
    teacher: Teacher,
    divergence: Divergence = Divergence.CROSS_ENTROPY,
    decay: float = 3.0,
    *,
    mix: float = 0.1,
    skip_unknown: bool = False,
    paths: DraftPaths | None = None,
) -> VocabularyLoss:
    """Return ``sum_r row_weights[r] * divergence(teacher probs of row r, student probs of row r)``
    in nats.

    Args:
        hidden: (R, H), the student's states as its head reads them.
        weight: (V, H), the student's head; gets a gradient if it asks for one.
        row_weights: (R,) float32; rows of weight 0 cost nothing.
        teacher: gives the target probabilities of every row, or of every G rows.
        decay: of the KL share of `Divergence.LK`, per unit of acceptance.
        mix: share of the KL in `Divergence.MIXED`.
        skip_unknown: leave rows out of the loss whose likeliest token the student does not know.
        paths: how rows that follow each other on a draft weigh; each of them follows a state of its own.
    """
    target = _Target(
        weights=row_weights,
        teacher=teacher,
        divergence=Divergence(divergence),
        decay=decay,
        mix=mix,
        unknown=teacher.unknown() if skip_unknown else None,
        paths=paths,
    )
    return _loss(hidden, weight, target, teacher.temperature)


def hard_loss(
    hidden: Tensor, weight: Tensor, row_weights: Tensor, ids: Tensor, *, temperature: float = 1.0
) -> VocabularyLoss:
    """Return ``sum_r row_weights[r] * -log student(ids[r])`` in nats, for the true tokens `ids`
    (R,) int64.

    Other arguments are those of `soft_loss`. `temperature` is that of the student's distribution.
    """
    return _loss(hidden, weight, _Target(weights=row_weights, ids=ids), temperature)


def _loss(hidden: Tensor, weight: Tensor, target: _Target, temperature: float) -> VocabularyLoss:
    states = hidden if temperature == 1.0 else hidden / temperature
    return VocabularyLoss(*_ChunkedLoss.apply(states, weight, target))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class DraftPaths:
    """Rows that follow each other as the depths of drafts of `length`, and weigh what
    they bring.

    Depth j weighs the sum over m >= j of the chance that a draft gets beyond depth m (D-PACE, arXiv
    2605.18810).
    """

    length: int
    smoothing: float = 0.5  # a: of an acceptance q counts (1 - a) q + a, so that late depths are not lost at first

    def weights(self, overlap: Tensor, counted: Tensor) -> Tensor:
        """Return the weights (n,) of rows with this overlap; a row that is not `counted` weighs 0,
        and a draft ends there.
        """
        alive = torch.where(counted, (1 - self.smoothing) * overlap + self.smoothing, 0.0)
        reached = alive.view(-1, self.length).cumprod(-1)
        return reached.flip(-1).cumsum(-1).flip(-1).flatten()


@dataclass(frozen=True, slots=True)
class VocabularyLoss:
    """The loss, and row by row how well student and target agree; 0 for
    rows of weight 0.
    """

    loss: Tensor
    weights: Tensor  # (R,) float32: the given weights, 0 for rows that were left out
    agrees: Tensor  # (R,) float32: 1 where both have the same likeliest token, of all that the teacher knows
    overlap: Tensor  # (R,) float32: ``sum_v min(p, q)``, the chance that a sampled draft is accepted
    losses: Tensor  # (R,) float32, nats: the divergence of each row, unweighted


@dataclass(frozen=True, kw_only=True, slots=True)
class Teacher:
    """The states and the output head whose logits are formed chunk by chunk, like
    the student's.
    """

    hidden: Tensor  # (R / G, Ht): states after the final norm; G consecutive rows of the student follow the same one
    weight: Tensor  # (Vt, Ht): its whole head
    tokens: Tensor | None = None  # (V,) int64: its number of each of the student's tokens; None: the same ones
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None  # ``cap * tanh(logits / cap)``
    temperature: float = 1.0  # Temperature of both distributions, the teacher's and the student's

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits (r, Vt) of `states` (r,), row numbers of `hidden`, in the dtype of the
        head.

        They are neither scaled nor capped nor divided by the temperature.
        """
        return functional.linear(self.hidden[states].to(self.weight.dtype), self.weight, self.bias)

    def unknown(self) -> Tensor | None:
        """Return a mask (Vt,) of the tokens that the student does not know; None if it knows all."""
        if self.tokens is None:
            return None
        return torch.ones(len(self.weight), dtype=torch.bool, device=self.weight.device).index_fill(0, self.tokens, 0)

    def probs(self, logits: Tensor) -> _Probs:
        """Return the probabilities of (.., Vt) logits at the student's tokens."""
        logits = logits.float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap).mul_(self.softcap)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        best, full = logits.argmax(-1), torch.softmax(logits, -1)
        if self.tokens is None:
            return _Probs(best=best, full=full, renormalised=full)
        token_ids = self.tokens.expand(*logits.shape[:-1], -1)  # gather: many times faster than an index on a CPU
        return _Probs(
            best=best, full=full.gather(-1, token_ids), renormalised=torch.softmax(logits.gather(-1, token_ids), -1)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probs:
    """`_Probs` are the teacher's probabilities of the student's tokens."""

    best: Tensor  # (..) int64: the likeliest token of all, by the teacher's number
    full: Tensor  # (.., V) float32, as they are: they sum to less than 1 where the student does not know all tokens
    renormalised: Tensor  # (.., V) float32, over the student's tokens alone


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A `_Target` holds the targets of the rows, a teacher's probabilities or `ids`, and the
    measure of the distance.
    """

    weights: Tensor
    teacher: Teacher | None = None
    ids: Tensor | None = None
    divergence: Divergence = Divergence.CROSS_ENTROPY
    decay: float = 0.0
    mix: float = 0.0
    unknown: Tensor | None = None  # (Vt,) bool: a row is left out where one of these is the teacher's likeliest token
    paths: DraftPaths | None = None


class _ChunkedLoss(torch.autograd.Function):
    """`_ChunkedLoss` is the loss of a linear head whose gradients are ready when the forward pass
    is.
    """

    @staticmethod
    def forward(context: Any, hidden: Tensor, weight: Tensor, target: _Target) -> tuple[Tensor, ...]:
        group = len(hidden) // len(target.teacher.hidden) if target.teacher is not None else 1
        states, factors = hidden.reshape(-1, group, hidden.shape[-1]), target.weights.view(-1, group, 1)
        working = working_dtype(hidden.device, hidden.dtype)
        head = weight.detach().to(working)
        hidden_grad = torch.zeros_like(states)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if weight.requires_grad else None
        figures = target.weights.new_zeros(4, *states.shape[:2])
        run = target.paths.length if target.paths is not None else 1  # States that are looked at together
        counting = factors.flatten(1).any(1).view(-1, run).any(1).repeat_interleave(run).nonzero().squeeze(1)
        size = run * max(1, chunk_elements(hidden.device) // (run * _width(group * len(weight), target)))
        for chosen in torch.split(counting, size) if len(counting) else ():
            inputs = states[chosen].to(working)
            logits = (inputs.flatten(0, 1) @ head.T).view(len(chosen), group, weight.shape[0])
            found = _become_gradients(logits, chosen, target)
            if target.paths is not None:
                counted = (factors[chosen, 0, 0] != 0) & (found[3, :, 0] != 0)
                found[3, :, 0] = target.paths.weights(found[2, :, 0], counted)
            figures[:, chosen] = found
            gradient, shares = logits.flatten(0, 1), factors[chosen] * found[3, ..., None]
            # A row's factor goes to the narrow side of both products.
            if context.needs_input_grad[0]:
                hidden_grad[chosen] = ((gradient @ head).view_as(inputs) * shares).to(hidden_grad.dtype)
            if weight_grad is not None:
                _add_product(weight_grad, gradient, (inputs * shares).to(working).flatten(0, 1))
        losses, agrees, overlap, entered = figures.flatten(1).masked_fill_(target.weights == 0, 0.0)
        weights = target.weights * entered
        context.save_for_backward(hidden_grad.view_as(hidden), *(() if weight_grad is None else (weight_grad,)))
        context.weight_dtype = weight.dtype
        context.mark_non_differentiable(weights, agrees, overlap, losses)
        return torch.dot(losses, weights), weights, agrees, overlap, losses

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = context.saved_tensors
        weight_grad = (saved[1] * upstream[0]).to(context.weight_dtype) if len(saved) > 1 else None
        return saved[0] * upstream[0].to(saved[0].dtype), weight_grad, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left.T @ right`` to `total` (V, H) float32; on a CPU block by block.

    The product in half precision would otherwise be turned into float32 as a whole, and both would leave the cache:
    that took a tenth of a step with 49,152 tokens.
    """
    rows = max(1, PRODUCT_ELEMENTS // total.shape[1]) if total.device.type == "cpu" else len(total)
    for start in range(0, len(total), rows):
        block = slice(start, start + rows)
        total[block] += left[:, block].T @ right


def _width(following: int, target: _Target) -> int:
    """Return the logits of one state: those of all rows that follow it, or the teacher's, whichever
    are more.
    """
    return max(following, len(target.teacher.weight) if target.teacher is not None else 0)


def _become_gradients(logits: Tensor, chosen: Tensor, target: _Target) -> Tensor:
    """Turn `logits` (n, G, V) of the groups `chosen` (n,) into the gradients of unweighted losses,
    block by block.

    Returns (4, n, G) float32: losses, agreement, overlap, and 1 for rows that enter the loss.
    """
    size, group, vocabulary = logits.shape
    followed = target.teacher.logits(chosen) if target.teacher is not None else None
    ids = target.ids.view(-1, group)[chosen] if target.ids is not None else None
    cores = torch.get_num_threads() if logits.device.type == "cpu" else size
    step = max(1, cores * BLOCK_ELEMENTS // _width(group * vocabulary, target))
    gradients = []
    for start in range(0, size, step):
        block = slice(start, start + step)
        probs = target.teacher.probs(followed[block, None]) if target.teacher and followed is not None else None
        wide = logits[block].float()
        gradients.append(_loss_and_gradient(wide, probs, ids[block] if ids is not None else None, target))
        logits[block] = wide
    return torch.cat(gradients, 1)


def _loss_and_gradient(logits: Tensor, probs: _Probs | None, ids: Tensor | None, target: _Target) -> Tensor:
    """Turn `logits` (n, G, V) float32 into their gradient and return (4, n, G): losses, agreement,
    overlap, entering.

    `probs` are the teacher's (n, 1, V); `ids` (n, G) are the true tokens.
    """
    best = logits.argmax(-1, keepdim=True)
    losses = logits.gather(-1, best).squeeze(-1)
    if probs is not None:
        with torch.autocast(logits.device.type, enabled=False):  # Rounded to half precision it is off by 0.06 nats
            losses -= (logits @ probs.renormalised.transpose(1, 2)).squeeze(-1)
    if ids is not None:
        losses -= logits.gather(-1, ids[..., None]).squeeze(-1)
    student = torch.softmax(logits, -1, out=logits)
    losses -= student.gather(-1, best).squeeze(-1).log()
    agrees, overlap, entered = _agreement(student, best.squeeze(-1), probs, ids, target)
    if ids is not None:
        student.scatter_add_(-1, ids[..., None], torch.full_like(losses[..., None], -1.0))
    elif probs is not None and target.divergence is Divergence.CROSS_ENTROPY:
        student.sub_(probs.renormalised)
    elif probs is not None and target.divergence in (Divergence.REVERSE_KL, Divergence.JENSEN_SHANNON):
        losses = _from_student(student, probs, target.divergence)
    elif probs is not None:
        losses = _acceptance(student, probs, losses, overlap, target)
    return torch.stack([losses, agrees, overlap, entered])


def _agreement(
    student: Tensor, best: Tensor, probs: _Probs | None, ids: Tensor | None, target: _Target
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, (n, G) each, whether the student's likeliest tokens `best` are the wanted ones, the
    overlap, and what enters.
    """
    entered = torch.ones_like(best, dtype=torch.float32)
    if ids is not None:
        return best.eq(ids).float(), torch.zeros_like(entered), entered
    assert probs is not None and target.teacher is not None, "a loss needs a teacher or ids"
    tokens = target.teacher.tokens
    agrees = (best if tokens is None else tokens[best]).eq(probs.best).float()
    if target.unknown is not None:
        entered = entered.masked_fill(target.unknown[probs.best], 0.0)
    return agrees, torch.minimum(student, probs.full).sum(-1), entered


def _acceptance(student: Tensor, probs: _Probs, cross: Tensor, overlap: Tensor, target: _Target) -> Tensor:
    """Return the losses that contain the acceptance (n, G); `student` (n, G, V) is overwritten with
    the logits' gradient.
    """
    pull = torch.where(student < probs.full, student, 0.0)
    towards = pull - student * pull.sum(-1, keepdim=True)  # the gradient of the overlap
    if target.divergence is Divergence.LK_LOG:
        safe = overlap.clamp_min(1e-6)
        student.copy_(towards.div_(-safe[..., None]))
        return safe.log().neg()
    fixed = {Divergence.MIXED: target.mix, Divergence.TOTAL_VARIATION: 0.0}.get(target.divergence)
    share = torch.exp(-target.decay * overlap) if fixed is None else torch.full_like(overlap, fixed)
    entropy = torch.special.entr(probs.renormalised).sum(-1)
    student.sub_(probs.renormalised).mul_(share[..., None]).sub_(towards.mul_((1 - share)[..., None]))
    return share * (cross - entropy) + (1 - share) * (1 - overlap)


def _from_student(student: Tensor, probs: _Probs, divergence: Divergence) -> Tensor:
    """Return reverse KL or Jensen-Shannon (n, G); `student` (n, G, V) is overwritten with the
    logits' gradient.
    """
    jensen = divergence is Divergence.JENSEN_SHANNON
    other = (student + probs.full) / 2 if jensen else probs.full
    smallest = torch.finfo(student.dtype).tiny  # Smaller values are raised to this
    logs = other.clamp(min=smallest).log()
    share = student.clamp(min=smallest).log_().sub_(logs)
    reverse = (student * share).sum(-1)
    student.mul_(share.sub_(reverse[..., None]))
    if not jensen:
        return reverse
    student.div_(2)
    # Where the student knows nothing, m is p / 2.
    forward = -torch.special.entr(probs.full).sum(-1) - (probs.full * logs).sum(-1)
    return (reverse + forward + (1 - probs.full.sum(-1)) * math.log(2)) / 2


def working_dtype(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products on `device`: autocast's where one is open, else
    `otherwise`.
    """
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise
