"""The self-check passes for every family and notices each way in which a model can fail to follow the tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from forerun.errors import UnsupportedModelError
from forerun.target import Target, fast
from forerun.target.cache import SlotCache
from forerun.target.masks import MaskStyle
from forerun.target.memory import cache_bytes_per_token
from target.families import FAMILIES, WINDOW, make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_passes(name: str, dtype: torch.dtype) -> None:
    target = Target.load(make(name, dtype=dtype), rows=1, slots=32)
    assert target.lengths == [0]
    assert (target.rows, target.slots, target.cache.rows) == (1, 32, 1)
    assert target.cache.nbytes() == cache_bytes_per_token(target.config, dtype.itemsize) * 33, "reserved at load"


def refused(model: Any, match: str, **options: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        Target.load(model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_attention_that_ignores_the_mask(dtype: torch.dtype) -> None:
    def ignoring(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=causal)
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register("ignoring", ignoring)
    model = make("llama", dtype=dtype)
    model.set_attn_implementation("ignoring")
    refused(model, "failed the self-check.*differs from a plain forward")


def test_positions_that_are_not_followed() -> None:
    model = make("llama")
    inner = model.model.forward

    def own_positions(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = torch.arange(kwargs["position_ids"].shape[1]).expand_as(kwargs["position_ids"])
        return inner(*args, **kwargs)

    model.model.forward = own_positions
    refused(model, "failed the self-check")


@pytest.mark.parametrize("window", [WINDOW, 300])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_a_window_that_is_one_too_wide(monkeypatch: pytest.MonkeyPatch, name: str, window: int) -> None:
    """Also where the window is far longer than what the check runs."""
    model = make(name, sliding_window=window)
    Target.load(model, slots=32)
    assert model.config.sliding_window == window
    types = MaskStyle.of(model.config).types
    monkeypatch.setattr(MaskStyle, "of", lambda config: MaskStyle(types=types, window=config.sliding_window + 1))
    refused(model, "failed the self-check")
    assert model.config.sliding_window == window


def test_a_commit_that_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "move", lambda *_: None)
    refused(make("llama"), "a step after a gathered path")


def test_repacking_that_breaks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, *, compile: bool) -> str:
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(1.05)
        return "broken"

    monkeypatch.setattr(fast, "accelerate", broken)
    Target.load(make("llama"))
    refused(make("llama"), "failed the self-check", repack=True)


def test_a_model_that_takes_no_tree() -> None:
    config = transformers.BloomConfig(vocab_size=99, hidden_size=64, n_layer=4, n_head=4)
    refused(transformers.BloomForCausalLM(config), "BloomForCausalLM cannot score a token tree")


def test_windows_that_the_attention_applies_by_itself() -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=99, hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]
    )
    refused(transformers.GPTNeoForCausalLM(config), "layers of type local")


def test_a_plain_forward_that_fails() -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(63, 96)
    refused(model, "even a plain forward fails")
