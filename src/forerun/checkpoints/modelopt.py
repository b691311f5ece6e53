"""NVIDIA ModelOpt's export: flat keys, an ``eagle_config`` that describes the layer norms, tensors ``layers.0.*``.

ModelOpt counts layers from 0; the boundary list is written too, because vLLM reads nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.checkpoints.eagle import to_file
from forerun.checkpoints.flat import REGULAR, read_flat, write_flat
from forerun.checkpoints.keys import NESTED
from forerun.errors import CheckpointError

LAYER_NORMS = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
"""ModelOpt's own keys, at the values that make an EAGLE-3 head; with others it is a head of another kind."""


class ModelOptFormat(Format):
    """EAGLE-3 heads that ModelOpt's ``export_hf_checkpoint`` writes."""

    name = "modelopt"
    mark = "eagle"

    def recognises(self, config: Config) -> bool:
        """By keys inside ``eagle_config`` that nobody else writes."""
        nested = config.get(NESTED)
        return isinstance(nested, Mapping) and any(key in nested for key in LAYER_NORMS)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        nested = dict(config[NESTED])
        for key, needed in LAYER_NORMS.items():
            found = nested.pop(key, None)
            if found not in (None, needed):  # those that it no longer uses are null
                raise CheckpointError(
                    f"{NESTED}.{key} is {found!r}, an EAGLE-3 head has {needed!r}; ModelOpt's other kinds of heads are "
                    "not supported"
                )
        return read_flat({**config, NESTED: nested}, tensors, num_layers)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        # Like ModelOpt, without ``t2d``.
        if checkpoint.config.generation != 3:
            raise CheckpointError("ModelOpt's format is written for EAGLE-3 heads only; use flat for EAGLE-1 and -2")
        keys = write_flat(checkpoint)
        return {**keys, NESTED: {REGULAR: True, **keys[NESTED], **LAYER_NORMS}}, to_file(checkpoint, t2d=False)
