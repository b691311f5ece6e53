"""Attention over a key-value cache with grouped heads: the query heads of a group become rows, keys
are not repeated.

At 16 tokens transformers' own `sdpa` spends most of its time copying keys for `repeat_kv`; folding needs no copy. In
half precision our own kernels do it where the device has them (`fused`), else torch. On a CPU torch runs few rows in
kernels that sum in another order (one row on an Intel with AMX; one, two and three on an AMD with AVX-512), so that a
token's bits would depend on how many are scored with it: problems of fewer than `MIN_ROWS` rows are filled up with
copies there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.errors import UnsupportedModelError
from forerun.model.inputs import Pass, TreePaths, current
from forerun.model.kernels import acceptance, fused

NAME = "forerun_fold"  # Under which transformers knows it
TRIAL = "forerun_trial"  # The same while it is compared
MIN_ROWS = 4  # From this many rows on, every row's bits are the same on every processor that was tried


def fold_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' attention functions: (B, N, heads, D')
    or (1, M, heads, D'), and no weights. Raises UnsupportedModelError if the model uses a soft cap
    or attention sinks.

    Args:
        query: (B, heads, N, D); (1, heads, M, D) in a pass whose real tokens run behind each other (`inputs.Flat`).
        key: (B, kv_heads, W, D); those of all rows where the cache leaves it to attention to select them.
        value: (B, kv_heads, W, D')
        attention_mask: (B, 1, N, W), additive or boolean.
        kwargs: what else the model says.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} has a soft cap or sinks; load it with repack=False")
    if attention_mask is None or attention_mask.shape[1] != 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    this = current()
    if this.flat is not None:
        query = this.flat.restore(query.transpose(1, 2)).transpose(1, 2)
    attended = attend(query, key, value, attention_mask, this, scaling=scaling, dropout=dropout).contiguous()
    return attended if this.flat is None else this.flat.flatten(attended), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    this: Pass,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute `fold_attention` in `this` pass, over a rectangle of tokens: (B, N, heads, D')."""
    batch, heads, count, depth = query.shape
    ops = fused(query.device)
    if ops is not None and not dropout and ops.takes_attention(query, key, value, mask):
        scale = depth**-0.5 if scaling is None else scaling
        return ops.attend(query, key, value, mask, scale, this.rows, paths=this.paths)
    if this.rows is not None:
        key, value = key.index_select(0, this.rows), value.index_select(0, this.rows)
    if this.exact and this.paths is not None:
        query, key, value, mask = _apart(query, key, value, mask, this.paths)
        alone = attend(query, key, value, mask, Pass(), scaling=scaling, dropout=dropout)
        return alone.view(batch, count, heads, value.shape[-1])
    groups = heads // key.shape[1]
    copies = -(-MIN_ROWS // (groups * count)) if query.device.type == "cpu" else 1
    rows = query.reshape(batch, key.shape[1], groups * count, depth)
    if copies > 1:
        rows = torch.cat([rows] * copies, dim=2)
    mask = this.repeat(mask, groups * copies)
    seen = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return seen[:, :, : groups * count].reshape(batch, heads, count, value.shape[-1]).transpose(1, 2)


def _apart(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, paths: TreePaths
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn every node into a sequence of its own, of one query, with copies of the keys on its path
    in path order. A library's attention offers no other way to choose the order of the keys.
    """
    batch, width, longest = len(query), key.shape[2], paths.nodes.shape[2]
    ranks, lengths = torch.arange(width, device=query.device), paths.lengths.view(-1, 1, 1)
    behind = (ranks - lengths).expand(-1, query.shape[2], -1)  # (B, N, W)
    node = paths.nodes.long().gather(2, behind.clamp(0, longest - 1))
    there = (behind < 0) | (behind < longest) & (node >= 0)
    slots = ranks.where(behind < 0, lengths + node).where(there, 0)
    seen = mask[:, 0].expand(batch, -1, -1).gather(2, slots).where(there, torch.finfo(mask.dtype).min)
    index = torch.arange(batch, device=query.device).view(-1, 1, 1)
    keys, values = (part.transpose(1, 2)[index, slots].flatten(0, 1).transpose(1, 2) for part in (key, value))
    return query.transpose(1, 2).flatten(0, 1).unsqueeze(2), keys, values, seen.flatten(0, 1)[:, None, None]


def suits(model: Any) -> bool:
    """Return whether `model` runs transformers' ``sdpa``, which implies neither soft caps nor
    sinks.
    """
    return getattr(model.config, "_attn_implementation", None) == "sdpa"


def is_installed(model: Any) -> bool:
    """Return whether `model` uses `fold_attention`."""
    return getattr(model.config, "_attn_implementation", None) == NAME


def refusal(model: Any, ids: Tensor) -> str | None:
    """Run a plain pass over `ids` (B, N) with transformers' ``sdpa`` and compare it, in every
    layer, with `attend` on the same queries, keys and values. Returns a description of what
    differs, or None (see `acceptance`).
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    wrong = list[str]()

    def compared(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any
    ) -> Any:
        right: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **others)
        if others.get("indices") is not None:  # which `sdpa` is given as a part of the mask
            wrong.append(f"in layer {module.layer_idx}, where an index chooses the keys")
        count = query.shape[2]
        lowest = torch.finfo(query.dtype).min
        seen = torch.full((count, count), lowest, dtype=query.dtype, device=query.device).triu(1)
        seen = seen.expand(len(query), 1, -1, -1)
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            seen = attention_mask
        elif attention_mask is not None:
            seen = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, lowest)
        moved, _ = sdpa_attention_forward(module, acceptance.nudge(query), key, value, attention_mask, **others)
        ours = attend(query, key, value, seen, Pass(), scaling=others.get("scaling"))
        if (fault := acceptance.fault(ours, right[0], moved)) is not None:
            wrong.append(f"in layer {getattr(module, 'layer_idx', '?')} by {fault}")
        return right

    AttentionInterface.register(TRIAL, compared)
    AttentionMaskInterface.register(TRIAL, sdpa_mask)
    model.set_attn_implementation(TRIAL)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        model.set_attn_implementation("sdpa")
    return f"it differs from transformers' {', '.join(wrong)}" if wrong else None


@contextmanager
def unfold(module: Any) -> Iterator[None]:
    """Make an attention module of a model that uses `fold_attention` run transformers' ``sdpa``
    while open.
    """
    config = module.config
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = NAME


def install(model: Any) -> None:
    """Make `model` use `fold_attention`; `generate` and plain forwards of it stay right."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, fold_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
