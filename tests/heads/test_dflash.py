"""DFlash: what its objective computes is what it drafts; its loss, its anchors, its tree."""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn.functional import log_softmax

from forerun import LLM, SamplingParams
from forerun.drafters.trees import DynamicTree
from forerun.errors import ArgumentError
from forerun.heads.dflash import DFlashConfig, DFlashHead, DFlashObjective, DFlashSettings, spread_boundaries
from forerun.heads.runner import BlockRunner
from forerun.losses.objective import FrozenTarget
from forerun.model import Target
from forerun.types import LAST_HIDDEN
from training.ttt import VOCABULARY, batch_of, dflash, features, model, tokens

VARIANTS: list[dict[str, Any]] = [
    {},
    {"sample_from_anchor": True},
    {"is_causal": True},
    {"sliding_window": 4, "full_layers": (1,), "causal_windows": True},
    {"sliding_window": 3},
    {"own_lm_head": True, "draft_vocab_size": 30},
    {"own_embedding": True, "qk_norm": False, "num_hidden_layers": 1},
]


def objective(made: DFlashHead, **settings: Any) -> DFlashObjective:
    return DFlashObjective(made, FrozenTarget.of(model()), DFlashSettings(**settings))


def trained_logits(made: DFlashHead, output: torch.Tensor) -> torch.Tensor:
    own = made.logits(output)
    return model().get_output_embeddings()(output) if own is None else own


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_depth_equals_drafting(options: dict[str, Any], checkpointed: bool) -> None:
    """Of the second of two documents, behind every anchor; the first must not be seen."""
    made, first, text = dflash(**options), tokens(6, seed=9), tokens(14)
    batch = batch_of([first, text], made.config.boundaries, padding=2)
    blocks = objective(made, gradient_checkpointing=checkpointed).blocks(batch)
    found = trained_logits(made, blocks.output)[0].detach()
    runner = BlockRunner(made, Target(model(), rows=1, slots=64), rows=2, slots=64)
    seen, drafted = features(text, made.config.boundaries), 0
    for place, logits in zip(blocks.anchors[0].tolist(), found, strict=True):
        root = place - len(first)
        if not 1 <= root < len(text) - 1:
            continue
        runner.truncate(1, 0)
        for start, stop in ((0, 1), (1, root)):  # a prompt, then what was committed
            if stop > start:
                states = {boundary: state[:, start:stop] for boundary, state in seen.items()}
                runner.ingest([1], [text[start + 1 : stop + 1]], states)

        def levels(logits: torch.Tensor) -> list[torch.Tensor]:
            levels = [logits[0, 0]]
            for _ in range(1, made.config.max_depth or 0):
                twins = torch.tensor([[4, 5]])
                levels.append(runner.descend(twins, torch.zeros_like(twins))[0, 0])
            return levels

        for depth, own in enumerate(runner.unroll([1], 6, levels)):
            torch.testing.assert_close(own.detach(), logits[depth], atol=2e-5, rtol=1e-4)
            drafted += 1
    assert drafted == (made.config.max_depth or 0) * (len(text) - 2)


def test_the_loss_equals_a_written_out_reference() -> None:
    made, texts, start = dflash(), [tokens(12), tokens(9, seed=5)], 4
    batch = batch_of(texts, made.config.boundaries, padding=3)
    batch.batch.loss_mask[0, :start] = False
    made_of = objective(made, gamma=3.0)
    blocks, report = made_of.blocks(batch), made_of(batch)
    logits = trained_logits(made, blocks.output)[0].detach()
    teacher = model().get_output_embeddings()(batch.features[LAST_HIDDEN][0]).softmax(-1).detach()
    total, weight, roots = torch.zeros(()), 0.0, set()
    right, chains, first = [0] * 4, [0] * 4, 0
    for text in texts:
        for root in range(1, len(text) - 1):
            if first + root + 1 < start:
                continue
            roots.add(first + root)
            own, chain = logits[blocks.anchors[0].tolist().index(first + root)], True
            for depth in range(4):
                if root + 1 + depth >= len(text):
                    break
                wanted = teacher[first + root + depth]
                share = math.exp(-depth / 3.0)
                total += share * -(wanted * log_softmax(own[depth], -1)).sum()
                weight += share
                chain = chain and int(own[depth].argmax()) == int(wanted.argmax())
                right[depth] += chain
                chains[depth] += 1
        first += len(text)
    assert set(blocks.anchors[0][blocks.counted[0, :, 0]].tolist()) == roots
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-3, rtol=1e-5)
    assert float(report.weight) == pytest.approx(weight)
    assert [int(report.metrics[f"acceptance_{depth}"][0]) for depth in range(4)] == right
    assert [int(report.metrics[f"acceptance_{depth}"][1]) for depth in range(4)] == chains
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


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
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


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


def test_the_default_tree_holds_the_likeliest_paths() -> None:
    """Against a heap over the product of the depths' distributions (DDTree)."""
    logits, nodes = torch.randn(1, 3, 12, generator=torch.Generator().manual_seed(0)) * 2, 9
    logs = logits.log_softmax(-1)[0].tolist()
    tree, depth = DynamicTree(depth=3, top_k=nodes, nodes=nodes), itertools.count(1)

    def expand(tokens: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
        level = next(depth)
        return logits[:, level : level + 1]

    grown = tree.grow(logits[:, :1], expand, None, 3).fetch()[0]
    paths = {0: ()}
    for found in sorted(grown):
        paths[found.entry + 1] = (*paths[found.parent], found.token)
    heap, best = [(-logs[0][token], (token,)) for token in range(12)], set[tuple[int, ...]]()
    heapq.heapify(heap)
    while len(best) < nodes:
        score, path = heapq.heappop(heap)
        best.add(path)
        if len(path) < 3:
            for token in range(12):
                heapq.heappush(heap, (score - logs[len(path)][token], (*path, token)))
    assert {path for path in paths.values() if path} == best


def engine(made: DFlashHead, **options: Any) -> LLM:
    config = {"method": "dflash", "model": made, "adaptive": False, **options}
    return LLM(model(), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=2)


@pytest.mark.parametrize("options", [{}, {"sample_from_anchor": True}], ids=str)
def test_it_drafts_no_deeper_than_its_block(options: dict[str, Any]) -> None:
    params, made = SamplingParams(temperature=0, max_tokens=12, detokenize=False), dflash(**options)
    depth = 5 if options else 4
    output = engine(made, shape=(1,) * depth).generate({"prompt_token_ids": [3, 4]}, params)[0].outputs[0]
    assert len(output.speculation.drafted_per_depth) == made.config.max_depth == depth
    with pytest.raises(ArgumentError, match="tokens on one path, the shape asks for 6"):
        engine(made, shape=(1,) * 6)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"block_size": 1}, "block_size must be at least 2"),
        ({"mask_token_id": VOCABULARY}, "mask_token_id must be one of the target's"),
        ({"boundaries": (LAST_HIDDEN,)}, "boundaries count layers"),
        ({"draft_vocab_size": 30}, "needs its own lm_head"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        dflash(**options)


def test_what_follows_from_the_target() -> None:
    assert spread_boundaries(36, 5) == (2, 10, 18, 26, 34)  # z-lab's for Qwen3-8B: layers 1, 9, 17, 25, 33
    assert spread_boundaries(8, 1) == (5,) and spread_boundaries(4, 5) == (2,)
    config = DFlashConfig.for_target("dflash", model(), options={"num_hidden_layers": 3, "block_size": 8})
    assert config.num_hidden_layers == 3 and config.max_depth == 7 and config.mask_token_id == VOCABULARY - 1
