from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """A small Llama whose weights are large enough that every part of it moves the logits."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / f"tiny-{request.param}"
    tiny_llama(tied=request.param).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def source_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint: greedy texts are then the same in every arm."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with slight noise: agrees often, not always."""
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    model = tiny_llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder)
    return folder
