"""Tiny checkpoints in the formats of 8 and 4 bits that are published, written by hand, and the plain model of each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

GROUP, BLOCK = 32, 64
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight columns each place of a word of AWQ holds."""

Stored = tuple[dict[str, Tensor], Tensor]
"""The tensors of a weight by the last part of their names, and its values."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Words (.., W) of integers (.., W * 32 / bits), the first in the lowest bits."""
    parts = codes.long().unflatten(-1, (-1, 32 // bits))
    words = sum(parts[..., place] << bits * place for place in range(32 // bits))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _in_groups(weight: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (outputs, inputs), and the scales and zeros (outputs, groups) of whole groups of inputs."""
    grouped = weight.float().unflatten(1, (-1, GROUP))
    low, high = grouped.amin(2), grouped.amax(2)
    if symmetric:
        high = torch.maximum(high.abs(), low.abs())
        low = -high
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (grouped / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, 2**bits - 1)
    return codes.flatten(1), scales, zeros


def _values(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    grouped = codes.unflatten(1, (-1, GROUP))
    return ((grouped - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)


def gptq(weight: Tensor, bits: int = 4, *, shuffled: bool = False) -> Stored:
    """With `shuffled` inputs the groups are of inputs here and there, as ``desc_act`` makes them."""
    order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
    codes, scales, zeros = _in_groups(weight[:, order], bits, symmetric=False)
    values, back = _values(codes, scales, zeros), order.argsort()
    groups = (torch.arange(weight.shape[1]) // GROUP)[back]
    stored = {
        **{"qweight": pack(codes[:, back], bits).T, "qzeros": pack(zeros.T - 1, bits), "scales": scales.T.half()},
        "g_idx": groups.to(torch.int32),
    }
    return stored, values[:, back]


def awq(weight: Tensor) -> Stored:
    codes, scales, zeros = _in_groups(weight, 4, symmetric=False)
    places = torch.tensor(AWQ_PLACES)
    words = [pack(part.T.unflatten(1, (-1, 8))[:, :, places].flatten(1), 4) for part in (codes, zeros)]
    stored = {"qweight": words[0], "qzeros": words[1], "scales": scales.T.half()}
    return stored, _values(codes, scales, zeros)


def packed(weight: Tensor, bits: int = 4, *, symmetric: bool = True, shuffled: bool = False) -> Stored:
    """compressed-tensors' ``pack-quantized``, W4A16 and W8A16."""
    order = torch.randperm(weight.shape[1]) if shuffled else torch.arange(weight.shape[1])
    codes, scales, zeros = _in_groups(weight[:, order], bits, symmetric=symmetric)
    values, back = _values(codes, scales, zeros), order.argsort()
    stored = {
        "weight_packed": pack(codes[:, back], bits),
        "weight_scale": scales.half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        stored["weight_zero_point"] = pack(zeros.T, bits).T
    if shuffled:
        stored["weight_g_idx"] = (torch.arange(weight.shape[1]) // GROUP)[back].to(torch.int32)
    return stored, values[:, back]


def float8(weight: Tensor) -> Stored:
    """compressed-tensors' ``float-quantized``, a scale for each output."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = (weight.float() / scales.float()).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scales, "input_scale": torch.ones(1)}
    return stored, codes.float() * scales.float()


def int8(weight: Tensor) -> Stored:
    """compressed-tensors' ``int-quantized``, a scale for each output."""
    scales = weight.float().abs().amax(1, keepdim=True) / 127
    codes = (weight.float() / scales).round().to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales


def fp8(weight: Tensor, block: int = BLOCK) -> Stored:
    """DeepSeek's and Qwen's blocks."""
    blocks = weight.float().unflatten(0, (-1, block)).unflatten(2, (-1, block))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = codes.float() * scales[:, None, :, None]
    stored = {"weight": codes.flatten(2, 3).flatten(0, 1), "weight_scale_inv": scales}
    return stored, values.flatten(2, 3).flatten(0, 1)


def _compressed(form: str, bits: int, kind: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group" if bits == 4 else "channel"}
    weights |= {"group_size": GROUP} if bits == 4 else {}
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    more = {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8": ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}, fp8),
    "gptq": (GPTQ, gptq),
    "gptq-8-bits": (GPTQ | {"bits": 8}, lambda weight: gptq(weight, 8)),
    "gptq-act-order": (GPTQ | {"desc_act": True}, lambda weight: gptq(weight, shuffled=True)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "w4a16": (_compressed("pack-quantized", 4, "int"), packed),
    "w4a16-zeros": (_compressed("pack-quantized", 4, "int"), lambda weight: packed(weight, symmetric=False)),
    "w4a16-act-order": (_compressed("pack-quantized", 4, "int"), lambda weight: packed(weight, shuffled=True)),
    "w8a16": (_compressed("pack-quantized", 8, "int"), lambda weight: packed(weight, 8)),
    "compressed-float8": (_compressed("float-quantized", 8, "float"), float8),
    "compressed-int8": (_compressed("int-quantized", 8, "int"), int8),
}
"""What config.json says of each format, and how a weight (outputs, inputs) is stored in it."""


def tiny() -> LlamaForCausalLM:
    """A random Llama whose matrices are whole blocks of every format."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.1, bos_token_id=1, eos_token_id=2)
    return LlamaForCausalLM(config).bfloat16().eval()


def write(name: str, folder: Path, model: Any = None) -> Any:
    """Write the tiny model, or another one, in a format; return the plain model in bfloat16 that the checkpoint is."""
    (model or tiny()).save_pretrained(folder)
    config, (settings, store) = json.loads((folder / "config.json").read_text()), FORMATS[name]
    tensors, plain = dict[str, Tensor](), load_file(folder / "model.safetensors")
    for key, weight in plain.items():
        if not key.endswith("proj.weight"):
            tensors[key] = weight
            continue
        stored, values = store(weight)
        tensors |= {f"{key.removesuffix('.weight')}.{part}": value.contiguous() for part, value in stored.items()}
        plain[key] = values.bfloat16().contiguous()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    kept = {key: weight.clone() for key, weight in made.state_dict().items()}  # Not where the file is mapped
    made.load_state_dict(kept, assign=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return made


def write_gpt_oss(folder: Path) -> None:
    """Write a tiny gpt-oss with experts in MXFP4: blocks of 32 numbers, each two in a byte, and a power of two."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    model = GptOssForCausalLM(GptOssConfig(**sizes, **heads, **experts, initializer_range=0.1)).bfloat16()
    model.save_pretrained(folder)
    tensors = dict[str, Tensor]()
    for key, weight in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            outputs, inputs = weight.shape[2], weight.shape[1]
            tensors[f"{key}_blocks"] = torch.randint(0, 256, (4, outputs, inputs // 32, 16), dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.full((4, outputs, inputs // 32), 123, dtype=torch.uint8)
        else:
            tensors[key] = weight
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
