"""Models that count a token's position from its place in the cache are told the positions of a pass.

Siblings of a tree stand in different places at the same position. Tables of positions (BART's decoder and its kin) take
those of the tokens that run; ALiBi (arXiv 2108.12409) takes those of the keys, since a softmax does not change when the
same number is added for all keys of a query; local attention (GPT-Neo) and biases by distance (Inkling) take both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forerun.model.masks import Block
from forerun.model.switches import Function, names_of, redirect

TABLE = {"cache_length", "position_ids"}  # Arguments of a table of positions that counts from the cache's length
ALIBI = ("build_alibi_tensor", "build_mpt_alibi_tensor")  # What makes a model's biases
BIASED = {"position_bias", "Wqkv"}  # An argument and a part of MPT's attention, which takes one bias for all rows
DISTANT = {"relative_states", "key_positions"}  # Arguments of what makes Inkling's biases by distance
DISTANCE = "get_relative_distance"  # The function that makes Inkling 2's distances
INDEXED = "indexer_position_ids"  # Where Qwen4 keeps its keys' positions
LOCAL = "_attn"  # The method of GPT-Neo's attention, which keeps a window by a table of places


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of the tokens of a pass, and of the keys in the slots that they may look at."""

    queries: Tensor  # (B, N) int64, as they are handed to the model
    keys: Tensor  # (B, W) int64
    tree: Block | None = None  # Where its tokens stand, if they branch

    @property
    def distances(self) -> Tensor:
        """(B, 1, N, W) int64 from each query back to each key."""
        return (self.queries.unsqueeze(2) - self.keys.unsqueeze(1)).unsqueeze(1)


def install(model: nn.Module) -> bool:
    """Redirect what counts positions in a model to ours while a pass of forerun runs. Returns whether there is any."""
    functions = _find(model)
    for kind, by_name in functions.items():
        for name, ours in by_name.items():
            redirect(kind, name, ours, lambda this: this.positions)
    return bool(functions)


def counts_positions(model: nn.Module) -> bool:
    """Return whether a model counts positions from its cache, or from the place of a token, whatever it is given."""
    return bool(_find(model))


def _find(model: nn.Module) -> dict[type[nn.Module], dict[str, Function]]:
    """Return the classes of a model's modules that count positions, and by name what is redirected to ours of each."""
    functions: dict[type[nn.Module], dict[str, Function]] = {}
    for kind, module in {type(module): module for module in model.modules()}.items():
        names = set(names_of(kind))
        by_name: dict[str, Function] = dict.fromkeys(names.intersection(ALIBI), take_biases)
        if names >= TABLE and issubclass(kind, nn.Embedding):
            by_name["forward"] = look_up
        elif names >= BIASED:
            by_name["forward"] = attend_with_biases
        elif LOCAL in names and hasattr(module, "attention_type"):
            by_name[LOCAL] = attend_locally
        elif names >= DISTANT:
            by_name["forward"] = weigh_distances
        by_name.update(dict.fromkeys(names.intersection({DISTANCE}), take_distances))
        if by_name or INDEXED in names:
            functions[kind] = by_name
    return functions


def look_up(positions: Positions, original: Function, table: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """Return a table's entries (B, N, H); some tables take positions of one row alone."""
    kwargs["position_ids"] = positions.queries.flatten()
    found: Tensor = original(table, *args, **kwargs)
    return found.view(*positions.queries.shape, -1)


def take_biases(positions: Positions, original: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Return ALiBi's biases (B * heads, 1, W), taken from those of a text without padding."""
    text = torch.ones(1, positions.keys.shape[1], dtype=torch.int64, device=positions.keys.device)
    arguments = [text if isinstance(argument, Tensor) else argument for argument in args]
    biases = original(*arguments, **kwargs).squeeze(1)
    return biases[:, positions.keys].transpose(0, 1).flatten(0, 1).unsqueeze(1)


def attend_with_biases(
    _positions: Positions,
    _original: Function,
    module: Any,
    hidden_states: Tensor,
    *,
    position_bias: Tensor,
    attention_mask: Tensor,
    cache: Any,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Run MPT's attention, whose own takes one bias for all rows. Its mask is True where a query may not look."""
    states = module.Wqkv(hidden_states)
    if module.clip_qkv:
        states = states.clamp(-module.clip_qkv, module.clip_qkv)
    shape = *hidden_states.shape[:2], module.n_heads, -1
    queries, keys, values = (part.reshape(shape).transpose(1, 2) for part in states.chunk(3, dim=2))
    keys, values = cache.update(keys, values, module.layer_idx)
    biases = position_bias.view(len(queries), module.n_heads, 1, -1)
    scores = queries @ keys.transpose(2, 3) * module.softmax_scale + biases
    scores = scores.masked_fill(attention_mask, torch.finfo(queries.dtype).min)
    weights = scores.float().softmax(-1).to(values.dtype)
    output: Tensor = module.out_proj((weights @ values).transpose(1, 2).flatten(2))
    return output, weights


def attend_locally(
    positions: Positions,
    _original: Function,
    module: Any,
    *args: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run GPT-Neo's attention on (B, heads, N, dim), global or within a window, in float32 and without a scale."""
    query, key, value, attention_mask = args
    scores = query.float() @ key.float().transpose(2, 3) + attention_mask
    if module.attention_type == "local":
        away = positions.distances >= module.config.window_size
        scores = scores.masked_fill(away, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).to(value.dtype)
    return weights @ value, weights


def take_distances(positions: Positions, _original: Function, *_args: Any, **_kwargs: Any) -> Tensor:
    """Return the distances (B, 1, N, W) from queries to keys."""
    return positions.distances


def weigh_distances(
    positions: Positions, _original: Function, module: Any, relative_states: Tensor, *_args: Tensor
) -> Tensor:
    """Return Inkling's biases (B, heads, N, W), 0 where a key is as far away as `rel_extent`."""
    distances, extent = positions.distances, module.rel_extent
    weights = (relative_states @ module.proj).transpose(1, 2)
    index = distances.clamp(0, extent - 1).expand(-1, weights.shape[1], -1, -1)
    return weights.gather(3, index).masked_fill((distances < 0) | (distances >= extent), 0)
