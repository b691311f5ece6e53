"""The formats: one file each and one line here. Importing this imports no torch and no format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.drafters.heads.kinds import named
from forerun.errors import ArgumentError, CheckpointError, nearest

if TYPE_CHECKING:
    from forerun.checkpoints.base import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the registry."""

    path: str
    """``module:Class``, imported when the format is used."""
    summary: str
    kinds: tuple[str, ...]
    """Kinds of heads that it carries."""
    engines: str = ""
    """``module:Class``, an `engines.Engines`, where heads of the kinds are written in this format: what serving engines
    make of them; empty: nothing is known."""


FORMATS: dict[str, Entry] = {
    "speculators": Entry(
        path="forerun.checkpoints.speculators:SpeculatorsFormat",
        summary="speculators_config and a nested transformer_layer_config; vLLM serves the directory by itself",
        kinds=("eagle3",),
    ),
    "modelopt": Entry(
        path="forerun.checkpoints.modelopt:ModelOptFormat",
        summary="NVIDIA ModelOpt's export: eagle_config with its layer norms, tensors named layers.0.*",
        kinds=("eagle3",),
    ),
    "medusa": Entry(
        path="forerun.checkpoints.medusa:MedusaFormat",
        summary="Medusa: medusa_lm_head.safetensors beside three keys; the sizes are those of the tensors",
        kinds=("medusa",),
    ),
    "flat": Entry(
        path="forerun.checkpoints.flat:FlatFormat",
        summary="EAGLE and SpecForge: one flat configuration, tensors named midlayer.*; every engine reads it",
        kinds=("eagle3", "eagle"),
        engines="forerun.checkpoints.eagle_engines:EagleEngines",
    ),
}
"""The first that recognises a configuration reads it, so the most particular come first."""


def format_named(name: str) -> Format:
    """The format behind a registered name.

    Raises:
        ArgumentError: there is no such format; the message names the nearest.
    """
    if name not in FORMATS:
        raise ArgumentError(f"unknown format {name!r}; there are {', '.join(FORMATS)}.{nearest(name, FORMATS)}")
    found: Format = named(FORMATS[name].path)()
    return found


def format_for(kind: str) -> str:
    """The name of the format in which heads of a kind are written: the least particular, which most engines read.

    Raises:
        ArgumentError: none carries them.
    """
    found = [name for name, entry in FORMATS.items() if kind in entry.kinds]
    if not found:
        raise ArgumentError(f"no checkpoint format carries heads of the kind {kind}")
    return found[-1]


def format_of(config: Mapping[str, Any]) -> Format:
    """The format that a ``config.json`` is written in.

    Raises:
        CheckpointError: it is none of ours.
    """
    for name in FORMATS:
        candidate = format_named(name)
        if candidate.recognises(config):
            return candidate
    raise CheckpointError(
        f"config.json is no head's in any known format ({', '.join(FORMATS)}); it has the keys "
        f"{', '.join(sorted(config)[:12]) or 'none'}"
    )
