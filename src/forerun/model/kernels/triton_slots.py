"""Attention of at most `ROWS` tokens over the slots of a cache on a GPU, in one kernel: a token has the bits of plain
decoding, whatever else is in its pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.model.kernels.triton_ops import follow, order

ROWS = 16  # Tokens of a tile, the fewest rows that a tensor core multiplies
SLOTS = 64  # Cache slots that a program of `attend` takes at a time
SHARE, LARGE_SHARE = 128, 1024  # Slots of such a program before the slot `LARGE_FROM`, and from it on
LARGE_FROM = 4096
JOINED_APART = 32  # With more programs for a sequence a kernel of its own joins what they found


def attend(
    query: Tensor, stores: tuple[Tensor, Tensor], mask: Tensor, *, places: Tensor, scale: float, arrived: Tensor
) -> Tensor:
    """Return attention (B, N, heads * D) of queries (B, N, heads, D), B * N at most `ROWS`, over the slots of a cache.

    Shares of the slots are where they are in every pass, so that bits do not depend on how much of the cache is read.
    What is committed before a tree is read once for all its nodes. The share or two in which the tree itself stands
    are read for each node apart where the tree has branches, the keys on its path in their order, as plain decoding
    reads them.

    Args:
        stores: keys and values (rows, slots, key heads, D), those of the pass included.
        mask: (B, 1, N, W), additive, over the first W slots; what is behind the last token of the pass is not read.
        places: (B * N,) int64, where the tokens of the pass stand among all slots of all rows. The last slot of a row
            is no token's.
        arrived: (B * key heads,) int32 or more, zeros, which are zeros again behind the call.
    """
    batch, count, heads, depth = query.shape
    slots, key_heads = stores[0].shape[1:3]
    groups, width = heads // key_heads, mask.shape[-1]
    tile, shares = ROWS * triton.next_power_of_2(groups), _count_shares(width)
    sequences, apart = batch * key_heads, shares > JOINED_APART
    out = query.new_empty(batch, count, heads * depth)
    partial = query.new_empty(sequences, shares, tile, depth, dtype=torch.float32)
    tops, totals = query.new_empty(2, sequences, shares, tile, dtype=torch.float32)
    common = (places, out, partial, tops, totals, slots, key_heads, count, width, shares)
    sizes = {"GROUPS": groups, "DEPTH": depth, "TILE": tile, "ROWS": ROWS}
    shape = {"SHARE": SHARE, "LARGE_SHARE": LARGE_SHARE, "LARGE_FROM": LARGE_FROM}
    with torch.cuda.device_of(query):
        _attend[sequences, shares + (2 * count if count > 1 else 0)](
            query,
            *stores,
            mask,
            arrived,
            *common,
            mask.stride(0) if mask.shape[0] > 1 else 0,
            mask.stride(2),
            scale,
            torch.finfo(mask.dtype).min / 2,
            APART=apart,
            SLOTS=SLOTS,
            **sizes,
            **shape,
            num_warps=4 if tile <= 32 else 8,
            num_stages=2,
            **order(),
        )
        if apart:
            _join[sequences, tile](*common, **sizes, **shape, num_warps=1, **order())
    return out


def _count_shares(width: int) -> int:
    small = min(width, LARGE_FROM)
    return int(triton.cdiv(small, SHARE) + triton.cdiv(width - small, LARGE_SHARE))


@triton.jit
def _ends(places, sequence, count, slots, ROWS: tl.constexpr):
    """Return the row of the cache that a sequence stands in, the slot of its first token in the pass, and the end of
    the slots that are read.
    """
    token = tl.arange(0, ROWS)
    place = tl.load(places + sequence * count + token, mask=token < count, other=-1)
    row = tl.max(place, 0) // slots
    slot = place - row * slots
    slot = tl.where(slot < slots - 1, slot, -1)  # The last slot is no token's
    end = (tl.max(slot, 0) + 1).to(tl.int32)
    begin = tl.max(tl.where(token == 0, slot, -1), 0).to(tl.int32)
    return row, tl.where(begin < 0, end, begin), tl.maximum(end, 1)


@triton.jit
def _branches(biases, mask_row, begin, count, unseen, ROWS: tl.constexpr):
    """Return 1 if some token of the pass does not see all those that stand before it, else 0."""
    node = tl.arange(0, ROWS)
    below = (node[None, :] <= node[:, None]) & (node < count)[:, None]
    bias = tl.load(biases + node.to(tl.int64)[:, None] * mask_row + begin + node[None, :], mask=below, other=0.0)
    first = tl.load(biases + node.to(tl.int64) * mask_row + begin, mask=node < count, other=0.0)
    real = first > unseen  # Every node sees the root; padding does not
    hidden = below & real[:, None] & (bias <= unseen)
    return tl.max(tl.max(hidden.to(tl.int32), 1), 0)


@triton.jit
def _path(line, begin, count, unseen, ROWS: tl.constexpr):
    """Return the tokens of the pass (ROWS,) by their rank on the path of the token whose line of the mask is given,
    -1 for those that are not on it, and how many are.
    """
    node = tl.arange(0, ROWS)
    seen = tl.load(line + begin + node, mask=node < count, other=unseen).to(tl.float32) > unseen
    on = seen.to(tl.int32)
    return tl.where(seen, tl.cumsum(on, 0) - 1, -1), tl.sum(on, 0)


@triton.jit
def _slots_of(rank, begin, ranks, ROWS: tl.constexpr):
    """Return the slots of the keys of these ranks on a path: what is committed, then the tokens of the pass."""
    behind, node = rank - begin, tl.arange(0, ROWS)
    found = tl.sum(tl.where(ranks[None, :] == behind[:, None], node[None, :], 0), 1)
    return tl.where(behind < 0, rank, begin + found)


@triton.jit
def _span(share, SHARE: tl.constexpr, LARGE_SHARE: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return the first slot of a share, and how many it has."""
    small: tl.constexpr = LARGE_FROM // SHARE
    behind = LARGE_FROM + (share - small) * LARGE_SHARE
    return tl.where(share < small, share * SHARE, behind), tl.where(share < small, SHARE, LARGE_SHARE)


