"""Reads a configuration key by key, with types, and reports keys that were not read.

A key that nobody read is one of three: known to mean nothing to a head's computation (`MEANINGLESS`), known to change
it (`NEUTRAL`: refused), or unknown: kept, written back, and reported by name.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from forerun.errors import CheckpointError

NESTED, SPECULATORS = "eagle_config", "speculators"
"""These keys hold objects, in a configuration and among the keys that a head keeps of its file."""
MEANINGLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention attention_dropout
    attention_probs_dropout_prob attn_implementation auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping embd_pdrop embed_requires_grad encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing
    hidden_dropout hidden_dropout_prob id2label is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id
    length_penalty max_length min_length n_candidates no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type producer pruned_heads remove_invalid_values repetition_penalty resid_pdrop return_dict
    return_dict_in_generate sep_token_id speculators_version suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_k_tokens_per_head top_p torchscript
    transformers_version typical_p unk_token_id use_bfloat16 use_cache
    draft_num_hidden_layers step_loss_decay target_model_name_or_path ttt_length
    aux_loss_alpha ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq n_group n_routed_experts
    n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers qk_head_dim routed_scaling_factor
    scoring_func seq_aux topk_group topk_method train_router
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
)
"""No engine computes a draft with these keys.

They are names, versions, special tokens, sampling defaults, dropout, how a head was trained (DeepSpec's),
and the target's experts, which a head of dense layers does not have.
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # Factors, caps and other forms of the layers.
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1.0,)),
    **dict.fromkeys(("scale_emb", "partial_rotary_factor", "rotary_pct"), (1.0,)),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "scale_depth", "dim_model_base"), ()),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "clip_qkv", "attention_chunk_size"), ()),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), ()),
    **dict.fromkeys(("rope_is_neox_style", "is_causal"), (True,)),
    **dict.fromkeys(("sliding_window_non_causal", "qkv_bias", "shift_label", "causal_head"), (False,)),
    "output_multiplier": (1.0,),
    # Latent attention without rotation or with a gate (Kimi-K3's), and experts in the head.
    **dict.fromkeys(("mla_use_nope", "mla_use_output_gate", "use_moe"), (False,)),
    # Heads of other kinds that have the same tensors, or more: FR-Spec's vocabularies, HASS, TensorRT-LLM's variants,
    # DSpark, DFlash 2, of whose keys DFlash's format reads.
    **dict.fromkeys(("add_para_norm", "eh_proj_before_attn", "eh_proj_bias"), (False,)),
    **dict.fromkeys(("truncated_vocab_size", "hot_vocab_size"), ()),
    "markov_rank": (0,),
    "projector_type": ("dflash",),
    **dict.fromkeys(("selector_rank", "conv_kernel_size"), ()),
    # ModelOpt's, the first value its default: what makes an EAGLE-3 head, and layers of parallel heads that it lacks.
    **dict.fromkeys(("use_input_layernorm_in_first_layer", "use_last_layernorm"), (True,)),
    **{"use_mtp_layernorm": (False,), "parallel_draft_step": (1,), "parallel_draft_heads_num_layers": (1, 0)},
    # Drafting several tokens in one pass with a mask token.
    **dict.fromkeys(("ptd_token_id", "pard_token", "mask_token_id", "dspark_noise_token_id"), ()),
    "parallel_drafting": (False,),
    # Layers that are read, under names that this format does not have.
    **dict.fromkeys(("layer_ids", "aux_hidden_state_layer_ids", "dspark_target_layer_ids"), ()),
}
"""These keys change what a head computes in ways that forerun does not know, except for null and
the values given here.
"""
ROPE = frozenset(
    """
    rope_type factor original_max_position_embeddings attention_factor beta_fast beta_slow mscale mscale_all_dim
    truncate low_freq_factor high_freq_factor short_factor long_factor mrope_section mrope_interleaved
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
)
"""The keys of ``rope_scaling`` that transformers uses."""
OBJECTS: dict[str, Container[str]] = {"rope_scaling": ROPE, NESTED: MEANINGLESS, SPECULATORS: ("proposal_methods",)}
"""These objects have known keys, which are checked one by one."""


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a configuration's architectures, an empty list if it has none.
    CheckpointError: they are no list of names.
    """
    names = config.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"architectures of config.json must be a list of names, got {names!r}")
    return list(names)


class Keys:
    """Reads the keys of a JSON object; absent and null are the same."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self._where = dict(values), where
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """Return the value as it is, or None."""
        self._read.add(name)
        return self._values.get(name)

    def pass_over(self, *names: str) -> None:
        """Count keys as read that are said again when the head is written, from what it is."""
        self._read.update(names)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number, or the default where the key is absent."""
        if self.get(name) is None and default is None:
            raise CheckpointError(f"{self._where} has no {name}; a head's configuration needs it")
        return int(self._get_typed(name, default, int, "a whole number"))

    def number(self, name: str, default: float) -> float:
        return float(self._get_typed(name, default, int | float, "a number"))

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self._get_typed(name, default, bool, "true or false"))

    def text(self, name: str, default: str) -> str:
        return str(self._get_typed(name, default, str, "a string"))

    def _get_typed(self, name: str, default: Any, kind: Any, wanted: str) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(name, value, wanted)
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return a list of whole numbers, None if it is absent or empty."""
        value = self.get(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list | tuple) or not all(type(entry) is int for entry in value):
            raise self._wrong(name, value, "a list of whole numbers")
        return tuple(value)

    def nested(self, name: str) -> Keys:
        """Return the keys of an object inside this one, empty if it is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return Keys(value or {}, f"{name} in {self._where}")

    def rest(self) -> dict[str, Any]:
        """Return the keys that were not read and are not null."""
        rest = {name: value for name, value in self._values.items() if name not in self._read and value is not None}
        for name, value in rest.items():
            if name in NEUTRAL and value not in NEUTRAL[name]:
                raise CheckpointError(
                    f"{self._where} has {name} {value!r}, which changes what a head computes and is not supported; "
                    f"expected {' or '.join(map(repr, (None, *NEUTRAL[name])))} or no such key. Draft with the "
                    "engine that the head was made for"
                )
        return rest

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{name} of {self._where} must be {wanted}, got {value!r}")


def unknown_keys(extra: Mapping[str, Any], known: Container[str] = MEANINGLESS) -> list[str]:
    """Return the names of the keys in `extra` that are unknown, with a dot for those inside the
    objects of `OBJECTS`.
    """
    unknown = list[str]()
    for name, value in extra.items():
        if name in OBJECTS and isinstance(value, Mapping):
            unknown += [f"{name}.{inner}" for inner in unknown_keys(value, OBJECTS[name])]
        elif value is not None and name not in known and value not in NEUTRAL.get(name, ()):
            unknown.append(name)
    return unknown


LAYERS, WHOLE, KIND = "transformer_layer_config", "speculators_config", "speculators_model_type"
NON_CAUSAL = "sliding_window_non_causal"
