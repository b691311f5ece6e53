"""Weights in the blocks of a GGUF file (`blocks.h`): integers times activations in 8 bits, then scales.

The formats whose values are linear in each block stay as they are; whatever else a group of layers holds stands among
them as panels of bf16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.devices import measure_once, time_in_turns
from forerun.model.kernels import compiling, products
from forerun.model.kernels.products import LANES

_PLAIN = 30  # The number of bf16 among GGUF's types of tensors
_BEHIND = 3  # Entries behind the last panel, for what looks ahead
_LINE = 64  # Bytes that lie at a multiple of themselves
_TRIAL = 4096, 16384  # Outputs and depth of the products that are timed: more than a cache holds
_TRIAL_ROWS = (1, 8)
_REPEATS = 9
_MUCH = 1.1  # Times that blocks take of bf16's from which on they are not worth the memory that they save


class StoredRows(NamedTuple):
    """A matrix as a GGUF file keeps it."""

    type: int
    content: np.ndarray[Any, Any]  # (outputs, bytes of a row) uint8, contiguous
    order: np.ndarray[Any, Any]  # (outputs,) the row of `content` that each output has


def stored_bytes(kind: int, outputs: int, depth: int) -> int:
    """Return the bytes that such a matrix takes in memory; 0 where its type cannot stay in blocks."""
    return 0 if kind == _PLAIN else -(-outputs // LANES) * int(_library().forerun_block_bytes(kind, depth))


@cache
def fast() -> bool:
    """Return whether products of few rows take no longer in blocks than in bf16 on this machine, which depends on its
    instructions and on its memory. Measured once and kept on disk.
    """
    name = f"few rows in blocks by {products.kind_of(torch.bfloat16).name}, kernels {compiling.version()}"
    return float(measure_once(name, _takes_of_bf16)) < _MUCH


def _takes_of_bf16() -> float:
    """Return the time of products of few rows in blocks of 4 bits, as a multiple of that in bf16, by turns."""
    outputs, depth = _TRIAL
    q4_1, inputs, size = 3, 32, 20
    content = np.zeros((outputs, depth // inputs * size), dtype=np.uint8)
    packed = pack([StoredRows(q4_1, content, np.arange(outputs))], depth)
    panels = expand(packed, outputs, depth)
    in_blocks, in_bf16 = 0.0, 0.0
    for count in _TRIAL_ROWS:
        rows = torch.ones(count, depth, dtype=torch.bfloat16)
        ways = partial(multiply, rows, packed, None, outputs), partial(products.multiply, rows, panels, None, outputs)
        blocks, plain = time_in_turns(ways, _REPEATS, threads=1)
        in_blocks, in_bf16 = in_blocks + min(blocks), in_bf16 + min(plain)
    return in_blocks / in_bf16


def pack(parts: Sequence[StoredRows | Tensor], depth: int) -> Tensor:
    """Lay out matrices below each other as `blocks.h` says. Each but the last has a multiple of `LANES` outputs; those
    of a type that cannot stay in blocks come in bf16.
    """
    lib = _library()
    kinds = [_PLAIN if isinstance(part, Tensor) else part.type for part in parts]
    panels = [-(-len(part if isinstance(part, Tensor) else part.order) // LANES) for part in parts]
    each = np.repeat([lib.forerun_block_bytes(kind, depth) for kind in kinds], panels)
    ends = np.cumsum(each)
    head = -(-(len(each) + _BEHIND) * 2 * ctypes.sizeof(ctypes.c_int64) // _LINE) * _LINE
    room = torch.empty(head + int(ends[-1]) + _LINE, dtype=torch.uint8)
    out = room[-room.data_ptr() % _LINE :][: head + int(ends[-1])]
    directory = out[:head].view(torch.int64).view(-1, 2).numpy()
    directory[:, 0], directory[:, 1] = head, _PLAIN
    directory[: len(each), 0] += ends - each
    directory[: len(each), 1] = np.repeat(kinds, panels)
    address = out.data_ptr() + head
    for part, kind, count in zip(parts, kinds, panels, strict=True):
        if isinstance(part, Tensor):
            laid_out = products.pack(part)
            ctypes.memmove(address, laid_out.data_ptr(), laid_out.nbytes)
        else:
            rows = part.content.ctypes.data + part.content.shape[1] * part.order
            rows = np.pad(rows, (0, -len(rows) % LANES))
            lib.forerun_pack_blocks(rows.ctypes.data, kind, address, count, depth)
        address += count * int(lib.forerun_block_bytes(kind, depth))
    return out


def expand(packed: Tensor, outputs: int, depth: int) -> Tensor:
    """Return the weights as `products.pack` lays them out in bf16."""
    panels = -(-outputs // LANES)
    out = torch.empty((panels, depth // 2, LANES, 2), dtype=torch.bfloat16)
    _library().forerun_expand(packed.data_ptr(), out.data_ptr(), panels, depth)
    return out


def dequantise(rows: StoredRows, depth: int) -> Tensor:
    """Return the matrix (outputs, depth) in bf16."""
    outputs = len(rows.order)
    return products.unpack(expand(pack([rows], depth), outputs, depth), outputs, depth)


def multiply(rows: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, *, reads: bool = False) -> Tensor:
    """Multiply (M, depth) in bf16, rounded to 8 bits as `blocks.h` says, by such weights and add the bias (outputs,):
    (M, outputs). What a row gets depends on that row alone, to the bit, and with AMX on `reads`: rows of a prompt are
    not rounded there, and are multiplied by the weights in bf16.
    """
    kind = products.kind_of(rows.dtype)
    return products.call(_library(), kind, rows, packed, bias, outputs, in_blocks=True, reads=reads)


def _library() -> Any:
    found = products.library()
    assert found is not None, "products.ready() is asked first"
    return found
