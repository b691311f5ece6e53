"""What the contract suite runs on: tiny models, every registered drafter, exact distributions of outcomes, chi-square.

A new drafter is tested without a line here. Where it needs options to run on the tiny target, or has several ways of
drawing, `VARIANTS` names them.
"""

from __future__ import annotations

import copy
import functools
import random
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from scipy import stats
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from contract.tongues import LETTERS, OTHERS, WORDS, retold, tongue
from forerun import LLM, SamplingParams
from forerun.certify.checks import draws_for
from forerun.certify.contract import (
    PROMPT,
    PROMPTS,  # noqa: F401 - the tests' own
    SLOTS,  # noqa: F401
    VOCABULARY,
    as_prompts,
    tiny_engine,
    tokens_of,
)
from forerun.certify.contract import tiny_target as model
from forerun.core.rules import RULES, default_rule, rule_named
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter
from forerun.drafters import DRAFTERS, DrafterEntry, drafter_class, methods
from forerun.drafters.kinds import KINDS, kind_named
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
from forerun.heads.mtp import ExpertsConfig, MtpConfig, MtpHead
from forerun.heads.peagle import PEagleConfig, PEagleHead
from forerun.manifests import TokenizerIdentity
from forerun.training.data.datastore import write as write_datastore
from forerun.types import LAST_HIDDEN, Budget, DraftKind, Drawn
from llamas import HEAD_SIZES
from selection import one_of_each

NEVER = 6
"""A token that the distribution under test never gives."""


def weary(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A user's processor: makes one token less likely, depending on the last one."""
    return logits.index_add(0, torch.tensor([(tokens[-1] + 2) % VOCABULARY]), torch.tensor([-0.7]))


SAMPLED = SamplingParams(
    temperature=0.8,
    top_k=4,
    top_p=0.95,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.4,
    allowed_token_ids=[token for token in range(VOCABULARY) if token != NEVER],
    logit_bias={4: 0.5},
    logits_processors=(weary,),
    max_tokens=5,
)
"""Everything on, and few enough outcomes to count; the four tokens after the first make room for three levels."""
UNWEARY = replace(SAMPLED, logits_processors=())
"""As most users ask: drafts are drawn a level at a time, not node by node on the host."""
FAMILY = 1e-6
"""Chance that a right implementation fails anywhere in the suite."""
TESTS = 128
"""More than there are statistical tests."""
_greedy_answers: dict[tuple[tuple[int, ...], str], list[int]] = {}
LEVEL = FAMILY / TESTS


@functools.cache
def relative(noise: float = 0.04) -> LlamaForCausalLM:
    """A model that often, but not always, agrees with `model()`: the draft model."""
    generator = torch.Generator().manual_seed(1)
    made = copy.deepcopy(model())
    for parameter in made.parameters():
        parameter.data += noise * torch.randn(parameter.shape, generator=generator)
    return made


@functools.cache
def pard_model() -> LlamaForCausalLM:
    """`relative()` with a mask token: right at first, and a stranger's behind masks that it was never trained for."""
    made = copy.deepcopy(relative())
    made.config.pard_token = VOCABULARY - 1
    return made


@dataclass(frozen=True)
class Variant:
    """One drafter with options. Compared by its name alone."""

    method: str
    label: str = "default"
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def config(self, rule: str | None = None) -> dict[str, Any]:
        """As `LLM` takes it: the same draft at every step, unless the options, or `auto`, say otherwise."""
        return {"method": self.method, "rule": rule, "adaptive": self.method == "auto", **self.options}

    def __str__(self) -> str:
        return f"{self.method}-{self.label}"


LAYERS: dict[str, Any] = {**HEAD_SIZES, "vocab_size": VOCABULARY}
"""Of heads for `model()`."""


LATENT = LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)


