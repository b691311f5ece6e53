"""The format of IBM's MLP speculators (fms-extras, ``modeling_mlp_speculator.py``; vLLM, ``MLPSpeculatorConfig``):
``model_type`` mlp_speculator, tensors ``speculator.{emb,proj,ln,head}.DEPTH.*``.

Of tied depths a file holds one copy or several, which are the same.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.drafters.heads.mlp_speculator import MlpSpeculatorConfig
from forerun.errors import ArgumentError, CheckpointError
from forerun.head_keys import Keys
from forerun.types import LAST_HIDDEN

MODEL_TYPE, ARCHITECTURE = "mlp_speculator", "MLPSpeculatorPreTrainedModel"
NAME = re.compile(r"(?:speculator\.)?(emb|proj|ln|head)\.(\d+)\.(weight|bias)")
TREE = ("top_k_tokens_per_head", "n_candidates")
"""Keys of the tree that IBM's server drafts; vLLM reads their number and nothing else."""


class MlpSpeculatorFormat(Format):
    """Heads of IBM (``ibm-fms``, ``ibm-granite``, ``ibm-ai-platform``)."""

    name = "mlp_speculator"
    mark = MODEL_TYPE

    def recognises(self, config: Config) -> bool:
        return config.get("model_type") == MODEL_TYPE

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        keys = Keys(config)
        for name in ("model_type", "architectures", "torch_dtype", "dtype"):
            keys.get(name)  # said again when written
        size, vocab_size, depths = keys.integer("emb_dim"), keys.integer("vocab_size"), keys.integer("n_predict")
        if keys.integer("num_lookahead_tokens", depths) != depths:
            raise CheckpointError(f"num_lookahead_tokens of config.json must be n_predict, {depths}")
        tied = keys.flag("tie_weights")
        drafts = {name: keys.get(name) for name in TREE}
        kept = {name: value for name, value in drafts.items() if value not in (None, _tree(depths)[name])}
        try:
            head = MlpSpeculatorConfig(
                n_predict=depths,
                inner_dim=keys.integer("inner_dim", 0) or size,
                tie_weights=tied,
                scale_input=keys.flag("scale_input"),
                target_hidden_size=size,
                vocab_size=vocab_size,
                draft_vocab_size=vocab_size,
                boundaries=(LAST_HIDDEN,),
                extra=keys.rest() | kept,
            )
        except ArgumentError as error:
            raise CheckpointError(f"config.json describes no head that can be built: {error}") from error
        return HeadCheckpoint(config=head, tensors=_canonical(tensors, tied))

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        dtype = str(checkpoint.tensors["head.0.weight"].dtype).removeprefix("torch.")
        keys = {
            "model_type": MODEL_TYPE,
            "architectures": [ARCHITECTURE],
            "torch_dtype": dtype,
            "emb_dim": config.target_hidden_size,
            **{name: getattr(config, name) for name in ("vocab_size", "n_predict", "inner_dim")},
            **{name: getattr(config, name) for name in ("tie_weights", "scale_input")},
        }
        tensors = {}
        for name, tensor in checkpoint.tensors.items():
            part, depth, end = name.split(".")
            last = config.n_predict if config.tie_weights and (part != "proj" or depth == "1") else int(depth) + 1
            for copy in range(int(depth), last):
                tensors[f"speculator.{part}.{copy}.{end}"] = tensor.clone()
        return {**_tree(config.n_predict), **config.extra, **keys}, tensors


def _tree(depths: int) -> dict[str, object]:
    """Return the tree's default values; vLLM wants an entry for each depth."""
    return {"top_k_tokens_per_head": [max(1, 5 - depth) for depth in range(depths)], "n_candidates": 5}


def _canonical(tensors: Tensors, tied: bool) -> dict[str, Tensor]:
    """Return a file's tensors under our names. Raises CheckpointError for others, or if tied ones
    differ.
    """
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        name = NAME.fullmatch(stored)
        if name is None:
            raise CheckpointError(f"the tensor {stored} is none of an MLP speculator; expected emb, proj, ln and head")
        part, depth, end = name[1], int(name[2]), name[3]
        shared = min(depth, 1 if part == "proj" else 0) if tied else depth
        if not torch.equal(found.setdefault(f"{part}.{shared}.{end}", tensor), tensor):
            raise CheckpointError(f"tie_weights is true, but {stored} is not what another depth has")
    return found
