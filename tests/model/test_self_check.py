"""The self-check passes for every family, sees every fault of how a model follows the tree, and is done once.

What it sees of a trained model: `tests/real/test_planted_faults.py`.
"""

import os
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.self_check import FAULTS, Fault, planted
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, NumericError, UnsupportedModelError
from forerun.model import TransformersTarget, prepare, self_check, support
from forerun.model.cache import SlotCache
from forerun.model.kernels import accelerate
from forerun.model.masks import MaskStyle
from forerun.model.support import named_sizes
from model.families import FAMILIES, WINDOW, make, plain, random_tokens
from model.tiny import build
from selection import in_turn, one_in, slow


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, and a cache of its own."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one with every check."""
    made, expect = list[Any](), self_check.expect

    def counted(model: Any, *args: Any, **keywords: Any) -> Any:
        made.append(model)
        return expect(model, *args, **keywords)

    monkeypatch.setattr(self_check, "expect", counted)
    return made


def load(path: Path, **options: Any) -> TransformersTarget:
    return TransformersTarget.load(path, rows=1, slots=32, device="cpu", **options)


def test_a_second_start_compares_nothing(saved: Path, checks: list[Any]) -> None:
    first = load(saved)
    assert len(checks) == 1
    second = load(saved)
    assert len(checks) == 1
    assert second.cache.nbytes() == first.cache.nbytes(), "reserved at load"
    scored = [target.prefill([0], [[5, 6, 7]]).logits for target in (first, second)]
    assert torch.equal(*scored)


def test_what_could_change_it_asks_again(saved: Path, checks: list[Any]) -> None:
    load(saved)
    load(saved, dtype="bfloat16")
    load(saved, repack=False)
    counted = len(checks)
    load(saved, dtype="bfloat16")
    assert len(checks) == counted
    for file in saved.glob("*.safetensors"):
        os.utime(file, ns=(1, 1))
    load(saved)
    assert len(checks) > counted


def test_a_broken_file_is_ignored(saved: Path, checks: list[Any], tmp_path: Path) -> None:
    load(saved)
    [kept] = (tmp_path / "cache" / "checked").iterdir()
    for text in ("", "{", "[]", '{"accepted": 3}', '{"accepted": [3]}'):
        kept.write_text(text)
        counted = len(checks)
        load(saved)
        assert len(checks) == counted + 1


def test_what_fails_is_not_kept(saved: Path, checks: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(SlotCache, "move", lambda *_: None)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="failed the self-check"):
                load(saved)
    load(saved)
    assert len(checks) == 3


def test_what_helps_is_tried_before_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose 16 bits alone are wrong: float32 is offered, because it passed."""
    model = make("llama", dtype=torch.bfloat16)
    forward = SlotCache.write

    def rough(self: SlotCache, keys: Any, values: Any, layer: int) -> None:
        forward(self, keys if keys.dtype == torch.float32 else 2 * keys, values, layer)

    monkeypatch.setattr(SlotCache, "write", rough)
    with pytest.raises(UnsupportedModelError, match=r"times its own noise.*In float32 it passes: load it with dtype="):
        TransformersTarget.load(model)
    monkeypatch.setattr(prepare, "_copy", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="No option of forerun changes that"):
        TransformersTarget.load(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_nan_in_one_weight(name: str, dtype: torch.dtype) -> None:
    model = make("llama", dtype=dtype)
    model.get_parameter(name).data[77, 5] = torch.nan
    with pytest.raises(NumericError, match=r"(model\.layers\.2|token 77|lm_head).* is not finite. The checkpoint is"):
        TransformersTarget.load(model)


def refused(model: Any, match: str, **options: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        TransformersTarget.load(model, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_attention_that_ignores_the_mask(dtype: torch.dtype) -> None:
    def ignoring(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> Any:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], 1) for each in (key, value))
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


@pytest.mark.parametrize("size", [WINDOW, 300])
@pytest.mark.parametrize(
    ("name", "option", "part"),
    [
        *((name, "sliding_window", "window") for name in ("mistral", "gemma3", "gpt_oss")),
        ("llama4", "attention_chunk_size", "chunk"),
    ],
)
def test_a_window_or_chunk_that_is_one_too_wide(
    monkeypatch: pytest.MonkeyPatch, name: str, option: str, part: str, size: int
) -> None:
    """Also where it is far longer than what the check runs."""
    model = make(name, **{option: size})
    TransformersTarget.load(model, slots=32)
    assert getattr(model.config, option) == size
    types = MaskStyle.of(model.config).types

    def wrong(config: Any) -> MaskStyle:
        return MaskStyle(types=types, **{"window": None, part: getattr(config, option) + 1})

    monkeypatch.setattr(MaskStyle, "of", wrong)
    refused(model, "failed the self-check")
    assert getattr(model.config, option) == size


def test_a_commit_that_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "move", lambda *_: None)
    refused(make("llama"), "a step after a gathered path")


def test_repacking_that_breaks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any, **_: Any) -> str:
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight.mul_(1.05)
        return "broken"

    monkeypatch.setattr(accelerate, "accelerate", broken)
    TransformersTarget.load(make("llama"))
    refused(make("llama"), "failed the self-check", repack=True)


def test_attention_that_changes_behind_the_check_ends_the_context(caplog: pytest.LogCaptureFixture) -> None:
    """Doge's layers choose `keep_window_size` tokens by themselves, later ones included; below it they take all."""
    model = build("doge", keep_window_size=100)
    target = TransformersTarget.load(model, slots=200)
    assert target.max_length == 100
    assert "limited to 100 of 512 tokens" in caplog.text and "past keep_window_size = 100" in caplog.text
    tokens = random_tokens(100, 0)
    target.prefill([0], [tokens[:-1]])
    assert (target.score([0], [TokenTree(tokens[-1])]).logits[0, 0] - plain(model, tokens)[-1]).abs().max() <= 2e-5
    with pytest.raises(ArgumentError, match="exceed the context of 100"):
        target.prefill([0], [tokens[:2]])
    refused(build("doge", keep_window_size=16), "self-check past keep_window_size = 16")
    for size in (508, 512):  # behind the one the check has no room, the other is never reached
        caplog.clear()
        assert TransformersTarget.load(build("doge", keep_window_size=size), slots=32).max_length == size
    assert not caplog.text


