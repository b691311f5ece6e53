from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from emulation import kernels_in_c, packed_linears
from forerun.model.kernels import native

COMMON = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2},
}


@pytest.fixture(scope="module")
def in_c() -> Iterator[None]:
    """The kernels in C, emulated where the processor lacks the instructions."""
    with kernels_in_c():
        yield


@pytest.fixture(scope="module")
def packed() -> Iterator[None]:
    """Linear layers can be packed, with torch's own products where the processor has no others."""
    with packed_linears():
        yield


@pytest.fixture(params=["native", "torch"])
def attention_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention in C where the machine has it, and in torch."""
    if request.param == "torch":
        monkeypatch.setattr(native, "attention_kernel", lambda: None)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16, "attention_bias": True},
    "mistral": {"head_dim": 16, "sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {"sliding_window": 8},
    "olmo2": {"num_key_value_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def build(family: str, dtype: torch.dtype = torch.bfloat16, **further: Any) -> Any:
    """A random model of the family whose logits depend on every part; `further` options of its configuration."""
    torch.manual_seed(0)
    options = FAMILIES[family] if family == "gpt2" else COMMON | FAMILIES[family]
    config = AutoConfig.for_model(family, initializer_range=0.2, **(options | {"vocab_size": 128} | further))
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


def by_definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention (B, N, heads, D') in float64, keys and values repeated for the heads of a group."""
    repeats = query.shape[1] // key.shape[1]
    keys, values = (tensor.double().repeat_interleave(repeats, 1) for tensor in (key, value))
    scores = query.double() @ keys.transpose(2, 3) * scale + mask.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)
