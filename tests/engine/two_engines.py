"""Two engines of one process under load, each in a thread of its own, and what each request gets when it is alone.

``python tests/engine/two_engines.py --requests 2000`` (with tests/ on the path) is the long form of `test_two_engines`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import Any

import torch
from transformers import LlamaForCausalLM

from emulation import kernels_in_c, packed_linears
from forerun import LLM, AsyncLLM, SamplingParams
from forerun.heads.eagle import EagleHead
from llamas import tiny_eagle, tiny_llama

VOCABULARY, SIZE, ROWS = 128, 64, 4
DRAFTERS: list[Any] = [
    False,
    {"method": "ngram", "num_speculative_tokens": 5},
    {"method": "suffix", "num_speculative_tokens": 9},
    {"method": "eagle3", "num_speculative_tokens": 2},
]


def model(seed: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Two layers whose heads are as wide as the kernels want them; random, but sharp."""
    sizes = {"hidden_size": SIZE, "intermediate_size": 96, "head_dim": 32, "max_position_embeddings": 256}
    return tiny_llama(VOCABULARY, seed, initializer_range=0.3, **sizes).to(dtype)


def head(seed: int, dtype: torch.dtype) -> EagleHead:
    """A random head for `model`."""
    sizes = {"hidden_size": SIZE, "target_hidden_size": SIZE, "intermediate_size": 96, "head_dim": 32}
    return tiny_eagle(VOCABULARY, seed, **sizes).to(dtype)


@dataclass(frozen=True)
class Job:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    speculative: Any


def jobs(count: int, seed: int, made: EagleHead) -> list[Job]:
    """Prompts and answers of unequal length, half of the prompts repetitive, half of the answers sampled."""
    rng = random.Random(seed)
    found = []
    for index in range(count):
        words = [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 20, 60)))]
        prompt = words * rng.choice((1, 2))
        heat = rng.choice((0.0, 0.8))
        params = SamplingParams(temperature=heat, seed=index, max_tokens=rng.randint(2, 24), detokenize=False)
        chosen = DRAFTERS[index % len(DRAFTERS)]
        found.append(
            Job(prompt, params, {**chosen, "model": made} if chosen and chosen["method"] == "eagle3" else chosen)
        )
    return found


class Side:
    """One engine and its requests."""

    def __init__(self, seed: int, count: int, dtype: torch.dtype, *, shared: Any = None, **loading: Any) -> None:
        """`shared`: the model object of both engines; else each has its own."""
        self._alone = model(seed, dtype) if shared is None else copy.deepcopy(shared)
        self._model = copy.deepcopy(self._alone) if shared is None else shared
        self._loading = {"repack": True, "tokenizer": False, "max_num_seqs": ROWS, "max_model_len": 200, **loading}
        self.jobs = jobs(count, seed, head(seed, dtype))
        self.expected = self.alone()

    def alone(self) -> list[list[int]]:
        """The answers of an engine that is the only one, to one request after the other."""
        llm = LLM(self._alone, **self._loading)
        found = [llm.generate(job.prompt, job.params, speculative=job.speculative) for job in self.jobs]
        return [output.outputs[0].token_ids for (output,) in found]

    async def serve(self, ready: Barrier) -> list[Any]:
        """Answers or errors."""
        async with AsyncLLM(self._model, **self._loading) as llm:
            await asyncio.to_thread(ready.wait)
            answers = [llm.generate(job.prompt, job.params, speculative=job.speculative) for job in self.jobs]
            return await asyncio.gather(*answers, return_exceptions=True)

    def wrong(self, ready: Barrier) -> list[str]:
        """What became of each request that did not get its answer."""
        found = asyncio.run(self.serve(ready))
        lines = []
        for job, answer, expected in zip(self.jobs, found, self.expected, strict=True):
            method = job.speculative["method"] if job.speculative else "plain"
            if isinstance(answer, BaseException):
                lines.append(f"{method}: {answer!r}")
            elif answer[0].outputs[0].token_ids != expected:
                lines.append(f"{method}: {answer[0].outputs[0].token_ids}, alone {expected}")
        return lines


def together(requests: int, dtype: torch.dtype, *, shared: bool = False) -> list[str]:
    """Run both engines at once; what became of requests that did not get their answer."""
    ready, one = Barrier(2, timeout=60), model(0, dtype) if shared else None
    sides = [Side(seed, requests // 2, dtype, shared=one) for seed in (1, 2)]
    with ThreadPoolExecutor(2) as threads:
        return [line for lines in threads.map(lambda side: side.wrong(ready), sides) for line in lines]


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of both engines together")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shared", action="store_true", help="both engines run the same model object")
    asked = parser.parse_args()
    began, dtype = time.perf_counter(), getattr(torch, asked.dtype)
    with kernels_in_c(), packed_linears(dtype):
        wrong = together(asked.requests, dtype, shared=asked.shared)
    print(json.dumps({"requests": asked.requests, "wrong": len(wrong), "seconds": time.perf_counter() - began}))  # noqa: T201
    for line in wrong[:10]:
        print(line)  # noqa: T201


if __name__ == "__main__":
    main()
