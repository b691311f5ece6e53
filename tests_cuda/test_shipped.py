"""The shipped models on the device: batches that change, dtypes, reproducible mode, stops, preemption, grammars."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from place import CUDA, DEVICE, DRAFTING, EAGLE3, differences, given, greedy, moved, no_recording_failed, shipped
from place import tokens_of as tokens

from engine.loads import DRAFTERS, TEXT, alike, drafter, run, sampled
from engine.loads import greedy as short
from forerun import LLM, SamplingParams
from forerun.errors import ArgumentError, OutOfMemoryError
from forerun.model.memory import available_bytes
from forerun.types import StructuredOutputs

LENGTHS = (40, 3, 150, 17, 90, 61, 5, 33)
PARAMS = [greedy(count) for count in (48, 20, 32, 60, 12, 40, 25, 50)]
CONFIGS: dict[str, dict[str, Any]] = {
    **{arm: DRAFTING[arm] for arm in ("eagle3", "eagle3-tree", "draft_model", "draft_model-tree", "ngram")},
    "auto": {"method": "auto", "model": "demo-eagle3"},
}


@cache
def plain(device: str = DEVICE, rows: int = 3) -> list[list[int]]:
    """Without speculation."""
    return tokens(shipped(device=device, rows=rows).generate(given(LENGTHS), PARAMS))


def test_plain_text_is_that_of_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with no_recording_failed(caplog):
        assert not differences(plain(), plain("cpu"))
        assert not differences(plain(rows=1), plain())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_row_of_a_changing_batch_is_as_without_speculation(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """More prompts than rows, of unequal lengths; twice, so that the second time all passes were recorded before."""
    caplog.set_level(logging.WARNING)
    with no_recording_failed(caplog):
        llm = shipped(CONFIGS[name])
        for turn in range(2):
            outputs = llm.generate(given(LENGTHS), PARAMS, cache_salt=str(turn))
            assert not differences(tokens(outputs), plain())
        told = [output.outputs[0].speculation for output in outputs]
        print(name, "accepted per pass:", [round(one.mean_acceptance_length, 2) for one in told])  # noqa: T201
        assert not any(one.drafter_errors for one in told)
        # "auto" decides by the clock whether drafting pays, and may find that it does not.
        assert name == "auto" or max(one.mean_acceptance_length for one in told) > 1.2


@pytest.mark.parametrize("name", ["eagle3", "eagle3-tree", "draft_model"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_half_precision_it_answers_and_differs_little(
    name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Rounding depends on a pass's shape there, so texts may part where two tokens are nearly as likely."""
    caplog.set_level(logging.WARNING)
    with no_recording_failed(caplog):
        llm = shipped(CONFIGS[name], dtype=dtype if CUDA else "float32")
        expected = tokens(llm.generate(given(LENGTHS), PARAMS, speculative=False))
        found = tokens(llm.generate(given(LENGTHS), PARAMS, cache_salt="drafted"))
    other = differences(found, expected)
    print(dtype, name, f"{len(other)} of {len(LENGTHS)} rows differ", *other, sep="\n  ")  # noqa: T201
    assert len(other) <= len(LENGTHS) // 2


@pytest.mark.parametrize("name", ["eagle3", "draft_model", "ngram"])
def test_reproducible_mode_gives_the_same_bits(name: str) -> None:
    """For chains, in bfloat16; one answer at a time, as products of other batches may be rounded otherwise."""
    settings: dict[str, Any] = {"dtype": "bfloat16" if CUDA else "float32", "reproducible": True}
    llm = shipped(CONFIGS[name], rows=1, **settings)
    expected = tokens(llm.generate(given(LENGTHS), PARAMS, speculative=False))
    found = llm.generate(given(LENGTHS), PARAMS)
    assert not differences(tokens(found), expected)
    batch = tokens(shipped(CONFIGS[name], rows=4, **settings).generate(given(LENGTHS), PARAMS))
    print(name, "in a batch of four", differences(batch, expected))  # noqa: T201


