"""What a pass costs beside transformers' and beside the memory: ``python benchmarks/passes.py --model DIR``.

In turns: greedy decoding of 1, 8 and 16 rows by forerun's plain passes and by transformers' ``generate``; reading all
weights once by torch's own matrix-vector products, and by ours; a prompt's pass in both. Answers are no part of it.

Of a GGUF file (``--model FILE.gguf``): passes of 1 to 32 nodes and a prompt with the weights in the file's blocks, by
llama.cpp where that is installed, and dequantised.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.steps import linear_layers
from forerun.core.tree import TokenTree
from forerun.model import Target, TransformersTarget
from forerun.model.back_ends import load_target
from forerun.model.load import LoadOptions
from forerun.model.prepare import open_named

PROMPT = 64  # Tokens before those that are timed
SCALE = 1e3  # ms


class Plain:
    """forerun's plain passes, up to the argmax of each row."""

    def __init__(self, target: TransformersTarget) -> None:
        self.target = target

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        rows = range(len(prompts))
        self.target.truncate(rows, [0] * len(prompts))
        self.target.prefill(rows, prompts).logits.argmax(-1).tolist()

    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds for `tokens` steps of all rows behind their prompts."""
        self.prefill(prompts)
        rows, last = range(len(prompts)), [prompt[-1] for prompt in prompts]
        began = time.perf_counter()
        for _ in range(tokens):
            logits = self.target.score(rows, [TokenTree(token) for token in last]).logits
            last = self.target.largest(logits) if hasattr(self.target, "largest") else _largest(logits)
            self.target.commit(rows, [()] * len(prompts))
        return time.perf_counter() - began


def _largest(logits: Tensor) -> list[int]:
    from forerun.model.kernels.native import largest

    return [found[0] for found in largest(logits)]


class Transformers:
    """transformers' own model and cache."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        self.model(torch.tensor([*prompts]), logits_to_keep=1).logits.argmax(-1).tolist()

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds of `generate` after its first token: that of `tokens` + 1 less that of one."""
        ids, times = torch.tensor([*prompts]), list[float]()
        mask = torch.ones_like(ids)
        for count in (1, tokens + 1):
            began = time.perf_counter()
            self.model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=0
            )
            times.append(time.perf_counter() - began)
        return times[1] - times[0]


def reading(weights: Sequence[Any], rows: int, dtype: torch.dtype) -> Callable[[], float]:
    """Seconds of one product of so many rows with each of these weights."""
    inputs = {layer.in_features: torch.randn(rows, layer.in_features).to(dtype) for layer in weights}

    @torch.inference_mode()
    def timed() -> float:
        began = time.perf_counter()
        for layer in weights:
            states = inputs[layer.in_features]
            layer(states) if isinstance(layer, nn.Module) else layer.apply(states)
        return time.perf_counter() - began

    return timed


def timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(model: str, dtype: str, rows: Sequence[int], tokens: int, repeats: int, long: int) -> dict[str, Any]:
    """Medians in ms of all arms, which take turns, and tokens/s."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    target = TransformersTarget.load(
        model, dtype=dtype, rows=max(rows), slots=max(PROMPT + tokens, long) + 17, self_check=False
    )
    ours, other = Plain(target), Transformers(theirs)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, target.vocab_size, (max(rows), long), generator=generator).tolist()
    prompts = [row[:PROMPT] for row in ids]
    arms: dict[str, Callable[[], float]] = {}
    for count in rows:
        some = prompts[:count]
        arms[f"forerun, {count} rows"] = lambda some=some: ours.decode(some, tokens) / tokens  # type: ignore[misc]
        arms[f"transformers, {count} rows"] = lambda some=some: other.decode(some, tokens) / tokens  # type: ignore[misc]
        arms[f"forerun's products, {count} rows"] = reading(linear_layers(target.model), count, target.dtype)
    arms["torch's products, 1 row"] = reading(linear_layers(theirs), 1, target.dtype)
    arms[f"forerun, prompt of {long}"] = lambda: timed(lambda: ours.prefill(ids[:1]))
    arms[f"transformers, prompt of {long}"] = lambda: timed(lambda: other.prefill(ids[:1]))
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats + 1):
        for name, arm in arms.items():
            seconds = arm()
            if turn:
                taken[name].append(seconds)
    found = {name: SCALE * median(values) for name, values in taken.items()}
    return {
        "model": model,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "ms": {name: round(value, 2) for name, value in found.items()},
        "plain over transformers": {
            str(count): round(found[f"transformers, {count} rows"] / found[f"forerun, {count} rows"], 2)
            for count in rows
        },
        "products' share of a step": {
            str(count): round(found[f"forerun's products, {count} rows"] / found[f"forerun, {count} rows"], 2)
            for count in rows
        },
        "one row over torch's pace": round(found["torch's products, 1 row"] / found["forerun's products, 1 rows"], 2)
        if 1 in rows
        else None,
    }


