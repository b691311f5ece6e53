"""The public face: what users of vLLM and transformers type, and that speculation changes nothing of what comes out."""

import copy
import inspect
import logging
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.conftest import TEMPLATE, tiny_tokenizer
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.engine.arguments import EngineArguments, LoadingArguments
from forerun.engine.llm import OF_TEMPLATES
from forerun.errors import ArgumentError, CheckpointError, ForerunError
from forerun.model.load import LoadOptions
from forerun.other_engines import REQUEST_ARGUMENTS
from forerun.types import Source

PROMPTS = ["the cat sat on the", "the dog and the dog and the", "log", "on the mat the cat on the mat the"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), max_num_seqs=3, dtype="float32", check=True)


@pytest.fixture(scope="module")
def ngram(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), max_num_seqs=3, dtype="float32", speculative_config=NGRAM, check=True)


@pytest.fixture(scope="module")
def drafted(checkpoint: Path, draft_checkpoint: Path) -> LLM:
    config = {"model": str(draft_checkpoint), "num_speculative_tokens": 3, "adaptive": False}
    return LLM(str(checkpoint), max_num_seqs=3, dtype="float32", speculative_config=config, check=True)


def ids(llm: LLM, prompts: Any, params: Any, **keywords: Any) -> list[list[int]]:
    return [answer.token_ids for output in llm.generate(prompts, params, **keywords) for answer in output.outputs]


def test_n_answers_differ_and_repeat_with_the_seed(plain: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10)
    first, again = ids(plain, PROMPTS[0], params), ids(plain, PROMPTS[0], params)
    assert first == again
    assert len({tuple(answer) for answer in first}) > 1
    assert [answer.index for answer in plain.generate(PROMPTS[0], params)[0].outputs] == [0, 1, 2, 3]


def test_a_stream_adds_up_to_the_answer_and_every_token_knows_its_source(ngram: LLM) -> None:
    chunks = list(ngram.stream(PROMPTS[1], GREEDY, trace=True))
    output: Any = chunks[-1].output
    [answer] = output.outputs
    assert 0 < output.time_to_first_token_s < 60 and 0 < output.decode_s < 60
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == answer.token_ids
    assert answer.tokens[0].source is Source.TARGET
    drafted = sum(token.source is Source.DRAFT for token in answer.tokens)
    assert drafted == answer.speculation.num_accepted_draft_tokens > 0
    assert sum(trace.emitted for trace in answer.trace) >= len(answer.token_ids) - 1


def test_a_request_may_switch_speculation_off_or_bring_its_own(ngram: LLM, draft_checkpoint: Path) -> None:
    off = ngram.generate(PROMPTS[1], GREEDY, speculative=False)[0].outputs[0]
    assert off.speculation.num_spec_steps == 0
    assert {token.source for token in off.tokens} == {Source.TARGET}
    own = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 2, "adaptive": False}
    other = ngram.generate(PROMPTS[1], GREEDY, speculative=own)[0].outputs[0]
    assert other.token_ids == off.token_ids
    assert len(other.speculation.drafted_per_depth) == 2


def test_a_drafter_is_named_by_its_bare_name_and_true_needs_one(plain: LLM) -> None:
    drafted = plain.generate(PROMPTS[1], GREEDY, speculative="ngram")[0].outputs[0]
    assert drafted.speculation.num_draft_tokens > 0
    with pytest.raises(ArgumentError, match="Did you mean 'ngram'"):
        plain.generate(PROMPTS[1], GREEDY, speculative="ngramm")
    with pytest.raises(ArgumentError, match="no drafter is configured"):
        plain.generate(PROMPTS[1], GREEDY, speculative=True)


