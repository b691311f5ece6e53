"""DFlash, DFlash 2, Domino and DSpark: what an objective computes is what is drafted; losses, anchors, corrections."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, log_softmax

from forerun import LLM, SamplingParams
from forerun.drafters.drawing import Children
from forerun.drafters.kinds import kind_named, objective_for
from forerun.heads.base import Above
from forerun.heads.dflash import DFlashConfig, DFlashHead, spread_boundaries
from forerun.heads.dflash2 import BlockConvolution, DFlash2Config, DFlash2Head, DFlash2Objective, DFlash2Settings
from forerun.heads.domino import DominoHead
from forerun.heads.dspark import DSparkHead
from forerun.heads.runner import BlockRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN
from training.ttt import (
    HIDDEN,
    VOCABULARY,
    agrees_with_what_is_written_out,
    all_learn,
    batch_of,
    below_twins,
    dflash,
    drafted_block,
    features,
    model,
    reads,
    taught,
    tokens,
    trained_logits,
    two_texts,
)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sample_from_anchor": True},
    {"is_causal": True},
    {"sliding_window": 4, "full_layers": (1,), "causal_windows": True},
    {"sliding_window": 3},
    {"own_lm_head": True, "draft_vocab_size": 30},
    {"own_embedding": True, "qk_norm": False, "num_hidden_layers": 1},
]


def objective(made: DFlashHead, **settings: Any) -> Any:
    """That of the head's kind."""
    cls = objective_for(kind_named(made.config.kind))
    return cls(made, FrozenTarget.of(model()), cls.Settings(**settings))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_depth_equals_drafting(options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents, behind every anchor; the first must not be seen."""
    made, first, text = dflash(**options), tokens(6, seed=9), tokens(14)
    batch = batch_of([first, text], made.config.boundaries, padding=2)
    blocks = objective(made, gradient_checkpointing=checkpointed).blocks(batch)
    found = trained_logits(made, blocks.output)[0].detach()
    runner = BlockRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=2, slots=64)
    seen, drafted = features(text, made.config.boundaries), 0
    for place, logits in zip(blocks.anchors[0].tolist(), found, strict=True):
        root = place - len(first)
        if not 1 <= root < len(text) - 1:
            continue
        reads(runner, 1, text, root, seen)
        for depth, own in enumerate(runner.unroll([1], 6, below_twins(runner, made.config.max_depth or 0))):
            torch.testing.assert_close(own.detach(), logits[depth], atol=2e-5, rtol=1e-4)
            drafted += 1
    assert drafted == (made.config.max_depth or 0) * (len(text) - 2)


def test_the_loss_equals_a_written_out_reference() -> None:
    made = dflash()
    batch = two_texts(made.config.boundaries)
    of = objective(made, gamma=3.0)
    blocks, report = of.blocks(batch), of(batch)
    logits, anchors = trained_logits(made, blocks.output)[0], blocks.anchors[0].tolist()
    counted = set(blocks.anchors[0][blocks.counted[0, :, 0]].tolist())
    assert counted == {*range(3, 11), *range(13, 20)}, "each root whose first prediction counts"
    agrees_with_what_is_written_out(
        report,
        batch,
        depths=4,
        own=lambda entry, depth: logits[anchors.index(entry + 1)][depth],
        wanted=taught(batch),
        share=lambda depth: math.exp(-depth / 3.0),
        kept=[{root - 1 for root in counted}] * 4,
    )
    assert all_learn(report, made)


@pytest.mark.parametrize("few", [False, True], ids=["one-chunk", "many-chunks"])
def test_depths_weigh_what_they_bring(few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """D-PACE, written out; a depth that does not count ends the draft."""
    if few:
        monkeypatch.setattr("forerun.losses.chunked_loss.CHUNK_ELEMENTS", 7 * VOCABULARY)
    made = dflash()
    batch = batch_of([tokens(12), tokens(9, seed=5)], made.config.boundaries, padding=3)
    batch.batch.loss_mask[0, 6] = False
    of = objective(made, smoothing=0.3)
    blocks, report = of.blocks(batch), of(batch)
    logits = trained_logits(made, blocks.output)[0].detach().softmax(-1)
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    total, weight = torch.zeros(()), 0.0
    for place, counted, own in zip(blocks.anchors[0].tolist(), blocks.counted[0].tolist(), logits, strict=True):
        chances = []
        for depth in range(4):
            overlap = float(torch.minimum(own[depth], teacher[min(place + depth, 23)]).sum())
            chances.append((0.7 * overlap + 0.3) if counted[depth] else 0.0)
        for depth in range(4):
            share = sum(math.prod(chances[: last + 1]) for last in range(depth, 4))
            if counted[depth]:
                total += share * -(teacher[place + depth] * own[depth].log()).sum()
                weight += share
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-3, rtol=1e-4)
    assert float(report.weight) == pytest.approx(weight, rel=1e-4)
    assert all_learn(report, made)


def test_anchors_are_few_random_in_training_and_the_same_in_evaluation() -> None:
    made = dflash()
    batch = batch_of([tokens(30)], made.config.boundaries)
    of = objective(made, anchors=4)
    still = [of.blocks(batch).anchors.tolist() for _ in range(2)]
    assert still[0] == still[1] and len(still[0][0]) == 4 and max(still[0][0]) - min(still[0][0]) > 10
    made.train()
    torch.manual_seed(0)
    moved = {tuple(of.blocks(batch).anchors[0].tolist()) for _ in range(8)}
    assert len(moved) > 4 and all(min(one) >= 1 and max(one) < 29 for one in moved)


def test_what_follows_from_the_target() -> None:
    assert spread_boundaries(36, 5) == (2, 10, 18, 26, 34)  # z-lab's for Qwen3-8B: layers 1, 9, 17, 25, 33
    assert spread_boundaries(8, 1) == (5,) and spread_boundaries(4, 5) == (2,)
    config = DFlashConfig.for_target("dflash", model(), options={"num_hidden_layers": 3, "block_size": 8})
    assert config.num_hidden_layers == 3 and config.max_depth == 7 and config.mask_token_id == VOCABULARY - 1


SECOND: list[dict[str, Any]] = [
    {},
    {"conv_kernel_size": 3, "sample_from_anchor": True},
    {"own_lm_head": True, "draft_vocab_size": 30, "is_causal": True},
]


def dflash2(**options: Any) -> DFlash2Head:
    made = dflash(selector_rank=6, **options)
    assert isinstance(made, DFlash2Head)
    return made


def selected_by(made: DFlash2Head, text: list[int], root: int) -> list[Tensor]:
    """Logits of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    assert not any(torch.equal(other, own) for other, own, _ in found[1:])
    return [own for _, own, _ in found]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("options", SECOND, ids=str)
def test_the_losses_of_dflash2_are_those_of_what_is_drafted(
    options: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out from drafting's own logits, with the selector and without; acceptance of the candidates, too."""
    made, text = dflash2(**options), tokens(12)
    batch, count = batch_of([text], made.config.boundaries), made.config.selector_top_k
    settings = DFlash2Settings(gamma=3.0, selector_weight=0.7, skip_unreachable=False)
    report = DFlash2Objective(made, replace(FrozenTarget.of(model()), temperature=temperature), settings)(batch)
    teacher = (model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]) / temperature).softmax(-1).detach()
    roots, known = range(1, len(text) - 1), made.token_ids
    selected = {root: selected_by(made, text, root) for root in roots}
    monkeypatch.setattr(DFlash2Head, "follow", lambda _self, logits, _states, above: _moved(logits, above))
    alone = {root: selected_by(made, text, root) for root in roots}
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
    assert all_learn(report, made)


