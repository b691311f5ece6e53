"""What the contract suite runs on: tiny models, every registered drafter, exact distributions of outcomes, chi-square.

A new drafter is tested without a line here. Where it needs options to run on the tiny target, or has several ways of
drawing, `VARIANTS` names them.
"""

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

from contract.heads import Heads
from contract.tongues import LETTERS, OTHERS, WORDS, retold, tongue
from forerun import LLM, SamplingParams
from forerun.certify.chi_square import draws_for
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
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter
from forerun.drafters import DRAFTERS, DrafterEntry, drafter_class, methods
from forerun.drafters.kinds import KINDS
from forerun.heads.layers import LatentConfig
from forerun.training.data.datastore import write as write_datastore
from forerun.types import Budget, DraftKind, Drawn
from forerun.writing import TokenizerIdentity
from llamas import HEAD_SIZES
from selection import one_of_each

NEVER = 6
"""A token that the distribution under test never gives."""


def weary(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A user's processor: makes one token less likely, depending on the last one."""
    return logits.index_add(0, torch.tensor([(tokens[-1] + 2) % VOCABULARY]), torch.tensor([-0.7]))


SAMPLED = SamplingParams(
    **{"temperature": 0.8, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2},
    **{"presence_penalty": 0.3, "frequency_penalty": 0.4},
    **{"allowed_token_ids": [token for token in range(VOCABULARY) if token != NEVER], "logit_bias": {4: 0.5}},
    **{"logits_processors": (weary,), "max_tokens": 5},
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


HEADS = Heads(
    model=model(),
    layers={**HEAD_SIZES, "vocab_size": VOCABULARY},
    latent=LatentConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12),
    known=[0, 1, 2, 3, 5, 7, 8, 10, 11],
)
eagle_head, medusa_head, dflash_head = HEADS.eagle, HEADS.medusa, HEADS.dflash


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


def _translated(pieces: Sequence[str], drafts: Sequence[str], **options: Any) -> dict[str, Any]:
    tokenizers = {"target_tokenizer": tongue(pieces), "tokenizer": tongue(drafts)}
    return {"model": retold(relative(), pieces, drafts), **tokenizers, **options}


def _member(method: str = "ngram", **options: Any) -> dict[str, Any]:
    """A drafter as a member of another; a draft model by default drafts with `relative()`."""
    model = {"model": relative()} if method in ("draft_model", "cascade") else {}
    return {"method": method, **model, **options}


CHAIN, TREE = {"num_speculative_tokens": 3}, (3, 2, 1)
DRAWN, TWO_LEVELS = _member("draft_model", **CHAIN), _member("cascade", num_speculative_tokens=2, inner=_member())
DOMINO = {"emb_dim": 6, "gru_hidden_dim": 5}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "ngram": {
        "chain": CHAIN,
        "trie": {**CHAIN, "max_branches": 3},
        "frequent": {**CHAIN, "max_branches": 2, "match": "most_frequent"},
    },
    "lookahead": {
        "small": {"window": 3, "level": 3, "guesses": 3},
        "window-only": {"window": 4, "level": 3, "guesses": 4, "copy_text": False},
    },
    "jacobi": {"chain": CHAIN},
    "suffix": {"chain": {**CHAIN, "max_spec_offset": 1}, "tree": {**CHAIN, "max_spec_offset": 1, "nodes": 5}},
    "prediction": {"chain": {**CHAIN, "text": [1, 5, 7, 2, 1, 5, 3, 9, 4, 8, 8]}},
    "first_of": {
        "copy-or-model": {"drafters": [_member(**CHAIN), DRAWN], "min_tokens": 0.6},
        "sampled": {"drafters": [_member(prompt_lookup_min=2), DRAWN], "min_tokens": 0, "greedy_with_seed": False},
    },
    "merge": {
        "given": {"drafters": [_member(), _member("draft_model", shape=TREE)], "nodes": 6},
        "beside-a-chain": {"drafters": [_member(max_branches=3), _member("draft_model")], "greedy_with_seed": False},
        "beside-a-tree": {"drafters": [_member("draft_model", shape=TREE), _member()], "greedy_with_seed": False},
    },
    "cascade": {
        "tail": {"model": relative(), **CHAIN, "inner": _member(max_branches=2), "tail": 3},
        "three-levels": {"model": relative(), **CHAIN, "inner": TWO_LEVELS},
    },
    "draft_model": {
        "chain": {"model": relative(), **CHAIN},
        "given": {"model": relative(), **CHAIN, "draw": "deterministic"},
        "tree": {"model": relative(), "shape": TREE},
        "iid-tree": {"model": relative(), "shape": TREE, "draw": "iid"},
        "given-tree": {"model": relative(), "shape": TREE, "draw": "deterministic"},
        "greedy-k-tree": {"model": relative(), "shape": TREE, "draw": "greedy_k"},
        "hot": {"model": relative(), **CHAIN, "temperature": 1.7},
        "irregular-tree": {"model": relative(), "tree": (0, 0, 1, 1, 2, 4)},
        "irregular-given-tree": {"model": relative(), "tree": (0, 0, 0, 1, 1, 2), "draw": "deterministic"},
    },
    "pard": {
        "best-first": {"model": pard_model(), **CHAIN, "nodes": 8},
        "best-first-given": {"model": pard_model(), "nodes": 8, "draw": "deterministic"},
        "chain": {"model": pard_model(), "shape": (1, 1, 1)},
        "one-token": {"model": pard_model(), "shape": (2,)},
        "sampled-tree": {"model": pard_model(), "shape": TREE},
        "stopping": {"model": pard_model(), "shape": (1, 1, 1), "stop": "svip"},
    },
    "early_exit": {"chain": {"exit_layer": 1, **CHAIN}, "tree": {"exit_layer": 1, "shape": TREE}},
    "quantized_self": {"chain": CHAIN},
    "skip_layers": {
        "chain": {"skip": ["1.mlp"], **CHAIN},
        "stopping-tree": {"skip": ["1.mlp"], "shape": TREE, "adapt_threshold": True},
    },
    "rest": {
        "trie": {"datastore": _corpus().name, **CHAIN, "min_match": 1, "max_match": 3, "nodes": 8},
        "chain": {"datastore": _corpus().name, **CHAIN, "min_match": 1, "max_hits": 1},
    },
    "recycling": {
        "fixed": {**CHAIN, "nodes": 8, "top_k": 3},
        "adaptive": {**CHAIN, "nodes": 8, "top_k": 3, "adaptive_tree": True},
    },
    "tli": {"chain": _translated(WORDS, OTHERS, **CHAIN), "tree": _translated(WORDS, OTHERS, shape=TREE)},
    "slem": {
        "letters": _translated(LETTERS, LETTERS[::-1], **CHAIN),
        "words": _translated(WORDS, OTHERS, num_speculative_tokens=4, look_behind=2),
    },
    "eagle3": {
        "chain": {"model": HEADS.eagle(), **CHAIN},
        "dynamic": {"model": HEADS.eagle(), **CHAIN, "top_k": 3, "nodes": 8},
        "dynamic-given": {"model": HEADS.eagle(), **CHAIN, "top_k": 3, "nodes": 8, "draw": "deterministic"},
        "tree": {"model": HEADS.eagle(), "shape": TREE},
        "greedy-k-tree": {"model": HEADS.eagle(), "shape": TREE, "draw": "greedy_k"},
        "latent-chain": {"model": HEADS.eagle(latent=True), **CHAIN},
        "latent-dynamic": {"model": HEADS.eagle(latent=True), "top_k": 3, "nodes": 8},
    },
    "eagle": {"chain": {"model": HEADS.eagle(1), **CHAIN}},
    "eagle2": {"dynamic": {"model": HEADS.eagle(1), **CHAIN, "top_k": 3, "nodes": 8}},
    "medusa": {
        "best-first": {"model": HEADS.medusa(), "nodes": 8},
        "chain": {"model": HEADS.medusa(), "shape": (1, 1, 1), "draw": "iid"},
        "sampled-tree": {"model": HEADS.medusa(), "nodes": 6, "draw": "without_replacement"},
        "sparse-tree": {"model": HEADS.medusa(), "tree": (0, 0, 0, 1, 1, 2, 4)},
    },
    "hydra": {
        "tree": {"model": HEADS.hydra(), "shape": TREE},
        "chain": {"model": HEADS.hydra(num_hidden_layers=0), **CHAIN},
        "dynamic": {"model": HEADS.hydra(), "top_k": 3, "nodes": 8},
        "sparse-tree": {"model": HEADS.hydra(), "tree": (0, 0, 0, 1, 1, 2, 4)},
    },
    "mlp_speculator": {
        "chain": {"model": HEADS.mlp(), **CHAIN},
        "tree": {"model": HEADS.mlp(tie_weights=True, inner_dim=20), "shape": TREE},
        "dynamic": {"model": HEADS.mlp(scale_input=True), "top_k": 3, "nodes": 8},
    },
    "dflash": {
        "best-first": {"model": HEADS.dflash(), "nodes": 8},
        "best-first-given": {"model": HEADS.dflash(), "nodes": 8, "draw": "deterministic"},
        "chain": {"model": HEADS.dflash(), "shape": (1, 1, 1)},
        "sampled-tree": {"model": HEADS.dflash(), "shape": TREE},
        "windows": {"model": HEADS.dflash(sliding_window=6, causal_windows=True), "shape": (1, 1, 1)},
    },
    "dspark": {
        "chain": {"model": HEADS.dflash(markov_rank=6), **CHAIN},
        "tree": {"model": HEADS.dflash(markov_rank=6, markov_head_type="rnn"), "shape": TREE},
        "dynamic": {"model": HEADS.dflash(markov_rank=6), "top_k": 3, "nodes": 8},
    },
    "dflash2": {
        "chain": {"model": HEADS.dflash(selector_rank=5, selector_top_k=5), **CHAIN},
        "tree": {"model": HEADS.dflash(selector_rank=5, selector_top_k=2), "shape": TREE},
        "dynamic": {"model": HEADS.dflash(selector_rank=5, selector_top_k=5), "top_k": 3, "nodes": 8},
    },
    "domino": {
        "chain": {"model": HEADS.dflash(**DOMINO), **CHAIN},
        "tree": {"model": HEADS.dflash(**DOMINO, pure_draft_prefix_len=0), "shape": TREE},
        "dynamic": {"model": HEADS.dflash(**DOMINO), "top_k": 3, "nodes": 8},
    },
    "peagle": {
        "best-first": {"model": HEADS.peagle(), **CHAIN, "nodes": 8},
        "chain": {"model": HEADS.peagle(own_embedding=False), "shape": (1, 1, 1)},
        "one-token": {"model": HEADS.peagle(), "shape": (2,)},
        "sampled-tree": {"model": HEADS.peagle(norm_before_residual=True), "shape": TREE},
        "windows": {"model": HEADS.peagle(sliding_window=6), "shape": (1, 1, 1)},
    },
    "kangaroo": {
        "chain": {"model": HEADS.kangaroo(), **CHAIN},
        "whole-chain": {"model": HEADS.kangaroo(), **CHAIN, "exit_below": 0},
        "tree": {"model": HEADS.kangaroo(sliding_window=6), "shape": TREE, "exit_below": 0.3},
        "dynamic": {"model": HEADS.kangaroo(), **CHAIN, "top_k": 3, "nodes": 8},
    },
    "gemma4_assistant": {
        "chain": {"model": HEADS.assistant(), **CHAIN},
        "groups": {"model": HEADS.assistant(VOCABULARY // 2), "shape": TREE},
        "dynamic": {"model": HEADS.assistant(), **CHAIN, "top_k": 3, "nodes": 8},
    },
    "mtp": {
        "experts": {"model": HEADS.mtp(sparse=True), **CHAIN},
        "chain": {"model": HEADS.mtp(), **CHAIN},
        "two-modules-tree": {"model": HEADS.mtp(2), "shape": TREE},
        "dynamic": {"model": HEADS.mtp(2, True), **CHAIN, "top_k": 3, "nodes": 8},
    },
}
"""Of each drafter the ways in which it is tested."""
VARIANTS = {method: [Variant(method, *way) for way in ways.items()] for method, ways in OPTIONS.items()}


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


def each_way_to_draft(turn: int = 0) -> list[Any]:
    """One head of each family and every other drafter, for what heads of a family do by the same code."""

    def way(variant: Variant) -> str:
        return family_of(variant) if variant.method in KINDS else variant.method

    return one_of_each(variants(), way, turn)


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
    chunk: int = 64,
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
def remembered_distributions(rounded: bool = True) -> Iterator[None]:
    """Each distribution is made once per (logits, output, temperature): the same few nodes come up thousands of
    times. `rounded`: logits that differ in the fifth digit are the same."""
    make, known = Sampler.probs, dict[tuple[Any, ...], torch.Tensor]()

    def probs(self: Sampler, logits: torch.Tensor, output: Sequence[int]) -> torch.Tensor:
        values = logits.mul(1e4).round() if rounded else logits
        key = (values.numpy().tobytes(), tuple(output), self.params.temperature, self.params.top_p)
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
            masses[answer[:length]] += chance
    likely = {beginning for beginning, mass in masses.items() if mass >= LEAST}
    cells = Counter[tuple[int, ...]]()
    for answer, chance in distribution.items():
        cells[_cell(answer, likely)] += chance
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

    class Spy(cls):
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
        drawn = probs is not None and tree.drawn[1] is not Drawn.DETERMINISTIC
        return drawn and bool(probs[tree.tokens[1]] < max(probs))

    return [TokenTree(tree.tokens[0]) if unlikely(tree) else tree for tree in trees]


@contextmanager
def installed(name: str, cls: type[Drafter]) -> Iterator[None]:
    """`cls` stands in for, or beside, the registered drafters while the context is open."""
    module = types.ModuleType("contract_installed")
    module.Drafter = cls
    before = dict(DRAFTERS)
    sys.modules[module.__name__] = module
    DRAFTERS[name] = DrafterEntry(path=f"{module.__name__}:Drafter", summary="of a test")
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        DRAFTERS.clear()
        DRAFTERS.update(before)


def kind_of(tree: TokenTree) -> DraftKind:
    """The narrowest kind that holds for one tree."""
    sampled = [sum(tree.drawn[child] is not Drawn.DETERMINISTIC for child in children) for children in tree.children]
    chain = all(len(children) <= 1 for children in tree.children)
    return DraftKind(sampled=max(sampled) > 0, chain=chain, multipath=max(sampled) <= 1)


@functools.cache
def _unused(variant: Variant) -> Drafter:
    """The variant's drafter, of an engine that runs nothing."""
    (active,) = llm(variant, rows=1, check=False).engine.drafting._active.values()
    return active.drafter


def kind_for(variant: Variant, params: SamplingParams = SAMPLED) -> DraftKind:
    """What the variant's drafter says that it may draft."""
    return _unused(variant).kind(Sampler(params, PROMPT))