@pytest.mark.parametrize("end", ["closed", "forgotten", "begun and closed"])
def test_a_stream_that_nobody_reads_leaves_nothing_behind(ngram: LLM, end: str) -> None:
    stream = ngram.stream(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    assert ngram.engine.busy
    if "begun" in end:
        next(stream)
        assert ngram.engine.running == 1
    if "closed" in end:
        stream.close()
    del stream
    assert not ngram.engine.busy and not ngram._inbox


def test_log_probabilities_equal_those_of_plain_decoding(plain: LLM, drafted: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    expected, found = plain.generate(PROMPTS[3], params)[0], drafted.generate(PROMPTS[3], params)[0]
    for left, right in zip(expected.outputs[0].tokens, found.outputs[0].tokens, strict=True):
        assert left.logprob.logprob == pytest.approx(right.logprob.logprob, abs=1e-4)
        assert left.logprob.rank == right.logprob.rank == 1 and len(right.top_logprobs) == 3
    first, *others = found.prompt_logprobs
    model = AutoModelForCausalLM.from_pretrained(plain.target.name_or_path, dtype=torch.float32)
    probs = model(torch.tensor([found.prompt_token_ids])).logits[0].detach().log_softmax(-1)
    assert first is None
    for place, (entry, token) in enumerate(zip(others, found.prompt_token_ids[1:], strict=True)):
        assert entry[token].logprob == pytest.approx(float(probs[place, token]), abs=1e-4)


def test_log_probabilities_stand_where_vllm_has_them(plain: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=4, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    request = plain.generate(PROMPTS[0], params)[0]
    output, vocabulary = request.outputs[0], set(range(plain.target.vocab_size))
    assert [set(entry) for entry in [*output.logprobs, *request.prompt_logprobs[1:]]] == [vocabulary] * (
        3 + len(request.prompt_token_ids)
    )
    own = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(own))
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids, "a token's own comes first"
    unasked = plain.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert unasked.logprobs is None and unasked.cumulative_logprob is None


def test_priorities_and_the_prefix_cache_as_vllm_has_them(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), max_num_seqs=1)
    order, step = list[str](), llm.engine.step

    def watched() -> Any:
        chunks = step()
        order.extend(chunk.request_id for chunk in chunks if chunk.output is not None)
        return chunks

    llm.engine.step = watched
    found = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=2), priority=[3, 1, 2])
    assert order == [found[index].request_id for index in (1, 2, 0)]
    with pytest.raises(ArgumentError, match="2 priorities for 3 prompts"):
        llm.generate(PROMPTS[:3], GREEDY, priority=[1, 2])
    cached = [llm.generate([[5] * 100], GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert llm.reset_prefix_cache()
    cached.append(llm.generate([[5] * 100], GREEDY)[0].num_cached_tokens)
    assert cached[::2] == [0, 0] and cached[1] > 0
    llm.submit(PROMPTS[0], GREEDY)
    assert not llm.reset_prefix_cache()


def test_processed_log_probabilities_are_those_of_the_distribution_that_was_sampled(plain: LLM) -> None:
    params = SamplingParams(
        temperature=0.7, top_k=3, seed=1, max_tokens=8, logprobs=5, logprobs_mode="processed_logprobs"
    )
    for token in plain.generate(PROMPTS[0], params)[0].outputs[0].tokens:
        kept = [entry for entry in token.top_logprobs.values() if entry.logprob > float("-inf")]
        assert len(kept) == 3
        assert sum(torch.tensor(entry.logprob).exp() for entry in kept) == pytest.approx(1.0, abs=1e-4)


def test_greedy_processed_log_probabilities_are_those_of_the_processed_logits(plain: LLM, ngram: LLM) -> None:
    """As in vLLM: a point mass would tell nothing."""
    shaped = {"logit_bias": {65: 2.5}, "min_tokens": 24, "repetition_penalty": 1.1, "logprobs": 2}
    params = replace(GREEDY, **shaped, ignore_eos=False, logprobs_mode="processed_logprobs")
    [request] = ngram.generate(PROMPTS[1], params)
    answer, prompt = request.outputs[0], request.prompt_token_ids
    assert answer.speculation.num_accepted_draft_tokens > 0
    model = AutoModelForCausalLM.from_pretrained(plain.target.name_or_path, dtype=torch.float32)
    text = [*prompt, *answer.token_ids]
    raw = model(torch.tensor([text])).logits[0].detach()
    for place, token in enumerate(answer.tokens, start=len(prompt)):
        logits = raw[place - 1].clone()
        logits[plain.tokenizer.eos_token_id] = -torch.inf
        logits[65] += 2.5
        seen = torch.tensor(sorted(set(text[:place])))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.1, logits[seen] * 1.1)
        best = logits.log_softmax(-1).topk(2)
        assert list(token.top_logprobs) == best.indices.tolist()
        found = [entry.logprob for entry in token.top_logprobs.values()]
        assert found == pytest.approx(best.values.tolist(), abs=1e-3)
        assert token.logprob.logprob == found[0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_llm_is_made_anew_in_each_process(plain: LLM, copied: Any) -> None:
    with pytest.raises(TypeError, match="make one in each process"):
        copied(plain)


def test_stop_strings_need_a_tokenizer(checkpoint: Path) -> None:
    bare = LLM(str(checkpoint), tokenizer=False, max_num_seqs=1)
    with pytest.raises(ArgumentError, match="use stop_token_ids"):
        bare.generate([[5, 6]], SamplingParams(stop="a"))


def test_processed_log_probabilities_see_each_nodes_own_path(plain: LLM, ngram: LLM) -> None:
    penalties = {"frequency_penalty": 0.2, "repetition_penalty": 1.1, "allowed_token_ids": [260, 261, 262]}
    params = SamplingParams(
        temperature=0.8, seed=5, max_tokens=24, logprobs=0, logprobs_mode="processed_logprobs", **penalties
    )
    left, right = (llm.generate(PROMPTS[1], params, trace=True)[0].outputs[0] for llm in (plain, ngram))
    assert right.speculation.num_accepted_draft_tokens > 0
    for one, other in zip(left.tokens, right.tokens, strict=True):
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-3)
    prompt = len(plain.tokenizer.encode(PROMPTS[1]))
    for answer in (left, right):
        places = [prompt + 1, *(trace.position + trace.emitted for trace in answer.trace)]
        assert [trace.position for trace in answer.trace] == places[:-1]


def test_the_text_of_a_stop_token_is_shown_only_if_asked_for(plain: LLM) -> None:
    free = plain.generate(PROMPTS[1], GREEDY)[0].outputs[0]
    new = (i for i, token in enumerate(free.tokens) if token.text.strip() and token.id not in free.token_ids[:i])
    place = next(i for i in new if i > 2)
    for include in (False, True):
        params = replace(GREEDY, stop_token_ids=[free.token_ids[place]], include_stop_str_in_output=include)
        answer = plain.generate(PROMPTS[1], params)[0].outputs[0]
        assert answer.token_ids == free.token_ids[: place + 1]
        assert answer.text == "".join(token.text for token in free.tokens[: place + include])


def test_a_stop_string_before_min_tokens_is_text(plain: LLM) -> None:
    text = plain.generate(PROMPTS[1], GREEDY)[0].outputs[0].text
    found = plain.generate(PROMPTS[1], replace(GREEDY, min_tokens=12, stop=text[:3]))[0].outputs[0]
    assert len(found.token_ids) >= 12 and found.text.startswith(text[:3])


def test_the_generation_config_is_honoured(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    free = LLM(model, tokenizer=False).generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids
    model.generation_config.eos_token_id = [1, free[4]]
    model.generation_config.temperature = 0.0
    answer = LLM(model, tokenizer=False).generate([[5, 6, 7]], SamplingParams(max_tokens=24))[0].outputs[0]
    assert answer.token_ids == free[: free.index(free[4]) + 1]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)


def test_the_four_spellings_of_tutorials(checkpoint: Path, draft_checkpoint: Path, plain: LLM) -> None:
    expected = ids(plain, PROMPTS[1], GREEDY)
    fixed = {"adaptive": False}
    spellings: list[dict[str, Any]] = [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, **fixed}},
        {"speculative_config": {"model": str(draft_checkpoint), "num_speculative_tokens": 5, **fixed}},
        {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4},
        {"speculative_model": str(draft_checkpoint), "num_speculative_tokens": 5},
    ]
    for keywords in spellings:
        llm = LLM(model=str(checkpoint), dtype="float32", **keywords)
        outputs = llm.generate([PROMPTS[1]], GREEDY)
        assert outputs[0].outputs[0].token_ids == expected[0]
        assert outputs[0].outputs[0].speculation.num_spec_steps > 0 or "speculative_model" in keywords


