"""The chunked loss is the plain one: value and gradients, for every divergence, whatever the chunk."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from forerun.losses import chunked_loss
from forerun.losses.chunked_loss import Divergence, Teacher, VocabularyLoss, hard_loss, soft_loss
from training.divergences import divergence_of

ROWS, HIDDEN, SIZE = 23, 8, 17
KNOWN = torch.tensor([14, 2, 9, 3, 11, 0, 7])
"""The student's tokens where it knows fewer than the teacher, in no order."""


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain(
    hidden: Tensor, weight: Tensor, weights: Tensor, teacher: Teacher, divergence: Divergence, skip: bool = False
) -> VocabularyLoss:
    """The definitions, written out over the teacher's whole vocabulary."""
    tokens = torch.arange(len(teacher.weight)) if teacher.tokens is None else teacher.tokens
    logits = teacher.hidden @ teacher.weight.T * teacher.scale
    if teacher.bias is not None:
        logits = logits + teacher.bias * teacher.scale
    if teacher.softcap is not None:
        logits = teacher.softcap * torch.tanh(logits / teacher.softcap)
    target, own = ((part / teacher.temperature).softmax(-1).log() for part in (logits, hidden @ weight.T))
    target = target.exp()
    logs = torch.full_like(target, -torch.inf).index_copy(1, tokens, own)
    overlap = torch.minimum(logs.exp(), target).sum(-1)
    losses = divergence_of(target, logs, tokens.tolist(), divergence)
    known_best = torch.tensor([int(best) in tokens.tolist() for best in target.argmax(-1)])
    entered = weights * known_best if skip else weights
    counted = (weights != 0).float()
    agrees = logs.argmax(-1).eq(target.argmax(-1)).float()
    return VocabularyLoss(
        **{"loss": (losses * entered).sum(), "weights": entered, "agrees": agrees * counted},
        **{"overlap": overlap.detach() * counted, "losses": losses.detach() * counted},
    )


@pytest.fixture(params=[1, 5, 1000], ids="chunk-of-{}".format)
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_ELEMENTS", request.param * SIZE)
    monkeypatch.setattr(chunked_loss, "BLOCK_ELEMENTS", 2 * SIZE)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(("softcap", "temperature"), [(None, 1.0), (2.0, 1.0), (2.0, 0.6)])
@pytest.mark.parametrize(("tokens", "skip"), [(None, True), (KNOWN, False), (KNOWN, True)], ids=["all", "few", "skip"])
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_loss_figures_and_gradients_equal_the_plain_ones(
    divergence: Divergence, tokens: Tensor | None, skip: bool, softcap: float | None, temperature: float
) -> None:
    hidden, weight = drawn(ROWS, HIDDEN, seed=0), drawn(SIZE if tokens is None else len(tokens), HIDDEN, seed=1)
    weights = torch.rand(ROWS, generator=torch.Generator().manual_seed(4)) * (torch.arange(ROWS) % 4 > 0)
    bias = None if softcap is None else drawn(SIZE, seed=5)
    teacher = Teacher(
        **{"hidden": drawn(ROWS, 6, seed=2), "weight": drawn(SIZE, 6, seed=3), "tokens": tokens, "bias": bias},
        **{"scale": 0.5, "softcap": softcap, "temperature": temperature},
    )
    both = []
    for loss_of in (
        lambda h, w: soft_loss(h, w, weights, teacher, divergence, skip_unknown=skip),
        lambda h, w: plain(h, w, weights, teacher, divergence, skip),
    ):
        states, head = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = loss_of(states, head)
        (2.5 * found.loss).backward()
        figures = (found.weights, found.agrees, found.overlap, found.losses)
        both.append((found.loss.detach(), *figures, states.grad, head.grad))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    left_out = int(((weights != 0) & (both[0][1] == 0)).sum())
    assert (left_out > 0) == (skip and tokens is not None)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_a_perfect_student_of_few_tokens_keeps_what_the_teacher_gives_to_them(divergence: Divergence) -> None:
    states, head = drawn(ROWS, HIDDEN, seed=0), drawn(SIZE, HIDDEN, seed=1)
    teacher = Teacher(hidden=states, weight=head, tokens=KNOWN)
    probs = (states @ head.T).softmax(-1)
    student = states.clone().requires_grad_()
    found = soft_loss(student, head[KNOWN], torch.ones(ROWS), teacher, divergence)
    torch.testing.assert_close(found.overlap, probs[:, KNOWN].sum(-1))
    assert 0.2 < found.overlap.mean() < 0.8
    assert torch.equal(found.agrees, torch.isin(probs.argmax(-1), KNOWN).float())
    torch.testing.assert_close(*torch.autograd.grad(found.loss, student), torch.zeros_like(states), atol=1e-6, rtol=0)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
