"""``model.generate(custom_generate=forerun.hf(...))`` against transformers' own loop."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, TextStreamer

import forerun
from forerun.errors import ArgumentError


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
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 3, "min_new_tokens": 12},
        {"suppress_tokens": [40, 41, 42]},
    ],
)
def test_greedy_is_the_same_for_left_padded_batches(model: Any, batch: Any, options: Any) -> None:
    keywords = {"max_new_tokens": 20, "do_sample": False, **options}
    expected = model.generate(**batch, **keywords)
    found = model.generate(**batch, **keywords, custom_generate=forerun.hf("ngram", num_speculative_tokens=4))
    assert found.tolist() == expected.tolist()


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
    with pytest.raises(ArgumentError, match="num_beams"):
        model.generate(**batch, max_new_tokens=4, num_beams=2, custom_generate=forerun.hf("ngram"))
    with pytest.raises(ArgumentError, match="output_scores"):
        model.generate(
            **batch,
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_scores=True,
            custom_generate=forerun.hf("ngram"),
        )


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


def test_threads_may_share_a_loop(model: Any, batch: Any) -> None:
    loop = forerun.hf("ngram", num_speculative_tokens=3)

    def answer(size: int) -> Any:
        return model.generate(**batch, max_new_tokens=size, do_sample=False, custom_generate=loop).tolist()

    sizes = [12, 30, 7, 21] * 3
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(answer, sizes))
    assert together == [model.generate(**batch, max_new_tokens=size, do_sample=False).tolist() for size in sizes]
