"""Drafting without some sub-layers: what a draft pass computes, where it stops, and the searches for a set."""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from contract.harness import PROMPTS, SAMPLED, VOCABULARY, as_prompts, model, tokens_of
from drafters.asking import DRAWN, GREEDY, setup_for, trees_of
from forerun import LLM, SamplingParams
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.drafters.self_drafting.skip_layers import (
    GOOD_ENOUGH,
    OnlineSearch,
    Search,
    SkipFile,
    SkipLayersConfig,
    SkipLayersDrafter,
    SkipSet,
    Space,
    Threshold,
    agreement,
    every,
    names,
    parse,
    structure_hash,
)
from forerun.drafters.self_drafting.tuning import Costs, Probe, tune, worth
from forerun.errors import ArgumentError, DataError
from forerun.model import TransformersTarget
from forerun.model.layers import cache_argument
from llamas import tiny_llama
from selection import slow

LAYERS = 5
SKIP = ["1.attn", "2.mlp", "3.attn", "3.mlp"]
TEXT = [1, 5, 3, 1, 5, 7, 2]


def deep(seed: int = 0) -> LlamaForCausalLM:
    """Five layers in float32."""
    return tiny_llama(VOCABULARY, seed, num_hidden_layers=LAYERS, max_position_embeddings=96, initializer_range=0.25)


def drafter(weights: LlamaForCausalLM | None = None, *, rows: int = 1, **options: Any) -> SkipLayersDrafter:
    return SkipLayersDrafter(SkipLayersConfig(**{"skip": SKIP, **options}), setup_for(weights or deep(), rows=rows))


def propose(
    made: SkipLayersDrafter, texts: list[list[int]], params: SamplingParams = GREEDY, **budget: int
) -> list[TokenTree]:
    """A proposal for rows whose texts are prefilled here, but for the root."""
    made.target.truncate(range(len(texts)), [0] * len(texts))
    made.target.prefill(range(len(texts)), [text[:-1] for text in texts])
    return trees_of(made, texts, params, **budget)


class Nothing(torch.nn.Module):
    """Adds nothing; attention answers with a tuple."""

    def __init__(self, attention: bool) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return (zeros, None) if self.attention else zeros


