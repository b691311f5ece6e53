"""DFlash 2: what its objective computes is what it drafts, token by token; its losses, convolutions and candidates."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from forerun.errors import ArgumentError
from forerun.heads.base import Above
from forerun.heads.dflash2 import BlockConvolution, DFlash2Config, DFlash2Head, DFlash2Objective, DFlash2Settings
from forerun.losses.objective import FrozenTarget
from forerun.types import LAST_HIDDEN
from training.ttt import HIDDEN, VOCABULARY, batch_of, dflash, drafted_block, model, tokens

VARIANTS: list[dict[str, Any]] = [
    {},
    {"conv_kernel_size": 3, "sample_from_anchor": True},
    {"own_lm_head": True, "draft_vocab_size": 30, "is_causal": True},
]


def head(**options: Any) -> DFlash2Head:
    made = dflash(selector_rank=6, **options)
    assert isinstance(made, DFlash2Head)
    return made


def drafted(made: DFlash2Head, text: list[int], root: int) -> list[Tensor]:
    """Logits of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    assert not any(torch.equal(other, own) for other, own, _ in found[1:])
    return [own for _, own, _ in found]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_the_losses_are_those_of_what_is_drafted(
    options: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out from drafting's own logits, with the selector and without; acceptance of the candidates, too."""
    made, text = head(**options), tokens(12)
    batch, count = batch_of([text], made.config.boundaries), made.config.selector_top_k
    settings = DFlash2Settings(gamma=3.0, selector_weight=0.7, skip_unreachable=False)
    report = DFlash2Objective(made, replace(FrozenTarget.of(model()), temperature=temperature), settings)(batch)
    teacher = (model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]) / temperature).softmax(-1).detach()
    roots, known = range(1, len(text) - 1), made.token_ids
    selected = {root: drafted(made, text, root) for root in roots}
    monkeypatch.setattr(DFlash2Head, "follow", lambda _self, logits, _states, above: _moved(logits, above))
    alone = {root: drafted(made, text, root) for root in roots}
    total, weight, overlap, drafts = torch.zeros(()), 0.0, torch.zeros(()), 0
    for root in roots:
        for depth in range(min(made.config.max_depth or 0, len(text) - 1 - root)):
            wanted, share = teacher[root + depth][known], math.exp(-depth / 3.0)
            base, scores = alone[root][depth] / temperature, selected[root][depth] / temperature
            ids = base.topk(count).indices
            assert set(scores.topk(count).indices.tolist()) == set(ids.tolist()), "no other token is drafted"
            some, logs = wanted[ids] / wanted[ids].sum(), log_softmax(scores, -1)
            total -= share * (wanted / wanted.sum() * log_softmax(base, -1)).sum()
            total -= share * 0.7 * (some * logs[ids]).sum()
            weight += share
            if depth == 0:
                overlap, drafts = overlap + torch.minimum(logs.exp(), wanted).sum(), drafts + 1
    torch.testing.assert_close(report.loss.detach(), total, atol=2e-3, rtol=1e-4)
    assert float(report.weight) == pytest.approx(weight) and int(report.metrics["overlap_0"][1]) == drafts
    torch.testing.assert_close(report.metrics["overlap_0"][0], overlap, atol=1e-4, rtol=1e-4)
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


def _moved(logits: Tensor, above: Above) -> Any:
    """Without the selector; a little other for each node, as `drafted` expects it."""
    from forerun.heads.base import Followed

    nothing = torch.arange(above.tokens.shape[1]).view(1, -1, 1) * 1e-6 + torch.zeros_like(logits)
    return Followed(logits + nothing.flip(1), above.memory)


def test_a_convolution_stays_in_its_block_and_reads_what_is_before() -> None:
    """Against the sum written out; the second of two blocks sees nothing of the first."""
    config = head(conv_kernel_size=3).config
    made = BlockConvolution(config)
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    states, size = torch.randn(1, 10, HIDDEN), config.block_size
    found = made(states, lambda inside: inside * 2)
    added = made.kernel_projection(states).view(1, 10, 2, 3, HIDDEN // 8)
    kernels = made.base_kernel + added.repeat_interleave(8, -1)

    def convolved(read: Tensor, side: int) -> Tensor:
        rows = []
        for place in range(10):
            taps = [read[0, place - tap] * kernels[0, place, side, tap] for tap in range(min(3, place % size + 1))]
            rows.append(sum(taps))
        return torch.stack(rows).unsqueeze(0)

    torch.testing.assert_close(found, convolved(2 * convolved(states, 0), 1))


def test_a_fresh_head_is_a_dflash_head_among_its_candidates() -> None:
    made = DFlash2Head(head().config)
    plain = torch.randn(2, 10, HIDDEN)
    assert torch.equal(made.layers[0].mlp_conv(plain, lambda inside: inside), plain)
    states, logits = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, VOCABULARY)
    above = Above(torch.tensor([[3, 4]]), 0, None, model().get_input_embeddings())
    found, ids = made.follow(logits, states, above).logits, logits.topk(6).indices.expand(1, 2, -1)
    assert torch.equal(found.gather(-1, ids), logits.expand(1, 2, -1).gather(-1, ids))
    assert int((found.softmax(-1) > 0).sum()) == 12 and bool(torch.isfinite(found).all())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"conv_kernel_size": 6}, r"conv_kernel_size must be in 1\.\.5"),
        ({"conv_group_size": 5}, "conv_group_size must divide the hidden size 32"),
        ({"selector_rank": 0}, "selector_rank must be at least 1"),
        ({"selector_top_k": 41}, r"selector_top_k must be in 1\.\.40"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        dflash(**{"selector_rank": 6, **options})
    assert DFlash2Config.option_names()[-4:] == [
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    ]