@functools.cache
def eagle_head(generation: int = 3, **options: Any) -> EagleHead:
    """A random head for `model()`, with a draft vocabulary of its own: mostly wrong, so that every path is walked."""
    torch.manual_seed(generation)
    own = generation == 3
    config = EagleConfig(
        generation=generation,
        **(LAYERS | ({"num_key_value_heads": 2} if "latent" in options else {})),
        draft_vocab_size=9 if own else VOCABULARY,
        boundaries=(0, 1, 2) if own else (LAST_HIDDEN,),
        own_lm_head=own,
        **options,
    )
    head = EagleHead(config).eval()
    if own:
        head.set_vocabulary(torch.tensor([0, 1, 2, 3, 5, 7, 8, 10, 11]))
    return head


@functools.cache
def medusa_head() -> MedusaHead:
    """A random head of three depths for `model()`."""
    torch.manual_seed(4)
    config = MedusaConfig(
        num_heads=3,
        target_hidden_size=32,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        boundaries=(LAST_HIDDEN,),
    )
    head = MedusaHead(config).eval()
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return head


@functools.cache
def hydra_head(**options: Any) -> HydraHead:
    """A random head of three depths for `model()`, Hydra++'s unless the options say otherwise."""
    torch.manual_seed(7)
    given = {"num_heads": 3, "num_layers": 2, "initializer_range": 0.3, **options}
    return HydraHead(HydraConfig.for_target("hydra", model(), options=given)).eval()


@functools.cache
def mlp_head(**options: Any) -> MlpSpeculatorHead:
    """A random MLP speculator of three depths for `model()`."""
    torch.manual_seed(8)
    return MlpSpeculatorHead(MlpSpeculatorConfig.for_target("mlp_speculator", model(), options=options)).eval()


@functools.cache
def dflash_head(**options: Any) -> DFlashHead:
    """A random head of blocks of four for `model()`; with a ``markov_rank`` a DSpark, with an ``emb_dim`` a Domino,
    with a ``selector_rank`` a DFlash 2 head."""
    torch.manual_seed(5)
    kinds: dict[str, Any] = {"markov_rank": DSparkConfig, "emb_dim": DominoConfig, "selector_rank": DFlash2Config}
    kind = kinds.get(next(iter(options), ""), DFlashConfig)
    config = kind(
        **LAYERS,
        draft_vocab_size=VOCABULARY,
        boundaries=(0, 1, 2),
        num_hidden_layers=2,
        block_size=4,
        mask_token_id=VOCABULARY - 1,
        **options,
    )
    head: DFlashHead = kind_named(config.kind).head(config).eval()  # type: ignore[assignment]
    for name, weight in head.named_parameters():
        if name.startswith(("markov_head", "confidence_head", "prefix_gru", "embed_proj", "candidate_selector")):
            torch.nn.init.normal_(weight, std=0.5)
    return head


@functools.cache
def peagle_head(**options: Any) -> PEagleHead:
    """A random head of two layers for `model()`, with a draft vocabulary of its own."""
    torch.manual_seed(7)
    config = PEagleConfig(
        **LAYERS,
        draft_vocab_size=9,
        boundaries=(0, 1, 2),
        num_hidden_layers=2,
        mask_token_id=VOCABULARY - 1,
        **options,
    )
    head = PEagleHead(config).eval()
    head.set_vocabulary(torch.tensor([0, 1, 2, 3, 5, 7, 8, 10, 11]))
    return head


@functools.cache
def kangaroo_head(**options: Any) -> KangarooHead:
    """A random adapter after the first layer of `model()`."""
    torch.manual_seed(9)
    given = {"boundaries": (1,), "initializer_range": 0.3, **options}
    return KangarooHead(KangarooConfig.for_target("kangaroo", model(), options=given)).eval()


