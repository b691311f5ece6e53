"""Tiny random targets whose checkpoints bring MTP layers, and what transformers' own layers say that these draft."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

VOCABULARY, HIDDEN, LAYERS = 40, 32, 2
_COMMON: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"num_key_value_heads": 4, "n_group": 4, "topk_group": 2},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
_SOFTMAX_EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    **{"num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "rope_parameters": _ROPE},
}
_INDEX = {"index_topk": 6, "index_head_dim": 16, "index_n_heads": 16}
_SLIDING = {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
_WINDOW_FIRST = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_MROPE = {"rope_parameters": _ROPE | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek": ("DeepseekV3", "DeepseekV3ForCausalLM", _EXPERTS | _LATENT),
    "glm": (
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        _EXPERTS
        | {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}
        | {"rope_parameters": _ROPE},
    ),
    "mimo": ("Qwen2", "MiMoForCausalLM", {"num_key_value_heads": 2}),
    "qwen3_next": ("Qwen3Next", "Qwen3NextForCausalLM", _HYBRID | _SOFTMAX_EXPERTS),
    "qwen3_5": ("Qwen3_5Text", "Qwen3_5ForConditionalGeneration", _HYBRID | _MROPE),
    "qwen3_5_moe": ("Qwen3_5MoeText", "Qwen3_5MoeForConditionalGeneration", _HYBRID | _MROPE | _SOFTMAX_EXPERTS),
    "nemotron": (
        "NemotronH",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "full_attention", "full_attention", "moe"],
            **{"num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2},
            **{"ssm_state_size": 8, "chunk_size": 16, "n_routed_experts": 6, "moe_intermediate_size": 24},
            **{"moe_shared_expert_intermediate_size": 16, "moe_latent_size": 12},
        },
    ),
    "deepseek_v32": ("DeepseekV32", "DeepseekV32ForCausalLM", _EXPERTS | _LATENT | _INDEX),
    "glm_dsa": ("GlmMoeDsa", "GlmMoeDsaForCausalLM", _EXPERTS | _LATENT | _INDEX),
    "mimo_v2": (
        "MiMoV2Flash",
        "MiMoV2FlashForCausalLM",
        _SLIDING
        | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 1}
        | {"head_dim": 24, "v_head_dim": 16, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "ling": (
        "BailingHybrid",
        "BailingMoeV3ForCausalLM",
        {name: value for name, value in _LATENT.items() if name != "rope_parameters"}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
        | {"layer_types": _HYBRID["layer_types"], "first_k_dense_replace": 1, "head_dim": 8},
    ),
    "step": (
        "Step3p7",
        "Step3p7ForConditionalGeneration",
        _SLIDING
        | {"num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "share_expert_dim": 24, "mlp_layer_types": ["dense", "sparse", "dense"]}
        | {"attention_other_setting": {"num_attention_heads": 6}, "pad_token_id": 1},
    ),
    "mellum": (
        "Mellum",
        "MellumForCausalLM",
        _SLIDING
        | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24},
    ),
    "glm_lite": ("Glm4MoeLite", "Glm4MoeLiteForCausalLM", _EXPERTS | _LATENT),
    "glm_ocr": (
        "GlmOcr",
        "GlmOcrForConditionalGeneration",
        {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": _ROPE | {"mrope_section": [1, 1, 2]}},
    ),
    "hunyuan": (
        "HYV3",
        "HYV3ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "num_shared_experts": 1},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        "ExaoneMoeForCausalLM",
        _WINDOW_FIRST
        | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "dense"]},
    ),
    "exaone4_5": (
        "Exaone4_5_",
        "Exaone4_5_ForConditionalGeneration",
        _WINDOW_FIRST | {"num_key_value_heads": 2, "head_dim": 16},
    ),
    "ernie": (
        "Ernie4_5_Moe",
        "Ernie4_5_MoeForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 24}
        | {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    ),
}
"""Name -> transformers' prefix, the architecture that the checkpoint names, configuration."""
HYBRIDS = [name for name in FAMILIES if name.startswith(("qwen", "nemotron", "mellum", "exaone"))]
"""Targets that bring a single module under ``mtp.``, most of them with recurrent states."""
SINGLE = [*HYBRIDS, "ernie"]
"""Targets that bring a single module."""
OF_CLASSES = [*SINGLE, "deepseek_v32", "glm_dsa", "mimo_v2", "ling", "step", "glm_lite", "glm_ocr", "hunyuan"]
"""Targets whose MTP layers are of transformers' classes."""
PRE_NORM = ("mimo", "step")
"""Targets whose state before the final norm is read."""
VISION: dict[str, dict[str, Any]] = {
    "step": {
        **{"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        **{"image_size": 28, "patch_size": 14},
    },
    "glm_ocr": {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": HIDDEN},
    "exaone4_5": {
        **{"hidden_size": 16, "depth": 1, "num_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16},
        **{"out_hidden_size": HIDDEN, "fullatt_block_indexes": [0]},
    },
}
"""Targets that see, and the configuration of what they see with."""
LISTS = ("layer_types", "mlp_layer_types")
"""Keys with an entry for each layer."""
NAMES = {
    "mimo_v2": {"shared_head.norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
    "ling": {"shared_head.norm": "final_layernorm"},
    "step": {"shared_head.norm": "transformer.shared_head.norm", "output_head": "transformer.shared_head.output"},
    "hunyuan": {"shared_head.norm": "final_layernorm"},
}
"""DeepSeek's names of parts -> those of other families, where they differ."""
PARTS = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
THEIRS = dict(zip(PARTS, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), strict=True))
"""DeepSeek's names -> MiMo's."""
BESIDE = dict(zip(PARTS, ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), strict=True))
"""DeepSeek's names -> those of parts that Qwen's checkpoints have beside the layer."""
ERNIES = dict(zip(PARTS, ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"), strict=False))
"""DeepSeek's names -> those of parts that Ernie's checkpoints have beside the layer."""


def automatic_class(family: str) -> Any:
    """transformers' class that loads such a target."""
    return transformers.AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM


def _of_text(name: str) -> str:
    """As a model that sees calls a tensor of its text model."""
    return name if ".visual." in name else name.replace("model.", "model.language_model.", 1)


class Checkpoint:
    """A checkpoint on disk, and the transformers model of which the last layers became its MTP layers."""

    def __init__(self, family: str, folder: Path, modules: int = 1, dtype: torch.dtype = torch.float32) -> None:
        prefix, self.architecture, options = FAMILIES[family]
        self.family, self.folder, self.modules = family, folder, modules
        torch.manual_seed(1)
        more = 2 if family == "nemotron" else modules  # whose only module attends in one layer and mixes in another
        options = {name: [*own, *own[-1:] * (modules - 1)] if name in LISTS else own for name, own in options.items()}
        keys = {**_COMMON, **options, "num_hidden_layers": LAYERS + more}
        if family == "exaone4_5":
            keys["model_type"] = "exaone4"
        if family in VISION:
            keys = {"text_config": keys, "vision_config": VISION[family], "tie_word_embeddings": False}
        config = getattr(transformers, f"{prefix}Config")(**keys)
        self.model = automatic_class(family).from_config(config).eval()
        self.base: Any = getattr(self.model.model, "language_model", self.model.model)
        for name, weight in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if "inv_freq" not in name and weight.is_floating_point():
                weight.data.normal_(std=0.3 if weight.dim() > 1 else 0.1).add_(1.0 if "norm" in name else 0.0)
        self.model.to(dtype)
        self.extra = {
            f"{number}.{name}": (torch.randn(shape) * 0.3 + ("norm" in name)).to(dtype)
            for number in range(modules)
            for name, shape in {
                "enorm.weight": (HIDDEN,),
                "hnorm.weight": (HIDDEN,),
                "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
                **({"shared_head.norm.weight": (HIDDEN,)} if family != "ernie" else {}),
                **({"output_head.weight": (VOCABULARY, HIDDEN)} if family == "step" else {}),
            }.items()
        }
        self._write()

    def _write(self) -> None:
        self.model.save_pretrained(self.folder)
        file = self.folder / "model.safetensors"
        stored = load_file(file)
        if self.family == "qwen3_5_moe":  # its experts lie side by side
            kept = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
            stored = kept | {name: own.clone() for name, own in self.model.state_dict().items() if ".experts." in name}
        tensors = {self._name(name): tensor for name, tensor in stored.items()}
        for name, tensor in self.extra.items():
            number, rest = name.split(".", 1)
            tensors[self._name(f"model.layers.{LAYERS + int(number)}.{rest}")] = tensor
        if self.family in ("deepseek", "glm"):  # copies of the target's, as published checkpoints have them
            for number in range(self.modules):
                where = f"model.layers.{LAYERS + number}"
                tensors[f"{where}.embed_tokens.weight"] = self.model.get_input_embeddings().weight.data.clone()
                tensors[f"{where}.shared_head.head.weight"] = self.model.lm_head.weight.data.clone()
        save_file(tensors, file, {"format": "pt"})
        place = self.folder / "config.json"
        config = json.loads(place.read_text())
        text = config.get("text_config", config)
        text |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": self.modules}
        if self.family.startswith("qwen") or self.family in ("mimo_v2", "exaone4_5"):
            del text["num_nextn_predict_layers"]  # Qwen3-Next's, MiMo-V2's and Exaone 4.5's are not announced
        if self.family == "nemotron":
            config["layers_block_type"] = config["layers_block_type"][:LAYERS]
        config["architectures"] = [self.architecture]
        for name in (*LISTS, "indexer_types"):
            if text.get(name) and (self.family, name) != ("step", "layer_types"):  # which go on for the MTP layers
                text[name] = text[name][:LAYERS]
        if self.family == "step":
            del text["per_layer_config"], text["mlp_layer_types"], text["num_sliding_attention_heads"]
            kinds = [text["rope_parameters"][kind]["rope_theta"] for kind in text["layer_types"]]
            text |= {"moe_layers_enum": "1", "attention_other_setting": {"num_attention_heads": 6}, "rope_theta": kinds}
            del text["rope_parameters"]
        if self.family.startswith("qwen3_5"):
            text = config | {"mtp_num_hidden_layers": self.modules, "mtp_use_dedicated_embeddings": False}
            kind = config["model_type"].removesuffix("_text")
            config = {"architectures": [self.architecture], "model_type": kind, "text_config": text}
        place.write_text(json.dumps(config))

    def _name(self, name: str) -> str:
        """As the family's checkpoints call it."""
        name = name.replace("model.language_model.", "model.", 1)
        parts = name.split(".")
        if self.family == "glm_ocr":
            return _of_text(name)
        if self.family in HYBRIDS:
            return self._hybrid_name(name, parts)
        if self.family not in (*NAMES, "mimo", "ernie") or parts[1] != "layers" or int(parts[2]) < LAYERS:
            return name
        module, _, kind = ".".join(parts[3:]).rpartition(".")
        if self.family == "ernie":
            return f"model.{ERNIES.get(module, f'mtp_block.{int(parts[2]) - LAYERS}.{module}')}.{kind}"
        where = {"mimo": f"mtp_layers.{int(parts[2]) - LAYERS}", "mimo_v2": f"mtp.layers.{int(parts[2]) - LAYERS}"}
        theirs = NAMES.get(self.family, THEIRS).get(module, module)
        return f"model.{where.get(self.family, f'layers.{parts[2]}')}.{theirs}.{kind}"

    def _hybrid_name(self, name: str, parts: list[str]) -> str:
        if parts[1] != "layers" or int(parts[2]) < LAYERS:
            return _of_text(name) if self.family.startswith(("qwen3_5", "exaone4_5")) else name
        rest = ".".join(parts[3:])
        module, _, kind = rest.rpartition(".")
        if self.family == "nemotron":
            number = 1 if module == "shared_head.norm" else int(parts[2]) - LAYERS
            return f"mtp.layers.{number}.{rest.replace('shared_head.norm', 'final_layernorm')}"
        return f"mtp.{BESIDE[module]}.{kind}" if module in BESIDE else f"mtp.layers.0.{rest}"

    def part(self, module: int, name: str) -> Tensor:
        return self.extra[f"{module}.{name}.weight"]

    @torch.no_grad()
    def states(self, tokens: list[int]) -> Tensor:
        """(1, S, H): the target's state that its MTP layers read."""
        hidden = self.model.get_input_embeddings()(torch.tensor([tokens]))
        for layer in range(LAYERS):
            hidden = self._layer(layer, hidden)
        if self.family in PRE_NORM:
            return hidden
        return getattr(self.base, "norm", getattr(self.base, "norm_f", None))(hidden)

    @torch.no_grad()
    def module(self, number: int, tokens: list[int], states: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (S) behind the states (1, S, H) -> what the module hands on (1, S, H), and logits (1, S, V)."""
        embeds = self._norm(self.model.get_input_embeddings()(torch.tensor([tokens])), self.part(number, "enorm"))
        given = [embeds, self._norm(states, self.part(number, "hnorm"))]
        joined = torch.cat(given[::-1] if self.family == "mimo" else given, -1)
        hidden = self._layer(LAYERS + number, joined @ self.part(number, "eh_proj").T)
        if self.family == "nemotron":
            hidden = self._layer(LAYERS + 1, hidden)
        last = self.base.norm.weight if self.family == "ernie" else self.part(number, "shared_head.norm")
        normed = self._norm(hidden, last)
        own = self.extra.get(f"{number}.output_head.weight", self.model.lm_head.weight)
        return hidden if self.family in PRE_NORM else normed, normed @ own.T

    def _norm(self, states: Tensor, weight: Tensor) -> Tensor:
        offset = 1.0 if self.family.startswith(("qwen", "step")) else 0.0
        return torch.nn.functional.rms_norm(states, (HIDDEN,), weight + offset, 1e-5)

    def _layer(self, number: int, hidden: Tensor) -> Tensor:
        size = hidden.shape[1]
        places = torch.arange(size).unsqueeze(0)
        config = self.base.config
        kind = (getattr(config, "layer_types", None) or ["full_attention"] * (number + 1))[number]
        there = torch.ones(size, size, dtype=torch.bool).tril()
        if kind == "sliding_attention":
            there = there.triu(1 - config.sliding_window)
        mask = torch.full((1, 1, size, size), torch.finfo(hidden.dtype).min).masked_fill(there, 0.0)
        turned = None
        if hasattr(self.base, "rotary_emb"):
            nested = "full_attention" in config.rope_parameters
            turned = self.base.rotary_emb(hidden, places, **({"layer_type": kind} if nested else {}))
        layer: Any = self.base.layers[number]
        masked = None if getattr(layer, "block_type", "") == "linear_attention" else mask
        made: Any = layer(hidden, attention_mask=masked, position_ids=places, position_embeddings=turned)
        return made[0] if isinstance(made, tuple) else made


def with_fresh_layers(source: Path, folder: Path) -> Path:
    """A copy of a Llama's checkpoint that brings an untrained MTP layer of MiMo's kind: its last layer, behind a
    projection that reads the state."""
    shutil.copytree(source, folder)
    place, file = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(place.read_text()), load_file(file)
    last, size = config["num_hidden_layers"] - 1, config["hidden_size"]
    own = {name.split(".", 3)[3]: tensor for name, tensor in tensors.items() if f"layers.{last}." in name}
    norm, eye = tensors["model.norm.weight"], torch.eye(size, dtype=tensors["model.norm.weight"].dtype)
    own |= {f"{name}.weight": norm for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")}
    own["input_proj.weight"] = torch.cat([eye, 0 * eye], 1)
    tensors |= {f"model.mtp_layers.0.{name}": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, file, {"format": "pt"})
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    place.write_text(json.dumps(config))
    return folder
