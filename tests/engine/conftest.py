"""A tiny Llama with a byte-level tokenizer, written as an ordinary checkpoint; random, but sharp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from forerun.drafters import DRAFTERS, DrafterEntry
from llamas import tiny_llama

TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and a few merges; ``<end>`` is the end of text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        **{"vocab_size": 280, "special_tokens": ["<end>", "<pad>"]},
        **{"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False},
    )
    bpe.train_from_iterator(["the cat sat on the mat and the dog sat on the log"] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<end>", pad_token="<pad>", chat_template=TEMPLATE, padding_side="left"
    )


def byte_llama(seed: int, tokenizer: PreTrainedTokenizerFast, layers: int = 2) -> LlamaForCausalLM:
    """Float32, two layers, hidden 32. Random output rows of moderate size: entropies between 1 and 4 nats."""
    return tiny_llama(
        len(tokenizer),
        seed,
        **{"intermediate_size": 64, "num_hidden_layers": layers, "max_position_embeddings": 256},
        **{"initializer_range": 0.35, "bos_token_id": 1, "eos_token_id": tokenizer.eos_token_id},
        pad_token_id=tokenizer.pad_token_id,
    )


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target as a directory."""
    return _write(tmp_path_factory.mktemp("target"), seed=0, layers=2)


@pytest.fixture(scope="session")
def draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model with the same tokenizer: the target's weights with a little noise, so that some drafts are kept."""
    folder = tmp_path_factory.mktemp("draft")
    tokenizer = tiny_tokenizer()
    model = byte_llama(0, tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _write(folder: Path, *, seed: int, layers: int) -> Path:
    tokenizer = tiny_tokenizer()
    model = byte_llama(seed, tokenizer, layers)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """What the drafter `engine.test_hidden_states.LISTENER` is shown in this test: by prompt, position, boundary."""
    from engine.test_hidden_states import Listener

    entry = DrafterEntry(path="engine.test_hidden_states:Listener", summary="listens")
    monkeypatch.setitem(DRAFTERS, "listener", entry)
    Listener.heard.clear()
    return Listener.heard
