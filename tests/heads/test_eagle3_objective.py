"""The objective's figures against a written-out reference, and its attention's gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleHead
from forerun.losses import unrolled_attention
from forerun.losses.batch import FeatureBatch
from forerun.losses.chunked_loss import Divergence
from forerun.losses.objective import FrozenTarget
from forerun.losses.unrolled_attention import blocks_of, ttt_attention
from forerun.types import LAST_HIDDEN
from training.divergences import divergence_of
from training.ttt import VOCABULARY, batch_of, head, model, tokens


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: list[tuple[Tensor, Tensor]],
    documents: Tensor,
    reach: int | None = None,
) -> Tensor:
    """All scores at once."""
    times, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = query @ key.repeat_interleave(times, 1).transpose(-1, -2) * query.shape[-1] ** -0.5
    index = torch.arange(length)
    hidden = (index > index[:, None]) | (documents[:, None, :] != documents[:, :, None])
    if reach is not None:
        hidden = hidden | (index[:, None] - index >= reach)
    scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lines = [(query * k.repeat_interleave(times, 1)).sum(-1, keepdim=True) * query.shape[-1] ** -0.5 for k, _ in own]
    probs = torch.cat([scores, *lines], -1).softmax(-1)
    mixed = probs[..., :length] @ value.repeat_interleave(times, 1)
    for place, (_, line_value) in enumerate(own):
        mixed = mixed + probs[..., length + place, None] * line_value.repeat_interleave(times, 1)
    return mixed.transpose(1, 2)


@pytest.mark.parametrize(
    ("steps", "reach", "block"),
    [(0, None, 5), (1, None, 5), (3, None, 5), (0, 1, 5), (1, 4, 5), (3, 20, 5), (2, 0, 5), (3, -1, 1)],
)
def test_attention_and_its_gradients_equal_the_plain_ones(
    steps: int, reach: int | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(unrolled_attention.QUERY_BLOCK, "cpu", block)
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0] * 7 + [1] * 6, [0] * 3 + [1] * 8 + [-1] * 2])
    shapes = [(2, 4, 13, 8)] + [(2, 2, 13, 8)] * (2 + 2 * steps)
    given = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    own = list(zip(given[3::2], given[4::2], strict=True))
    ours = ttt_attention(given[0], given[1], given[2], own, blocks_of(documents, reach))
    theirs = plain_attention(given[0], given[1], given[2], own, documents, reach)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    flow = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad(ours, given, flow), torch.autograd.grad(theirs, given, flow), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def agree(made: EagleHead, batch: FeatureBatch) -> None:
    """Let the target find likely what the head does, at two of three places; no boundary of the head is changed."""
    weight = model().get_output_embeddings().weight
    for step in Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=2)).unroll(batch):
        best = made.token_ids[made.lm_head(step.output[0]).argmax(-1)]
        for index in range(0, len(best) - 1 - step.step, 3):
            batch.features[LAST_HIDDEN][0, index + 1 + step.step] = 2 * weight[best[index]]


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("divergence", list(Divergence), ids=str)
@pytest.mark.parametrize("size", [30, 8, VOCABULARY])
def test_loss_and_metrics_equal_a_written_out_reference(size: int, divergence: Divergence, skip: bool) -> None:
    """Distributions over all of the target's tokens, prediction by prediction, chain by chain."""
    made, text, steps = head(draft_vocab_size=size), tokens(24), 3
    batch = batch_of([text], made.config.boundaries)
    batch.batch.loss_mask[0, :5] = False  # the user's part
    agree(made, batch)
    settings = Eagle3Settings(steps=steps, decay=0.8, divergence=divergence, skip_unreachable=skip)
    objective = Eagle3Objective(made, FrozenTarget.of(model()), settings)
    report = objective(batch)

    ids = made.token_ids.tolist()
    probs = (batch.features[LAST_HIDDEN][0] @ model().get_output_embeddings().weight.T).softmax(-1).detach()
    shares = [0.8**step / sum(0.8**s for s in range(steps)) for step in range(steps)]
    outputs = [unrolled.output[0].detach() for unrolled in objective.unroll(batch)]
    total, weight = torch.zeros(()), 0.0
    overlaps: list[list[float]] = [[] for _ in range(steps)]
    chains: list[list[bool]] = [[] for _ in range(steps)]
    for index in range(len(text)):
        agreed: list[bool] = []
        for step, (output, share) in enumerate(zip(outputs, shares, strict=True)):
            verified, predicted = index + 1 + step, index + 2 + step
            if not 5 <= predicted < len(text):
                continue
            own, draft = probs[verified], torch.zeros(VOCABULARY)
            draft[ids] = made.lm_head(output[index]).softmax(-1).detach()
            overlaps[step].append(float(torch.minimum(own, draft).sum()))
            agreed.append(int(own.argmax()) == int(draft.argmax()))
            if len(agreed) == step + 1:
                chains[step].append(all(agreed))
            if not skip or int(own.argmax()) in ids:
                total, weight = total + share * divergence_of(own, draft.log(), ids, divergence), weight + share
    torch.testing.assert_close(report.loss, total, atol=1e-5, rtol=1e-5)
    assert float(report.weight) == pytest.approx(weight)
    for name, values in (("overlap", overlaps), ("acceptance", chains)):
        for step, expected in enumerate(values):
            found, count = (float(part) for part in report.metrics[f"{name}_{step}"])
            assert count == len(expected) and found == pytest.approx(sum(expected), abs=1e-5), (name, step)
    assert all(0 < sum(values) < len(values) for values in chains[:2])
    everything = sum(share * len(values) for share, values in zip(shares, overlaps, strict=True))
    assert (weight < everything - 0.1) == (skip and size < VOCABULARY)


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
