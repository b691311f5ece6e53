"""The tiny random Llama of all tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_llama(vocabulary: int, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """In float32, for evaluation; `changes` are keys of the configuration."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(SIZES | changes))).eval()
