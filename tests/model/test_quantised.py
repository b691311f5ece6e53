"""Weights of 8 and 4 bits: on a CPU the dequantised values, bit for bit, served as a plain model; else a clear line."""

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from forerun import LLM, SamplingParams
from forerun.core.tree import TokenTree
from forerun.errors import CheckpointError, OutOfMemoryError, UnsupportedModelError
from forerun.model import TransformersTarget, memory, prepare, quantised_weights
from forerun.model.kernels import blocks, packing, products
from forerun.model.kernels.packing import list_in_blocks
from forerun.model.kernels.products import ProductKind
from forerun.model.load import LoadOptions, open_model, read_config, stored_bytes
from model.quantised import FORMATS, tiny, write, write_gpt_oss

PROMPT = {"prompt_token_ids": [5, 9, 11, 9, 5, 9, 11, 7, 5, 9]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
BF16 = LoadOptions(dtype="bfloat16", device="cpu")


def edit(folder: Path, **changes: object) -> None:
    """Change entries of what config.json says about quantisation."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_the_values_that_the_format_means(name: str, tmp_path: Path) -> None:
    """Rounded once to bfloat16, and nothing of the model says any longer that it was quantised."""
    expected = write(name, tmp_path)
    config = read_config(tmp_path, BF16)
    model = open_model(tmp_path, BF16, config, quiet=True)
    for key, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    assert model.dtype is torch.bfloat16 and not getattr(model, "is_quantized", False)
    assert getattr(model.config, "quantization_config", None) is None
    assert model.generation_config.eos_token_id == 2 and model.name_or_path == str(tmp_path)
    held = sum(weight.nbytes for weight in model.parameters())
    assert held <= stored_bytes(tmp_path, BF16, config) < 1.5 * held, "memory is planned for what they become"


def test_blocks_at_the_edge_of_a_matrix_in_fp8_are_cut() -> None:
    """As in DeepSeek-V3, whose latents have 576 numbers."""
    weight = torch.randn(12, 10).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 3)
    stored = {"one.weight": weight, "one.weight_scale_inv": scales, "norm.weight": torch.ones(3)}
    settings = {"quant_method": "fp8", "weight_block_size": [5, 4]}
    found = quantised_weights.dequantise(stored, settings, torch.float32)
    rows, columns = torch.arange(12) // 5, torch.arange(10) // 4
    assert torch.equal(found["one.weight"], weight.float() * scales[rows][:, columns])
    assert torch.equal(found["norm.weight"], torch.ones(3)) and len(found) == 2
    with pytest.raises(UnsupportedModelError, match="a grid of 3 x 3 scales"):
        quantised_weights.dequantise(stored, {"quant_method": "fp8"}, torch.float32)


@pytest.mark.parametrize("name", ["fp8", "gptq", "awq", "w4a16"])
def test_a_checkpoint_in_few_bits_is_checked_packed_and_drafted_for(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write(name, tmp_path)
    plain = LLM(str(tmp_path), tokenizer=False, device="cpu", dtype="float32", max_model_len=64)
    expected = plain.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    assert "checking it against transformers" in caplog.text
    assert f"({FORMATS[name][0]['quant_method']}) are dequantised to torch.float32" in caplog.text
    for method in ("ngram", "quantized_self"):
        found = plain.generate(PROMPT, GREEDY, speculative={"method": method, "adaptive": False})[0].outputs[0]
        assert found.token_ids == expected and not found.speculation.drafter_errors
        assert found.speculation.num_draft_tokens


@pytest.mark.skipif(products.library() is None, reason="no compiler, or no AVX2")
@pytest.mark.parametrize("name", ["w4a16", "w8a16", "gptq", "awq", "gptq-act-order", "compressed-int8"])
def test_integers_stay_in_blocks_if_products_can(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in blocks are not rounded to bf16, activations are to 8 bits; but AMX reads prompts in bf16. Groups in
    another order, and scales that 16 bits do not hold, are dequantised."""
    write(name, tmp_path / "model")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    found = []
    for fast in (False, True):
        monkeypatch.setattr(blocks, "fast", lambda fast=fast: fast)
        target = TransformersTarget.load(tmp_path / "model", dtype="bfloat16", device="cpu", slots=64)
        read = target.prefill([0], [PROMPT["prompt_token_ids"]]).logits
        target.truncate([0], [0])
        for piece in ([5, 9, 11], [9], [5, 9, 11, 7, 5, 9]):
            in_pieces = target.prefill([0], [piece]).logits
        assert torch.equal(in_pieces, read)
        found.append((read, target.score([0], [TokenTree(7)]).logits, list_in_blocks(target.model)))
    (*plain, none), (*logits, in_blocks) = found
    assert not none and len(in_blocks) == (0 if name in ("gptq-act-order", "compressed-int8") else 14)
    if not in_blocks:
        assert all(map(torch.equal, logits, plain))
    elif products.kind_of(torch.bfloat16) is ProductKind.TILES and name in ("w4a16", "w8a16"):
        assert torch.equal(logits[0], plain[0]), "no least values, which float16 rounds"
    for ours, theirs in zip(logits, plain, strict=True):
        assert (ours - theirs).float().abs().mean() < 0.05 * theirs.float().std()


@pytest.mark.parametrize("name", ["fp8", "w4a16"])
def test_experts_are_dequantised_before_they_are_joined(name: str, tmp_path: Path) -> None:
    """A checkpoint has them one by one, and a model has all of a layer in one tensor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_attention_heads": 4}
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, initializer_range=0.1)
    expected = write(name, tmp_path, Qwen3MoeForCausalLM(config).bfloat16())
    in_blocks = name == "w4a16" and products.library() is not None
    model = open_model(tmp_path, BF16, read_config(tmp_path, BF16), quiet=True, in_blocks=in_blocks)
    packing.unpack(model)
    for key, weight in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight), key
    assert "mlp.experts.gate_up_proj" in str(list(model.state_dict()))


def test_experts_in_mxfp4_are_dequantised(tmp_path: Path) -> None:
    """transformers does it, where the package `kernels` or an accelerator is missing."""
    write_gpt_oss(tmp_path)
    llm = LLM(str(tmp_path), tokenizer=False, device="cpu", dtype="float32", max_model_len=64)
    experts = llm.target.model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.dtype is torch.float32 and len(experts.unique()) == 15, "of four bits, one power of two"
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    found = llm.generate(PROMPT, GREEDY, speculative={"method": "ngram", "adaptive": False})[0].outputs[0]
    assert found.token_ids == expected


def test_on_a_gpu_the_package_that_would_multiply_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write("awq", tmp_path)
    config, cuda = read_config(tmp_path, BF16), torch.device("cuda", 0)
    monkeypatch.setattr(quantised_weights, "find_spec", lambda _name: None)
    assert quantised_weights.dequantises(config, cuda)
    for _ in range(2):
        quantised_weights.tell("MODEL", config, cuda, torch.bfloat16)
    assert [record.message for record in caplog.records] == [
        "MODEL: its weights (awq) are dequantised to torch.bfloat16, which takes more memory and time: there is no "
        "gptqmodel (pip install gptqmodel)"
    ]
    monkeypatch.setattr(quantised_weights, "find_spec", lambda _name: True)
    assert not quantised_weights.dequantises(config, cuda)
    assert quantised_weights.dequantises(config, torch.device("cpu")), "there is no kernel for it"


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("awq", {"version": "gemv"}, r"weights of the method awq that are packed like this.*'gemv'.*GGUF file"),
        ("gptq", {"checkpoint_format": "marlin"}, r"weights of the method gptq .*'marlin'.*pip install gptqmodel"),
        ("w4a16", {"quant_method": "hqq"}, r"HQQ version.*GGUF file"),
    ],
)
def test_what_is_not_read_says_what_to_do(name: str, changes: dict[str, str], why: str, tmp_path: Path) -> None:
    write(name, tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError), match=why):
        LLM(str(tmp_path), tokenizer=False, device="cpu")


def test_memory_is_planned_for_dequantised_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 4 bits may fit where its weights in 16 do not."""
    write("gptq", tmp_path)
    size = sum(weight.nbytes for weight in tiny().parameters())
    monkeypatch.setattr(memory, "available_bytes", lambda _device: size // 2)
    monkeypatch.setattr(prepare, "open_model", lambda *_args, **_named: pytest.fail("weights were read"))
    with pytest.raises(OutOfMemoryError, match="are needed on cpu"):
        LLM(str(tmp_path), tokenizer=False, device="cpu", dtype="bfloat16", max_num_seqs=1, max_model_len=16)