@torch.inference_mode()
def naive(weights: LlamaForCausalLM, text: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits (K, V) before each of `tokens`: the prefix by the whole model, the rest with the sub-layers cut out."""
    cut = copy.deepcopy(weights)
    for layer, part in parse(SKIP, LAYERS):
        name = {"attn": "self_attn", "mlp": "mlp"}[part]
        setattr(cut.model.layers[layer], name, Nothing(part == "attn"))
    cache = weights(torch.tensor([text[:-1]]), use_cache=True)[cache_argument(weights)]
    found = []
    for token in (text[-1], *tokens[:-1]):
        answer = cut(torch.tensor([[token]]), use_cache=True, **{cache_argument(weights): cache})
        found.append(answer.logits[0, -1])
    return torch.stack(found)


def test_a_draft_pass_is_the_model_with_these_sublayers_cut_out() -> None:
    weights = deep()
    (tree,) = propose(drafter(weights, num_speculative_tokens=5), [TEXT], DRAWN)
    wanted = naive(weights, TEXT, tree.tokens[1:]).softmax(-1)
    drawn_from = torch.stack([tree.draft_probs[node] for node in range(5)])
    torch.testing.assert_close(drawn_from, wanted, atol=1e-5, rtol=1e-4)
    with torch.inference_mode():
        whole = weights(torch.tensor([TEXT])).logits[0, -1].softmax(-1)
    assert float((whole - wanted[0]).abs().max()) > 0.01


@contextmanager
def counted(weights: LlamaForCausalLM) -> Iterator[Counter[str]]:
    """Tokens that each sub-layer ran."""
    count: Counter[str] = Counter()

    def note(name: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, _output: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            count[name] += states.shape[0] * states.shape[1]

        return hook

    handles = []
    for index, layer in enumerate(weights.model.layers):
        for part, module in (("attn", layer.self_attn), ("mlp", layer.mlp)):
            handles.append(module.register_forward_hook(note(f"{index}.{part}"), with_kwargs=True))
    yield count
    for handle in handles:
        handle.remove()


def test_a_drafted_token_runs_the_kept_sublayers_once_and_no_other() -> None:
    weights = deep()
    made = drafter(weights, num_speculative_tokens=4)
    made.target.prefill([0], [TEXT[:-1]])
    made.target.truncate([0], [0])
    with counted(weights) as before:
        made.target.prefill([0], [TEXT[:-1]])
    with counted(weights) as count:
        propose(made, [TEXT])
    count.subtract(before)
    kept = {name: 4 for name in names(every(LAYERS)) if name not in SKIP}
    assert +count == Counter(kept)


def test_drafting_stops_behind_the_first_unlikely_token() -> None:
    (whole,) = propose(drafter(num_speculative_tokens=8), [TEXT])
    raw = naive(deep(), TEXT, whole.tokens[1:]).softmax(-1).amax(-1).tolist()
    least = sorted(raw)[2]
    (stopped,) = propose(drafter(num_speculative_tokens=8, stop_below=least + 1e-4), [TEXT])
    first = next(index for index, confidence in enumerate(raw) if confidence <= least)
    assert 0 < first + 1 < 8, "this text has to stop in the middle"
    assert stopped.size == first + 1
    assert stopped.tokens == whole.tokens[: first + 2]


def test_rows_stop_for_themselves() -> None:
    texts = [TEXT, [4, 9, 4, 9], [11, 0, 7, 6], [2, 2, 2]]
    alone = [propose(drafter(stop_below=0.4), [text])[0] for text in texts]
    together = propose(drafter(rows=4, stop_below=0.4), texts)
    assert [tree.tokens for tree in together] == [tree.tokens for tree in alone]
    assert len({tree.size for tree in alone}) > 1


def test_the_threshold_follows_acceptance() -> None:
    threshold = Threshold(0.5, 0.9)
    for _ in range(100):
        threshold.update(1, 4, 0.9, whole=False)
    assert threshold.value == pytest.approx(0.6, abs=1e-6)
    for _ in range(100):
        threshold.update(4, 4, 0.9, whole=False)
    assert threshold.value == pytest.approx(0.505, abs=0.004)
    before = threshold.value
    threshold.update(8, 8, 0.9, whole=True)
    assert threshold.value == before, "nothing was cut off, so a lower threshold would change nothing"


def test_an_adapted_threshold_belongs_to_a_request() -> None:
    made = drafter(adapt_threshold=True)
    assert made.stop_below(0, greedy=True) == 0.8
    assert made.stop_below(0, greedy=False) == 0.8, "the same request"
    made.truncate([0], [0])
    assert made.stop_below(0, greedy=False) == 0.5
    assert drafter(adapt_threshold=True, stop_below=0.3).stop_below(0, greedy=True) == 0.3


def test_agreement_counts_every_node_that_was_asked() -> None:
    tree, other = TokenTree(1), TokenTree(1)
    tree.add_path([3, 4])
    other.add(5, 0)
    logits = torch.zeros(2, 3, VOCABULARY)
    logits[0, 0, 3] = logits[0, 1, 7] = logits[1, 0, 5] = 1.0
    common = {"prompt_length": 1, "sampler": Sampler(GREEDY, [1]), "seed": 0, "stop_ids": frozenset(), "tokens_left": 9}
    rows = [Row(cache_row=row, tokens=[1], **common) for row in range(2)]
    scores = Scores(logits, rows, [tree, other], ["argmax_walk"] * 2)
    assert [agreement(scores, index) for index in range(2)] == [(1, 2), (1, 1)]


def swift(**options: Any) -> LLM:
    search = {"search": "swift", "skip_ratio": 0.3, "search_window": 6}
    config = {"method": "skip_layers", "adaptive": False, **search, **options}
    return LLM(deep(), tokenizer=False, speculative_config=config, max_model_len=64, max_num_seqs=3, check=True)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_whatever_swift_tries_the_text_is_that_of_plain_decoding(temperature: float) -> None:
    engine = swift(num_speculative_tokens=3, rule="sample_walk" if temperature else None)
    params = [replace(SAMPLED, temperature=temperature, max_tokens=40, seed=seed) for seed in range(len(PROMPTS))]
    found = engine.generate(as_prompts(PROMPTS), params)
    search = next(iter(engine.engine.drafting._active.values())).drafter.drafter.search
    assert search.candidates >= 3, "several sets must have drafted"
    assert tokens_of(found) == tokens_of(engine.generate(as_prompts(PROMPTS), params, speculative=False))


def written(path: Path, **changes: Any) -> Path:
    """A file as the tuner writes it, for `deep()`."""
    target = TransformersTarget.load(deep(), slots=32)
    SkipFile(
        **{"model": "deep", "num_layers": LAYERS, "structure": structure_hash(target), "skip": parse(SKIP, LAYERS)},
        num_speculative_tokens=3,
    ).write(path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, **changes}))
    return path


def test_a_tuned_file_is_as_good_as_its_list_unless_it_is_missing_or_cut_short(tmp_path: Path) -> None:
    (found,) = propose(drafter(skip=str(written(tmp_path / "skip.json"))), [TEXT])
    (named,) = propose(drafter(), [TEXT])
    assert found.size and found.tokens == named.tokens
    path = written(tmp_path / "skip.json")
    path.write_text(path.read_text()[:40])
    for broken in (path, tmp_path / "none.json"):
        with pytest.raises(DataError, match="is no JSON"):
            drafter(skip=str(broken))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"num_layers": 9}, ArgumentError, "9 layers; this model has 5"),
        ({"structure": "0" * 16}, ArgumentError, "built differently"),
        ({"format": "other"}, DataError, "not a file that forerun tune"),
        ({"skip": ["9.mlp"]}, ArgumentError, "no sub-layer '9.mlp'"),
        ({"skip": None}, DataError, "damaged"),
        ({"num_layers": None}, DataError, "damaged"),
    ],
)
def test_another_models_file_is_refused(tmp_path: Path, changes: dict[str, Any], error: Any, says: str) -> None:
    path = written(tmp_path / "skip.json", **changes)
    with pytest.raises(error, match=says):
        drafter(skip=str(path))


@pytest.mark.parametrize(
    ("skip", "says"),
    [
        (["5.mlp"], r"no sub-layer '5.mlp'; the model's are 0.attn, 0.mlp, ..., 4.attn, 4.mlp"),
        (["1.atn"], "Did you mean '1.attn'"),
        ([], "nothing is skipped"),
        (names(every(LAYERS)), "all 10 sub-layers are skipped"),
    ],
)
def test_a_senseless_set_is_refused(skip: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        drafter(skip=skip)


def test_swift_needs_layers_to_choose_from() -> None:
    with pytest.raises(ArgumentError, match="keeps the first and the last layer"):
        drafter(model(), skip=None, search="swift")


COUNT = 14
"""Sub-layers of the planted objective: 16382 subsets."""


def planted(seed: int) -> tuple[Space, SkipSet, dict[SkipSet, float]]:
    """A space, its best subset, and the value of every subset: effects that add up, and pairs that do not."""
    random = np.random.default_rng(seed)
    effects, pairs = random.normal(0, 1, COUNT), np.triu(random.normal(0, 0.3, (COUNT, COUNT)), 1)
    space = Space(allowed=every(COUNT // 2))
    chosen = (itertools.combinations(space.allowed, size) for size in range(1, COUNT))
    subsets = [frozenset(some) for some in itertools.chain.from_iterable(chosen)]
    vectors = np.stack([space.vector(skip) for skip in subsets])
    values = vectors @ effects + ((vectors @ pairs) * vectors).sum(1)
    table = dict(zip(subsets, values.tolist(), strict=True))
    return space, max(table, key=lambda skip: table[skip]), table


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_the_planted_best_subset_is_found(seed: int) -> None:
    space, best, table = planted(seed)
    search = Search(space, seed=seed)
    for _ in range(90):
        skip = search.ask()
        search.tell(skip, table[skip])
    found = max(search.trials, key=lambda trial: trial.value).skip
    assert found == best or table[found] > np.quantile(list(table.values()), 0.9999)
    assert len({trial.skip for trial in search.trials}) == 90, "no subset is tried twice"


def test_a_small_space_is_tried_out_and_left() -> None:
    search = Search(Space(allowed=every(2)))
    tried = []
    while (skip := search.ask()) is not None:
        tried.append(skip)
        search.tell(skip, float(len(skip)))
    assert len(tried) == len(set(tried)) == 2**4 - 2


def agreement_of(skip: SkipSet) -> float:
    """A model whose middle layers can go, whose others cannot."""
    return 1.0 - sum(0.02 if 3 <= layer <= 6 else 0.3 for layer, _ in skip) / 2


def searching(ratio: float = 0.3, **options: int) -> OnlineSearch:
    return OnlineSearch(10, SkipLayersConfig(search="swift", skip_ratio=ratio, **options))


def decode(search: OnlineSearch, steps: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        skip = search.choose()
        search.observe(skip, int(random.binomial(8, max(0.0, agreement_of(skip)))), 8)


def test_swift_finds_a_better_set_than_it_began_with_and_keeps_first_and_last() -> None:
    search = searching(search_patience=200)
    begin = agreement_of(search.best)
    decode(search, 1500)
    assert len(search.best) == 6
    assert {layer for layer, _ in search.best}.isdisjoint({0, 9})
    assert agreement_of(search.best) > begin + 0.15


def test_swift_ends_at_its_score_and_then_only_the_best_drafts() -> None:
    search = searching(search_window=16)
    while not search.done:
        skip = search.choose()
        search.observe(skip, 8, 8)
    assert search._best.score >= GOOD_ENOUGH
    assert {search.choose() for _ in range(10)} == {search.best}


def test_swift_loses_patience() -> None:
    search = searching(search_window=16, search_patience=5)
    first = search.best
    for _ in range(60):
        skip = search.choose()
        search.observe(skip, 6 if skip == first else 1, 8)
    assert search.done and search.candidates == 5 and search.best == first


def test_a_lucky_set_is_replaced() -> None:
    """The best set's score is measured on while it drafts."""
    search = searching(search_window=16)
    first = search.best
    for _ in range(8):
        search.observe(search.choose(), 7, 8)
    while search.best == first and search.candidates < 50:
        skip = search.choose()
        search.observe(skip, 2 if skip == first else 5, 8)
    assert search.best != first


@pytest.mark.parametrize("ratio", [0.01, 0.95])
def test_a_ratio_that_leaves_no_choice_is_refused(ratio: float) -> None:
    with pytest.raises(ArgumentError, match="skip_ratio"):
        searching(ratio)


def test_what_a_set_is_worth_written_out() -> None:
    costs = Costs(rest_ms=1.0, sublayer_ms={"attn": 2.0, "mlp": 3.0}, verify_ms=(11.0, 12.0, 13.0, 14.0))
    skip = frozenset({(0, "attn"), (1, "mlp")})
    found = worth(skip, [0, 3, 3, 1], costs, 2)
    assert found.draft_ms == 1 + 3 + 2
    candidates = {1: (6 + 12) / (1 + 3 / 4), 2: (12 + 13) / (1 + 5 / 4), 3: (18 + 14) / (1 + 7 / 4)}
    assert found.num_speculative_tokens == min(candidates, key=lambda length: candidates[length])
    assert found.ms_per_token == pytest.approx(min(candidates.values()))
    assert found.mean_acceptance_length == pytest.approx(1 + 5 / 4) or found.num_speculative_tokens != 2


def probe(weights: LlamaForCausalLM, temperature: float = 0.0, tokens: int = 20) -> Probe:
    target = TransformersTarget.load(weights, rows=2, slots=96)
    params = SamplingParams(temperature=temperature, top_k=0)
    return Probe(target, [TEXT, [4, 9] * 3], length=3, tokens=tokens, params=params)


def still(weights: LlamaForCausalLM, layers: list[int]) -> LlamaForCausalLM:
    """The same model; these layers add nothing any more."""
    with torch.no_grad():
        for layer in layers:
            weights.model.layers[layer].self_attn.o_proj.weight.zero_()
            weights.model.layers[layer].mlp.down_proj.weight.zero_()
    return weights


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_layers_that_add_nothing_can_go(temperature: float) -> None:
    measured = probe(still(deep(), [1, 2]), temperature)
    free = frozenset({(1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp")})
    assert set(measured.accepted(free)) == {3}
    dear = measured.accepted(frozenset({(0, "attn"), (0, "mlp"), (4, "mlp")}))
    assert sum(dear) / len(dear) < 2.5
    assert measured.accepted(free) == measured.accepted(free), "every set decodes the same text anew"


def test_tuning_finds_the_layers_that_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = probe(still(deep(), [1, 2]), tokens=8)
    costs = Costs(rest_ms=0.1, sublayer_ms={"attn": 1.0, "mlp": 1.0}, verify_ms=(10.0, 10.1, 10.2, 10.3))
    monkeypatch.setattr(measured, "costs", lambda: costs)
    found = tune(measured, LAYERS, iterations=30)
    assert {(1, "attn"), (1, "mlp"), (2, "attn"), (2, "mlp")} <= found.best.skip
    assert len(found.trials) == 30 and not found.interrupted
    assert found.speedup == 10.0 / found.best.ms_per_token > 1.2
