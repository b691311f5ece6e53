"""Where the tests run, and what they share."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from forerun import LLM, SamplingParams, demo
from forerun.model import masks
from forerun.model.kernels import attention, forwards, module_forwards, packing
from forerun.shipped import resolve
from forerun.types import RequestOutput
from simulated.arms import ARMS

DEVICE = os.environ.get("FORERUN_TEST_DEVICE", "cuda")
CUDA = torch.device(DEVICE).type == "cuda"
DRAFTING: dict[str, dict[str, Any]] = {
    arm: {"adaptive": False, **config} for arm, config in ARMS.items() if config is not None
}
"""The configurations whose waits are counted, which draft the same at every step."""
EAGLE3, TREE, DRAFT = (DRAFTING[arm] for arm in ("eagle3", "eagle3-tree", "draft_model"))
SAYS_FAILED = "recording on the device failed"


def moved(module: nn.Module) -> nn.Module:
    """A copy on the device."""
    return copy.deepcopy(module).to(DEVICE).eval()


def stand_in(monkeypatch: pytest.MonkeyPatch, ops: Any, layer: Any) -> None:
    """Make `ops` the fused operations of this device, None: those that it has, and `layer` those of whole layers."""
    for module in (forwards, module_forwards, masks):
        monkeypatch.setattr(module, "streamed", lambda _device: layer)
    monkeypatch.setenv(forwards.LAYERS_BY, "whole")
    if ops is not None:
        for module in (attention, module_forwards):
            monkeypatch.setattr(module, "fused", lambda _device: ops)
        monkeypatch.setattr(packing, "packable", lambda _layer: False)
        monkeypatch.setattr(packing, "joinable", lambda layer: type(layer) is nn.Linear)
        monkeypatch.setattr(packing.PackedWeight, "of", packing.JoinedWeight)


def wait() -> None:
    """For all that the device was given."""
    if CUDA:
        torch.cuda.synchronize()


@cache
def contexts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Beginnings of the shipped files, of so many tokens."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    texts = [prompt.text for prompt in demo.prompts()]
    return [
        tokenizer.encode(texts[place % len(texts)], add_special_tokens=False, verbose=False)[:length]
        for place, length in enumerate(lengths)
    ]


def given(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """The same as prompts."""
    return [{"prompt_token_ids": tokens} for tokens in contexts(tuple(lengths))]


def shipped(config: dict[str, Any] | None = None, *, device: str = DEVICE, rows: int = 3, **more: Any) -> LLM:
    """The shipped model on the device."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 400, **more}
    return LLM("demo", device=device, speculative_config=config, max_num_seqs=rows, **settings)


def greedy(tokens: int, **more: Any) -> SamplingParams:
    """Exactly so many tokens at temperature 0."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Of the first answer to each prompt."""
    return [output.outputs[0].token_ids for output in outputs]


def differences(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> list[str]:
    """Where rows differ, readably."""
    said = []
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        if list(one) != list(other):
            pairs = zip(one, other, strict=False)
            place = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
            around = slice(max(0, place - 3), place + 4)
            said.append(f"row {row} from token {place} on: {list(one[around])} instead of {list(other[around])}")
    return said


@contextmanager
def no_recording_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fails with what was said where a recording failed."""
    yield
    failed = [record.getMessage() for record in caplog.records if SAYS_FAILED in record.getMessage()]
    assert not failed, failed
