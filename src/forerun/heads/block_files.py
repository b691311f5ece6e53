"""The format of z-lab's DFlash and DeepSeek's DSpark heads, which vLLM, SGLang and TensorRT-LLM
read: Qwen3's configuration with a ``dflash_config`` (DSpark: the same keys at the top), tensors
``fc``, ``hidden_norm``, ``layers.N.*``, ``norm``; DSpark's ``markov_head.*`` and
``confidence_head.proj``. JetSpec's heads have it too (DFlash's with causal blocks), SpecForge's
Domino (``projector_type``, ``prefix_gru.*``, ``embed_proj.*``), and ModelOpt's exports, which name
DSpark's tensors without their prefixes.

``target_layer_ids`` name the 0-based layer whose output is read: one less than our boundaries. Where nothing says
whether places of a block see those behind them, vLLM (``qwen3_dflash.py``) lets them, but in layers whose
``layer_types`` is a sliding window, as z-lab's heads for Gemma are meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from forerun.checkpoints import eagle
from forerun.checkpoints.base import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written, target_mask
from forerun.drafters.heads.dflash import DFlashConfig, spread_boundaries
from forerun.drafters.heads.dflash2 import DFlash2Config
from forerun.drafters.heads.domino import DominoConfig
from forerun.drafters.heads.dspark import DSparkConfig
from forerun.errors import CheckpointError
from forerun.head_keys import Keys, architectures

NESTED, RANK, PROJECTOR = "dflash_config", "markov_rank", "projector_type"
LAYER_IDS = eagle.LAYER_IDS
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "domino": "DFlashDraftModel",
}
ANYWHERE = ("block_size", "mask_token_id", "sample_from_anchor", "causal", "is_causal", "emb_dim")
"""Keys that stand at the top or in `NESTED`, depending on the publisher."""


SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of DFlash 2 that stand at the top or in `NESTED`."""
DOMINO = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
"""Keys of Domino, named as the fields of its configuration."""
LEAST = {"pure_draft_prefix_len": 0}  # Values if a file leaves the key out
OWN: dict[type[DFlashConfig], tuple[str, ...]] = {DominoConfig: DOMINO, DFlash2Config: SELECTOR}
MODELOPT = {"confidence_proj.": "confidence_head.proj."} | {
    f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
}
"""Prefixes of ModelOpt's names of DSpark's tensors, and our prefixes for them."""


