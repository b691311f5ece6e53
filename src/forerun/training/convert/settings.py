"""From ModelOpt's keys to what a conversion does: the shape of the head, its objective, how it is exported.

Knows the target's configuration, not its weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.checkpoints.layer_ids import from_outputs
from forerun.drafters.heads.eagle import EagleConfig
from forerun.errors import ArgumentError, nearest
from forerun.training.convert.defaults import ARCHITECTURE, ARCHITECTURE_KEYS, KEYS, VOCABULARY_IDS, Key

DTYPES = ("float32", "bfloat16", "float16")
SAME_NAME = (
    "hidden_act",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "initializer_range",
    "rms_norm_eps",
    "mlp_bias",
    "attention_bias",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "qk_norm",
)
"""Architecture keys that `EagleConfig` calls the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertSettings:
    """A checked configuration. Defaults are in `defaults`."""

    given: Mapping[str, Any]
    """As the user wrote it, as JSON knows it and without token ids: what is saved beside the head."""
    architecture: Mapping[str, Any]
    """All keys of `eagle_architecture_config`, defaults filled in."""
    steps: int
    """How often the head is unrolled on its own features."""
    decay: float
    """Weight of step t is decay^t, normalised to sum 1."""
    report_accuracy: bool
    """Whether a loss comes with `train_acc`; reading it waits for the device."""
    distill_features: bool
    """EAGLE-1 only: also pull the head's features towards the target's."""
    export_rope_scaling: Mapping[str, Any] | None
    """Written over a default rope when the head is exported; None: as it was trained."""
    draft_vocab_ids: tuple[int, ...] | None
    """Tokens that the head can propose, if the configuration names them."""

    @property
    def export_dtype(self) -> str:
        """Name of the torch dtype that an exported head has."""
        return str(self.architecture["torch_dtype"]).removeprefix("torch.")

    @property
    def generation(self) -> int:
        """3 or 1, as in `EagleConfig`."""
        return 3 if self.architecture["use_aux_hidden_state"] else 1


def read_mode(mode: Any) -> ConvertSettings:
    """From what `convert` is given: ``[("eagle", config)]`` or ``{"algorithm": "eagle", "config": config}``.

    Raises:
        ArgumentError: another form, another algorithm, or a configuration that cannot be honoured.
    """
    pairs = [mode] if isinstance(mode, Mapping) else mode
    if not isinstance(pairs, Sequence) or isinstance(pairs, str) or len(pairs) != 1:
        raise ArgumentError(f'convert: mode must be [("eagle", config)], one pair in a list; got {_short(mode)}')
    pair = pairs[0]
    if isinstance(pair, Mapping) and set(pair) <= {"algorithm", "config"}:
        pair = (pair.get("algorithm"), pair.get("config", {}))
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise ArgumentError(f'convert: mode must hold a pair ("eagle", config), got {_short(pair)}')
    name, config = pair
    if name != "eagle":
        raise ArgumentError(f"convert: there is no mode {name!r}; heads of the kind 'eagle' can be attached")
    return read_settings({} if config is None else config)


