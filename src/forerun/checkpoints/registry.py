"""The formats: one file each and one line here. Importing this imports no torch and no format."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, CheckpointError, nearest

if TYPE_CHECKING:
    from forerun.checkpoints.base import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One line of the registry."""

    path: str
    """``module:Class``, imported when the format is used."""
    summary: str


FORMATS: dict[str, Entry] = {
    "speculators": Entry(
        path="forerun.checkpoints.layout:SpeculatorsFormat",
        summary="speculators_config and a nested transformer_layer_config; vLLM serves the directory by itself",
    ),
    "modelopt": Entry(
        path="forerun.checkpoints.modelopt:ModelOptFormat",
        summary="NVIDIA ModelOpt's export: eagle_config with its layer norms, tensors named layers.0.*",
    ),
    "flat": Entry(
        path="forerun.checkpoints.flat:FlatFormat",
        summary="EAGLE and SpecForge: one flat configuration, tensors named midlayer.*; every engine reads it",
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
    module, _, attribute = FORMATS[name].path.partition(":")
    found: Format = getattr(importlib.import_module(module), attribute)()
    return found


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
        f"config.json is no EAGLE head's in any known format ({', '.join(FORMATS)}); it has the keys "
        f"{', '.join(sorted(config)[:12]) or 'none'}"
    )
