"""The objective's figures against a written-out reference, and its attention's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.training import unrolled
from forerun.training.objectives.eagle3 import Eagle3Objective, Eagle3Settings, FrozenTarget
from forerun.training.unrolled import blocks_of, unrolled_attention
from forerun.types import LAST_HIDDEN
from training.ttt import batch_of, head, model, tokens


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, own: list[tuple[Tensor, Tensor]], documents: Tensor
) -> Tensor:
    """All scores at once."""
    times, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(times, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    index = torch.arange(length)
    hidden = (index > index[:, None]) | (documents[:, None, :] != documents[:, :, None])
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lines = [(query * k.repeat_interleave(times, 1)).sum(-1, keepdim=True) * query.shape[-1] ** -0.5 for k, _ in own]
    law = torch.cat([scores, *lines], -1).softmax(-1)
    mixed = law[..., :length] @ value.repeat_interleave(times, 1)
    for place, (_, line_value) in enumerate(own):
        mixed = mixed + law[..., length + place, None] * line_value.repeat_interleave(times, 1)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_attention_and_its_gradients_equal_the_plain_ones(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unrolled.QUERY_BLOCK, "cpu", 5)
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0] * 7 + [1] * 6, [0] * 3 + [1] * 8 + [-1] * 2])
    shapes = [(2, 4, 13, 8)] + [(2, 2, 13, 8)] * (2 + 2 * steps)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    own = list(zip(given[3::2], given[4::2], strict=True))
    ours = unrolled_attention(given[0], given[1], given[2], own, blocks_of(documents))
    theirs = plain_attention(given[0], given[1], given[2], own, documents)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    flow = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad(ours, given, flow), torch.autograd.grad(theirs, given, flow), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_the_loss_equals_a_written_out_reference() -> None:
    made, text, steps = head(), tokens(12), 3
    batch = batch_of([text], made.config.boundaries)
    batch.batch.loss_mask[0, :5] = False  # the user's part
    objective = Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=steps, decay=0.8))
    report = objective(batch)

    weight = model().get_output_embeddings().weight
    ids = made.token_ids
    logits = batch.features[LAST_HIDDEN][0] @ weight.T
    shares = [0.8**step / sum(0.8**s for s in range(steps)) for step in range(steps)]
    total, count = torch.zeros(()), 0.0
    outputs = [unrolled.output[0] for unrolled in objective.unroll(batch)]
    for step, (output, share) in enumerate(zip(outputs, shares, strict=True)):
        for index in range(len(text)):
            judged, predicted = index + 1 + step, index + 2 + step
            if predicted >= len(text) or predicted < 5 or int(logits[judged].argmax()) not in ids.tolist():
                continue
            law = logits[judged][ids].softmax(-1)
            total = total - share * (law * made.lm_head(output[index]).log_softmax(-1)).sum()
            count += share
    torch.testing.assert_close(report.loss, total, atol=1e-5, rtol=1e-5)
    assert float(report.weight) == pytest.approx(count)
    assert 0 < count < sum(share * (len(text) - 2 - step) for step, share in enumerate(shares))


def test_acceptance_is_a_joint_prefix() -> None:
    made, text = head(), tokens(30)
    report = Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=3))(
        batch_of([text], made.config.boundaries)
    )
    shares = [float(report.metrics[f"acceptance_{step}"][0]) for step in range(3)]
    assert shares == sorted(shares, reverse=True)
    assert [float(report.metrics[f"acceptance_{step}"][1]) for step in range(3)] == [28.0, 27.0, 26.0]


def test_only_the_head_learns() -> None:
    made, target = head(), model()
    target.zero_grad()
    Eagle3Objective(made, FrozenTarget.of(target), Eagle3Settings(steps=2))(
        batch_of([tokens(12)], made.config.boundaries)
    ).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in made.parameters())
    assert all(weight.grad is None for weight in target.parameters())


@pytest.mark.parametrize(
    "variant",
    [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_fc": True, "norm_before_residual": True}],
    ids=str,
)
def test_it_learns_in_bfloat16_too(variant: dict[str, bool]) -> None:
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        made = head(**variant)
        objective = Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=3))
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is torch.bfloat16):
            report = objective(batch_of([tokens(24)], made.config.boundaries))
        (report.loss / report.weight).backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in made.parameters() if weight.grad is not None]))
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.95
