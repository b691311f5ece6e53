"""The chunked loss is the plain one: value and gradients, for every divergence, whatever the chunk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.training import vocabulary
from forerun.training.vocabulary import Divergence, Teacher, hard_loss, soft_loss

ROWS, HIDDEN, SIZE = 23, 8, 17


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(hidden: Tensor, weight: Tensor, weights: Tensor, teacher: Teacher, divergence: Divergence) -> Tensor:
    """The definitions, written out."""
    logs = (hidden @ weight.T).log_softmax(-1)
    logits = teacher.hidden @ teacher.weight.T * teacher.scale
    if teacher.bias is not None:
        logits = logits + teacher.bias * teacher.scale
    if teacher.softcap is not None:
        logits = teacher.softcap * torch.tanh(logits / teacher.softcap)
    law = logits.softmax(-1)
    overlap = torch.minimum(logs.exp(), law).sum(-1)
    if divergence is Divergence.CROSS_ENTROPY:
        losses = -(law * logs).sum(-1)
    elif divergence is Divergence.LK_LOG:
        losses = -overlap.log()
    else:
        share = torch.exp(-3.0 * overlap).detach()
        losses = share * (law * (law.log() - logs)).sum(-1) + (1 - share) * (1 - overlap)
    return (losses * weights).sum()


@pytest.fixture(params=[1, 5, 1000], ids="chunk-of-{}".format)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "CHUNK_ELEMENTS", request.param * SIZE)
    monkeypatch.setattr(vocabulary, "BLOCK_ELEMENTS", 2 * SIZE)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_soft_loss_and_gradients_equal_the_plain_ones(divergence: Divergence, softcap: float | None) -> None:
    hidden, weight = drawn(ROWS, HIDDEN, seed=0), drawn(SIZE, HIDDEN, seed=1)
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) * (torch.arange(ROWS) % 4 > 0)
    bias = None if softcap is None else drawn(SIZE, seed=5)
    teacher = Teacher(
        hidden=drawn(ROWS, 6, seed=2), weight=drawn(SIZE, 6, seed=3), bias=bias, scale=0.5, softcap=softcap
    )
    both = []
    for loss_of in (
        lambda h, w: soft_loss(h, w, weights, teacher, divergence).loss,
        lambda h, w: plain(h, w, weights, teacher, divergence),
    ):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = loss_of(states, head)
        (2.5 * loss).backward()
        both.append((loss.detach(), states.grad, head.grad))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_rows_that_follow_the_same_state_share_its_law(divergence: Divergence) -> None:
    group, weight = 3, drawn(SIZE, HIDDEN, seed=1)
    weights = torch.rand(group * ROWS, generator=torch.Generator().manual_seed(4))
    weights = weights * (torch.arange(group * ROWS) % 4 > 0) * (torch.arange(group * ROWS) >= 2 * group)
    short, head = drawn(ROWS, 6, seed=2), drawn(SIZE, 6, seed=3)
    both = []
    for states in (short, short.repeat_interleave(group, 0)):
        hidden = drawn(group * ROWS, HIDDEN, seed=0).requires_grad_()
        found = soft_loss(hidden, weight, weights, Teacher(hidden=states, weight=head), divergence)
        both.append((found.loss.detach(), found.agrees, found.overlap, *torch.autograd.grad(found.loss, hidden)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not both[0][1][weights == 0].any()


@pytest.mark.usefixtures("chunk")
def test_hard_loss_is_cross_entropy_with_a_share_for_the_teacher() -> None:
    hidden, weight = drawn(ROWS, HIDDEN, seed=0).requires_grad_(), drawn(SIZE, HIDDEN, seed=1).requires_grad_()
    ids = torch.arange(ROWS) % SIZE
    teacher = Teacher(hidden=drawn(ROWS, 6, seed=2), weight=drawn(SIZE, 6, seed=3))
    logits = hidden @ weight.T
    weights = torch.full((ROWS,), 1 / ROWS)
    law = (teacher.hidden @ teacher.weight.T).softmax(-1)
    expected = 0.3 * functional.cross_entropy(logits, ids) + 0.7 * functional.cross_entropy(logits, law)
    found = hard_loss(hidden, weight, weights, ids, teacher, 0.7).loss
    wanted = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), wanted, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(
        hard_loss(hidden, weight, weights, ids).loss, functional.cross_entropy(hidden @ weight.T, ids)
    )


def test_agreement_and_overlap_are_counted_by_row_and_skipped_rows_are_zero() -> None:
    weight = torch.eye(4)
    hidden = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0]])
    teacher = Teacher(hidden=torch.tensor([[9.0, 0, 0, 0], [0, 0, 9.0, 0], [0, 0, 9.0, 0]]), weight=weight)
    found = soft_loss(hidden, weight, torch.tensor([1.0, 1.0, 0.0]), teacher)
    assert found.agrees.tolist() == [1.0, 0.0, 0.0]
    assert found.overlap[0] == pytest.approx(1.0, abs=1e-6)
    assert found.overlap[1] < 0.01
    assert found.overlap[2] == 0.0
