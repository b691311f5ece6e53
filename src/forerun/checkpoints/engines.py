"""How serving engines load a head: what each allocates for a ``config.json``, and what it wants written its own way.

A tensor that an engine allocates and nothing fills stays as it happens to be, and one that it has no place for is lost,
mostly without a message. Names are forerun's own. From reading vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM 1.4 (release
candidate); llama.cpp and LMDeploy are not described. Knows no file and runs no engine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.checkpoints.base import HeadCheckpoint
from forerun.checkpoints.findings import Finding, Severity
from forerun.checkpoints.keys import NESTED
from forerun.checkpoints.layer_ids import IDS
from forerun.checkpoints.tensors import Shape, expected_shapes, some
from forerun.drafters.heads.eagle import EagleConfig

Shapes = dict[str, Shape]
SHARED = re.compile(r"embed_tokens\.weight|lm_head\.weight|d2t|t2d|.*rotary_emb\.inv_freq")
"""Taken from the target, computed, or looked after by `diagnose`."""
UPPER_NORM = re.compile(r"layers\.[1-9]\d*\.(input_layernorm|hidden_norm)\.weight")
"""One norm under two names, of which an engine reads one."""
RETRAIN = "train the head without it"


def adapted(head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
    """The head as `engine` wants it, and the keys of ``config.json`` that must be its own; None: as it is."""
    config = head.config
    if engine == "sglang" and config.generation == 1 and not config.fc_bias:
        # Its EAGLE-1 has a bias whatever the file says. It is not announced: "bias" means the attention's there.
        weight = head.tensors["fc.weight"]
        tensors = {**head.tensors, "fc.bias": torch.zeros(len(weight), dtype=weight.dtype)}
        config = dataclasses.replace(config, fc_bias=True)
        return HeadCheckpoint(config=config, tensors=tensors, notes=head.notes), {}
    if engine == "vllm" and config.generation == 1:
        return head, {"architectures": ["EagleLlamaForCausalLM"]}
    if engine == "trtllm" and config.generation == 3 and config.fc_bias:
        return head, {"bias": True}  # of fc, and there alone
    return head, {}


def sglang_window(config: EagleConfig) -> str:
    """The option that gives an EAGLE-3 head its window, empty if none can: one for all layers, itself not counted."""
    window = config.sliding_window or 0
    fits = window > 1 and config.generation == 3 and not config.full_layers
    return f"--speculative-draft-window-size {window - 1}" if fits else ""


def mismatches(
    engine: str, config: EagleConfig, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Tensors that `engine` cannot load, loses or leaves unfilled.

    Args:
        engine: of `LOADERS`.
        config: what keys and tensors mean.
        keys: of ``config.json``, without nesting but for ``eagle_config``.
        tensors: of the file, by canonical names; a norm above the first layer may have both of its names.
    """
    places = LOADERS[engine](config, keys)
    given = {name: tensor for name, tensor in tensors.items() if name in places or not SHARED.fullmatch(name)}
    odd = sorted(name for name in given.keys() & places.keys() if tuple(given[name].shape) != places[name])
    lost = sorted(name for name in given.keys() - places.keys() if not _harmless(name, given[name], config))
    stopping = [name for name in lost if engine == "vllm" and not name.endswith(".bias")]
    complaints: tuple[tuple[list[str], Severity, str], ...] = (
        (odd, "fails", f"expects {some([f'{name} {places[name]}' for name in odd])}"),
        (stopping, "fails", "has no place for it and stops"),
        ([name for name in lost if name not in stopping], "degrades", "does not use it, without a message"),
        (sorted(places.keys() - given.keys()), "degrades", "makes room for it, and nothing in the file fills it"),
    )
    for names, severity, why in complaints:
        if names:
            yield Finding(engine=engine, severity=severity, what=some(names), why=why, remedy=RETRAIN)