def _moved(logits: Tensor, above: Above) -> Any:
    """Without the selector; a little other for each node, as `drafted` expects it."""
    from forerun.heads.base import Followed

    nothing = torch.arange(above.tokens.shape[1]).view(1, -1, 1) * 1e-6 + torch.zeros_like(logits)
    return Followed(logits + nothing.flip(1), above.memory)


def test_a_convolution_stays_in_its_block_and_reads_what_is_before() -> None:
    """Against the sum written out; the second of two blocks sees nothing of the first."""
    config = dflash2(conv_kernel_size=3).config
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


def test_a_fresh_dflash2_head_is_a_dflash_head_among_its_candidates() -> None:
    made = DFlash2Head(dflash2().config)
    plain = torch.randn(2, 10, HIDDEN)
    assert torch.equal(made.layers[0].mlp_conv(plain, lambda inside: inside), plain)
    states, logits = torch.randn(1, 1, HIDDEN), torch.randn(1, 1, VOCABULARY)
    above = Above(torch.tensor([[3, 4]]), 0, None, model().get_input_embeddings())
    found, ids = made.follow(logits, states, above).logits, logits.topk(6).indices.expand(1, 2, -1)
    assert torch.equal(found.gather(-1, ids), logits.expand(1, 2, -1).gather(-1, ids))
    assert int((found.softmax(-1) > 0).sum()) == 12 and bool(torch.isfinite(found).all())


def test_the_options_of_a_recipe_are_the_published_ones() -> None:
    own = ["conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"]
    assert DFlash2Config.option_names()[-4:] == own


