"""The real file on llama.cpp: greedy answers are those of llama.cpp itself, and many requests leave nothing behind."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, SamplingParams
from forerun.certify.reference import QUANTISED, LlamaCppReference, first_worse
from model.ggufs import needs_llama_cpp
from model.soak import soak
from real.test_questions import questions

pytestmark = [pytest.mark.slow, needs_llama_cpp]
COUNT, TOKENS, CONTEXT = 50, 128, 640
DRAFTERS: dict[str, dict[str, Any]] = {
    "chains": {"method": "suffix", "num_speculative_tokens": 5, "adaptive": False},
    "trees": {"method": "recycling", "adaptive": False},
}


@pytest.fixture(scope="module")
def running(path: Path) -> LLM:
    """One row, and every prompt as a whole: other batches round otherwise, as `docs/gguf.md` says."""
    return LLM(path, backend="llama.cpp", max_num_seqs=1, max_model_len=CONTEXT, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def asked(running: LLM) -> list[dict[str, Any]]:
    return questions(running, COUNT)


@pytest.fixture(scope="module")
def theirs(path: Path, running: LLM, asked: list[dict[str, Any]]) -> list[list[int]]:
    """What `llama_cpp.Llama` answers, with its own sampler."""
    import llama_cpp
    import torch

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    found = list[list[int]]()
    for prompt in asked:
        model.reset()
        answer = list(islice(model.generate(prompt["prompt_token_ids"], temp=0.0, repeat_penalty=1.0), TOKENS))
        found.append(up_to_its_end(answer, running.target.generation_config.eos_token_id))
    return found


def up_to_its_end(answer: list[int], ends: Sequence[int]) -> list[int]:
    length = next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
    return answer[:length]


@pytest.mark.parametrize("name", DRAFTERS)
def test_answers_are_those_of_llama_cpp_itself(
    running: LLM,
    asked: list[dict[str, Any]],
    theirs: list[list[int]],
    name: str,
    record_property: Any,
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False, repetition_penalty=1.0)
    outputs = [output.outputs[0] for output in running.generate(asked, params, speculative=DRAFTERS[name])]
    drafted = sum(output.speculation.num_draft_tokens for output in outputs)
    reference, ties = LlamaCppReference.of(running), list[str]()
    for index, (prompt, output, expected) in enumerate(zip(asked, outputs, theirs, strict=True)):
        if output.token_ids == expected:
            continue
        ids = output.token_ids
        logits = reference.logits([*prompt["prompt_token_ids"], *ids[:-1]], len(ids))
        parted = first_worse(logits, ids, index, QUANTISED)
        assert parted is not None and parted.tie, f"question {index}: {parted}"
        ties.append(f"question {index}, token {parted.position}: {parted.gap:.3g} nats")
    said = f"{name}: {len(asked) - len(ties)} of {len(asked)} answers are llama.cpp's own, {drafted} tokens drafted"
    record_property("equal", said)
    print(f"\n{said}", *ties, sep="\n  ")  # noqa: T201
    assert drafted > 0
    assert len(ties) <= len(asked) // 10, "ties are rare"


def test_a_thousand_requests_leave_nothing_behind(path: Path) -> None:
    """Sequences and cells are counted in llama.cpp itself, after each hundred."""
    sizes = soak(LLM(path, backend="llama.cpp", max_num_seqs=4, max_model_len=160), 1000, tokens=12)
    print(f"\nresident memory, MiB: {[round(size) for size in sizes]}")  # noqa: T201
    assert max(sizes[2:]) - sizes[1] < 24, sizes
