"""What asking for drafts costs inside vLLM, per step: forerun's plug-in beside vLLM's own `ngram`, on the same texts.

``PYTHONPATH=src:. .venv-vllm/bin/python benchmarks/serving/plugged.py`` after ``make test-vllm`` has made vLLM's
environment. Rows are code of the shipped prompts, in tokens of the demo; each step adds what a step of a server adds.
No model runs: this is the time that the processor spends while the device waits.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

from forerun.demo import prompts, resolve
from forerun.deploy.engines.vllm import VARIABLE
from forerun.deploy.vllm import ForerunProposer

TOKENS, LOWEST, HIGHEST = 5, 2, 4
"""Of a draft; shortest and longest n-gram that is searched for."""
GAINED = 3
"""Tokens that a step adds to each row."""
Propose = Callable[[list[list[int]], NDArray[np.int32], NDArray[np.int32]], Sequence[Sequence[int]]]


def main() -> None:
    """Measure, and print a JSON line for each number of rows and length, or all in one with ``--json``."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    options.add_argument("--lengths", nargs="+", type=int, default=[500, 4000])
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(resolve("demo"))
    text = [token for one in prompts() for token in tokenizer.encode(one.text, add_special_tokens=False, verbose=False)]
    found = []
    for rows in asked.rows:
        for length in asked.lengths:
            found.append({"rows": rows, "length": length, **measured(text, rows, length, asked.steps)})
            if not asked.json:
                print(json.dumps(found[-1]))  # noqa: T201
    if asked.json:
        print(json.dumps(found))  # noqa: T201


def measured(text: list[int], rows: int, length: int, steps: int) -> dict[str, Any]:
    """Median ms of a step by proposer, taking turns on the same growing rows, and the ratios to vLLM's own."""
    size = length + steps * GAINED + TOKENS + 1
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=TOKENS, prompt_lookup_min=LOWEST, prompt_lookup_max=HIGHEST
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=rows, async_scheduling=False),
        model_config=SimpleNamespace(
            max_model_len=size, get_vocab_size=lambda: 8192, tokenizer=str(resolve("demo")), skip_tokenizer_init=True
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    own = NgramProposer(config)
    arms: dict[str, Propose] = {"vllm ngram": lambda *state: own.propose(TOKENS, *state)}
    for method in ("ngram", "suffix"):
        given = {"method": method} | ({"prompt_lookup_min": LOWEST} if method == "ngram" else {})
        os.environ[VARIABLE] = json.dumps(given)
        arms[f"forerun {method}"] = ForerunProposer(config).propose
    table = np.zeros((rows, size), np.int32)
    for row in range(rows):
        at = row * 997 % (len(text) - size)
        table[row] = text[at : at + size]
    times: dict[str, list[float]] = {name: [] for name in arms}
    drafted = dict.fromkeys(arms, 0)
    for step in range(steps):
        lengths = np.full(rows, length + step * GAINED, np.int32)
        sampled = [table[row, lengths[row] - GAINED : lengths[row]].tolist() for row in range(rows)]
        for name, propose in arms.items():
            began = time.perf_counter()
            drafts = propose(sampled, lengths, table)
            times[name].append(1e3 * (time.perf_counter() - began))
            drafted[name] += sum(map(len, drafts))
    # The first step reads the prompts: once for each request, which vLLM's does again at every step.
    found = {name: median(ms[1:]) for name, ms in times.items()}
    result: dict[str, Any] = {f"{name}, ms": round(ms, 4) for name, ms in found.items()}
    result |= {f"{name}, first step, ms": round(times[name][0], 3) for name in arms}
    result |= {f"{name}, tokens": count for name, count in drafted.items()}
    return result | {
        f"{name} / vllm": round(ms / found["vllm ngram"], 3) for name, ms in found.items() if "vllm" not in name
    }


if __name__ == "__main__":
    main()
