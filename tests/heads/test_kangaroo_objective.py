"""Kangaroo: what its objective computes is what it drafts; its loss; an adapter that learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from forerun.drafters.drawing import Shape
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.heads.kangaroo import KangarooConfig, KangarooHead, KangarooObjective, KangarooSettings
from forerun.heads.runner import AdapterRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import Target
from forerun.types import LAST_HIDDEN
from training.ttt import VOCABULARY, batch_of, features, kangaroo, model, tokens


def objective(made: KangarooHead, **settings: Any) -> KangarooObjective:
    return KangarooObjective(made, FrozenTarget.of(model()), KangarooSettings(**settings))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", [{}, {"boundaries": [3], "attention_bias": True}, {"sliding_window": 4}], ids=str)
def test_every_position_equals_drafting(options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents; a prompt, what was committed, then a chain, and the same chain beside twins of
    other tokens whose places are known on the device alone."""
    made, first, text = kangaroo(**options), tokens(6, seed=9), tokens(14)
    [boundary] = made.config.boundaries
    outputs = objective(made, gradient_checkpointing=checkpointed).outputs(batch_of([first, text], (boundary,), 2))
    trained = model().lm_head(outputs)[0, len(first) :].detach()
    seen = features(text, (boundary,))[boundary]
    for index in (0, 4, 8):
        target = Target(model(), rows=2, slots=64)
        target.prefill([1], [text[: index + 1]])
        runner = AdapterRunner(made, target, rows=2, slots=64, run=6)
        for start, stop in ((0, 1), (1, index + 1)):
            if stop > start:
                runner.ingest([1], [text[start + 1 : stop + 1]], {boundary: seen[:, start:stop]})
        assert runner.lengths == [0, index + 1]

        def chain(logits: torch.Tensor, index: int = index, runner: AdapterRunner = runner) -> list[torch.Tensor]:
            following = (torch.tensor([[token]]) for token in text[index + 2 : index + 5])
            none = torch.zeros(1, 1, dtype=torch.int64)
            return [logits[0, 0], *(runner.descend(token, none)[0, 0] for token in following)]

        def twins(logits: torch.Tensor, index: int = index, runner: AdapterRunner = runner) -> list[torch.Tensor]:
            found, parents = [logits[0, 0]], torch.tensor([[0, 0]])
            for token in text[index + 2 : index + 5]:
                logits = runner.descend(torch.tensor([[(token + 1) % VOCABULARY, token]]), parents)
                assert not torch.allclose(logits[0, 0], logits[0, 1])
                found, parents = [*found, logits[0, 1]], torch.tensor([[1, 1]])
            return found

        for grow, shape in ((chain, Shape.regular((1, 1, 1, 1))), (twins, None)):
            runner.shape = shape
            for step, own in enumerate(runner.unroll([1], 6, grow)):
                torch.testing.assert_close(own, trained[index + 1 + step], atol=2e-5, rtol=1e-4)
            assert [states.shape[1] for states in runner.ran] == ([1, 1, 1, 1] if shape else [1, 2, 2, 2])


def test_the_adapter_is_what_the_published_code_computes() -> None:
    """``h + Attention(norm(h))``, then the second norm; no feed-forward part, and no norm of the target's."""
    made, text = kangaroo(), tokens(9)
    states, size = features(text, (2,))[2], made.config.head_dim
    weights = dict(made.named_parameters())

    def normed(values: torch.Tensor, name: str) -> torch.Tensor:
        return weights[name] * values * torch.rsqrt(values.square().mean(-1, keepdim=True) + made.config.rms_norm_eps)

    def projected(name: str) -> torch.Tensor:
        flat = normed(states, "layers.0.input_layernorm.weight") @ weights[f"layers.0.self_attn.{name}_proj.weight"].T
        return flat.view(1, len(text), -1, size).transpose(1, 2)

    angles = made.angles(torch.arange(len(text)).unsqueeze(0), states)
    query, key = apply_rotary_pos_emb(projected("q"), projected("k"), *angles)
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) / size**0.5
    hidden = torch.ones(len(text), len(text)).triu(1).bool()
    mixed = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ projected("v").repeat_interleave(groups, 1)
    whole = states + mixed.transpose(1, 2).flatten(2) @ weights["layers.0.self_attn.o_proj.weight"].T
    found = objective(made).outputs(batch_of([text], (2,)))
    torch.testing.assert_close(found, normed(whole, "norm.weight"), atol=1e-5, rtol=1e-4)


