"""Medusa: what its objective computes is what it drafts; its tree, its start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from forerun import LLM, SamplingParams
from forerun.drafters.drawing import Shape
from forerun.drafters.heads.medusa import MedusaConfig, MedusaHead, tree_of_ranks
from forerun.drafters.heads.runner import ParallelRunner
from forerun.errors import ArgumentError
from forerun.model import Target
from forerun.training.objectives.base import FrozenTarget
from forerun.training.objectives.medusa import MedusaObjective, MedusaSettings
from forerun.types import LAST_HIDDEN
from training.ttt import HIDDEN, VOCABULARY, batch_of, features, medusa, model, tokens


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"num_layers": 0}, {"num_heads": 1}], ids=str)
def test_every_depth_equals_drafting(options: dict[str, int], checkpointed: bool) -> None:
    made, text = medusa(**options), tokens(14)
    settings = MedusaSettings(gradient_checkpointing=checkpointed)
    objective = MedusaObjective(made, FrozenTarget.of(model()), settings)
    trained = made.logits(objective.states(batch_of([text], made.config.boundaries)))[0].detach()
    assert trained.shape == (len(text), made.config.num_heads, VOCABULARY)
    runner = ParallelRunner(made, Target(model(), rows=1, slots=64), rows=2, slots=64)
    for index in (0, 3, 7):
        seen = {LAST_HIDDEN: features(text, (LAST_HIDDEN,))[LAST_HIDDEN][:, : index + 1]}
        runner.truncate(1, 0)
        runner.ingest([1], [text[1 : index + 2]], seen)
        assert runner.lengths == [0, index + 1]

        def levels(first: torch.Tensor) -> list[torch.Tensor]:
            found = [first[0, 0]]
            for _ in range(1, made.config.num_heads):
                twins = torch.tensor([[4, 5]])
                logits = runner.descend(twins, torch.zeros_like(twins))
                assert logits.shape[1] == 1, "no depth reads what was drafted above it"
                found.append(logits[0, 0])
            return found

        for depth, logits in enumerate(runner.unroll([1], 6, levels)):
            torch.testing.assert_close(logits.detach(), trained[index, depth], atol=2e-5, rtol=1e-4)


def test_the_loss_equals_a_written_out_reference() -> None:
    made, texts, start = medusa(), [tokens(12), tokens(9, seed=5)], 4
    batch = batch_of(texts, made.config.boundaries, padding=3)
    batch.batch.loss_mask[0, :start] = False
    report = MedusaObjective(made, FrozenTarget.of(model()), MedusaSettings(decay=0.8))(batch)
    total, weight, right = torch.zeros(()), 0.0, [0, 0, 0]
    first = 0
    for text in texts:
        logits = made.logits(made.states(batch.features[LAST_HIDDEN][0, first : first + len(text)], 3)).detach()
        for index in range(len(text)):
            chain = True
            for depth in range(3):
                place = index + 2 + depth
                if place >= len(text) or first + place < start:
                    chain = False
                    continue
                total += 0.8**depth * cross_entropy(logits[index, depth], torch.tensor(text[place]))
                weight += 0.8**depth
                chain = chain and int(logits[index, depth].argmax()) == text[place]
                right[depth] += chain
        first += len(text)
    torch.testing.assert_close(report.loss.detach(), total, atol=1e-4, rtol=1e-5)
    assert float(report.weight) == pytest.approx(weight)
    assert [int(report.metrics[f"acceptance_{depth}"][0]) for depth in range(3)] == right
    report.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in made.parameters())


def test_a_fresh_head_predicts_at_every_depth_what_the_target_does() -> None:
    made = MedusaHead.initial(model(), MedusaConfig.for_target("medusa", model(), options={"num_layers": 2}))
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    own = model().get_output_embeddings()(states).detach()
    found = made.logits(made.states(states, 5)).detach()
    assert found.shape == (3, 5, VOCABULARY)
    torch.testing.assert_close(found, own.unsqueeze(1).expand_as(found))


def test_the_default_tree_holds_the_likeliest_ranks() -> None:
    """By product of ranks: 1 for the chain, 2 for one second choice anywhere, ..."""
    assert tree_of_ranks(3, 3) == Shape.regular((1, 1, 1))
    assert tree_of_ranks(2, 4).parents == (-1, 0, 0, 1, 1)
    for depth, nodes in ((1, 5), (3, 8), (5, 32), (4, 200)):
        shape = tree_of_ranks(depth, nodes)
        assert shape.size == nodes and max(shape.depths) <= depth
        products = {0: 1}
        for node in range(1, nodes + 1):
            products[node] = products[shape.parents[node]] * (shape.ranks[node] + 1)
        left_out = [
            products[node] * (shape.parents.count(node) + 1) for node in range(nodes + 1) if shape.depths[node] < depth
        ]
        assert max(products.values()) <= min(left_out)


def engine(made: MedusaHead, **options: Any) -> LLM:
    config = {"method": "medusa", "model": made, "adaptive": False, **options}
    return LLM(model(), tokenizer=False, speculative_config=config, self_check=False, max_num_seqs=2)


def test_it_drafts_no_deeper_than_it_has_heads() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    output = engine(medusa(), num_speculative_tokens=9).generate({"prompt_token_ids": [3, 4]}, params)[0].outputs[0]
    assert len(output.speculation.drafted_per_depth) == 3
    with pytest.raises(ArgumentError, match="drafts 3 tokens on one path, the shape asks for 4"):
        engine(medusa(), shape=(1, 1, 1, 1))
    with pytest.raises(ArgumentError, match="'medusa'; use that method"):
        LLM(model(), tokenizer=False, speculative_config={"method": "eagle3", "model": medusa()}, self_check=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"num_heads": 0}, "num_heads must be at least 1"), ({"boundaries": [1]}, "no option 'boundaries'")],
)
def test_a_shape_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        medusa(**options)
    with pytest.raises(ArgumentError, match=r"leave draft\.vocab_size"):
        MedusaConfig.for_target("medusa", model(), 20)
