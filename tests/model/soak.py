"""Many short requests, some of which end early, and what llama.cpp's memory holds after them."""

import random
from typing import Any

import psutil

from forerun import LLM, SamplingParams
from forerun.model.llama_context import load_api
from forerun.model.llama_cpp import LlamaCppTarget

DRAFTERS: list[Any] = [
    {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False},
    {"method": "recycling", "adaptive": False},
    False,
]


def soak(llm: LLM, requests: int, *, tokens: int = 16, seed: int = 0) -> list[float]:
    """Run requests of a few tokens with chains, trees and no drafts, of which one in five is aborted on its way, and
    check after each tenth part that llama.cpp holds what is accounted for. Returns the resident memory (MiB) then."""
    rng, target, sizes = random.Random(seed), llm.target, list[float]()
    assert isinstance(target, LlamaCppTarget)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, detokenize=False)
    beginnings = [[rng.randrange(3, 200) for _ in range(20)] for _ in range(4)]
    for index in range(requests):
        prompt = [*rng.choice(beginnings), *rng.choices(range(3, 200), k=rng.randrange(1, 12))]
        asked = {"prompt_token_ids": prompt * rng.randint(1, 2)}
        request_id = llm.submit(asked, params, speculative=rng.choice(DRAFTERS))
        for _ in range(rng.randrange(4)):
            llm.engine.step()
        if index % 5 == 3:
            llm.abort(request_id)
        while llm.engine.waiting > target.rows:
            llm.engine.step()
        if (index + 1) % max(1, requests // 10) == 0:
            while llm.engine.busy:
                llm.engine.step()
            check_memory(target)
            sizes.append(psutil.Process().memory_info().rss / 2**20)
    return sizes


def check_memory(target: LlamaCppTarget) -> None:
    """Every sequence of llama.cpp holds what its row says, and what no row has is empty."""
    api, memory = load_api(), target._context._memory
    assert not any(target.lengths), target.lengths
    reach = [int(api.llama_memory_seq_pos_max(memory, sequence)) + 1 for sequence in range(target._context.sequences)]
    taken = dict[int, int]()
    for row, state in enumerate(target._rows):
        taken[row] = state.held
        taken |= dict(zip(state.branches, state.covered, strict=True))
    assert sorted([*taken, *target._spare]) == list(range(len(reach))), "a sequence is lost, or is there twice"
    assert reach == [taken.get(sequence, 0) for sequence in range(len(reach))]
