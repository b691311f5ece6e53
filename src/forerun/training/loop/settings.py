"""The knobs of training, their units and their limits. Knows no objective, no data and no device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from forerun.errors import ArgumentError

Check = tuple[Callable[[Any], bool], str]
NOT_NEGATIVE: Check = (lambda value: value >= 0, "at least 0")
POSITIVE: Check = (lambda value: value > 0, "above 0")
SHARE: Check = (lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_ONE: Check = (lambda value: 0 <= value < 1, "at least 0 and below 1")
NATURAL: Check = (lambda value: isinstance(value, int) and value >= 1, "a whole number from 1")
COUNT: Check = (lambda value: isinstance(value, int) and value >= 0, "a whole number from 0")


def _one_of(*names: str) -> Check:
    return (lambda value: value in names, "one of " + ", ".join(names))


def _optional(check: Check) -> Check:
    return (lambda value: value is None or check[0](value), f"{check[1]}, or none")


CHECKS: dict[str, Check] = {
    "steps": _optional(NATURAL),
    "epochs": POSITIVE,
    "max_seconds": _optional(POSITIVE),
    "optimizer": _one_of("adamw", "muon"),
    "learning_rate": POSITIVE,
    "muon_learning_rate": POSITIVE,
    "muon_momentum": BELOW_ONE,
    "weight_decay": NOT_NEGATIVE,
    "betas": (
        lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value),
        "two numbers, each at least 0 and below 1",
    ),
    "schedule": _one_of("cosine", "linear", "constant"),
    "warmup_steps": _optional(COUNT),
    "warmup_share": SHARE,
    "min_rate_share": SHARE,
    "gradient_clip": NOT_NEGATIVE,
    "accumulation": NATURAL,
    "dtype": _one_of("bfloat16", "float32"),
    "seed": COUNT,
    "save_every_s": NOT_NEGATIVE,
    "save_every_steps": COUNT,
    "eval_every_steps": COUNT,
    "keep_checkpoints": COUNT,
    "log_every_steps": NATURAL,
}
"""field -> (test, what is allowed in words)."""


MAY_CHANGE = frozenset(
    {
        "max_seconds",
        "gradient_checkpointing",
        "save_every_s",
        "save_every_steps",
        "eval_every_steps",
        "keep_checkpoints",
        "log_every_steps",
    }
)
"""What a resumed run may set anew: when something is written, and how memory is saved. The rest decides what is
trained."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """How long, how fast and how carefully to train.

    Raises:
        ArgumentError: a value out of range; the message names field, value and what is allowed.
    """

    steps: int | None = None
    """Optimizer steps in all, counted from the very first, resumed runs included; none: what `epochs` comes to."""
    epochs: float = 1.0
    """Passes over the data; read only where `steps` is none."""
    max_seconds: float | None = None
    """Wall seconds of this run, evaluation included; then it saves and returns. The learning rate follows steps, not
    time: a run that stops early has not decayed to the end, and goes on where it was when it is resumed."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon": Muon for the matrices of the layers, AdamW for embeddings, output heads, norms and biases."""
    learning_rate: float = 3.0e-4
    """Peak rate of AdamW, per step."""
    muon_learning_rate: float = 1.0e-3
    """Peak rate of Muon, per step, scaled to AdamW's size of update (``adjust_lr_fn="match_rms_adamw"``)."""
    muon_momentum: float = 0.95
    """Share of Muon's momentum kept per step, in [0, 1)."""
    weight_decay: float = 0.01
    """Decoupled decay, per unit of learning rate, of matrices; none on embeddings, norms and biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Share of AdamW's first and second moment kept per step, in [0, 1)."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int | None = None
    """Steps in which the rate rises linearly; none: `warmup_share` of all."""
    warmup_share: float = 0.015
    """Share of all steps, in [0, 1]; read only where `warmup_steps` is none."""
    min_rate_share: float = 0.0
    """Where cosine and linear end, as a share of the peak, in [0, 1]."""
    gradient_clip: float = 1.0
    """Longest gradient, as Euclidean norm over all parameters; 0: no limit."""
    accumulation: int = 1
    """Batches per optimizer step and process."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of activations (autocast). Weights, gradients and optimizer state are float32 always."""
    gradient_checkpointing: bool = False
    """Forget activations and compute them again in the backward pass. The objective reads it; the loop does not."""
    seed: int = 0
    """Of dropout and the like, not of the data."""
    save_every_s: float = 600.0
    """Wall seconds between checkpoints; 0: not by time. The end and an interruption always save."""
    save_every_steps: int = 0
    """Optimizer steps between checkpoints; 0: not by steps."""
    eval_every_steps: int = 0
    """Optimizer steps between evaluations; 0: only at the end."""
    best_metric: str | None = None
    """The value of `evaluate` that decides which weights are best, higher is better; none: its first."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; 0: all. The best weights are kept besides."""
    log_every_steps: int = 10
    """Optimizer steps between log lines; each averages over the steps since the last."""

    def __post_init__(self) -> None:
        for name, (allowed, words) in CHECKS.items():
            value = getattr(self, name)
            if not _holds(allowed, value):
                raise ArgumentError(f"{name}={value!r} is not allowed; expected {words}.")

    def total_steps(self, batches_per_epoch: int) -> int:
        """Optimizer steps in all, at least 1, for data of so many batches per pass."""
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * batches_per_epoch / self.accumulation - 1e-9))

    def warmup(self, total: int) -> int:
        """Warm-up steps of a run of `total` steps."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_share * total)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``run.json``."""
        return asdict(self)

    def fixed(self) -> dict[str, Any]:
        """``training.<field>`` -> value, of what a resumed run must keep."""
        return {f"training.{name}": value for name, value in asdict(self).items() if name not in MAY_CHANGE}


def _holds(allowed: Callable[[Any], bool], value: object) -> bool:
    """False also for values of another type, for which the comparison itself fails, and for NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    try:
        return not isinstance(value, bool) and allowed(value)
    except TypeError:
        return False
