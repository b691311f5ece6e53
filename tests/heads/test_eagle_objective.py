"""The objectives of EAGLE-3 and EAGLE-1 against written-out references, attention's gradients, and noise."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from forerun.drafters.kinds import kind_named, objective_for
from forerun.errors import ArgumentError
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleHead, EagleObjective, EagleSettings
from forerun.losses import unrolled_attention
from forerun.losses.chunked_loss import Divergence
from forerun.losses.objective import FeatureBatch, FrozenTarget
from forerun.losses.unrolled_attention import blocks_of, ttt_attention
from forerun.types import LAST_HIDDEN
from training.divergences import divergence_of
from training.ttt import FIRST, VOCABULARY, batch_of, dflash, head, model, mtp, peagle, tokens


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
    for found, expected in zip(*(torch.autograd.grad(one, given, flow) for one in (ours, theirs)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def agree(made: EagleHead, batch: FeatureBatch) -> None:
    """Let the target find likely what the head does, at two of three places; no boundary of the head is changed."""
    weight = model().get_output_embeddings().weight
    for step in Eagle3Objective(made, FrozenTarget.of(model()), Eagle3Settings(steps=2)).unroll(batch):
        best = made.token_ids[made.lm_head(step.output[0]).argmax(-1)]
        for index in range(0, len(best) - 1 - step.step, 3):
            batch.features[LAST_HIDDEN][0, index + 1 + step.step] = 2 * weight[best[index]]


@pytest.mark.parametrize(
    ("size", "divergence", "skip"),
    [
        *((30, divergence, True) for divergence in Divergence),
        *((size, Divergence.CROSS_ENTROPY, False) for size in (30, 8, VOCABULARY)),
    ],
    ids=str,
)
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


@pytest.mark.parametrize("settings", [{}, {"noise": 0.0}, {"regression_weight": 0.0, "token_weight": 1.0}], ids=str)
def test_the_loss_equals_a_written_out_reference(settings: dict[str, float]) -> None:
    """From state i and token i + 1: the state of token i + 1, and through the output head what follows it."""
    made, text, start = head(**FIRST), tokens(20), 5
    batch = batch_of([text], made.config.boundaries)
    batch.batch.loss_mask[0, :start] = False
    report = EagleObjective(made, FrozenTarget.of(model()), EagleSettings(**settings))(batch)

    states, weight = batch.features[LAST_HIDDEN][0], model().get_output_embeddings().weight.detach()
    embeds = model().get_input_embeddings()(torch.tensor(text)).detach()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        # A layer sees keys of all entries up to its own; the last entry has no next token.
        length = len(text) - 1
        mask = torch.ones(length, length).tril().bool()

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
            return attended.transpose(1, 2)

        angles = made.angles(torch.arange(length)[None], embeds[None])
        predicted = made.advance(embeds[None, 1:], states[None, :-1], angles, attend).output[0]
        for index in range(length - 1):
            if index + 2 < start:
                continue
            wanted = states[index + 1]
            target_probs = (wanted @ weight.T).softmax(-1)
            entropy = -(target_probs * (predicted[index] @ weight.T).log_softmax(-1)).sum()
            distance = smooth_l1_loss(predicted[index], wanted)
            total += settings.get("regression_weight", 1.0) * distance + settings.get("token_weight", 0.1) * entropy
            count += 1
    assert float(report.weight) == count
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-4, rtol=1e-5)


def test_noise_is_on_what_the_head_reads_while_it_trains_and_on_nothing_else() -> None:
    made = head(**FIRST)
    batch = batch_of([tokens(20)], made.config.boundaries)
    before = batch.features[LAST_HIDDEN].clone()

    def loss(noise: float, *, training: bool) -> float:
        torch.manual_seed(0)
        objective = EagleObjective(made.train(training), FrozenTarget.of(model()), EagleSettings(noise=noise))
        return float(objective(batch).loss.detach())

    assert loss(0.1, training=False) == loss(0.0, training=True) == loss(0.0, training=False)
    assert loss(0.1, training=True) == loss(0.1, training=True) != loss(0.0, training=True)
    assert torch.equal(batch.features[LAST_HIDDEN], before)
    read: list[torch.Tensor] = []
    made.train().fc.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    next(iter(EagleObjective(made, FrozenTarget.of(model()), EagleSettings(noise=0.1)).unroll(batch)))
    moved = read[0][..., -before.shape[-1] :] - before
    assert 0.09 < float(moved.abs().max()) <= 0.1 + 1e-6 and abs(float(moved.mean())) < 0.02


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "peagle", "mtp"])
def test_heads_of_decoder_layers_can_read_noise_while_they_train(kind: str) -> None:
    """On every state that they read; none by default."""
    made: Any = {"eagle3": head, "dflash": dflash, "peagle": peagle, "mtp": mtp}[kind]()
    batch, objective = batch_of([tokens(20)], made.config.boundaries), objective_for(kind_named(kind))

    def fused(noise: float | None, *, training: bool) -> torch.Tensor:
        torch.manual_seed(0)
        settings = objective.Settings() if noise is None else objective.Settings(noise=noise)
        return objective(made.train(training), FrozenTarget.of(model()), settings).fused(batch)

    plain = fused(None, training=True)
    assert torch.equal(plain, fused(0.1, training=False)) and not torch.equal(plain, fused(0.1, training=True))
    moved = list[torch.Tensor]()
    made.fuse = lambda states: moved.extend(states) or states[0]
    fused(0.1, training=True)
    for boundary, state in zip(made.config.boundaries, moved, strict=True):
        distance = (state - batch.features[boundary]).abs()
        assert 0.09 < float(distance.max()) <= 0.1 + 1e-5 and 0.04 < float(distance.mean()) < 0.06


def test_a_head_of_another_kind_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kind eagle, this one is eagle3"):
        EagleObjective(head(), FrozenTarget.of(model()))
