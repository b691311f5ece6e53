"""Loading: what works, and one clear error for everything that does not."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError
from safetensors.torch import load_file, save_file

from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError
from forerun.model import TransformersTarget, states
from forerun.model.checks import explain_load_error
from forerun.model.identity import fingerprint
from forerun.model.load import LoadOptions, open_model, read_config, resolved_dtype, save_model, stored_bytes
from llamas import tiny_llama
from model.families import make, plain, random_tokens


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(checkpoint: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes one."""
    tensors = load_file(checkpoint / "model.safetensors") | {k.replace("__", "."): v for k, v in changes.items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, checkpoint / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("as_text", [True, False])
def test_a_directory_loads_and_decodes(checkpoint: Path, as_text: bool) -> None:
    target = TransformersTarget.load(str(checkpoint) if as_text else checkpoint, rows=2, slots=64, device="cpu")
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.max_length) == (99, 64, 4, 512)
    assert (target.rows, target.slots, target.dtype, target.device) == (2, 64, torch.float32, torch.device("cpu"))
    assert target.generation_config.eos_token_id == 2
    tokens = random_tokens(9, 0)
    target.prefill([1], [tokens[:-1]])
    logits = target.score([1], [TokenTree(tokens[-1])]).logits[0, -1]
    assert (logits - plain(make("llama"), tokens)[-1]).abs().max() <= 2e-5
    assert target.memory_bytes() > 4 * sum(weight.numel() for weight in target.model.parameters())


def test_loading_and_saving_are_silent_and_open(
    checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    TransformersTarget.load(checkpoint, slots=64, device="cpu")
    save_model(make("llama"), None, tmp_path / "saved")
    assert capfd.readouterr() == ("", ""), "transformers shows a bar"
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "saved").iterdir()} == {0o644}
    edit(checkpoint, model__extra=torch.zeros(2))
    with pytest.raises(CheckpointError):
        TransformersTarget.load(checkpoint, device="cpu")
    assert capfd.readouterr() == ("", ""), "what transformers warns of is in the error"


@pytest.mark.parametrize("emulates", [False, True])
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_auto_takes_float32_where_a_cpu_only_emulates_the_checkpoints_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulates: bool, dtype: str
) -> None:
    for name in ("multiplies", "decodes"):  # as training asks, and as decoding does
        monkeypatch.setattr(f"forerun.model.load.{name}", lambda device, _: not emulates and device.type == "cpu")
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    options = LoadOptions(dtype=dtype, device="cpu")
    config = read_config(tmp_path, options)
    wanted = getattr(torch, {"auto": "float32" if emulates else "bfloat16"}.get(dtype, dtype))
    model = open_model(tmp_path, options, config)
    assert {weight.dtype for weight in model.parameters()} == {wanted}
    assert stored_bytes(tmp_path, options, config) == wanted.itemsize * sum(w.numel() for w in model.parameters())
    assert TransformersTarget.load(tmp_path, slots=64, device="cpu", dtype=dtype, repack=False).dtype is wanted


