"""Matrix products in C with packed weights (`product.c`): float32 and bf16, on any x86 with AVX2 and a C compiler.

A row's bits depend on that row alone, for one row and for thousands. bf16 is multiplied in one of several ways, which
sum in different orders; the way is chosen once per machine by measurement and kept on disk: a text stays the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from forerun.devices import measure_once, multiplies, time_in_turns
from forerun.errors import ArgumentError
from forerun.model.kernels import compiling

LANES = 16  # Outputs of a panel
STEP = 32  # The depth of packed bf16 weights is a multiple of it
DTYPES = (torch.float32, torch.bfloat16)
_WORD = 4  # Bytes that stay together in panels: a float, or two neighbours in bf16
BASE: tuple[str, ...] = ("-O3", "-std=gnu11", "-fopenmp", "-shared", "-fPIC", "-mavx2", "-mfma", "-mf16c")
AVX512 = (*BASE, "-mavx512f", "-mavx512bw", "-mavx512vl")
INTEGER_DOTS = (*AVX512, "-mavx512vnni")
DOT_PRODUCTS = (*INTEGER_DOTS, "-mavx512bf16")
_TRIAL = 1024, 4096  # Depth and outputs of the products that are timed
_FEW, _MANY = (1, 8), 64  # Their rows: a step's, and a prompt's
_REPEATS = 25  # Among other work a product is often interrupted, and seldom in all of these turns
_MUCH = 1.1  # Times that bf16 takes of float32's from which on float32 is the faster one
_CLEARLY = 0.9  # Another way than the first that a machine has must take at most this much of its time


class ProductKind(IntEnum):
    """The ways of multiplying entries, numbered as in ``product.h``."""

    FLOAT32 = 0
    WIDENED = 1  # bf16 as float32
    DOTS = 2  # AVX-512 BF16: two entries a lane
    TILES = 3  # AMX


@cache
def library() -> ctypes.CDLL | None:
    """Return the library compiled for this processor, or None where this machine cannot have it."""
    if not torch.cpu._is_avx2_supported():
        return None
    builds = [BASE]
    if torch.cpu._is_avx512_supported():
        builds.append(INTEGER_DOTS if torch.cpu._is_vnni_supported() else AVX512)
    if torch.cpu._is_avx512_bf16_supported():
        builds.append(DOT_PRODUCTS)
    if torch.cpu._is_amx_tile_supported():
        builds.append((*DOT_PRODUCTS, *compiling.AMX))
    return open_library(builds[-1])


def open_library(flags: Sequence[str]) -> ctypes.CDLL | None:
    """Load the library as compiled with these flags."""
    lib = compiling.compiled_library("product", flags=flags)
    if lib is None:
        return None
    pointer, count, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    lib.forerun_multiply.argtypes = (*[pointer] * 4, *[count] * 3, *[small] * 3)
    lib.forerun_pack.argtypes = (pointer, pointer, *[count] * 3)
    lib.forerun_pack_blocks.argtypes = (pointer, count, pointer, *[count] * 2)
    lib.forerun_expand.argtypes = (pointer, pointer, *[count] * 2)
    lib.forerun_pack.restype = lib.forerun_pack_blocks.restype = lib.forerun_expand.restype = None
    lib.forerun_block_bytes.argtypes, lib.forerun_block_bytes.restype = (count, count), count
    lib.forerun_multiply.restype = lib.forerun_product_has.restype = small
    return lib


def ready(dtype: torch.dtype) -> bool:
    """Return whether this machine multiplies packed weights of that dtype."""
    return dtype in DTYPES and library() is not None


@cache
def address() -> int:
    """Return the address of the function that other kernels multiply with (`Multiply` of
    ``product.h``).
    """
    found = library()
    assert found is not None, "ready() is asked first"
    return ctypes.cast(found.forerun_product_part, ctypes.c_void_p).value or 0


def pack(*matrices: Tensor) -> Tensor:
    """Lay out matrices (outputs, depth) below each other in panels: (P, depth, LANES), bf16 (P,
    depth / 2, LANES, 2). Zeros fill up the last panel, and the depth of bf16 to a multiple of
    `STEP`.
    """
    lib = library()
    assert lib is not None, "ready() is asked first"
    depth, dtype = matrices[0].shape[1], matrices[0].dtype
    half = dtype is torch.bfloat16
    lying = [functional.pad(matrix, (0, 1)) if half and depth % 2 else matrix.contiguous() for matrix in matrices]
    row = lying[0].shape[1] * dtype.itemsize
    rows = np.concatenate([matrix.data_ptr() + row * np.arange(len(matrix)) for matrix in lying])
    rows = np.pad(rows, (0, -len(rows) % LANES))
    words = row // _WORD
    padded = words + -words % (STEP // 2) if half else words
    panels = len(rows) // LANES
    out = torch.empty((panels, padded, LANES, 2) if half else (panels, padded, LANES), dtype=dtype)
    lib.forerun_pack(rows.ctypes.data, out.data_ptr(), panels, words, padded)
    return out


def unpack(panels: Tensor, outputs: int, depth: int) -> Tensor:
    """Undo `pack`, and return the matrix (outputs, depth)."""
    matrix = panels.transpose(1, 2).flatten(2) if panels.dim() == 4 else panels.transpose(1, 2)
    return matrix.reshape(-1, matrix.shape[-1])[:outputs, :depth]


def multiply(
    rows: Tensor, panels: Tensor, bias: Tensor | None, outputs: int, kind: ProductKind | None = None
) -> Tensor:
    """Multiply (M, depth) by packed weights and add the bias (outputs,): (M, outputs). Raises
    ArgumentError, before anything is read, if shapes or dtypes do not fit.

    Args:
        kind: how to multiply; None: as this machine does in that dtype.
    """
    lib = library()
    assert lib is not None, "ready() is asked first"
    kind = kind_of(rows.dtype) if kind is None else kind
    return _multiply(lib, kind, rows, panels, bias, outputs)


def _multiply(
    lib: ctypes.CDLL, kind: ProductKind, rows: Tensor, panels: Tensor, bias: Tensor | None, outputs: int
) -> Tensor:
    depth = rows.shape[1]
    held = panels.shape[1] * (panels.shape[3] if panels.dim() == 4 else 1)
    if held != depth and 0 < held - depth < STEP and panels.dim() == 4:
        rows = functional.pad(rows, (0, held - depth))
    fitting = rows.shape[1] == held and panels.shape[0] == -(-outputs // LANES) and rows.dtype is panels.dtype
    if not fitting or not (bias is None or (bias.shape == (outputs,) and bias.dtype is rows.dtype)):
        raise ArgumentError(
            f"rows {tuple(rows.shape)} of {rows.dtype} cannot be multiplied with {outputs} outputs of a depth of "
            f"{held} in {panels.dtype}; expected rows of that depth and dtype, and as many biases, or none"
        )
    return call(lib, kind, rows, panels, bias, outputs, in_blocks=False)


def call(
    lib: ctypes.CDLL,
    kind: ProductKind,
    rows: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    outputs: int,
    *,
    in_blocks: bool,
    reads: bool = False,
) -> Tensor:
    """Multiply rows (M, depth) by weights of that depth, in panels or in blocks (``blocks.h``); nothing is checked.

    Args:
        reads: the rows are of a prompt: AMX then multiplies blocks in bf16, too.
    """
    rows = rows.contiguous()
    out = rows.new_empty(len(rows), outputs)
    biases = None if bias is None else bias.contiguous()
    lib.forerun_multiply(
        rows.data_ptr(),
        packed.data_ptr(),
        None if biases is None else biases.data_ptr(),
        out.data_ptr(),
        *(*rows.shape, outputs),
        *(kind, in_blocks + (in_blocks and reads), torch.get_num_threads()),
    )
    return out


@cache
def kind_of(dtype: torch.dtype) -> ProductKind:
    """Return how this machine multiplies in that dtype: the fastest way it has, measured once and
    kept on disk.
    """
    lib = library()
    assert lib is not None, "ready() is asked first"
    if dtype is torch.float32:
        return ProductKind.FLOAT32
    kinds = [
        kind for kind in (ProductKind.TILES, ProductKind.DOTS, ProductKind.WIDENED) if lib.forerun_product_has(kind)
    ]
    return ProductKind[
        measure_once(
            f"bf16 by {', '.join(kind.name for kind in kinds)}, kernels {compiling.version()}",
            lambda: _fastest(lib, kinds).name,
        )
    ]


def _fastest(lib: ctypes.CDLL, kinds: Sequence[ProductKind]) -> ProductKind:
    """Return the kind with the shortest times; a later one only if it is clearly faster."""
    taken = _seconds(lib, kinds, (*_FEW, _MANY)) if len(kinds) > 1 else {}
    best = kinds[0]
    for kind in taken:
        if taken[kind] < taken[best] * _CLEARLY:
            best = kind
    return best


def decodes(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether passes of few rows in that dtype take no longer than in float32. Our own
    products are measured once and the result is kept; elsewhere the answer is that for training.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16 or not ready(dtype):
        return multiplies(device, dtype)
    return _takes_of_float32() < _MUCH


@cache
def _takes_of_float32() -> float:
    """Return the time of products of few rows in bf16, as a multiple of that in float32."""
    lib = library()
    kind = kind_of(torch.bfloat16)
    assert lib is not None, "ready() is asked first"

    def ratio() -> float:
        taken = _seconds(lib, (kind, ProductKind.FLOAT32), _FEW)
        return taken[kind] / taken[ProductKind.FLOAT32]

    return float(measure_once(f"few rows in bf16 by {kind.name}, kernels {compiling.version()}", ratio))


def _seconds(lib: ctypes.CDLL, kinds: Sequence[ProductKind], counts: Sequence[int]) -> dict[ProductKind, float]:
    """Return the time of products of so many rows in each way, the shortest of several runs, added up."""
    total = dict.fromkeys(kinds, 0.0)
    depth, outputs = _TRIAL
    for count in counts:
        runs = []
        for kind in kinds:
            dtype = torch.float32 if kind is ProductKind.FLOAT32 else torch.bfloat16
            rows = torch.ones(count, depth, dtype=dtype)
            panels = pack(torch.ones(outputs, depth, dtype=dtype))
            runs.append(partial(_multiply, lib, kind, rows, panels, None, outputs))
        for kind, taken in zip(kinds, time_in_turns(runs, _REPEATS, threads=1), strict=True):
            total[kind] += min(taken)
    return total
