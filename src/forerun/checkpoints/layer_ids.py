"""Where the target's hidden states are read, in the two ways that files say it, and ours.

Ours is the boundary b: the state after b layers. Top-level lists (vLLM, EAGLE, speculators) mean the same. Lists inside
``eagle_config`` (SGLang, SpecForge, ModelOpt) and TensorRT-LLM's YAML name the 0-based layer whose output is read, one
less. Taking one for the other costs most of the acceptance and raises no error anywhere. Reads no file.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.checkpoints.keys import NESTED
from forerun.drafters.heads.eagle import default_boundaries
from forerun.errors import ArgumentError, CheckpointError
from forerun.types import LAST_HIDDEN

IDS = "eagle_aux_hidden_state_layer_ids"
"""The key's name, at the top and in `NESTED`."""


def to_outputs(boundaries: Sequence[int]) -> list[int]:
    """0-based layers whose outputs are these boundaries.

    Raises:
        CheckpointError: one is the state after the final norm, which no format has an id for.
    """
    if LAST_HIDDEN in boundaries:
        raise CheckpointError(
            "the head reads the target's state after the final norm; no format of EAGLE-3 heads has a layer id for "
            "that. Train the head on boundaries instead."
        )
    return [boundary - 1 for boundary in boundaries]


def from_outputs(layers: Sequence[int]) -> tuple[int, ...]:
    """Boundaries after these 0-based layers."""
    return tuple(layer + 1 for layer in layers)


def agreed(
    top: Sequence[int] | None, nested: Sequence[int] | None, *, count: int | None, num_layers: int | None
) -> tuple[int, ...]:
    """The boundaries that a file means.

    Args:
        top: boundary ids, if the file has them.
        nested: ids of 0-based layers, if the file has them.
        count: how many hidden states the file says that the head reads.
        num_layers: of the target; needed where the file has no ids, to know the default.

    Raises:
        CheckpointError: the lists contradict each other or `count`, or there are none and `num_layers` is unknown.
    """
    if top is not None and nested is not None and tuple(top) != from_outputs(nested):
        raise CheckpointError(
            f"config.json contradicts itself about the target's layers: {IDS} {list(top)} counts boundaries, "
            f"{NESTED}.{IDS} {list(nested)} counts layers from 0 and so means the boundaries "
            f"{list(from_outputs(nested))}. Find out which ones the head was trained on and correct the other."
        )
    if top is not None:
        found = tuple(top)
    elif nested is not None:
        found = from_outputs(nested)
    else:
        found = _default(num_layers)
    if count is not None and count != len(found):
        raise CheckpointError(f"num_aux_hidden_states is {count}, but {IDS} means {len(found)} boundaries {found}")
    return found


def is_default(boundaries: Sequence[int], num_layers: int) -> bool:
    """Whether engines that are told no ids would read these boundaries of such a target."""
    return tuple(boundaries) == (2, num_layers // 2, num_layers - 3)


def _default(num_layers: int | None) -> tuple[int, ...]:
    if num_layers is None:
        raise CheckpointError(
            f"config.json names no layers ({IDS}), so it means the default, which depends on the target's number of "
            "layers: name the target"
        )
    try:
        return default_boundaries(num_layers)
    except ArgumentError as error:
        raise CheckpointError(str(error)) from error
