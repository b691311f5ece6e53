"""A decoder layer of Llama's kind on a GPU in five kernels, for passes of at most `ROWS` tokens.

Every program reads its lines of a weight once, over their whole length, and multiplies all tokens by them: the weights
stream at the memory's pace, and no sum is split among programs. The tokens always stand in a tile of `ROWS` rows, and a
kernel is one binary for every number of them, so a token's bits do not depend on how many others are in its pass, nor
on which. Values are rounded where the modules of transformers round them.

Attention is in `triton_slots`. What a norm needs of its states, the sums of their squares, comes in parts from the
kernel that made the states.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.model.kernels import triton_ops
from forerun.model.kernels.native import Heads
from forerun.model.kernels.triton_ops import follow, order, product, rotated
from forerun.model.kernels.triton_slots import ROWS, attend

__all__ = ["ROWS", "attend"]

log = logging.getLogger(__name__)

LEAST_STEP, MOST_STEP = 32, 256  # Columns of a weight that a program takes at a time
TAKEN = 2**13  # Values of a weight that it takes at a time: several are under way, and other programs stand beside it
DTYPES = triton_ops.DTYPES
WIDTHS = {16: 1, 32: 96, 64: 256}  # Lines of a weight that a program has, and how many programs there must be then
_STAGES, _WARPS = 4, 4


def step_of(columns: int, lines: int) -> int:
    """Return how many columns of a weight a program of so many lines takes at a time, a power of two; 0: it cannot."""
    step = min(MOST_STEP, TAKEN // lines)
    while columns % step:
        step //= 2
    return step if step >= LEAST_STEP else 0


def lines_of(lines: int, most: int = max(WIDTHS)) -> int:
    """Return how many of a weight's lines a program has: as many as leave enough programs."""
    fitting = [width for width in WIDTHS if width <= most and lines % width == 0]
    return max((width for width in fitting if lines // width >= WIDTHS[width]), default=min(WIDTHS))


@cache
def ready(device: torch.device) -> bool:
    """Return whether the kernels that a pass has before its layers run on this device; layers are tried one by one."""
    ints = torch.zeros(1, 1, dtype=torch.int64, device=device)
    sees = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    block = SimpleNamespace(lengths=ints[0], sees=sees, query_positions=ints, node_positions=ints)
    try:
        build_mask(block, 16, 0, DTYPES[1])
        turn(ints, torch.ones(16, device=device), 1.0, DTYPES[1])
    except Exception as error:
        log.warning("decoder layers run module by module, which is slower: Triton fails here: %r", error)
        return False
    return True


def takes_weight(weight: Tensor | None) -> bool:
    """Return whether a weight (lines, size) can be multiplied by: one of halves in one piece, of fitting sizes."""
    if weight is None or weight.dtype not in DTYPES or not weight.is_contiguous():
        return False
    return weight.shape[0] % (2 * min(WIDTHS)) == 0 and step_of(weight.shape[1], max(WIDTHS)) > 0


def parts_of(size: int) -> int:
    """Return in how many parts the squares of states (.., size) are summed."""
    return size // lines_of(size, 32)


def square(states: Tensor) -> Tensor:
    """Return the sums of the squares of states (.., size), by token and part: (tokens, parts) float32."""
    size, tokens = states.shape[-1], states.numel() // states.shape[-1]
    lines, parts = lines_of(size, 32), parts_of(size)
    found = states.new_empty(tokens, parts, dtype=torch.float32)
    with torch.cuda.device_of(states):
        _square[parts,](states, found, tokens, size, parts, LINES=lines, ROWS=ROWS, num_warps=1, **order())
    return found


@dataclass(frozen=True, slots=True)
class Normed:
    """States (.., size) that a kernel puts through a norm before it multiplies them."""

    states: Tensor
    squares: Tensor  # See `square`
    norm: Tensor  # (size,) the norm's weight
    epsilon: float

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that a kernel takes."""
        return self.states, self.squares, self.norm

    @property
    def padded(self) -> int:
        """The power of two that holds the parts of the squares."""
        return int(triton.next_power_of_2(self.squares.shape[1]))


def _tiling(size: int, lines: int) -> dict[str, Any]:
    """Return how a product's kernel goes through a weight of that many inputs, so many lines in each program."""
    return {"STEP": step_of(size, lines), "ROWS": ROWS, "num_warps": _WARPS, "num_stages": _STAGES, **order()}


def multiply(
    given: Tensor | Normed, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Multiply states (.., size) by a weight (lines, size), and return (.., lines) and its squares as `square` does.

    Args:
        given: the states, perhaps with the norm that they go through before.
        bias: (lines,)
        residual: (.., lines) what is added to the product; without it no squares are computed.
    """
    lines, size = weight.shape
    normed = given if isinstance(given, Normed) else None
    states = given if isinstance(given, Tensor) else given.states
    tokens = states.numel() // size
    own = lines_of(lines, 32 if residual is not None else max(WIDTHS))
    parts = lines // own
    out = states.new_empty(*states.shape[:-1], lines)
    found = states.new_empty(tokens, parts, dtype=torch.float32) if residual is not None else states
    with torch.cuda.device_of(states):
        _multiply[parts,](
            *((states, states, states) if normed is None else normed.arguments),
            weight,
            weight if bias is None else bias,
            states if residual is None else residual,
            out,
            found,
            tokens,
            size,
            lines,
            1 if normed is None else normed.squares.shape[1],
            parts,
            0.0 if normed is None else normed.epsilon,
            NORM=normed is not None,
            BIAS=bias is not None,
            ADD=residual is not None,
            PARTS=1 if normed is None else normed.padded,
            LINES=own,
            **_tiling(size, own),
        )
    return out, found


def project(
    given: Normed,
    weight: Tensor,
    bias: Tensor | None,
    angles: tuple[Tensor, Tensor],
    heads: Heads,
    *,
    stores: tuple[Tensor, Tensor],
    places: Tensor,
) -> Tensor:
    """Return the rotated queries (.., heads, D) of states, and write their rotated keys and their values to `places`
    (tokens,) of the stores (rows, slots, key heads, D). Heads have no norms of their own.
    """
    tokens, (lines, size), half = places.numel(), weight.shape, heads.depth // 2
    pairs = min(lines_of(lines) // 2, half)
    query = given.states.new_empty(*given.states.shape[:-1], heads.queries, heads.depth)
    with torch.cuda.device_of(given.states):
        _project[(heads.queries + 2 * heads.keys) * (half // pairs),](
            *given.arguments,
            weight,
            weight if bias is None else bias,
            *angles,
            places,
            query,
            *stores,
            tokens,
            size,
            given.squares.shape[1],
            given.epsilon,
            heads.queries,
            heads.keys,
            BIAS=bias is not None,
            HALF=half,
            PAIRS=pairs,
            PARTS=given.padded,
            **_tiling(size, 2 * pairs),
        )
    return query


def gate(given: Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``silu(gate) * up`` (.., lines) of states, for a weight (2 * lines, size), the gate's lines first."""
    states = given.states
    lines, size = weight.shape[0] // 2, weight.shape[1]
    pairs = lines_of(2 * lines) // 2
    out = states.new_empty(*states.shape[:-1], lines)
    with torch.cuda.device_of(states):
        _gate[lines // pairs,](
            *given.arguments,
            weight,
            weight if bias is None else bias,
            out,
            states.numel() // size,
            size,
            lines,
            given.squares.shape[1],
            given.epsilon,
            BIAS=bias is not None,
            PAIRS=pairs,
            PARTS=given.padded,
            **_tiling(size, 2 * pairs),
        )
    return out


def turn(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (.., D) of positions (..) times frequencies (D / 2,), both halves of D alike."""
    half = frequencies.shape[0]
    cosine, sine = torch.empty(2, *positions.shape, 2 * half, dtype=dtype, device=positions.device)
    with torch.cuda.device_of(positions):
        _turn[positions.numel(),](
            positions, frequencies, cosine, sine, scaling, half, HALF=triton.next_power_of_2(half)
        )
    return cosine, sine


def build_mask(block: Any, width: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask (B, 1, N, width) of a `masks.Block` as `masks.build` does, for layers that look back so many
    positions (`window`), or as far as they like (0).
    """
    batch, count, seen = block.sees.shape
    mask = torch.empty(batch, 1, count, width, dtype=dtype, device=block.sees.device)
    with torch.cuda.device_of(mask):
        _mask[batch * count, triton.cdiv(width, 512)](
            block.lengths,
            block.sees.contiguous().view(torch.uint8),
            block.query_positions.contiguous(),
            block.node_positions.contiguous(),
            mask,
            count,
            seen,
            width,
            window,
            torch.finfo(dtype).min,
            NODES=triton.next_power_of_2(seen),
            WINDOW=window > 0,
            BLOCK=512,
        )
    return mask


@triton.jit(do_not_specialize=["tokens"])
def _square(states, found, tokens, size, parts, LINES: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr):
    follow(OVERLAP)
    row, part = tl.arange(0, ROWS), tl.program_id(0)
    column = part * LINES + tl.arange(0, LINES)
    held = tl.load(states + row[:, None] * size + column[None, :], mask=(row < tokens)[:, None], other=0.0)
    wide = held.to(tl.float32)
    tl.store(found + row * parts + part, tl.sum(wide * wide, 1), mask=row < tokens)


@triton.jit
def _roots(squares, row, real, size, parts, epsilon, PARTS: tl.constexpr):
    """Return the factors (ROWS, 1) of a norm from the sums of squares, in parts."""
    part = tl.arange(0, PARTS)
    there = real[:, None] & (part < parts)[None, :]
    held = tl.load(squares + row[:, None] * parts + part[None, :], mask=there, other=0.0)
    return tl.rsqrt(tl.sum(held, 1) / size + epsilon)[:, None]


@triton.jit
def _times(
    states,
    squares,
    norm,
    weight,
    line,
    tokens,
    size,
    parts,
    epsilon,
    NORM: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Return states (ROWS, size), behind a norm if asked, times LINES lines of a weight: (ROWS, LINES) float32. What is
    first needed of the weight is on its way before the states are there.
    """
    row, inner = tl.arange(0, ROWS), tl.arange(0, STEP)
    real = row < tokens
    read = states + row[:, None] * size + inner[None, :]
    lines = weight + line.to(tl.int64)[None, :] * size + inner[:, None]
    ahead = tl.load(lines, eviction_policy="evict_first")
    follow(OVERLAP)
    factor = tl.zeros((ROWS, 1), tl.float32)
    if NORM:
        factor = _roots(squares, row, real, size, parts, epsilon, PARTS)
    held = tl.load(read, mask=real[:, None], other=0.0)
    if NORM:
        held = product((held.to(tl.float32) * factor).to(held.dtype), tl.load(norm + inner)[None, :])
    total = tl.dot(held, ahead, tl.zeros((ROWS, LINES), tl.float32))
    for start in range(STEP, size, STEP):
        held = tl.load(read + start, mask=real[:, None], other=0.0)
        if NORM:
            held = product((held.to(tl.float32) * factor).to(held.dtype), tl.load(norm + start + inner)[None, :])
        total = tl.dot(held, tl.load(lines + start, eviction_policy="evict_first"), total)
    return total


@triton.jit
def _halves(values, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Return the first and the last PAIRS columns of (ROWS, 2 * PAIRS)."""
    return tl.split(tl.permute(tl.reshape(values, (ROWS, 2, PAIRS)), (0, 2, 1)))


@triton.jit(do_not_specialize=["tokens"])
def _multiply(
    states,
    squares,
    norm,
    weight,
    bias,
    residual,
    out,
    found,
    tokens,
    size,
    lines,
    parts,
    own_parts,
    epsilon,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, part = tl.arange(0, ROWS), tl.program_id(0)
    line = part * LINES + tl.arange(0, LINES)
    total = _times(
        states, squares, norm, weight, line, tokens, size, parts, epsilon, NORM, PARTS, LINES, STEP, ROWS, OVERLAP
    )
    if BIAS:
        total += tl.load(bias + line).to(tl.float32)[None, :]
    value = total.to(out.dtype.element_ty)
    place, real = row.to(tl.int64)[:, None] * lines + line[None, :], (row < tokens)[:, None]
    if ADD:
        value = (value.to(tl.float32) + tl.load(residual + place, mask=real, other=0.0).to(tl.float32)).to(value.dtype)
        wide = value.to(tl.float32)
        tl.store(found + row * own_parts + part, tl.sum(wide * wide, 1), mask=row < tokens)
    tl.store(out + place, value, mask=real)


@triton.jit(do_not_specialize=["tokens"])
def _gate(
    states,
    squares,
    norm,
    weight,
    bias,
    out,
    tokens,
    size,
    lines,
    parts,
    epsilon,
    BIAS: tl.constexpr,
    PAIRS: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row, pair = tl.arange(0, ROWS), tl.arange(0, 2 * PAIRS)
    line = tl.program_id(0) * PAIRS + pair % PAIRS + (pair // PAIRS) * lines
    both = _times(
        states, squares, norm, weight, line, tokens, size, parts, epsilon, True, PARTS, 2 * PAIRS, STEP, ROWS, OVERLAP
    )
    if BIAS:
        both += tl.load(bias + line).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    gates, ups = _halves(both, ROWS, PAIRS)
    wide = gates.to(dtype).to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(dtype)
    place = row[:, None] * lines + (tl.program_id(0) * PAIRS + tl.arange(0, PAIRS))[None, :]
    tl.store(out + place, product(gated, ups.to(dtype)), mask=(row < tokens)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def _project(
    states,
    squares,
    norm,
    weight,
    bias,
    cosine,
    sine,
    places,
    query,
    keys,
    values,
    tokens,
    size,
    parts,
    epsilon,
    heads,
    key_heads,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = HALF // PAIRS
    head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * PAIRS
    row, pair = tl.arange(0, ROWS), tl.arange(0, 2 * PAIRS)
    real = (row < tokens)[:, None]
    line = head * 2 * HALF + first + pair % PAIRS + (pair // PAIRS) * HALF
    both = _times(
        states, squares, norm, weight, line, tokens, size, parts, epsilon, True, PARTS, 2 * PAIRS, STEP, ROWS, OVERLAP
    )
    if BIAS:
        both += tl.load(bias + line).to(tl.float32)[None, :]
    low, high = _halves(both.to(query.dtype.element_ty), ROWS, PAIRS)
    column = first + tl.arange(0, PAIRS)
    place = tl.load(places + row, mask=row < tokens, other=0) * key_heads
    if head >= heads + key_heads:
        target = values + (place + head - heads - key_heads)[:, None] * 2 * HALF + column[None, :]
        tl.store(target, low, mask=real)
        tl.store(target + HALF, high, mask=real)
    else:
        low, high = rotated(low, high, cosine, sine, row[:, None] * 2 * HALF + column[None, :], real, HALF)
        target = query + (row * heads + head)[:, None] * 2 * HALF + column[None, :]
        if head >= heads:
            target = keys + (place + head - heads)[:, None] * 2 * HALF + column[None, :]
        tl.store(target, low, mask=real)
        tl.store(target + HALF, high, mask=real)


@triton.jit
def _turn(positions, frequencies, cosine, sine, scaling, half, HALF: tl.constexpr):
    token, column = tl.program_id(0), tl.arange(0, HALF)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=column < half, other=0.0)
    place = token.to(tl.int64) * 2 * half + column
    for shift in tl.static_range(2):
        inside = column < half
        tl.store(cosine + place + shift * half, (tl.cos(angle) * scaling).to(cosine.dtype.element_ty), mask=inside)
        tl.store(sine + place + shift * half, (tl.sin(angle) * scaling).to(sine.dtype.element_ty), mask=inside)


@triton.jit
def _mask(
    lengths,
    sees,
    queries,
    nodes,
    mask,
    count,
    seen,
    width,
    window,
    lowest,
    NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, slot = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sequence = token // count
    length = tl.load(lengths + sequence)
    node, every = slot - length, tl.arange(0, NODES)
    behind = (node >= 0) & (node < seen)
    visible = tl.load(sees + token * seen + node, mask=behind, other=0) != 0
    visible = visible | (node < 0)
    some = tl.load(sees + token * seen + every, mask=every < seen, other=0)
    if tl.max(some.to(tl.int32), 0) == 0:  # Padding looks at slot 0 alone
        visible = slot == 0
    if WINDOW:
        nearest = tl.load(nodes + sequence * seen + tl.minimum(tl.maximum(node, 0), seen - 1))
        position = tl.where(node < 0, slot, nearest)
        visible = visible & (tl.load(queries + token) - position < window)
    value = tl.where(visible, 0.0, lowest).to(mask.dtype.element_ty)
    tl.store(mask + token.to(tl.int64) * width + slot, value, mask=slot < width)
