"""The target's final norm alone, from its checkpoint: turns a raw last boundary into LAST_HIDDEN without the target.

For sources that give the residual stream but not the normed state. Reads one or two small tensors.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from forerun.errors import CheckpointError, UnsupportedModelError
from forerun.target.layers import base_name, base_of, norm_after_layers
from forerun.target.load import read_header, weight_files


class FinalNorm:
    """Raw states (.., Ht) after the last layer -> states after the final norm, on the CPU."""

    def __init__(self, directory: Path, config: Any) -> None:
        """Find the norm in the model's skeleton and load its weights.

        Args:
            directory: the target's checkpoint.
            config: its configuration, as transformers reads it.

        Raises:
            UnsupportedModelError: the module after the layers cannot be told.
            CheckpointError: its weights are not in the checkpoint.
        """
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        base = base_of(model)
        try:
            name, norm = norm_after_layers(base, config.get_text_config(decoder=True).num_hidden_layers)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; use --source transformers") from None
        prefixes = (f"{base_name(model)}.{name}.", f"{name}.")
        stored = _stored(directory, prefixes, set(norm.state_dict()))
        self._norm = norm.to_empty(device="cpu").eval().requires_grad_(False)
        self._norm.load_state_dict(stored, assign=True)
        self._dtype = next(iter(stored.values())).dtype

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """(.., Ht) -> (.., Ht), in the dtype of the norm's weights."""
        normed: Tensor = self._norm(states.cpu().to(self._dtype))
        return normed


def _stored(directory: Path, prefixes: tuple[str, ...], names: set[str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in weight_files(directory):
        held = set(read_header(path))
        wanted = {prefix + name: name for prefix in prefixes for name in names if prefix + name in held}
        if wanted:
            with safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(key) for key, name in wanted.items()}
    if set(found) != names:
        raise CheckpointError(f"{directory} lacks the final norm's {', '.join(sorted(names - set(found)))}")
    return found
