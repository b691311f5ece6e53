"""EAGLE-1's objective: regression and token loss against a written-out reference, and noise only while it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from forerun.drafters.kinds import kind_named, objective_for
from forerun.errors import ArgumentError
from forerun.heads.eagle import EagleObjective, EagleSettings
from forerun.losses.objective import FrozenTarget
from forerun.types import LAST_HIDDEN
from training.ttt import FIRST, batch_of, dflash, head, model, mtp, peagle, tokens


@pytest.mark.parametrize("settings", [{}, {"noise": 0.0}, {"regression_weight": 0.0, "token_weight": 1.0}], ids=str)
def test_the_loss_equals_a_written_out_reference(settings: dict[str, float]) -> None:
    """From state i and token i + 1: the state of token i + 1, and through the output head what follows it."""
    made, text, start = head(**FIRST), tokens(20), 5
    batch = batch_of([text], made.config.boundaries)
    batch.batch.loss_mask[0, :start] = False
    report = EagleObjective(made, FrozenTarget.of(model()), EagleSettings(**settings))(batch)  # type: ignore[arg-type]

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
        found: torch.Tensor = objective(made.train(training), FrozenTarget.of(model()), settings).fused(batch)
        return found

    plain = fused(None, training=True)
    assert torch.equal(plain, fused(0.1, training=False)) and not torch.equal(plain, fused(0.1, training=True))
    moved = list[torch.Tensor]()
    made.fuse = lambda states: moved.extend(states) or states[0]
    fused(0.1, training=True)
    for boundary, state in zip(made.config.boundaries, moved, strict=True):
        distance = (state - batch.features[boundary]).abs()
        assert 0.09 < float(distance.max()) <= 0.1 + 1e-5 and 0.04 < float(distance.mean()) < 0.06


def test_only_the_head_learns() -> None:
    made, target = head(**FIRST), model()
    target.zero_grad()
    objective = EagleObjective(made, FrozenTarget.of(target))
    objective(batch_of([tokens(12)], made.config.boundaries)).loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in made.parameters())
    assert all(weight.grad is None for weight in target.parameters())


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ArgumentError, match="kind eagle, this one is eagle3"):
        EagleObjective(head(), FrozenTarget.of(model()))
    for wrong in ({"noise": -0.1}, {"regression_weight": 0.0, "token_weight": 0.0}, {"steps": 0}):
        with pytest.raises(ArgumentError, match="objective: "):
            EagleSettings(**wrong)  # type: ignore[arg-type]
