"""What a pass over drafts costs on targets with recurrent state, and plain decoding beside transformers' `generate`.

Random weights of about 0.4 B, with the order of layers of Qwen3-Next (three gated delta rules, one attention) and of
Bamba (Mamba-2, attention in every ninth layer), and a Llama of the same size for comparison:
``python -m benchmarks.hybrids``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.core.tree import TokenTree
from forerun.model import TransformersTarget

CONTEXT = 256  # Tokens in the cache
NEW = 24  # Tokens that are decoded plainly
COMMON: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 0,
        "mlp_only_layers": list(range(24)),
    },
    "bamba": {
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "attn_layer_indices": [8, 17],
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
    },
    "llama": {"num_attention_heads": 16, "num_key_value_heads": 4},
}


def build(kind: str, dtype: torch.dtype) -> Any:
    """Return a random model of the kind."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **MODELS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def chain(size: int) -> TokenTree:
    """Return a chain of drafts."""
    tree, last = TokenTree(5), 0
    for token in range(size):
        last = tree.add(7 + token, last)
    return tree


def wide(size: int) -> TokenTree:
    """Return a tree of drafts in which every node has two children."""
    tree = TokenTree(5)
    for node in range(size):
        tree.add(7 + node, node // 2)
    return tree


def time_passes(target: TransformersTarget, repeats: int) -> dict[str, float]:
    """Return the median seconds of a step (pass and commit) over each shape, interleaved."""
    shapes = {"plain": TokenTree(5), "chain of 5": chain(5), "chain of 16": chain(16), "tree of 16": wide(16)}
    taken: dict[str, list[float]] = {name: [] for name in shapes}
    for _ in range(repeats):
        for name, tree in shapes.items():
            target.truncate([0], [0])
            target.prefill([0], [[3 + token % 900 for token in range(CONTEXT)]])
            for again in range(4):
                begun = time.perf_counter()
                target.score([0], [tree])
                target.commit([0], [(1,) if tree.size else ()])
                if again:
                    taken[name].append(time.perf_counter() - begun)
    return {name: median(seconds) for name, seconds in taken.items()}


def time_plain(target: TransformersTarget, model: Any, repeats: int) -> tuple[float, float]:
    """Return the median seconds per token of ours and of transformers' `generate`, prompt not counted."""
    prompt = [3 + token % 900 for token in range(CONTEXT)]
    ours, theirs = [], []
    given = torch.tensor([prompt])
    for _ in range(repeats):
        target.truncate([0], [0])
        token = int(target.prefill([0], [prompt]).logits[0, -1].argmax())
        begun = time.perf_counter()
        for _ in range(NEW):
            token = int(target.score([0], [TokenTree(token)]).logits[0, 0].argmax())
            target.commit([0], [()])
        ours.append((time.perf_counter() - begun) / NEW)
        seconds = []
        for new in (1, NEW + 1):
            begun = time.perf_counter()
            model.generate(given, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
            seconds.append(time.perf_counter() - begun)
        theirs.append((seconds[1] - seconds[0]) / NEW)
    return median(ours), median(theirs)


def main() -> None:
    """Print the figures of each model as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    for kind in asked.models:
        dtype = getattr(torch, asked.dtype)
        made = build(kind, dtype)
        parameters = sum(weight.numel() for weight in made.parameters()) / 1e6
        target = TransformersTarget.load(made, rows=1, slots=512, repack=True)
        passes = time_passes(target, asked.repeats)
        ours, theirs = time_plain(target, build(kind, dtype), max(2, asked.repeats // 2))
        plain, longer = passes["plain"], passes["chain of 16"]
        told = {
            "model": kind,
            "parameters_m": round(parameters),
            "plain_ms": round(1e3 * plain, 1),
            "chain_of_5_over_plain": round(passes["chain of 5"] / plain, 2),
            "chain_of_16_over_plain": round(longer / plain, 2),
            "tree_of_16_over_chain_of_16": round(passes["tree of 16"] / longer, 2),
            "generate_over_ours": round(theirs / ours, 2),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
