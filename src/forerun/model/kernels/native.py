"""Kernels in C: attention (`attend.c`); RMSNorm, RoPE with the KV write, the gated activation, argmax (`fused_ops.c`).

Without a compiler, on a processor without AVX-512 BF16, or on another system than Linux, torch does what
they do: some forty small operations a layer, which at a few tokens cost more than their arithmetic.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ArgumentError
from forerun.model.inputs import Flat, TreePaths
from forerun.model.kernels.compiling import AMX, AVX512, FLAGS, FLOAT32, compiled_library

DEPTHS = range(32, 257, 32)  # Widths of a head that it takes


def _fields(pointers: str, counts: str, floats: str) -> list[tuple[str, Any]]:
    """Return the fields of a C structure that ends with the number of threads."""
    kinds = ((pointers, ctypes.c_void_p), (counts, ctypes.c_int64), (floats, ctypes.c_float))
    return [*((name, kind) for names, kind in kinds for name in names.split()), ("threads", ctypes.c_int32)]


class _Problem(ctypes.Structure):
    """The structure `Problem` of ``attend.c``."""

    _fields_ = _fields(
        "query key value mask rows out lengths paths kept starts",
        "batch held heads key_heads count width depth value_depth longest tokens query_batch query_head query_row "
        "key_batch key_head key_slot value_batch value_head value_slot mask_batch mask_row",  # Strides
        "scale",
    )


def takes_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether `attend` takes these tensors: bf16 on a CPU that has the instructions, fitting
    head widths, no gradient.
    """
    tensors = (query, key, value, mask)
    return (
        all(tensor.dtype == torch.bfloat16 and tensor.stride(-1) == 1 for tensor in tensors)
        and query.device.type == "cpu"
        and query.shape[-1] in DEPTHS
        and value.shape[-1] in DEPTHS
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and attention_kernel() is not None
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    rows: Tensor | None = None,
    *,
    paths: TreePaths | None = None,
) -> Tensor:
    """Compute attention (B, N, heads, D') for tensors that `takes_attention` accepts. A token's
    bits depend only on what it sees and, with `paths`, not on the slots it stands in. Raises
    ArgumentError, before anything is read, if the shapes do not belong together or a row or slot
    does not exist.

    Args:
        query: (B, heads, N, D)
        key: (R, kv_heads, W, D)
        value: (R, kv_heads, W, D')
        mask: (B, 1, N, W) or (1, 1, N, W), additive; below -1e38 means unseen.
        rows: (B,) int64, which of the R keys and values each sequence has; None: R is B, its own.
        paths: what no path leads to is unseen, whatever the mask says.
    """
    return Attention(query, key, value, mask, scale, rows, paths=paths).run()


