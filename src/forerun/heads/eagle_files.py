"""The flat format of EAGLE and SpecForge, which every engine reads: one configuration, tensors ``midlayer.*``.

Both lists of layer ids are written, each in its own convention, so that vLLM and SGLang read the same states. EAGLE-1
and EAGLE-2 heads have the same format with ``layers.0.*``; so have DeepSpec's EAGLE-3 heads (``Qwen3Eagle3Model``),
with ``target_layer_ids`` (deepspec/modeling/eagle3: the output of layer i, ``hidden_states[i + 1]``), and heads with
latent attention (``Eagle3DeepseekV2ForCausalLM``: vLLM's deepseek_eagle3.py, SGLang's kimi_k25_eagle3.py, TorchSpec).

NVIDIA ModelOpt's export: flat keys, an ``eagle_config`` that describes the layer norms, tensors ``layers.0.*``.

ModelOpt counts layers from 0; the boundary list is written too, because vLLM reads nothing else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from forerun.errors import CheckpointError
from forerun.heads import decoders
from forerun.heads.decoders import to_file
from forerun.heads.eagle import EagleConfig
from forerun.heads.files import Config, Format, HeadCheckpoint, TargetFacts, Tensors, Written
from forerun.heads.keys import NESTED, NEUTRAL, Keys, architectures
from forerun.types import LAST_HIDDEN

LLAMA, QWEN3, FIRST_GENERATION = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLMEagle"
LATENT, KIMI = "Eagle3DeepseekV2ForCausalLM", "kimi_k2"
"""Architecture and ``model_type`` of heads with latent attention. vLLM would take ``deepseek_v3``
for MTP layers.
"""
OTHER_KINDS = re.compile(r"PEagle|DFlash|DSpark|Medusa|Gemma4Eagle3", re.IGNORECASE)
"""Matches architectures of heads that are no EAGLE heads as we know them."""
INNER = f"{NESTED}.{decoders.IDS}"
SEMANTICS = "eagle_aux_layer_semantics"  # vLLM's: whether the ids at the top count as SGLang's
TARGET_LAYERS = "num_target_layers"
REGULAR = "next_layer_regular"  # TensorRT-LLM's and ModelOpt's, inside ``eagle_config``
SECOND = re.compile(r"layers\.1\.self_attn\.(q_proj|q_a_proj)\.weight")
POST_NORM = "return_hidden_post_norm"  # TensorRT-LLM's name of ``norm_output``, inside ``eagle_config``
FEEDBACK_NOTE = (
    "norm_output is read as vLLM, SGLang and TensorRT-LLM read it: the next step gets the normed output. SpecForge up "
    "to 0.2 wrote the same key for a norm before lm_head only; if this head is from there, set norm_output to false."
)
COUNTED_NOTE = (
    f"The layer ids in {NESTED} are read as layers counted from 0, as SGLang, SpecForge and ModelOpt mean them. Some "
    f"publishers wrote boundaries there (one more); if hardly any draft is accepted, say them on top as {decoders.IDS}."
)
UNREAD_NOTE = (
    f"{NESTED}.use_aux_hidden_state is false, so the head reads the last hidden state; the layers that "
    "config.json names are read by nobody and not written."
)
TIED_NOTE = "tie_word_embeddings is true; SGLang would then ignore the head's own lm_head. Written false."


class FlatFormat(Format):
    """Heads of SafeAILab/EAGLE and SpecForge, as vLLM, SGLang, TensorRT-LLM and LMDeploy load them."""

    name = "flat"

    def recognises(self, config: Config) -> bool:
        """Return True for any transformers-like configuration that is not marked as another
        format's.
        """
        return "hidden_size" in config and not any("dflash" in key for key in config)

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        return is_eagle_head(config, names)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        return read_flat(config, tensors, num_layers)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        single = config.generation == 3 and config.num_hidden_layers == 1
        return write_flat(checkpoint), decoders.to_file(
            checkpoint, first=decoders.MIDLAYER if single else decoders.FIRST
        )


def is_eagle_head(config: Config, names: Collection[str]) -> bool:
    """Return whether files hold an EAGLE head and no whole model. Every such head fuses the target's states with ``fc``
    or norms them with ``hidden_norm``; where the names of the tensors are unknown, ``config.json`` decides.
    """
    if names:
        return any(name == "fc.weight" or name.endswith(".hidden_norm.weight") for name in names)
    return "draft_vocab_size" in config or "eagle" in " ".join(architectures(config)).lower()


def read_flat(
    config: Config, tensors: Tensors, num_layers: int | None, made: type[EagleConfig] = EagleConfig, **own: Any
) -> HeadCheckpoint:
    """Read a head whose configuration is flat, as a `made` with fields of its `own`. Raises as
    `Format.read` does.
    """
    keys = Keys(config)
    if OTHER_KINDS.search(names := " ".join(map(str, keys.get("architectures") or []))):
        raise CheckpointError(f"a head of the architecture {names} is no EAGLE head of dense layers; expected {LLAMA}")
    nested, fields = keys.nested(NESTED), decoders.read_layers(keys)
    regular = _regular(nested, tensors, fields["hidden_size"])
    canonical = decoders.to_canonical(tensors, regular=regular)
    if "layers.0.input_layernorm.weight" in canonical and not any(
        ".mlp." in name or "fc." in name for name in canonical
    ):
        raise CheckpointError(
            "the tensors are those of a Kangaroo adapter, whose file does not say after how many layers of the target "
            'it stands: write it into config.json, as "exit_layer": 2'
        )
    generation = _generation(keys, canonical)
    fields |= {"next_layer_regular": regular, **_read_features(keys, nested, fields["hidden_size"])}
    ids, layers = _layer_ids(keys, nested, num_layers), _target_layers(keys, num_layers)
    if generation == 3 and fields["use_aux_hidden_state"]:
        fields["boundaries"] = decoders.agree_boundaries(
            *ids, count=keys.get("num_aux_hidden_states"), num_layers=layers
        )
    else:
        keys.get("num_aux_hidden_states")
        fields["boundaries"] = (LAST_HIDDEN,)
    named = [one.name for one in ids if one.ids is not None]
    if latent := decoders.read_latent(keys):
        fields |= {"latent": latent, "head_dim": latent.qk_rope_head_dim}  # as transformers has it; no engine reads it
    declared_bias, rest = keys.get("bias"), nested.rest()
    notes = {
        FEEDBACK_NOTE: fields["norm_output"],
        TIED_NOTE: keys.flag("tie_word_embeddings"),
        COUNTED_NOTE: generation == 3 and named == [INNER],
        UNREAD_NOTE: not fields["use_aux_hidden_state"] and bool(named),
    }
    return decoders.make_head(
        made,
        canonical,
        notes,
        **fields,
        **own,
        generation=generation,
        draft_vocab_size=keys.integer("draft_vocab_size", fields["vocab_size"]),
        fc_bias="fc.bias" in canonical if declared_bias is None else bool(declared_bias),
        qk_norm=QWEN3 in (keys.get("architectures") or []),
        extra=keys.rest() | ({NESTED: rest} if rest else {}),
    )


def _layer_ids(keys: Keys, nested: Keys, num_layers: int | None) -> list[decoders.LayerIds]:
    """Return all lists of layer ids: at the top, inside, and DeepSpec's."""
    counting, inner = keys.text(SEMANTICS, "vllm"), nested.integers(decoders.IDS)
    if counting not in ("vllm", "sglang"):
        raise CheckpointError(f"{SEMANTICS} of config.json must be vllm or sglang, got {counting!r}")
    return [
        decoders.LayerIds(decoders.IDS, keys.integers(decoders.IDS), outputs=counting == "sglang"),
        # No layer has the number of layers for its id: then they are boundaries (NVIDIA's third head of gpt-oss-120b).
        decoders.LayerIds(INNER, inner, outputs=inner is None or num_layers is None or max(inner) != num_layers),
        *(
            decoders.LayerIds(decoders.LAYER_IDS, part.integers(decoders.LAYER_IDS), outputs=True)
            for part in (keys, nested)
        ),
    ]


