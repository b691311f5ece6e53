"""A float32 copy of a model, whole or of its first layers: errors that rounding hides in 16 bits
show there.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn

from forerun.errors import ForerunError
from forerun.model.kernels import accelerate
from forerun.model.layers import base_name, base_of, is_quantised, layers_of, replace_module
from forerun.model.support import text_config

_log = logging.getLogger(__name__)


def float32_copy(model: Any, most_parameters: int, most_bytes: int) -> Any | None:
    """Return a float32 copy of a causal LM that shares nothing with it: whole where it has
    `most_parameters` at most, else its first layers, every kind of layer among them. None where
    there can be no such copy: quantised weights, layers that cannot be run in part, more than
    `most_bytes`.
    """
    if is_quantised(model):
        return None
    try:
        part = model if model.num_parameters() <= most_parameters else _first_layers(model)
    except ForerunError:
        return None
    if part is None or 4 * part.num_parameters() > most_bytes:
        return None
    twin = copy.deepcopy(part)
    for _ in accelerate.undo(twin):  # packed weights have no other dtype
        pass
    twin = twin.float().eval()
    if part is not model:
        try:
            with torch.inference_mode():
                twin(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=twin.device), use_cache=False)
        except Exception as error:  # whatever its code expects of its layers' number
            _log.debug("%s: its first layers do not run alone: %s", type(model).__name__, error)
            return None
    return twin


def is_spread(model: Any) -> bool:
    """Return whether modules stand on several devices, on disk, or in shards, so that repacking
    would break them.
    """
    placed = getattr(model, "hf_device_map", None) or {}
    return len(set(placed.values())) > 1 or "disk" in placed.values() or bool(getattr(model, "_tp_size", None))


def _first_layers(model: Any) -> Any | None:
    """Return a shallow copy with the fewest first layers among which there is one of every kind."""
    config = text_config(model)
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "hidden_size_per_layer_input", None):
        return None  # A layer's place in the list says what it reads
    name, layers = layers_of(base_of(model), config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, _parts(layer)) for kind, layer in zip(types, layers, strict=True)]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    path = f"{base_name(model)}.{name}"
    twin = replace_module(model, path, nn.ModuleList(layers[:count]))
    whole: Any = copy.deepcopy(model.config)
    part = whole.get_text_config(decoder=True)
    part.num_hidden_layers = count
    if getattr(part, "layer_types", None):
        part.layer_types = list(types[:count])
    # Every module along the path reads the configuration that it was made with: the whole or that of the text.
    owner: Any = twin
    for step in path.split("."):
        held = owner.__dict__.get("config")
        if held is not None:
            owner.__dict__["config"] = whole if held is model.config else part
        owner = owner.get_submodule(step)
    return twin


def _parts(layer: nn.Module) -> tuple[str, ...]:
    """Return the classes of a layer and of its modules, which tell dense layers from experts."""
    return tuple(sorted({type(module).__name__ for module in layer.modules()}))
