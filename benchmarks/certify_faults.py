"""Planted faults that ``forerun certify`` has to see on a real model, each by the test that is meant for it.

``python -m benchmarks.certify_faults --model MODEL`` says of each fault whether the test passed without it and failed
with it, and of what power the test is. The finest takes most of the time: it draws tens of thousands of answers.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from forerun import LLM, demo
from forerun.certify import CertifyPlan
from forerun.certify.checks import Run, chi_square_check, settings_for, token_prompts, token_test, uncertain
from forerun.certify.reference import Reference
from forerun.core import sampling
from forerun.core.probs import NodeProbs
from forerun.core.rng import Rng, Stream
from forerun.core.rules import SampleWalk
from forerun.core.tree import TokenTree
from forerun.types import SamplingParams, Source, Verdict

MORE = 0.02
"""Share of the drafted tokens that ought to be rejected, and are accepted."""


@contextmanager
def more_acceptance() -> Iterator[None]:
    """Accept 2 % of the drafted tokens that the target did not draw."""
    honest, coin = SampleWalk.verify, random.Random(0)

    def eager(self: SampleWalk, tree: TokenTree, target: NodeProbs, rng: Rng) -> Verdict:
        if tree.size and coin.random() < MORE:
            return Verdict(path=(1,), next_token=target.probs(1).draw(rng), kind=Source.BONUS)
        return honest(self, tree, target, rng)

    with patch.object(SampleWalk, "verify", eager):
        yield


@contextmanager
def residual_not_normalised() -> Iterator[None]:
    """Draw from what a rejection leaves as if it summed to 1: the missing part falls to the last token."""

    def draw(rng: Rng, probs: Tensor, depth: int = 0) -> int:
        uniform = rng._uniform(rng.position + depth, Stream.TARGET, 0)
        found = int(torch.searchsorted(probs.double().cumsum(0), uniform, right=True))
        return min(found, int(torch.nonzero(probs)[-1]))

    with patch.object(Rng, "draw", draw):
        yield


@contextmanager
def nucleus_before_temperature() -> Iterator[None]:
    """Choose top-p's tokens by the distribution at temperature 1."""
    honest = sampling.distribution_of

    def early(logits: Tensor, params: SamplingParams, highest: float | None = None) -> Tensor:
        nucleus = honest(logits.clone(), replace(params, temperature=1.0), highest) > 0
        kept = honest(logits, replace(params, top_p=1.0), highest) * nucleus
        return kept / kept.sum()

    with patch.object(sampling, "distribution_of", early):
        yield


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and the test that has to see it."""

    plant: Callable[[], Any]
    what: str = "no seed"
    drafter: dict[str, Any] = field(default_factory=lambda: {"method": "recycling", "nodes": 4, "adaptive": False})
    plan: CertifyPlan = field(default_factory=CertifyPlan)
    tokens: bool = False  # The test of each token of longer answers has to see it


EXIT = {"method": "early_exit", "exit_layer": 26, "num_speculative_tokens": 3, "adaptive": False}
FAULTS = {
    "top-p before the temperature": Fault(plant=nucleus_before_temperature, what="top-p 0.7"),
    "residual not normalised": Fault(plant=residual_not_normalised, drafter=EXIT, tokens=True),
    "2 % more acceptance": Fault(plant=more_acceptance, plan=CertifyPlan(detect=0.02), tokens=True),
}


def main() -> None:
    """Try each fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--rows", type=int, default=32)
    asked = parser.parse_args()
    llm = LLM(asked.model, dtype="float32", max_num_seqs=asked.rows, max_model_len=CertifyPlan().longest)
    reference = Reference.of(llm)
    for name in asked.faults:
        fault = FAULTS[name]
        prompts = token_prompts(llm, [prompt.text for prompt in demo.prompts()], fault.plan)
        run = Run(llm=llm, reference=reference, prompts=prompts, plan=fault.plan)
        [setting] = [one for one in settings_for(run, 0.7) if one.what == fault.what]
        setting = replace(setting, speculative=fault.drafter)
        test = token_test(run, setting, tests=12) if fault.tokens else uncertain(run, setting, 0, tests=12)
        for planted in (False, True):
            began = time.perf_counter()
            with fault.plant() if planted else nullcontext():
                check = chi_square_check(run, test)
            what = f"{name}, {'planted' if planted else 'not planted'}: {'passes' if check.passed else 'fails'}"
            sys.stdout.write(f"{what} after {time.perf_counter() - began:.0f} s; {check.summary}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
