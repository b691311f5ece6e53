"""Loads the frozen target of a training run: whole on every process, or spread where it does not fit one device.

``fsdp`` shards the weights of each decoder layer and gathers a layer when it runs; ``tp`` computes a part of each layer
on every process, by transformers' ``tp_plan``. Embedding and output head stay whole on every process: the head that is
trained reads both, with tokens of its own. Knows no head and no data.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from forerun import demo
from forerun.errors import ArgumentError
from forerun.target.load import LoadOptions, open_model, read_config
from forerun.target.parts import base_of, layers_of
from forerun.target.support import text_config
from forerun.training.loop import Parallel


def load_target(name: str, dtype: str, spread: str, place: Parallel) -> tuple[Any, Any]:
    """The frozen causal LM in evaluation mode, and its tokenizer. Every process of a group must call it.

    Args:
        name: directory, hub id or the name of a shipped model.
        dtype: of the weights.
        spread: ``none``, ``fsdp`` or ``tp``; with a single process all are the same.
        place: this process among all; tensor parallel and sharding reach over all of them.

    Raises:
        ArgumentError: the target's heads cannot be split over so many processes.
        CheckpointError: no target there, or it is broken.
    """
    from transformers import AutoTokenizer

    path = demo.resolve(name)
    if place.world == 1 or spread == "none":
        model = _whole(path, dtype, str(place.device))
    else:
        model = _tensor_parallel(path, dtype, place) if spread == "tp" else _sharded(path, dtype, place)
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(path)


def _whole(name: str | Path, dtype: str, device: str) -> Any:
    options = LoadOptions(dtype=dtype, device=device)
    return open_model(name, options, read_config(name, options), quiet=True)


def _sharded(name: str | Path, dtype: str, place: Parallel) -> Any:
    """Through the CPU, one process of a machine after the other: host and device hold one copy at most."""
    mesh = init_device_mesh(place.device.type, (place.world,))
    mine = int(os.environ.get("LOCAL_RANK", place.rank))
    model = None
    for turn in range(int(os.environ.get("LOCAL_WORLD_SIZE", place.world))):
        if turn == mine:
            model = _whole(name, dtype, "cpu")
            for layer in layers_of(base_of(model), text_config(model).num_hidden_layers)[1]:
                fully_shard(layer, mesh=mesh)
            model.to(place.device)
        place.wait()
    assert model is not None, "torchrun numbers the processes of a machine from 0"
    return model


def _tensor_parallel(name: str | Path, dtype: str, place: Parallel) -> Any:
    """Each process reads its part of the layers only."""
    options = LoadOptions(dtype=dtype, tp_plan="auto")
    config = read_config(name, options)
    _refuse_uneven(config.get_text_config(decoder=True), place.world)
    model = open_model(name, options, config, quiet=True)
    _make_whole(model)
    return model


def _refuse_uneven(config: Any, parts: int) -> None:
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if groups % parts:
        raise ArgumentError(
            f"target_parallel=tp gives each of {parts} processes as many key-value heads, but the target has {groups}: "
            f"use target_parallel=fsdp, or a number of processes that divides {groups}"
        )


def _make_whole(model: Any) -> None:
    """Gather embedding and output head, and let them run as they would without a plan."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    tied = output.weight is embedding.weight
    for module in (embedding, output):
        for weight_name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, DTensor):
                setattr(module, weight_name, nn.Parameter(weight.full_tensor(), requires_grad=False))
        # transformers puts the plan's forward, with its exchange between processes, on the instance.
        module.__dict__.pop("forward", None)
    if tied:
        output.weight = embedding.weight
