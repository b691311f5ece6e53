"""An answer ends where plain decoding ends it, also when the end falls inside an accepted block."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import PreTrainedTokenizerFast

from contract.harness import PROMPT, Variant, as_prompts, each_family, llm, model, oracle, plain_greedy, word_tokenizer
from forerun import LLM, SamplingParams
from forerun.engine.prefix_cache import BLOCK
from forerun.types import CompletionOutput

LENGTH = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, frequency_penalty=0.5)


def answer(engine: LLM, params: SamplingParams) -> CompletionOutput:
    return engine.generate(as_prompts([PROMPT]), params)[0].outputs[0]


def answers(engine: LLM, asked: Sequence[SamplingParams]) -> list[CompletionOutput]:
    """Side by side, so that rows end while others go on and new ones take their place."""
    return [output.outputs[0] for output in engine.generate(as_prompts([PROMPT] * len(asked)), asked)]


def text_of_the_target() -> list[int]:
    """The greedy answer, long enough to be cut anywhere."""
    return plain_greedy(PROMPT, GREEDY)


def test_the_oracle_accepts_whole_blocks() -> None:
    found = answer(llm(oracle(5)), GREEDY)
    assert found.speculation.mean_acceptance_length > 4
    assert len(set(found.token_ids)) > 4, "an answer of one token could end anywhere"


@pytest.mark.parametrize("variant", [oracle(5), *each_family(0)], ids=str)
def test_max_tokens(variant: Variant) -> None:
    lengths = range(1, LENGTH + 1)
    found_all = answers(llm(variant), [replace(GREEDY, max_tokens=length) for length in lengths])
    for length, found in zip(lengths, found_all, strict=True):
        assert found.token_ids == text_of_the_target()[:length]
        assert found.finish_reason == "length"
        assert len(found.speculation.drafted_per_depth) <= max(0, length - 2), "the last token is the target's own"


@pytest.mark.parametrize("variant", [oracle(5), *each_family(3)], ids=str)
def test_stop_token_ids(variant: Variant) -> None:
    whole = text_of_the_target()
    stops = sorted(set(whole))
    found_all = answers(llm(variant), [replace(GREEDY, stop_token_ids=[stop]) for stop in stops])
    for stop, found in zip(stops, found_all, strict=True):
        assert found.token_ids == whole[: whole.index(stop) + 1]
        assert (found.finish_reason, found.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("variant", [oracle(5), *each_family(6)], ids=str)
def test_end_of_text(variant: Variant) -> None:
    whole = text_of_the_target()
    for stop in sorted(set(whole))[::3]:
        ending = copy.deepcopy(model())
        ending.generation_config.eos_token_id = [stop]
        engine = llm(variant, target=ending)
        found, ignoring = answers(engine, [GREEDY, replace(GREEDY, ignore_eos=True)])
        assert found.token_ids == whole[: whole.index(stop) + 1]
        assert (found.finish_reason, found.stop_reason) == ("stop", None)
        assert ignoring.token_ids == whole


@pytest.mark.parametrize("variant", [oracle(5), *each_family(9)], ids=str)
def test_min_tokens_forbid_the_end_at_each_node(variant: Variant) -> None:
    engine, stop = llm(variant), text_of_the_target()[2]
    params = replace(GREEDY, stop_token_ids=[stop], min_tokens=5)
    found = answer(engine, params)
    assert found.token_ids == engine.generate(as_prompts([PROMPT]), params, speculative=False)[0].outputs[0].token_ids
    assert stop not in found.token_ids[:5]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.mark.parametrize("variant", [oracle(5), *each_family(12)], ids=str)
def test_stop_strings(variant: Variant, tokenizer: PreTrainedTokenizerFast) -> None:
    engine = llm(variant, tokenizer=tokenizer)
    whole = answer(engine, GREEDY).text
    stops = [whole[start : start + 6] for start in range(0, len(whole) - 6, 9)]
    cut = answers(engine, [replace(GREEDY, stop=stop) for stop in stops])
    kept = answers(engine, [replace(GREEDY, stop=stop, include_stop_str_in_output=True) for stop in stops])
    for stop, without, with_it in zip(stops, cut, kept, strict=True):
        assert without.text == whole[: whole.index(stop)]
        assert (without.finish_reason, without.stop_reason) == ("stop", stop)
        assert with_it.text == whole[: whole.index(stop) + len(stop)]


@pytest.mark.parametrize(("stops", "cached"), [(False, BLOCK), (True, 0)])
def test_what_was_accepted_behind_a_stop_string_serves_no_prompt(
    stops: bool, cached: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Else `num_cached_tokens` tells a prompt that guesses how the answer would have gone on that it is right."""
    prompt = (PROMPT * BLOCK)[: BLOCK - 3]
    whole, engine = plain_greedy(prompt, GREEDY), llm(oracle(5), tokenizer=tokenizer)
    stop = tokenizer.decode([whole[2]]) if stops else None
    [ended] = engine.generate(as_prompts([prompt]), replace(GREEDY, stop=stop))
    assert ended.outputs[0].token_ids == (whole[:3] if stops else whole)
    [longer] = engine.generate(as_prompts([[*prompt, *whole]]), replace(GREEDY, max_tokens=1))
    assert longer.num_cached_tokens == cached
