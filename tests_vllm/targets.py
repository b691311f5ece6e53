"""Targets that bring MTP layers, made of the shipped one: each computes what the shipped one does, under the names of a
family that vLLM knows; its MTP layer begins as the last layer behind a projection that reads the state. And a random
one of DeepSeek's kind, whose latent attention nothing shipped can stand for. Knows no engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config

from forerun.shipped import FOLDER

SHIPPED = FOLDER / "target"
EXPERTS, CHOSEN = 4, 2
MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
"""DeepSeek's names, which GLM has, too -> MiMo's."""


def mimo(folder: Path) -> Path:
    """MiMo's kind, a Qwen2 by its layers: biases of zero, and a dense MTP layer."""
    config, tensors = _shipped()
    for name, tensor in _fresh(tensors, state_first=True).items():
        module, kind = name.rsplit(".", 1)
        tensors[f"model.mtp_layers.0.{MIMO.get(module, module)}.{kind}"] = tensor
    for name, weight in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace("weight", "bias")] = torch.zeros(len(weight), dtype=weight.dtype)
    return _written(folder, {**config, "model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}, tensors)


def glm(folder: Path) -> Path:
    """GLM-4.5's kind: experts in the last layer, for vLLM wants some, of which all but the shared one give nothing; and
    in the MTP layer behind it."""
    config, tensors = _shipped()
    last, random = config["num_hidden_layers"] - 1, torch.Generator().manual_seed(1)
    layer = {name: tensors.pop(name) for name in list(tensors) if name.startswith(f"model.layers.{last}.mlp.")}
    layers = {
        last: {name.split(".", 3)[3]: tensor for name, tensor in layer.items()},
        last + 1: _fresh({**tensors, **layer}, state_first=False),
    }
    for number, module in layers.items():
        where, size = f"model.layers.{number}.", config["hidden_size"]
        for name, tensor in module.items():
            tensors[where + name.replace("mlp.", "mlp.shared_experts.")] = tensor
            for expert in range(EXPERTS) if name.startswith("mlp.") else ():
                noise = torch.randn(tensor.shape, generator=random) * (0.02 if number > last else 0.0)
                tensors[f"{where}{name.replace('mlp.', f'mlp.experts.{expert}.')}"] = noise.to(tensor.dtype)
        tensors[f"{where}mlp.gate.weight"] = torch.randn((EXPERTS, size), generator=random).to(torch.bfloat16)
        tensors[f"{where}mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    keys = {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "use_qk_norm": False,
        "first_k_dense_replace": last,
        "moe_intermediate_size": config["intermediate_size"],
        **_experts(),
    }
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    return _written(folder, {**config, **keys, "rope_parameters": rope, "partial_rotary_factor": 1.0}, tensors)


def deepseek(folder: Path) -> Path:
    """DeepSeek-V3's kind: random weights, its sizes of latent attention, one layer with experts before the MTP one."""
    shipped, _ = _shipped()
    config = DeepseekV3Config(
        **{name: shipped[name] for name in ("vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")},
        hidden_size=128,
        intermediate_size=192,
        moe_intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
        initializer_range=0.1,
        **_experts(),
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    plain = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    module = {f"{name}.weight": plain.clone() for name in ("enorm", "hnorm", "shared_head.norm")}
    module["eh_proj.weight"] = torch.cat([torch.zeros(128, 128), torch.eye(128)], 1).to(torch.bfloat16)
    tensors |= {f"model.layers.2.{name}": tensor for name, tensor in module.items()}
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # Publishers' files say how experts are chosen; without it vLLM has no place for the routers' corrections.
    chosen = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return _written(folder, {**written, **chosen, "num_hidden_layers": 2}, tensors)


FAMILIES = {"mimo": mimo, "glm": glm, "deepseek": deepseek}


def _shipped() -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(SHIPPED / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    return {**config, "tie_word_embeddings": False}, tensors


def _fresh(tensors: Mapping[str, Tensor], *, state_first: bool) -> dict[str, Tensor]:
    """An MTP layer under DeepSeek's names."""
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    module = {name.split(".", 3)[3]: tensor.clone() for name, tensor in tensors.items() if f"layers.{last}." in name}
    norm = tensors["model.norm.weight"]
    eye = torch.eye(len(norm), dtype=norm.dtype)
    halves = [0.1 * eye, eye]
    module["eh_proj.weight"] = torch.cat(halves[::-1] if state_first else halves, 1)
    return module | {f"{name}.weight": norm.clone() for name in ("enorm", "hnorm", "shared_head.norm")}


def _experts() -> dict[str, Any]:
    return {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def _written(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for file in SHIPPED.iterdir():
        if file.name not in ("config.json", "model.safetensors", "README.md"):
            shutil.copyfile(file, folder / file.name)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8")
    return folder
