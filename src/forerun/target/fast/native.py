"""Attention in C (`attend.c`). Knows tensors and no model."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from forerun.target.fast import building

DEPTHS = range(32, 257, 32)
"""Widths of a head that it takes."""
_STRIDES = {
    "query": ("batch", "head", "row"),
    "key": ("batch", "head", "slot"),
    "value": ("batch", "head", "slot"),
    "mask": ("batch", "row"),
}


class _Problem(ctypes.Structure):
    """`Problem` of ``attend.c``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "mask", "rows", "out")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "count", "width", "depth", "value_depth")),
        *((f"{name}_{axis}", ctypes.c_int64) for name, axes in _STRIDES.items() for axis in axes),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Whether `attend` can be asked: bf16 on a CPU that has the instructions, heads of a fitting width, no gradient."""
    tensors = (query, key, value, mask)
    return (
        all(tensor.dtype == torch.bfloat16 and tensor.stride(-1) == 1 for tensor in tensors)
        and query.device.type == "cpu"
        and query.shape[-1] in DEPTHS
        and value.shape[-1] in DEPTHS
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and kernel() is not None
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, rows: Tensor | None = None) -> Tensor:
    """Attention where `takes` says so; a row's bits depend on what that row sees alone.

    Args:
        query: (B, heads, N, D)
        key: (R, kv_heads, W, D)
        value: (R, kv_heads, W, D')
        mask: (B, 1, N, W) or (1, 1, N, W), additive; below -1e38 means unseen.
        scale: of the scores.
        rows: (B,) int64, which of the R keys and values each sequence has; None: R is B, its own.

    Returns:
        (B, N, heads, D')
    """
    batch, heads, count, depth = query.shape
    found = kernel()
    assert found is not None, "takes() is asked first"
    out = query.new_empty(batch, count, heads, value.shape[-1])
    mask = mask.expand(batch, 1, count, key.shape[2])
    sizes = (batch, heads, key.shape[1], count, key.shape[2], depth, value.shape[-1])
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2))
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, mask, rows, out)]
    found(ctypes.byref(_Problem(*pointers, *sizes, *strides, scale, torch.get_num_threads())))
    return out


@cache
def kernel() -> ctypes._NamedFuncPointer | None:
    """The compiled kernel; None where this machine cannot have it."""
    library = building.library("attend")
    if library is None:
        return None
    assert library.forerun_problem_size() == ctypes.sizeof(_Problem)
    library.forerun_attend.restype = None
    return library.forerun_attend
