"""Faster kernels for a loaded target, without changes to its modelling code; `accelerate` applies
those that fit.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from forerun.model.kernels import native


def fused(device: torch.device) -> ModuleType | None:
    """Return the module of fused operations for a device: `native` on a CPU, `triton_ops` on CUDA
    with Triton, else None. Its functions `takes_...` say which inputs they accept.
    """
    if device.type == "cpu":
        return native
    return _triton() if device.type == "cuda" else None


@cache
def _triton() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from forerun.model.kernels import triton_ops

    return triton_ops
