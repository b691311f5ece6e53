"""Tiny models in float32 and pieces made of their distributions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from contract.harness import model, relative
from engine.conftest import checkpoint, draft_checkpoint
from forerun.engine.adapting.replay import Piece

__all__ = ["checkpoint", "draft_checkpoint"]


@pytest.fixture
def target() -> LlamaForCausalLM:
    return model()


@pytest.fixture
def draft() -> LlamaForCausalLM:
    """The target with noise; a copy that a test may change."""
    return copy.deepcopy(relative(0.08))


def distribution_of(weights: Any, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """(S, V) distributions after each token."""
    with torch.no_grad():
        return torch.softmax(weights(torch.tensor([tokens])).logits[0].float() / temperature, -1)


def piece(
    weights: Any,
    tokens: list[int],
    positions: list[int],
    *,
    temperature: float = 1.0,
    top_k: int = 4,
    held: bool = False,
) -> Piece:
    """What a collector would have noted of these tokens; every other position was rejected."""
    probs, ids = distribution_of(weights, tokens, temperature or 1.0)[positions].topk(top_k)
    return Piece(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        ids=ids.numpy().astype(np.int32),
        probs=probs.numpy().astype(np.float16),
        rejected=np.arange(len(positions)) % 2 == 0,
        temperature=temperature,
        held=held,
    )


def pieces(weights: Any, count: int, *, temperature: float = 1.0, seed: int = 0, held: bool = False) -> list[Piece]:
    """Random texts of 24 tokens, the distributions of their last 20."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, weights.config.vocab_size, (count, 24)).tolist()
    return [piece(weights, text, list(range(4, 24)), temperature=temperature, held=held) for text in texts]
