"""FastMTP: its loss, written out; what it learns; what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError
from forerun.heads.mtp import Experts, ExpertsConfig, MtpHead, MtpObjective, MtpSettings
from forerun.losses.objective import FrozenTarget
from training.ttt import VOCABULARY, batch_of, model, mtp, tokens

EXPERTS = ExpertsConfig(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=3, topk_group=2)


def objective(made: MtpHead, **settings: Any) -> MtpObjective:
    return MtpObjective(made, FrozenTarget.of(model()), MtpSettings(**settings))


@pytest.mark.parametrize(
    ("options", "temperature"), [({}, 1.0), ({}, 0.6), ({"experts": EXPERTS}, 1.0)], ids=["dense", "at 0.6", "experts"]
)
def test_the_loss_equals_a_written_out_reference(options: dict[str, Any], temperature: float) -> None:
    made, texts, start = mtp(**options), [tokens(12), tokens(9, seed=5)], 4
    batch = batch_of(texts, made.config.boundaries, padding=3)
    batch.batch.loss_mask[0, :start] = False
    of = MtpObjective(made, replace(FrozenTarget.of(model()), temperature=temperature))
    report, steps = of(batch), list(of.unroll(batch))
    shares = [1 / 1.96, 0.6 / 1.96, 0.36 / 1.96]
    total, weight, first = torch.zeros(()), 0.0, 0
    right, chains = [0] * 3, [0] * 3
    for text in texts:
        for entry in range(len(text)):
            correct = drafted = True
            for depth, step in enumerate(steps):
                token = entry + 2 + depth
                logits = model().get_output_embeddings()(step.output[0, first + entry]).detach() / temperature
                counts = token < len(text) and first + token >= start
                drafted &= counts
                if counts:
                    total -= shares[depth] * log_softmax(logits, -1)[text[token]]
                    weight += shares[depth]
                correct &= counts and int(logits.argmax()) == text[token]
                right[depth] += correct
                chains[depth] += drafted
        first += len(text)
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-3, rtol=1e-5)
    assert float(report.weight) == pytest.approx(weight)
    assert [int(report.metrics[f"acceptance_{depth}"][0]) for depth in range(3)] == right
    assert [int(report.metrics[f"acceptance_{depth}"][1]) for depth in range(3)] == chains
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())
    assert all(parameter.grad is None for parameter in model().parameters())


def test_experts_give_the_same_in_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted on the host, and gathered where the host must not wait, at once and a few tokens at a time."""
    experts: Experts = mtp(experts=EXPERTS).layers[0].mlp.experts  # type: ignore[union-attr, assignment]
    generator = torch.Generator().manual_seed(0)
    states, weights = torch.randn(9, 32, generator=generator), torch.rand(9, 2, generator=generator)
    chosen = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(9)])  # the last one is never chosen
    written = []
    for state, ids, shares in zip(states, chosen, weights, strict=True):
        parts = []
        for expert, share in zip(ids, shares, strict=True):
            gate, up = (experts.gate_up_proj[expert] @ state).chunk(2)
            parts.append(share * (experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)))
        written.append(sum(parts))
    expected = torch.stack(written).detach()  # type: ignore[arg-type]
    torch.testing.assert_close(experts(states, chosen, weights).detach(), expected)
    with torch.no_grad():
        torch.testing.assert_close(experts._gathered(states, chosen, weights), expected)
        monkeypatch.setattr("forerun.heads.mtp.GATHERED", 5000)
        there = type("There", (), {"type": "xpu"})
        monkeypatch.setattr(torch.Tensor, "device", property(lambda _: there))
        pieces = experts(states, chosen, weights)
        monkeypatch.undo()
        torch.testing.assert_close(pieces, expected)


def test_training_makes_a_module_draft_further() -> None:
    """On what the target itself wrote. Before, a random module is right about hardly any second token."""
    params = SamplingParams(temperature=0, max_tokens=24, detokenize=False)
    llm = LLM(model(), tokenizer=False, self_check=False)
    prompts = [{"prompt_token_ids": [first]} for first in range(0, VOCABULARY, 4)]
    texts = [
        [*given["prompt_token_ids"], *out.outputs[0].token_ids]
        for given, out in zip(prompts, llm.generate(prompts, params), strict=True)
    ]
    made, batch = mtp(), batch_of(texts, mtp().config.boundaries)

    def length() -> float:
        config = {"method": "mtp", "model": made.eval(), "adaptive": False}
        found = llm_of(config).generate(prompts, params)
        return sum(out.outputs[0].speculation.mean_acceptance_length for out in found) / len(found)

    def llm_of(config: dict[str, Any]) -> LLM:
        return LLM(model(), tokenizer=False, self_check=False, speculative_config=config)

    before, of = length(), objective(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=5e-3)
    for _ in range(60):
        report = of(batch)
        (report.loss / report.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert before < 1.3 and length() > before + 1.0


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ArgumentError, match="this target brings 2, one for each"):
        objective(mtp(num_hidden_layers=2))
    with pytest.raises(ArgumentError, match="steps must be at least 1"):
        MtpSettings(steps=0)
    with pytest.raises(ArgumentError, match=r"decay must be in \(0, 1\]"):
        MtpSettings(decay=0)
