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
from forerun.engine.adapting.replay import AnswerPiece
from forerun.types import LAST_HIDDEN

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


@torch.no_grad()
def piece(
    weights: Any, tokens: list[int], positions: list[int], *, temperature: float = 1.0, held: bool = False
) -> AnswerPiece:
    """What a collector would have noted of these tokens: a draft model drafted after `positions`, and every other one
    of its drafts was rejected."""
    counted, rejected = np.zeros(len(tokens), dtype=bool), np.zeros(len(tokens), dtype=bool)
    counted[np.array(positions) + 1] = True
    rejected[np.array(positions[::2]) + 1] = True
    return AnswerPiece(
        tokens=np.array(tokens, dtype=np.int32),
        states={LAST_HIDDEN: weights.model(torch.tensor([tokens])).last_hidden_state[0, :-1].clone()},
        counted=counted,
        rejected=rejected,
        temperature=temperature,
        held=held,
    )


def pieces(
    weights: Any, count: int, *, temperature: float = 1.0, seed: int = 0, held: bool = False
) -> list[AnswerPiece]:
    """Random texts of 24 tokens, of which the last 20 count."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, weights.config.vocab_size, (count, 24)).tolist()
    return [piece(weights, text, list(range(3, 23)), temperature=temperature, held=held) for text in texts]