def test_sizes_without_effect_limit_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = make("llama")
    model.config.sparse = {"block_size": 50, "windows": [70, 100]}
    assert TransformersTarget.load(model, slots=32).max_length == 512
    assert not caplog.text
    monkeypatch.setattr(self_check, "_CPU_WORK", 80 * model.num_parameters())
    assert TransformersTarget.load(model, slots=32).max_length == 100, "past 70, which is cheap, it was found right"
    assert "was not checked past sparse.windows = 100" in caplog.text


def test_every_size_that_a_configuration_names() -> None:
    config = transformers.LlamaConfig(
        **{"index_topk": 8, "compress_rates": {"csa": 4, "hca": 128}, "sliding_windows": [0, 7, 9]},
        **{"layers": [{"chunk_length": 33}], "use_local": True, "num_local_experts": 64, "moe_topk": 3},
        **{"topk_group": 2, "conv_chunksize": 44, "attn_config": {"num_windows": 55}},
        vision_config={"window_size": 77},
    )
    assert named_sizes(config) == {
        **{"index_topk": 8, "compress_rates.csa": 4, "compress_rates.hca": 128, "sliding_windows": 9},
        **{"layers.chunk_length": 33, "index_topk x compress_rates.csa": 32, "index_topk x compress_rates.hca": 1024},
        "index_topk x layers.chunk_length": 264,
    }


def test_positions_counted_in_the_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Llama 4 scales queries by ``get_seq_length``, in steps of `floor_scale`; below the first all is well."""
    model = make("llama4", floor_scale=90)
    assert TransformersTarget.load(model, slots=32).max_length == 89
    assert "limited to 89 of 512" in caplog.text
    untuned = make("llama4", floor_scale=90, attn_temperature_tuning=False)
    assert TransformersTarget.load(untuned, slots=32).max_length == 512
    monkeypatch.setattr(support, "_switch_points", lambda *_: [])
    refused(model, "a step after a gathered path")


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (partial(build, "bert"), "is not causal.*is_decoder"),
        (partial(build, "openai-gpt"), "does not take a 4D attention mask.*transformers' own generate"),
        (partial(build, "roformer", is_decoder=True), "ignores the positions"),
        (partial(build, "mistral", per_layer_config={1: {"sliding_window": 30}}), "windows of different sizes"),
    ],
    ids=["bert", "openai-gpt", "roformer", "mistral"],
)
def test_reasons_in_words(made: Any, reason: str) -> None:
    refused(made(), reason)


def test_a_plain_forward_that_fails() -> None:
    model = make("llama")
    model.model.layers[1].mlp.up_proj = torch.nn.Linear(63, 96)
    refused(model, "even a plain forward fails")


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
    seen(model_of(kind, torch.float32), fault)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)], ids=str)
@pytest.mark.parametrize(("kind", "fault"), cases(in_model=False, kinds=("mistral",)))
def test_a_planted_fault_is_seen_in_16_bits(kind: str, fault: Fault, dtype: torch.dtype) -> None:
    seen(model_of(kind, dtype), fault)


def seen(model: Any, fault: Fault) -> None:
    with planted(fault, model), pytest.raises(UnsupportedModelError, match="failed the self-check"):
        TransformersTarget.load(model, rows=2, slots=64)


@cache
def near_ties() -> Any:
    """A model with two experts in its last layer whose scores differ by rounding alone: which of them is chosen last
    depends on the order of sums.
    """
    model = build("qwen3_moe")
    rows = model.model.layers[-1].mlp.gate.weight.data
    rows[2] = rows[1] * (1 + 2**-23 * torch.randn_like(rows[1]))
    return model


def test_a_choice_at_a_near_tie_is_no_fault() -> None:
    model = near_ties()
    target = TransformersTarget.load(model, rows=2, slots=64)
    with self_check.short_windows(model.config):
        near = self_check.expect(model, random_tokens(96, 0), sizes=False).near
    assert max(self_check.errors(target, near).values()) > near.limit
    least = self_check.sensitivity(model, near)
    assert max(self_check.errors(target, near, least).values()) <= near.limit
    assert least.max() > near.limit > least.median()


@pytest.mark.parametrize("fault", one_in(3, [fault for fault in FAULTS if not fault.in_model]), ids=attrgetter("name"))
def test_a_planted_fault_is_seen_beside_near_ties(fault: Fault) -> None:
    if not fault.suits(near_ties()):
        pytest.skip("this model has none of what it changes")
    seen(near_ties(), fault)


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
