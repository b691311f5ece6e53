"""Domino: what its objective computes is what it drafts, token by token; its two losses; its recurrent network."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from forerun.errors import ArgumentError
from forerun.heads.base import Above
from forerun.heads.domino import DominoHead, DominoObjective, DominoSettings
from forerun.losses.objective import FrozenTarget
from forerun.types import LAST_HIDDEN
from training.ttt import HIDDEN, VOCABULARY, batch_of, dflash, drafted_block, model, tokens

VARIANTS: list[dict[str, Any]] = [
    {},
    {"pure_draft_prefix_len": 0},
    {"sample_from_anchor": False, "pure_draft_prefix_len": 2, "is_causal": True},
    {"own_lm_head": True, "draft_vocab_size": 30, "own_embedding": True},
]


def head(**options: Any) -> DominoHead:
    made = dflash(gru_hidden_dim=6, **options)
    assert isinstance(made, DominoHead)
    return made


def objective(made: DominoHead, **settings: Any) -> DominoObjective:
    return DominoObjective(made, FrozenTarget.of(model()), DominoSettings(**settings))


def drafted(made: DominoHead, text: list[int], root: int) -> list[Tensor]:
    """Logits of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    for depth, (other, own, _) in enumerate(found[1:], start=1):
        plain = depth < made.config.pure_draft_prefix_len or not made.embed_proj[2].weight.any()
        assert torch.equal(other, own) == plain
    return [own for _, own, _ in found]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_losses_are_those_of_what_is_drafted(options: dict[str, Any]) -> None:
    """Written out from drafting's own logits, corrected and not, in a batch in which both count and after the last."""
    made, text = head(**options), tokens(12)
    batch = dataclasses.replace(batch_of([text], made.config.boundaries), done=0.3)
    taught = objective(made, gamma=3.0, base_start=0.5, base_until=0.4, skip_unreachable=False)
    made.train()
    reports = {0.125: taught(batch), 0.0: taught(dataclasses.replace(batch, done=0.4))}
    made.eval()
    evaluated = taught(batch)
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    corrected = losses(made, text, teacher)
    with torch.no_grad():
        kept = made.embed_proj[2].weight.clone()
        made.embed_proj[2].weight.zero_()
        alone = losses(made, text, teacher)
        made.embed_proj[2].weight.copy_(kept)
    assert not torch.allclose(corrected[0], alone[0])
    for share, report in reports.items():
        expected = (1 - share) * corrected[0] + share * alone[0]
        torch.testing.assert_close(report.loss.detach(), expected, atol=1e-3, rtol=1e-4)
        assert float(report.weight) == pytest.approx(corrected[1])
    torch.testing.assert_close(evaluated.loss, reports[0.0].loss)
    reports[0.125].loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


def losses(made: DominoHead, text: list[int], teacher: Tensor) -> tuple[Tensor, float]:
    """The sum over all blocks and depths, and of what they weigh."""
    total, weight = torch.zeros(()), 0.0
    for root in range(1, len(text) - 1):
        for depth, logits in enumerate(drafted(made, text, root)[: len(text) - 1 - root]):
            wanted, share = teacher[root + depth][made.token_ids], math.exp(-depth / 3.0)
            total -= share * (wanted / wanted.sum() * log_softmax(logits.detach(), -1)).sum()
            weight += share
    return total, weight


def test_the_recurrent_network_is_torchs() -> None:
    step, whole = head().prefix_gru, nn.GRU(HIDDEN, 6, bias=False, batch_first=True)
    assert {name: weight.shape for name, weight in whole.named_parameters()} == {
        name: weight.shape for name, weight in step.named_parameters()
    }
    whole.load_state_dict(step.state_dict())
    embeds, memory, found = torch.randn(2, 5, HIDDEN), None, []
    for place in range(5):
        memory = step(embeds[:, place : place + 1], memory)
        found.append(memory)
    torch.testing.assert_close(torch.cat(found, 1), whole(embeds)[0])


def test_a_fresh_head_is_a_dflash_head() -> None:
    made = DominoHead(head(pure_draft_prefix_len=0).config)
    states, logits = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, VOCABULARY)
    above = Above(torch.tensor([[3, 4]]), 0, None, model().get_input_embeddings())
    assert torch.equal(made.follow(logits, states, above).logits, logits.expand(1, 2, -1))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gru_hidden_dim": 0}, "gru_hidden_dim must be at least 1"),
        ({"pure_draft_prefix_len": 5}, r"pure_draft_prefix_len must be in 0\.\.4, got 5"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        dflash(**{"gru_hidden_dim": 6, **options})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"base_start": 1.5}, r"base_start must be in \[0, 1\]"),
        ({"base_until": 0.0}, r"base_until must be in \(0, 1\]"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        DominoSettings(**settings)
