"""Divides the time of ``forerun speedup``: every stage gets its least work, and the shares divide what is left.

What a stage does at least is a number of tokens. How long they take follows from the passes that were measured first,
so that who has a slow model is told before anything starts which budget would do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import ArgumentError
from forerun.speedup.compare import DECIDING, TEMPERATURES, WARM_UP_TOKENS
from forerun.speedup.settings import SETTINGS, SpeedupRequest

PROMPT_NODES = 128  # Nodes of the pass that stands for reading a prompt
TIMED_PASSES, TIMED_S = 60, 10.0  # Of a drafter whose drafts are timed (`measure_draft`), at most


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBudget:
    """The seconds of each stage, for a model whose passes are known."""

    request: SpeedupRequest
    plain_s: float  # Of a plain pass
    wide_s: float  # Of a pass over a token of each of `SpeedupSettings.rows` completions
    prompt_s: float  # Of reading a prompt
    measuring_s: float  # What the first stage took
    free_arms: int  # Ways to decode that are tried without training, plain decoding among them
    prompts: int = DECIDING  # Held-out prompts that are compared at least
    drawn_tokens: int = 0  # Of the prompts that the model writes one after the other, at least
    unanswered: bool = True  # Completions to learn from have yet to be written

    @classmethod
    def of(cls, machine: Mapping[str, Any], request: SpeedupRequest, **about: Any) -> StageBudget:
        """Return the budget on a machine that the first stage measured."""
        plain_s = machine["pass_ms"] / 1000

        def pass_s(nodes: int) -> float:
            largest, widest = machine["v"][-1]
            return plain_s * float(next((v for size, v in machine["v"] if size >= nodes), widest * nodes / largest))

        return cls(
            request=request,
            plain_s=plain_s,
            wide_s=pass_s(SETTINGS.rows),
            prompt_s=pass_s(PROMPT_NODES),
            measuring_s=machine["seconds"],
            **about,
        )

    def least(self, *, head: bool) -> dict[str, float]:
        """Return the seconds of the least work of each stage, with or without a head to train."""
        settings, both = SETTINGS, len(TEMPERATURES)
        arms, forecasts = (4 if head else 2), self.free_arms - 2  # `auto` has no forecast
        waves = (1 + len(settings.temperatures)) if head and self.unanswered else 0
        forecast_s = self._completions_s(1, self._least(settings.least_tokens)) + min(
            TIMED_S, TIMED_PASSES * self.plain_s
        )
        return {
            "prompts": self.drawn_tokens * self.wide_s,
            "answers": waves * self.request.max_tokens * self.wide_s,
            "free": self._completions_s(
                settings.least_trials * self.free_arms * both, self._least(settings.least_trial_tokens)
            )
            + self._completions_s(self.free_arms, WARM_UP_TOKENS)
            + forecasts * forecast_s,
            "comparison": self._completions_s(self.prompts * arms * both, self._least(settings.least_tokens))
            + self._completions_s(arms, WARM_UP_TOKENS)
            + (forecast_s if head else 0.0),
        }

    def total(self, *, head: bool) -> float:
        """Return the seconds of the least that can be done, the first stage included."""
        return self.measuring_s + sum(self.least(head=head).values())

    @property
    def trains(self) -> bool:
        """Return whether there is time to let a head learn, besides what is done without one."""
        return self.request.budget_s >= self.total(head=True)

    def check(self) -> None:
        """Raise ArgumentError where the least work takes longer than the budget."""
        head = self.request.kind is not None
        if self.request.budget_s >= self.total(head=head):
            return
        needed = {"measuring the machine": self.measuring_s, **self.least(head=head)}
        shown = ", ".join(f"{name} {seconds / 60:.1f} min" for name, seconds in needed.items() if seconds)
        more = f", and more to train {self.request.kind}" if head else ""
        raise ArgumentError(
            f"--budget {self.request.budget_s / 60:.3g}m is too short: plain decoding makes {1 / self.plain_s:.3g} "
            f"tokens/s here, and the least work takes {shown}{more}. Give at least --budget {self.enough(head=head)}"
        )

    def enough(self, *, head: bool) -> str:
        """Return a budget, as `--budget` takes it, in which the least work has room."""
        return f"{math.ceil(1.1 * self.total(head=head) / 60)}m"

    def allot(self, shares: Mapping[str, float], *, head: bool) -> dict[str, float]:
        """Return the seconds of the stages with a share."""
        least = self.least(head=head)
        spare = max(0.0, self.request.budget_s - self.total(head=head))
        return {name: least.get(name, 0.0) + share * spare for name, share in shares.items()}

    def tokens_within(self, seconds: float, completions: int, *, least: int, most: int) -> int:
        """Return how long so many completions may be within `seconds`: between `least` and `most` tokens."""
        fits = (seconds / completions - self.prompt_s) / self.plain_s
        most = min(most, self.request.max_tokens)
        return max(min(self._least(least), most), min(most, int(fits)))

    def _least(self, tokens: int) -> int:
        return min(tokens, self.request.max_tokens)

    def _completions_s(self, count: int, tokens: int) -> float:
        return count * (tokens * self.plain_s + self.prompt_s)