@functools.cache
def mtp_head(modules: int = 1, sparse: bool = False) -> MtpHead:
    """Random MTP layers for `model()`: dense, on the state before the final norm, or as DeepSeek's."""
    torch.manual_seed(6)
    config = MtpConfig(
        **(LAYERS | {"num_key_value_heads": 2 if sparse else 1}),
        draft_vocab_size=VOCABULARY,
        boundaries=(LAST_HIDDEN,) if sparse else (2,),
        num_hidden_layers=modules,
        experts=ExpertsConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24) if sparse else None,
        latent=LATENT if sparse else None,
    )
    return MtpHead(config).eval()


def _eagle(method: str, label: str, **options: Any) -> Variant:
    return Variant(method, label, {"model": eagle_head(3 if method == "eagle3" else 1), **options})


def _draft_model(label: str, **options: Any) -> Variant:
    return Variant("draft_model", label, {"model": relative(), **options})


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token id, separated by spaces."""
    words = Tokenizer(WordLevel({f"w{index:02}": index for index in range(VOCABULARY)}, unk_token="w00"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@functools.cache
def _corpus() -> tempfile.TemporaryDirectory[str]:
    """A datastore in which every pair of tokens occurs; gone when the process ends."""
    folder = tempfile.TemporaryDirectory()
    identity = TokenizerIdentity.of(word_tokenizer(), "contract")
    rng = random.Random(0)
    write_datastore([rng.choices(range(VOCABULARY), k=90) for _ in range(8)], identity, folder.name)
    return folder


def _rest(label: str, **options: Any) -> Variant:
    return Variant("rest", label, {"datastore": _corpus().name, "num_speculative_tokens": 3, "min_match": 1, **options})


def _translated(method: str, label: str, pieces: Sequence[str], drafts: Sequence[str], **options: Any) -> Variant:
    tokenizers = {"target_tokenizer": tongue(pieces), "tokenizer": tongue(drafts)}
    return Variant(method, label, {"model": retold(relative(), pieces, drafts), **tokenizers, **options})


def _member(method: str = "ngram", **options: Any) -> dict[str, Any]:
    """A drafter as a member of another; a draft model by default drafts with `relative()`."""
    model = {"model": relative()} if method in ("draft_model", "cascade") else {}
    return {"method": method, **model, **options}


def _cascade(label: str, **options: Any) -> Variant:
    return Variant("cascade", label, {"model": relative(), "num_speculative_tokens": 3, **options})


VARIANTS: dict[str, list[Variant]] = {
    "ngram": [
        Variant("ngram", "chain", {"num_speculative_tokens": 3}),
        Variant("ngram", "trie", {"num_speculative_tokens": 3, "max_branches": 3}),
        Variant("ngram", "frequent", {"num_speculative_tokens": 3, "max_branches": 2, "match": "most_frequent"}),
    ],
    "lookahead": [
        Variant("lookahead", "small", {"window": 3, "level": 3, "guesses": 3}),
        Variant("lookahead", "window-only", {"window": 4, "level": 3, "guesses": 4, "copy_text": False}),
    ],
    "jacobi": [Variant("jacobi", "chain", {"num_speculative_tokens": 3})],
    "suffix": [
        Variant("suffix", "chain", {"num_speculative_tokens": 3, "max_spec_offset": 1}),
        Variant("suffix", "tree", {"num_speculative_tokens": 3, "max_spec_offset": 1, "nodes": 5}),
    ],
    "prediction": [
        Variant("prediction", "chain", {"num_speculative_tokens": 3, "text": [1, 5, 7, 2, 1, 5, 3, 9, 4, 8, 8]}),
    ],
    "first_of": [
        Variant(
            "first_of",
            "copy-or-model",
            {
                "drafters": [_member(num_speculative_tokens=3), _member("draft_model", num_speculative_tokens=3)],
                "min_tokens": 0.6,
            },
        ),
        Variant(
            "first_of",
            "sampled",
            {
                "drafters": [_member(prompt_lookup_min=2), _member("draft_model", num_speculative_tokens=3)],
                "min_tokens": 0,
                "reproducible": False,
            },
        ),
    ],
    "merge": [
        Variant("merge", "given", {"drafters": [_member(), _member("draft_model", shape=(3, 2, 1))], "nodes": 6}),
        Variant(
            "merge",
            "beside-a-chain",
            {"drafters": [_member(max_branches=3), _member("draft_model")], "reproducible": False},
        ),
        Variant(
            "merge",
            "beside-a-tree",
            {"drafters": [_member("draft_model", shape=(3, 2, 1)), _member()], "reproducible": False},
        ),
    ],
    "cascade": [
        _cascade("tail", inner=_member(max_branches=2), tail=3),
        _cascade("three-levels", inner=_member("cascade", num_speculative_tokens=2, inner=_member())),
    ],
    "draft_model": [
        _draft_model("chain", num_speculative_tokens=3),
        _draft_model("given", num_speculative_tokens=3, draw="deterministic"),
        _draft_model("tree", shape=(3, 2, 1)),
        _draft_model("iid-tree", shape=(3, 2, 1), draw="iid"),
        _draft_model("given-tree", shape=(3, 2, 1), draw="deterministic"),
        _draft_model("greedy-k-tree", shape=(3, 2, 1), draw="greedy_k"),
        _draft_model("hot", num_speculative_tokens=3, temperature=1.7),
        _draft_model("irregular-tree", tree=(0, 0, 1, 1, 2, 4)),
        _draft_model("irregular-given-tree", tree=(0, 0, 0, 1, 1, 2), draw="deterministic"),
    ],
    "pard": [
        Variant("pard", "best-first", {"model": pard_model(), "num_speculative_tokens": 3, "nodes": 8}),
        Variant("pard", "best-first-given", {"model": pard_model(), "nodes": 8, "draw": "deterministic"}),
        Variant("pard", "chain", {"model": pard_model(), "shape": (1, 1, 1)}),
        Variant("pard", "one-token", {"model": pard_model(), "shape": (2,)}),
        Variant("pard", "sampled-tree", {"model": pard_model(), "shape": (3, 2, 1)}),
        Variant("pard", "stopping", {"model": pard_model(), "shape": (1, 1, 1), "stop": "svip"}),
    ],
    "early_exit": [
        Variant("early_exit", "chain", {"exit_layer": 1, "num_speculative_tokens": 3}),
        Variant("early_exit", "tree", {"exit_layer": 1, "shape": (3, 2, 1)}),
    ],
    "quantized_self": [Variant("quantized_self", "chain", {"num_speculative_tokens": 3})],
    "skip_layers": [
        Variant("skip_layers", "chain", {"skip": ["1.mlp"], "num_speculative_tokens": 3}),
        Variant("skip_layers", "stopping-tree", {"skip": ["1.mlp"], "shape": (3, 2, 1), "adapt_threshold": True}),
    ],
    "rest": [_rest("trie", max_match=3, nodes=8), _rest("chain", max_hits=1)],
    "recycling": [
        Variant("recycling", "fixed", {"num_speculative_tokens": 3, "nodes": 8, "top_k": 3}),
        Variant("recycling", "adaptive", {"num_speculative_tokens": 3, "nodes": 8, "top_k": 3, "adaptive_tree": True}),
    ],
    "tli": [
        _translated("tli", "chain", WORDS, OTHERS, num_speculative_tokens=3),
        _translated("tli", "tree", WORDS, OTHERS, shape=(3, 2, 1)),
    ],
    "slem": [
        _translated("slem", "letters", LETTERS, LETTERS[::-1], num_speculative_tokens=3),
        _translated("slem", "words", WORDS, OTHERS, num_speculative_tokens=4, look_behind=2),
    ],
    "eagle3": [
        _eagle("eagle3", "chain", num_speculative_tokens=3),
        _eagle("eagle3", "dynamic", num_speculative_tokens=3, top_k=3, nodes=8),
        _eagle("eagle3", "dynamic-given", num_speculative_tokens=3, top_k=3, nodes=8, draw="deterministic"),
        _eagle("eagle3", "tree", shape=(3, 2, 1)),
        _eagle("eagle3", "greedy-k-tree", shape=(3, 2, 1), draw="greedy_k"),
        Variant("eagle3", "latent-chain", {"model": eagle_head(latent=LATENT), "num_speculative_tokens": 3}),
        Variant("eagle3", "latent-dynamic", {"model": eagle_head(latent=LATENT), "top_k": 3, "nodes": 8}),
    ],
    "eagle": [_eagle("eagle", "chain", num_speculative_tokens=3)],
    "eagle2": [_eagle("eagle2", "dynamic", num_speculative_tokens=3, top_k=3, nodes=8)],
    "medusa": [
        Variant("medusa", "best-first", {"model": medusa_head(), "nodes": 8}),
        Variant("medusa", "chain", {"model": medusa_head(), "shape": (1, 1, 1), "draw": "iid"}),
        Variant("medusa", "sampled-tree", {"model": medusa_head(), "nodes": 6, "draw": "without_replacement"}),
        Variant("medusa", "sparse-tree", {"model": medusa_head(), "tree": (0, 0, 0, 1, 1, 2, 4)}),
    ],
    "hydra": [
        Variant("hydra", "tree", {"model": hydra_head(), "shape": (3, 2, 1)}),
        Variant("hydra", "chain", {"model": hydra_head(num_hidden_layers=0), "num_speculative_tokens": 3}),
        Variant("hydra", "dynamic", {"model": hydra_head(), "top_k": 3, "nodes": 8}),
        Variant("hydra", "sparse-tree", {"model": hydra_head(), "tree": (0, 0, 0, 1, 1, 2, 4)}),
    ],
    "mlp_speculator": [
        Variant("mlp_speculator", "chain", {"model": mlp_head(), "num_speculative_tokens": 3}),
        Variant("mlp_speculator", "tree", {"model": mlp_head(tie_weights=True, inner_dim=20), "shape": (3, 2, 1)}),
        Variant("mlp_speculator", "dynamic", {"model": mlp_head(scale_input=True), "top_k": 3, "nodes": 8}),
    ],
    "dflash": [
        Variant("dflash", "best-first", {"model": dflash_head(), "nodes": 8}),
        Variant("dflash", "best-first-given", {"model": dflash_head(), "nodes": 8, "draw": "deterministic"}),
        Variant("dflash", "chain", {"model": dflash_head(), "shape": (1, 1, 1)}),
        Variant("dflash", "sampled-tree", {"model": dflash_head(), "shape": (3, 2, 1)}),
        Variant("dflash", "windows", {"model": dflash_head(sliding_window=6, causal_windows=True), "shape": (1, 1, 1)}),
    ],
    "dspark": [
        Variant("dspark", "chain", {"model": dflash_head(markov_rank=6), "num_speculative_tokens": 3}),
        Variant("dspark", "tree", {"model": dflash_head(markov_rank=6, markov_head_type="rnn"), "shape": (3, 2, 1)}),
        Variant("dspark", "dynamic", {"model": dflash_head(markov_rank=6), "top_k": 3, "nodes": 8}),
    ],
    "dflash2": [
        Variant(
            "dflash2", "chain", {"model": dflash_head(selector_rank=5, selector_top_k=5), "num_speculative_tokens": 3}
        ),
        Variant("dflash2", "tree", {"model": dflash_head(selector_rank=5, selector_top_k=2), "shape": (3, 2, 1)}),
        Variant(
            "dflash2", "dynamic", {"model": dflash_head(selector_rank=5, selector_top_k=5), "top_k": 3, "nodes": 8}
        ),
    ],
    "domino": [
        Variant("domino", "chain", {"model": dflash_head(emb_dim=6, gru_hidden_dim=5), "num_speculative_tokens": 3}),
        Variant(
            "domino",
            "tree",
            {"model": dflash_head(emb_dim=6, gru_hidden_dim=5, pure_draft_prefix_len=0), "shape": (3, 2, 1)},
        ),
        Variant("domino", "dynamic", {"model": dflash_head(emb_dim=6, gru_hidden_dim=5), "top_k": 3, "nodes": 8}),
    ],
    "peagle": [
        Variant("peagle", "best-first", {"model": peagle_head(), "num_speculative_tokens": 3, "nodes": 8}),
        Variant("peagle", "chain", {"model": peagle_head(own_embedding=False), "shape": (1, 1, 1)}),
        Variant("peagle", "one-token", {"model": peagle_head(), "shape": (2,)}),
        Variant("peagle", "sampled-tree", {"model": peagle_head(norm_before_residual=True), "shape": (3, 2, 1)}),
        Variant("peagle", "windows", {"model": peagle_head(sliding_window=6), "shape": (1, 1, 1)}),
    ],
    "kangaroo": [
        Variant("kangaroo", "chain", {"model": kangaroo_head(), "num_speculative_tokens": 3}),
        Variant("kangaroo", "whole-chain", {"model": kangaroo_head(), "num_speculative_tokens": 3, "exit_below": 0}),
        Variant("kangaroo", "tree", {"model": kangaroo_head(sliding_window=6), "shape": (3, 2, 1), "exit_below": 0.3}),
        Variant("kangaroo", "dynamic", {"model": kangaroo_head(), "num_speculative_tokens": 3, "top_k": 3, "nodes": 8}),
    ],
    "mtp": [
        Variant("mtp", "experts", {"model": mtp_head(sparse=True), "num_speculative_tokens": 3}),
        Variant("mtp", "chain", {"model": mtp_head(), "num_speculative_tokens": 3}),
        Variant("mtp", "two-modules-tree", {"model": mtp_head(2), "shape": (3, 2, 1)}),
        Variant("mtp", "dynamic", {"model": mtp_head(2, True), "num_speculative_tokens": 3, "top_k": 3, "nodes": 8}),
    ],
}


def variants() -> list[Variant]:
    """Every registered drafter, in each way that `VARIANTS` knows."""
    return [variant for name in DRAFTERS for variant in VARIANTS.get(name, [Variant(name)])]


def each_drafter(turn: int = 0, ways: Sequence[Variant] | None = None) -> list[Any]:
    """These variants, or all, as parameters, slow but for one of each drafter; see `one_of_each`."""
    return one_of_each(variants() if ways is None else ways, lambda variant: variant.method, turn)


def family_of(variant: Variant) -> str:
    """Drafters of one family keep what they know of a text, and grow a draft, by the same code."""
    kind = KINDS.get(variant.method)
    return kind.drafts if kind is not None else methods()[variant.method].path.rpartition(".")[0]


def each_family(turn: int = 0, ways: Sequence[Variant] | None = None) -> list[Any]:
    """One of each family, for what the engine does around a drafter; the others are slow."""
    return one_of_each(variants() if ways is None else ways, family_of, turn)


@functools.cache
def oracle(depth: int = 3) -> Variant:
    """A drafter that is always right: the target itself."""
    return Variant("draft_model", "oracle", {"model": model(), "num_speculative_tokens": depth})


def llm(
    variant: Variant | None,
    *,
    rule: str | None = None,
    rows: int = 8,
    check: bool = True,
    target: LlamaForCausalLM | None = None,
    tokenizer: Any = False,
    chunk: int | None = None,
) -> LLM:
    """An engine on the tiny target that a variant drafts for."""
    config = None if variant is None else variant.config(rule)
    target = model() if target is None else target
    return tiny_engine(config, target=target, tokenizer=tokenizer, rows=rows, piece=chunk, check=check, device=None)


def plain_greedy(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """What transformers' own forward and the processors say at temperature 0: no cache, no tree, no engine."""
    key = (tuple(prompt), repr(params))
    if key not in _greedy_answers:
        _greedy_answers[key] = _plain_greedy(prompt, params)
    return _greedy_answers[key]


