"""A server's seed: the run repeats, the answers to one prompt differ, the client's own seed is the client's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun import AsyncLLM
from serve.conftest import serving


def texts(checkpoint: Path, seed: int, bodies: list[dict[str, Any]]) -> list[str]:
    def load() -> AsyncLLM:
        return AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=4, max_model_len=100, seed=seed)

    with serving(load, max_n=3) as live:
        answers = [live.post("/v1/completions", {"prompt": "the cat", "max_tokens": 10, **body}) for body in bodies]
        return [choice["text"] for answer in answers for choice in answer.json()["choices"]]


def test_a_run_repeats_and_its_answers_differ(checkpoint: Path) -> None:
    bodies: list[dict[str, Any]] = [{}, {}, {"n": 3}, {"seed": 1}, {"seed": 1}, {}]
    first, again, other = (texts(checkpoint, seed, bodies) for seed in (0, 0, 1))
    assert first == again and len(set(first)) == len(first) - 1 and first[5] == first[6] == other[5]
    assert not set(first[:5]) & set(other[:5])
