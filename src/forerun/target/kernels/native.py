"""Attention in C (`attend.c`). Knows tensors and no model."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.target.kernels import building

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
        *((name, ctypes.c_int64) for name in ("batch", "held", "heads", "key_heads", "count", "width")),
        *((name, ctypes.c_int64) for name in ("depth", "value_depth")),
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

    Raises:
        ArgumentError: the shapes do not belong together, or there is no such row; nothing was read.
    """
    batch, heads, count, depth = query.shape
    held, key_heads, width, _ = key.shape
    found = kernel()
    assert found is not None, "takes() is asked first"
    if value.shape[:3] != key.shape[:3] or key.shape[3] != depth or not (rows is None or _are_rows(rows, batch)):
        raise _refusal(query, key, value, mask, rows)
    out = query.new_empty(batch, count, heads, value.shape[-1])
    mask = mask.expand(batch, 1, count, width)
    sizes = (batch, held, heads, key_heads, count, width, depth, value.shape[-1])
    strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2))
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, mask, rows, out)]
    if found(ctypes.byref(_Problem(*pointers, *sizes, *strides, scale, torch.get_num_threads()))):
        raise _refusal(query, key, value, mask, rows)
    return out


def _are_rows(rows: Tensor, batch: int) -> bool:
    return rows.dtype == torch.int64 and rows.shape == (batch,) and rows.is_contiguous()


def _refusal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, rows: Tensor | None) -> ArgumentError:
    tensors = {"query": query, "key": key, "value": value, "mask": mask}
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    return ArgumentError(
        f"attention cannot be computed over {shapes}"
        + ("" if rows is None else f" in the {rows.dtype} rows {rows.tolist()}")
        + "; expected (B, heads, N, D), (R, kv_heads, W, D), (R, kv_heads, W, D'), (B, 1, N, W) and int64 rows below R"
    )


@cache
def kernel() -> ctypes._NamedFuncPointer | None:
    """The compiled kernel; None where this machine cannot have it."""
    library = building.library("attend")
    if library is None:
        return None
    assert library.forerun_problem_size() == ctypes.sizeof(_Problem)
    library.forerun_attend.restype = ctypes.c_int32
    return library.forerun_attend
