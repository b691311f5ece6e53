"""``model.generate(custom_generate=forerun.hf(...))`` against transformers' own loop."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import combine_pvalues
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompileConfig,
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    StoppingCriteria,
    TextStreamer,
    WatermarkingConfig,
)

import forerun
from contract.harness import p_value
from forerun import errors
from forerun.engine import huggingface
from forerun.errors import ArgumentError
from forerun.model import TransformersTarget
from forerun.model.layers import cache_argument
from selection import slow


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def batch(checkpoint: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    batch = tokenizer(["the cat sat on the mat the cat", "the dog"], return_tensors="pt", padding=True)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 3, "min_new_tokens": 12}),
        {"suppress_tokens": [40, 41, 42]},
    ],
)
def test_greedy_is_the_same_for_left_padded_batches(model: Any, batch: Any, options: Any) -> None:
    keywords = {"max_new_tokens": 20, "do_sample": False, **options}
    expected = model.generate(**batch, **keywords)
    found = model.generate(**batch, **keywords, custom_generate=forerun.hf("ngram", num_speculative_tokens=4))
    assert found.tolist() == expected.tolist()


class EveryFourth(LogitsProcessor):
    """Forbids every fourth token id, in every row another."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = torch.arange(scores.shape[1]) + torch.arange(len(scores)).unsqueeze(1)
        return scores.masked_fill(place % 4 == 0, -torch.inf)


