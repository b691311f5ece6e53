"""What speculation may cost where it brings nothing: full batches decoded with and without it, step by step in turns.

Knows no drafter; which one is useless is the caller's choice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.suite.speed import Progress
from forerun import LLM, SamplingParams

_RESAMPLES = 4000
_FURTHEST = 4
"""A row that gets ahead stops at so many times what a row writes plainly."""
_WARM_UP = 4
"""Pairs that do not count: both engines learn in two of them what drafting costs and brings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Burden:
    """Speculation's speed over plain decoding's, pair by pair."""

    drafter: str
    batch: int
    ratios: list[float]

    @property
    def mean(self) -> float:
        """Over the pairs."""
        return mean(self.ratios)

    @property
    def low(self) -> float:
        """Below this the mean lies in one of twenty resamples of the pairs (bootstrap, one-sided)."""
        values = torch.tensor(self.ratios, dtype=torch.float64)
        chosen = torch.randint(len(values), (_RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
        return float(values[chosen].mean(1).quantile(0.05))


def burdens(useless: Any | None) -> dict[str, Mapping[str, Any]]:
    """Name -> configuration: the policy with a draft model that is no use, and its own choice of free drafters."""
    found: dict[str, Mapping[str, Any]] = {"auto": {"method": "auto"}}
    if useless is not None:
        found["useless draft_model"] = {"method": "draft_model", "model": useless, "num_speculative_tokens": 5}
    return found


def scrambled(model: Path, dtype: torch.dtype) -> Any:
    """A model of the same shape whose weights are chance: it costs as much and predicts nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).to(dtype).eval()


def measure_burden(
    engines: Sequence[LLM],
    drafter: str,
    speculative: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    pairs: int,
    new_tokens: int,
    progress: Progress,
) -> Burden:
    """Decode all prompts at once, plainly and speculatively, `pairs` times, at temperature 0.8.

    A pair's ratio is of tokens per second while the batch is full: from the moment when every row decodes until plain
    rows have written `new_tokens` each. (A server puts the next request where one has ended; how long the last row of a
    batch takes, alone at the end, would be another figure.)

    Args:
        engines: two over the same weights. They take turns step by step, for a machine changes its pace within seconds,
            and change their parts with every pair, for it also matters where an engine's cache lies.
    """
    ratios = []
    for pair in range(-_WARM_UP, pairs):
        progress(f"{drafter}, batch {len(prompts)}: pair {pair + 1} of {pairs}")
        first, second = engines if pair % 2 else reversed(engines)
        plain = _begun(first, False, prompts, new_tokens, seed=pair)
        drafting = _begun(second, speculative, prompts, new_tokens, seed=pair)
        turn = 0
        while plain.tokens < new_tokens * len(prompts):
            for side in (plain, drafting) if turn % 2 else (drafting, plain):
                side.step()
            turn += 1
        if pair >= 0:
            ratios.append(drafting.rate / plain.rate)
        for side in (plain, drafting):
            side.end()
    return Burden(drafter=drafter, batch=len(prompts), ratios=ratios)


@dataclass(kw_only=True, slots=True)
class _Side:
    """One engine with a full batch."""

    llm: LLM
    requests: Sequence[str]
    tokens: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of all rows together."""
        return self.tokens / self.seconds

    def step(self) -> None:
        """One step of all rows."""
        began = time.perf_counter()
        chunks = self.llm.engine.step()
        self.seconds += time.perf_counter() - began
        self.tokens += sum(len(chunk.tokens) for chunk in chunks)

    def end(self) -> None:
        """Free the rows."""
        for request in self.requests:
            self.llm.abort(request)


def _begun(
    llm: LLM, way: Mapping[str, Any] | bool, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int
) -> _Side:
    """The moment when every row decodes."""
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        max_tokens=_FURTHEST * new_tokens,
        ignore_eos=True,
        seed=seed + _WARM_UP,
        detokenize=False,
    )
    requests = [llm.submit({"prompt_token_ids": list(prompt)}, params, speculative=way) for prompt in prompts]
    waiting = set(requests)
    while waiting:
        waiting -= {chunk.request_id for chunk in llm.engine.step()}
    return _Side(llm=llm, requests=requests)
