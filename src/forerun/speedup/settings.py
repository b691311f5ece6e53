"""The request of ``forerun speedup``, and the figures that it decides by, each with its unit and
where it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIX = Path(__file__).with_name("mix.jsonl")
"""The built-in prompts: 48 of six categories, written for this purpose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """How heads are trained, and what is expected of them."""

    kinds: tuple[str, ...] = ("eagle3",)  # Considered kinds: of equal training EAGLE-3 drafts best (docs/benchmarks.md)
    vocab_sizes: tuple[int, ...] = (4096, 8192, 16384, 32768)  # Draft vocabularies, besides the target's whole one
    steps: tuple[int, ...] = (2, 3, 5, 7)  # Lengths of unrolling
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"eagle3": {"norm_before_fc": True}})
    """Variants by kind, `draft.options` of a recipe: with it SmolLM2's head had 1.27 tokens a pass after 60 steps, 1.22
    without; vLLM, SGLang, TensorRT-LLM and llama.cpp read it (docs/formats.md)."""
    window: int = 512  # Tokens of a training window
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    first_tokens: float = 1e4  # Learned tokens at which `first_acceptance` is expected
    first_acceptance: float = 0.235
    by_decade: float = 0.13
    """Acceptance that ten times the tokens add: an EAGLE-3 head for SmolLM2-135M-Instruct has 0.30 after some 33,000
    tokens and 0.32 after 46,000, published ones for Llama-3.2-1B 0.75 after some 10^8."""
    most_acceptance: float = 0.8
    most_epochs: float = 8.0  # Passes over the same completions that still teach something
    beyond_unrolling: float = 0.7  # Share of its acceptance that a head keeps beyond the depth it was unrolled to
    fewest_steps: int = 60
    worth: float = 1.05  # Speed-up over what is free from which a head is trained: less is within the forecast's error


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupSettings:
    """How a budget is spent, and on how much."""

    drawing_share: float = 0.04  # Of the budget beyond the least work: prompts are drawn, where none are given
    answers_share: float = 0.25  # The model completes the training prompts
    free_share: float = 0.08  # Drafters that need no training
    steps_share: float = 0.8  # Of the training's time; the rest goes to evaluations while it trains (`TrainSettings`)
    comparison_share: float = 0.2  # The last measurement
    most_drawn: int = 5000  # Prompts that are drawn, at most
    rows: int = 8  # Answers at once while the model writes them
    longest: int = 2048  # Tokens of a prompt and its completion
    compared_tokens: int = 128  # Of each completion that is compared, at most
    least_tokens: int = 24  # Of each completion that is compared, at least, however slow the model is
    trial_tokens: int = 64  # Of each completion of a trial, at most
    least_trial_tokens: int = 16  # Of each completion of a trial, at least
    least_trials: int = 2  # Prompts on which drafters without training are tried, at least
    trial_answers_share: float = 0.2  # Of the completions' time: those of trial prompts, which are not learned
    forecast_prompts: int = 6  # Prompts on which a drafter's acceptance is measured for the plan, at most
    forecast_share: float = 0.1  # Of a stage's time that a drafter's forecast may take
    temperatures: tuple[float, ...] = (0.0, 0.8)  # Of the completions that a head learns, in equal shares
    head: HeadSettings = field(default_factory=HeadSettings)


SETTINGS = SpeedupSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupRequest:
    """Which model is to become faster, on which prompts, within which time."""

    model: str
    output: Path
    budget_s: float  # Seconds of all stages
    prompts: tuple[Path, ...] = ()  # Empty: the built-in mix, and prompts that are drawn from the model
    kind: str | None = None  # Kind of head to train in any case; None: what is worth it, or nothing
    max_tokens: int = 256  # Of a completion that a head learns; no more are compared
    dtype: str = "auto"

    @property
    def compared_tokens(self) -> int:
        """Return the most tokens of a completion that is compared."""
        return min(self.max_tokens, SETTINGS.compared_tokens)

    @property
    def files(self) -> tuple[Path, ...]:
        return self.prompts or (MIX,)