def _target_layers(keys: Keys, num_layers: int | None) -> int | None:
    """Return the number of the target's layers, which DeepSpec's files state. Raises
    CheckpointError if the target has another number.
    """
    stated = keys.get(TARGET_LAYERS) and keys.integer(TARGET_LAYERS)
    if None not in (stated, num_layers) and stated != num_layers:
        raise CheckpointError(
            f"the head was made for a target of {stated} layers ({TARGET_LAYERS} of config.json), this one has "
            f"{num_layers}: name the right target"
        )
    return num_layers or stated


def _regular(nested: Keys, tensors: Mapping[str, Tensor], size: int) -> bool:
    """Return whether layers above the first read the residual stream alone. The width of the second
    layer decides, for DeepSpec's files have no key. Raises CheckpointError if TensorRT-LLM's key
    says otherwise.
    """
    widths = [tensor.shape[-1] for name, tensor in tensors.items() if SECOND.fullmatch(name)]
    regular, stated = 2 * size not in widths, nested.flag(REGULAR, not widths or 2 * size not in widths)
    if widths and stated != regular:
        raise CheckpointError(
            f"{NESTED}.{REGULAR} is {str(stated).lower()}, but the second layer's attention reads {widths[0]} values, "
            f"twice the hidden size of {size} where it is false; correct the key"
        )
    return regular


