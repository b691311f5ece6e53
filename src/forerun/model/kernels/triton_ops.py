"""The operations of `native` on a GPU, as kernels in Triton: norms, gates, rotary embeddings, attention over a cache.

They round where transformers' own operations do. `fused` imports this module where there is Triton.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.model.inputs import TreePaths
from forerun.model.kernels.native import Heads

log = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16)
LANES = 1  # Widths are multiples of it
ROTATED = DEPTHS = (16, 32, 64, 128, 256)  # Widths of a head that `rope_and_write` and `attend` take
MOST_ROWS = 512  # Queries of a group in one sequence: with more, torch's attention is as fast
_SLOTS = 64  # Cache slots that a program takes at a time
_SHARE = 256  # Slots of a program that follows a path
_WAVES = 2  # Programs for each multiprocessor
OVERLAP = False  # Whether a kernel starts while the one before it ends, see `follow`. No GPU has tried that yet.


def ready(device: torch.device, _dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether the kernels run on this device, in any of their dtypes."""
    return tried(device)


@cache
def tried(device: torch.device) -> bool:
    """Return whether a kernel ran here: Triton may find no compiler for its launchers, or not know the GPU."""
    try:
        silu_and_mul(torch.ones(1, 2, device=device, dtype=DTYPES[1]))
    except Exception as error:
        log.warning("norms, gates and attention run in torch, which is slower: Triton fails here: %r", error)
        return False
    return True


def takes_states(states: Tensor) -> bool:
    """Return whether the functions below take these values: contiguous halves on a GPU, without a
    gradient.
    """
    return (
        states.dtype in DTYPES
        and states.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and ready(states.device)
    )


