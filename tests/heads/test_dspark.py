"""DSpark: what its objective computes is what it drafts, token by token; its loss; its confidence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy, log_softmax

from forerun import LLM, SamplingParams
from forerun.drafters.drawing import Children
from forerun.errors import ArgumentError
from forerun.heads.base import Above
from forerun.heads.dspark import DSparkHead, DSparkObjective, DSparkSettings
from forerun.losses.objective import FrozenTarget
from forerun.types import LAST_HIDDEN
from training.ttt import VOCABULARY, batch_of, dflash, drafted_block, model, tokens

VARIANTS: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated", "confidence_head_with_markov": False},
    {"markov_head_type": "rnn"},
    {"markov_head_type": "rnn", "sample_from_anchor": False, "enable_confidence_head": False},
    {"own_lm_head": True, "draft_vocab_size": 30},
]


def head(**options: Any) -> DSparkHead:
    made = dflash(markov_rank=6, **options)
    assert isinstance(made, DSparkHead)
    return made


def objective(made: DSparkHead, **settings: Any) -> DSparkObjective:
    return DSparkObjective(made, FrozenTarget.of(model()), DSparkSettings(**settings))


def drafted(made: DSparkHead, text: list[int], root: int) -> list[tuple[Tensor, Tensor | None]]:
    """Logits and acceptance of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    assert not any(torch.equal(other, own) for other, own, _ in found[1:])
    return [(own, sure) for _, own, sure in found]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_loss_is_that_of_what_is_drafted(options: dict[str, Any]) -> None:
    """Written out from drafting's own logits: cross-entropy, total variation, and the confidence head's error."""
    made, text = head(**options), tokens(12)
    batch = batch_of([text], made.config.boundaries)
    report = objective(made, gamma=3.0, mix=0.3, confidence_weight=0.7, skip_unreachable=False)(batch)
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    total, weight, known = torch.zeros(()), 0.0, made.token_ids
    for root in range(1, len(text) - 1):
        for depth, (logits, acceptance) in enumerate(drafted(made, text, root)):
            if root + 1 + depth >= len(text):
                break
            wanted = teacher[root + depth][known]
            named, logs = wanted / wanted.sum(), log_softmax(logits, -1).detach()
            overlap = torch.minimum(logs.exp(), wanted).sum()
            loss = 0.3 * (named * (named.log() - logs)).sum() + 0.7 * (1 - overlap)
            if acceptance is not None:
                loss += 0.7 * binary_cross_entropy(acceptance.detach(), overlap)
            total += math.exp(-depth / 3.0) * loss
            weight += math.exp(-depth / 3.0)
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-3, rtol=1e-4)
    assert float(report.weight) == pytest.approx(weight)
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


def test_a_fresh_head_is_a_dflash_head() -> None:
    made = DSparkHead(head().config)
    states, follow = torch.randn(1, 1, 32), torch.tensor([[3, 4]])
    logits = torch.randn(1, 1, VOCABULARY)
    assert torch.equal(made.follow(logits, states, Above(follow, 0, None, made.embed)).logits, logits.expand(1, 2, -1))


def test_sampled_nodes_are_as_sure_as_the_head_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic ones as the distribution says: which token is the likeliest is known there."""
    made, seen = head(), list[tuple[Children, Children]]()
    plain = Children.with_acceptance

    def noted(children: Children, acceptance: Tensor | None) -> Children:
        assert acceptance is not None and acceptance.shape == children.tokens.shape[:2]
        seen.append((children, plain(children, acceptance)))
        return seen[-1][1]

    monkeypatch.setattr(Children, "with_acceptance", noted)
    torch.nn.init.zeros_(made.confidence_head["proj"].weight)
    torch.nn.init.constant_(made.confidence_head["proj"].bias, -1.0)
    config = {"method": "dspark", "model": made, "adaptive": False}
    llm = LLM(model(), tokenizer=False, speculative_config=config, self_check=False)
    for temperature in (1.0, 0.0):
        seen.clear()
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=12, detokenize=False)
        llm.generate({"prompt_token_ids": [3, 4]}, params)
        assert seen
        for before, after in seen:
            expected = torch.full_like(after.confidence, 1 / (1 + math.e)) if temperature else before.confidence
            torch.testing.assert_close(after.confidence, expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"markov_rank": 0}, "markov_rank must be at least 1"), ({"markov_head_type": "lstm"}, "vanilla, gated, rnn")],
)
def test_a_shape_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        dflash(**{"markov_rank": 6, **options})
