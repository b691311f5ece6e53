"""A Llama checkpoint of this repository as a GGUF file, for llama.cpp's side of a comparison.

llama.cpp's own converter knows a tokenizer by a hash of what it makes of one text, and ours is not among those; the
names and the order of rotary dimensions are those that it writes (``conversion/llama.py``).
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from forerun.model.load import weight_files
from forerun.writing import written

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, file: Path) -> Path:
    """The checkpoint in `folder` with float32 weights in `file`, which is returned."""
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with written(file) as fresh:
        writer = gguf.GGUFWriter(fresh, "llama")
        writer.add_name(folder.name)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        _add_tokenizer(writer, folder, tokenizer, config.vocab_size)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for shard in weight_files(folder):
            for name, weight in load_file(shard).items():
                turned = next((count for part, count in heads.items() if f".{part}." in name), None)
                found = weight if turned is None else _interleaved(weight, turned)
                writer.add_tensor(_named(name), found.float().contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, tokenizer: object, size: int) -> None:
    stored = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {one["id"]: one["content"] for one in stored["added_tokens"]}
    names = {number: name for name, number in stored["model"]["vocab"].items()} | special
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types(
        [
            kinds.CONTROL if number in special else kinds.NORMAL if number in names else kinds.UNUSED
            for number in range(size)
        ]
    )
    merges = stored["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    end = next(number for number, text in special.items() if text == getattr(tokenizer, "eos_token", ""))
    writer.add_eos_token_id(end)
    writer.add_bos_token_id(end)
    writer.add_add_bos_token(False)


def _named(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.weight"


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rotary halves as pairs, as llama.cpp turns them."""
    parts = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return torch.swapaxes(parts, 1, 2).reshape(weight.shape)