def _plain_greedy(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    sampler, output = Sampler(params, prompt), list[int]()
    for _ in range(params.max_tokens or 0):
        with torch.inference_mode():
            logits = model()(torch.tensor([[*prompt, *output]])).logits[0, -1]
        output.append(int(sampler.process(logits, output).argmax()))
    return output


def exact_outcomes(prompt: Sequence[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every possible answer, from plain forwards without a cache."""
    sampler = Sampler(params, prompt)
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(params.max_tokens or 0):
        heads = list(outcomes)
        with torch.inference_mode():
            logits = model()(torch.tensor([[*prompt, *head] for head in heads])).logits[:, -1]
        grown = {}
        for head, row in zip(heads, logits, strict=True):
            distribution = sampler.probs(row, list(head)).double()
            for token in torch.nonzero(distribution).flatten().tolist():
                grown[(*head, token)] = outcomes[head] * float(distribution[token])
        outcomes = grown
    return outcomes


@functools.cache
def expected(*, weary: bool = True) -> dict[tuple[int, ...], float]:
    """The distribution of the answers to `PROMPT` under `SAMPLED`, or under that without a processor of the user's."""
    return exact_outcomes(PROMPT, SAMPLED if weary else UNWEARY)


MOST_CELLS = 40
"""More than there are to compare."""
LEAST = 0.02
"""Probability of a beginning of answers that is compared by itself."""


@functools.cache
def draws(detect: float = 0.2) -> int:
    """Answers by which whatever is so far from the target's distribution, in total variation, fails with 99 %.

    The default is coarse: `test_exact_steps` enumerates the same steps without any error, these answers only show that
    what is enumerated is what runs. The slow tests look closer.
    """
    return draws_for(MOST_CELLS, LEVEL, detect, 0.99)


def sample(engine: LLM, draws: int, *, seeded: bool = False, weary: bool = True) -> Counter[tuple[int, ...]]:
    """Answers to `PROMPT` as `expected`, one for each seed or, as most users ask, without any."""
    params = [replace(SAMPLED if weary else UNWEARY, seed=seed if seeded else None) for seed in range(draws)]
    with remembered_distributions():
        outputs = engine.generate(as_prompts([PROMPT] * draws), params)
    return Counter(tuple(tokens) for tokens in tokens_of(outputs))


@contextmanager
def remembered_distributions() -> Iterator[None]:
    """Each distribution is made once per (logits, output, temperature): the same few nodes come up thousands of
    times."""
    make, known = Sampler.probs, dict[tuple[bytes, tuple[int, ...], float | None], torch.Tensor]()

    def probs(self: Sampler, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        key = (logits.mul(1e4).round().numpy().tobytes(), tuple(output), self.params.temperature)
        if key not in known:
            known[key] = make(self, logits, output)
        return known[key].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "probs", probs)
        yield


def p_value(counts: Mapping[tuple[int, ...], int], distribution: Mapping[tuple[int, ...], float]) -> float:
    """Chi-square of counted answers against their distribution; 0 where an impossible answer came out."""
    if any(answer not in distribution for answer in counts):
        return 0.0
    cells = _cells(distribution)
    observed = Counter[tuple[int, ...]]()
    for answer, seen in counts.items():
        observed[_cell(answer, cells)] += seen
    drawn = sum(counts.values())
    statistic = sum((observed[cell] - chance * drawn) ** 2 / (chance * drawn) for cell, chance in cells.items())
    return float(stats.chi2.sf(statistic, len(cells) - 1))


def _cells(distribution: Mapping[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Likely beginnings of answers, each without its own likely continuations; what is left over is one cell."""
    masses = Counter[tuple[int, ...]]()
    for answer, chance in distribution.items():
        for length in range(len(answer) + 1):
            masses[answer[:length]] += chance  # type: ignore[assignment]
    likely = {beginning for beginning, mass in masses.items() if mass >= LEAST}
    cells = Counter[tuple[int, ...]]()
    for answer, chance in distribution.items():
        cells[_cell(answer, likely)] += chance  # type: ignore[assignment]
    few = [cell for cell, chance in cells.items() if cell and chance < LEAST / 4]
    for cell in few:
        cells[()] += cells.pop(cell)
    return dict(cells)


def _cell(answer: tuple[int, ...], cells: Container[tuple[int, ...]]) -> tuple[int, ...]:
    lengths = range(len(answer), -1, -1)
    return next((answer[:length] for length in lengths if answer[:length] in cells), ())


def trees_of(variant: Variant, params: SamplingParams = SAMPLED) -> list[TokenTree]:
    """The trees of one answer's steps, as the rules see them."""
    found: list[TokenTree] = []
    cls = drafter_class(variant.method)

    class Spy(cls):  # type: ignore[misc, valid-type]
        def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
            trees: list[TokenTree] = super().propose(context, budget)
            found.extend(tree.copy() for tree in trees)
            return trees

    with installed(variant.method, Spy):
        llm(variant).generate(as_prompts([PROMPT]), replace(params, seed=0, max_tokens=12))
    return [tree for tree in found if tree.size]


def without_unlikely(trees: list[TokenTree]) -> list[TokenTree]:
    """A planted bug: rows whose first token is not the likeliest of what it was drawn from draft nothing."""

    def unlikely(tree: TokenTree) -> bool:
        probs = tree.draft_probs.get(0)
        return (
            probs is not None and tree.drawn[1] is not Drawn.DETERMINISTIC and bool(probs[tree.tokens[1]] < max(probs))
        )

    return [TokenTree(tree.tokens[0]) if unlikely(tree) else tree for tree in trees]


@contextmanager
def installed(name: str, cls: type[Drafter]) -> Iterator[None]:
    """`cls` stands in for, or beside, the registered drafters while the context is open."""
    module = types.ModuleType("contract_installed")
    module.Drafter = cls  # type: ignore[attr-defined]
    before = dict(DRAFTERS)
    sys.modules[module.__name__] = module
    DRAFTERS[name] = DrafterEntry(path=f"{module.__name__}:Drafter", summary="of a test")
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        DRAFTERS.clear()
        DRAFTERS.update(before)


@functools.cache
def rules_for(variant: Variant) -> list[str]:
    """The lossless rules for what the variant may draft at a temperature above 0, the default one first."""
    kind = kind_for(variant)
    lossless = [name for name in RULES if rule_named(name).lossless and name != "argmax_walk"]
    default = default_rule(kind, greedy=False)
    return [default, *(name for name in lossless if rule_named(name).verifies(kind) and name != default)]


def kind_of(tree: TokenTree) -> DraftKind:
    """The narrowest kind that holds for one tree."""
    sampled = [sum(tree.drawn[child] is not Drawn.DETERMINISTIC for child in children) for children in tree.children]
    chain = all(len(children) <= 1 for children in tree.children)
    return DraftKind(sampled=max(sampled) > 0, chain=chain, multipath=max(sampled) <= 1)


@functools.cache
def _unused(variant: Variant) -> Drafter:
    """The variant's drafter, of an engine that runs nothing."""
    (active,) = llm(variant).engine.drafting._active.values()
    return active.drafter


def kind_for(variant: Variant, params: SamplingParams = SAMPLED) -> DraftKind:
    """What the variant's drafter says that it may draft."""
    return _unused(variant).kind(Sampler(params, PROMPT))
