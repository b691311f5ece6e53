"""The keys of a head's decoder layers, named as in transformers. Flat or nested, all formats share them.

Knows nothing of features, boundaries or draft vocabularies.
"""

from __future__ import annotations

from typing import Any

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.checkpoints.keys import Keys
from forerun.drafters.heads.eagle import EagleConfig, Rotary
from forerun.errors import ArgumentError, CheckpointError
from forerun.target.masks import FULL, SLIDING

ROPE_KINDS = ("default", *ROPE_INIT_FUNCTIONS)
WINDOW_NOTE = (
    "sliding_window without layer_types is read as the window of every layer, which is how the head is drafted with. "
    "vLLM applies a window only where layer_types names it. Written with layer_types."
)


def read_layers(keys: Keys) -> dict[str, Any]:
    """The fields of `EagleConfig` that describe its layers.

    Raises:
        CheckpointError: a key is missing or of the wrong type.
    """
    size, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if heads < 1:
        raise CheckpointError(f"num_attention_heads must be at least 1, got {heads}")
    if keys.get("quantization_config"):
        raise CheckpointError("config.json has a quantization_config; only heads in floating point are supported")
    theta, scaling = _read_rope(keys)
    layers = keys.integer("num_hidden_layers", 1)
    window, full_layers = _read_window(keys, layers)
    for name in ("model_type", "torch_dtype", "dtype"):
        keys.get(name)  # said again when written, from what the head is
    return {
        "hidden_size": size,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", size // heads),
        "hidden_act": keys.text("hidden_act", "silu"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "vocab_size": keys.integer("vocab_size"),
        "max_position_embeddings": keys.integer("max_position_embeddings", 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "sliding_window": window,
        "full_layers": full_layers,
        "attention_bias": keys.flag("attention_bias"),
        "mlp_bias": keys.flag("mlp_bias"),
        "initializer_range": keys.number("initializer_range", 0.02),
    }


def write_layers(config: EagleConfig) -> dict[str, Any]:
    """The keys that `read_layers` reads; ``tie_word_embeddings`` is false, because true would hide the output head."""
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        # The names that transformers 4 and 5 both understand.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": False,
        **_write_window(config),
    }


def make_config(**fields: Any) -> EagleConfig:
    """`EagleConfig` of what a file says; CheckpointError where its keys contradict each other or nothing knows them."""
    try:
        config = EagleConfig(**fields)
        Rotary(config)
    except (ArgumentError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"config.json describes no head that can be built: {error}") from error
    if config.hidden_act not in ACT2FN:
        raise CheckpointError(f"hidden_act of config.json is {config.hidden_act!r}; expected {', '.join(ACT2FN)}")
    return config


def _read_window(keys: Keys, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """``sliding_window`` and ``full_layers`` of the head, None and () where no layer has a window."""
    stated = None if keys.get("sliding_window") is None else keys.integer("sliding_window")
    switched, first = keys.flag("use_sliding_window", True), keys.get("max_window_layers")
    window = stated if switched else None
    kinds = keys.get("layer_types")
    if kinds is None:
        if window is not None and first:
            raise CheckpointError(
                f"sliding_window is {window} and max_window_layers {first!r}, which not every engine counts alike; say "
                f'which of the {layers} layers slide as layer_types: ["{SLIDING}"] for one layer that does'
            )
        return window, ()
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(f"layer_types must be {layers} of {FULL} and {SLIDING}, one a layer, got {kinds!r}")
    if SLIDING not in kinds:
        return None, ()
    if window is None:
        raise CheckpointError(
            f"layer_types has {SLIDING}, but sliding_window is {stated!r} and use_sliding_window {switched!r}; name "
            "the window that the head was trained with, or make its layers full_attention"
        )
    return window, tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)


def _write_window(config: EagleConfig) -> dict[str, Any]:
    """Engines look for the kind of each layer; Qwen3's configuration forgets a window that is not switched on."""
    if config.sliding_window is None:
        return {}
    kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_hidden_layers)]
    return {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}


def _read_rope(keys: Keys) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Keys of a scaling that transformers does not know stay in it.
    """
    theta = keys.number("rope_theta", 10_000.0)
    older, newer = keys.nested("rope_scaling"), keys.nested("rope_parameters")
    rope = newer.rest() or older.rest()
    if FULL in rope or SLIDING in rope:
        raise CheckpointError(
            f"the rotary embedding differs by kind of layer ({', '.join(rope)}); a head has one for all of its layers"
        )
    theta = float(rope.pop("rope_theta", None) or theta)
    kind = rope.pop("type", None)
    rope = {"rope_type": rope.pop("rope_type", kind or "default"), **rope}
    if rope["rope_type"] not in ROPE_KINDS:
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}; expected {', '.join(ROPE_KINDS)}")
    return theta, None if rope == {"rope_type": "default"} else rope
