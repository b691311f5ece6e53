"""NVIDIA ModelOpt's export: flat keys, an ``eagle_config`` that describes the layer norms, tensors ``layers.0.*``.

ModelOpt counts layers from 0; the boundary list is written too, because vLLM reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.checkpoints.eagle import to_file
from forerun.checkpoints.flat import REGULAR, read_flat, write_flat
from forerun.errors import CheckpointError
from forerun.head_keys import NESTED, NEUTRAL

NAMES = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "parallel_draft_step")
LAYER_NORMS = {name: NEUTRAL[name][0] for name in NAMES}
"""ModelOpt's own keys, at the values that make an EAGLE-3 head; other values make a head of another
kind.
"""


class ModelOptFormat(Format):
    """EAGLE-3 heads that ModelOpt's ``export_hf_checkpoint`` writes."""

    name = "modelopt"
    mark = "eagle"

    def recognises(self, config: Config) -> bool:
        """Return whether ``eagle_config`` has keys that nobody else writes."""
        nested = config.get(NESTED)
        return isinstance(nested, Mapping) and any(key in nested for key in LAYER_NORMS)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        # Keys that ModelOpt no longer uses are null; those of a head of another kind are refused by `Keys.rest`.
        nested = {name: value for name, value in config[NESTED].items() if value != LAYER_NORMS.get(name)}
        return read_flat({**config, NESTED: nested}, tensors, num_layers)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        # Written without ``t2d``, as ModelOpt does.
        if checkpoint.config.generation != 3:
            raise CheckpointError("ModelOpt's format is written for EAGLE-3 heads only; use flat for EAGLE-1 and -2")
        keys = write_flat(checkpoint)
        return {**keys, NESTED: {REGULAR: True, **keys[NESTED], **LAYER_NORMS}}, to_file(checkpoint, t2d=False)
