"""Decoder layers of a target's own class in transformers, as layers of a head: they attend over the head's cache.

Families differ in their norms, in a gate on attention's output, in how experts are chosen. A head whose layers are
those of its target takes transformers' own class, which is right by construction, and gives it an attention function
that hands queries, keys and values to the caller of the head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from forerun.heads.base import Attend

NAME = "forerun_head"
"""Name of `attend_outside` among transformers' attention functions."""
SMALLEST: dict[str, Any] = {"vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Keys of a model of which only the layers are used."""


def attend_outside(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, attend: Attend, scaling: float, **others: Any
) -> tuple[Tensor, None]:
    """Attend as the head's caller does, whose scale is one over the root of a query's size, in the only layer of the
    head that attends.
    """
    factor = scaling * math.sqrt(query.shape[-1])
    if not math.isclose(factor, 1.0):
        query = query * factor
    return attend(0, query, key, value), None


def build_layers(target: Mapping[str, Any], kinds: Sequence[str]) -> nn.ModuleList:
    """Build decoder layers of these `kinds`, of which one attends, for the `target` with these keys of a transformers
    configuration.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModel

    AttentionInterface.register(NAME, attend_outside)
    sizes = {"num_hidden_layers": len(kinds), "layer_types": list(kinds)}
    config = AutoConfig.for_model(**{**target, **SMALLEST, **sizes})
    layers: nn.ModuleList = AutoModel.from_config(config, attn_implementation=NAME).layers
    return layers


def norm_class(layers: nn.Module) -> type[nn.Module]:
    """Return the class of the norms in these layers."""
    return next(type(part) for name, part in layers.named_modules() if "norm" in name)


def run_layers(layers: nn.ModuleList, states: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
    """Run the layers of `build_layers`: (B, N, H) -> (B, N, H), the residual stream after them."""
    for layer in layers:
        made = layer(states, position_embeddings=angles, attention_mask=None, attend=attend)
        states = made[0] if isinstance(made, tuple) else made
    return states
