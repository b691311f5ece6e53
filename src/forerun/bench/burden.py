"""What speculation may cost where it brings nothing: full batches decoded with and without it, in interleaved pairs.

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

from forerun import LLM, SamplingParams
from forerun.bench.speed import Progress

_RESAMPLES = 4000
_FURTHEST = 4
"""A row that gets ahead stops at so many times what the average row writes."""


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
    """Name -> configuration: the controller with a draft model that is no use, and its own choice of free drafters."""
    found: dict[str, Mapping[str, Any]] = {"auto": {"method": "auto"}}
    if useless is not None:
        model = {"method": "draft_model", "model": useless, "num_speculative_tokens": 5}
        found["useless draft_model"] = {**model, "adaptive": True}
    return found


def scrambled(model: Path, dtype: torch.dtype) -> Any:
    """A model of the same shape whose weights are chance: it costs as much and predicts nothing."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).to(dtype).eval()


def measure_burden(
    llm: LLM,
    drafter: str,
    speculative: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    *,
    pairs: int,
    new_tokens: int,
    progress: Progress,
) -> Burden:
    """Decode all prompts at once, plainly and speculatively, `pairs` times in alternating order, at temperature 0.8.

    The pair's ratio is of tokens per second while the batch is full: from the moment when every row decodes until they
    have written `new_tokens` each on the average. (A server puts the next request where one has ended; how long the
    last row of a batch takes, alone at the end, would be another figure.)
    """
    ratios = []
    for pair in range(-1, pairs):
        progress(f"{drafter}, batch {len(prompts)}: pair {pair + 1} of {pairs}")
        rates = {}
        ways: list[Mapping[str, Any] | bool] = [False, speculative]
        for way in ways if pair % 2 else reversed(ways):
            rates[way is False] = _rate(llm, way, prompts, new_tokens, seed=pair)
        if pair >= 0:  # The one before warms up.
            ratios.append(rates[False] / rates[True])
    return Burden(drafter=drafter, batch=len(prompts), ratios=ratios)


def _rate(
    llm: LLM, way: Mapping[str, Any] | bool, prompts: Sequence[Sequence[int]], new_tokens: int, seed: int
) -> float:
    """Tokens per second of all rows together."""
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        max_tokens=_FURTHEST * new_tokens,
        ignore_eos=True,
        seed=seed + 1,
        detokenize=False,
    )
    waiting = {llm.submit({"prompt_token_ids": list(prompt)}, params, speculative=way) for prompt in prompts}
    requests = list(waiting)
    while waiting:
        waiting -= {chunk.request_id for chunk in llm.engine.step()}
    began, tokens = time.perf_counter(), 0
    while tokens < new_tokens * len(prompts):
        tokens += sum(len(chunk.tokens) for chunk in llm.engine.step())
    rate = tokens / (time.perf_counter() - began)
    for request in requests:
        llm.abort(request)
    return rate
