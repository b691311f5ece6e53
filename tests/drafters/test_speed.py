"""The example of a drafter outside the package, SPEED, on a decoder that repeats its layers.

The contract suite's own tests, the passes it takes, what is refused.
"""

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract import harness, test_cache, test_distribution, test_ends, test_greedy
from contract.harness import SAMPLED, as_prompts, tokens_of
from drafters.asking import setup_for
from drafters.tied import METHOD, SPEED, tie, tied
from forerun import LLM, SamplingParams
from forerun.drafters import build
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import TransformersTarget
from model.families import make, random_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The contract suite's parts run on the tied model."""
    for module in (harness, test_ends):
        monkeypatch.setattr(module, "model", lambda seed=0: tied())
    monkeypatch.setattr(harness, "_greedy_answers", {})
    params = {True: SAMPLED, False: harness.UNWEARY}
    probs = functools.cache(lambda weary: harness.exact_outcomes(harness.PROMPT, params[weary]))
    monkeypatch.setattr(test_distribution, "expected", lambda *, weary: probs(weary))
    yield


@pytest.mark.usefixtures("contract")
def test_the_contract() -> None:
    test_greedy.test_greedy_output_is_the_targets(SPEED)
    test_distribution.test_the_default_rule_keeps_the_distribution(SPEED, 0.4, weary=False)
    test_ends.test_max_tokens(SPEED)
    test_cache.test_the_cache_is_that_of_a_fresh_prefill(SPEED)


def engine(weights: Any, tokens: int, **options: Any) -> LLM:
    config = {"method": METHOD, "num_speculative_tokens": tokens, "adaptive": False}
    sizes = {"max_num_seqs": 4, "max_model_len": 64, "self_check": False}
    return LLM(weights, tokenizer=False, speculative_config=config, **sizes, **options)


@pytest.mark.parametrize(("name", "block"), [("qwen3", 1), ("gemma3", 2), ("deepseek_v3", 2)])
def test_families_with_repeated_layers(name: str, block: int) -> None:
    changes = {"first_k_dense_replace": 4} if name == "deepseek_v3" else {}
    weights = tie(make(name, **changes), block)
    llm = engine(weights, 5)
    prompts = as_prompts([random_tokens(count, count) for count in (1, 9, 17)])
    drafted = llm.generate(prompts, GREEDY)
    assert tokens_of(drafted) == tokens_of(llm.generate(prompts, GREEDY, speculative=False))
    assert sum(output.outputs[0].speculation.num_draft_tokens for output in drafted) > 0


def test_a_full_pipeline_finishes_a_token_a_pass() -> None:
    """An exit that is always right: K + 1 tokens in K + P passes of the block, and no layer runs twice for one."""
    weights = tie(make("llama"), 1)
    with torch.no_grad():
        weights.model.layers[0].self_attn.o_proj.weight.zero_()
        weights.model.layers[0].mlp.down_proj.weight.zero_()
    llm = engine(weights, 6)
    widths: list[int] = []
    for layer in weights.model.layers:
        layer.register_forward_pre_hook(lambda _m, args: widths.append(args[0].shape[0] * args[0].shape[1]))
    output = llm.generate(as_prompts([random_tokens(9, 1)]), replace(GREEDY, max_tokens=8))[0].outputs[0]
    assert output.speculation.num_tokens == 8
    steps = widths[4:]
    assert steps == [1, 2, 3, 4, 4, 4, 4, 3, 2, 1], "behind the prompt's four: fill, three full, drain"


def test_a_flush_ends_a_step_early() -> None:
    """An exit that is mostly wrong takes little more than the passes of plain decoding."""
    weights = tie(make("llama"), 1)
    llm = engine(weights, 8)
    passes: list[int] = []
    for layer in weights.model.layers:
        layer.register_forward_pre_hook(lambda _m, args: passes.append(args[0].shape[0]))
    speculation = llm.generate(as_prompts([random_tokens(9, 1)]), GREEDY)[0].outputs[0].speculation
    steps = speculation.num_spec_steps + speculation.num_plain_steps
    assert speculation.num_accepted_draft_tokens == speculation.num_draft_tokens, "what is wrong is not submitted"
    assert len(passes) <= 4 * (1 + steps) + speculation.num_draft_tokens


def test_reproducible_in_bfloat16() -> None:
    weights = tie(make("llama", dtype=torch.bfloat16), 2)
    llm = engine(weights, 4, reproducible=True)
    prompts = as_prompts([random_tokens(count, count) for count in (1, 9, 17)])
    drafted = tokens_of(llm.generate(prompts, GREEDY))
    assert drafted == tokens_of(llm.generate(prompts, GREEDY, speculative=False))


def test_the_block_is_found() -> None:
    shared_block = importlib.import_module("speed").shared_block
    for name, block, found in (("llama", 1, 1), ("llama", 2, 2), ("gemma3", 1, 2)):
        assert shared_block(TransformersTarget(tie(make(name), block))) == found, "kinds of attention alternate"


def test_what_repeats_no_block_and_senseless_options_are_refused() -> None:
    other = tie(make("llama"), 1)
    other.model.layers[2].register_forward_hook(lambda _m, _a, output: 3 * output)
    for weights, options, error, says in (
        (make("llama"), {}, UnsupportedModelError, "weights of its own in each of its 4 layers"),
        (tie(make("llama"), 3), {}, UnsupportedModelError, "weights of its own"),
        (other, {}, UnsupportedModelError, "differ from a whole pass"),
        (tie(make("llama"), 1), {"num_speculative_tokens": 0}, ArgumentError, "at least 1"),
    ):
        with pytest.raises(error, match=says):
            build(METHOD, options, setup_for(weights, slots=64))
