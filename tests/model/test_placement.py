"""Offloaded, adapted and quantised targets go through the same door, and score a tree like their own plain forward."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import cpu_offload

from forerun.core.tree import TokenTree
from forerun.errors import CheckpointError, UnsupportedModelError
from forerun.model import LayerRange, TransformersTarget
from model.families import make, plain, random_tokens

# peft 0.21 still reads an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

TOKENS = random_tokens(9, 0)
LAYERS = {"llama": "model.layers", "gemma3": "model.layers", "gpt2": "transformer.h"}


def tree() -> TokenTree:
    return TokenTree.of(TOKENS[-1], [5, 6, 7], [0, 0, 1])


def error(target: TransformersTarget, model: Any) -> float:
    """Largest difference of a tree's logits from the plain forwards of `model`."""
    target.prefill([0], [TOKENS[:-1]], boundaries=frozenset({0, 2, 4}))
    logits = target.score([0], [tree()]).logits[0]
    expected = torch.stack([plain(model, [*TOKENS, *path])[-1] for path in ([], [5], [6], [5, 7])])
    return (logits - expected).abs().max().item()


def offload_map(name: str, model: Any) -> dict[str, str]:
    layers = LAYERS[name]
    base = layers.split(".", maxsplit=1)[0]
    others = [part for part, _ in model.named_modules() if part.count(".") <= 1 and part not in ("", base, layers)]
    kept = {part: "cpu" for part in others if not part.startswith(layers + ".")}
    return kept | {f"{layers}.{index}": ("cpu", "disk")[index % 2] for index in range(4)}


@pytest.mark.parametrize("name", LAYERS)
def test_disk_offload(tmp_path: Path, name: str) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    target = TransformersTarget.load(tmp_path, slots=64, device_map=offload_map(name, model))
    assert {weight.device.type for weight in target.model.parameters()} == {"cpu", "meta"}
    assert error(target, model) <= 2e-5
    whole = target.score([0], [tree()])
    early = target.run([0], [tree()], LayerRange(stop=2))
    late = target.run([0], [tree()], LayerRange(start=2, stop=4), states=early)
    assert torch.allclose(target.lm_head(target.final_norm(late)), whole.logits, atol=1e-5)
    target.run([0], [tree()], LayerRange(stop=4, skip=frozenset({(1, "attn"), (3, "mlp")})))


def test_device_map_auto(tmp_path: Path) -> None:
    make("qwen3").save_pretrained(tmp_path)
    assert error(TransformersTarget.load(tmp_path, slots=64, device_map="auto"), make("qwen3")) <= 2e-5


def test_a_model_that_the_caller_offloaded() -> None:
    """Weights wait on the CPU and are moved to the execution device for each layer."""
    model = make("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    target = TransformersTarget.load(model, slots=64)
    assert target.device == torch.device("cpu")
    assert error(target, make("llama")) <= 2e-5


@pytest.mark.slow
def test_tensor_parallel(tmp_path: Path) -> None:
    """Two processes, each with one of the two key-value heads, say what one process says."""
    make("llama").save_pretrained(tmp_path / "model")
    worker = Path(__file__).with_name("tensor_parallel.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)]
    environment = os.environ | {"PYTHONPATH": str(worker.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "model")], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d) matches", done.stdout)) == ["0", "1"]


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(make("llama"), config).save_pretrained(tmp_path / "adapter")
    make("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "adapter"


def adapted(adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(make("llama"), adapter).eval()


def test_an_adapter(adapter: Path) -> None:
    target = TransformersTarget.load(adapter.parent / "base", adapter=adapter, slots=64, device="cpu")
    assert error(target, adapted(adapter)) <= 2e-5
    assert error(TransformersTarget.load(make("llama"), slots=64), adapted(adapter)) > 0.1, "the adapter must matter"
    wrapped = TransformersTarget.load(adapted(adapter), slots=64)
    assert error(wrapped, adapted(adapter)) <= 2e-5


def test_an_adapter_that_does_not_fit(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no directory .*expected a PEFT adapter"):
        TransformersTarget.load(adapter.parent / "base", adapter=tmp_path / "nowhere", device="cpu")
    make("llama", hidden_size=32).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="cannot be attached"):
        TransformersTarget.load(tmp_path / "other", adapter=adapter, device="cpu")
    make("llama", num_hidden_layers=6).save_pretrained(tmp_path / "deeper")
    with pytest.raises(CheckpointError, match="does not fit"):
        TransformersTarget.load(tmp_path / "deeper", adapter=adapter, device="cpu")


def test_an_adapter_of_virtual_tokens_is_refused(tmp_path: Path) -> None:
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        TransformersTarget.load(peft.get_peft_model(make("llama"), config))


def test_int8_layers_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Activations share one scale a pass, so a tree differs from a path by quantisation noise, and by no more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(make("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    with caplog.at_level(logging.WARNING, logger="forerun"):
        target = TransformersTarget.load(model, slots=64)
    assert "quantised together" in caplog.text
    assert 0 < error(target, model) <= 0.5 * plain(model, TOKENS).std().item()


def test_int8_layers_of_bitsandbytes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    make("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True), device_map="cpu"
    )
    model.save_pretrained(tmp_path / "quantised")
    target = TransformersTarget.load(tmp_path / "quantised", slots=64, device="cpu")
    assert type(target.model.model.layers[0].mlp.up_proj).__name__ == "Linear8bitLt"
    assert error(target, model) <= 0.5 * plain(model, TOKENS).float().std().item()
