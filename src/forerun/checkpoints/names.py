"""Tensor names on disk and inside. Knows the spellings of EAGLE, SpecForge, SGLang and vLLM; no configuration keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from forerun.checkpoints.base import HeadCheckpoint
from forerun.checkpoints.tensors import target_mask
from forerun.errors import CheckpointError

MIDLAYER, FIRST = "midlayer.", "layers.0."
ALIASES = {f"aux_norm_{where}.weight": f"fc_norm.{i}.weight" for i, where in enumerate(("low", "mid", "high"))}
"""SGLang's earlier names of the norms before ``fc``."""
UPPER_HIDDEN_NORM = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")


def to_canonical(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Under forerun's names, without what is computed anew (``rotary_emb.inv_freq``); ``t2d`` stays.

    Layers above the first have one norm that vLLM calls ``input_layernorm`` and SGLang ``hidden_norm``; either name is
    taken, both if they are equal.

    Raises:
        CheckpointError: a tensor is there under two names.
    """
    found = respelled(tensors)
    for name in [name for name in found if UPPER_HIDDEN_NORM.fullmatch(name)]:
        _merge_upper_norm(found, name)
    return found


def respelled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `to_canonical`, but both names of a norm above the first layer stay."""
    found: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        if stored.endswith("rotary_emb.inv_freq"):
            continue
        name = FIRST + stored.removeprefix(MIDLAYER) if stored.startswith(MIDLAYER) else ALIASES.get(stored, stored)
        if name in found:
            raise CheckpointError(f"the tensor {name} is stored twice, once as {stored}; remove one of them")
        found[name] = tensor
    return found


def _merge_upper_norm(tensors: dict[str, Tensor], hidden_norm: str) -> None:
    ours = hidden_norm.replace("hidden_norm", "input_layernorm")
    tensor = tensors.pop(hidden_norm)
    if ours in tensors and not torch.equal(tensors[ours], tensor):
        raise CheckpointError(
            f"{ours} and {hidden_norm} differ: vLLM reads the first, SGLang and TensorRT-LLM the second, and nothing "
            "says which one the head was trained with; remove the other"
        )
    tensors.setdefault(ours, tensor)


def to_file(checkpoint: HeadCheckpoint, *, first: str = FIRST, t2d: bool = True) -> dict[str, Tensor]:
    """Under the names of a file whose first layer is called `first`; EAGLE-3's norms above it under both names.

    ``d2t``, and ``t2d`` if asked for, are there where draft ids are not the target's ids.
    """
    config = checkpoint.config
    tensors = dict(checkpoint.tensors)
    d2t = tensors.pop("d2t")
    for layer in range(1, config.num_hidden_layers) if config.generation == 3 else ():
        norm = tensors[f"layers.{layer}.input_layernorm.weight"]
        tensors[f"layers.{layer}.hidden_norm.weight"] = norm.clone()
    tensors = {_renamed(name, first): tensor for name, tensor in tensors.items()}
    if config.reduced_vocabulary or bool(d2t.any()):
        tensors["d2t"] = d2t
        if t2d:
            tensors["t2d"] = target_mask(d2t, config.vocab_size)
    return tensors


def _renamed(name: str, first: str) -> str:
    return first + name.removeprefix(FIRST) if name.startswith(FIRST) else name
