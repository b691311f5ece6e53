"""A fresh head starts no worse than a guess on a target like real ones: outliers in its states, an attention sink, and
a final norm that makes every state confident."""

import functools
import math
from typing import Any

import pytest
import torch

from forerun.drafters.kinds import KINDS, kind_named, objective_for
from forerun.heads.start import cross_entropy, fit
from forerun.losses.objective import FeatureBatch, FrozenTarget, TokenBatch
from forerun.training.features.online import OnlineFeatures
from llamas import tiny_llama

VOCABULARY, LENGTH, BATCHES = 300, 64, 8
FRESH = [one.name for one in KINDS.values() if one.trains == "head" and one.in_target is None and one.objective]
SIZES: dict[str, dict[str, Any]] = {"domino": {"gru_hidden_dim": 48, "emb_dim": 32}}


@functools.cache
def outlying() -> Any:
    """A random Llama of which three dimensions hold most of the energy, and whose token 0 is a sink."""
    with torch.random.fork_rng(), torch.no_grad():
        model = tiny_llama(VOCABULARY, num_hidden_layers=6, initializer_range=0.1)
        embedding = model.get_input_embeddings().weight
        embedding[:, :3] += 1.0
        embedding[0] *= 300
        model.model.norm.weight.fill_(1.8)
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return model


@functools.cache
def batches(boundaries: tuple[int, ...]) -> list[FeatureBatch]:
    """Texts of random tokens behind a sink."""
    random, source = torch.Generator().manual_seed(0), OnlineFeatures(outlying(), boundaries)
    tokens = torch.randint(1, VOCABULARY, (BATCHES, 2, LENGTH), generator=random)
    tokens[:, :, 0] = 0
    zeros = torch.zeros(2, LENGTH, dtype=torch.int64)
    places = torch.arange(LENGTH).expand(2, -1)
    made = [TokenBatch(tokens=one, loss_mask=places > 0, documents=zeros, positions=places) for one in tokens]
    return [source.features(batch) for batch in made]


def objective_of(kind: str, seed: int) -> Any:
    model, made = outlying(), kind_named(kind)
    config = made.head.Config.for_target(kind, model, None, SIZES.get(kind))
    return objective_for(made)(made.head.initial(model, config, seed=seed).eval(), FrozenTarget.of(model), None)


@pytest.mark.parametrize("kind", FRESH)
def test_the_first_loss_is_no_worse_than_a_guess(kind: str) -> None:
    guess = math.log(VOCABULARY)
    objective = objective_of(kind, seed=0)
    *seen, other = batches(objective.head.config.boundaries)
    before = cross_entropy(objective, other)
    fit(objective, seen, halves=False)
    assert cross_entropy(objective, other) <= guess + 0.3
    if kind == "eagle3":
        assert before > guess + 1, "the target is one on which a head as it is drawn starts badly"
