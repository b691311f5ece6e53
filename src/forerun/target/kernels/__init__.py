"""Speed for a loaded target, without touching its modelling code: packed linears, folded attention, fused C kernels,
compilation.

`accelerate` does what the model, its dtype and the device allow, and says what that was. Where nothing fits it changes
nothing. The replaced modules belong to the model object, so a model that a user handed in is only accelerated if asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forerun.target.kernels import attention, compiling, forwards, packing
from forerun.target.kernels.packing import Packing

__all__ = ["Acceleration", "accelerate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceleration:
    """What was done to a model."""

    packing: Packing
    folded_attention: bool
    forwards: int
    """Norms, MLPs and attentions that run in fewer operations."""
    compiled: bool

    def __str__(self) -> str:
        parts = []
        if self.packing.layers:
            parts.append(f"{self.packing.layers} linear layers packed, {self.packing.fused} groups fused")
        if self.folded_attention:
            parts.append("folded attention")
        if self.forwards:
            parts.append(f"{self.forwards} modules in C")
        if self.compiled:
            parts.append("compiled")
        return ", ".join(parts) or "nothing to accelerate on this device and dtype"


def accelerate(model: Any, *, compile: bool = False) -> Acceleration:
    """Make the passes of a transformers causal LM cheaper, in place.

    Args:
        model: loaded, in evaluation mode.
        compile: also compile the base model's forward. The first pass with one token and the first with more then
            take up to a minute each, in later processes seconds. A compiled pass rounds differently from a plain one.
    """
    packed = packing.pack(model)
    folded = (packed.layers > 0 or model.device.type != "cpu") and attention.suits(model)
    if folded:
        attention.install(model)
    compiled = compile and compiling.compile_forward(model)
    count = forwards.install(model) if folded and packed.layers and not compiled else 0
    return Acceleration(packing=packed, folded_attention=folded, forwards=count, compiled=compiled)


def folds(model: Any, base: Any) -> bool:
    """Whether passes of `model`, whose `base` model is called, run `fold_attention`, which asks the running `Pass`
    where tokens stand; in compiled passes it does not."""
    return attention.installed(model) and not isinstance(base.forward, compiling.CompiledForward)