@pytest.mark.parametrize("name", [*DRAFTERS, None])
@pytest.mark.parametrize("make", [short, sampled])
def test_a_preempted_answer_is_that_of_an_engine_with_room(
    checkpoint: Path, draft_checkpoint: Path, name: str | None, make: Any
) -> None:
    config = None if name is None else drafter(name, draft_checkpoint)
    if config is not None and name == "eagle3":
        config["model"] = moved(config["model"])
    prompts = [TEXT[:40], TEXT[20:75], TEXT[50:80], TEXT[9:60]]
    made: dict[str, Any] = {"dtype": "float32", "device": DEVICE, "speculative_config": config, "max_num_seqs": 4}
    roomy, tight = LLM(str(checkpoint), **made), LLM(str(checkpoint), kv_cache_tokens=130, **made)
    expected = [roomy.generate(prompt, make(30))[0] for prompt in prompts]
    ids = [tight.submit(prompt, make(30)) for prompt in prompts]
    outputs, _ = run(tight)
    assert tight.engine.preemptions > 0
    for request_id, wanted in zip(ids, expected, strict=True):
        alike(outputs[request_id].outputs[0], wanted.outputs[0])


def test_stops_processors_and_several_answers(checkpoint: Path, draft_checkpoint: Path) -> None:
    def favour(output: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_add(
            0,
            torch.tensor([(len(output) * 7) % 200], device=logits.device),
            torch.tensor([3.0], device=logits.device, dtype=logits.dtype),
        )

    found = []
    for device in ("cpu", DEVICE):
        llm = LLM(
            str(checkpoint),
            dtype="float32",
            device=device,
            max_num_seqs=4,
            speculative_config=drafter("draft_model", draft_checkpoint),
        )
        text = llm.generate(TEXT[:30], short(30))[0].outputs[0].text
        jobs = [
            short(30, stop=[text[8:10]], logprobs=2, prompt_logprobs=1),
            SamplingParams(temperature=1.0, seed=2, n=3, top_k=20, top_p=0.9, min_p=0.01, max_tokens=20),
            SamplingParams(temperature=0.7, seed=3, max_tokens=20, logits_processors=(favour,)),
            SamplingParams(temperature=0.0, max_tokens=20, bad_words=["the"], min_tokens=5),
        ]
        outputs = llm.generate([TEXT[:30]] * len(jobs), jobs)
        found.append([[(one.token_ids, one.text, one.finish_reason) for one in output.outputs] for output in outputs])
    assert found[0] == found[1]


def test_structured_outputs(checkpoint: Path, draft_checkpoint: Path) -> None:
    pytest.importorskip("llguidance")
    found = []
    for device in ("cpu", DEVICE):
        for config in (None, drafter("draft_model", draft_checkpoint)):
            llm = LLM(str(checkpoint), dtype="float32", device=device, speculative_config=config)
            params = [
                sampled(25, seed=3, structured_outputs=StructuredOutputs(regex="[a-f]{25}")),
                short(25, structured_outputs=StructuredOutputs(regex="[a-f]{25}")),
            ]
            texts = [output.outputs[0].text for output in llm.generate([TEXT[:20]] * 2, params)]
            assert all(set(text) <= set("abcdef") and text for text in texts)
            found.append(texts)
    assert found[0] == found[2] and found[1] == found[3] and found[0][1] == found[1][1]


@pytest.mark.cuda_alone
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"there is no device cuda:7; torch finds \d+ CUDA devices"):
        LLM("demo", device="cuda:7")


@pytest.mark.cuda_alone
def test_memory_is_counted() -> None:
    free, total = torch.cuda.mem_get_info()
    assert 0 < available_bytes(torch.device(DEVICE)) <= total
    with pytest.raises(OutOfMemoryError, match=r"GiB are needed on cuda.*GiB are free") as caught:
        shipped(rows=20_000, max_model_len=2000)
    print(caught.value)  # noqa: T201
    before = torch.cuda.memory_allocated()
    llm = shipped(EAGLE3)
    llm.generate(given((20,)), greedy(10))
    held = torch.cuda.memory_allocated() - before
    counted = llm.target.memory_bytes() + sum(
        one.drafter.memory_bytes() for one in llm.engine.drafting._active.values()
    )
    print(f"{held / 2**20:.0f} MiB are held, {counted / 2**20:.0f} counted; {free / 2**30:.1f} GiB were free")  # noqa: T201
    assert 0.5 * held < counted < 1.5 * held


def test_without_a_device_named_the_accelerator_is_taken() -> None:
    llm = LLM("demo", max_num_seqs=1, max_model_len=100)
    assert not CUDA or llm.target.device.type == "cuda"
    assert not CUDA or llm.target.dtype == torch.bfloat16, "the checkpoint's"
