"""The parts that the formats of EAGLE heads share: tensor names, layer ids, and the keys of their
decoder layers.

Our layer ids are boundaries: b is the state after b layers. Top-level lists (vLLM, EAGLE, speculators) mean the same.
Lists inside ``eagle_config`` (SGLang, SpecForge, ModelOpt), ``target_layer_ids`` (DeepSpec: EAGLE-3, DFlash and DSpark
alike; vLLM adds one) and TensorRT-LLM's YAML name the 0-based layer whose output is read, one less. Taking one for the
other costs most of the acceptance and raises no error anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from forerun.errors import ArgumentError, CheckpointError, refuse
from forerun.heads.eagle import default_boundaries
from forerun.heads.files import HeadCheckpoint, make_config, target_mask, with_vocabulary
from forerun.heads.keys import Keys
from forerun.heads.layers import ROPE_KINDS, DecoderConfig, LatentConfig
from forerun.model.masks import FULL, SLIDING
from forerun.types import LAST_HIDDEN

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields of `EagleConfig` that say how features are normed."""
MIDLAYER, FIRST = "midlayer.", "layers.0."
ALIASES = {f"aux_norm_{where}.weight": f"fc_norm.{i}.weight" for i, where in enumerate(("low", "mid", "high"))}
"""SGLang's earlier names of the norms before ``fc``."""
UPPER_HIDDEN_NORM = re.compile(r"layers\.[1-9]\d*\.hidden_norm\.weight")


def to_canonical(tensors: Mapping[str, Tensor], *, regular: bool = True) -> dict[str, Tensor]:
    """Return a file's tensors under forerun's names, without those that are recomputed
    (``rotary_emb.inv_freq``); ``t2d`` stays.

    `regular` layers above the first have one norm that vLLM calls ``input_layernorm`` and SGLang ``hidden_norm``;
    either name is taken, both if they are equal. CheckpointError if they differ, or a tensor is there twice.
    """
    canonical = canonical_names(tensors)
    if not regular:
        return canonical
    for hidden_norm in [name for name in canonical if UPPER_HIDDEN_NORM.fullmatch(name)]:
        ours, tensor = hidden_norm.replace("hidden_norm", "input_layernorm"), canonical.pop(hidden_norm)
        if ours in canonical and not torch.equal(canonical[ours], tensor):
            raise CheckpointError(
                f"{ours} and {hidden_norm} differ: vLLM reads the first, SGLang and TensorRT-LLM the second, and "
                "nothing says which one the head was trained with; remove the other"
            )
        canonical.setdefault(ours, tensor)
    return canonical


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors as `to_canonical` does, but keep both names of a norm above the first layer."""
    canonical: dict[str, Tensor] = {}
    for stored, tensor in tensors.items():
        if stored.endswith("rotary_emb.inv_freq"):
            continue
        name = re.sub(r"^midlayer\.", FIRST, ALIASES.get(stored, stored))
        if name in canonical:
            raise CheckpointError(f"the tensor {name} is stored twice, once as {stored}; remove one of them")
        canonical[name] = tensor
    return canonical


def to_file(checkpoint: HeadCheckpoint, *, first: str = FIRST, t2d: bool = True) -> dict[str, Tensor]:
    """Return the tensors under the names of a file whose first layer is called `first`; EAGLE-3's
    norms above it get both names. ``d2t``, and ``t2d`` if asked for, are included where draft ids
    are not the target's ids.
    """
    config = checkpoint.config
    tensors = dict(checkpoint.tensors)
    d2t = tensors.pop("d2t")
    twice = getattr(config, "next_layer_regular", False) and config.generation == 3
    for layer in range(1, config.num_hidden_layers) if twice else ():
        norm = tensors[f"layers.{layer}.input_layernorm.weight"]
        tensors[f"layers.{layer}.hidden_norm.weight"] = norm.clone()
    tensors = {re.sub(r"^layers\.0\.", first, name): tensor for name, tensor in tensors.items()}
    if config.reduced_vocabulary or bool(d2t.any()):
        tensors["d2t"] = d2t
        if t2d:
            tensors["t2d"] = target_mask(d2t, config.vocab_size)
    return tensors


IDS = "eagle_aux_hidden_state_layer_ids"  # The key's name, at the top and in `NESTED`
LAYER_IDS = "target_layer_ids"  # DeepSpec's, of every kind of head


def to_outputs(boundaries: Sequence[int]) -> list[int]:
    """Return the 0-based layers whose outputs are these boundaries. Raises CheckpointError for the
    state after the final norm.
    """
    if LAST_HIDDEN in boundaries:
        raise CheckpointError(
            "the head reads the target's state after the final norm; no format of EAGLE-3 heads has a layer id for "
            "that. Train the head on boundaries instead."
        )
    return [boundary - 1 for boundary in boundaries]


def from_outputs(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the boundaries after these 0-based layers."""
    return tuple(layer + 1 for layer in layers)


