"""A fresh EAGLE-3 head for a target: shape from the target's configuration, output head from the target's own rows.

Knows no data and no optimiser.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.drafters.heads.config import EagleConfig, default_boundaries
from forerun.drafters.heads.eagle import EagleHead
from forerun.errors import ArgumentError, nearest
from forerun.target.parts import base_of

FREE = (
    "boundaries",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "hidden_act",
    "sliding_window",
    "full_layers",
    "attention_bias",
    "mlp_bias",
    "qk_norm",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "own_embedding",
    "own_lm_head",
    "initializer_range",
)
"""What may be chosen; the rest follows from the target."""


def head_config(
    model: Any, draft_vocab_size: int | None = None, options: Mapping[str, Any] | None = None
) -> EagleConfig:
    """The shape of a head for a transformers causal LM.

    Args:
        model: the target.
        draft_vocab_size: tokens that the head can propose; None is all of them.
        options: fields of `EagleConfig` that shall differ from the target's.

    Raises:
        ArgumentError: an unknown option (naming the nearest), or one that does not fit the target.
    """
    config = model.config.get_text_config()
    for name in options or {}:
        if name not in FREE:
            raise ArgumentError(f"a head has no option {name!r}; it has {', '.join(FREE)}.{nearest(name, FREE)}")
    rope = dict(getattr(config, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10_000.0)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    heads = config.num_attention_heads
    found: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": draft_vocab_size or config.vocab_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        **(options or {}),
    }
    found["boundaries"] = tuple(found.get("boundaries") or default_boundaries(config.num_hidden_layers))
    found["full_layers"] = tuple(found.get("full_layers") or ())
    made = EagleConfig(**found)
    if max(made.boundaries) > config.num_hidden_layers:
        raise ArgumentError(
            f"boundary {max(made.boundaries)} does not exist: the target has {config.num_hidden_layers} layers"
        )
    return made


@torch.no_grad()
def fresh_head(model: Any, config: EagleConfig, token_ids: Tensor | None = None, *, seed: int = 0) -> EagleHead:
    """An untrained head in float32; output head, final norm and own embedding start as the target's.

    Args:
        model: the target.
        config: from `head_config`.
        token_ids: (Vd,) the target's ids that the head can propose; needed if the vocabulary is reduced.
    """
    if config.reduced_vocabulary and token_ids is None:
        raise ArgumentError(f"a draft vocabulary of {config.draft_vocab_size} tokens needs to know which ones")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(config).float()
    rows = slice(None) if token_ids is None else token_ids
    if token_ids is not None:
        head.set_vocabulary(token_ids)
    if config.own_lm_head:
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[rows].float())
    if config.own_embedding:
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight.float())
    norm = _final_norm(model)
    if config.generation == 3 and norm is not None and norm.shape == (config.hidden_size,):
        head.norm.load_state_dict({"weight": norm.float()})
    return head


def _final_norm(model: Any) -> Tensor | None:
    """Weight of the target's final norm where it is a plain RMS norm called ``norm``; Gemma's is off by one."""
    norm = getattr(base_of(model), "norm", None)
    weight = getattr(norm, "weight", None)
    return weight if weight is not None and "gemma" not in model.config.model_type else None