class Attention:
    """A problem for the attention kernel. Its tensors must live as long as it does."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        scale: float,
        rows: Tensor | None = None,
        *,
        paths: TreePaths | None = None,
        flat: Flat | None = None,
    ) -> None:
        """Describe a problem; the arguments are those of `attend`, or with `flat` queries (1, heads, M, D) of the real
        tokens alone, and as many answers.
        """
        batch, heads, count, depth = query.shape
        held, key_heads, width, _ = key.shape
        self.out = query.new_empty(batch, count, heads, value.shape[-1])
        tokens, real, starts = count, None, None
        if flat is not None:
            batch, count, real, starts = flat.rows, flat.nodes, flat.kept, flat.starts
        fitting = value.shape[:3] == key.shape[:3] and key.shape[3] == depth
        fitting = fitting and (real is None or (len(query), len(real)) == (1, tokens))
        if rows is not None:
            fitting = fitting and rows.dtype == torch.int64 and rows.shape == (batch,) and rows.is_contiguous()
        lengths, nodes = (None, None) if paths is None else (paths.lengths, paths.nodes.contiguous())
        if lengths is not None and nodes is not None:
            fitting = fitting and (lengths.dtype, nodes.dtype) == (torch.int64, torch.int32) and lengths.is_contiguous()
            fitting = fitting and lengths.shape == (batch,) and nodes.shape[:2] == (batch, count) and nodes.dim() == 3
        self.scale, self.fitting = scale, fitting
        wide = mask.expand(batch, 1, count, width)
        longest = 0 if nodes is None else nodes.shape[-1]
        sizes = (batch, held, heads, key_heads, count, width, depth, value.shape[-1], longest, tokens)
        strides = (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], wide.stride(0), wide.stride(2))
        self.tensors = (query, key, value, mask, rows, self.out, lengths, nodes, real, starts)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in self.tensors]
        self._problem = _Problem(*pointers, *sizes, *strides, scale, torch.get_num_threads())
        self._paths, self._flat = paths, flat

    def run(self) -> Tensor:
        """Compute attention (B, N, heads, D'). Raises ArgumentError if the shapes do not belong
        together or a row or slot does not exist.
        """
        self._refuse(attention_kernel().forerun_attend if self.fitting else None)
        return self.out

    def address(self) -> int:
        """Return the problem's address for `Layers.run`. Raises ArgumentError as `run` does."""
        self._refuse(attention_kernel().forerun_attend_check if self.fitting else None)
        return ctypes.addressof(self._problem)

    def offsets(self, key: int, value: int) -> tuple[int, int]:
        """Return the offsets, in entries, from these addresses to its own keys and values."""
        return (self._problem.key - key) // self.out.itemsize, (self._problem.value - value) // self.out.itemsize

    def _refuse(self, check: Callable[[Any], int] | None) -> None:
        """Raise ArgumentError if `check` rejects the problem, or there is no `check`."""
        if check is not None and not check(ctypes.byref(self._problem)):
            return
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors[:4] if tensor is not None)
        rows, paths = self.tensors[4], self._paths
        chosen = "" if rows is None else f" in the {rows.dtype} rows {rows.tolist()}"
        if paths is not None:
            chosen += f" along paths {tuple(paths.nodes.shape)} behind {paths.lengths.tolist()}"
        if self._flat is not None:
            chosen += f" at the places {self._flat.kept.tolist()} of {self._flat.rows} x {self._flat.nodes}"
        raise ArgumentError(
            f"attention cannot be computed over query, key, value and mask {shapes}{chosen}; expected (B, heads, N, "
            "D), (R, kv_heads, W, D), (R, kv_heads, W, D'), (B, 1, N, W), int64 rows below R and int32 paths within W"
        )


@cache
def attention_kernel() -> Any:
    """Return the compiled attention library, or None where this machine cannot have it."""
    amx = torch.cpu._is_amx_tile_supported()
    library = compiled_library("attend", flags=(*FLAGS, *AMX) if amx else None)
    if library is None:
        return None
    assert library.forerun_problem_size() == ctypes.sizeof(_Problem)
    library.forerun_attend.restype = library.forerun_attend_check.restype = ctypes.c_int32
    return library


@cache
def _attention_part() -> int:
    """Return the address of the function that `Layers.run` attends with."""
    return ctypes.cast(attention_kernel().forerun_attend_part, ctypes.c_void_p).value or 0


DTYPES = (torch.bfloat16, torch.float32)
LANES = 16  # Widths are multiples of it
WIDENED = 1  # The `products.ProductKind` that takes states in float32
ROTATED = range(32, 513, 32)  # Widths of a head that `rope_and_write` takes
MOST_TOP = 64  # Ids that `top_ids` finds
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "forerun_norm": (_POINTER, _POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_float, ctypes.c_int32),
    "forerun_gate": (_POINTER, _POINTER, _COUNT, _COUNT, ctypes.c_int32),
    "forerun_place": (_POINTER,),
    "forerun_top": (_POINTER, _POINTER, _COUNT, _COUNT, _COUNT, ctypes.c_int32),
    "forerun_enter": (_POINTER, _POINTER),
    "forerun_leave": (_POINTER, _POINTER),
}


class _Placing(ctypes.Structure):
    """The structure `Placing` of ``fused_ops.c``."""

    _fields_ = _fields(
        "states cosine sine query_norm key_norm places query keys values",
        "tokens slots heads key_heads depth",
        "query_epsilon key_epsilon",
    )