@dataclass(frozen=True, slots=True)
class LayerIds:
    """One list of layer ids in a file."""

    name: str
    ids: tuple[int, ...] | None  # None: the file has no such list
    outputs: bool  # They name the 0-based layers whose outputs are read, else boundaries

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The boundaries that the list means; empty if the file has no such list."""
        return (from_outputs if self.outputs else tuple)(self.ids or ())

    def __str__(self) -> str:
        counts = f"layers from 0 and so means {list(self.boundaries)}" if self.outputs else "boundaries"
        return f"{self.name} {list(self.ids or ())} counts {counts}"


def agree_boundaries(*stated: LayerIds, count: int | None, num_layers: int | None) -> tuple[int, ...]:
    """Return the boundaries that a file means, from its lists of ids and their `count`.

    Without ids it is the default for a target of `num_layers`. CheckpointError for what contradicts itself, or if there
    are neither ids nor `num_layers`.
    """
    lists = [ids for ids in stated if ids.ids is not None]
    if len({ids.boundaries for ids in lists}) > 1:
        raise CheckpointError(
            f"config.json contradicts itself about the target's layers: {'; '.join(map(str, lists))}. Find out which "
            "ones the head was trained on and correct the others."
        )
    if lists:
        boundaries = lists[0].boundaries
    elif num_layers is None:
        raise CheckpointError(
            f"config.json names no layers ({IDS}), so it means the default, which depends on the target's number of "
            "layers: name the target"
        )
    else:
        try:
            boundaries = default_boundaries(num_layers)
        except ArgumentError as error:
            raise CheckpointError(str(error)) from error
    if count is not None and count != len(boundaries):
        raise CheckpointError(
            f"num_aux_hidden_states is {count}, but {IDS} means {len(boundaries)} boundaries {boundaries}"
        )
    return boundaries


def dtype_name(checkpoint: HeadCheckpoint) -> str:
    """Return ``torch_dtype`` for a file: the dtype of the layers' weights."""
    return str(checkpoint.tensors["layers.0.self_attn.o_proj.weight"].dtype).removeprefix("torch.")


def is_default(boundaries: Sequence[int], num_layers: int) -> bool:
    """Return whether engines that are told no ids would read these boundaries of such a target."""
    return tuple(boundaries) == (2, num_layers // 2, num_layers - 3)


SAME_NAME = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias", "mlp_bias",
    "initializer_range",
)  # fmt: skip
"""Keys of a file that are named as in `DecoderConfig`."""
WINDOW_NOTE = (
    "sliding_window without layer_types is read as the window of every layer, which is how the head is drafted with. "
    "vLLM applies a window only where layer_types names it. Written with layer_types."
)


