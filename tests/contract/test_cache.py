"""After every commit the caches of target and drafter hold what a fresh prefill of the same tokens would put there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from contract.harness import PROMPTS, SAMPLED, Variant, as_prompts, installed, llm, oracle, variants
from forerun import SamplingParams
from forerun.drafters import drafter_class
from forerun.drafters.base import Drafter, DrafterSetup
from forerun.target import Target

ROWS = 3
STEPS = 6
EVERYONE = [oracle(), *variants()]


def largest_difference(target: Target, row: int, tokens: Sequence[int]) -> float:
    """Between the row's keys and values and those of a fresh prefill of `tokens`, the first so many."""
    fresh = Target.load(target.model, rows=1, slots=target.slots)
    fresh.prefill([0], [list(tokens)])
    worst = 0.0
    for layer in target.cache.layers:
        pairs = zip(target.cache.read(layer, row, len(tokens)), fresh.cache.read(layer, 0, len(tokens)), strict=True)
        worst = max([worst, *(float((ours - theirs).abs().max()) for ours, theirs in pairs)])
    return worst


def run(variant: Variant, params: SamplingParams) -> list[float]:
    """Advance several answers step by step; the largest difference after each step, in target and drafter."""
    built: list[Drafter] = []
    cls = drafter_class(variant.method)

    class Kept(cls):  # type: ignore[misc, valid-type]
        def __init__(self, config: object, setup: DrafterSetup) -> None:
            super().__init__(config, setup)
            built.append(self)

    with installed(variant.method, Kept):
        engine = llm(variant, rows=ROWS)
    texts = {}
    for row, prompt in enumerate(as_prompts(PROMPTS[:ROWS])):
        texts[engine.submit(prompt, replace(params, max_tokens=60 - len(PROMPTS[row]), seed=row))] = list(PROMPTS[row])
    worst = []
    for _ in range(STEPS):
        for chunk in engine.engine.step():
            texts[chunk.request_id] += [token.id for token in chunk.tokens]
        own = [part for part in vars(built[0]).values() if isinstance(part, Target) and part is not engine.target]
        for target in (engine.target, *own):
            for row, tokens in enumerate(texts.values()):
                length = target.lengths[row]
                if target is engine.target:
                    assert length == len(tokens) - 1
                if length:
                    worst.append(largest_difference(target, row, tokens[:length]))
    return worst


@pytest.mark.parametrize("params", [replace(SAMPLED, temperature=0.0), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("variant", EVERYONE, ids=str)
def test_the_cache_is_that_of_a_fresh_prefill(variant: Variant, params: SamplingParams) -> None:
    with torch.inference_mode():
        assert max(run(variant, params)) < 1e-4