def test_the_loss_equals_a_written_out_reference() -> None:
    made, texts, start = kangaroo(), [tokens(12), tokens(9, seed=5)], 4
    batch = batch_of(texts, (2,), padding=3)
    batch.batch.loss_mask[0, :start] = False
    of = objective(made)
    report, logits = of(batch), model().lm_head(of.outputs(batch))[0].detach()
    teacher = model().lm_head(batch.features[LAST_HIDDEN])[0].softmax(-1).detach()
    total, seen, right, overlap, first = torch.zeros(()), 0, 0, 0.0, 0
    for text in texts:
        for place in range(first, first + len(text) - 1):
            if place + 1 < start:
                continue
            total -= (teacher[place] * log_softmax(logits[place], -1)).sum()
            right += int(logits[place].argmax()) == int(teacher[place].argmax())
            overlap += float(torch.minimum(teacher[place], logits[place].softmax(-1)).sum())
            seen += 1
        first += len(text)
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-4, rtol=1e-5)
    assert float(report.weight) == seen and int(report.metrics["acceptance_0"][0]) == right
    assert float(report.metrics["overlap_0"][0]) == pytest.approx(overlap, rel=1e-4)
    report.loss.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in made.parameters())


def test_it_learns_and_starts_as_the_targets_own_exit() -> None:
    """What the first two layers lack of the target's distributions shrinks by a fifth in 80 steps."""
    given: dict[str, Any] = {"initializer_range": 0.0}
    fresh = KangarooHead.initial(model(), KangarooConfig.for_target("kangaroo", model(), options=given))
    batch = batch_of([tokens(60, seed=seed) for seed in range(2)], (2,))
    exits = model().model.norm(batch.features[2])
    torch.testing.assert_close(objective(fresh).outputs(batch), exits, atol=1e-5, rtol=1e-4)
    made = KangarooHead.initial(model(), KangarooConfig.for_target("kangaroo", model()), seed=1)
    of, optimizer = objective(made), torch.optim.AdamW(made.parameters(), lr=1e-2)

    def overlap() -> float:
        overlapping, seen = of(batch).metrics["overlap_0"]
        return float(overlapping / seen)

    before = overlap()
    for _ in range(80):
        report = of(batch)
        optimizer.zero_grad()
        (report.loss / report.weight).backward()
        optimizer.step()
    assert 1 - overlap() < 0.8 * (1 - before), (before, overlap())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": [1, 2]}, "boundaries is the one after the layers that draft"),
        ({"boundaries": [LAST_HIDDEN]}, "boundaries is the one"),
        ({"boundaries": [9]}, "boundary 9 does not exist: the target has 4 layers"),
        ({"num_hidden_layers": 2}, "has no option 'num_hidden_layers'"),
    ],
)
def test_what_is_no_adapter_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        KangarooConfig.for_target("kangaroo", model(), options=options)


def test_a_reduced_vocabulary_and_capped_logits_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"leave draft\.vocab_size and hidden_size away"):
        KangarooConfig.for_target("kangaroo", model(), 10)
    frozen = FrozenTarget.of(model())
    capped = FrozenTarget(embedding=frozen.embedding, lm_head=frozen.lm_head, softcap=30.0)
    with pytest.raises(UnsupportedModelError, match=r"final_logit_softcapping: 30"):
        KangarooObjective(kangaroo(), capped)
