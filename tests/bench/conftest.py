from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from llamas import tiny_llama


def lively_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    """A small Llama whose weights are large enough that every part of it moves the logits."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    special = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": tied}
    model = tiny_llama(256, seed, max_position_embeddings=128, initializer_range=0.15, **sizes, **special)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / f"tiny-{request.param}"
    lively_llama(tied=request.param).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def source_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint: greedy texts are then the same in every arm."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    lively_llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with slight noise: agrees often, not always."""
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    model = lively_llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    model.save_pretrained(folder)
    return folder


def quiet(_: str) -> None:
    """Progress that nobody reads."""