def read_layers(keys: Keys) -> dict[str, Any]:
    """Return the fields of `DecoderConfig` that describe its layers. Raises CheckpointError if a
    key is missing or wrong.
    """
    size, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    refuse(
        (heads < 1, f"num_attention_heads must be at least 1, got {heads}"),
        (
            keys.get("quantization_config"),
            "config.json has a quantization_config; only heads in floating point are supported",
        ),
        error=CheckpointError,
    )
    keys.pass_over("model_type", "torch_dtype", "dtype")
    layers = keys.integer("num_hidden_layers", 1)
    return {
        "hidden_size": size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **{name: keys.integer(name) for name in ("intermediate_size", "vocab_size")},
        "num_key_value_heads": keys.integer("num_key_value_heads", heads),
        "head_dim": keys.integer("head_dim", size // heads),
        "hidden_act": keys.text("hidden_act", "silu"),
        "rms_norm_eps": keys.number("rms_norm_eps", 1e-6),
        "max_position_embeddings": keys.integer("max_position_embeddings", 2048),
        **{name: keys.flag(name) for name in ("attention_bias", "mlp_bias")},
        "initializer_range": keys.number("initializer_range", 0.02),
        **_read_rope(keys),
        **_read_window(keys, layers),
    }


def read_latent(keys: Keys) -> LatentConfig | None:
    """Return the latent attention that keys named as in DeepSeek's configurations describe; None if
    the layers have ordinary attention.
    """
    names = [one.name for one in fields(LatentConfig) if one.name != "rope_interleave"]
    sizes: dict[str, Any] = {name: (keys.get(name) and keys.integer(name)) or None for name in names}
    interleave = keys.flag("rope_interleave", True)
    if not sizes["kv_lora_rank"]:
        return None
    lacking = [name for name, size in sizes.items() if not size and name != "q_lora_rank"]
    if lacking:
        raise CheckpointError(f"config.json has kv_lora_rank, but no {', '.join(lacking)}")
    return LatentConfig(**sizes, rope_interleave=interleave)


def write_layers(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys that `read_layers` reads; ``tie_word_embeddings`` is false, because true
    would hide the output head.
    """
    window: dict[str, Any] = {}
    if config.sliding_window is not None:
        # Engines look for the kind of each layer; Qwen3's configuration forgets a window that is not switched on.
        kinds = [FULL if config.window(layer) is None else SLIDING for layer in range(config.num_hidden_layers)]
        window = {"sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": kinds}
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: getattr(config, name) for name in SAME_NAME},
        # The names that transformers 4 and 5 both understand.
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "tie_word_embeddings": False,
        **window,
    }


def make_head(
    made: type[DecoderConfig],
    tensors: Mapping[str, Tensor],
    notes: Mapping[str, bool] | None = None,
    *,
    qk_norm: bool,
    **fields: Any,
) -> HeadCheckpoint:
    """Build the head from a file's canonical tensors and the `fields` of its configuration, with
    the notes that apply. Raises CheckpointError if they contradict each other or are unknown.
    """
    completed = with_vocabulary(tensors, fields["vocab_size"], fields["draft_vocab_size"])
    if fields["hidden_act"] not in ACT2FN:
        raise CheckpointError(f"hidden_act of config.json is {fields['hidden_act']!r}; expected {', '.join(ACT2FN)}")
    fields |= {"own_embedding": "embed_tokens.weight" in completed, "own_lm_head": "lm_head.weight" in completed}
    config = make_config(made, qk_norm=qk_norm or "layers.0.self_attn.q_norm.weight" in completed, **fields)
    every = {**(notes or {}), WINDOW_NOTE: fields["sliding_window"] is not None and "full_layers" not in fields}
    return HeadCheckpoint(
        config=config, tensors=completed, notes=tuple(note for note, applies in every.items() if applies)
    )


def _read_window(keys: Keys, layers: int) -> dict[str, Any]:
    """Return ``sliding_window`` of the head, and ``full_layers`` where the kinds of layers are named."""
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
        return {"sliding_window": window}
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, SLIDING) for kind in kinds):
        raise CheckpointError(f"layer_types must be {layers} of {FULL} and {SLIDING}, one a layer, got {kinds!r}")
    if SLIDING not in kinds:
        return {"sliding_window": None, "full_layers": ()}
    if window is None:
        raise CheckpointError(
            f"layer_types has {SLIDING}, but sliding_window is {stated!r} and use_sliding_window {switched!r}; name "
            "the window that the head was trained with, or make its layers full_attention"
        )
    return {"sliding_window": window, "full_layers": tuple(layer for layer, kind in enumerate(kinds) if kind == FULL)}


def _read_rope(keys: Keys) -> dict[str, Any]:
    """Return ``rope_theta`` and ``rope_scaling``, from these keys or from ``rope_parameters``
    (transformers 5). Keys of a scaling that transformers does not know stay in it, and so do those
    of a multimodal target's.
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
    if rope["rope_type"] == "mrope":  # All three positions are the same for text, as transformers reads it, too
        rope["rope_type"] = "default"
    if rope["rope_type"] not in ROPE_KINDS:
        raise CheckpointError(f"rope_type is {rope['rope_type']!r}; expected {', '.join(ROPE_KINDS)}")
    return {"rope_theta": theta, "rope_scaling": None if rope == {"rope_type": "default"} else rope}
