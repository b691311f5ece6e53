"""The self-check passes for every family and notices each way in which a model can fail to follow the tree."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers

from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import Target, self_check, support
from forerun.model.cache import SlotCache
from forerun.model.kernels import accelerate
from forerun.model.masks import MaskStyle
from forerun.model.prepare import cache_bytes_per_token
from forerun.model.support import named_sizes
from model.families import FAMILIES, WINDOW, make, plain, random_tokens
from model.tiny import build


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
    def broken(model: Any, **_: Any) -> str:
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(1.05)
        return "broken"

    monkeypatch.setattr(accelerate, "accelerate", broken)
    Target.load(make("llama"))
    refused(make("llama"), "failed the self-check", repack=True)


def _wrong_chunk(types: tuple[str, ...], config: Any) -> MaskStyle:
    return MaskStyle(types=types, window=None, chunk=config.attention_chunk_size + 1)


def test_a_chunk_that_is_one_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (WINDOW, 300):
        model = make("llama4", attention_chunk_size=chunk)
        Target.load(model, slots=32)
        assert model.config.attention_chunk_size == chunk
        types = MaskStyle.of(model.config).types
        with monkeypatch.context() as patched:
            patched.setattr(MaskStyle, "of", partial(_wrong_chunk, types))
            refused(model, "failed the self-check")


def test_attention_that_changes_behind_the_check_ends_the_context(caplog: pytest.LogCaptureFixture) -> None:
    """Doge's layers choose `keep_window_size` tokens by themselves, later ones included; below it they take all."""
    model = build("doge", keep_window_size=100)
    target = Target.load(model, slots=200)
    assert target.max_length == 100
    assert "limited to 100 of 512 tokens" in caplog.text and "past keep_window_size = 100" in caplog.text
    tokens = random_tokens(100, 0)
    target.prefill([0], [tokens[:-1]])
    assert (target.score([0], [TokenTree(tokens[-1])]).logits[0, 0] - plain(model, tokens)[-1]).abs().max() <= 2e-5
    with pytest.raises(ArgumentError, match="exceed the context of 100"):
        target.prefill([0], [tokens[:2]])
    refused(build("doge", keep_window_size=16), "self-check past keep_window_size = 16")
    assert Target.load(build("doge", keep_window_size=508), slots=32).max_length == 508, "the check has no room behind"
    caplog.clear()
    assert Target.load(build("doge", keep_window_size=512), slots=32).max_length == 512, "it is never reached"
    assert not caplog.text


def test_sizes_that_change_nothing_limit_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make("llama")
    model.config.sparse = {"block_size": 50, "windows": [70, 100]}
    assert Target.load(model, slots=32).max_length == 512
    assert not caplog.text
    monkeypatch.setattr(self_check, "_CPU_WORK", 80 * model.num_parameters())
    assert Target.load(model, slots=32).max_length == 100, "past 70, which is cheap, it was found right"
    assert "was not checked past sparse.windows = 100" in caplog.text


def test_every_size_that_a_configuration_names() -> None:
    config = transformers.LlamaConfig(
        index_topk=8,
        compress_rates={"csa": 4, "hca": 128},
        sliding_windows=[0, 7, 9],
        layers=[{"chunk_length": 33}],
        use_local=True,
        num_local_experts=64,
        moe_topk=3,
        topk_group=2,
        conv_chunksize=44,
        attn_config={"num_windows": 55},
        vision_config={"window_size": 77},
    )
    assert named_sizes(config) == {
        "index_topk": 8,
        "compress_rates.csa": 4,
        "compress_rates.hca": 128,
        "sliding_windows": 9,
        "layers.chunk_length": 33,
        "index_topk x compress_rates.csa": 32,
        "index_topk x compress_rates.hca": 1024,
        "index_topk x layers.chunk_length": 264,
    }


def test_positions_that_are_counted_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Llama 4 scales queries by ``get_seq_length``, in steps of `floor_scale`; below the first all is well."""
    model = make("llama4", floor_scale=90)
    assert Target.load(model, slots=32).max_length == 89
    assert "limited to 89 of 512" in caplog.text
    assert Target.load(make("llama4", floor_scale=90, attn_temperature_tuning=False), slots=32).max_length == 512
    monkeypatch.setattr(support, "_switch_points", lambda *_: [])
    refused(model, "a step after a gathered path")


def test_reasons_in_words() -> None:
    refused(build("bert"), "is not causal.*is_decoder")
    refused(build("bloom"), "does not take a 4D attention mask.*transformers' own generate")
    refused(build("mpt"), "ignores the positions")
    refused(build("falcon", alibi=True), "4D attention mask")
    refused(build("bart"), "ignores the positions")
    refused(build("deepseek_v32"), "indexed_attention.*transformers' own generate")


def test_windows_that_differ_from_layer_to_layer() -> None:
    refused(build("mistral", per_layer_config={1: {"sliding_window": 30}}), "windows of different sizes")


@pytest.mark.parametrize("kind", ["bert", "bert-generation", "electra", "megatron-bert"])
def test_encoders_that_were_made_decoders(kind: str) -> None:
    Target.load(build(kind, is_decoder=True), slots=32)


def test_windows_that_the_attention_applies_by_itself() -> None:
    config = transformers.GPTNeoConfig(
        vocab_size=99, hidden_size=64, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]]
    )
    refused(transformers.GPTNeoForCausalLM(config), "layers of type local")


def test_a_plain_forward_that_fails() -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(63, 96)
    refused(model, "even a plain forward fails")
