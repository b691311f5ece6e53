"""Tiny GGUF files, written by the package ``gguf`` as llama.cpp's converter writes large ones."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # Unknown, beginning, end of a text and of a turn
MERGES = ["h e", "l l", "he ll", "hell o"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), *(merge.replace(" ", "") for merge in MERGES)]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
needs_llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed: pip install 'forerun[gguf]'"
)
WIDTH, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2


def tiny(kind: str = "llama", vocab_size: int = len(TOKENS), *, seed: int = 0, **changes: Any) -> Any:
    """A model of a kind with random weights, float32, for Llamas with separate embeddings; `changes` are keys of its
    configuration."""
    torch.manual_seed(seed)
    shape = {
        **{"vocab_size": vocab_size, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
        **{"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        **{"initializer_range": 0.1, "tie_word_embeddings": False, "pad_token_id": 0},
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**shape | changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def write_tiny(
    path: Path,
    stored: Type = Type.F32,
    *,
    model: Any = None,
    architecture: str = "llama",
    tokens: list[str] | None = TOKENS,
    more: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    without: str = "",
    split: int = 0,
) -> Path:
    """Write `model`, its matrices as `stored`, its norms in float32, as llama.cpp's converter has them.

    Args:
        tokens: the vocabulary; None: no tokenizer.
        more: writes further metadata and tensors.
        without: leave out the tensor of this name.
        split: most tensors of a part; 0: one file. The path of the first part is returned.
    """
    model = tiny() if model is None else model
    config, writer = model.config, gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(_kv_heads(config))
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_dimension_count(int(depth * rope.get("partial_rotary_factor", 1)))
    writer.add_key_length(depth)
    writer.add_value_length(depth)
    writer.add_rope_freq_base(rope["rope_theta"])
    if (eps := getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None)) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    if tokens is not None:
        _add_tokenizer(writer, tokens)
    more(writer)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    known = kinds[architecture] if architecture == model.config.model_type.removesuffix("_text") else kinds["llama"]
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        own, _, part = name.rpartition(".")
        theirs = f"{names.get_name(own)}.{part}"
        if theirs == without or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        values = tensor.numpy()
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            values = _interleaved(values, heads)
        if ".conv.conv." in name:
            writer.add_tensor(theirs, np.ascontiguousarray(values[:, 0]))
            continue
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        form = stored if values.ndim > 1 else Type.F32
        writer.add_tensor(theirs, gguf.quantize(np.ascontiguousarray(values), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if split else path


def _kv_heads(config: Any) -> int | list[int]:
    """Heads of keys and values, by layer where some layers have none."""
    kinds = getattr(config, "layer_types", None) or []
    if "conv" not in kinds:
        return int(config.num_key_value_heads)
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds]


def write_tiny_hybrid(path: Path, *, seed: int = 0) -> Path:
    """Write an LFM2 of four layers, three of them short convolutions."""
    kinds = ["conv", "full_attention", "conv", "conv"]
    model = tiny("lfm2", seed=seed, layer_types=kinds, num_hidden_layers=4, conv_L_cache=3, tie_word_embeddings=True,
                 block_auto_adjust_ff_dim=False, initializer_range=0.4)  # fmt: skip
    return write_tiny(path, model=model, architecture="lfm2", more=lambda writer: writer.add_shortconv_l_cache(3))


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The rows of queries and keys in the order in which llama.cpp rotates them: pairs lie together."""
    return values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
