"""Drafting without some sub-layers: what a draft pass computes, where it stops, what is refused, SWIFT."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from contract.harness import PROMPTS, SAMPLED, VOCABULARY, as_prompts, model, tokens_of
from forerun import LLM, SamplingParams
from forerun.core.sampling import Rng, Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.drafters.self_drafting.skip_layers import (
    SkipFile,
    SkipLayersConfig,
    SkipLayersDrafter,
    Threshold,
    agreement,
    every,
    names,
    parse,
    structure_hash,
)
from forerun.errors import ArgumentError, DataError
from forerun.model import Target
from forerun.model.layers import cache_argument
from forerun.types import Budget
from llamas import tiny_llama

LAYERS = 5
SKIP = ["1.attn", "2.mlp", "3.attn", "3.mlp"]
TEXT = [1, 5, 3, 1, 5, 7, 2]


def deep(seed: int = 0) -> LlamaForCausalLM:
    """Five layers in float32."""
    return tiny_llama(VOCABULARY, seed, num_hidden_layers=LAYERS, max_position_embeddings=96, initializer_range=0.25)


def drafter(weights: LlamaForCausalLM | None = None, *, rows: int = 1, **options: Any) -> SkipLayersDrafter:
    target = Target.load(weights or deep(), rows=rows, slots=96)
    setup = DrafterSetup(target=target, tokenizer=None, rows=rows, slots=96)
    return SkipLayersDrafter(SkipLayersConfig(**{"skip": SKIP, **options}), setup)


def propose(
    made: SkipLayersDrafter, texts: list[list[int]], *, temperature: float = 0.0, nodes: int = 64, depth: int = 64
) -> list[TokenTree]:
    """A proposal for rows whose texts are prefilled here, but for the root."""
    made.target.truncate(range(len(texts)), [0] * len(texts))
    made.target.prefill(range(len(texts)), [text[:-1] for text in texts])
    context = DraftContext(
        rows=list(range(len(texts))),
        tokens=texts,
        prompt_lengths=[len(text) for text in texts],
        fresh=[0] * len(texts),
        samplers=[Sampler(SamplingParams(temperature=temperature, top_k=0), text) for text in texts],
        rng=[Rng(row, len(text)) for row, text in enumerate(texts)],
        hidden_states={},
    )
    return made.propose(context, Budget(nodes=[nodes] * len(texts), depth=[depth] * len(texts)))


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
    (tree,) = propose(drafter(weights, num_speculative_tokens=5), [TEXT], temperature=1.0)
    wanted = naive(weights, TEXT, tree.tokens[1:]).softmax(-1)
    drawn_from = torch.stack([tree.draft_probs[node] for node in range(5)])
    torch.testing.assert_close(drawn_from, wanted, atol=1e-5, rtol=1e-4)
    with torch.inference_mode():
        whole = weights(torch.tensor([TEXT])).logits[0, -1].softmax(-1)
    assert float((whole - wanted[0]).abs().max()) > 0.01


def test_every_row_drafts_for_itself() -> None:
    weights, texts = deep(), [TEXT, [3, 8], [4, 9] * 6]
    together = propose(drafter(weights, rows=3, num_speculative_tokens=4), texts)
    for tree, text in zip(together, texts, strict=True):
        assert tree.size == 4 and tree.tokens[1:] == naive(weights, text, tree.tokens[1:]).argmax(-1).tolist()
        assert propose(drafter(weights, num_speculative_tokens=4), [text])[0].tokens == tree.tokens


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


@pytest.mark.parametrize(("nodes", "depth", "count"), [(3, 9, 3), (9, 2, 2), (0, 9, 0), (9, 0, 0)])
def test_the_budget_is_kept(nodes: int, depth: int, count: int) -> None:
    assert propose(drafter(), [TEXT], nodes=nodes, depth=depth)[0].size == count


def test_a_row_at_the_end_of_the_context_does_not_cost_the_others_their_draft() -> None:
    made = drafter(rows=2, num_speculative_tokens=6)
    assert [tree.size for tree in propose(made, [[1] * 94, TEXT])] == [2, 6]


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
    rows = [
        Row(
            cache_row=row,
            tokens=[1],
            prompt_length=1,
            sampler=Sampler(SamplingParams(temperature=0.0, top_k=0), [1]),
            seed=0,
            stop_ids=frozenset(),
            tokens_left=9,
        )
        for row in range(2)
    ]
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
    target = Target.load(deep(), slots=32)
    SkipFile(
        model="deep",
        num_layers=LAYERS,
        structure=structure_hash(target),
        skip=parse(SKIP, LAYERS),
        num_speculative_tokens=3,
    ).write(path)
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, **changes}))
    return path


def test_a_tuned_file_is_as_good_as_its_list(tmp_path: Path) -> None:
    (found,) = propose(drafter(skip=str(written(tmp_path / "skip.json"))), [TEXT])
    (named,) = propose(drafter(), [TEXT])
    assert found.size and found.tokens == named.tokens


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


def test_a_missing_or_truncated_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "skip.json")
    path.write_text(path.read_text()[:40])
    for broken in (path, tmp_path / "none.json"):
        with pytest.raises(DataError, match="is no JSON"):
            drafter(skip=str(broken))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs either skip"),
        ({"skip": SKIP, "search": "swift"}, "needs either skip"),
        ({"search": "swft"}, "Did you mean 'swift'"),
        ({"search": "swift", "skip_ratio": 1.5}, "skip_ratio must lie between"),
        ({"search": "swift", "search_window": 0}, "search_window must be at least 1"),
        ({"skip": SKIP, "stop_below": 0.0}, "stop_below must lie between"),
        ({"skip": SKIP, "target_acceptance": 1.0}, "target_acceptance must lie"),
        ({"skip": SKIP, "draw": "idd"}, "skip_layers: draw is one of"),
        ({"skip": SKIP, "shape": (2, 0)}, "skip_layers: shape"),
    ],
)
def test_senseless_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        SkipLayersConfig(**options)


@pytest.mark.parametrize(
    ("skip", "says"),
    [
        (["5.mlp"], r"no sub-layer '5.mlp'; the model's are 0.attn, 0.mlp, ..., 4.attn, 4.mlp"),
        (["1.atn"], "Did you mean '1.attn'"),
        ([], "nothing is skipped"),
        (names(every(LAYERS)), "all 10 sub-layers are skipped"),
    ],
)
def test_sets_that_make_no_sense_are_refused(skip: list[str], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        drafter(skip=skip)


def test_swift_needs_layers_to_choose_from() -> None:
    target = Target.load(model(), slots=32)
    setup = DrafterSetup(target=target, tokenizer=None, rows=1, slots=32)
    with pytest.raises(ArgumentError, match="keeps the first and the last layer"):
        SkipLayersDrafter(SkipLayersConfig(search="swift"), setup)
