"""ModelOpt's configuration keys for EAGLE, their defaults, and why some can have no other value here.

Names and defaults are those of nvidia-modelopt 0.47 (``modelopt.torch.speculative.config``); where one differs, it says
so. Imports no torch and knows no model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "eagle_architecture_config"
VOCABULARY_IDS = "eagle_draft_vocab_ids"


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of the configuration."""

    default: Any
    """ModelOpt's, unless the table says otherwise."""
    refusal: str | None = None
    """Why another value than the default is refused; None: any value is honoured."""
    ours: bool = False
    """Forerun's own, unknown to ModelOpt; left out of the presets."""


_LORA = "the base model stays as it is, so nothing is trained inside it"
_LLAMA = "the head is a Llama-like decoder"
_PARALLEL = "the head drafts one token after the other"

KEYS: dict[str, Key] = {
    "eagle_offline": Key(
        default=False, refusal="features come from the model itself; train on stored ones with `forerun train eagle3`"
    ),
    "eagle_hidden_state_distillation": Key(default=False),
    "eagle_self_logit_distillation": Key(
        default=True, refusal="the head always learns the base model's own law, not the labels"
    ),
    "eagle_freeze_base_model": Key(default=True, refusal=_LORA),
    "eagle_report_acc": Key(default=True),
    "eagle_reuse_base_decoder": Key(default=False, refusal=_LLAMA),
    "eagle_loss_decay_factor": Key(default=0.9),
    ARCHITECTURE: Key(default={}),
    "eagle_decoder_type": Key(default="llama", refusal=_LLAMA),
    "eagle_ttt_steps": Key(default=3),
    "eagle_mix_hidden_states": Key(default=False, refusal="every step reads the keys of all steps before it"),
    # Speed alone: the loss does without a compiler, so both values mean the same.
    "eagle_use_torch_compile": Key(default=True),
    "eagle_enable_nvtx": Key(default=False, refusal="there are no NVTX ranges; use torch.profiler"),
    # ModelOpt exports yarn x 32, another rope than the head was trained with. Here a head is exported as it is.
    "eagle_export_rope_scaling": Key(default={}),
    "eagle_base_lora": Key(default=False, refusal=_LORA),
    "eagle_base_lora_rank": Key(default=64, refusal=_LORA),
    "eagle_base_lora_alpha": Key(default=16, refusal=_LORA),
    "eagle_base_lora_target_modules": Key(default=None, refusal=_LORA),
    "eagle_base_lora_preservation_loss_weight": Key(default=0.1, refusal=_LORA),
    "eagle_base_lora_warmup_steps": Key(default=0, refusal=_LORA),
    "eagle_base_lora_start_layer": Key(default=None, refusal=_LORA),
    "eagle_base_lora_logits_detach_prob": Key(default=0.5, refusal=_LORA),
    VOCABULARY_IDS: Key(default=None, ours=True),
}
"""Of the configuration itself. `eagle_draft_vocab_ids` (Vd,) names the tokens that the head can propose."""

ARCHITECTURE_KEYS: dict[str, Key] = {
    "hidden_act": Key(default="silu"),
    # Of the exported head; it trains in float32.
    "torch_dtype": Key(default="bfloat16"),
    "position_embedding_type": Key(default="rope", refusal="the head rotates its queries and keys"),
    "rope_scaling": Key(default={"rope_type": "default", "rope_theta": 10000}),
    "rope_theta": Key(default=10000),
    "num_hidden_layers": Key(default=1),
    "intermediate_size": Key(default=14336),
    "num_attention_heads": Key(default=32),
    "num_key_value_heads": Key(default=8),
    "head_dim": Key(default=128),
    "initializer_range": Key(default=0.01),
    "rms_norm_eps": Key(default=1e-5),
    "mlp_bias": Key(default=False),
    "attention_bias": Key(default=False),
    "attention_dropout": Key(default=0.0, refusal="the head has no dropout"),
    # The three that make an EAGLE-3 head; `settings` checks that they agree.
    "use_input_layernorm_in_first_layer": Key(default=True),
    "use_last_layernorm": Key(default=True),
    "use_aux_hidden_state": Key(default=True),
    "eagle_aux_hidden_state_layer_ids": Key(default=[]),
    "use_mtp_layernorm": Key(default=False, refusal="multi-token-prediction heads are of another kind"),
    "parallel_draft_step": Key(default=1, refusal=_PARALLEL),
    "parallel_draft_heads_num_layers": Key(default=1, refusal=_PARALLEL),
    "has_lm_head": Key(default=False),
    # Taken from the base model where they are not given.
    "hidden_size": Key(default=None, ours=True),
    "vocab_size": Key(default=None, ours=True),
    "draft_vocab_size": Key(default=None, ours=True),
    "max_position_embeddings": Key(default=None, ours=True),
    # Variants that ModelOpt 0.47 cannot train: EAGLE-3.1, speculators, Qwen3-like heads.
    "norm_before_residual": Key(default=False, ours=True),
    "norm_before_fc": Key(default=False, ours=True),
    "fc_norm": Key(default=False, ours=True),
    "norm_output": Key(default=False, ours=True),
    "qk_norm": Key(default=False, ours=True),
}
"""Of `eagle_architecture_config`."""


def preset(architecture: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A full configuration in ModelOpt's form, with these values in its architecture."""
    shape = {name: copy.deepcopy(key.default) for name, key in ARCHITECTURE_KEYS.items() if not key.ours}
    config = {name: copy.deepcopy(key.default) for name, key in KEYS.items() if not key.ours}
    return {"algorithm": "eagle", "config": {**config, ARCHITECTURE: {**shape, **(architecture or {})}}}


EAGLE3_DEFAULT_CFG: dict[str, Any] = preset()
"""An EAGLE-3 head: ``{"algorithm": "eagle", "config": {...}}``. Unlike in ModelOpt, `eagle_export_rope_scaling` is
empty: a head is exported with the rope that it was trained with."""

EAGLE1_DEFAULT_CFG: dict[str, Any] = preset(
    {"use_aux_hidden_state": False, "use_last_layernorm": False, "use_input_layernorm_in_first_layer": False}
)
"""An EAGLE-1 (and EAGLE-2) head as its published checkpoints are: no norm before the first layer, unlike ModelOpt's."""
