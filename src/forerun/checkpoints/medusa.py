"""Medusa's own format: three keys in ``config.json``, tensors ``DEPTH.LAYER.*`` in ``medusa_lm_head.safetensors``.

The sizes are those of the tensors. vLLM (to 0.32, ``MedusaConfig``, ``models/medusa.py``) reads the tensors by the same
names, and wants keys for the sizes and the biases, without which it drops these; they are written, too. The published
``medusa_lm_head.pt`` is a pickle and is refused.
"""

from __future__ import annotations

import re

from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.drafters.heads.medusa import MedusaConfig
from forerun.errors import ArgumentError, CheckpointError
from forerun.head_keys import Keys
from forerun.types import LAST_HIDDEN

HEADS, LAYERS, TARGET = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
ENGINE = {"model_type": "medusa", "architectures": ["MedusaModel"], "medusa_fc_bias": True}
"""Keys and values that vLLM looks for."""
NAME = re.compile(r"(?:medusa_head\.)?(\d+\.\d+\.(?:linear\.)?(?:weight|bias))")


class MedusaFormat(Format):
    """Heads of FasterDecoding/Medusa, as safetensors."""

    name = "medusa"
    mark = "medusa"
    weights = "medusa_lm_head.safetensors"

    def recognises(self, config: Config) -> bool:
        return HEADS in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        heads, layers = keys.integer(HEADS), keys.integer(LAYERS, 1)
        for stated in (TARGET, "hidden_size", "vocab_size", *ENGINE):
            keys.get(stated)  # said again when written
        found = {}
        for stored, tensor in tensors.items():
            name = NAME.fullmatch(stored)
            if name is None:
                raise CheckpointError(f"the tensor {stored} is none of a Medusa head; expected DEPTH.LAYER.weight")
            found[f"heads.{name[1]}"] = tensor
        output = found.get(f"heads.0.{layers}.weight")
        if output is None or output.dim() != 2:
            raise CheckpointError(f"there is no output head 0.{layers}.weight after {layers} layers ({LAYERS})")
        vocab_size, size = output.shape
        try:
            head = MedusaConfig(
                num_heads=heads,
                num_layers=layers,
                target_hidden_size=size,
                vocab_size=vocab_size,
                draft_vocab_size=vocab_size,
                boundaries=(LAST_HIDDEN,),
                extra=keys.rest(),
            )
        except ArgumentError as error:
            raise CheckpointError(f"config.json describes no head that can be built: {error}") from error
        return HeadCheckpoint(config=head, tensors=found)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
        keys = {TARGET: target.name_or_path, HEADS: config.num_heads, LAYERS: config.num_layers, **sizes, **ENGINE}
        tensors = {name.removeprefix("heads."): tensor for name, tensor in checkpoint.tensors.items()}
        return {**config.extra, **keys}, tensors