def test_several_chats_are_answered_together(plain: LLM) -> None:
    """Each goes through the template."""
    chats = [[{"role": "user", "content": text}] for text in ("the cat", "the dog")]
    alone = [plain.chat(chat, GREEDY)[0] for chat in chats]
    together = plain.chat(chats, [GREEDY, GREEDY])
    assert [one.prompt for one in together] == ["user: the cat\nassistant: ", "user: the dog\nassistant: "]
    found, single = ([one.outputs[0].token_ids for one in some] for some in (together, alone))
    assert found == single == ids(plain, [one.prompt for one in alone], GREEDY)
    assert plain.chat([], GREEDY) == []


@pytest.mark.parametrize("messages", ["the cat", {"role": "user"}, ["the cat"], [[["the cat"]]]])
def test_what_is_no_conversation_is_told(plain: LLM, messages: Any) -> None:
    with pytest.raises(ArgumentError, match="list of messages"):
        plain.chat(messages, GREEDY)


def test_progress_is_shown_if_asked_for(plain: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = plain.generate(PROMPTS[:2], GREEDY)
    assert capsys.readouterr().err == ""
    shown = plain.generate(PROMPTS[:2], GREEDY, use_tqdm=True)
    assert "2/2" in capsys.readouterr().err
    assert [one.outputs[0].text for one in shown] == [one.outputs[0].text for one in quiet]


@pytest.mark.parametrize("made", [list, np.array, torch.tensor, tuple, lambda ids: list(map(np.int64, ids))])
def test_a_prompt_may_be_text_ids_arrays_or_a_dict_of_them(plain: LLM, made: Any) -> None:
    both, drafted = plain.tokenizer(PROMPTS[0])["input_ids"], {"method": "prediction"}
    expected = ids(plain, PROMPTS[0], GREEDY)[0]
    forms = [{"prompt": PROMPTS[0]}, made(both), {"prompt_token_ids": made(both)}, {"prompt": made(both)}]
    assert [ids(plain, form, GREEDY) for form in (*forms, [made(both)])] == [[expected]] * 5
    if made in (np.array, torch.tensor):
        assert ids(plain, made([both, both]), GREEDY) == [expected] * 2
    assert ids(plain, {"prompt": both, "prediction": made(both)}, GREEDY, speculative=drafted) == [expected]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([5] * 300, "300 tokens"),
        ([9999], "9999"),
        ({"text": "x"}, "prompt_token_ids"),
        (b"abc", "bytes"),
        (None, "NoneType"),
        ({"a", "b"}, "set"),
        ([b"abc"], "integers, got b'abc'"),
        ([1.7, 2.2], r"integers, got 1\.7"),
        ([[1.7, 2.2]], r"integers, got \[1\.7, 2\.2\]"),
        (torch.tensor([1.0, 2.0]), r"integers, got 1\.0"),
        ([["a", "b"]], "integers, got"),
        ({"prompt": None}, "integers, got None"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be token ids"),
        ({"prompt": "a", "prediction": [1.5]}, "prediction must be token ids"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"promt": "a"}, "Did you mean 'prompt'"),
    ],
)
def test_a_bad_prompt_is_named(plain: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        plain.generate(prompt, GREEDY)
    assert not plain.engine.busy


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY, None], {"max_tokens": 3}, "greedy"])
def test_bad_parameters_are_named(plain: LLM, params: Any) -> None:
    with pytest.raises(ArgumentError, match=r"sampling.param"):
        plain.generate(PROMPTS[:2], params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "ngrm"}, "ngram"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 1000}, "128"),
        ({"method": "ngram", "prompt_lookup_mux": 3}, "prompt_lookup_max"),
        ("{not json", "JSON"),
        ({"num_speculative_tokens": 3}, "method"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_a_bad_speculative_config_is_named(plain: LLM, config: Any, message: str) -> None:
    with pytest.raises(ForerunError, match=message):
        plain.generate(PROMPTS[0], GREEDY, speculative=config)


def test_an_unknown_argument_names_the_nearest_or_what_to_use_for_one_of_vllms(checkpoint: Path, plain: LLM) -> None:
    with pytest.raises(TypeError, match="max_model_len"):
        LLM(str(checkpoint), max_modellen=3)
    with pytest.raises(TypeError, match=r"tensor_parallel_size': a model.*device_map"):
        LLM(str(checkpoint), tensor_parallel_size=2)
    for name in REQUEST_ARGUMENTS:
        for chat in () if name in OF_TEMPLATES else (plain.chat,):
            with pytest.raises(TypeError, match=f"has no argument '{name}': [A-Za-z]"):
                chat([], **{name: None})
        for stream in (plain.stream, partial(AsyncLLM.stream, None), partial(AsyncLLM.generate, None)):
            with pytest.raises(TypeError, match=f"has no argument '{name}': [A-Za-z]"):
                stream("x", **{name: None})
    for form in (AsyncLLM.stream, AsyncLLM.generate):  # vLLM's third argument
        with pytest.raises(TypeError, match=r"'request_id': .*async for chunk in llm\.stream"):
            form(None, "x", GREEDY, "req-1")
    with pytest.raises(TypeError, match=r"'lora_requests'\.$"):
        plain.generate("x", lora_requests=None)
    with pytest.raises(TypeError, match=r"SamplingParams.*'max_token'.*Did you mean 'max_tokens'"):
        SamplingParams(max_token=3)


def test_the_typed_arguments_are_those_of_llm() -> None:
    own = set(inspect.signature(LLM.__init__).parameters) - {"self", "model", "loading"}
    assert own == set(EngineArguments.__annotations__) - set(LoadingArguments.__annotations__)
    assert inspect.signature(SamplingParams).parameters["max_tokens"].default == 16
    opened = {field.name for field in fields(LoadOptions)}
    old = {name for name in LoadingArguments.__annotations__ if name.startswith(("speculative", "num_", "ngram"))}
    assert set(LoadingArguments.__annotations__) - old - {"backend"} <= opened


@pytest.mark.parametrize(
    "config",
    [
        {"method": "eagle3", "model": "/nowhere/head"},
        {"method": "merge", "drafters": ["ngram", {"method": "draft_model", "model": "/nowhere/head"}]},
    ],
    ids=["alone", "member"],
)
def test_a_drafter_that_is_nowhere_is_refused_before_the_model_is_loaded(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object]
) -> None:
    monkeypatch.setattr("forerun.engine.llm.load_target", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(CheckpointError, match="no directory /nowhere/head"):
        LLM(checkpoint, speculative_config=config)


@pytest.mark.parametrize(
    "keywords", [{"max_num_seqs": 0}, {"max_model_len": 1}, {"max_model_len": 10_000}, {"seed": 2**70}]
)
def test_sizes_out_of_range_are_refused(checkpoint: Path, keywords: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        LLM(str(checkpoint), **keywords)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": -1}, {"top_p": 0}, {"n": 0}, {"max_tokens": -1}, {"truncate_prompt_tokens": 0}),
        *({"stop": ""}, {"logprobs": -2}),
    ],
)
def test_sampling_out_of_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        SamplingParams(**wrong)