class _Product(ctypes.Structure):
    """The structure `Product` of ``product.h``."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("states", "weights", "bias", "out", "wide")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "outputs")),
        *((name, ctypes.c_int32) for name in ("kind", "blocks")),
    ]


class _Layer(ctypes.Structure):
    """The structure `Layer` of ``fused_ops.c``."""

    _fields_: ClassVar = [
        *((name, _Product) for name in ("joint", "mix", "gates", "down")),
        ("placing", _Placing),
        *((name, ctypes.c_void_p) for name in ("first", "second")),
        *((name, ctypes.c_int64) for name in ("width", "inner")),
        *((name, ctypes.c_float) for name in ("first_epsilon", "second_epsilon")),
    ]


class _Pass(ctypes.Structure):
    """The structure `Pass` of ``fused_ops.c``."""

    _fields_ = _fields(
        "states answer outputs attended cosine sine places attention multiply attend",
        "tokens slots keys_from values_from reads",
        "",
    )


@cache
def fused_kernels(dtype: torch.dtype = torch.bfloat16) -> ctypes.CDLL | None:
    """Return the library compiled for values of that dtype; None where this machine has none."""
    flags = None
    if dtype is torch.float32 or not torch.cpu._is_avx512_bf16_supported():
        if dtype not in DTYPES or not torch.cpu._is_avx512_supported():
            return None
        flags = (*AVX512, FLOAT32) if dtype is torch.float32 else AVX512
    library = compiled_library("fused_ops", ctypes.PyDLL, flags=flags)
    if library is None:
        return None
    assert library.forerun_placing_size() == ctypes.sizeof(_Placing)
    assert library.forerun_layer_size() == ctypes.sizeof(_Layer)
    assert library.forerun_pass_size() == ctypes.sizeof(_Pass)
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = None, arguments
    library.forerun_place.restype = library.forerun_enter.restype = ctypes.c_int32
    return library


def ready(_device: torch.device, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether this machine has the functions below for values of that dtype."""
    return dtype in DTYPES and fused_kernels(dtype) is not None


def takes_states(states: Tensor) -> bool:
    """Return whether the functions below take these values: contiguous, on a CPU, no gradient."""
    return (
        states.dtype in DTYPES
        and states.is_contiguous()
        and states.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and ready(states.device, states.dtype)
    )


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm of (.., size) in float32, times `weight` (size,). Raises ArgumentError if
    sizes do not fit.
    """
    size = states.shape[-1]
    if weight.shape != (size,) or weight.dtype is not states.dtype or size % LANES:
        raise ArgumentError(
            f"a norm of {size} values needs as many weights of their dtype, in {LANES}s; got {tuple(weight.shape)} "
            f"of {weight.dtype}"
        )
    result = torch.empty_like(states)
    _library(states).forerun_norm(
        *(tensor.data_ptr() for tensor in (states, weight, result)),
        *(states.numel() // size, size, epsilon, torch.get_num_threads()),
    )
    return result


def silu_and_mul(both: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of (.., 2 * size), gates first: (.., size). Raises ArgumentError
    unless size is a multiple of `LANES`.
    """
    size = both.shape[-1] // 2
    if both.shape[-1] % (2 * LANES):
        raise ArgumentError(f"gates and values come in {LANES}s each, got {both.shape[-1]} of both")
    result = both.new_empty(*both.shape[:-1], size)
    rows = result.numel() // size
    _library(both).forerun_gate(both.data_ptr(), result.data_ptr(), rows, size, torch.get_num_threads())
    return result


def top_ids(logits: Tensor, k: int) -> Tensor | None:
    """Return (B, N, k) ids of the largest of (B, N, V), the largest first, ties by id; the first is
    -1 where there is NaN. None where our own kernel cannot find them. It reads the logits once: 8
    nodes of 49,152 take 0.04 ms, with torch's functions 0.4.
    """
    if not takes_states(logits) or not 1 <= k <= min(MOST_TOP, logits.shape[-1]):
        return None
    (*shape, width), rows = logits.shape, logits.shape[:-1].numel()
    ids, threads = torch.empty(*shape, k, dtype=torch.int64), torch.get_num_threads()
    failed = _library(logits).forerun_top(logits.data_ptr(), ids.data_ptr(), k, rows, width, threads)
    assert not failed
    return ids


def largest(logits: Tensor) -> list[list[int]]:
    """Return (B, N) ids of the largest of (B, N, V) on a CPU, ties by id; -1 where there is NaN.
    Our own kernel finds them where it can, else numpy: torch takes three to six times as long.
    """
    if (ids := top_ids(logits, 1)) is not None:
        return ids.squeeze(-1).tolist()
    flat = (logits.float() if logits.dtype is torch.bfloat16 else logits).flatten(0, 1).numpy()
    best = flat.argmax(-1)
    best[np.isnan(flat[np.arange(len(flat)), best])] = -1
    return best.reshape(logits.shape[:-1]).tolist()