def _harmless(name: str, tensor: Tensor, config: EagleConfig) -> bool:
    """Whether nothing is lost with it: the other name of a norm, or a bias of zeros."""
    return bool(config.generation == 3 and UPPER_NORM.fullmatch(name)) or (
        name.endswith(".bias") and not bool(tensor.any())
    )


def _vllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """A Qwen3 layer has no other biases than those of queries, keys and values."""
    attention = bool(keys.get("attention_bias"))
    either = attention or bool(keys.get("bias"))
    if config.generation == 1:
        return _places(config, qkv_bias=either, o_bias=either, fc_bias=False)
    return _places(
        config,
        qkv_bias=attention,
        o_bias=either and not config.qk_norm,
        mlp_bias=config.mlp_bias and not config.qk_norm,
        fc_bias=False,
        fc_norm=bool(keys.get("fc_norm")),
        boundaries=_counted(config, keys),
    )


def _sglang(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Its EAGLE-1 always has a bias after ``fc``; its EAGLE-3 never has one for queries, keys and values."""
    fc_bias = bool(keys.get("bias"))
    either = bool(keys.get("attention_bias")) or fc_bias
    if config.generation == 1:
        return _places(config, qkv_bias=either, o_bias=either, fc_bias=True, mlp_bias=False)
    places = _places(
        config,
        qkv_bias=False,
        o_bias=either,
        mlp_bias=False,
        fc_bias=fc_bias,
        qk_norm=False,
        boundaries=_counted(config, keys),
    )
    if keys.get("draft_vocab_size") is not None and not keys.get("tie_word_embeddings"):
        places["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    return _hidden_norms(_without_fc(places) if places["fc.weight"][1] == config.hidden_size else places)


def _trtllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """How many states ``fc`` reads stands in its YAML."""
    nested = keys.get(NESTED) or {}
    places = _places(
        config,
        qkv_bias=bool(keys.get("attention_bias")),
        o_bias=bool(keys.get("attention_bias")),
        fc_bias=bool(keys.get("bias")),
        qk_norm=False,
        norm_before_fc=bool(nested.get("norm_before_fc")),
        fc_norm=bool(keys.get("fc_norm")),
    )
    return _hidden_norms(_without_fc(places) if len(config.boundaries) == 1 else places)


LOADERS: dict[str, Callable[[EagleConfig, Mapping[str, Any]], Shapes]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
"""Engine -> (what a head means, its keys) -> name and shape of every tensor that the engine wants of the file."""


def _places(config: EagleConfig, *, qkv_bias: bool, o_bias: bool, **read: Any) -> Shapes:
    """Of a head as an engine reads it, which has other fields than `config`."""
    shapes = expected_shapes(dataclasses.replace(config, attention_bias=True, **read))
    absent = ([] if qkv_bias else ["q", "k", "v"]) + ([] if o_bias else ["o"])
    unbiased = tuple(f"self_attn.{name}_proj.bias" for name in absent)
    return {name: shape for name, shape in shapes.items() if not SHARED.fullmatch(name) and not name.endswith(unbiased)}


def _counted(config: EagleConfig, keys: Mapping[str, Any]) -> tuple[int, ...]:
    """As many boundaries as vLLM and SGLang make room for; three where they find no number."""
    nested = (keys.get(NESTED) or {}).get(IDS)
    count = keys.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    return config.boundaries if count == len(config.boundaries) else tuple(range(count))


def _without_fc(places: Shapes) -> Shapes:
    """States that are as wide as the head are taken as they are."""
    return {name: shape for name, shape in places.items() if not name.startswith(("fc.", "fc_norm.", "input_norm."))}


def _hidden_norms(places: Shapes) -> Shapes:
    """The norm above the first layer under the name that SGLang and TensorRT-LLM look for."""
    return {
        name.replace("input_layernorm", "hidden_norm") if UPPER_NORM.fullmatch(name) else name: shape
        for name, shape in places.items()
    }