class AtLength(StoppingCriteria):
    """Stops behind so many tokens, padding counted as transformers counts it."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 17)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
        {"cache_implementation": "static", "disable_compile": True},
        {"cache_implementation": "dynamic", "use_cache": False},
        {"eos_token_id": list(range(2, 278, 5)), "pad_token_id": 7},
        {"eos_token_id": list(range(2, 278, 5)), "min_new_tokens": 9},
        {"stopping_criteria": [AtLength()]},
        {"logits_processor": [EveryFourth()], "renormalize_logits": True},
        {"bad_words_ids": [[265], [266, 273]], "forced_eos_token_id": 5},
        {"sequence_bias": {(260,): 4.0}, "temperature": 0.7, "do_sample": True, "top_p": 0.01, "min_p": 0.1},
    ],
    ids=" ".join,  # The names of the options: what they hold has an address in its name
)
def test_sequences_and_scores_are_transformers_own(model: Any, batch: Any, options: Any) -> None:
    keywords = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, **options}
    keywords |= {"output_scores": True, "output_logits": True}
    expected = model.generate(**batch, **keywords)
    found = model.generate(**batch, **keywords, custom_generate=forerun.hf("suffix", num_speculative_tokens=4))
    assert found.sequences.tolist() == expected.sequences.tolist()
    new = expected.sequences[:, batch["input_ids"].shape[1] :]
    ends = torch.isin(new, torch.tensor(options.get("eos_token_id", -1)))
    alive = ends.cumsum(1) - ends.int() == 0
    for own, others in ((found.scores, expected.scores), (found.logits, expected.logits)):
        assert len(own) == len(others) == new.shape[1]
        torch.testing.assert_close(torch.stack(own, 1)[alive], torch.stack(others, 1)[alive], atol=1e-4, rtol=1e-4)
    own = torch.stack(found.scores, 1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1)
    if keywords["do_sample"]:
        torch.testing.assert_close(found.logprobs, own.where(alive, 0.0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_the_targets(model: Any, batch: Any, draft_checkpoint: Path, mode: str) -> None:
    options = {"model": str(draft_checkpoint), "num_speculative_tokens": 3, "adaptive": False}
    loop = forerun.hf("draft_model", logprobs_mode=mode, **options)
    keywords = {"max_new_tokens": 24, "do_sample": True, "temperature": 1.7, "top_k": 0, "eos_token_id": None}
    found = model.generate(**batch, **keywords, return_dict_in_generate=True, custom_generate=loop)
    width = batch["input_ids"].shape[1]
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = torch.cat([batch["input_ids"][row][mask], found.sequences[row, width:]])
        with torch.no_grad():
            logits = model(ids.unsqueeze(0)).logits[0, int(mask.sum()) - 1 : -1]
        temperature = 1.7 if mode == "processed_logprobs" else 1.0
        own = (logits / temperature).log_softmax(-1).gather(-1, ids[int(mask.sum()) :].unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(found.logprobs[row], own, atol=1e-4, rtol=1e-4)


def test_rows_of_one_prompt_read_it_once(model: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read, prefill = list[int](), TransformersTarget.prefill

    def counted(self: Any, rows: Any, tokens: Any, **others: Any) -> Any:
        read.extend(map(len, tokens))
        return prefill(self, rows, tokens, **others)

    loop = forerun.hf("ngram")
    model.generate(**batch, max_new_tokens=2, custom_generate=loop)  # checks the model
    monkeypatch.setattr(TransformersTarget, "prefill", counted)
    keywords = {"do_sample": True, "temperature": 0.9, "top_p": 0.99, "num_return_sequences": 5}
    found = model.generate(**batch, max_new_tokens=8, **keywords, custom_generate=loop)
    assert sorted(read) == [2, 8]
    assert len({str(row) for row in found.tolist()}) > 6, "each row has an answer of its own"


@pytest.mark.parametrize("drafter", ["draft_model", *slow("suffix")])
def test_a_batch_of_groups_has_the_distribution_of_plain_sampling(
    model: Any, checkpoint: Path, draft_checkpoint: Path, drafter: str
) -> None:
    """Batches of 8 prompts x 8 samples: 2,048 answers, their first two tokens by chi-square, prompt by prompt. A
    distribution whose total variation from the right one is 0.11 would be found with a probability of 0.95; a token
    drawn from p in place of the residual gave p-values below 1e-16 with each of six seeds."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    words = ["the", "cat", "sat", "on", "the", "mat", "the", "cat"]
    inputs = tokenizer([" ".join(words[: count + 1]) for count in range(8)], return_tensors="pt", padding=True)
    batch = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    sampled = {"model": str(draft_checkpoint), "adaptive": False} if drafter == "draft_model" else {}
    loop = forerun.hf(drafter, num_speculative_tokens=2, **sampled)
    torch.manual_seed(3)
    keywords = {"max_new_tokens": 3, "do_sample": True, "temperature": 1.0, "top_k": 4, "eos_token_id": None}
    counts = [Counter[tuple[int, ...]]() for _ in range(8)]
    for _ in range(32):
        found = model.generate(**batch, **keywords, num_return_sequences=8, custom_generate=loop)
        for row, answer in enumerate(found[:, batch["input_ids"].shape[1] :].tolist()):
            counts[row // 8][tuple(answer[:2])] += 1
    values = list[float]()
    for row, counted in enumerate(counts):
        prompt = batch["input_ids"][row][batch["attention_mask"][row].bool()].tolist()
        expected = {
            (one, two): p * q
            for one, p in likely(model, prompt).items()
            for two, q in likely(model, [*prompt, one]).items()
        }
        values.append(p_value(counted, expected))
    assert combine_pvalues(values).pvalue > 1e-3, values


def likely(model: Any, tokens: list[int]) -> dict[int, float]:
    """The distribution of the token behind these with top-k 4."""
    with torch.no_grad():
        best = model(torch.tensor([tokens])).logits[0, -1].topk(4)
    return dict(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


def test_a_rollout_is_the_same_text_with_and_without_drafts(model: Any, batch: Any) -> None:
    """So the gradient of a step is the same, too, bit for bit, where drafts are copied and weights are float32."""
    texts, logprobs = list[Any](), list[torch.Tensor]()
    for loop in (forerun.hf(None), forerun.hf("suffix", adaptive=False)):
        torch.manual_seed(5)
        keywords = {"do_sample": True, "temperature": 0.6, "num_return_sequences": 4, "return_dict_in_generate": True}
        for _ in range(2):
            found = model.generate(**batch, max_new_tokens=24, **keywords, custom_generate=loop)
            texts.append(found.sequences.tolist())
            logprobs.append(found.logprobs)
    assert texts[:2] == texts[2:]
    torch.testing.assert_close(logprobs[1], logprobs[3], atol=1e-5, rtol=1e-5)
    with pytest.raises(ArgumentError, match="num_speculative_tokens are options of a drafter"):
        forerun.hf(None, num_speculative_tokens=3)


def test_sampling_follows_torchs_seed_and_its_processors(model: Any, batch: Any) -> None:
    loop = forerun.hf("ngram")
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        out = model.generate(**batch, max_new_tokens=15, do_sample=True, top_k=2, custom_generate=loop)
        texts.append(out[:, batch["input_ids"].shape[1] :].tolist())
    assert texts[0] == texts[1] != texts[2]


def test_a_draft_model_a_streamer_and_a_criterion(
    model: Any, batch: Any, checkpoint: Path, draft_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class After(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= start + 7])

    one = {name: value[:1] for name, value in batch.items()}
    start = one["input_ids"].shape[1]
    streamer = TextStreamer(AutoTokenizer.from_pretrained(checkpoint), skip_prompt=True)
    loop = forerun.hf("draft_model", streamer=streamer, model=str(draft_checkpoint), num_speculative_tokens=3)
    keywords = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [After()], "eos_token_id": None}
    expected = model.generate(**one, **keywords)
    found = model.generate(**one, **keywords, custom_generate=loop)
    assert found.tolist() == expected.tolist()
    assert found.shape[1] == start + 7
    assert capsys.readouterr().out.strip()


def test_what_a_speculative_loop_does_not_compute_is_refused(model: Any, batch: Any) -> None:
    for more in ({"num_beams": 2}, {"output_attentions": True, "return_dict_in_generate": True}):
        with pytest.raises(ArgumentError, match=next(iter(more))):
            model.generate(**batch, max_new_tokens=4, **more, custom_generate=forerun.hf("ngram"))


def test_a_prompt_that_is_more_than_token_ids_is_refused(model: Any, batch: Any) -> None:
    """Nothing of it would be read: the answer would be to another prompt."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    states, loop = model.get_input_embeddings()(ids), forerun.hf("ngram")
    for given in ({}, {"input_ids": ids}):
        with pytest.raises(ArgumentError, match="was given inputs_embeds, too or instead"):
            model.generate(**given, inputs_embeds=states, max_new_tokens=4, custom_generate=loop)
    own = mask.cumsum(-1) - 1
    shifted = torch.where(mask.bool(), own + 5, 0)
    with pytest.raises(ArgumentError, match="other position_ids"):
        model.generate(**batch, position_ids=shifted, max_new_tokens=4, custom_generate=loop)
    same = model.generate(**batch, position_ids=own.clamp(min=0), max_new_tokens=4, custom_generate=loop)
    assert same.tolist() == model.generate(**batch, max_new_tokens=4, do_sample=False).tolist()


def test_a_cache_that_holds_tokens_and_guidance_are_refused_by_their_names(model: Any, batch: Any) -> None:
    loop = forerun.hf("ngram")
    filled = model(input_ids=batch["input_ids"], use_cache=True)[1]
    with pytest.raises(ArgumentError, match=r"a (cache|past_key_values) that holds tokens"):
        model.generate(**batch, **{cache_argument(model.model): filled}, max_new_tokens=4, custom_generate=loop)
    with pytest.raises(ArgumentError, match="does not support guidance_scale"):
        model.generate(**batch, guidance_scale=2.0, max_new_tokens=4, custom_generate=loop)


def test_what_ends_rows_early_or_changes_them_is_said_once(
    model: Any, batch: Any, checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "_WARNED", set())
    loop, greedy = forerun.hf(None), {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    context = model.config.max_position_embeddings
    model.generate(**batch, **greedy, max_new_tokens=4, custom_generate=loop)
    assert not caplog.messages
    ragged = {name: torch.cat([value[:1], value[1:].roll(-6, 1)]) for name, value in batch.items()}
    for size in (4, context, context):
        found = model.generate(**ragged, **greedy, max_new_tokens=size, custom_generate=loop)
    assert found.shape == (2, 8 + context - 2), "behind the shorter prompt"
    padding, limits = [message for message in caplog.messages if "right-padding was detected" not in message]
    assert padding.startswith("prompts are padded on the right")
    assert f"a prompt of 8 tokens and max_new_tokens {context} are more than the context of {context}" in limits


def test_options_are_checked_when_the_loop_is_made(model: Any, batch: Any) -> None:
    with pytest.raises(ArgumentError, match=r"'num_speculative_token'\. Did you mean 'num_speculative_tokens'"):
        forerun.hf("ngram", num_speculative_token=3)
    with pytest.raises(ArgumentError, match=r"call it: forerun\.hf\(\.\.\.\)"):
        model.generate(**batch, max_new_tokens=4, custom_generate=forerun.hf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes(checkpoint: Path, batch: Any, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    found = model.generate(**batch, max_new_tokens=8, do_sample=False, custom_generate=forerun.hf("ngram"))
    assert found.tolist() == model.generate(**batch, max_new_tokens=8, do_sample=False).tolist()


def test_threads_may_share_a_loop(model: Any, batch: Any) -> None:
    loop = forerun.hf("ngram", num_speculative_tokens=3)

    def answer(size: int) -> Any:
        return model.generate(**batch, max_new_tokens=size, do_sample=False, custom_generate=loop).tolist()

    sizes = [12, 30, 7, 21] * 3
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, sizes))
    assert together == [model.generate(**batch, max_new_tokens=size, do_sample=False).tolist() for size in sizes]


@pytest.fixture(scope="module")
def short(batch: Any) -> Any:
    """One token a row, as `forced_bos_token_id` needs it."""
    return {name: value[:, -1:] for name, value in batch.items()}


@pytest.fixture(scope="module")
def loop() -> Any:
    return forerun.hf("ngram", num_speculative_tokens=3)


SAMPLED = {
    **{"temperature": 0.5, "top_k": 3, "top_p": 0.3, "min_p": 0.3, "top_h": 0.4, "typical_p": 0.3},
    **{"epsilon_cutoff": 0.1, "eta_cutoff": 0.1},
}
HONOURED = {
    **{"max_new_tokens": 2, "max_length": 4, "min_new_tokens": 3, "min_length": 5, "max_time": -1.0},
    **{"num_return_sequences": 2, "bad_words_ids": [[265], [266]]},
    **{"repetition_penalty": 3.0, "encoder_repetition_penalty": 3.0, "no_repeat_ngram_size": 1},
    **{"encoder_no_repeat_ngram_size": 1, "forced_bos_token_id": 200, "forced_eos_token_id": 9},
    **{"exponential_decay_length_penalty": (0, 3.0), "suppress_tokens": list(range(2, 200))},
    **{"begin_suppress_tokens": list(range(2, 200)), "sequence_bias": {(260,): 9.0}, "renormalize_logits": True},
    "watermarking_config": WatermarkingConfig(),
}
HARMLESS = {
    **{"early_stopping": True, "length_penalty": 2.0, "low_memory": True, "diversity_penalty": 0.5},
    **{"num_beam_groups": 2, "use_cache": False, "cache_implementation": "static", "max_cache_len": 64},
    **{"cache_config": {}, "prefill_chunk_size": 4, "disable_compile": True, "compile_config": CompileConfig()},
    **{"continuous_batching_config": None, "bos_token_id": 7, "decoder_start_token_id": 7, "pad_token_id": 7},
    **{"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "constant", "assistant_lookbehind": 3},
    **{"assistant_confidence_threshold": 0.5, "assistant_ensemble_weight": 0.5, "target_lookbehind": 3},
    **{"max_matching_ngram_size": 3, "remove_invalid_values": True, "is_assistant": False},
}
UNUSED_DRAFTERS = {
    **{"prompt_lookup_num_tokens": 3, "assistant_early_exit": 1, "use_mtp": True, "speculation_type": "dflash"}
}
REFUSED = {
    **{"num_beams": 2, "penalty_alpha": 0.6, "dola_layers": "high", "force_words_ids": [[[5]]], "constraints": [5]},
    **{"guidance_scale": 2.0, "output_attentions": True, "output_hidden_states": True},
    **{"stop_strings": ["a"], "token_healing": True},  # By transformers itself, for want of a tokenizer
}
ELSEWHERE = ("do_sample", "eos_token_id", "output_logits", "output_scores", "return_dict_in_generate")
NO_OPTIONS = ("transformers_version", "_from_model_config")


def test_every_field_of_a_generation_config_has_its_place() -> None:
    tables = (SAMPLED, HONOURED, HARMLESS, UNUSED_DRAFTERS, REFUSED, ELSEWHERE, NO_OPTIONS)
    assert Counter(list(vars(GenerationConfig()))) == Counter(name for table in tables for name in table)


def answer(model: Any, short: Any, loop: Any, **options: Any) -> tuple[list[list[int]], torch.Tensor]:
    """The texts, or the first rows of a sampled one, and the scores behind them."""
    keywords = {"max_new_tokens": 4, "do_sample": False, **options, "output_scores": True}
    found = model.generate(**short, **keywords, return_dict_in_generate=True, custom_generate=loop)
    rows = 1 if keywords["do_sample"] else len(found.scores)
    return found.sequences.tolist() if rows > 1 else [], torch.stack(found.scores[:rows])


@pytest.mark.parametrize("name", [*SAMPLED, *HONOURED])
def test_an_option_counts_as_in_transformers(model: Any, short: Any, loop: Any, name: str) -> None:
    options = {"do_sample": name in SAMPLED, "top_k": 0, name: {**SAMPLED, **HONOURED}[name]}
    options |= {"max_new_tokens": None} if name == "max_length" else {}
    options |= {"do_sample": True} if name == "num_return_sequences" else {}
    expected, found = (answer(model, short, custom, **options) for custom in (None, loop))
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=1e-4)
    usual = answer(model, short, loop, do_sample=options["do_sample"], top_k=0)
    assert found[1].shape != usual[1].shape or not torch.allclose(found[1], usual[1]), "the option changes something"


@pytest.mark.parametrize("name", [*HARMLESS, *UNUSED_DRAFTERS])
def test_an_option_changes_no_text(
    model: Any, short: Any, loop: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    option = {name: {**HARMLESS, **UNUSED_DRAFTERS}[name]}
    found, usual = answer(model, short, loop, **option), answer(model, short, loop)
    assert found[0] == usual[0] and torch.equal(found[1], usual[1])
    assert (f"{name} of generate() is not used" in caplog.text) == (name in UNUSED_DRAFTERS)


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_would_give_another_text_is_refused(model: Any, short: Any, loop: Any, name: str) -> None:
    message = f"forerun.hf does not support .*{name}"
    if name in ("stop_strings", "token_healing"):
        message = "tokenizer"
    with pytest.raises(ValueError, match=message):
        answer(model, short, loop, top_k=4, **{name: REFUSED[name]})


def at_lengths(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
    return torch.tensor([len(row) >= 11 + 4 * index for index, row in enumerate(ids)])


@pytest.mark.parametrize(
    "criterion",
    [
        *(at_lengths, lambda ids, scores, **_: ids.shape[1] >= 12, EosTokenCriteria(list(range(2, 278, 3)))),
        *(MaxLengthCriteria(11), lambda ids, scores, **_: scores[-1].amax(-1) > 2.5),
        lambda ids, scores, **_: torch.tensor(len(scores) > 2 and bool((scores[0] != scores[2]).all())),
    ],
    ids=["by row", "scalar", "other ends", "shorter", "by scores", "all scores"],
)
def test_a_criterion_ends_rows_as_in_transformers(model: Any, batch: Any, loop: Any, criterion: Any) -> None:
    keywords = {"max_new_tokens": 12, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    keywords |= {"stopping_criteria": [criterion], "pad_token_id": 7}
    expected = model.generate(**batch, **keywords).sequences
    found = model.generate(**batch, **keywords, custom_generate=loop).sequences
    assert found.tolist() == expected.tolist()


def test_a_criterion_gets_no_scores_unless_they_are_kept(model: Any, batch: Any, loop: Any) -> None:
    seen = list[Any]()

    def criterion(ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        seen.append((tuple(ids.shape), scores))
        return False

    model.generate(**batch, max_new_tokens=1, do_sample=False, stopping_criteria=[criterion], custom_generate=loop)
    assert seen == [((2, 9), None)] * 2


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_an_exception_of_the_users_code_comes_out_as_itself(model: Any, batch: Any, loop: Any, name: str) -> None:
    def fails(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        model.generate(**batch, max_new_tokens=4, **{name: [fails]}, custom_generate=loop)


def test_the_time_that_the_engine_takes_to_be_built_does_not_count(
    model: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, make = [1e9], huggingface.LLM

    def built(*given: Any, **options: Any) -> Any:
        clock[0] += 100
        return make(*given, **options)

    monkeypatch.setattr("time.time", lambda: clock[0])
    monkeypatch.setattr(huggingface, "LLM", built)
    keywords = {"max_new_tokens": 6, "max_time": 50.0, "eos_token_id": None, "pad_token_id": 7}
    assert model.generate(**batch, **keywords, custom_generate=forerun.hf("ngram")).shape == (2, 8 + 6)
