"""Early exit: the target's answers, no layer twice for a token, in batches of every kind; heads and exits refused."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from contract.harness import PROMPTS, SAMPLED, as_prompts, eagle_head, model, plain_greedy, tokens_of
from drafters.asking import setup_for
from forerun import LLM, SamplingParams
from forerun.drafters import build
from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError
from forerun.model import TransformersTarget
from forerun.model.cache import SlotCache
from forerun.types import RequestOutput
from model.families import SHARING, make, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
CHAIN: dict[str, Any] = {"method": "early_exit", "exit_layer": 1, "num_speculative_tokens": 3, "adaptive": False}
TREE: dict[str, Any] = {"method": "early_exit", "exit_layer": 1, "shape": (3, 2, 1), "adaptive": False}


def engine(weights: Any, config: Mapping[str, Any] | None, **options: Any) -> LLM:
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "self_check": False}
    return LLM(weights, tokenizer=False, speculative_config=config, **sizes, **options)


def answers(weights: Any, config: Mapping[str, Any] | None, params: SamplingParams = GREEDY) -> list[list[int]]:
    prompts = [random_tokens(count, count) for count in (1, 9, 17)]
    return tokens_of(engine(weights, config).generate(as_prompts(prompts), params))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma2", "gpt2", "qwen3_moe", "deepseek_v3"])
def test_every_family_gives_the_targets_greedy_answer(name: str) -> None:
    weights = make(name)
    plain = answers(weights, None)
    assert answers(weights, {**CHAIN, "exit_layer": 2}) == plain
    assert answers(weights, {**TREE, "exit_layer": 3}) == plain


@pytest.mark.parametrize("config", [CHAIN, TREE, {**CHAIN, "exit_layer": 3}], ids=["chain", "tree", "late"])
def test_no_layer_runs_twice_for_a_token(config: dict[str, Any]) -> None:
    """One row, so that nothing is padded: what enters a layer are tokens."""
    weights = make("llama")
    llm = engine(weights, config)
    entered: Counter[int] = Counter()
    for index, layer in enumerate(weights.model.layers):
        layer.register_forward_pre_hook(lambda _m, args, index=index: entered.update({index: args[0].shape[1]}))
    prompt = random_tokens(9, 1)
    stats = llm.generate(as_prompts([prompt]), GREEDY)[0].outputs[0].speculation
    assert stats.num_draft_tokens > 20
    steps = stats.num_spec_steps + stats.num_plain_steps
    assert entered == dict.fromkeys(range(4), len(prompt) + steps + stats.num_draft_tokens)


@contextmanager
def written_once(llm: LLM) -> Iterator[Counter[int]]:
    """While open, no layer writes the keys of a slot twice in a step; yields how many tokens each layer evaluated."""
    total: Counter[int] = Counter()
    step: Counter[tuple[int, int]] = Counter()
    update, commit = SlotCache.update, TransformersTarget.commit

    def counted(cache: SlotCache, keys: torch.Tensor, values: torch.Tensor, layer: int, *args: Any, **kwargs: Any):
        slots = cache._window.flat
        step.update((layer, slot) for slot in slots[slots % (cache.slots + 1) != cache.dump].tolist())
        return update(cache, keys, values, layer, *args, **kwargs)

    def committed(target: TransformersTarget, *args: Any) -> None:
        assert max(step.values()) == 1
        total.update(layer for layer, _ in step)
        step.clear()
        commit(target, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotCache, "update", counted)
        patch.setattr(TransformersTarget, "commit", committed)
        yield total


@contextmanager
def resumes() -> Iterator[list[Sequence[int]]]:
    """While open, the counts of every resume that a pass completed."""
    seen: list[Sequence[int]] = []
    complete = TransformersTarget._resume

    def watched(target: TransformersTarget, *args: Any) -> Any:
        seen.append(args[2].counts)
        return complete(target, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersTarget, "_resume", watched)
        yield seen


def mixed(params: SamplingParams, configs: Sequence[Mapping[str, Any] | None]) -> list[RequestOutput]:
    """Requests with drafters of their own, in one batch of the harness's model."""
    llm = engine(model(), None)
    for prompt, config in zip(PROMPTS, configs, strict=False):
        llm.submit(as_prompts([prompt])[0], params, speculative=config or False)
    outputs = []
    with written_once(llm) as total:
        while llm.engine.busy:
            outputs += [chunk.output for chunk in llm.engine.step() if chunk.output is not None]
    assert total[0] == total[1]
    return sorted(outputs, key=lambda output: PROMPTS.index(output.prompt_token_ids))


def test_rows_of_other_drafters_and_plain_rows_beside() -> None:
    params = replace(GREEDY, max_tokens=20)
    for first, second in ((TREE, TREE), (CHAIN, {**CHAIN, "num_speculative_tokens": 1})):
        with resumes() as seen:
            outputs = mixed(params, [{"method": "ngram", "adaptive": False}, first, None, second])
        assert tokens_of(outputs) == [plain_greedy(prompt, params) for prompt in PROMPTS[:4]]
        assert any([count > 0 for count in sorted(counts)] == [False, False, True, True] for counts in seen)


