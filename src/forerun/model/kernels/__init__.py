"""Speed for a loaded target, without touching its modelling code; `accelerate` applies what fits."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from forerun.model.kernels import native


def fused(device: torch.device) -> ModuleType | None:
    """The fused operations of a device: `native` on a CPU, `triton_ops` on CUDA where Triton is there. Each function
    `takes_...` says what they can be asked."""
    if device.type == "cpu":
        return native
    return _triton() if device.type == "cuda" else None


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from forerun.model.kernels import triton_ops

    return triton_ops
