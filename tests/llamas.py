"""The tiny random Llama of all tests, and heads of its size."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.heads.eagle import EagleConfig, EagleHead

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None},
}
HEAD_SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "target_hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 16, "initializer_range": 0.3},
}
"""Of heads with layers for the tiny Llama."""


def tiny_llama(vocabulary: int, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """In float32, for evaluation; `changes` are keys of the configuration."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **(SIZES | changes))).eval()


def tiny_eagle(vocabulary: int, seed: int = 0, **changes: Any) -> EagleHead:
    """A random EAGLE-3 head for it: mostly wrong; `changes` are fields of the configuration."""
    torch.manual_seed(seed)
    given = {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "boundaries": (0, 1, 2), **HEAD_SIZES, **changes}
    return EagleHead(EagleConfig(**given)).eval()
