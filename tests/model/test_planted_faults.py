"""The self-check sees every fault that is planted, in models of several kinds and in every dtype, and none in the sound
model. What it sees of a trained model: `tests/real/test_planted_faults.py`."""

from typing import Any

import pytest
import torch

from benchmarks.self_check import FAULTS, Fault, planted
from forerun.errors import UnsupportedModelError
from forerun.model import TransformersTarget, self_check
from forerun.model.kernels import accelerate
from model.families import FAMILIES, make, random_tokens
from selection import in_turn, slow

KINDS = ("llama", "qwen3", "mistral", "gemma2", "llama4")
HALF = (torch.bfloat16, torch.float16)
_MODELS: dict[tuple[str, torch.dtype], Any] = {}


def model_of(kind: str, dtype: torch.dtype) -> Any:
    """A random model; made once."""
    if (kind, dtype) not in _MODELS:
        small = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0} if kind == "gemma2" else {}
        _MODELS[kind, dtype] = make(kind, dtype=dtype, **small)
    return _MODELS[kind, dtype]


def cases(*, in_model: bool, kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """Every fault in every kind of model that it suits."""
    return [
        pytest.param(kind, fault, id=f"{kind}-{fault.name}")
        for kind in kinds
        for fault in FAULTS
        if fault.in_model == in_model and fault.suits(model_of(kind, torch.float32))
    ]


@pytest.mark.parametrize(("kind", "fault"), cases(in_model=False))
def test_a_planted_fault_is_seen(kind: str, fault: Fault) -> None:
    refused(model_of(kind, torch.float32), fault)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)], ids=str)
@pytest.mark.parametrize(("kind", "fault"), cases(in_model=False, kinds=("mistral",)))
def test_a_planted_fault_is_seen_in_16_bits(kind: str, fault: Fault, dtype: torch.dtype) -> None:
    refused(model_of(kind, dtype), fault)


def refused(model: Any, fault: Fault) -> None:
    with planted(fault, model), pytest.raises(UnsupportedModelError, match="failed the self-check"):
        TransformersTarget.load(model, rows=2, slots=64)


@pytest.mark.parametrize(("kind", "fault"), cases(in_model=True))
def test_a_module_that_changes_when_it_is_repacked(kind: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32. In 16 bits replaced modules are tried one by one: `tests/model_kernels/test_forwards.py`."""
    model = model_of(kind, torch.float32)
    if kind == "gemma2" and "epsilon" in fault.name:
        pytest.skip("its embeddings are so large that epsilon counts nothing")
    monkeypatch.setattr(accelerate, "accelerate", lambda *_, **__: fault.plant(monkeypatch, model))
    with pytest.raises(UnsupportedModelError, match="failed the self-check"):
        TransformersTarget.load(model, rows=2, slots=64, repack=True)


@pytest.mark.parametrize(("kind", "dtype"), in_turn(FAMILIES, HALF), ids=str)
def test_the_sound_model_has_none(kind: str, dtype: torch.dtype) -> None:
    """Its error stays well within what is allowed."""
    model = make(kind, dtype=dtype)
    for seed in range(2):
        ids = random_tokens(96, seed)
        with self_check.short_windows(model.config):
            expected = self_check.expect(model, ids, sizes=False)
            found = self_check.errors(TransformersTarget(model, rows=2, slots=expected.slots), expected.near)
        assert max(found.values()) <= expected.near.limit, (found, expected.near.limit)
