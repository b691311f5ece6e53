"""The attention kernel in C (`attend.c`): compiled once by the compiler of the machine, then kept in the cache folder.

Without a compiler, or on a processor without AVX-512 BF16, attention runs in torch. Knows tensors and no model.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from forerun.caching import cache_root

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("attend.c")
COMPILERS = ("cc", "gcc", "clang")
"""Tried in this order unless ``$CC`` names one."""
FLAGS = (
    *("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mfma"),
)
DEPTHS = range(32, 257, 32)
"""Widths of a head that it takes."""
_PATIENCE_S = 60.0
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


def version() -> str:
    """Changes with the kernel's source and flags."""
    return hashlib.sha256(SOURCE.read_bytes() + "\0".join(FLAGS).encode()).hexdigest()[:16]


@cache
def kernel() -> ctypes._NamedFuncPointer | None:
    """The compiled kernel; None where this machine cannot have it, which is logged once."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        library = ctypes.CDLL(str(_built()))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        log.warning("attention runs in torch, which is slower: the kernel in C could not be compiled: %s", reason)
        return None
    assert library.forerun_problem_size() == ctypes.sizeof(_Problem)
    library.forerun_attend.restype = None
    return library.forerun_attend


def _built() -> Path:
    """The shared library, compiled where it is not in the cache yet.

    Raises:
        OSError: no compiler, or nothing can be written.
        subprocess.SubprocessError: the compiler failed.
    """
    path = cache_root() / "kernels" / f"attend-{version()}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile([_compiler(), *FLAGS], path)
    return path


def _compile(command: Sequence[str], path: Path) -> None:
    """To a temporary name first: several processes may do it at once."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".so")
    os.close(handle)
    try:
        subprocess.run(
            [*command, str(SOURCE), "-o", temporary], check=True, capture_output=True, text=True, timeout=_PATIENCE_S
        )
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _compiler() -> str:
    names = (os.environ["CC"],) if os.environ.get("CC") else COMPILERS
    found = next((path for path in map(shutil.which, names) if path is not None), None)
    if found is None:
        raise FileNotFoundError(f"no C compiler ({', '.join(names)})")
    return found