DOMINO: list[dict[str, Any]] = [
    {},
    {"pure_draft_prefix_len": 0},
    {"sample_from_anchor": False, "pure_draft_prefix_len": 2, "is_causal": True},
    {"own_lm_head": True, "draft_vocab_size": 30, "own_embedding": True},
]


def domino(**options: Any) -> DominoHead:
    made = dflash(gru_hidden_dim=6, **options)
    assert isinstance(made, DominoHead)
    return made


def corrected_by(made: DominoHead, text: list[int], root: int) -> list[Tensor]:
    """Logits of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    for depth, (other, own, _) in enumerate(found[1:], start=1):
        plain = depth < made.config.pure_draft_prefix_len or not made.embed_proj[2].weight.any()
        assert torch.equal(other, own) == plain
    return [own for _, own, _ in found]


@pytest.mark.parametrize("options", DOMINO, ids=str)
def test_the_losses_of_domino_are_those_of_what_is_drafted(options: dict[str, Any]) -> None:
    """Written out from drafting's own logits, corrected and not, in a batch in which both count and after the last."""
    made, text = domino(**options), tokens(12)
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
    assert all_learn(reports[0.125], made)


def losses(made: DominoHead, text: list[int], teacher: Tensor) -> tuple[Tensor, float]:
    """The sum over all blocks and depths, and of what they weigh."""
    total, weight = torch.zeros(()), 0.0
    for root in range(1, len(text) - 1):
        for depth, logits in enumerate(corrected_by(made, text, root)[: len(text) - 1 - root]):
            wanted, share = teacher[root + depth][made.token_ids], math.exp(-depth / 3.0)
            total -= share * (wanted / wanted.sum() * log_softmax(logits.detach(), -1)).sum()
            weight += share
    return total, weight


def test_the_recurrent_network_is_torchs() -> None:
    step, whole = domino().prefix_gru, nn.GRU(HIDDEN, 6, bias=False, batch_first=True)
    assert {name: weight.shape for name, weight in whole.named_parameters()} == {
        name: weight.shape for name, weight in step.named_parameters()
    }
    whole.load_state_dict(step.state_dict())
    embeds, memory, found = torch.randn(2, 5, HIDDEN), None, []
    for place in range(5):
        memory = step(embeds[:, place : place + 1], memory)
        found.append(memory)
    torch.testing.assert_close(torch.cat(found, 1), whole(embeds)[0])


DSPARK: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated", "confidence_head_with_markov": False},
    {"markov_head_type": "rnn"},
    {"markov_head_type": "rnn", "sample_from_anchor": False, "enable_confidence_head": False},
    {"own_lm_head": True, "draft_vocab_size": 30},
]


def dspark(**options: Any) -> DSparkHead:
    made = dflash(markov_rank=6, **options)
    assert isinstance(made, DSparkHead)
    return made


def sure_of(made: DSparkHead, text: list[int], root: int) -> list[tuple[Tensor, Tensor | None]]:
    """Logits and acceptance of every depth behind the root, where the tokens above are the text's."""
    found = drafted_block(made, text, root)
    assert not any(torch.equal(other, own) for other, own, _ in found[1:])
    return [(own, sure) for _, own, sure in found]


@pytest.mark.parametrize("options", DSPARK, ids=str)
def test_the_loss_of_dspark_is_that_of_what_is_drafted(options: dict[str, Any]) -> None:
    """Written out from drafting's own logits: cross-entropy, total variation, and the confidence head's error."""
    made, text = dspark(**options), tokens(12)
    batch = batch_of([text], made.config.boundaries)
    report = objective(made, gamma=3.0, mix=0.3, confidence_weight=0.7, skip_unreachable=False)(batch)
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    total, weight, known = torch.zeros(()), 0.0, made.token_ids
    for root in range(1, len(text) - 1):
        for depth, (logits, acceptance) in enumerate(sure_of(made, text, root)):
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
    assert all_learn(report, made)


def test_a_fresh_head_with_a_correction_is_a_dflash_head() -> None:
    logits, embed = torch.randn(1, 1, VOCABULARY), model().get_input_embeddings()
    for made in (DominoHead(domino(pure_draft_prefix_len=0).config), DSparkHead(dspark().config)):
        above = Above(torch.tensor([[3, 4]]), 0, None, made.embed if isinstance(made, DSparkHead) else embed)
        assert torch.equal(made.follow(logits, torch.randn(1, 1, HIDDEN), above).logits, logits.expand(1, 2, -1))


def test_sampled_nodes_are_as_sure_as_the_head_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic ones as the distribution says: which token is the likeliest is known there."""
    made, seen = dspark(), list[tuple[Children, Children]]()
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