def compare_blocks(file: str, nodes: Sequence[int], repeats: int, long: int) -> dict[str, Any]:
    """Medians in ms of passes of so many nodes, which take turns, and prompt tokens/s; and how far the distributions
    are from those of the dequantised weights, in nats.
    """
    dequantised = open_named(file, LoadOptions(dtype="bfloat16", device="cpu"))
    slots = PROMPT + long + max(nodes) + 1
    common: dict[str, Any] = {"dtype": "bfloat16", "slots": slots, "self_check": False, "repack": True}
    arms: dict[str, Target] = {
        "in blocks": TransformersTarget.load(file, **common),
        "dequantised": TransformersTarget.load(dequantised, **common),
    }
    if find_spec("llama_cpp") is not None:
        arms["llama.cpp"] = load_target(file, backend="llama.cpp", slots=slots)
    ids = torch.randint(100, 1000, (PROMPT + long,), generator=torch.Generator().manual_seed(0)).tolist()
    taken: dict[str, list[float]] = {}
    logits: dict[str, list[Tensor]] = {name: [] for name in arms}
    for count in nodes:
        tree = TokenTree(ids[PROMPT])
        for node in range(1, count):
            tree.add(100 + node, (node - 1) // 2)
        for turn in range(repeats + 1):
            for name, target in arms.items():
                if not turn:
                    target.truncate([0], [0])
                    target.prefill([0], [ids[:PROMPT]])
                began = time.perf_counter()
                scored = target.score([0], [tree]).logits
                _largest(scored)
                taken.setdefault(f"{name}, {count} nodes", []).append(time.perf_counter() - began)
                target.truncate([0], [PROMPT])
                if not turn:
                    logits[name].append(scored[0].float().log_softmax(-1))
    for _ in range(1 + repeats // 16):
        for name, target in arms.items():
            target.truncate([0], [PROMPT])
            read = timed(lambda target=target: target.prefill([0], [ids[PROMPT:]]))  # type: ignore[misc]
            taken.setdefault(f"{name}, a prompt of {long} tokens", []).append(read)
    right = torch.cat(logits.pop("dequantised"))
    return {
        "model": file,
        "threads": torch.get_num_threads(),
        "ms": {name: round(SCALE * median(values[1:]), 2) for name, values in taken.items()},
        "MB": {name: round(target.memory_bytes() / 1e6) for name, target in arms.items()},
        "mean KL": {
            name: float(nn.functional.kl_div(torch.cat(ours), right, log_target=True, reduction="none").sum(-1).mean())
            for name, ours in logits.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory or hub id of a causal LM")
    parser.add_argument("--dtype", default="bfloat16", help="float32 or bfloat16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--tokens", type=int, default=16, help="steps that are timed in each turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    given = parser.parse_args()
    if given.model.endswith(".gguf"):
        found = compare_blocks(given.model, (1, 2, 4, 8, 16, 32), given.repeats * given.tokens, given.prompt)
    else:
        found = compare(given.model, given.dtype, given.rows, given.tokens, given.repeats, given.prompt)
    text = json.dumps(found, indent=None if given.json else 2)
    print(text)  # noqa: T201


if __name__ == "__main__":
    main()