@triton.jit
def _whole(begin, SHARE: tl.constexpr, LARGE_SHARE: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return how many shares end before `begin`, or there."""
    small = tl.minimum(begin, LARGE_FROM)
    return small // SHARE + (begin - small) // LARGE_SHARE


@triton.jit
def _live(end, SHARE: tl.constexpr, LARGE_SHARE: tl.constexpr, LARGE_FROM: tl.constexpr):
    """Return how many shares hold the slots before `end`."""
    small = tl.minimum(end, LARGE_FROM)
    return tl.cdiv(small, SHARE) + tl.cdiv(end - small, LARGE_SHARE)


@triton.jit
def _over(
    rows,
    keys,
    values,
    seen,
    ranks,
    first,
    last,
    begin,
    end,
    along,
    line,
    scale,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return what queries (TILE, DEPTH) find in the slots, or the ranks of a path, from `first` to `last`: the highest
    scores, the sums of weights and the weighted sums of values.
    """
    depth, offset = tl.arange(0, DEPTH), tl.arange(0, SLOTS)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    found = tl.zeros((TILE, DEPTH), tl.float32)
    for start in range(first, last, SLOTS):
        slot = start + offset
        inside = slot < end
        if along >= 0:
            slot = _slots_of(slot, begin, ranks, ROWS)
        there = slot * line  # Within a row: 32 bits hold it
        columns = tl.load(keys + there[None, :] + depth[:, None], mask=inside[None, :], other=0.0)
        stored = tl.load(values + there[:, None] + depth[None, :], mask=inside[:, None], other=0.0)
        bias = tl.load(seen + slot[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        score = tl.dot(rows, columns) * scale + tl.where(inside[None, :], bias, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        kept, weight = tl.exp(top - higher), tl.exp(score - higher[:, None])
        total = total * kept + tl.sum(weight, 1)
        found = tl.dot(weight.to(stored.dtype), stored, found * kept[:, None])
        top = higher
    return top, total, found


@triton.jit(do_not_specialize=["count", "width", "shares"])
def _attend(
    query,
    keys,
    values,
    mask,
    arrived,
    places,
    out,
    partial,
    tops,
    totals,
    slots,
    key_heads,
    count,
    width,
    shares,
    mask_batch,
    mask_row,
    scale,
    unseen,
    APART: tl.constexpr,
    SLOTS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    LARGE_SHARE: tl.constexpr,
    LARGE_FROM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    sequence, group = (tl.program_id(0) // key_heads).to(tl.int64), tl.program_id(0) % key_heads
    held, begin, end = _ends(places, sequence, count, slots, ROWS)
    end = tl.minimum(end, width)
    keys += (held * slots * key_heads + group) * DEPTH
    values += (held * slots * key_heads + group) * DEPTH
    biases = mask + sequence * mask_batch
    shared = _live(end, SHARE, LARGE_SHARE, LARGE_FROM)  # Shares that one program takes for all nodes
    live = shared
    if count > 1:
        if _branches(biases, mask_row, begin, count, unseen, ROWS) > 0:
            shared = _whole(begin, SHARE, LARGE_SHARE, LARGE_FROM)
    along = tl.program_id(1) - shares  # Which of the programs that take a share along the path of one node
    share = tl.where(along < 0, tl.program_id(1), shared + along // count)
    first, length = _span(share, SHARE, LARGE_SHARE, LARGE_FROM)
    if ((along < 0) & (share < shared)) | ((along >= 0) & (share < live)):
        tile, depth, ranks = tl.arange(0, TILE), tl.arange(0, DEPTH), tl.arange(0, ROWS)
        node, member = tile % ROWS, tile // ROWS
        real = (node < count) & (member < GROUPS)
        if along >= 0:
            real = real & (node == along % count)
            ranks, on = _path(biases + (along % count).to(tl.int64) * mask_row, begin, count, unseen, ROWS)
            end = begin + on
        head = (sequence * count + node) * (key_heads * GROUPS) + group * GROUPS + member
        rows = tl.load(query + head[:, None] * DEPTH + depth[None, :], mask=real[:, None], other=0.0)
        line, seen = key_heads * DEPTH, biases + tl.minimum(node, count - 1)[:, None] * mask_row
        last = tl.minimum(first + length, end)
        top, total, found = _over(
            rows, keys, values, seen, ranks, first, last, begin, end, along, line, scale, DEPTH, TILE, SLOTS, ROWS
        )
        mine = (tl.program_id(0).to(tl.int64) * shares + share) * TILE + tile
        tl.store(tops + mine, top, mask=real)
        tl.store(totals + mine, total, mask=real)
        tl.store(partial + mine[:, None] * DEPTH + depth[None, :], found, mask=real[:, None])
        if not APART:
            tl.debug_barrier()  # All of this program's stores come before its arrival
            programs = shared + (live - shared) * count - 1  # Besides this one
            if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == programs:
                tl.store(arrived + tl.program_id(0), 0)
                real = (node < count) & (member < GROUPS)
                joined = _joined(partial, tops, totals, mine - share * TILE, real, depth, live, DEPTH, TILE, TILE)
                tl.store(
                    out + head[:, None] * DEPTH + depth[None, :], joined.to(out.dtype.element_ty), mask=real[:, None]
                )


@triton.jit
def _joined(
    partial, tops, totals, every, real, depth, live, DEPTH: tl.constexpr, COUNT: tl.constexpr, TILE: tl.constexpr
):
    """Return the attention (COUNT, DEPTH) of the shares that are live, added up in their order. They are read past
    the processor's own cache, which may hold what stood there before.
    """
    top = tl.full((COUNT,), float("-inf"), tl.float32)
    total = tl.zeros((COUNT,), tl.float32)
    found = tl.zeros((COUNT, DEPTH), tl.float32)
    for share in range(0, live):
        place = every + share * TILE
        own = tl.load(tops + place, mask=real, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(top, own)
        kept, weight = tl.exp(top - higher), tl.exp(own - higher)
        more = tl.load(totals + place, mask=real, other=1.0, cache_modifier=".cg")
        parts = partial + place[:, None] * DEPTH + depth[None, :]
        total = total * kept + more * weight
        found = found * kept[:, None] + weight[:, None] * tl.load(
            parts, mask=real[:, None], other=0.0, cache_modifier=".cg"
        )
        top = higher
    return found / total[:, None]


@triton.jit(do_not_specialize=["count", "width", "shares"])
def _join(
    places,
    out,
    partial,
    tops,
    totals,
    slots,
    key_heads,
    count,
    width,
    shares,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARE: tl.constexpr,
    LARGE_SHARE: tl.constexpr,
    LARGE_FROM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    follow(OVERLAP)
    sequence, group, tile = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads, tl.program_id(1)
    node, member = tile % ROWS, tile // ROWS
    if (node < count) & (member < GROUPS):
        _, _, end = _ends(places, sequence, count, slots, ROWS)
        live = _live(tl.minimum(end, width), SHARE, LARGE_SHARE, LARGE_FROM)
        depth, one = tl.arange(0, DEPTH), tl.arange(0, 1)
        every = tl.program_id(0).to(tl.int64) * shares * TILE + tile + one
        joined = _joined(partial, tops, totals, every, one == 0, depth, live, DEPTH, 1, TILE)
        head = (sequence * count + node) * (key_heads * GROUPS) + group * GROUPS + member + one
        tl.store(out + head[:, None] * DEPTH + depth[None, :], joined.to(out.dtype.element_ty))
