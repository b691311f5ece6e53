"""Fused C kernels (`fused_ops.c`): RMSNorm, RoPE with the write to the KV cache, the gated activation, argmax.

In torch they are some forty small operations a layer, which at a few tokens cost more than their arithmetic. Knows
tensors and no module.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.target.kernels import building

LANES = 16
"""Widths are multiples of it; those of a head of twice as much."""
MOST_DEPTH = 512
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "forerun_norm": (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_float, ctypes.c_int32),
    "forerun_gate": (_POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_int32),
    "forerun_place": (_POINTER,),
    "forerun_largest": (_POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_int32),
}


class _Placing(ctypes.Structure):
    """`Placing` of ``fused_ops.c``."""

    _fields_ = (
        *((name, _POINTER) for name in ("states", "cosine", "sine", "query_norm", "key_norm", "places")),
        *((name, _POINTER) for name in ("query", "keys", "values")),
        *((name, _COUNT) for name in ("tokens", "slots", "heads", "key_heads", "depth")),
        ("query_epsilon", ctypes.c_float),
        ("key_epsilon", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


@cache
def kernels() -> ctypes.CDLL | None:
    """The compiled library; None where this machine cannot have it."""
    library = building.library("fused_ops", ctypes.PyDLL)
    if library is None:
        return None
    assert library.forerun_placing_size() == ctypes.sizeof(_Placing)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    library.forerun_place.restype = ctypes.c_int32
    return library


def takes(states: Tensor) -> bool:
    """Whether values like these (.., size) may be handed to the functions below: contiguous bf16 on a CPU that has the
    instructions, no gradient."""
    return (
        states.dtype == torch.bfloat16
        and states.is_contiguous()
        and states.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and kernels() is not None
    )


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm of (.., size), computed in float32, times `weight` (size,).

    Raises:
        ArgumentError: the sizes differ, or are no multiples of `LANES`.
    """
    size = states.shape[-1]
    if weight.shape != (size,) or size % LANES:
        raise ArgumentError(f"a norm of {size} values needs as many weights, in {LANES}s; got {tuple(weight.shape)}")
    result = torch.empty_like(states)
    _library().forerun_norm(
        *(tensor.data_ptr() for tensor in (states, weight, result)),
        *(states.numel() // size, size, epsilon, torch.get_num_threads()),
    )
    return result


def gated(both: Tensor) -> Tensor:
    """``silu(gate) * up`` of (.., 2 * size), gates first: (.., size).

    Raises:
        ArgumentError: the size is no multiple of `LANES`.
    """
    size = both.shape[-1] // 2
    if both.shape[-1] % (2 * LANES):
        raise ArgumentError(f"gates and values come in {LANES}s each, got {both.shape[-1]} of both")
    result = both.new_empty(*both.shape[:-1], size)
    rows = result.numel() // size
    _library().forerun_gate(both.data_ptr(), result.data_ptr(), rows, size, torch.get_num_threads())
    return result


def largest(logits: Tensor) -> list[int]:
    """Of each row of (.., V) the first place of its largest number; -1 where it holds NaN."""
    width = logits.shape[-1]
    rows = logits.numel() // width
    places = (ctypes.c_int64 * rows)()
    _library().forerun_largest(logits.data_ptr(), places, rows, width, torch.get_num_threads())
    return list(places)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """A root-mean-square norm of every head."""

    weight: Tensor
    """(D,)"""
    epsilon: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """How the output of a layer's joint projection divides."""

    queries: int
    keys: int
    """As many as values."""
    depth: int
    """D, even to 32."""
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None


def place(
    states: Tensor, angles: tuple[Tensor, Tensor], heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache.

    Args:
        states: (.., (queries + 2 * keys) * D) of M tokens, contiguous.
        angles: cosines and sines (.., D) of the M tokens, contiguous, halves paired as in Llama.
        stores: keys and values (rows, slots, keys, D), contiguous.
        places: (M,) int64, index into (rows * slots).

    Returns:
        the queries (.., queries, D)

    Raises:
        ArgumentError: the shapes do not belong together, or there is no such slot; nothing was written.
    """
    tokens, size = places.numel(), heads.keys * heads.depth
    slots = stores[0].numel() // size
    fitting = (
        states.numel() == tokens * (heads.queries + 2 * heads.keys) * heads.depth
        and all(part.numel() == tokens * heads.depth for part in angles)
        and all(store.numel() == slots * size and store.dtype == states.dtype for store in stores)
        and all(norm is None or norm.weight.numel() == heads.depth for norm in (heads.query_norm, heads.key_norm))
        and places.dtype == torch.int64
        and places.is_contiguous()
    )
    if not fitting:
        raise _refusal(states, heads, stores, places)
    query = states.new_empty(*states.shape[:-1], heads.queries, heads.depth)
    tensors = (states, *angles, *map(_weight, (heads.query_norm, heads.key_norm)), places, query, *stores)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    epsilons = (0.0 if norm is None else norm.epsilon for norm in (heads.query_norm, heads.key_norm))
    sizes = (tokens, slots, heads.queries, heads.keys, heads.depth)
    if _library().forerun_place(ctypes.byref(_Placing(*pointers, *sizes, *epsilons, torch.get_num_threads()))):
        raise _refusal(states, heads, stores, places)
    return query


def _refusal(states: Tensor, heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor) -> ArgumentError:
    return ArgumentError(
        f"states {tuple(states.shape)} of {heads} cannot be written to keys {tuple(stores[0].shape)} and values "
        f"{tuple(stores[1].shape)} at the {places.dtype} places {places.tolist()}; expected one int64 place below rows "
        "* slots for each token, with an angle for each of its entries"
    )


def _weight(norm: HeadNorm | None) -> Tensor | None:
    return None if norm is None else norm.weight


def _library() -> ctypes.CDLL:
    found = kernels()
    assert found is not None, "takes() is asked first"
    return found
