"""After every commit the caches of target and drafter hold what a fresh prefill of the same tokens would put there."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from contract.harness import PROMPTS, SAMPLED, Variant, as_prompts, each_drafter, installed, llm, oracle
from forerun import LLM, SamplingParams
from forerun.decode.drafter import Drafter, DrafterSetup
from forerun.drafters import drafter_class
from forerun.drafters.draft_models.slem import SlemDrafter
from forerun.drafters.draft_models.tli import TliDrafter
from forerun.model import TransformersTarget
from forerun.model.layers import cache_argument

ROWS = 3
STEPS = 6
TOLERANCE = 1e-4


def largest_difference(target: TransformersTarget, row: int, tokens: Sequence[int]) -> float:
    """Between the row's keys and values and those of transformers' own forward over `tokens`."""
    fresh = target.model(torch.tensor([list(tokens)]), use_cache=True)[cache_argument(target.model)]
    worst = 0.0
    for layer in target.cache._stores:
        theirs = fresh.layers[layer].keys, fresh.layers[layer].values
        for ours, other in zip(target.cache.read(layer, row, len(tokens)), theirs, strict=True):
            worst = max(worst, float((ours - other[0].transpose(0, 1)).abs().max()))
    return worst


def built(variant: Variant) -> tuple[LLM, Drafter]:
    """An engine and its drafter."""
    made: list[Drafter] = []
    cls = drafter_class(variant.method)

    class Kept(cls):
        def __init__(self, config: object, setup: DrafterSetup) -> None:
            super().__init__(config, setup)
            made.append(self)

    with installed(variant.method, Kept):
        return llm(variant, rows=ROWS), made[0]


def read_by(drafter: Drafter, row: int, tokens: list[int]) -> list[int]:
    """The tokens that a drafter's model was run on: a drafter with another tokenizer says which."""
    if isinstance(drafter, TliDrafter):
        return drafter._alignments[row].ids
    return drafter._rows[row].held if isinstance(drafter, SlemDrafter) else tokens


def run(engine: LLM, drafter: Drafter, params: SamplingParams) -> float:
    """Advance several answers step by step; the largest difference after any step, in target and drafter."""
    texts = {}
    for row, prompt in enumerate(as_prompts(PROMPTS[:ROWS])):
        own = replace(params, max_tokens=60 - len(PROMPTS[row]), seed=row, temperature=params.temperature if row else 0)
        texts[engine.submit(prompt, own)] = list(PROMPTS[row])
    worst = 0.0
    for _ in range(STEPS):
        for chunk in engine.engine.step():
            texts[chunk.request_id] += [token.id for token in chunk.tokens]
        drafters = [
            part
            for part in vars(drafter).values()
            if isinstance(part, TransformersTarget) and part is not engine.target
        ]
        rows = {answer.request.id: answer.row.cache_row for answer in engine.engine._running}
        for target in (engine.target, *drafters):
            for request, tokens in texts.items():
                row = rows[request]
                if target is engine.target:
                    assert target.lengths[row] == len(tokens) - 1
                if target.lengths[row]:
                    held = tokens if target is engine.target else read_by(drafter, row, tokens)
                    worst = max(worst, largest_difference(target, row, held[: target.lengths[row]]))
    return worst


@pytest.mark.parametrize("variant", [oracle(), *each_drafter(4)], ids=str)
def test_the_cache_is_that_of_a_fresh_prefill(variant: Variant) -> None:
    """Of a greedy row beside a sampled one."""
    with torch.inference_mode():
        assert run(*built(variant), SAMPLED) < TOLERANCE