class Norm(Protocol):
    """A root-mean-square norm."""

    @property
    def weight(self) -> Tensor:
        """The weight (width,)."""
        ...

    @property
    def epsilon(self) -> float:
        """The number added to the mean square."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The division of a layer's joint projection into heads."""

    queries: int
    keys: int  # Heads of keys, as many as of values
    depth: int  # D, even to 32
    query_norm: Norm | None = None  # Of every head
    key_norm: Norm | None = None


def rope_and_write(
    states: Tensor, angles: tuple[Tensor, Tensor], heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor
) -> Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache, and return the
    queries (.., queries, D). Raises ArgumentError, before anything is written, if the shapes do not
    belong together or a slot does not exist.

    Args:
        states: (.., (queries + 2 * keys) * D) of M tokens, contiguous.
        angles: cosines and sines (.., D) of the M tokens, contiguous, halves paired as in Llama.
        stores: keys and values (rows, slots, keys, D), contiguous.
        places: (M,) int64, index into (rows * slots).
    """
    placing, query = _placing(states, angles, heads, stores, places)
    if placing is None or _library(states).forerun_place(ctypes.byref(placing)):
        raise _misplaced(states, heads, stores, places)
    return query


def _placing(
    states: Tensor, angles: tuple[Tensor, Tensor], heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor
) -> tuple[_Placing | None, Tensor]:
    """Return the placing problem, or None if the shapes do not belong together, and the tensor that
    its queries are written to.
    """
    tokens, size = places.numel(), heads.keys * heads.depth
    slots = stores[0].numel() // size
    norms = (heads.query_norm, heads.key_norm)
    weights = [None if norm is None else norm.weight for norm in norms]
    fitting = (
        states.numel() == tokens * (heads.queries + 2 * heads.keys) * heads.depth
        and all(part.numel() == tokens * heads.depth and part.dtype == states.dtype for part in angles)
        and all(store.numel() == slots * size and store.dtype == states.dtype for store in stores)
        and all(weight is None or weight.numel() == heads.depth for weight in weights)
        and places.dtype == torch.int64
        and places.is_contiguous()
    )
    query = states.new_empty(*states.shape[:-1], heads.queries, heads.depth)
    if not fitting:
        return None, query
    tensors = (states, *angles, *weights, places, query, *stores)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    epsilons = (0.0 if norm is None else norm.epsilon for norm in norms)
    sizes = (tokens, slots, heads.queries, heads.keys, heads.depth)
    return _Placing(*pointers, *sizes, *epsilons, torch.get_num_threads()), query


def _misplaced(states: Tensor, heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor) -> ArgumentError:
    return ArgumentError(
        f"states {tuple(states.shape)} of {heads} cannot be written to keys {tuple(stores[0].shape)} and values "
        f"{tuple(stores[1].shape)} at the {places.dtype} places {places.tolist()}; expected one int64 place below "
        "rows * slots for each token, with an angle for each of its entries"
    )


class Matrix(Protocol):
    """Weights in panels (`packing.PanelWeight`)."""

    packed: Tensor
    bias: Tensor | None  # (outputs,)
    in_features: int
    in_blocks: bool  # As in ``blocks.h``


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerParts:
    """The weights and sizes of a decoder layer, without its attention."""

    first: Norm  # Before attention
    second: Norm  # Behind it
    joint: Matrix  # Queries, keys and values
    mix: Matrix  # Output projection of attention
    gates: Matrix  # Gate and up
    down: Matrix
    heads: Heads

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """All weights in panels."""
        return self.joint, self.mix, self.gates, self.down

    @property
    def norms(self) -> list[Norm]:
        """All norms."""
        found: list[Norm | None] = [self.first, self.second, self.heads.query_norm, self.heads.key_norm]
        return [norm for norm in found if norm is not None]

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Width, width between `gates` and `down`, heads of queries and of keys, depth of a head."""
        heads = self.heads
        return self.joint.in_features, self.down.in_features, heads.queries, heads.keys, heads.depth


