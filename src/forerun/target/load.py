"""Opens a checkpoint as a transformers causal LM and refuses what is broken or cannot be verified. First version."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to open a checkpoint; what transformers' ``from_pretrained`` calls the same."""

    dtype: Any = "auto"
    device: Any = None
    device_map: Any = None
    tp_plan: Any = None
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    token: str | bool | None = None


def open_model(name: str | Path, options: LoadOptions) -> Any:
    """The model, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=options.dtype,
            device_map=options.device_map,
            revision=options.revision,
            trust_remote_code=options.trust_remote_code,
            token=options.token,
        )
    except OSError as error:
        raise CheckpointError(f"cannot open {name}: {error}") from error
    if options.device is not None and options.device_map is None:
        model = model.to(options.device)
    return model.eval()


def text_config(model: Any) -> Any:
    """The configuration of the decoder."""
    return model.config.get_text_config(decoder=True)


def refuse_unsupported(model: Any) -> None:
    """Raise UnsupportedModelError for an encoder-decoder or a model with recurrent state."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{model.config.model_type} is an encoder-decoder model; forerun verifies decoders only"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{model.config.model_type} keeps a recurrent state, which cannot be rolled back to a tree node"
        )
