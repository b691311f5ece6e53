"""Hydra's own format (zankner/Hydra, ``hydra_model.py``, ``hydra_heads/``): keys ``hydra_*`` in
``config.json``, and in ``hydra_lm_head.safetensors`` tensors ``hydra_mlp.DEPTH.*``,
``hydra_lm_head.DEPTH.*`` and ``prefix_embeding_layer.*``.

Its loader takes the prefix layer's shape from the target's configuration; here the same keys stand in the file. The
published ``hydra_lm_head.pt`` is a pickle and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.checkpoints import eagle
from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.drafters.heads.hydra import HydraConfig
from forerun.errors import CheckpointError
from forerun.head_keys import Keys
from forerun.types import LAST_HIDDEN

HEADS, LAYERS, ARCHITECTURE = "hydra_num_heads", "hydra_num_layers", "hydra_head_arch"
TARGET = "base_model_name_or_path"
OURS = (HEADS, LAYERS, ARCHITECTURE, TARGET, "grounded_heads", "hidden_state_offset")
MLP, PREFIX_MLP = "mlp", "prefix-mlp"
PREFIX = "prefix_embeding_layer."  # The prefix as it is spelled there
UNREAD = re.compile(re.escape(PREFIX) + r"(embed_tokens\.weight|.*rotary_emb\.inv_freq)")
"""Matches tensors that Hydra's code stores and never reads, or recomputes."""
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.(?:weight|bias))")
OUTPUT = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


class HydraFormat(Format):
    """Heads of zankner/Hydra, as safetensors."""

    name = "hydra"
    mark = HEADS
    weights = "hydra_lm_head.safetensors"

    def recognises(self, config: Config) -> bool:
        return HEADS in config

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        heads, layers, kind = keys.integer(HEADS), keys.integer(LAYERS, 1), keys.text(ARCHITECTURE, MLP)
        target = keys.get(TARGET)  # said again when written
        if kind not in (MLP, PREFIX_MLP):
            raise CheckpointError(f"{ARCHITECTURE} is {kind!r}; heads of the kinds {MLP} and {PREFIX_MLP} are read")
        if not keys.flag("grounded_heads") or keys.integer("hidden_state_offset", 0):
            raise CheckpointError(
                "grounded_heads must be true and hidden_state_offset 0: other heads read no drafted tokens, or another "
                f"state than the last; got {config.get('grounded_heads')!r}, {config.get('hidden_state_offset')!r}"
            )
        if kind == PREFIX_MLP and config.get("num_attention_heads") is None:
            raise CheckpointError(
                "config.json does not say the shape of the prefix layer, which is that of a layer of the target: copy "
                "num_attention_heads, num_key_value_heads, rms_norm_eps, rope_theta, rope_scaling and "
                f"max_position_embeddings into it from the config.json of {target}"
            )
        found = _canonical(tensors, kind)
        output, gate = found.get("lm_heads.0.weight"), found.get("layers.0.mlp.gate_proj.weight")
        if output is None or output.dim() != 2:
            raise CheckpointError(f"there is no output head hydra_lm_head.0 of a head of the kind {kind}")
        sizes = {
            "hidden_size": output.shape[1],
            "vocab_size": output.shape[0],
            "intermediate_size": output.shape[1] if gate is None else gate.shape[0],
            "num_hidden_layers": int(kind == PREFIX_MLP),
            "num_attention_heads": 1,  # Used if there is no layer
        }
        shape = Keys(
            {**sizes, **{name: value for name, value in config.items() if value is not None and name not in OURS}}
        )
        for name in ("architectures", "tie_word_embeddings"):
            shape.get(name)  # said again when written
        fields = eagle.read_layers(shape)
        notes = {eagle.WINDOW_NOTE: fields["sliding_window"] is not None and shape.get("layer_types") is None}
        return eagle.make_head(
            HydraConfig,
            found,
            notes,
            **fields,
            qk_norm=False,
            num_heads=heads,
            num_layers=layers,
            target_hidden_size=fields["hidden_size"],
            draft_vocab_size=fields["vocab_size"],
            boundaries=(LAST_HIDDEN,),
            extra=shape.rest(),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        kind = PREFIX_MLP if config.num_hidden_layers else MLP
        keys = {TARGET: target.name_or_path, HEADS: config.num_heads, LAYERS: config.num_layers, ARCHITECTURE: kind}
        layer = {name: value for name, value in eagle.write_layers(config).items() if name != "model_type"}
        tensors = dict(_to_file(checkpoint, kind))
        return {**config.extra, **layer, **keys, "grounded_heads": True, "hidden_state_offset": 0}, tensors


def _place(kind: str, block: int) -> int:
    """Return the index of a block in its depth's sequence; in a ``prefix-mlp`` head a dropout comes
    before each.
    """
    return 2 * block + 1 if kind == PREFIX_MLP else block


def _canonical(tensors: Tensors, kind: str) -> dict[str, Tensor]:
    """Return a file's tensors under our names. Raises CheckpointError for others, or if copies of
    one block differ.
    """
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        if UNREAD.fullmatch(stored):
            continue
        name = stored.removeprefix(PREFIX)
        if block := BLOCK.fullmatch(stored):
            place = int(block[2])
            name = f"heads.{block[1]}.{'first' if place == _place(kind, 0) else 'rest'}.{block[3]}"
        elif head := OUTPUT.fullmatch(stored):
            name = f"lm_heads.{head[1]}.{head[2]}"
        elif name == stored:
            raise CheckpointError(
                f"the tensor {stored} is none of a Hydra head; expected hydra_mlp.DEPTH.* and the like"
            )
        if not torch.equal(found.setdefault(name, tensor), tensor):
            raise CheckpointError(
                f"{stored} is not what another block of its depth is: Hydra's code has one block behind the first and "
                "applies it again and again, so that its loader would keep the last alone"
            )
    return found


def _to_file(checkpoint: HeadCheckpoint, kind: str) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors as stored; a block that is applied several times is stored as often."""
    for name, tensor in checkpoint.tensors.items():
        part, *rest = name.split(".")
        if part == "heads":
            depth, which, end = rest[0], rest[1], ".".join(rest[2:])
            blocks = range(1) if which == "first" else range(1, checkpoint.config.num_layers)
            for block in blocks:
                yield f"hydra_mlp.{depth}.{_place(kind, block)}.{end}", tensor.clone()
        elif part == "lm_heads":
            yield f"hydra_lm_head.{rest[0]}.{'1.' if kind == PREFIX_MLP else ''}{rest[1]}", tensor
        elif part != "d2t":
            yield PREFIX + name, tensor
