"""Medusa: what its objective computes is what it drafts; its tree, its start."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.decode.drafter import DrafterSetup
from forerun.drafters.drawing import Draw, Shape
from forerun.drafters.trees import DynamicTree, FixedTree
from forerun.errors import ArgumentError
from forerun.heads.medusa import (
    MedusaConfig,
    MedusaDrafter,
    MedusaDrafterConfig,
    MedusaHead,
    MedusaObjective,
    MedusaSettings,
)
from forerun.heads.runner import ParallelRunner
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
    features,
    medusa,
    model,
    one_hot,
    reads,
    tokens,
    two_texts,
)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"num_layers": 0}, {"num_heads": 1}], ids=str)
def test_every_depth_equals_drafting(options: dict[str, int], checkpointed: bool) -> None:
    made, text = medusa(**options), tokens(14)
    settings = MedusaSettings(gradient_checkpointing=checkpointed)
    objective = MedusaObjective(made, FrozenTarget.of(model()), settings)
    trained = made.logits(objective.states(batch_of([text], made.config.boundaries)))[0].detach()
    assert trained.shape == (len(text), made.config.num_heads, VOCABULARY)
    runner = ParallelRunner(made, TransformersTarget(model(), rows=1, slots=64), rows=2, slots=64)
    for index in (0, 3, 7):
        reads(runner, 1, text, index + 1, features(text, (LAST_HIDDEN,)))
        assert runner.lengths == [0, index + 1]
        for depth, logits in enumerate(runner.unroll([1], 6, below_twins(runner, made.config.num_heads))):
            torch.testing.assert_close(logits.detach(), trained[index, depth], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_loss_equals_a_written_out_reference(temperature: float) -> None:
    made = medusa()
    batch = two_texts(made.config.boundaries)
    target = replace(FrozenTarget.of(model()), temperature=temperature)
    report = MedusaObjective(made, target, MedusaSettings(decay=0.8))(batch)
    logits = made.logits(made.states(batch.features[LAST_HIDDEN][0], 3)) / temperature
    wanted, share = one_hot(batch), lambda depth: 0.8**depth
    agrees_with_what_is_written_out(report, batch, 3, lambda entry, depth: logits[entry, depth], wanted, share=share)
    assert all_learn(report, made)


def test_a_fresh_head_predicts_at_every_depth_what_the_target_does() -> None:
    made = MedusaHead.initial(model(), MedusaConfig.for_target("medusa", model(), options={"num_layers": 2}))
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    own = model().get_output_embeddings()(states).detach()
    found = made.logits(made.states(states, 5)).detach()
    assert found.shape == (3, 5, VOCABULARY)
    torch.testing.assert_close(found, own.unsqueeze(1).expand_as(found))


def drafter(**options: Any) -> MedusaDrafter:
    config = MedusaDrafterConfig(model=medusa(), **options)
    return MedusaDrafter(
        config, DrafterSetup(target=TransformersTarget(model(), rows=1, slots=64), tokenizer=None, rows=1, slots=64)
    )


def test_it_drafts_the_likeliest_paths_and_draws_where_that_is_asked_for() -> None:
    """A draw needs a shape that is decided before: above temperature 0 two children a node, of no more nodes."""
    default = drafter(nodes=9)
    assert default.sampled is default.tree
    for draw in ("auto", "iid", "without_replacement", "greedy_k"):
        made = drafter(nodes=9, draw=draw)
        for tree in (default.tree, made.tree):
            assert isinstance(tree, DynamicTree) and (tree.depth, tree.top_k, tree.nodes) == (3, 9, 9)
        assert isinstance(made.sampled, FixedTree) and made.sampled.draw is Draw(draw)
        assert made.sampled.shape == Shape.regular((2, 1, 1))


def test_medusas_published_tree_is_a_shape_with_a_name() -> None:
    """By its nodes' paths of ranks, as FasterDecoding/Medusa lists them."""
    shape = Shape.of("mc_sim_7b_63")
    ranks = {tuple(shape.ranks[node] for node in shape.path(last)) for last in range(1, shape.size + 1)}
    listed = """
        0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000
        011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
    """
    assert ranks == {tuple(map(int, path)) for path in listed.split()} and shape.size == 63
    with pytest.raises(ArgumentError, match="drafts 3 tokens on one path, the shape asks for 4"):
        drafter(tree="mc_sim_7b_63")
    with pytest.raises(ArgumentError, match="unknown tree 'mc_sim_7b'; there are mc_sim_7b_63"):
        drafter(tree="mc_sim_7b")
    with pytest.raises(ArgumentError, match="tree and top_k"):
        drafter(tree="mc_sim_7b_63", top_k=3)
