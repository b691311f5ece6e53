"""Faster kernels for a loaded target, without changes to its modelling code; `accelerate` applies
those that fit.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from forerun.model.kernels import native

log = logging.getLogger(__name__)


def fused(device: torch.device) -> ModuleType | None:
    """Return the module of fused operations for a device: `native` on a CPU, `triton_ops` on CUDA
    with Triton, else None. Its functions `takes_...` say which inputs they accept.
    """
    if device.type == "cpu":
        return native
    return _triton() if device.type == "cuda" else None


def streamed(device: torch.device) -> Any:
    """Return the module `triton_layer` for a device on which it runs, CUDA with Triton, else None."""
    ops = fused(device) if device.type == "cuda" else None
    if ops is None or not ops.ready(device):
        return None
    from forerun.model.kernels import triton_layer

    return triton_layer if triton_layer.ready(device) else None


@cache
def _triton() -> ModuleType | None:
    """Return the kernels in Triton; None, and one line of warning, where Triton is missing or too old to load them."""
    slower = "norms, gates and attention run in torch, which is slower: %s"
    if find_spec("triton") is None:
        log.warning(slower, "there is no Triton (pip install triton)")
        return None
    try:
        from forerun.model.kernels import triton_ops
    except Exception as error:  # An old Triton lacks names that our kernels use, a broken one raises what it will
        log.warning(slower, f"Triton {_version()} cannot load our kernels ({error!r}); install the one of this torch")
        return None
    return triton_ops


def _version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "of an unknown version"
