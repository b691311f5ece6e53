"""The JSON file in which ``forerun tune skip-layers`` leaves what it found. Knows no search and runs no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.drafters.self_drafting.skipping.sublayers import SkipSet, names, parse
from forerun.errors import ArgumentError, DataError
from forerun.writing import written

if TYPE_CHECKING:
    from forerun.target import Target

FORMAT = "forerun-skip-layers"
_STRUCTURE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""What makes a set of sub-layers transferable: two checkpoints that agree in these are taken for relatives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipFile:
    """A tuned set of sub-layers and where it comes from."""

    model: str
    """Directory or hub id it was tuned on; for the reader, not compared: the same model may lie elsewhere."""
    num_layers: int
    structure: str
    """`structure_hash` of the model."""
    skip: SkipSet
    num_speculative_tokens: int
    """Length of the chain at which the set was the cheapest, tokens."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the set, of plain decoding, and the setting they hold for."""
    trace: list[dict[str, Any]] = field(default_factory=list)
    """Every set that was tried, in order."""

    def write(self, path: Path) -> None:
        """Write the file; it is whole or not there.

        Raises:
            DataError: it cannot be written.
        """
        body = {
            "format": FORMAT,
            "model": self.model,
            "num_layers": self.num_layers,
            "structure": self.structure,
            "skip": names(self.skip),
            "num_speculative_tokens": self.num_speculative_tokens,
            "measured": dict(self.measured),
            "trace": self.trace,
        }
        try:
            with written(path) as fresh:
                fresh.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}. Choose another --output.") from error

    def check(self, target: Target, path: Path) -> None:
        """Raise ArgumentError unless the set was tuned on a model like this one."""
        remedy = f"Tune a set for this model: forerun tune skip-layers MODEL --output {path.name}"
        if self.num_layers != target.num_layers:
            raise ArgumentError(
                f"{path} was tuned on {self.model} with {self.num_layers} layers; this model has {target.num_layers}. "
                f"{remedy}"
            )
        if self.structure != structure_hash(target):
            raise ArgumentError(f"{path} was tuned on {self.model}, which is built differently. {remedy}")


def structure_hash(target: Target) -> str:
    """What kind of model this is: a hash of family and sizes, not of the weights."""
    facts = {name: getattr(target.config, name, None) for name in _STRUCTURE}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def read(path: Path) -> SkipFile:
    """The file at `path`.

    Raises:
        DataError: it is missing, no JSON, or not what the tuner writes.
        ArgumentError: it names sub-layers that its model does not have.
    """
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the skipped sub-layers from {path}: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise DataError(f"{path} is not a file that forerun tune skip-layers wrote: it lacks 'format': {FORMAT!r}")
    try:
        return SkipFile(
            model=str(body["model"]),
            num_layers=int(body["num_layers"]),
            structure=str(body["structure"]),
            skip=parse(body["skip"], int(body["num_layers"])),
            num_speculative_tokens=int(body["num_speculative_tokens"]),
            measured=body.get("measured", {}),
            trace=body.get("trace", []),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise DataError(f"{path} is damaged ({error!r}); tune again") from error
