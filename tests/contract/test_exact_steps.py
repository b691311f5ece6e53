"""What a user gets, exactly: composition, join, the policy's pruning, grammar, rule choice and both cuts, enumerated.

Every registered drafter that can sample, under control and without; then a planted bug at each stage.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.exact import FIRST, VOCABULARY, Case, enumerate_step, toy
from contract.harness import SAMPLED, Variant, family_of, kind_for, kind_of, variants, without_unlikely
from contract.tongues import retold, tongue
from forerun.certify.enumeration import TOLERANCE
from forerun.core.rules import default_rule
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, join
from forerun.decode import step as stepping
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.drafters import trees
from forerun.drafters.combined import composed
from forerun.drafters.kinds import kind_named
from forerun.drafters.trees import FixedTree, Grown
from forerun.engine import core
from forerun.engine.completion import Completion
from forerun.engine.drafting import DrafterPool
from forerun.heads.dflash import DFlashConfig, DFlashHead
from forerun.heads.dflash2 import DFlash2Config
from forerun.heads.domino import DominoConfig
from forerun.heads.dspark import DSparkConfig
from forerun.heads.eagle import EagleConfig, EagleHead
from forerun.heads.hydra import HydraConfig, HydraHead
from forerun.heads.kangaroo import KangarooConfig, KangarooHead
from forerun.heads.layers import LatentConfig
from forerun.heads.medusa import MedusaConfig, MedusaHead
from forerun.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from forerun.heads.mtp import MtpConfig, MtpHead
from forerun.heads.peagle import PEagleConfig, PEagleHead
from forerun.types import LAST_HIDDEN, Drawn, Source
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


LAYERS: dict[str, Any] = {
    "hidden_size": 8,
    "target_hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": VOCABULARY,
    "initializer_range": 0.3,
}
"""Of heads for `toy`."""


LATENT = {
    "num_key_value_heads": 2,
    "latent": LatentConfig(kv_lora_rank=5, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=4, q_lora_rank=6),
}


@functools.cache
def _head(generation: int, latent: bool = False) -> EagleHead:
    torch.manual_seed(generation + 7 * latent)
    own = generation == 3
    config = EagleConfig(
        generation=generation,
        **(LAYERS | (LATENT if latent else {})),
        draft_vocab_size=3 if own else VOCABULARY,
        boundaries=(0, 1, 2) if own else (LAST_HIDDEN,),
        own_lm_head=own,
    )
    head = EagleHead(config).eval().to(torch.float64)
    if own:
        head.set_vocabulary(torch.tensor([0, 1, 3]))
    return head


@functools.cache
def _medusa() -> MedusaHead:
    torch.manual_seed(5)
    sizes = {"target_hidden_size": 8, "vocab_size": VOCABULARY, "draft_vocab_size": VOCABULARY}
    head = MedusaHead(MedusaConfig(num_heads=3, boundaries=(LAST_HIDDEN,), **sizes)).eval().to(torch.float64)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return head


@functools.cache
def _hydra(layers: int) -> HydraHead:
    torch.manual_seed(7)
    options = {"num_heads": 3, "num_layers": 2, "num_hidden_layers": layers, "initializer_range": 0.3}
    return HydraHead(HydraConfig.for_target("hydra", toy(), options=options)).eval().to(torch.float64)


@functools.cache
def _mlp(**options: Any) -> MlpSpeculatorHead:
    torch.manual_seed(8)
    config = MlpSpeculatorConfig.for_target("mlp_speculator", toy(), options=options)
    return MlpSpeculatorHead(config).eval().to(torch.float64)


CANDIDATES = {"selector_top_k": 3, "conv_group_size": 2}


@functools.cache
def _dflash(**options: Any) -> DFlashHead:
    torch.manual_seed(6)
    kinds: dict[str, Any] = {"markov_rank": DSparkConfig, "emb_dim": DominoConfig, "selector_rank": DFlash2Config}
    kind = kinds.get(next(iter(options), ""), DFlashConfig)
    config = kind(
        **LAYERS,
        draft_vocab_size=VOCABULARY,
        boundaries=(0, 1, 2),
        num_hidden_layers=1,
        block_size=4,
        mask_token_id=VOCABULARY - 1,
        **options,
    )
    head: DFlashHead = kind_named(config.kind).head(config)  # type: ignore[assignment]
    for name, weight in head.named_parameters():
        if name.startswith(("markov_head", "prefix_gru", "embed_proj", "candidate_selector")):
            torch.nn.init.normal_(weight, std=0.5)
    return head.eval().to(torch.float64)


@functools.cache
def _peagle() -> PEagleHead:
    torch.manual_seed(7)
    config = PEagleConfig(
        **LAYERS,
        draft_vocab_size=VOCABULARY,
        boundaries=(0, 1, 2),
        num_hidden_layers=2,
        mask_token_id=VOCABULARY - 1,
    )
    return PEagleHead(config).eval().to(torch.float64)


@functools.cache
def _mtp(modules: int) -> MtpHead:
    torch.manual_seed(9)
    config = MtpConfig(
        **LAYERS,
        draft_vocab_size=VOCABULARY,
        boundaries=(LAST_HIDDEN,),
        num_hidden_layers=modules,
    )
    return MtpHead(config).eval().to(torch.float64)


@functools.cache
def _kangaroo() -> KangarooHead:
    torch.manual_seed(9)
    given = {"boundaries": (1,), "initializer_range": 0.5}
    return KangarooHead(KangarooConfig.for_target("kangaroo", toy(), options=given)).eval().to(torch.float64)


def _dspark(shape: Sequence[int]) -> Variant:
    return Variant("dspark", "tree", {"model": _dflash(markov_rank=4, markov_head_type="rnn"), "shape": shape})


def _peagle_tree(shape: Sequence[int]) -> Variant:
    return Variant("peagle", "tree", {"model": _peagle(), "shape": shape, "draw": "without_replacement"})


def _kangaroo_tree(shape: Sequence[int]) -> Variant:
    return Variant("kangaroo", "tree", {"model": _kangaroo(), "shape": shape, "exit_below": 0.4})


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
    Variant("eagle3", "chain", {"model": _head(3), **CHAIN}),
    Variant("eagle3", "dynamic", {"model": _head(3), "num_speculative_tokens": 3, "top_k": 2, "nodes": 5}),
    Variant("eagle3", "latent-chain", {"model": _head(3, latent=True), **CHAIN}),
    Variant("eagle3", "latent-tree", {"model": _head(3, latent=True), "shape": (2, 1, 1)}),
    Variant("eagle", "tree", {"model": _head(1), "shape": (2, 1, 1)}),
    Variant("eagle2", "sampled", {"model": _head(1), "num_speculative_tokens": 3, "top_k": 2, "nodes": 5}),
    Variant("medusa", "chain", {"model": _medusa(), "shape": (1, 1, 1), "draw": "iid"}),
    Variant("medusa", "tree", {"model": _medusa(), "shape": (2, 1), "draw": "without_replacement"}),
    Variant("hydra", "chain", {"model": _hydra(1), **CHAIN}),
    Variant("hydra", "tree", {"model": _hydra(0), "shape": (2, 1, 1)}),
    Variant("mlp_speculator", "chain", {"model": _mlp(scale_input=True), **CHAIN}),
    Variant("mlp_speculator", "tree", {"model": _mlp(tie_weights=True), "shape": (2, 1, 1)}),
    Variant("dflash", "best-first", {"model": _dflash(), "num_speculative_tokens": 3, "nodes": 5}),
    Variant("dflash", "chain", {"model": _dflash(), "shape": (1, 1, 1)}),
    Variant("dspark", "chain", {"model": _dflash(markov_rank=4), **CHAIN}),
    _dspark((2, 1)),
    Variant("domino", "chain", {"model": _dflash(emb_dim=3, gru_hidden_dim=4), **CHAIN}),
    Variant("domino", "tree", {"model": _dflash(emb_dim=3, gru_hidden_dim=4), "shape": (2, 1, 1)}),
    Variant("dflash2", "chain", {"model": _dflash(selector_rank=4, **CANDIDATES), **CHAIN}),
    Variant("dflash2", "tree", {"model": _dflash(selector_rank=4, **CANDIDATES), "shape": (2, 1, 1)}),
    Variant("peagle", "best-first", {"model": _peagle(), "num_speculative_tokens": 3, "nodes": 5}),
    Variant("mtp", "chain", {"model": _mtp(1), **CHAIN}),
    Variant("mtp", "two-modules-tree", {"model": _mtp(2), "shape": (2, 1, 1), "draw": "without_replacement"}),
    Variant("peagle", "chain", {"model": _peagle(), "shape": (1, 1, 1)}),
    _peagle_tree((2, 1)),
    Variant("kangaroo", "chain", {"model": _kangaroo(), "exit_below": 0.5, **CHAIN}),
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
CONTROLLED = [
    *(variant for variant in SAMPLING if variant.method not in ("tli", "quantized_self", "skip_layers")),
    Variant(
        "auto", "several", {"drafters": [_member("draft_model", shape=(2, 1, 1)), COPIES, FEW], "reproducible": False}
    ),
]
OTHER_RULES = [
    *(
        (SAMPLING[0], rule)
        for rule in ("sample_walk", "token_rejection", "recursive_rejection", "traversal", "greedy_k")
    ),
    *((SAMPLING[2], rule) for rule in ("sample_walk", "recursive_rejection")),
    *((SAMPLING[4], rule) for rule in ("traversal", "recursive_rejection")),
    *((SAMPLING[-1], rule) for rule in ("sample_walk", "recursive_rejection")),
]


def _each_family(turn: int, variants: Sequence[Variant], **how: Any) -> list[Any]:
    cases = (Case(variant=variant, **how) for variant in variants)
    return one_of_each(cases, lambda case: family_of(case.variant), turn)


CASES = [
    *(Case(variant=variant) for variant in SAMPLING),
    *(Case(variant=variant, prompt=NOVEL) for variant in SAMPLING if variant.method == "first_of"),
    *(Case(variant=variant, rule=rule) for variant, rule in OTHER_RULES),
    *_each_family(0, [own for own in SAMPLING if own.label != "greedy-k-wide"], room=2),  # which has nothing to draw
    *_each_family(1, SAMPLING, stop=1),
    *_each_family(2, SAMPLING, grammar=True),
    *_each_family(3, CONTROLLED, controlled=True),
    *(Case(variant=variant, prompt=NOVEL, controlled=True) for variant in CONTROLLED[-3:]),
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


def test_a_drafter_that_takes_back_what_it_drew(monkeypatch: Patch) -> None:
    cut = FixedTree._cut

    def likely_only(self: FixedTree, tree: TokenTree, grown: Grown, place: int, row: Any, nodes: int, *a: Any) -> Any:
        whole = TokenTree(tree.tokens[0])
        cut(self, whole, grown, place, row, nodes, *a)
        last = whole.size
        while last and float(whole.draft_probs[whole.parents[last]][whole.tokens[last]]) < 0.4:
            last -= 1
        return cut(self, tree, grown, place, row, last, *a)

    monkeypatch.setattr(trees.FixedTree, "_cut", likely_only)
    assert _bias("draft_model-chain") > 0.01


def test_a_composition_that_looks_at_drawn_values(monkeypatch: Patch) -> None:
    def promises(tree: TokenTree, threshold: float) -> bool:
        if not tree.draft_probs:
            return tree.size > 0
        return tree.tokens[1] == int(tree.draft_probs[0].argmax())

    monkeypatch.setattr(composed, "_promises", promises)
    assert _bias("first_of-model-or-copy") > 0.01


def test_a_join_that_drops_drawn_twins(monkeypatch: Patch) -> None:
    def merged(base: TokenTree, others: Sequence[TokenTree], nodes: int) -> TokenTree:
        copied = {other.tokens[1] for other in others if other.size}
        return join(TokenTree(base.tokens[0]) if base.size and base.tokens[1] in copied else base, others, nodes)

    monkeypatch.setattr(composed, "join", merged)
    assert _bias("merge-path-beside-3") > 0.01


@pytest.mark.parametrize("name", ["draft_model-chain", "merge-path-beside-3", "auto-several"])
def test_a_policy_that_looks_at_drawn_values(monkeypatch: Patch, name: str) -> None:
    admit = DrafterPool.admit
    assert _bias(name, prompt=NOVEL, controlled=True) < TOLERANCE
    monkeypatch.setattr(DrafterPool, "admit", lambda self, trees: without_unlikely(admit(self, trees)))
    assert _bias(name, prompt=NOVEL, controlled=True) > 0.01


def test_a_grammar_that_takes_drawn_nodes_away(monkeypatch: Patch) -> None:
    """Drafting without the grammar is lossless as long as nobody looks at what was drawn."""
    neutral = FixedTree._grower

    def ungrammatical(self: FixedTree, context: Any, index: int) -> Any:
        grower = neutral(self, context, index)
        return replace(grower, sampler=Sampler(replace(grower.sampler.params, logits_processors=()), ()))

    monkeypatch.setattr(trees.FixedTree, "_grower", ungrammatical)
    assert _bias("draft_model-chain", grammar=True) < TOLERANCE

    def permitted(trees: list[TokenTree], rows: Sequence[Row]) -> list[TokenTree]:
        return [TokenTree(tree.tokens[0]) if tree.tokens[1:2] == (tree.tokens[0],) else tree for tree in trees]

    monkeypatch.setattr(core, "drop_forbidden", permitted)
    assert _bias("draft_model-chain", grammar=True) > 0.01


def test_a_cut_at_a_stop_token_that_loses_it(monkeypatch: Patch) -> None:
    verify = stepping.verify

    def verified(row: Row, scores: Scores, index: int, rule: str) -> Any:
        found = verify(row, scores, index, rule)
        verdict = found.verdict
        if verdict.kind is not Source.DRAFT:
            return found
        return found._replace(verdict=replace(verdict, next_token=2))

    monkeypatch.setattr(stepping, "verify", verified)
    assert _bias("draft_model-chain") < TOLERANCE, "the stop token is never accepted"
    assert _bias("draft_model-chain", stop=1) > 0.01


def test_a_cut_at_max_tokens_that_comes_late(monkeypatch: Patch) -> None:
    check = Completion._check_end

    def counted(self: Completion, token: int, piece: str, length: int) -> None:
        self.row.tokens_left += length == 3
        check(self, token, piece, length)

    monkeypatch.setattr(Completion, "_check_end", counted)
    assert _bias("draft_model-chain", room=3) > 0.01
