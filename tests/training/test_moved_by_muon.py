"""Which matrices of every kind of head Muon moves: those of the layers, not those with a row for each token."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from forerun.drafters.kinds import KINDS
from forerun.training.loop.update import build_optimizers, embeddings, select_muon_parameters
from forerun.training.medusa2 import TargetAndHead
from forerun.training.recipe import TrainSettings
from training.ttt import FIRST, HIDDEN, dflash, head, hydra, kangaroo, medusa, mlp_speculator, model, mtp, peagle

HEADS: dict[str, Callable[[], Any]] = {
    "eagle3": partial(head, own_embedding=True),
    "eagle": partial(head, **FIRST),
    "peagle": peagle,
    "medusa": partial(medusa, num_heads=2),
    "hydra": partial(hydra, num_heads=2),
    "mlp_speculator": partial(mlp_speculator, n_predict=2),
    "kangaroo": kangaroo,
    "mtp": mtp,
    "dflash": dflash,
    "dflash2": partial(dflash, selector_rank=5, draft_vocab_size=30, own_lm_head=True),
    "dspark": partial(dflash, markov_rank=5, draft_vocab_size=30, own_lm_head=True),
    "domino": partial(dflash, gru_hidden_dim=9, draft_vocab_size=30, own_lm_head=True),
}


@pytest.mark.parametrize("kind", HEADS)
def test_of_a_head_it_moves_what_no_vocabulary_shapes(kind: str) -> None:
    made = HEADS[kind]()
    sizes = {name: getattr(made.config, name) + 3 for name in ("vocab_size", "draft_vocab_size")}
    wider = dict(type(made)(dataclasses.replace(made.config, **sizes)).named_parameters())
    matrices = {name: parameter for name, parameter in made.named_parameters() if parameter.ndim == 2}
    tables = {name for name, parameter in matrices.items() if parameter.shape != wider[name].shape}
    assert select_muon_parameters(made) == matrices.keys() - tables
    assert embeddings(made) <= tables
    assert tables or kind in {"eagle", "kangaroo", "mtp", "dflash"}, "the target's are used"


def test_a_draft_vocabulary_as_large_as_a_layer_is_wide_leaves_the_layers_alone() -> None:
    moved = select_muon_parameters(head(draft_vocab_size=HIDDEN))
    assert any(name.startswith("layers.") for name in moved) and "lm_head.weight" not in moved


def test_every_kind_of_head_is_looked_at() -> None:
    trained = [kind for kind in KINDS.values() if kind.trains in ("head", "target_and_head")]
    assert HEADS.keys() == {kind.stored_as for kind in trained if KINDS[kind.stored_as].objective}


def test_of_a_target_it_leaves_embeddings_and_output_head() -> None:
    both = TargetAndHead(model(), medusa(num_heads=1))
    left = {name for name, parameter in both.named_parameters() if parameter.ndim == 2} - select_muon_parameters(both)
    assert left == {"model.model.embed_tokens.weight", "model.lm_head.weight", "head.heads.0.1.weight"}
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1, n_positions=8))
    assert embeddings(gpt) == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert not select_muon_parameters(gpt) & embeddings(
        gpt
    ) and "transformer.h.0.attn.c_attn.weight" in select_muon_parameters(gpt)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("kind", ["dspark", "domino", "mlp_speculator"])
def test_embeddings_alone_are_matrices_that_nothing_pulls_to_zero(kind: str, optimizer: Any) -> None:
    made = HEADS[kind]()
    names = {id(parameter): name for name, parameter in made.named_parameters()}
    groups = [group for one in build_optimizers(made, TrainSettings(optimizer=optimizer)) for group in one.param_groups]
    free = {names[id(one)] for group in groups if not group["weight_decay"] for one in group["params"] if one.ndim > 1}
    assert free == embeddings(made)