class DFlashFormat(Format):
    """Heads of z-lab, of DeepSeek, and of others who write the same format."""

    name = "dflash"
    mark = "mask_token_id"

    def recognises(self, config: Config) -> bool:
        return NESTED in config or any("DSpark" in name or "DFlash" in name for name in architectures(config))

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        nested = config.get(NESTED) or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{NESTED} of config.json must be an object, got {nested!r}")
        for name in (*ANYWHERE, LAYER_IDS):
            if None not in (config.get(name), nested.get(name)) and config[name] != nested[name]:
                raise CheckpointError(
                    f"config.json contradicts itself about {name}: {config[name]!r} at the top, {nested[name]!r} in "
                    f"{NESTED}; remove the wrong one"
                )
        inner = {name: value for name, value in nested.items() if value is not None}
        keys = Keys({**config, **inner, NESTED: None})
        keys.get("architectures"), keys.get("tie_word_embeddings")  # said again when written
        fields, made = eagle.read_layers(keys), _kind_of(keys)
        size = fields["hidden_size"]
        fields |= {
            "boundaries": _boundaries(keys, fields["num_hidden_layers"], num_layers),
            "block_size": keys.integer("block_size"),
            "mask_token_id": keys.integer("mask_token_id"),
            "sample_from_anchor": keys.flag("sample_from_anchor", _is_shifted(keys, made)),
            "target_hidden_size": keys.integer("target_hidden_size", size),
            "draft_vocab_size": keys.integer("draft_vocab_size", fields["vocab_size"]),
            **_causality(keys, fields),
            **_window(keys, fields),
            **(read_markov(keys) if made is DSparkConfig else {}),
            **{name: keys.integer(name, LEAST.get(name)) for name in OWN.get(made, ())},
        }
        keys.get("num_anchors")  # of its training
        notes = {eagle.WINDOW_NOTE: fields["sliding_window"] is not None and keys.get("layer_types") is None}
        rest = keys.rest()
        inside = {name: rest.pop(name) for name in nested if name in rest and name not in config}
        return eagle.make_head(
            made,
            _from_modelopt(eagle.to_canonical(tensors)),
            notes,
            **fields,
            qk_norm=True,
            extra=rest | ({NESTED: inside} if inside else {}),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        if config.causal_windows and (config.is_causal or config.sliding_window is None):
            raise CheckpointError("this format has no key for blocks that are causal in windows, where none differs")
        nested: dict[str, Any] = {"mask_token_id": config.mask_token_id, LAYER_IDS: eagle.to_outputs(config.boundaries)}
        if config.is_causal or (config.sliding_window is not None and not config.causal_windows):
            # vLLM looks for the one in `NESTED`, for the other at the top.
            nested["is_causal" if config.kind == "dspark" else "causal"] = config.is_causal
        if config.is_causal:
            nested["causal_head"] = True
        if config.kind == "domino":
            nested |= {PROJECTOR: "domino", "shift_label": config.sample_from_anchor}
        elif config.sample_from_anchor != (config.kind == "dspark"):
            nested["sample_from_anchor"] = config.sample_from_anchor
        nested |= {name: getattr(config, name) for name in OWN.get(type(config), ())}
        if config.kind == "dspark":
            places: dict[str, Any] = {**nested, **write_markov(config), **config.extra.get(NESTED, {})}
        else:
            places = {NESTED: {**config.extra.get(NESTED, {}), **nested}}
        keys = {
            "architectures": [ARCHITECTURES[config.kind]],
            **eagle.write_layers(config),
            "torch_dtype": eagle.dtype_name(checkpoint),
            "block_size": config.block_size,
            "num_target_layers": target.num_layers,
            **places,
        }
        if config.target_hidden_size != config.hidden_size:
            keys["target_hidden_size"] = config.target_hidden_size
        if config.reduced_vocabulary:
            keys["draft_vocab_size"] = config.draft_vocab_size
        keys.setdefault("layer_types", ["full_attention"] * config.num_hidden_layers)
        return {**config.extra, **keys}, to_file(checkpoint)


def read_markov(keys: Keys) -> dict[str, Any]:
    """Return the configuration fields that DSpark adds to DFlash."""
    return {
        RANK: keys.integer(RANK, 256),
        "markov_head_type": keys.text("markov_head_type", "vanilla"),
        "enable_confidence_head": keys.flag("enable_confidence_head", keys.flag("use_confidence_head", True)),
        "confidence_head_with_markov": keys.flag("confidence_head_with_markov", True),
    }


def write_markov(config: DSparkConfig) -> dict[str, Any]:
    """Return the keys that `read_markov` reads."""
    names = (RANK, "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {name: getattr(config, name) for name in names}


def _kind_of(keys: Keys) -> type[DFlashConfig]:
    """Return the kind of head that a configuration means, by its ``projector_type`` and DSpark's
    keys.
    """
    usual = "dspark" if keys.get(RANK) else "dflash2" if keys.get("selector_rank") else "dflash"
    projector = keys.text(PROJECTOR, usual)
    known = {"dflash": DFlashConfig, "dflash2": DFlash2Config, "dspark": DSparkConfig, "domino": DominoConfig}
    if projector not in known:
        raise CheckpointError(f"{PROJECTOR} of {NESTED} is {projector!r}; heads of {', '.join(known)} are supported")
    return known[projector]


def _is_shifted(keys: Keys, made: type[DFlashConfig]) -> bool:
    """Return whether the root predicts, by SpecForge's ``shift_label``, where
    ``sample_from_anchor`` does not say so.
    """
    return made is DSparkConfig if keys.get(PROJECTOR) is None else keys.flag("shift_label", made is DSparkConfig)


def _from_modelopt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return DSpark's tensors under our names."""
    found = {}
    for name, tensor in tensors.items():
        begin = next((begin for begin in MODELOPT if name.startswith(begin)), "")
        found[MODELOPT.get(begin, "") + name.removeprefix(begin)] = tensor
    return found


def _boundaries(keys: Keys, layers: int, target_layers: int | None) -> tuple[int, ...]:
    """Return the boundaries that the head reads; without ids, the default for the target's number
    of layers.
    """
    ids, stated = keys.integers(LAYER_IDS), keys.integer("num_target_layers", target_layers or 0)
    if ids is None and not stated:
        raise CheckpointError(f"config.json has neither {LAYER_IDS} nor num_target_layers: name the target")
    return spread_boundaries(stated, layers) if ids is None else eagle.from_outputs(ids)


def _causality(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers' blocks are causal; vLLM's default if no key says so."""
    said = [keys.flag(name) for name in ("is_causal", "causal", "causal_head") if keys.get(name) is not None]
    windows = fields["sliding_window"] is not None and keys.get("layer_types") is not None
    return {"is_causal": said[0]} if said else {"causal_windows": windows}


def _window(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window that vLLM's ``use_swa`` and ``swa_window_size`` state, if transformers' own
    keys state none.
    """
    switched, window = keys.flag("use_swa"), keys.get("swa_window_size")
    if not switched or fields["sliding_window"] is not None:
        return {}
    if window is None:
        raise CheckpointError(f"use_swa in {NESTED} is true, but there is no swa_window_size")
    return {"sliding_window": keys.integer("swa_window_size")}


def to_file(checkpoint: HeadCheckpoint) -> dict[str, Tensor]:
    """Return the tensors as stored, with ``d2t`` and ``t2d`` where draft ids are not the target's
    ids.
    """
    tensors = dict(checkpoint.tensors)
    d2t = tensors.pop("d2t")
    if checkpoint.config.reduced_vocabulary or bool(d2t.any()):
        tensors |= {"d2t": d2t, "t2d": target_mask(d2t, checkpoint.config.vocab_size)}
    return tensors
