"""What a converted model leaves on disk beside its base, and the head that an engine gets. Attaches nothing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.checkpoints import HeadCheckpoint, TargetFacts
from forerun.errors import CheckpointError
from forerun.training.convert.settings import ConvertSettings
from forerun.writing import written

FOLDER = "eagle_head"
"""Of the head, inside the model's directory."""
MARKER = "forerun_convert.json"
"""Says that a directory holds a converted model, and with which settings it was converted."""


def write_settings(directory: Path, given: Mapping[str, Any]) -> None:
    """Write the marker; a reader never sees half of it."""
    with written(directory / MARKER) as fresh:
        fresh.write_text(json.dumps({"algorithm": "eagle", "config": given}, indent=2) + "\n", encoding="utf-8")


def read_settings(directory: Path) -> Any:
    """What `convert` was given when the model in `directory` was converted; None: it is no converted model's.

    Raises:
        CheckpointError: the marker is no JSON.
    """
    file = directory / MARKER
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error


def target_facts(model: Any, name: str) -> TargetFacts:
    """What a head's file says of its base model, found under `name`."""
    facts = TargetFacts.of(model.config, name)
    return facts if facts.architectures else dataclasses.replace(facts, architectures=(type(model).__name__,))


def for_export(model: Any, settings: ConvertSettings) -> HeadCheckpoint:
    """The head of a converted model as engines want it: an output head of its own, the dtype that was asked for."""
    found = HeadCheckpoint.of(model.eagle_module)
    config, tensors = found.config, dict(found.tensors)
    if config.generation == 3 and not config.own_lm_head:
        config = dataclasses.replace(config, own_lm_head=True)
        tensors["lm_head.weight"] = model.get_output_embeddings().weight.detach().cpu().clone()
    if settings.export_rope_scaling is not None and config.rope_scaling is None:
        config = dataclasses.replace(config, rope_scaling=dict(settings.export_rope_scaling))
    dtype: torch.dtype = getattr(torch, settings.export_dtype)
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return HeadCheckpoint(config=config, tensors=tensors)
