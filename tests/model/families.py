"""Small random models of every family that the target claims, and what a plain forward of a token path says."""

from typing import Any

import torch
import transformers
from torch import Tensor

VOCABULARY = 99
WINDOW = 8
_COMMON = {
    **{"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_SLIDING = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": _MIXED}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 2},
}
_LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10000.0}
_LONG |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", _GROUPED),
    "qwen2_mixed": (
        "Qwen2",
        {**_GROUPED, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": _MIXED[::-1]},
    ),
    "qwen3": ("Qwen3", {**_GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**_GROUPED, **_SLIDING}),
    "gemma3": ("Gemma3Text", {**_GROUPED, **_SLIDING}),
    "phi3": ("Phi3", _GROUPED),
    "phi3_longrope": ("Phi3", {**_GROUPED, "rope_parameters": _LONG, "original_max_position_embeddings": 64}),
    "olmo2": ("Olmo2", _GROUPED),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "gpt_neox": ("GPTNeoX", _COMMON),
    "qwen3_moe": ("Qwen3Moe", {**_GROUPED, **_MOE, "head_dim": 16}),
    "gpt_oss": ("GptOss", {**_GROUPED, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", {**_COMMON, **_LATENT}),
    "granite": ("Granite", {**_GROUPED, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "llama4": (
        "Llama4Text",
        {
            **{**_GROUPED, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4},
            **{"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"] * 2},
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "cohere": ("Cohere", {**_GROUPED, "logit_scale": 0.5}),
}
"""Name -> transformers class prefix, configuration."""
SHARING = {
    **{**_GROUPED, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY},
    **{"hidden_size_per_layer_input": 8, "layer_types": _MIXED},
}
"""A Gemma 4 whose last layers read the keys of earlier ones, and whose layers each have an embedding."""


def make(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose logits are of order one, so that an error shows."""
    prefix, options = FAMILIES[name]
    config_type = getattr(transformers, f"{prefix}Config")
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config_type(**{**options, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return model.to(dtype)


@torch.inference_mode()
def plain(model: Any, tokens: list[int]) -> Tensor:
    """Logits (S, V) of a forward without a cache."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()
    return ids
