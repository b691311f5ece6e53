"""What a user gets, exactly: composition, join, the policy's pruning, grammar, rule choice and both cuts, enumerated.

Every registered drafter that can sample, under control and without; then a planted bug at each stage.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from contract.exact import FIRST, VOCABULARY, Case, enumerate_step, toy
from contract.harness import SAMPLED, Variant, family_of, kind_for, kind_of, variants, without_unlikely
from contract.heads import Heads
from contract.tongues import retold, tongue
from forerun.certify.enumeration import TOLERANCE
from forerun.core.rules import default_rule
from forerun.core.tree import TokenTree
from forerun.decode import step as stepping
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.drafters.combined import composed
from forerun.engine.drafting import DrafterPool
from forerun.heads.layers import LatentConfig
from forerun.types import Drawn
from selection import one_of_each, slow

LETTERS, OTHERS = ("a", "b", "c", "d"), ("d", "x", "a", "b")


@functools.cache
def _relative() -> Any:
    return toy(noise=0.1)


@functools.cache
def _pard() -> Any:
    made = copy.deepcopy(toy(noise=0.1))
    made.config.pard_token = VOCABULARY - 1
    return made


def _member(method: str, **options: Any) -> dict[str, Any]:
    model = {"model": _relative()} if method in ("draft_model", "cascade") else {}
    return {"method": method, **model, **options}


def _draft_model(label: str, **options: Any) -> Variant:
    return Variant("draft_model", label, {"model": _relative(), **options})


def _tli(label: str, **options: Any) -> Variant:
    tokenizers = {"target_tokenizer": tongue(LETTERS), "tokenizer": tongue(OTHERS)}
    return Variant("tli", label, {"model": retold(_relative(), LETTERS, OTHERS), **tokenizers, **options})


HEADS = Heads(
    model=toy(),
    layers={
        **{"hidden_size": 8, "target_hidden_size": 8, "intermediate_size": 12, "head_dim": 4},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCABULARY, "initializer_range": 0.3},
    },
    latent=LatentConfig(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4, q_lora_rank=6),
    known=[0, 1, 3],
)
CANDIDATES = {"selector_rank": 4, "selector_top_k": 3, "conv_group_size": 2}
DOMINO = {"emb_dim": 3, "gru_hidden_dim": 4}


def _dspark(shape: Sequence[int]) -> Variant:
    return Variant("dspark", "tree", {"model": HEADS.dflash(markov_rank=4, markov_head_type="rnn"), "shape": shape})


def _peagle_tree(shape: Sequence[int]) -> Variant:
    return Variant("peagle", "tree", {"model": HEADS.peagle(), "shape": shape, "draw": "without_replacement"})


def _kangaroo_tree(shape: Sequence[int]) -> Variant:
    return Variant("kangaroo", "tree", {"model": ADAPTER, "shape": shape, "exit_below": 0.4})


ADAPTER = HEADS.kangaroo(initializer_range=0.5)
CHAIN = {"num_speculative_tokens": 3}
NOVEL = (3,)
"""Nothing to copy."""
COPIES = _member("ngram", max_branches=2, num_speculative_tokens=3)
FEW = _member("recycling", top_k=2, nodes=3)
ONE_COPY = _member("prediction", num_speculative_tokens=2, text=[FIRST, 0, 1])
SAMPLING = [
    _draft_model("chain", **CHAIN),
    _draft_model("hot", temperature=1.7, **CHAIN),
    _draft_model("tree", shape=(2, 1, 1)),
    _draft_model("iid-tree", shape=(2, 1, 1), draw="iid"),
    _draft_model("greedy-k", shape=(1, 1, 2), draw="greedy_k"),
    _draft_model("greedy-k-wide", shape=(2, 2, 1), draw="greedy_k"),
    _draft_model("irregular", tree=(0, 1, 1, 2)),
    _draft_model("stopping", stop="confidence", stop_threshold=0.5, **CHAIN),
    _draft_model("stopping-tree", stop="confidence", stop_threshold=0.5, shape=(2, 1, 1)),
    _tli("chain", temperature=1.7, **CHAIN),
    _tli("tree", temperature=1.7, shape=(2, 1, 1)),
    Variant("pard", "best-first", {"model": _pard(), "num_speculative_tokens": 3, "nodes": 5}),
    Variant("pard", "chain", {"model": _pard(), "shape": (1, 1, 1)}),
    Variant("pard", "tree", {"model": _pard(), "shape": (2, 1, 1)}),
    Variant("pard", "stopping", {"model": _pard(), "shape": (1, 1, 1), "stop": "confidence", "stop_threshold": 0.5}),
    Variant("quantized_self", "chain", CHAIN),
    Variant("skip_layers", "chain", {"skip": ["1.mlp"], **CHAIN}),
    Variant("skip_layers", "stopping-tree", {"skip": ["1.mlp"], "shape": (2, 1), "adapt_threshold": True}),
    Variant("early_exit", "chain", {"exit_layer": 1, **CHAIN}),
    Variant("early_exit", "tree", {"exit_layer": 1, "tree": (0, 1, 1, 2)}),
    Variant("eagle3", "chain", {"model": HEADS.eagle(), **CHAIN}),
    Variant("eagle3", "dynamic", {"model": HEADS.eagle(), "num_speculative_tokens": 3, "top_k": 2, "nodes": 5}),
    Variant("eagle3", "latent-chain", {"model": HEADS.eagle(latent=True), **CHAIN}),
    Variant("eagle3", "latent-tree", {"model": HEADS.eagle(latent=True), "shape": (2, 1, 1)}),
    Variant("eagle", "tree", {"model": HEADS.eagle(1), "shape": (2, 1, 1)}),
    Variant("eagle2", "sampled", {"model": HEADS.eagle(1), "num_speculative_tokens": 3, "top_k": 2, "nodes": 5}),
    Variant("medusa", "chain", {"model": HEADS.medusa(), "shape": (1, 1, 1), "draw": "iid"}),
    Variant("medusa", "tree", {"model": HEADS.medusa(), "shape": (2, 1), "draw": "without_replacement"}),
    Variant("hydra", "chain", {"model": HEADS.hydra(num_hidden_layers=1), **CHAIN}),
    Variant("hydra", "tree", {"model": HEADS.hydra(num_hidden_layers=0), "shape": (2, 1, 1)}),
    Variant("mlp_speculator", "chain", {"model": HEADS.mlp(scale_input=True), **CHAIN}),
    Variant("mlp_speculator", "tree", {"model": HEADS.mlp(tie_weights=True), "shape": (2, 1, 1)}),
    Variant("dflash", "best-first", {"model": HEADS.dflash(), "num_speculative_tokens": 3, "nodes": 5}),
    Variant("dflash", "chain", {"model": HEADS.dflash(), "shape": (1, 1, 1)}),
    Variant("dspark", "chain", {"model": HEADS.dflash(markov_rank=4), **CHAIN}),
    _dspark((2, 1)),
    Variant("domino", "chain", {"model": HEADS.dflash(**DOMINO), **CHAIN}),
    Variant("domino", "tree", {"model": HEADS.dflash(**DOMINO), "shape": (2, 1, 1)}),
    Variant("dflash2", "chain", {"model": HEADS.dflash(**CANDIDATES), **CHAIN}),
    Variant("dflash2", "tree", {"model": HEADS.dflash(**CANDIDATES), "shape": (2, 1, 1)}),
    Variant("peagle", "best-first", {"model": HEADS.peagle(), "num_speculative_tokens": 3, "nodes": 5}),
    Variant("gemma4_assistant", "chain", {"model": HEADS.assistant(), **CHAIN}),
    Variant("gemma4_assistant", "tree-of-groups", {"model": HEADS.assistant(4), "shape": (2, 1, 1)}),
    Variant("mtp", "chain", {"model": HEADS.mtp(1), **CHAIN}),
    Variant("mtp", "two-modules-tree", {"model": HEADS.mtp(2), "shape": (2, 1, 1), "draw": "without_replacement"}),
    Variant("peagle", "chain", {"model": HEADS.peagle(), "shape": (1, 1, 1)}),
    _peagle_tree((2, 1)),
    Variant("kangaroo", "chain", {"model": ADAPTER, "exit_below": 0.5, **CHAIN}),
    _kangaroo_tree((2, 1)),
    Variant("cascade", "chain", {"model": _relative(), "inner": COPIES, **CHAIN}),
    Variant("cascade", "tail", {"model": _relative(), "inner": COPIES, "num_speculative_tokens": 2, "tail": 3}),
    Variant("cascade", "three-levels", {"model": _relative(), "inner": _member("cascade", inner=COPIES), **CHAIN}),
    Variant("first_of", "copy-or-model", {"drafters": [COPIES, _member("draft_model", **CHAIN)], "min_tokens": 2.5}),
    Variant("first_of", "model-or-copy", {"drafters": [_member("draft_model", **CHAIN), COPIES], "min_tokens": 0.5}),
    Variant("merge", "path-beside-2", {"drafters": [ONE_COPY, _member("draft_model", num_speculative_tokens=2)]}),
    Variant("merge", "path-beside-3", {"drafters": [ONE_COPY, _member("draft_model", **CHAIN)]}),
    Variant("merge", "copies-beside-tree", {"drafters": [_member("draft_model", shape=(2, 1)), COPIES], "nodes": 7}),
    Variant("merge", "few-nodes", {"drafters": [_member("draft_model", num_speculative_tokens=2), COPIES], "nodes": 4}),
]
DEEP = [replace(tree((2, 1, 1)), label="deep-tree") for tree in (_dspark, _peagle_tree, _kangaroo_tree)]
"""Whose trees take seconds to enumerate: slow tests."""
SMALL_TREE = _member("draft_model", shape=(2, 1, 1))
CONTROLLED = [
    *(variant for variant in SAMPLING if variant.method not in ("tli", "quantized_self", "skip_layers")),
    Variant("auto", "several", {"drafters": [SMALL_TREE, COPIES, FEW], "greedy_with_seed": False}),
]
OTHER_RULES = [
    *((SAMPLING[0], rule) for rule in ("sample_walk", "token_rejection", "recursive_rejection")),
    *((SAMPLING[0], rule) for rule in ("traversal", "greedy_k")),
    *((SAMPLING[2], rule) for rule in ("sample_walk", "recursive_rejection")),
    *((SAMPLING[4], rule) for rule in ("traversal", "recursive_rejection")),
    *((SAMPLING[-1], rule) for rule in ("sample_walk", "recursive_rejection")),
]


HYBRID = (
    *("draft_model-chain", "skip_layers-chain", "early_exit-chain", "eagle3-chain", "peagle-chain"),
    *("cascade-three-levels", "merge-path-beside-3", "merge-copies-beside-tree"),
)
"""Variants that are enumerated with a target that has recurrent states, too."""


def _each_family(turn: int, variants: Sequence[Variant], **how: Any) -> list[Any]:
    cases = (Case(variant=variant, **how) for variant in variants)
    return one_of_each(cases, lambda case: family_of(case.variant), turn)


CASES = [
    *(Case(variant=variant) for variant in SAMPLING),
    *(Case(variant=variant, prompt=NOVEL) for variant in SAMPLING if variant.method == "first_of"),
    *one_of_each((Case(variant=variant, rule=rule) for variant, rule in OTHER_RULES), lambda case: case.rule),
    *_each_family(0, [own for own in SAMPLING if own.label != "greedy-k-wide"], room=2),  # which has nothing to draw
    *_each_family(1, SAMPLING, stop=1),
    *_each_family(2, SAMPLING, grammar=True),
    *_each_family(3, CONTROLLED, controlled=True),
    *(Case(variant=variant, prompt=NOVEL, controlled=True) for variant in CONTROLLED[-3:]),
    *(Case(variant=variant, hybrid=True) for variant in SAMPLING if str(variant) in HYBRID),
    *_each_family(4, CONTROLLED, room=3, controlled=True, grammar=True),
    *slow(*(Case(variant=variant, **how) for variant in DEEP for how in ({}, {"grammar": True}, {"controlled": True}))),
    *slow(*(Case(variant=variant, stop=1) for variant in DEEP)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_emits_the_targets_distribution(case: Case) -> None:
    found = enumerate_step(case)
    assert found.error <= TOLERANCE
    copied = case.variant.label in ("copy-or-model", "several") and case.prompt != NOVEL
    assert found.drafts > 1 or copied or case.grammar, "something was to be drawn"


def test_every_drafter_that_can_sample_is_enumerated() -> None:
    can = {variant.method for variant in variants() if kind_for(variant, replace(SAMPLED, seed=None)).sampled}
    assert can == {variant.method for variant in SAMPLING}


# --- planted bugs, one for each stage -------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
NAMED = {str(variant): variant for variant in [*SAMPLING, *CONTROLLED]}


def _bias(name: str, **how: Any) -> float:
    """Total variation between what comes out and what should."""
    return enumerate_step(Case(variant=NAMED[name], **how)).distance


def by_the_drawn_tree(verify: Callable[..., Any]) -> Callable[..., Any]:
    """`verify` with the rule that this engine once chose, after everything was drawn; a rule asked for stays."""

    def chosen(tree: TokenTree) -> str:
        kind = kind_of(tree)
        if kind.chain or not kind.sampled:
            return default_rule(kind, greedy=False)
        given = any(drawn is Drawn.DETERMINISTIC for drawn in tree.drawn[1:])
        return "greedy_k" if kind.multipath and given else "traversal"

    def verified(row: Row, scores: Scores, index: int, rule: str, **more: Any) -> Any:
        return verify(row, scores, index, rule if row.rule is not None else chosen(scores.trees[index]), **more)

    return verified


@pytest.mark.parametrize("name", ["merge-path-beside-2", "merge-path-beside-3", "cascade-tail", "draft_model-greedy-k"])
def test_a_rule_that_is_chosen_by_the_drawn_tree(monkeypatch: Patch, name: str) -> None:
    assert _bias(name) < TOLERANCE
    monkeypatch.setattr(stepping, "verify", by_the_drawn_tree(stepping.verify))
    assert _bias(name) > 0.05


def test_a_composition_that_looks_at_drawn_values(monkeypatch: Patch) -> None:
    def promises(tree: TokenTree, threshold: float) -> bool:
        if not tree.draft_probs:
            return tree.size > 0
        return tree.tokens[1] == int(tree.draft_probs[0].argmax())

    monkeypatch.setattr(composed, "_promises", promises)
    assert _bias("first_of-model-or-copy") > 0.01


@pytest.mark.parametrize("name", ["draft_model-chain", "merge-path-beside-3", "auto-several"])
def test_a_policy_that_looks_at_drawn_values(monkeypatch: Patch, name: str) -> None:
    admit = DrafterPool.admit
    assert _bias(name, prompt=NOVEL, controlled=True) < TOLERANCE
    monkeypatch.setattr(DrafterPool, "admit", lambda self, trees: without_unlikely(admit(self, trees)))
    assert _bias(name, prompt=NOVEL, controlled=True) > 0.01