def test_acceptance_of_mere_chance_is_said_once(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from engine.conftest import byte_llama, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    byte_llama(99, tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = {"model": str(tmp_path), "adaptive": False}
    llm = LLM(str(checkpoint), dtype="float32", speculative_config=config, max_num_seqs=8)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            llm.generate([[index + 3, 9] for index in range(8)], params)
    assert caplog.text.count("chance level") == 1


def test_the_context_ends_an_answer(plain: LLM) -> None:
    [output] = plain.generate([[5] * 200], SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    answer = output.outputs[0]
    assert len(answer.token_ids) == plain.max_model_len - 200 and answer.finish_reason == "length"


def test_a_rule_that_is_not_lossless_or_does_not_fit_the_drafter_is_refused(ngram: LLM, draft_checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="temperature 0"):
        ngram.generate(PROMPTS[0], SamplingParams(temperature=0.5), speculative={**NGRAM, "rule": "argmax_walk"})
    with pytest.raises(ArgumentError, match="traversal"):
        ngram.generate(PROMPTS[0], GREEDY, speculative={**NGRAM, "rule": "travesal"})
    tree = {"model": str(draft_checkpoint), "shape": [2, 2], "draw": "iid", "rule": "block"}
    with pytest.raises(ArgumentError, match=r"'block' verifies chains, drafter 'draft_model' as configured"):
        ngram.generate(PROMPTS[1], SamplingParams(temperature=0.7, seed=1), speculative=tree)


def test_threads_may_share_an_engine(ngram: LLM) -> None:
    """Each gets its own answers, whoever steps; what fails or is left early is no other thread's."""
    alone = ids(ngram, PROMPTS, GREEDY)

    def boom(_tokens: Any, _logits: Any) -> Any:
        raise RuntimeError("boom")

    def work(index: int) -> list[list[int]]:
        found = list[list[int]]()
        for _ in range(4):
            found += ids(ngram, PROMPTS[index], GREEDY)
            with pytest.raises(ForerunError, match="boom"):
                ngram.generate(PROMPTS[index], SamplingParams(logits_processors=[boom]))
            next(ngram.stream(PROMPTS[index], GREEDY))
            found.append([token.id for chunk in ngram.stream(PROMPTS[index], GREEDY) for token in chunk.tokens])
        return found

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == [[each] * 8 for each in alone]
    assert not ngram.engine.busy and not ngram._inbox


def test_a_thread_joins_the_batch_of_another(ngram: LLM) -> None:
    """It does not wait until the other has its answers."""
    chunks, ended = ngram.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)), threading.Event()

    def work() -> None:
        ids(ngram, PROMPTS[1], GREEDY)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    left = [chunk.output for chunk in chunks if not ended.is_set()]
    thread.join()
    assert left[-1] is None, "the short answer came first"


def test_a_stream_dropped_within_a_step_ends_after_it(ngram: LLM) -> None:
    """Python may collect it there."""
    streams = [ngram.stream(PROMPTS[1], GREEDY)]
    next(streams[0])

    def drop(_tokens: Any, logits: Any) -> Any:
        streams.clear()
        return logits

    [answer] = ngram.generate(PROMPTS[0], replace(GREEDY, logits_processors=[drop]))
    assert answer.outputs[0].token_ids == ids(ngram, PROMPTS[0], GREEDY)[0]
    assert not ngram.engine.busy and not ngram._inbox


def test_a_request_for_fewer_tokens_needs_no_drafter_of_its_own(checkpoint: Path, draft_checkpoint: Path) -> None:
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4, "adaptive": False}
    llm, texts, depths = LLM(str(checkpoint), dtype="float32", speculative_config=config), set[str](), []
    for count, drafters in ((4, 1), (2, 1), (1, 1), (6, 2)):
        [output] = llm.generate(PROMPTS[0], GREEDY, speculative={**config, "num_speculative_tokens": count})
        texts.add(output.outputs[0].text)
        depths.append(len(output.outputs[0].speculation.drafted_per_depth))
        assert len(llm.engine.drafting._active) == drafters
    assert depths == [4, 2, 1, 6] and len(texts) == 1