@pytest.mark.parametrize("tokens", [None, KNOWN], ids=["all", "few"])
def test_rows_that_follow_the_same_state_share_its_distribution(divergence: Divergence, tokens: Tensor | None) -> None:
    group, weight = 3, drawn(SIZE if tokens is None else len(tokens), HIDDEN, seed=1)
    weights = torch.rand(group * ROWS, generator=torch.Generator().manual_seed(4))
    weights = weights * (torch.arange(group * ROWS) % 4 > 0) * (torch.arange(group * ROWS) >= 2 * group)
    short, head = drawn(ROWS, 6, seed=2), drawn(SIZE, 6, seed=3)
    both = []
    for states in (short, short.repeat_interleave(group, 0)):
        hidden = drawn(group * ROWS, HIDDEN, seed=0).requires_grad_()
        teacher = Teacher(hidden=states, weight=head, tokens=tokens)
        found = soft_loss(hidden, weight, weights, teacher, divergence, skip_unknown=True)
        figures = (found.loss.detach(), found.weights, found.agrees, found.overlap)
        both.append((*figures, *torch.autograd.grad(found.loss, hidden)))
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not both[0][2][weights == 0].any() and both[0][2].any()


@pytest.mark.usefixtures("chunk")
def test_hard_loss_is_cross_entropy() -> None:
    hidden, weight = drawn(ROWS, HIDDEN, seed=0).requires_grad_(), drawn(SIZE, HIDDEN, seed=1).requires_grad_()
    ids = torch.arange(ROWS) % SIZE
    expected = functional.cross_entropy(hidden @ weight.T, ids)
    found = hard_loss(hidden, weight, torch.full((ROWS,), 1 / ROWS), ids).loss
    wanted = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, (hidden, weight)), wanted, atol=1e-6, rtol=1e-4)


def test_a_distribution_with_zeros_has_finite_divergences_from_the_student() -> None:
    """Of what float32 rounds to zero, on either side."""
    weight, hidden = torch.eye(3), torch.tensor([[0.0, 200.0, 0.0]]).requires_grad_()
    teacher = Teacher(hidden=torch.tensor([[200.0, 0.0, 0.0]]), weight=weight)
    for divergence, most in ((Divergence.REVERSE_KL, 88.0), (Divergence.JENSEN_SHANNON, 0.6932)):
        found = soft_loss(hidden, weight, torch.ones(1), teacher, divergence)
        assert 0.69 < found.loss <= most
        assert torch.isfinite(torch.autograd.grad(found.loss, hidden)[0]).all()


def test_losses_of_rows_alone_cost_no_gradient() -> None:
    found = soft_loss(
        torch.ones(2, 4), torch.eye(4), torch.ones(2), Teacher(hidden=torch.ones(2, 4), weight=torch.eye(4))
    )
    assert not found.loss.requires_grad
    torch.testing.assert_close(found.losses, torch.full((2,), 4.0).log())


def test_agreement_and_overlap_are_counted_by_row_and_skipped_rows_are_zero() -> None:
    weight = torch.eye(4)
    hidden = torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0]])
    teacher = Teacher(hidden=torch.tensor([[9.0, 0, 0, 0], [0, 0, 9.0, 0], [0, 0, 9.0, 0]]), weight=weight)
    found = soft_loss(hidden, weight, torch.tensor([1.0, 1.0, 0.0]), teacher)
    assert found.agrees.tolist() == [1.0, 0.0, 0.0]
    assert found.overlap[0] == pytest.approx(1.0, abs=1e-6)
    assert found.overlap[1] < 0.01
    assert found.overlap[2] == 0.0


@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
def test_autocast_rounds_no_loss(divergence: Divergence) -> None:
    """States of one 1 make logits that bfloat16 holds exactly, so that nothing else rounds."""
    size = 300
    hidden, logits, wanted = torch.eye(ROWS, size), 8 * drawn(ROWS, size, seed=1), 8 * drawn(ROWS, size, seed=2)
    student, teacher = torch.zeros(size, size), torch.zeros(size, size)
    student[:, :ROWS], teacher[:, :ROWS] = logits.T.bfloat16(), wanted.T.bfloat16()

    def losses() -> Tensor:
        return soft_loss(hidden, student, torch.ones(ROWS), Teacher(hidden=hidden, weight=teacher), divergence).losses

    expected = losses()
    with torch.autocast("cpu", torch.bfloat16):
        found = losses()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
