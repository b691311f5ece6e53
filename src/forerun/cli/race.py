"""Plain against speculative decoding of one prompt, measured fairly: same engine, warmed up, interleaved, medians.

Decoding speed alone: tokens after the first over the time after the first. Knows nothing of the terminal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.certify import ties
from forerun.cli.show import tokens_per_second

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.types import RequestOutput, SamplingParams

Show = Callable[[str, Any], "RequestOutput"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Race:
    """One prompt, answered by both arms several times."""

    plain: list[RequestOutput]
    """The first is the warm-up run and is not timed."""
    speculative: list[RequestOutput]
    parted: ties.Difference | None
    """Where the two answers part; None if they are the same."""
    reproducible: bool
    """Whether every run of either arm gave the same tokens as its first."""

    @property
    def identical(self) -> bool:
        """Whether every run of both arms gave the same tokens."""
        return self.parted is None and self.reproducible

    @property
    def plain_speed(self) -> float:
        """Tokens per second, the median of the timed runs."""
        return _speed(self.plain)

    @property
    def speculative_speed(self) -> float:
        """Tokens per second, the median of the timed runs."""
        return _speed(self.speculative)

    @property
    def speedup(self) -> float:
        """Speculative over plain."""
        return self.speculative_speed / self.plain_speed if self.plain_speed else 0.0


def run(llm: LLM, prompt: str, params: SamplingParams, *, repeats: int, show: Show) -> Race:
    """Answer `prompt` plainly and speculatively, once for `show` and `repeats` times for the clock, taking turns.

    Args:
        show: is given an arm's name and its stream, prints it and returns the finished request.
    """
    # A domain of its own for each run, or drafters that remember answers would copy the run before.
    salts = (f"run {number}" for number in itertools.count())
    plain = [show("plain", llm.stream(prompt, params, speculative=False, cache_salt=next(salts)))]
    speculative = [show("speculative", llm.stream(prompt, params, cache_salt=next(salts)))]
    # The first run of an arm pays for what is made once and for the printing, so it is not timed.
    for turn in range(repeats):
        arms = [(plain, False), (speculative, None)]
        for runs, choice in arms if turn % 2 == 0 else reversed(arms):
            runs.append(llm.generate([prompt], params, speculative=choice, cache_salt=next(salts))[0])
    answers = (_tokens(plain[0]), _tokens(speculative[0]))
    return Race(
        plain=plain,
        speculative=speculative,
        parted=ties.difference(llm, plain[0].prompt_token_ids, answers, 0),
        reproducible=all(_tokens(run) == _tokens(runs[0]) for runs in (plain, speculative) for run in runs),
    )


def repetition(tokens: list[int], size: int = 8) -> float:
    """Share of the answer's runs of `size` tokens that occurred before in it: text in circles flatters any drafter."""
    runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def _speed(runs: list[RequestOutput]) -> float:
    speeds = [speed for run in runs[1:] if (speed := tokens_per_second(run)) is not None]
    return median(speeds) if speeds else 0.0


def _tokens(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids
