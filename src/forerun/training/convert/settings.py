"""The configuration keys for EAGLE of nvidia-modelopt 0.47, and what they mean for a
head.

The defaults are those of ``modelopt.torch.speculative.config``, but for those that say so.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import ArgumentError, nearest
from forerun.heads.keys import NEUTRAL

ARCHITECTURE = "eagle_architecture_config"
VOCABULARY_IDS = "eagle_draft_vocab_ids"
FEATURE_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the configuration."""

    default: Any
    refusal: str | None = None  # Why another value than the default is refused; None: any value is honoured
    ours: bool = False  # Forerun's own, unknown to ModelOpt; left out of the presets


_LORA_DEFAULTS: dict[str, Any] = {
    **{"": False, "_rank": 64, "_alpha": 16.0, "_target_modules": [], "_preservation_loss_weight": 0.1},
    **{"_warmup_steps": 0, "_start_layer": None},
}
_MTP = "the layers that a checkpoint brings are trained by [('mtp', {})]"

KEYS: dict[str, Key] = {
    "eagle_offline": Key(False),
    "eagle_hidden_state_distillation": Key(False),
    "eagle_self_logit_distillation": Key(
        True, "the head always learns the base model's own distribution, not the labels"
    ),
    "eagle_freeze_base_model": Key(True),
    "eagle_report_acc": Key(True),
    "eagle_reuse_base_decoder": Key(False, _MTP),
    "eagle_loss_decay_factor": Key(0.9),
    ARCHITECTURE: Key({}),
    "eagle_decoder_type": Key("llama"),
    "eagle_ttt_steps": Key(3),
    "eagle_mix_hidden_states": Key(
        False, "every step reads the keys of all steps before it; a smaller eagle_ttt_steps costs less"
    ),
    # Speed alone: the loss does without a compiler, so both values mean the same.
    "eagle_use_torch_compile": Key(True),
    "eagle_enable_nvtx": Key(False, "there are no NVTX ranges; use torch.profiler"),
    # ModelOpt exports yarn x 32, another rope than the head was trained with. Here a head is exported as it is.
    "eagle_export_rope_scaling": Key({}),
    **{f"eagle_base_lora{name}": Key(default) for name, default in _LORA_DEFAULTS.items()},
    # ModelOpt's 0.5 lets the model learn, at half the steps, to be foreseen. Here it is always the teacher.
    "eagle_base_lora_logits_detach_prob": Key(1.0),
    VOCABULARY_IDS: Key(None, ours=True),  # (Vd,): the tokens that the head can propose
}

_LAYER_DEFAULTS: dict[str, Any] = {
    **{"num_hidden_layers": 1, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "initializer_range": 0.01, "rms_norm_eps": 1e-5, "mlp_bias": False, "attention_bias": False},
}
LATENT_SIZES = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
"""The sizes of Kimi-K2's latent attention."""
ARCHITECTURE_KEYS: dict[str, Key] = {
    "hidden_act": Key("silu"),
    # Dtype of the exported head; it trains in float32.
    "torch_dtype": Key("bfloat16"),
    "position_embedding_type": Key("rope", "the head rotates its queries and keys"),
    "rope_scaling": Key({"rope_type": "default", "rope_theta": 10000}),
    "rope_theta": Key(10000),
    **{name: Key(default) for name, default in _LAYER_DEFAULTS.items()},
    "attention_dropout": Key(0.0, "the head has no dropout"),
    # The three that make an EAGLE-3 head; they must agree.
    **{name: Key(NEUTRAL[name][0]) for name in ("use_input_layernorm_in_first_layer", "use_last_layernorm")},
    "use_aux_hidden_state": Key(True),
    "eagle_aux_hidden_state_layer_ids": Key([]),
    "use_mtp_layernorm": Key(NEUTRAL["use_mtp_layernorm"][0], _MTP),
    # Above 1 a P-EAGLE head, which drafts so many tokens in one pass.
    "parallel_draft_step": Key(NEUTRAL["parallel_draft_step"][0]),
    "parallel_draft_heads_num_layers": Key(
        NEUTRAL["parallel_draft_heads_num_layers"][0],
        "a P-EAGLE head drafts all tokens by the same layers; give it more by num_hidden_layers",
    ),
    "has_lm_head": Key(False),
    # Taken from the base model where they are not given.
    **dict.fromkeys(("hidden_size", "vocab_size", "draft_vocab_size", "max_position_embeddings"), Key(None, ours=True)),
    # Variants that ModelOpt 0.47 cannot train: EAGLE-3.1, speculators, Qwen3-like heads.
    **dict.fromkeys((*FEATURE_NORMS, "qk_norm"), Key(False, ours=True)),
}


KIMIK2_ARCHITECTURE_KEYS: dict[str, Key] = {
    **ARCHITECTURE_KEYS,
    "rope_scaling": Key(
        {
            **{"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "rope_theta": 50_000.0},
            **{"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        }
    ),
    "rope_theta": Key(50_000.0),
    "num_hidden_layers": Key(1, "the layers of Kimi-K2 above the first hold experts, which a head has not"),
    "intermediate_size": Key(18432),
    "num_attention_heads": Key(64),
    "num_key_value_heads": Key(64),
    "initializer_range": Key(0.02),
    "parallel_draft_step": Key(1, "a P-EAGLE head has ordinary attention; leave eagle_decoder_type at 'llama'"),
    **{name: Key(size) for name, size in LATENT_SIZES.items()},
}
"""The architecture's keys for ``eagle_decoder_type="kimik2"``, DeepSeek's latent attention.

What else ModelOpt's configuration of Kimi-K2 holds says nothing of a head of one layer.
"""
ARCHITECTURES = {"llama": ARCHITECTURE_KEYS, "kimik2": KIMIK2_ARCHITECTURE_KEYS}
"""The architecture's keys for each ``eagle_decoder_type``."""


def default_architecture(decoder: str = "llama", **given: Any) -> dict[str, Any]:
    """Return ModelOpt's default architecture of a head of this ``eagle_decoder_type``, with `given` values."""
    return {name: copy.deepcopy(key.default) for name, key in ARCHITECTURES[decoder].items() if not key.ours} | given


def preset(architecture: Mapping[str, Any] | None = None, **given: Any) -> dict[str, Any]:
    """Return a full configuration in ModelOpt's form, with these values in its architecture and beside it."""
    config = {name: copy.deepcopy(key.default) for name, key in KEYS.items() if not key.ours}
    shape = default_architecture(**(architecture or {}))
    return {"algorithm": "eagle", "config": {**config, **given, ARCHITECTURE: shape}}


EAGLE3_DEFAULT_CFG: dict[str, Any] = preset()
"""This preset is an EAGLE-3 head: ``{"algorithm": "eagle", "config": {...}}``.

It is exported with the rope that it was trained with.
"""

EAGLE1_DEFAULT_CFG: dict[str, Any] = preset(
    {"use_aux_hidden_state": False, "use_last_layernorm": False, "use_input_layernorm_in_first_layer": False}
)
"""This preset is an EAGLE-1 (and EAGLE-2) head as its published checkpoints are.

It has no norm before the first layer, unlike ModelOpt's.
"""

EAGLE_MTP_DEFAULT_CFG: dict[str, Any] = preset(
    {"use_aux_hidden_state": False, "use_mtp_layernorm": True}, eagle_reuse_base_decoder=True
)
"""This preset is ModelOpt's EAGLE head in the form of an MTP layer.

`convert` refuses it and names what trains the layers that a checkpoint brings.
"""

DTYPES = ("float32", "bfloat16", "float16")
SAME_NAME = (
    "hidden_act", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "initializer_range", "rms_norm_eps", "mlp_bias", "attention_bias", "norm_before_residual", "norm_before_fc",
    "fc_norm", "norm_output", "qk_norm",
)  # fmt: skip
"""`EagleConfig` has the same names for these architecture keys."""


def check_config(given: Any, known: Mapping[str, Key], where: str) -> dict[str, Any]:
    """Return `given` with the defaults of what is missing; errors as in `Mode`. `where`
    stands before its keys.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"convert: {where.rstrip('.') or 'the configuration'} must be a dict, got {reprlib.repr(given)}"
        )
    for name, value in given.items():
        if name not in known:
            raise ArgumentError(f"convert: unknown key {where}{name}.{nearest(str(name), known)}")
        key = known[name]
        if key.refusal is not None and value != key.default:
            raise ArgumentError(f"convert: {where}{name} must be {key.default!r}, got {value!r}: {key.refusal}")
        _check_type(value, key.default, where + name)
    return {name: given.get(name, copy.deepcopy(key.default)) for name, key in known.items()}


def _check_type(value: Any, default: Any, name: str) -> None:
    if (value is None and isinstance(default, dict | list | None)) or name.endswith(("torch_dtype", VOCABULARY_IDS)):
        return
    kind = int if default is None else float if name.endswith("rope_theta") else type(default)
    accepted: Any = {float: (int, float), dict: Mapping, list: Sequence}.get(kind, kind)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ArgumentError(f"convert: {name} must be of the type {kind.__name__}, got {value!r}")


def rope_of(shape: Mapping[str, Any], default: float = 10_000) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling``; the base, if it is not the `default`, may stand in either place."""
    scaling = dict(shape.get("rope_scaling") or {})
    theta = shape.get("rope_theta", default)
    stated = {value for value in (scaling.pop("rope_theta", default), theta) if value != default}
    if len(stated) > 1:
        raise ArgumentError(
            f"rope_theta is {theta}, but rope_scaling.rope_theta says otherwise "
            f"({', '.join(map(str, sorted(stated)))}); give one"
        )
    if "type" in scaling:
        scaling["rope_type"] = scaling.pop("type")
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": float(stated.pop() if stated else default), "rope_scaling": None if plain else scaling}
