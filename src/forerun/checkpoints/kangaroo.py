"""Kangaroo's own format (Equationliu/Kangaroo, ``kangaroo/adapter.py``): a Llama's keys in
``config.json``, for one layer, and tensors ``layers.0.input_layernorm``,
``layers.0.self_attn.*_proj`` and ``norm``.

Its file does not say after how many layers of the target the adapter stands, which its code is told on the command line
(``--exitlayer``): here it is the key ``exit_layer``, which also tells these files from an EAGLE head's. The published
``pytorch_model.bin`` is a pickle and is refused.
"""

from __future__ import annotations

from forerun.checkpoints import eagle
from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.drafters.heads.kangaroo import KangarooConfig
from forerun.errors import CheckpointError
from forerun.head_keys import Keys

EXIT = "exit_layer"
ARCHITECTURE = "LlamaForCausalLM"  # Named so in the published files, although it is none


class KangarooFormat(Format):
    """Adapters of Equationliu/Kangaroo, as safetensors."""

    name = "kangaroo"
    mark = EXIT

    def recognises(self, config: Config) -> bool:
        return EXIT in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        exit_layer, fields = keys.integer(EXIT), eagle.read_layers(keys)
        for name in ("architectures", "tie_word_embeddings"):
            keys.get(name)  # said again when written
        if num_layers is not None and not 1 <= exit_layer < num_layers:
            raise CheckpointError(
                f"{EXIT} of config.json is {exit_layer}: expected 1..{num_layers - 1} for a target of {num_layers} "
                "layers"
            )
        notes = {eagle.WINDOW_NOTE: fields["sliding_window"] is not None and keys.get("layer_types") is None}
        return eagle.make_head(
            KangarooConfig,
            eagle.to_canonical(tensors),
            notes,
            **fields,
            qk_norm=False,
            target_hidden_size=fields["hidden_size"],
            draft_vocab_size=fields["vocab_size"],
            boundaries=(exit_layer,),
            extra=keys.rest(),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        keys = {
            "architectures": [ARCHITECTURE],
            **eagle.write_layers(config),
            "torch_dtype": eagle.dtype_name(checkpoint),
            EXIT: config.boundaries[0],
        }
        tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "d2t"}
        return {**config.extra, **keys}, tensors
