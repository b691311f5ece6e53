"""The real model: an engine for each dtype, made once for all tests, and the checkpoint as transformers runs it."""

import copy
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from forerun import LLM, SamplingParams
from forerun.demo import QUESTIONS
from forerun.errors import DownloadError
from forerun.model.load import LoadOptions
from forerun.model.prepare import open_named
from forerun.shipped import smollm2
from forerun.types import CompletionOutput

ROOT = Path(__file__).parents[2]
CODE = "Write a Python function that returns the n-th Fibonacci number. Code only."
ASKED = [*(question.messages for question in QUESTIONS[:2]), [{"role": "user", "content": CODE}]]
TOKENS = 12  # Of an answer
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, repetition_penalty=1.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=TOKENS, seed=11)

Ask = Callable[..., list[CompletionOutput]]


@pytest.fixture(scope="session")
def path() -> Path:
    """Where the model is; without it nothing here can run, and `tests/conftest.py` says so once more at the end."""
    try:
        return smollm2(None if os.environ.get("FORERUN_MODELS") else ROOT / "build" / "models")
    except DownloadError as error:
        pytest.skip(f"no real model: {error}")


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def llm(path: Path, request: pytest.FixtureRequest) -> LLM:
    """The engine of one dtype; pytest runs all tests of one before those of the other, which frees the one before."""
    return LLM(path, dtype=request.param, max_num_seqs=len(ASKED), max_model_len=512)


@pytest.fixture(scope="session")
def ask(llm: LLM) -> Ask:
    """Answers of the engine to all questions; `speculative` says what drafts."""
    prompts = [llm.chat_prompt(messages) for messages in ASKED]

    def asked(params: SamplingParams = GREEDY, *, speculative: Any = False, more: Any = None) -> list[CompletionOutput]:
        asking = [prompt | extra for prompt, extra in zip(prompts, more or [{}] * len(prompts), strict=True)]
        return [output.outputs[0] for output in llm.generate(asking, params, speculative=speculative)]

    return asked


@pytest.fixture(scope="session")
def plain(ask: Ask) -> Callable[[SamplingParams], list[list[int]]]:
    """The answers without drafts, by parameters."""

    @cache
    def found(params: SamplingParams) -> list[list[int]]:
        return [answer.token_ids for answer in ask(params)]

    return found


@pytest.fixture(scope="session")
def original(llm: LLM) -> Any:
    """The model that the engine read as transformers loads and runs it, in the engine's dtype."""
    return open_named(llm.target.name_or_path, LoadOptions(dtype=llm.target.dtype, device="cpu"))


@pytest.fixture(scope="session")
def small(original: Any) -> LlamaForCausalLM:
    """A draft model: the first layers of the real one, with its embedding and its head; they share their weights."""
    config = copy.deepcopy(original.config)
    config.num_hidden_layers = 6
    with torch.device("meta"):
        cut = LlamaForCausalLM(config)
    cut.load_state_dict({name: original.state_dict()[name] for name in cut.state_dict()}, assign=True)
    cut.model.rotary_emb = original.model.rotary_emb
    return cut.eval()
