"""Which configurations can be verified losslessly, and how far. Looks at configurations and classes, not at weights."""

from __future__ import annotations

import logging
from typing import Any

from forerun.errors import UnsupportedModelError
from forerun.target.masks import MaskStyle

_log = logging.getLogger(__name__)


def text_config(model: Any) -> Any:
    """The configuration of a model's decoder."""
    return model.config.get_text_config(decoder=True)


def refuse_config(config: Any) -> None:
    """Refuse what cannot be verified, before any weight is loaded.

    Raises:
        UnsupportedModelError: an encoder-decoder, no causal LM, or recurrent state.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder model; forerun verifies decoder-only causal language models"
        )
    model_class = _class_for(config)
    if model_class is not None:
        refuse_stateful(model_class, kind)
    elif not getattr(config, "auto_map", None):
        raise UnsupportedModelError(
            f"{kind} is no causal language model: transformers has no AutoModelForCausalLM for it"
        )
    MaskStyle.of(config.get_text_config(decoder=True))


def refuse_stateful(model_class: Any, kind: str) -> None:
    """Raise UnsupportedModelError for a class that keeps recurrent state."""
    if getattr(model_class, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{kind} keeps a recurrent state (state space or linear attention), which cannot be rolled back to an "
            "arbitrary node of a tree; only full and sliding-window attention can be verified losslessly"
        )


def context_length(config: Any) -> int:
    """Positions that a text configuration allows.

    A rope that switches its frequencies on the batch's largest position (dynamic, longrope) would let one row change
    another's logits; below the original length it never switches, so the context ends there, and a warning says so.
    """
    announced = int(getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or 2**20)
    limit = min([announced, *_switch_points(config, announced)])
    if limit < announced:
        _log.warning(
            "%s: its rope changes all frequencies behind position %d, for every row of a batch at once; the context is "
            "therefore limited to %d of %d tokens",
            config.model_type,
            limit,
            limit,
            announced,
        )
    return limit


def _switch_points(config: Any, announced: int) -> list[int]:
    ropes = getattr(config, "rope_parameters", None) or {}
    nested = [rope for rope in ropes.values() if isinstance(rope, dict)]
    points = []
    for rope in nested or [ropes]:
        kind = rope.get("rope_type") or ""
        if kind == "longrope":
            original = rope.get("original_max_position_embeddings")
            points.append(int(original or getattr(config, "original_max_position_embeddings", None) or announced))
        elif "dynamic" in kind:
            points.append(announced)
    return points


def _class_for(config: Any) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