def test_a_chat_template_of_ones_own(checkpoint: Path, tmp_path: Path) -> None:
    """A file or the text itself; the tokenizer that was given keeps its own."""
    written = "{% for m in messages %}<{{ m.content }}>{% generation %}{% endgeneration %}{% endfor %}"
    file = tmp_path / "own.jinja"
    file.write_text(written)
    given = tiny_tokenizer()
    for llm in (
        LLM(str(checkpoint), dtype="float32", chat_template=file),
        LLM(str(checkpoint), dtype="float32", chat_template=written, tokenizer=given),
    ):
        assert llm.chat_prompt([{"role": "user", "content": "the cat"}])["prompt"] == "<the cat>"
    assert given.chat_template == TEMPLATE


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("hermse", "Did you mean 'hermes'"),
        ("/nonexistent/a.jinja", "no chat template /nonexistent/a.jinja"),
        ("{% for m in messages %}\n{{ m", "line 2"),
        ("hermes", "no tokens for"),
    ],
)
def test_a_chat_template_that_cannot_be_used(checkpoint: Path, template: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        LLM(str(checkpoint), chat_template=template)


def test_a_chat_template_needs_a_tokenizer(checkpoint: Path) -> None:
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        LLM(str(checkpoint), chat_template="{{ messages }}", tokenizer=False)


def test_a_longer_context_is_advised_where_the_model_allows_it(plain: LLM, checkpoint: Path) -> None:
    too_long = {"prompt_token_ids": [5] * 300}
    with pytest.raises(ArgumentError, match=r"the context holds 256 for prompt and output; shorten the prompt$"):
        plain.generate(too_long)
    short = LLM(str(checkpoint), dtype="float32", max_model_len=100)
    with pytest.raises(ArgumentError, match=r"or raise max_model_len: the model allows 256$"):
        short.generate(too_long)
