"""Attention to compressed windows of tokens (DeepSeek-V4): one entry for every few tokens, from keys and gates of each.

transformers keeps the entries, and drains what they were made of. Here keys and gates stay in their tokens' slots, as
an index's keys do, so that nothing has to be taken back; entries are made anew in each pass. A window of committed
tokens makes one entry for all nodes. One that ends in a tree makes one for each node, of the tokens on its path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from forerun.model.positions import Positions
from forerun.model.switches import Function, names_of, redirect

KEPT = "store_compression_weights"  # The method of transformers' cache that keeps what entries are made of
INDEX, OVERLAP = "scorer", "indexer"  # Modules of what chooses among entries, and of what makes overlapping ones


def compresses(kinds: Iterable[type[nn.Module]]) -> bool:
    """Return whether classes of layers keep compressed windows."""
    return any(KEPT in names_of(kind) for kind in kinds)


def install(model: nn.Module) -> bool:
    """Redirect what compresses windows in a model to ours while a pass of forerun runs, and return whether any does."""
    compresses_any = False
    for module in model.modules():
        names = set(names_of(type(module)))
        if KEPT in names:
            ours = choose if INDEX in names else attend_to_chosen if OVERLAP in names else attend_to_all
            redirect(type(module), "forward", ours, lambda this: this.positions)
            compresses_any = True
    return compresses_any


@dataclass(frozen=True, slots=True)
class _Entries:
    values: Tensor  # (B, T, D)
    visible: Tensor  # (B, N, T) bool


def attend_to_all(
    positions: Positions, original: Function, module: Any, hidden_states: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    """Run the compressor of heavily compressed attention: entries (B, 1, T, D), and the mask (B, 1, N, T)."""
    entries = _compress(positions, original, module, hidden_states, args[2], overlap=False)
    return entries.values.unsqueeze(1), _mask(entries.visible, entries.values)


def attend_to_chosen(
    positions: Positions, original: Function, module: Any, hidden_states: Tensor, *args: Any
) -> tuple[Tensor, Tensor]:
    """Run the compressor of compressed sparse attention: entries (B, 1, T, D), and the mask (B, 1, N, T)."""
    entries = _compress(positions, original, module, hidden_states, args[2], overlap=True)
    return entries.values.unsqueeze(1), _mask(module.indexer(hidden_states, *args), entries.values)


def choose(positions: Positions, original: Function, module: Any, hidden_states: Tensor, *args: Any) -> Tensor:
    """Run the indexer: which entries each token attends to, (B, N, T) bool."""
    residual, position_ids, cache = args[:3]
    entries = _compress(positions, original, module, hidden_states, cache, overlap=True)
    cos, sin = module.rotary_emb(hidden_states, position_ids=position_ids, layer_type=module.rope_layer_type)
    queries = module.q_b_proj(residual).view(*hidden_states.shape[:2], -1, module.head_dim).transpose(1, 2)
    queries = _turn(original)(queries, cos, sin).transpose(1, 2)
    scores = module.scorer(queries, entries.values, hidden_states).masked_fill(~entries.visible, float("-inf"))
    best = scores.topk(min(module.index_topk, scores.shape[2]), dim=2).indices
    return torch.zeros_like(entries.visible).scatter(2, best, True) & entries.visible


def _mask(visible: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill(~visible, float("-inf")).unsqueeze(1)


def _turn(original: Function) -> Callable[..., Tensor]:
    """Return the function of the modelling file that applies a rope."""
    found: Callable[..., Tensor] = inspect.unwrap(original).__globals__["apply_rotary_pos_emb"]
    return found


def _compress(
    positions: Positions, original: Function, module: Any, hidden_states: Tensor, cache: Any, *, overlap: bool
) -> _Entries:
    """Return the entries that the tokens of a pass may see, and which of them each sees."""
    rate = module.compress_rate
    both = torch.cat([module.kv_proj(hidden_states), module.gate_proj(hidden_states)], 2)
    keys = cache.update_indexer(both, id(module))  # (B, W, 2 D), or of two series
    count = keys.shape[1] // rate
    lines = torch.arange(len(keys), device=keys.device).view(-1, 1, 1)
    windows = keys[:, : count * rate].unflatten(1, (count, rate))
    before = functional.pad(windows, (0, 0, 0, 0, 1, 0))[:, :-1]
    numbers = torch.arange(count, device=keys.device).expand(len(keys), -1)  # (B, T)
    ends = numbers * rate + rate - 1
    visible = ends.unsqueeze(1) <= positions.queries.unsqueeze(2)
    if positions.tree is not None:
        tree = positions.tree
        nodes = positions.queries.shape[1]
        most = -(-tree.sees.shape[2] // rate)
        # (B, E) windows that may end in the tree
        in_tree = tree.lengths.unsqueeze(1) // rate + torch.arange(most, device=keys.device)
        spans = (in_tree * rate).unsqueeze(2) + torch.arange(-rate, rate, device=keys.device)
        pieces = keys[lines, tree.slots_of(spans.flatten(1)).view(len(keys), nodes * most, 2 * rate)]
        windows = torch.cat([windows, pieces[:, :, rate:]], dim=1)
        before = torch.cat([before, pieces[:, :, :rate]], dim=1)
        numbers = torch.cat([numbers, in_tree.repeat(1, nodes)], dim=1)
        ended = (in_tree * rate + rate - 1).unsqueeze(1) <= positions.queries.unsqueeze(2)  # (B, N, E)
        each = torch.eye(nodes, dtype=torch.bool, device=keys.device).unsqueeze(2)
        committed = ends < tree.lengths.unsqueeze(1)
        visible = torch.cat([visible & committed.unsqueeze(1), (each & ended.unsqueeze(2)).flatten(2)], dim=2)
    values = _pool(module, windows, before, numbers == 0, overlap=overlap)
    cos, sin = module.rotary_emb(values, position_ids=numbers * rate, layer_type=module.rope_layer_type)
    return _Entries(_turn(original)(values.unsqueeze(1), cos, sin).squeeze(1), visible)


def _pool(module: Any, windows: Tensor, before: Tensor, opening: Tensor, *, overlap: bool) -> Tensor:
    """Return entries (B, T, D): averages over windows (B, T, rate, ..), and those before them if they `overlap`."""
    keys, gates = windows.chunk(2, dim=3)
    gates = gates + module.position_bias
    if overlap:
        earlier, their_gates = before.chunk(2, dim=3)
        their_gates = (their_gates + module.position_bias).masked_fill(
            opening.view(*opening.shape, 1, 1), float("-inf")
        )
        size = module.head_dim
        keys = torch.cat([earlier[..., :size], keys[..., size:]], dim=2)
        gates = torch.cat([their_gates[..., :size], gates[..., size:]], dim=2)
    weights = gates.softmax(dim=2, dtype=torch.float32).to(keys.dtype)
    entries: Tensor = module.kv_norm((keys * weights).sum(dim=2))
    return entries