def takes_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether `attend` takes these tensors."""
    tensors = (query, key, value, mask)
    return (
        query.dtype in DTYPES
        and all(tensor.dtype == query.dtype and tensor.stride(-1) == 1 for tensor in tensors)
        and query.shape[-1] in DEPTHS
        and value.shape[-1] in DEPTHS
        and query.shape[1] // key.shape[1] * query.shape[2] <= MOST_ROWS
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and ready(query.device)
    )


def rms_norm(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute RMSNorm of (.., size) in float32, times `weight` (size,)."""
    size, result = states.shape[-1], torch.empty_like(states)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    with torch.cuda.device_of(states):
        _norm[states.numel() // size,](states, weight, result, size, epsilon, BLOCK=block, num_warps=warps)
    return result


def silu_and_mul(both: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of (.., 2 * size), gates first: (.., size)."""
    size, block = both.shape[-1] // 2, 1024
    result = both.new_empty(*both.shape[:-1], size)
    with torch.cuda.device_of(both):
        _gate[result.numel() // size, triton.cdiv(size, block)](both, result, size, BLOCK=block)
    return result


def rope_and_write(
    states: Tensor, angles: tuple[Tensor, Tensor], heads: Heads, stores: tuple[Tensor, Tensor], places: Tensor
) -> Tensor:
    """Do what `native.rope_and_write` does, on a GPU."""
    query = states.new_empty(*states.shape[:-1], heads.queries, heads.depth)
    norms = (heads.query_norm, heads.key_norm)
    weights = [states if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
    with torch.cuda.device_of(states):
        _place[places.numel(), heads.queries + 2 * heads.keys](
            states,
            *angles,
            *weights,
            places,
            query,
            *stores,
            heads.queries,
            heads.keys,
            *epsilons,
            HALF=heads.depth // 2,
            QUERY_NORM=norms[0] is not None,
            KEY_NORM=norms[1] is not None,
            num_warps=1,
        )
    return query


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
    """Compute attention (B, N, heads, D') for tensors that `takes_attention` accepts. Several
    programs share the slots of a sequence, as many as keep the device busy (Flash-Decoding), and
    skip what none of their queries sees.

    Args:
        query: (B, heads, N, D)
        key: (R, kv_heads, W, D)
        value: (R, kv_heads, W, D')
        mask: (B, 1, N, W) or (1, 1, N, W), additive; what is added half the dtype's lowest number or less is unseen.
        rows: (B,) int64, which of the R keys and values each sequence has; None: R is B, its own.
        paths: every node then has a program of its own, which reads the keys of its path in their order and in shares
            of one size: its bits depend on that path alone. What no path leads to is unseen.
    """
    if rows is not None:
        key, value = key.index_select(0, rows), value.index_select(0, rows)
    batch, heads, count, depth = query.shape
    key_heads, width, value_depth = key.shape[1], key.shape[2], value.shape[-1]
    groups = heads // key_heads
    tile = min(64, max(16, triton.next_power_of_2(groups * count)))
    blocks, sequences = triton.cdiv(groups * count, tile), batch * key_heads
    shares = max(1, min(triton.cdiv(_WAVES * _processors(query.device), sequences * blocks), width // _SLOTS))
    share = triton.cdiv(triton.cdiv(width, shares), _SLOTS) * _SLOTS
    if paths is not None:
        tile, blocks, share = max(16, triton.next_power_of_2(groups)), count, _SHARE
    lengths, nodes = (mask, mask) if paths is None else (paths.lengths, paths.nodes.contiguous())  # or read by nobody
    shares = triton.cdiv(width, share)
    out = query.new_empty(batch, count, heads, value_depth)
    shape = (batch, count, heads, shares)
    partial = out if shares == 1 else query.new_empty(*shape, value_depth, dtype=torch.float32)
    tops, totals = query.new_empty(2, *shape, dtype=torch.float32)
    mask = mask.expand(batch, 1, count, width)
    with torch.cuda.device_of(query):  # where Triton launches
        _attend[sequences, shares, blocks](
            query,
            key,
            value,
            mask,
            partial,
            tops,
            totals,
            *query.stride()[:3],
            *key.stride()[:3],
            *value.stride()[:3],
            mask.stride(0),
            mask.stride(2),
            lengths,
            nodes,
            nodes.shape[-1],
            key_heads,
            count,
            width,
            share,
            scale,
            torch.finfo(mask.dtype).min / 2,
            SHARES=shares,
            GROUPS=groups,
            DEPTH=depth,
            VALUE_DEPTH=value_depth,
            ROWS=tile,
            SLOTS=_SLOTS,
            ALONG=paths is not None,
        )
        if shares > 1:
            padded = triton.next_power_of_2(shares)
            _join[batch * count * heads,](partial, tops, totals, out, SHARES=shares, PADDED=padded, DEPTH=value_depth)
    return out


def order() -> dict[str, bool]:
    """Return how a launch follows the one before it."""
    return {"OVERLAP": True, "launch_pdl": True} if OVERLAP else {"OVERLAP": False}


@cache
def _processors(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return 8 if properties is None else int(properties.multi_processor_count)


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Wait for the kernel before this one, and let the next one start (programmatic dependent launch). Nothing that
    another kernel writes is read before, and nothing is written.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _norm(states, weight, result, size, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, BLOCK)
    inside = column < size
    held = tl.load(states + row + column, mask=inside, other=0.0)
    value = held.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value) / size + epsilon)
    scaled = normed.to(held.dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row + column, scaled.to(held.dtype), mask=inside)


@triton.jit
def _gate(both, result, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    held = tl.load(both + row * 2 * size + column, mask=inside, other=0.0)
    gate = held.to(tl.float32)
    up = tl.load(both + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    gated = (gate / (1.0 + tl.exp(-gate))).to(held.dtype).to(tl.float32)
    tl.store(result + row * size + column, (gated * up).to(held.dtype), mask=inside)


@triton.jit
def product(one, other):
    """Multiply two halves and round the product to a half."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(one.dtype)


@triton.jit
def _normed(low, high, weight, column, epsilon, HALF: tl.constexpr):
    first, second = low.to(tl.float32), high.to(tl.float32)
    factor = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * HALF) + epsilon)
    first, second = (first * factor).to(low.dtype), (second * factor).to(low.dtype)
    return product(first, tl.load(weight + column)), product(second, tl.load(weight + HALF + column))


@triton.jit
def rotated(low, high, cosine, sine, angle, real, HALF: tl.constexpr):
    """Rotate pairs of halves by the angles at these places, those that are `real`."""
    first = product(low, tl.load(cosine + angle, mask=real, other=0.0)).to(tl.float32)
    first -= product(high, tl.load(sine + angle, mask=real, other=0.0)).to(tl.float32)
    second = product(high, tl.load(cosine + HALF + angle, mask=real, other=0.0)).to(tl.float32)
    second += product(low, tl.load(sine + HALF + angle, mask=real, other=0.0)).to(tl.float32)
    return first.to(low.dtype), second.to(low.dtype)


@triton.jit
def _place(
    states,
    cosine,
    sine,
    query_norm,
    key_norm,
    places,
    query,
    keys,
    values,
    heads,
    key_heads,
    query_epsilon,
    key_epsilon,
    HALF: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, HALF)
    source = states + (token * (heads + 2 * key_heads) + head) * 2 * HALF
    low, high = tl.load(source + column), tl.load(source + HALF + column)
    place = tl.load(places + token) * key_heads
    if head >= heads + key_heads:
        target = values + (place + head - heads - key_heads) * 2 * HALF
        tl.store(target + column, low)
        tl.store(target + HALF + column, high)
    else:
        if QUERY_NORM:
            if head < heads:
                low, high = _normed(low, high, query_norm, column, query_epsilon, HALF)
        if KEY_NORM:
            if head >= heads:
                low, high = _normed(low, high, key_norm, column, key_epsilon, HALF)
        low, high = rotated(low, high, cosine, sine, token * 2 * HALF + column, column < HALF, HALF)
        target = query + (token * heads + head) * 2 * HALF
        if head >= heads:
            target = keys + (place + head - heads) * 2 * HALF
        tl.store(target + column, low)
        tl.store(target + HALF + column, high)


@triton.jit
def _rows_of(program, count, GROUPS: tl.constexpr, ROWS: tl.constexpr, ALONG: tl.constexpr):
    """Return the heads of a group and the nodes that a program attends for, and a mask of those
    that exist.
    """
    row = tl.arange(0, ROWS)
    if ALONG:  # one node, and the heads of its group
        return row, row * 0 + program, row < GROUPS
    else:
        row += program * ROWS
        return row // count, row % count, row < GROUPS * count


@triton.jit
def _on_path(rank, inside, length, path, longest):
    """Return the slots of the tokens of these ranks, and a mask of those that exist."""
    behind = rank - length
    node = tl.load(path + behind, mask=(behind >= 0) & (behind < longest), other=-1)
    inside = inside & ((behind < 0) | (node >= 0))
    return tl.where(inside, tl.where(behind < 0, rank, length + node), 0), inside


@triton.jit
def _attend(
    query,
    key,
    value,
    mask,
    partial,
    tops,
    totals,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_slot,
    value_batch,
    value_head,
    value_slot,
    mask_batch,
    mask_row,
    lengths,
    paths,
    longest,
    key_heads,
    count,
    width,
    share,
    scale,
    unseen,
    SHARES: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    VALUE_DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    ALONG: tl.constexpr,
):
    batch, group = (tl.program_id(0) // key_heads).to(tl.int64), tl.program_id(0) % key_heads
    member, node, real = _rows_of(tl.program_id(2), count, GROUPS, ROWS, ALONG)
    head, path = group * GROUPS + member, paths + (batch * count + tl.program_id(2)) * longest
    depth, value_depth, offset = tl.arange(0, DEPTH), tl.arange(0, VALUE_DEPTH), tl.arange(0, SLOTS)
    asked = query + batch * query_batch + head[:, None] * query_head + node[:, None] * query_row + depth[None, :]
    rows = tl.load(asked, mask=real[:, None], other=0.0)
    keys = key + batch * key_batch + group.to(tl.int64) * key_head
    values = value + batch * value_batch + group.to(tl.int64) * value_head
    biases = mask + batch * mask_batch + node.to(tl.int64)[:, None] * mask_row
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    found = tl.zeros((ROWS, VALUE_DEPTH), tl.float32)
    first = tl.program_id(1) * share
    for start in range(first, tl.minimum(first + share, width), SLOTS):
        slot = start + offset
        inside = slot < width
        if ALONG:
            slot, inside = _on_path(slot, inside, tl.load(lengths + batch), path, longest)
        bias = tl.load(biases + slot[None, :], mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        bias = tl.where(real[:, None], bias, 2 * unseen)
        bias = tl.where(inside[None, :], bias, float("-inf"))
        if tl.max(tl.max(bias, 1), 0) > unseen:
            there = slot.to(tl.int64)
            columns = tl.load(keys + there[None, :] * key_slot + depth[:, None], mask=inside[None, :], other=0.0)
            score = tl.dot(rows, columns) * scale + bias
            higher = tl.maximum(top, tl.max(score, 1))
            kept, weight = tl.exp(top - higher), tl.exp(score - higher[:, None])
            stored = tl.load(
                values + there[:, None] * value_slot + value_depth[None, :], mask=inside[:, None], other=0.0
            )
            total = total * kept + tl.sum(weight, 1)
            found = found * kept[:, None] + tl.dot(weight.to(stored.dtype), stored)
            top = higher
    place = ((batch * count + node) * (key_heads * GROUPS) + head) * SHARES + tl.program_id(1)
    if SHARES == 1:
        found = found / total[:, None]
    else:
        tl.store(tops + place, top, mask=real)
        tl.store(totals + place, total, mask=real)
    target = partial + place[:, None] * VALUE_DEPTH + value_depth[None, :]
    tl.store(target, found.to(partial.dtype.element_ty), mask=real[:, None])


@triton.jit
def _join(partial, tops, totals, out, SHARES: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    share, depth = tl.arange(0, PADDED), tl.arange(0, DEPTH)
    there = share < SHARES
    top = tl.load(tops + row * SHARES + share, mask=there, other=float("-inf"))
    weight = tl.exp(top - tl.max(top, 0))
    total = tl.sum(weight * tl.load(totals + row * SHARES + share, mask=there, other=0.0), 0)
    parts = partial + (row * SHARES + share[:, None]) * DEPTH + depth[None, :]
    found = tl.sum(weight[:, None] * tl.load(parts, mask=there[:, None], other=0.0), 0) / total
    tl.store(out + row * DEPTH + depth, found.to(out.dtype.element_ty))
