"""Plain and speculative decoding on a GPU: ``python -m benchmarks.gpu [--scale 8]``. Prints tokens per second of the
demo target, or of the target enlarged to so many billion parameters, and of transformers' own `generate`."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forerun import LLM, SamplingParams, demo, shipped
from forerun.demo.scale import ScaledModel
from forerun.devices import device_name

SETTINGS = SamplingParams(temperature=0, max_tokens=160)
EACH = 6
"""Edits, and files, that are asked for; the first half of them one by one, all of them at once."""
FILE_CHARACTERS = 3_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=0.0, help="billions of parameters; 0: the demo target itself")
    parser.add_argument("--drafters", nargs="*", default=["ngram", "suffix"], help="methods beside plain decoding")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    source, device = Path(shipped.resolve("demo")), device_name(torch.device(asked.device))
    path = ScaledModel(source, billions=asked.scale).path if asked.scale else source
    found = {name: _speeds(path, name, asked.device, asked.repeats) for name in ("plain", *asked.drafters)}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(asked.device)
    for name, more in (("transformers", {}), ("transformers, prompt lookup", {"prompt_lookup_num_tokens": 10})):
        found[name] = {"edit x1": _of_transformers(model, AutoTokenizer.from_pretrained(path), more)}
    if asked.json:
        print(json.dumps({"device": device, "model": path.name, "tokens_per_second": found}))  # noqa: T201
        return
    print(f"{path.name} on {device}, bfloat16, tokens per second")  # noqa: T201
    for name, row in found.items():
        print(f"{name:30}" + "".join(f"{work}: {speed:8.1f}   " for work, speed in row.items()))  # noqa: T201


def _speeds(path: Path, method: str, device: str, repeats: int) -> dict[str, float]:
    """Work and requests at once -> tokens per second, the median of `repeats` runs after one that is not counted."""
    config = None if method == "plain" else {"method": method}
    llm = LLM(path, device=device, dtype="bfloat16", speculative_config=config, max_num_seqs=EACH)
    files = [file.text[:FILE_CHARACTERS] for file in demo.prompts()[:EACH]]
    found = {}
    for work, prompts in {"edit": [llm.chat_prompt(chat) for chat in _edits()], "file": files}.items():
        for count, batches in ((1, [[prompt] for prompt in prompts[: EACH // 2]]), (EACH, [prompts])):
            runs = [_run(llm, batches, f"{work} {count} {run}") for run in range(repeats + 1)]
            found[f"{work} x{count}"] = statistics.median(runs[1:])
    return found


def _run(llm: LLM, batches: list[list[object]], salt: str) -> float:
    """Tokens per second; no drafter sees what it remembers of a run with another salt."""
    began = time.perf_counter()
    outputs = [output for batch in batches for output in llm.generate(batch, SETTINGS, cache_salt=salt)]
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - began)


def _of_transformers(model: Any, tokenizer: Any, more: dict[str, int]) -> float:
    """Tokens per second of `generate`, one edit after the other; one before them is not counted."""
    speeds = []
    for chat in _edits()[: EACH // 2 + 1]:
        asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = asked["input_ids"].to(model.device)
        began = time.perf_counter()
        written = model.generate(ids, do_sample=False, max_new_tokens=SETTINGS.max_tokens, **more)
        speeds.append((written.shape[1] - ids.shape[1], time.perf_counter() - began))
    return sum(tokens for tokens, _ in speeds[1:]) / sum(seconds for _, seconds in speeds[1:])


def _edits() -> list[list[dict[str, str]]]:
    """Renames and changed constants, half of each."""
    by_kind = [[one.messages for one in demo.edits() if one.name.startswith(kind)] for kind in ("rename", "constant")]
    return [chat for kind in by_kind for chat in kind[: EACH // 2]]


if __name__ == "__main__":
    main()
