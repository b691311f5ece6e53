"""Weights are exchanged as if the model had been loaded with them, and come back to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from forerun.errors import CheckpointError
from forerun.model.kernels.accelerate import accelerate
from forerun.model.kernels.packing import PackedLinear, exchange, packs, ready

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def build(family: str, seed: int, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    if family == "biased":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES)).to(dtype).eval()
    tied = family == "tied"
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("family", ["untied", "tied", "biased"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_exchanged_weights_compute_what_a_fresh_model_computes(family: str, dtype: torch.dtype) -> None:
    serving, other = build(family, 0, dtype), build(family, 1, dtype)
    state = {name: value.double() for name, value in other.state_dict().items()}
    accelerate(serving)
    fresh = copy.deepcopy(other)
    accelerate(fresh)
    packed = any(isinstance(module, PackedLinear) and module.group is not None for module in serving.modules())
    assert packed == packs(dtype)
    before, expected = logits(serving), logits(fresh)
    weights = ready(serving, state)
    assert torch.equal(logits(serving), before), "made ready beside it"
    with torch.inference_mode():  # the engine's steps run under it
        former = exchange(weights)
    assert torch.equal(logits(serving), expected) and not torch.equal(before, expected)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in serving.state_dict().items())
    exchange(former)
    assert torch.equal(logits(serving), before)
    assert former.nbytes() == weights.nbytes() > 0


def test_later_changes_of_the_state_do_not_reach_the_model() -> None:
    serving, state = build("untied", 0), build("untied", 1).state_dict()
    exchange(ready(serving, state))
    before = logits(serving)
    for value in state.values():
        value.zero_()
    assert torch.equal(logits(serving), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_models_weights_are_refused(dtype: torch.dtype) -> None:
    serving = build("untied", 0, dtype)
    accelerate(serving)
    state = {name: value.float() for name, value in build("untied", 1).state_dict().items()}
    lacking = {name: value for name, value in state.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(CheckpointError, match=r"up_proj.weight is missing"):
        ready(serving, lacking)
    with pytest.raises(CheckpointError, match=r"k_proj.weight has the shape \(4, 4\)"):
        ready(serving, {**state, "model.layers.0.self_attn.k_proj.weight": torch.zeros(4, 4)})