class LayerRoom:
    """Scratch buffers between the steps of such layers, for passes of at most so many tokens."""

    def __init__(self, sizes: tuple[int, int, int, int, int], tokens: int, dtype: torch.dtype, kind: int) -> None:
        width, inner, queries, keys, depth = sizes
        self.sizes, self.tokens, self.dtype = sizes, tokens, dtype

        def room(entries: int) -> Tensor:
            return torch.empty(tokens, entries, dtype=dtype)

        self.normed, self.mixed, self.between = room(width), room(width), (room(width), room(width))
        self.joint, self.query = room((queries + 2 * keys) * depth), room(queries * depth)
        self.both, self.gated = room(2 * inner), room(inner)
        deepest = max(width, queries * depth, inner)
        self.wide = torch.empty(tokens * deepest if kind == WIDENED else 0, dtype=torch.float32)


Stores = Sequence[tuple[Tensor, Tensor]]  # Keys and values of each layer, (rows, slots, keys, D)


class Layers:
    """Consecutive decoder layers: all in one call, or each in one call before its attention and one
    after. Arguments are kept from pass to pass, since filling them in takes longer than many a
    product; one pass at a time. Bits are those of the single operations.
    """

    def __init__(self, parts: Sequence[LayerParts], kind: int, multiply: int) -> None:
        """Prepare layers of the same sizes, which multiply in the way `kind` (`products.ProductKind`) by
        the function at the address `multiply`.
        """
        self._parts, self._kind = parts, kind
        self._matrices = [matrix for part in parts for matrix in part.matrices]
        self._norms = [norm for part in parts for norm in part.norms]
        self._layers = (_Layer * len(parts))()
        size = ctypes.sizeof(_Layer)
        self._addresses = [ctypes.addressof(self._layers) + size * at for at in range(len(parts))]
        self._pointers = (ctypes.c_void_p * len(parts))(*self._addresses)
        self._outputs = (ctypes.c_void_p * len(parts))()  # Where each of them writes in a pass over all
        self._pass = _Pass(multiply=multiply)
        self._weights: list[Tensor] = []  # Held, so that what the arguments point to lives
        self._addressed: list[int] = []
        self._room: LayerRoom | None = None
        self._stores: Stores = []
        self.read_weights()

    def read_weights(self) -> None:
        """Look where the weights stand. A pass goes on with those that were read last."""
        weights = [matrix.packed for matrix in self._matrices]
        weights += [matrix.bias for matrix in self._matrices if matrix.bias is not None]
        weights += [norm.weight for norm in self._norms]
        addresses = [weight.data_ptr() for weight in weights]
        if addresses != self._addressed:
            self._weights, self._addressed = [weight.detach() for weight in weights], addresses
            self._room = None  # The arguments are filled in anew

    def begin(
        self,
        room: LayerRoom,
        tokens: int,
        angles: tuple[Tensor, Tensor],
        places: Tensor,
        stores: Stores,
        *,
        reads: bool = False,
    ) -> None:
        """Announce a pass over so many tokens: their cosines and sines (.., D), their `places` (M,) in `stores`, as in
        `rope_and_write`, and whether they are a prompt's.
        """
        if self._room is not room or self._stores is not stores:
            for layer, parts, pair in zip(self._layers, self._parts, stores, strict=True):
                self._fill(layer, parts, pair, room)
            self._room, self._stores = room, stores
        this = self._pass
        this.cosine, this.sine, this.places = angles[0].data_ptr(), angles[1].data_ptr(), places.data_ptr()
        this.slots, this.tokens, this.threads = stores[0][0].shape[:2].numel(), tokens, torch.get_num_threads()
        this.reads = reads

    def _fill(self, layer: _Layer, parts: LayerParts, stores: tuple[Tensor, Tensor], room: LayerRoom) -> None:
        """Fill in the arguments that stay from pass to pass."""
        width, inner, queries, keys, depth = parts.sizes

        def product(matrix: Matrix, states: Tensor | None, out: Tensor | None, outputs: int) -> _Product:
            pointers = [
                None if tensor is None else tensor.data_ptr() for tensor in (states, matrix.packed, matrix.bias, out)
            ]
            how = self._kind, matrix.in_blocks
            return _Product(*pointers, room.wide.data_ptr(), 0, matrix.in_features, outputs, *how)

        layer.joint = product(parts.joint, room.normed, room.joint, (queries + 2 * keys) * depth)
        layer.mix = product(parts.mix, None, room.mixed, width)
        layer.gates = product(parts.gates, room.normed, room.both, 2 * inner)
        layer.down = product(parts.down, room.gated, None, width)
        norms = (parts.heads.query_norm, parts.heads.key_norm)
        weights = (None if norm is None else norm.weight.data_ptr() for norm in norms)
        epsilons = (0.0 if norm is None else norm.epsilon for norm in norms)
        pointers = (room.joint.data_ptr(), None, None, *weights, None, room.query.data_ptr())
        written = (store.data_ptr() for store in stores)
        layer.placing = _Placing(*pointers, *written, 0, 0, queries, keys, depth, *epsilons, 1)
        layer.first, layer.second = parts.first.weight.data_ptr(), parts.second.weight.data_ptr()
        layer.width, layer.inner = width, inner
        layer.first_epsilon, layer.second_epsilon = parts.first.epsilon, parts.second.epsilon

    def query(self, lead: Sequence[int]) -> Tensor:
        """Return the queries (.., queries, D) of the tokens `lead` (..); they are valid until the
        next layer enters.
        """
        assert self._room is not None, "begin() comes first"
        _, _, queries, _, depth = self._room.sizes
        return self._room.query[: self._pass.tokens].view(*lead, queries, depth)

    def enter(self, number: int, states: Tensor) -> Tensor:
        """Run norm, joint projection and `rope_and_write` on states (.., width) in one layer, and
        return its queries. Raises ArgumentError, before anything is written, if a slot does not
        exist.
        """
        self._pass.states = states.data_ptr()
        if _library(states).forerun_enter(self._addresses[number], ctypes.byref(self._pass)):
            raise self._outside()
        return self.query(states.shape[:-1])

    def leave(self, number: int, attended: Tensor, states: Tensor) -> Tensor:
        """Finish a layer: project the attention output (.., queries * D) and add it to the input,
        then add the gated MLP of its norm. Returns (.., width).
        """
        this, answer = self._pass, torch.empty_like(states)
        this.states, this.attended, this.answer = states.data_ptr(), attended.data_ptr(), answer.data_ptr()
        _library(states).forerun_leave(self._addresses[number], ctypes.byref(this))
        return answer

    def run(self, states: Tensor, asked: Attention, wanted: Sequence[int]) -> list[Tensor]:
        """Run all layers over states (.., width), and return the outputs (.., width) of those that
        are `wanted`. Raises ArgumentError, before anything is written, if a slot does not exist or
        attention cannot be computed.

        Args:
            asked: attention of the first layer; the others ask the same of their keys and values.
            wanted: numbers of layers.
        """
        this = self._pass
        room = self._room
        outputs = [torch.empty_like(states) for _ in wanted]
        assert room is not None, "begin() comes first"
        this.states, this.attended = states.data_ptr(), asked.out.data_ptr()
        between = [buffer.data_ptr() for buffer in room.between]
        for number in range(len(self._layers)):
            self._outputs[number] = between[number % 2]
        for number, output in zip(wanted, outputs, strict=True):
            self._outputs[number] = output.data_ptr()
        this.outputs = ctypes.addressof(self._outputs)
        this.attention, this.attend = asked.address(), _attention_part()
        placing = self._layers[0].placing
        this.keys_from, this.values_from = asked.offsets(placing.keys, placing.values)
        failed = _run_layers(states.dtype)(self._pointers, len(self._layers), ctypes.byref(this))
        if failed == 1:
            raise self._outside()
        if failed:
            raise MemoryError("there is no memory for the scores of attention")
        return outputs

    def _outside(self) -> ArgumentError:
        return ArgumentError(
            f"a layer cannot write {self._pass.tokens} tokens to {self._pass.slots} slots: a place is out of range"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Layers:
        parts: Sequence[LayerParts] = copy.deepcopy(self._parts, memo)
        return Layers(parts, self._kind, self._pass.multiply)


@cache
def _run_layers(dtype: torch.dtype) -> Any:
    """Return the function that runs whole layers; it releases the interpreter's lock."""
    found = fused_kernels(dtype)
    assert found is not None, "takes_states() is asked first"
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    return kind(("forerun_layers", found))


def _library(states: Tensor) -> ctypes.CDLL:
    found = fused_kernels(states.dtype)
    assert found is not None, "takes_states() is asked first"
    return found