def test_decoding_and_training_have_their_own_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that emulates bf16 decodes faster in it, with packed weights, and trains faster in float32."""
    monkeypatch.setattr("forerun.model.load.multiplies", lambda *_: False)
    monkeypatch.setattr("forerun.model.load.decodes", lambda *_: True)
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    for repack, wanted in ((None, torch.bfloat16), (True, torch.bfloat16), (False, torch.float32)):
        options = LoadOptions(device="cpu", repack=repack)
        assert resolved_dtype(options, read_config(tmp_path, options)) is wanted


def test_a_model_that_is_handed_in_is_left_alone() -> None:
    model = make("qwen3")
    before = {name: id(module) for name, module in model.named_modules()}
    weights = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    hooks = [dict(module._forward_pre_hooks) for module in model.modules()]
    TransformersTarget.load(model, rows=2, slots=64).prefill([0], [[3, 4]], boundaries=frozenset({1, 4}))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == weights
    assert [dict(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_options_of_loading_make_no_sense_for_a_loaded_model() -> None:
    with pytest.raises(ArgumentError, match="loaded already"):
        TransformersTarget.load(make("llama"), device_map="auto")
    for option in ({"dtype": "bfloat16"}, {"device": "cuda"}, {"device": "meta"}):
        with pytest.raises(ArgumentError, match=r"in torch\.float32 on cpu, and is left as it is"):
            TransformersTarget.load(make("llama"), **option)
    TransformersTarget.load(make("llama"), slots=64, dtype="float32", device="cpu")
    with pytest.raises(ArgumentError, match="'float7' is no dtype"):
        TransformersTarget.load(make("llama"), dtype="float7")
    with pytest.raises(ArgumentError, match="a target is a directory"):
        TransformersTarget.load(42)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"slots": 0}, {"rows": -1}])
def test_sizes_out_of_range(sizes: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        TransformersTarget.load(make("llama"), **sizes)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c", Path("nowhere")])
def test_no_such_directory(name: Any) -> None:
    with pytest.raises(CheckpointError, match="there is no directory"):
        TransformersTarget.load(name)


def cut(size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / WEIGHTS, size)


def configured(**values: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | values))

    return write


def without_a_shard(path: Path) -> None:
    make("llama").save_pretrained(path, max_shard_size="100KB")
    (path / WEIGHTS).unlink(missing_ok=True)
    TransformersTarget.load(path, slots=64, device="cpu")
    next(path.glob("model-00002*")).unlink()


WEIGHTS, NAME = "model.safetensors", "model__layers__1__mlp__up_proj__weight"
# What is no checkpoint of a language model at all: `test_wrong_models`, through every door.
MODULE, SHAPES = r"model\.layers\.1\.mlp\.up_proj\.weight", r" \(3, 3\), expected \(96, 64\)"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unknown architecture": (configured(model_type="llama17"), "llama17"),
    "pickled weights": (lambda path: (path / WEIGHTS).rename(path / "pytorch_model.bin"), r"model\.bin.*never pickle"),
    **{f"{size} bytes": (cut(size), "is (truncated|corrupt)") for size in (0, 4, 1000, 100_000)},
    "garbage header": (lambda path: (path / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"notjson!"), "corrupt"),
    "a header that is nested too deeply": (
        lambda path: (path / WEIGHTS).write_bytes((200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995),
        "nested too deeply",
    ),
    "a missing shard": (without_a_shard, r"incomplete.*model-00002"),
    "a missing tensor": (lambda path: edit(path, **{NAME: None}), f"missing: {MODULE}"),
    "a tensor too many": (lambda path: edit(path, model__extra=torch.zeros(2)), r"unexpected: model\.extra"),
    "another shape": (lambda path: edit(path, **{NAME: torch.zeros(3, 3)}), f"wrong shape: {MODULE}{SHAPES}"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_with_a_checkpoint_is_named(checkpoint: Path, name: str) -> None:
    damage, complaint = BROKEN[name]
    damage(checkpoint)
    kind = UnsupportedModelError if name == "an unknown architecture" else CheckpointError
    with pytest.raises(kind, match=complaint):
        TransformersTarget.load(checkpoint, device="cpu")


UNVERIFIED: dict[str, tuple[dict[str, int], str]] = {
    "Rwkv": (
        {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 50},
        "recurrent state of a kind of its own.*#another-kind-of-layer says how",
    ),
    "T5": ({"d_model": 16, "num_layers": 1, "vocab_size": 50}, "encoder-decoder"),
    "ViT": ({}, "no causal language model"),
}


@pytest.mark.parametrize("kind", UNVERIFIED)
def test_what_cannot_be_verified_is_refused_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sizes, reason = UNVERIFIED[kind]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    monkeypatch.setattr(states, "METHODS", {})
    monkeypatch.setattr(states, "FORWARDS", {})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        TransformersTarget.load(tmp_path)
    if kind == "Rwkv":
        with pytest.raises(UnsupportedModelError, match=reason):
            TransformersTarget.load(transformers.RwkvForCausalLM(config))


def test_longrope_ends_where_it_would_switch(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forerun"):
        target = TransformersTarget.load(make("phi3_longrope"), slots=200)
    assert target.max_length == 64
    assert "limited to 64 of 512" in caplog.text
    with pytest.raises(ArgumentError, match="exceed the context of 64"):
        target.prefill([0], [random_tokens(65, 0)])


def gated() -> OSError:
    error = OSError("something else")
    error.__cause__ = GatedRepoError.__new__(GatedRepoError)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (gated(), CheckpointError, "HF_TOKEN"),
        (OSError("You are trying to access a gated repo."), CheckpointError, "HF_TOKEN"),
        (OSError("x/y is not a valid model identifier listed on ..."), CheckpointError, "HF_TOKEN"),
        (OSError("We couldn't connect to 'https://huggingface.co'\nmore"), CheckpointError, "cannot be reached"),
        (ValueError("requires you to set trust_remote_code=True"), UnsupportedModelError, "trust_remote_code=True"),
    ],
)
def test_what_the_hub_says_is_explained(error: Exception, kind: type[Exception], text: str) -> None:
    explanation = explain_load_error("x/y", error)
    assert isinstance(explanation, kind) and text in str(explanation) and "\n" not in str(explanation)


def test_weights_count_and_not_how_they_are_stored(tmp_path: Path) -> None:
    model = tiny_llama(40)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    first = fingerprint(tmp_path / "whole")
    assert first is not None and fingerprint(tmp_path / "shards") == first
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    assert fingerprint(tmp_path / "rounded") == first
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.1)
    model.save_pretrained(tmp_path / "tuned")
    assert fingerprint(tmp_path / "tuned") != first
    assert fingerprint(tmp_path) is None and fingerprint("nobody/here") is None