def test_a_drafter_that_reads_lower_layers_makes_the_pass_whole() -> None:
    params = replace(GREEDY, max_tokens=20)
    with resumes() as seen:
        llm = engine(model(), None)
        head = {"method": "eagle3", "model": eagle_head(), "adaptive": False}
        for prompt, config in zip(PROMPTS, (CHAIN, head), strict=False):
            llm.submit(as_prompts([prompt])[0], params, speculative=config)
        seen.clear()
        outputs = []
        while llm.engine.running + llm.engine.waiting == 2:
            outputs += [chunk.output for chunk in llm.engine.step() if chunk.output is not None]
    assert not seen
    for output in outputs:
        assert output.outputs[0].token_ids == plain_greedy(output.prompt_token_ids, params)


def test_where_distributions_have_few_tokens_the_nodes_move_up() -> None:
    """Three children asked for, two tokens to choose from: what was run stays run, and the text is that of plain."""
    params = replace(SAMPLED, top_k=2, max_tokens=20, seed=1)
    prompts = as_prompts(PROMPTS)
    llm = engine(model(), {**TREE, "rule": "sample_walk"})
    with resumes() as seen:
        walked = tokens_of(llm.generate(prompts, params))
    assert walked == tokens_of(llm.generate(prompts, params, speculative=False))
    assert max(max(counts) for counts in seen) == 1 + 2 + 4, "root, its two children, their two children each"


def test_an_exit_that_is_always_right_is_always_kept() -> None:
    """The layers behind the exit add nothing: whole chains and whole paths are kept."""
    weights = make("llama")
    with torch.no_grad():
        for layer in weights.model.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    for config in (CHAIN, {**TREE, "shape": (2, 2, 1)}):
        for params in (replace(GREEDY, max_tokens=13), replace(GREEDY, temperature=0.9, max_tokens=13, seed=1)):
            outputs = engine(weights, config).generate(as_prompts([random_tokens(9, 1)]), params)
            assert outputs[0].outputs[0].speculation.mean_acceptance_length == 4


def test_reproducible_in_bfloat16() -> None:
    prompts = as_prompts([random_tokens(count, count) for count in (1, 9, 17)])
    llm = engine(make("llama", dtype=torch.bfloat16), {**CHAIN, "exit_layer": 2}, reproducible=True)
    params = replace(GREEDY, max_tokens=30)
    with resumes() as seen:
        drafted = tokens_of(llm.generate(prompts, params))
    assert seen
    assert drafted == tokens_of(llm.generate(prompts, params, speculative=False))


@pytest.mark.parametrize("layer", [0, 4, -1])
def test_an_exit_that_there_is_not_is_refused(layer: int) -> None:
    with pytest.raises(ArgumentError, match=r"1\.\.3 for a target of 4 layers"):
        build("early_exit", {"exit_layer": layer}, setup_for(make("llama"), slots=64))


def test_layers_that_cannot_be_run_in_part_are_refused_when_the_drafter_is_built() -> None:
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    weights = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHARING)).eval()
    with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
        engine(weights, CHAIN)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_head_with_the_targets_weights_drafts_what_the_targets_drafts(name: str, tmp_path: Path) -> None:
    weights = make(name)
    norm = {"llama": "model.norm", "gemma3": "model.norm", "gpt2": "transformer.ln_f"}[name]
    tensors = {
        "lm_head.weight": weights.lm_head.weight.detach().clone(),
        "norm.weight": weights.get_submodule(norm).weight.detach().clone(),
    }
    states = torch.randn(2, 3, 64)
    target = setup_for(weights, slots=64).target
    shared = target.lm_head(target.final_norm(states))
    path = tmp_path / "head.safetensors"
    for names in (["lm_head.weight"], ["lm_head.weight", "norm.weight"]):
        save_file({key: tensors[key] for key in names}, path)
        drafter = build("early_exit", {"exit_layer": 2, "head": path}, setup_for(weights, slots=64))
        assert (drafter._head(states) - shared).abs().max() < 1e-5
        assert drafter.memory_bytes() == 4 * sum(tensors[key].numel() for key in names)
    save_file({**tensors, "norm.weight": 2 * tensors["norm.weight"]}, path)
    other = build("early_exit", {"exit_layer": 2, "head": path}, setup_for(weights, slots=64))
    assert (other._head(states) - shared).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "there is no file"),
        ({"norm.weight": (64,)}, "must hold lm_head.weight"),
        ({"lm_head.weight": (99, 64), "lm_head.bias": (99,)}, "nothing else"),
        ({"lm_head.weight": (64, 99)}, r"lm_head\.weight \(99, 64\), .* holds .*\(64, 99\)"),
        ({"lm_head.weight": (99, 64), "norm.weight": (32,)}, r"norm\.weight \(64,\), .* holds .*\(32,\)"),
        ({"lm_head.weight": (99, 64)}, "corrupt"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tensors: dict[str, tuple[int, ...]], message: str, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    if tensors:
        save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, path)
    if message == "corrupt":
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=message):
        build("early_exit", {"exit_layer": 2, "head": str(path)}, setup_for(make("llama"), slots=64))
