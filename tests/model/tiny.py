"""A small random model of any family that transformers knows as a causal LM, without a line for each family."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING

from forerun.model.support import auto_class, named_sizes

WINDOW = 12
"""Every window, chunk, block or top-k that a configuration names by a larger number."""
MOST_PARAMETERS = 3 * 10**7
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 99),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff", "dim_ff"), 96),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("moe_intermediate_size",), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_chunk_size", "mamba_head_dim", "linear_head_dim", "ssm_state_size"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "dim_head"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "eos_token_id"), 2),
    "pad_token_id": 0,
}
"""What a configuration is given of these keys where it has them."""
ABSENT = ("head_dim", "num_key_value_heads", "num_experts_per_tok")
"""Keys that some families need although their default is None."""

PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"]},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        **{"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1},
        **{"indexer_head_dim": 16, "ple_layer_ids": [1], "ngram_vocab_size_base": 50, "eos_token_id": 2},
        "heads_per_ngram": 2,
    },
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2, "unpadded_vocab_size": 99},
    "inkling2_loop_text": {
        **{"layer_types": ["hybrid_sliding", "hybrid"] * 2, "unpadded_vocab_size": 99},
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 3, "n_layers_per_attn_res_block": 1},
    },
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "deepseek_v4": {
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 3, "o_groups": 2, "o_lora_rank": 16},
    },
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "step3p7": {
        "text_config": {
            **{"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "share_expert_dim": 32, "max_position_embeddings": 512},
            **{"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 12, "pad_token_id": 0},
            **{"moe_layers_enum": "2,3", "attention_other_setting": {"num_attention_heads": 8}},
        }
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "num_experts_per_tok": 1, "sliding_window": 12},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "glm5_next": {"num_key_value_heads": 4},
    "glm5_next_text": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "reformer": {"is_decoder": True, "attn_layers": ["local"] * 4, "axial_pos_embds": False},
    "longcat_flash": {"head_dim": 8},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128, "max_inference_chunksize": 16384},
    "xmod": {"default_language": "en_XX"},
}
"""What the defaults of a family lack."""


def build(kind: str, **changes: Any) -> Any:
    """A float32 model in evaluation mode; raises whatever transformers raises where these sizes make no model.

    Args:
        kind: the ``model_type``.
        changes: keys of the configuration.
    """
    made: Any = None
    for attempt in _attempts(kind, changes):
        try:
            made = _model(kind, attempt)
        except Exception as failure:  # whatever a family objects to, the next attempt may lack it
            error = failure
        else:
            return made
    raise error


def _attempts(kind: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Options from the plainest to the most particular."""
    default = CONFIG_MAPPING[kind]()
    plain = _small(default) | PARTICULAR.get(kind, {}) | changes
    depth = [key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in plain]
    return [
        plain,
        {**plain, **{key: SMALL[key] for key in ABSENT if _get(default, key, missing=0) is None}},
        {**plain, "num_experts_per_tok": 1},
        {key: value for key, value in plain.items() if key not in depth},
        {key: value for key, value in plain.items() if key != "max_position_embeddings"},
    ]


def _small(default: Any) -> dict[str, Any]:
    """Options for a configuration like `default`, and for those that it holds."""
    has = {key for key in SMALL if _get(default, key) is not None}
    aliases = getattr(type(default), "attribute_map", {})
    has = {key for key in has if aliases.get(key) not in has and not _fixed(type(default), key)}
    if _get(default, "kv_lora_rank") is not None:  # latent attention derives both
        has -= {"head_dim", "num_key_value_heads"}
    sizes = {key for key, size in named_sizes(default).items() if size > WINDOW and _get(default, key) == size}
    parts = {key: _get(default, key) for key in getattr(type(default), "sub_configs", {})}
    return {
        **{key: SMALL[key] for key in has},
        **dict.fromkeys(sizes, WINDOW),
        **{key: _small(part) for key, part in parts.items() if part is not None},
    }


def _get(config: Any, key: str, missing: Any = None) -> Any:
    try:
        return getattr(config, key, missing)
    except (RuntimeError, NotImplementedError):  # differs from layer to layer; has no limit
        return None


def _fixed(config_type: type, key: str) -> bool:
    own = getattr(config_type, key, None)
    return isinstance(own, property) and own.fset is None


def _model(kind: str, options: dict[str, Any]) -> Any:
    config = CONFIG_MAPPING[kind](**options)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in auto_class(config).from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    model = auto_class(config).from_config(CONFIG_MAPPING[kind](**options)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5)
            elif name.endswith(".temp"):  # ZAYA's factor of all keys, which is 0 in a fresh model
                weight.uniform_(0.5, 1)
    return model