def read_settings(config: Any) -> ConvertSettings:
    """A configuration, checked key by key; what is missing takes the value of `EAGLE3_DEFAULT_CFG`.

    Raises:
        ArgumentError: an unknown key (naming the nearest), a value of the wrong type, or one that is not supported.
    """
    found = _checked(config, KEYS, "")
    shape = _checked(found[ARCHITECTURE], ARCHITECTURE_KEYS, f"{ARCHITECTURE}.")
    _check_kind(found, shape)
    dtype = str(shape["torch_dtype"]).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ArgumentError(f"{ARCHITECTURE}.torch_dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    ids = found[VOCABULARY_IDS]
    plain = {**config, ARCHITECTURE: {**config.get(ARCHITECTURE, {})}, VOCABULARY_IDS: None}
    if "torch_dtype" in plain[ARCHITECTURE]:
        plain[ARCHITECTURE]["torch_dtype"] = dtype
    return ConvertSettings(
        given=json.loads(json.dumps(plain)),
        architecture=shape,
        steps=found["eagle_ttt_steps"],
        decay=float(found["eagle_loss_decay_factor"]),
        report_accuracy=found["eagle_report_acc"],
        distill_features=found["eagle_hidden_state_distillation"],
        export_rope_scaling=found["eagle_export_rope_scaling"] or None,
        draft_vocab_ids=None if ids is None else tuple(int(token) for token in ids),
    )


def head_shape(model: Any, settings: ConvertSettings) -> EagleConfig:
    """The head that these settings mean for a transformers causal LM.

    Raises:
        ArgumentError: sizes or layers that the model does not have.
    """
    shape, text = settings.architecture, model.config.get_text_config()
    for name in ("hidden_size", "vocab_size"):
        if shape[name] not in (None, getattr(text, name)):
            raise ArgumentError(
                f"{ARCHITECTURE}.{name} must be the base model's {getattr(text, name)}, got {shape[name]}"
            )
    draft_vocab_size = shape["draft_vocab_size"] or text.vocab_size
    options = {name: shape[name] for name in SAME_NAME} | _rope(shape)
    options["own_lm_head"] = bool(shape["has_lm_head"]) or draft_vocab_size != text.vocab_size
    if shape["max_position_embeddings"] is not None:
        options["max_position_embeddings"] = shape["max_position_embeddings"]
    first = settings.generation == 1
    if not first:
        layers = shape["eagle_aux_hidden_state_layer_ids"]
        options["boundaries"] = _boundaries(layers, text.num_hidden_layers)
    return EagleConfig.for_target("eagle" if first else "eagle3", model, draft_vocab_size, options)


def _checked(given: Any, known: Mapping[str, Key], where: str) -> dict[str, Any]:
    """With defaults for what is missing."""
    if not isinstance(given, Mapping):
        raise ArgumentError(f"convert: {where.rstrip('.') or 'the configuration'} must be a dict, got {_short(given)}")
    for name, value in given.items():
        if name not in known:
            raise ArgumentError(f"convert: unknown key {where}{name}.{nearest(str(name), known)}")
        key = known[name]
        if key.refusal is not None and value != key.default:
            raise ArgumentError(f"convert: {where}{name} must be {key.default!r}, got {value!r}: {key.refusal}")
        _check_type(value, key.default, where + name)
    return {name: given.get(name, copy.deepcopy(key.default)) for name, key in known.items()}


def _check_type(value: Any, default: Any, name: str) -> None:
    kind = type(default)
    if default is None:
        if value is None or not name.startswith(ARCHITECTURE):
            return
        kind = int  # a size
    if name.endswith("torch_dtype") or (kind is dict and value is None):
        return
    wanted: Any = {float: (int, float), dict: Mapping, list: Sequence}.get(kind, kind)
    if name.endswith("rope_theta"):
        wanted = (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise ArgumentError(f"convert: {name} must be of the type {kind.__name__}, got {value!r}")


def _check_kind(config: Mapping[str, Any], shape: Mapping[str, Any]) -> None:
    """Raise ArgumentError if the architecture is neither EAGLE-3's nor EAGLE-1's."""
    third = shape["use_aux_hidden_state"]
    kind = "an EAGLE-3 head (use_aux_hidden_state)" if third else "an EAGLE-1 head (no use_aux_hidden_state)"
    for name in ("use_input_layernorm_in_first_layer", "use_last_layernorm"):
        if shape[name] != third:
            raise ArgumentError(f"convert: {kind} has {ARCHITECTURE}.{name} {third}, got {shape[name]}")
    if not third and shape["eagle_aux_hidden_state_layer_ids"]:
        raise ArgumentError(
            f"convert: {kind} reads the last hidden state; leave eagle_aux_hidden_state_layer_ids empty"
        )
    if not third and any(shape[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")):
        raise ArgumentError(f"convert: {kind} has no norms around its features; leave norm_* and fc_norm away")
    if third and config["eagle_hidden_state_distillation"]:
        raise ArgumentError(
            f"convert: eagle_hidden_state_distillation must be False for {kind}: it learns tokens, and its features "
            "are its own"
        )


def _boundaries(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """From ModelOpt's 0-based layers, whose outputs are meant; empty: our default."""
    wrong = [layer for layer in layers if not 0 <= layer < count]
    if wrong:
        raise ArgumentError(
            f"{ARCHITECTURE}.eagle_aux_hidden_state_layer_ids counts the base model's {count} layers from 0, "
            f"got {wrong[0]}"
        )
    return from_outputs(layers)


def _rope(shape: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling``; the base may stand in either place."""
    scaling = dict(shape["rope_scaling"] or {})
    default = ARCHITECTURE_KEYS["rope_theta"].default
    stated = {value for value in (scaling.pop("rope_theta", default), shape["rope_theta"]) if value != default}
    if len(stated) > 1:
        raise ArgumentError(
            f"{ARCHITECTURE}: rope_theta is {shape['rope_theta']}, but rope_scaling.rope_theta says otherwise "
            f"({', '.join(map(str, sorted(stated)))}); give one"
        )
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": float(stated.pop() if stated else default), "rope_scaling": None if plain else scaling}


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