def _generation(keys: Keys, tensors: Mapping[str, Tensor]) -> int:
    """Return 1 or 3: by the architecture's name, else by the norm that only an EAGLE-3 layer has."""
    names = " ".join(map(str, keys.get("architectures") or []))
    if "deepseek" in names.lower() and not keys.get("kv_lora_rank"):
        raise CheckpointError(f"config.json has no kv_lora_rank; a head of the architecture {names} needs it")
    stated = re.search(r"eagle(3?)", names, re.IGNORECASE)
    if stated:
        return 3 if stated[1] else 1
    return 3 if "layers.0.hidden_norm.weight" in tensors else 1


def _read_features(keys: Keys, nested: Keys, size: int) -> dict[str, Any]:
    """Return how features are fused and fed back. Aliases: SGLang's ``use_aux_norm``,
    TensorRT-LLM's `POST_NORM`.
    """
    feedback = [keys.flag(name) for name in ("norm_output", POST_NORM) if keys.get(name) is not None]
    feedback += [nested.flag(POST_NORM)] if nested.get(POST_NORM) is not None else []
    if len(set(feedback)) > 1:
        raise CheckpointError(
            f"config.json contradicts itself about what the next step reads: norm_output is {keys.get('norm_output')}, "
            f"{POST_NORM} {keys.get(POST_NORM)} and in {NESTED} {nested.get(POST_NORM)}; find out which one the head "
            "was trained with and remove the others"
        )
    return {
        "target_hidden_size": keys.integer("target_hidden_size", size),
        "use_aux_hidden_state": nested.flag("use_aux_hidden_state", True),
        "norm_before_residual": keys.flag("norm_before_residual"),
        "norm_before_fc": nested.flag("norm_before_fc", keys.flag("norm_before_fc")),
        "fc_norm": keys.flag("fc_norm", keys.flag("use_aux_norm")),
        "norm_output": any(feedback),
    }


def write_flat(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Return the flat configuration; keys that had no meaning here are written back where they
    were.
    """
    config = checkpoint.config
    keys: dict[str, Any] = {
        "architectures": [FIRST_GENERATION if config.generation == 1 else QWEN3 if config.qk_norm else LLAMA],
        **decoders.write_layers(config),
        "torch_dtype": decoders.dtype_name(checkpoint),
        "target_hidden_size": config.target_hidden_size,
        # Null tells SGLang to take the target's output head.
        "draft_vocab_size": config.draft_vocab_size if config.own_lm_head else None,
        **{flag: getattr(config, flag) for flag in decoders.FLAGS if config.generation == 3 or getattr(config, flag)},
    }
    if config.generation == 1 and not config.fc_bias:
        # EAGLE's own code takes its absence for true. True would be for fc, but engines give the attention biases then.
        keys["bias"] = False
    if config.generation == 3:
        nested: dict[str, Any] = {"use_aux_hidden_state": config.use_aux_hidden_state}
        if config.use_aux_hidden_state:
            nested[decoders.IDS] = decoders.to_outputs(config.boundaries)
            keys |= {"num_aux_hidden_states": len(config.boundaries), decoders.IDS: list(config.boundaries)}
        if config.norm_before_fc:
            nested["norm_before_fc"] = True  # where TensorRT-LLM looks for it
        if config.norm_output:
            nested[POST_NORM] = True  # likewise
        if not config.next_layer_regular:
            nested[REGULAR] = False
        keys[NESTED] = {**config.extra.get(NESTED, {}), **nested}
    if config.latent is not None:
        keys |= {"architectures": [LATENT], "model_type": KIMI, **dataclasses.asdict(config.latent)}
        del keys["head_dim"]
    return {**config.extra, **keys}


NAMES = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "parallel_draft_step")
LAYER_NORMS = {name: NEUTRAL[name][0] for name in NAMES}
"""ModelOpt's own keys, at the values that make an EAGLE-3 head; other values make a head of another
kind.
"""


class ModelOptFormat(Format):
    """EAGLE-3 heads that ModelOpt's ``export_hf_checkpoint`` writes."""

    name = "modelopt"

    def recognises(self, config: Config) -> bool:
        """Return whether ``eagle_config`` has keys that nobody else writes."""
        nested = config.get(NESTED)
        return isinstance(nested, Mapping) and any(key in nested for key in LAYER_NORMS)

    def is_head(self, config: Config, names: Collection[str]) -> bool:
        return is_eagle_head(config, names)

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        # Keys that ModelOpt no longer uses are null; those of a head of another kind are refused by `Keys.rest`.
        nested = {name: value for name, value in config[NESTED].items() if value != LAYER_NORMS.get(name)}
        return read_flat({**config, NESTED: nested}, tensors, num_layers)

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        # Written without ``t2d``, as ModelOpt does.
        if checkpoint.config.generation != 3:
            raise CheckpointError("ModelOpt's format is written for EAGLE-3 heads only; use flat for EAGLE-1 and -2")
        keys = write_flat(checkpoint)
        return {**keys, NESTED: {REGULAR: True, **keys[NESTED], **LAYER_NORMS}}, to_file(checkpoint, t2d=False)
