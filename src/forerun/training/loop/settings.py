"""These are the settings of the training loop, with units and limits; pydantic checks them, and an
`ArgumentError` refuses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from forerun.devices import multiplies
from forerun.errors import ArgumentError
from forerun.losses.objective import Count, Natural, NotNegative, Positive, Share, check_fields

Momentum = Annotated[float, Field(ge=0, lt=1)]
MAY_CHANGE = frozenset({
    "max_seconds", "gradient_checkpointing", "save_every_s", "save_every_steps", "eval_every_steps", "keep_checkpoints",
    "log_every_steps", "patience", "find_rate",
})  # fmt: skip
"""A resumed run may set these anew; the rest decides what is trained."""
PARTS, LEAST_BETWEEN, MOST_EVALUATION = 10, 50, 0.2
"""These are the evaluations of a run where no number is given, the least steps between two, and the share of the time
of all steps beyond which one is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """`TrainSettings` say how long, how fast and how carefully to train; ArgumentError names a
    field that is not allowed.
    """

    steps: Natural | None = None  # Optimizer steps in all, those of resumed runs included; none: what `epochs` comes to
    epochs: Positive = 1.0  # Passes over the data; read only where `steps` and `seconds` are none
    # Wall seconds of all steps, those of resumed runs included, instead of a number of steps: the rate falls with them
    seconds: Positive | None = None
    max_seconds: Positive | None = None  # Wall seconds of this run, evaluation included; then it saves and returns
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 3.0e-4  # Peak rate of AdamW, per step
    muon_learning_rate: Positive = 1.0e-3  # Peak rate of Muon, per step, scaled to AdamW's size of update
    find_rate: bool = False  # Before the first step, try factors on both rates in short runs from the same weights
    muon_momentum: Momentum = 0.95
    weight_decay: NotNegative = 0.01  # Decay of matrices, decoupled, per unit of rate; embeddings, norms: none
    # Shares of AdamW's first and second moment kept per step.
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = (0.9, 0.95)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Count | None = None  # Steps in which the rate rises linearly; None: `warmup_share` of all
    warmup_share: Share = 0.015  # Share of all steps; read only where `warmup_steps` is None
    min_rate_share: Share = 0.0  # Last rate of cosine and linear, as a share of the peak, in [0, 1]
    gradient_clip: NotNegative = 1.0  # Longest gradient, as Euclidean norm over all parameters; 0: no limit
    accumulation: Natural = 1
    # Dtype of activations (autocast), the rest is always float32; auto: bfloat16, or float32 on a CPU that emulates it
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gradient_checkpointing: bool = False  # Compute activations again in the backward pass; the objective reads it
    seed: Count = 0  # Seed of dropout and the like, not of the data
    save_every_s: NotNegative = 600.0  # Wall seconds between checkpoints; 0: not by time. The end always saves
    save_every_steps: Count = 0  # Optimizer steps between checkpoints; 0: not by steps
    # Optimizer steps between evaluations; 0: only at the end. None: a tenth of the run, see `evaluates`
    eval_every_steps: Count | None = None
    patience: Natural | None = None  # Evaluations in a row without a better value that end training; None: any number
    best_metric: str | None = None  # The value of `evaluate` that decides which weights are best, higher is better
    keep_checkpoints: Count = 2  # Newest checkpoints kept; 0: all. The best weights are kept besides.
    log_every_steps: Natural = 10  # Optimizer steps between log lines; each averages over the steps since the last

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.seconds is not None:
            raise ArgumentError("steps and seconds both say when training ends: leave one of them away")

    def halves(self, device: torch.device) -> bool:
        """Return whether activations on `device` are in bfloat16."""
        return multiplies(device, torch.bfloat16) if self.dtype == "auto" else self.dtype == "bfloat16"

    def total_steps(self, batches_per_epoch: int, step: int = 0, spent: float = 0.0) -> int:
        """Return the optimizer steps in all, at least 1, for data of so many batches per pass.

        For a run that `seconds` end it is what its pace comes to, that of `step` steps in `spent`
        seconds, and what `epochs` come to before the first.
        """
        if self.seconds is not None and step and spent:
            return step if spent >= self.seconds else max(step + 1, round(step * self.seconds / spent))
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * batches_per_epoch / self.accumulation - 1e-9))

    def evaluates(self, step: int, former: int, total: int, *, share: float = 0.0) -> bool:
        """Return whether to evaluate after `step` of `total` steps, where `former` was the last one evaluated.

        `share` is the time of evaluations so far, as a share of that of all steps.
        """
        if self.eval_every_steps is not None:
            return bool(self.eval_every_steps) and step % self.eval_every_steps == 0
        if share > MOST_EVALUATION or step - former < LEAST_BETWEEN:
            return False
        return PARTS * step // total > PARTS * former // total

    def warmup(self, total: int) -> int:
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_share * total)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must keep, as ``training.<field>`` -> value."""
        return {f"training.{name}": value for name, value in asdict(self).items() if name not in MAY_CHANGE}
