"""The keys of a head's decoder layers, named as in transformers. Flat or nested, all formats share them.

Knows nothing of features, boundaries or draft vocabularies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forerun.checkpoints.keys import Keys
from forerun.drafters.heads.config import EagleConfig
from forerun.errors import ArgumentError, CheckpointError


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
    for name in ("model_type", "torch_dtype", "dtype"):
        keys.get(name)  # said again when written, from what the head is
    return {
        "hidden_size": size,
        "intermediate_size": keys.integer("intermediate_size"),
        "num_hidden_layers": keys.integer("num_hidden_layers", 1),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", size // heads),
        "hidden_act": keys.text("hidden_act", "silu"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "vocab_size": keys.integer("vocab_size"),
        "max_position_embeddings": keys.integer("max_position_embeddings", 2048),
        "rope_theta": theta,
        "rope_scaling": scaling,
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
    }


def window_notes(extra: Mapping[str, Any]) -> tuple[str, ...]:
    """What to tell the user of a head that was trained with a sliding window, which is kept in the file only."""
    if "sliding_attention" not in (extra.get("layer_types") or []):
        return ()
    window = extra.get("sliding_window")
    return (
        f"The head was trained with a sliding window of {window} positions; forerun attends to all of them, so drafts "
        "beyond that may get worse.",
    )


def make_config(**fields: Any) -> EagleConfig:
    """`EagleConfig` of what a file says; CheckpointError where its keys contradict each other."""
    try:
        return EagleConfig(**fields)
    except ArgumentError as error:
        raise CheckpointError(f"config.json describes no head that can be built: {error}") from error


def _read_rope(keys: Keys) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``."""
    theta = keys.number("rope_theta", 10_000.0)
    older, newer = keys.nested("rope_scaling"), keys.nested("rope_parameters")
    rope = newer.rest() or older.rest()
    theta = float(rope.pop("rope_theta", None) or theta)
    kind = rope.pop("type", None)
    rope = {"rope_type": rope.pop("rope_type", kind or "default"), **rope}
    return theta, None if rope["rope_type"] == "default" else rope
