"""The format of z-lab's DFlash and DeepSeek's DSpark heads, which vLLM, SGLang and TensorRT-LLM
read: Qwen3's configuration with a ``dflash_config`` (DSpark: the same keys at the top), tensors
``fc``, ``hidden_norm``, ``layers.N.*``, ``norm``; DSpark's ``markov_head.*`` and
``confidence_head.proj``. JetSpec's heads have it too (DFlash's with causal blocks), SpecForge's
Domino (``projector_type``, ``prefix_gru.*``, ``embed_proj.*``), and ModelOpt's exports, which name
DSpark's tensors without their prefixes.

``target_layer_ids`` name the 0-based layer whose output is read: one less than our boundaries. Where nothing says
whether places of a block see those behind them, vLLM (``qwen3_dflash.py``) lets them, but in layers whose
``layer_types`` is a sliding window, as z-lab's heads for Gemma are meant.

How serving engines treat DFlash and DSpark heads, from their loaders' sources (vLLM 0.32 and
0.33, ``qwen3_dflash.py``, ``qwen3_dspark.py``; llama.cpp 0.5.0, ``conversion/qwen.py``,
``src/models/dflash.cpp``). On the CPU vLLM 0.32 was run with a DFlash head (``tests_vllm``),
llama.cpp with DFlash, DFlash 2 and DSpark (``tests_llama``), no other engine with any.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from forerun.errors import CheckpointError
from forerun.heads import decoders
from forerun.heads.decoders import to_outputs
from forerun.heads.dflash import DFlashConfig, spread_boundaries
from forerun.heads.dflash2 import DFlash2Config
from forerun.heads.domino import DominoConfig
from forerun.heads.dspark import DSparkConfig
from forerun.heads.eagle_engines import DESTINATIONS
from forerun.heads.eagle_findings import LAST_BOUNDARY, SORTED_STATES, WHOLE_ORDER
from forerun.heads.engines import (
    NO_SUCH_DRAFTER,
    Engines,
    Finding,
    Launch,
    Trait,
    always,
    apply_traits,
    start_lines_with,
    trtllm_file,
    vllm_line,
)
from forerun.heads.files import (
    TRTLLM,
    Config,
    Format,
    HeadCheckpoint,
    StoredFiles,
    TargetFacts,
    Tensors,
    Written,
)
from forerun.heads.keys import KIND, NON_CAUSAL, Keys, architectures

NESTED, RANK, PROJECTOR = "dflash_config", "markov_rank", "projector_type"
LAYER_IDS = decoders.LAYER_IDS
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "Qwen3DSparkModel",
    "domino": "DFlashDraftModel",
}
ANYWHERE = ("block_size", "mask_token_id", "sample_from_anchor", "causal", "is_causal", "emb_dim")
"""Keys that stand at the top or in `NESTED`, depending on the publisher."""


SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Keys of DFlash 2 that stand at the top or in `NESTED`."""
DOMINO = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len")
"""Keys of Domino, named as the fields of its configuration."""
LEAST = {"pure_draft_prefix_len": 0}  # Values if a file leaves the key out
OWN: dict[type[DFlashConfig], tuple[str, ...]] = {DominoConfig: DOMINO, DFlash2Config: SELECTOR}
MODELOPT = {"confidence_proj.": "confidence_head.proj."} | {
    f"{name}.": f"markov_head.{name}." for name in ("markov_w1", "markov_w2", "gate_proj", "joint_proj")
}
"""Prefixes of ModelOpt's names of DSpark's tensors, and our prefixes for them."""


class DFlashFormat(Format):
    """Heads of z-lab, of DeepSeek, and of others who write the same format."""

    name = "dflash"

    def recognises(self, config: Config) -> bool:
        return NESTED in config or any("DSpark" in name or "DFlash" in name for name in architectures(config))

    def read(self, config: Config, tensors: Tensors, *, num_layers: int | None = None) -> HeadCheckpoint:
        nested = config.get(NESTED) or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"{NESTED} of config.json must be an object, got {nested!r}")
        for name in (*ANYWHERE, LAYER_IDS):
            if None not in (config.get(name), nested.get(name)) and config[name] != nested[name]:
                raise CheckpointError(
                    f"config.json contradicts itself about {name}: {config[name]!r} at the top, {nested[name]!r} in "
                    f"{NESTED}; remove the wrong one"
                )
        inner = {name: value for name, value in nested.items() if value is not None}
        keys = Keys({**config, **inner, NESTED: None})
        keys.pass_over("architectures", "tie_word_embeddings", "num_anchors")
        fields, config_class = decoders.read_layers(keys), _kind_of(keys)
        size = fields["hidden_size"]
        fields |= {
            "boundaries": _boundaries(keys, fields["num_hidden_layers"], num_layers),
            "block_size": keys.integer("block_size"),
            "mask_token_id": keys.integer("mask_token_id"),
            "sample_from_anchor": keys.flag("sample_from_anchor", _is_shifted(keys, config_class)),
            "target_hidden_size": keys.integer("target_hidden_size", size),
            "draft_vocab_size": keys.integer("draft_vocab_size", fields["vocab_size"]),
            **_causality(keys, fields),
            **_window(keys, fields),
            **(read_markov(keys) if config_class is DSparkConfig else {}),
            **{name: keys.integer(name, LEAST.get(name)) for name in OWN.get(config_class, ())},
        }
        rest = keys.rest()
        inside = {name: rest.pop(name) for name in nested if name in rest and name not in config}
        return decoders.make_head(
            config_class,
            _from_modelopt(decoders.to_canonical(tensors)),
            **fields,
            qk_norm=True,
            extra=rest | ({NESTED: inside} if inside else {}),
        )

    def write(self, checkpoint: HeadCheckpoint, target: TargetFacts) -> Written:
        config = checkpoint.config
        if config.causal_windows and (config.is_causal or config.sliding_window is None):
            raise CheckpointError("this format has no key for blocks that are causal in windows, where none differs")
        nested: dict[str, Any] = {
            "mask_token_id": config.mask_token_id,
            LAYER_IDS: decoders.to_outputs(config.boundaries),
        }
        if config.is_causal or (config.sliding_window is not None and not config.causal_windows):
            # vLLM looks for the one in `NESTED`, for the other at the top.
            nested["is_causal" if config.kind == "dspark" else "causal"] = config.is_causal
        if config.is_causal:
            nested["causal_head"] = True
        if config.kind == "domino":
            nested |= {PROJECTOR: "domino", "shift_label": config.sample_from_anchor}
        elif config.sample_from_anchor != (config.kind == "dspark"):
            nested["sample_from_anchor"] = config.sample_from_anchor
        nested |= {name: getattr(config, name) for name in OWN.get(type(config), ())}
        if config.kind == "dspark":
            places: dict[str, Any] = {**nested, **write_markov(config), **config.extra.get(NESTED, {})}
        else:
            places = {NESTED: {**config.extra.get(NESTED, {}), **nested}}
        keys = {
            "architectures": [ARCHITECTURES[config.kind]],
            **decoders.write_layers(config),
            "torch_dtype": decoders.dtype_name(checkpoint),
            "block_size": config.block_size,
            "num_target_layers": target.num_layers,
            **places,
        }
        if config.target_hidden_size != config.hidden_size:
            keys["target_hidden_size"] = config.target_hidden_size
        if config.reduced_vocabulary:
            keys["draft_vocab_size"] = config.draft_vocab_size
        keys.setdefault("layer_types", ["full_attention"] * config.num_hidden_layers)
        return {**config.extra, **keys}, decoders.to_file(checkpoint)


def read_markov(keys: Keys) -> dict[str, Any]:
    """Return the configuration fields that DSpark adds to DFlash."""
    return {
        RANK: keys.integer(RANK, 256),
        "markov_head_type": keys.text("markov_head_type", "vanilla"),
        "enable_confidence_head": keys.flag("enable_confidence_head", keys.flag("use_confidence_head", True)),
        "confidence_head_with_markov": keys.flag("confidence_head_with_markov", True),
    }


def write_markov(config: DSparkConfig) -> dict[str, Any]:
    """Return the keys that `read_markov` reads."""
    names = (RANK, "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    return {name: getattr(config, name) for name in names}


def _kind_of(keys: Keys) -> type[DFlashConfig]:
    """Return the kind of head that a configuration means, by its ``projector_type`` and DSpark's
    keys.
    """
    usual = "dspark" if keys.get(RANK) else "dflash2" if keys.get("selector_rank") else "dflash"
    projector = keys.text(PROJECTOR, usual)
    by_projector = {"dflash": DFlashConfig, "dflash2": DFlash2Config, "dspark": DSparkConfig, "domino": DominoConfig}
    if projector not in by_projector:
        raise CheckpointError(
            f"{PROJECTOR} of {NESTED} is {projector!r}; heads of {', '.join(by_projector)} are supported"
        )
    return by_projector[projector]


def _is_shifted(keys: Keys, made: type[DFlashConfig]) -> bool:
    """Return whether the root predicts, by SpecForge's ``shift_label``, where
    ``sample_from_anchor`` does not say so.
    """
    return made is DSparkConfig if keys.get(PROJECTOR) is None else keys.flag("shift_label", made is DSparkConfig)


def _from_modelopt(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return DSpark's tensors under our names."""
    renamed = {}
    for name, tensor in tensors.items():
        begin = next((begin for begin in MODELOPT if name.startswith(begin)), "")
        renamed[MODELOPT.get(begin, "") + name.removeprefix(begin)] = tensor
    return renamed


def _boundaries(keys: Keys, layers: int, target_layers: int | None) -> tuple[int, ...]:
    """Return the boundaries that the head reads; without ids, the default for the target's number
    of layers.
    """
    ids, stated = keys.integers(LAYER_IDS), keys.integer("num_target_layers", target_layers or 0)
    if ids is None and not stated:
        raise CheckpointError(f"config.json has neither {LAYER_IDS} nor num_target_layers: name the target")
    return spread_boundaries(stated, layers) if ids is None else decoders.from_outputs(ids)


def _causality(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers' blocks are causal; vLLM's default if no key says so."""
    said = [keys.flag(name) for name in ("is_causal", "causal", "causal_head") if keys.get(name) is not None]
    windows = fields["sliding_window"] is not None and keys.get("layer_types") is not None
    return {"is_causal": said[0]} if said else {"causal_windows": windows}


def _window(keys: Keys, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window that vLLM's ``use_swa`` and ``swa_window_size`` state, if transformers' own
    keys state none.
    """
    switched, window = keys.flag("use_swa"), keys.get("swa_window_size")
    if not switched or fields["sliding_window"] is not None:
        return {}
    if window is None:
        raise CheckpointError(f"use_swa in {NESTED} is true, but there is no swa_window_size")
    return {"sliding_window": keys.integer("swa_window_size")}


# What serving engines make of it
RETRAIN, COMPARE, STOPS = "train one without it", "compare its acceptance with ours", "has no place for it and stops"
ANCHOR, OF_DSPARK = "a root that predicts the token after it (sample_from_anchor)", "takes that of DSpark heads only"
METHODS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "domino": "dflash"}
"""The name that engines give each kind's drafter. vLLM's and SGLang's for DFlash know DFlash 2,
SGLang's Domino.
"""


OWN_LM_HEAD = "an output head of its own"
TABLE = "a table with {config.markov_head_type}"
NO_NORMS = "no norms of queries and keys"
ACCELERATOR = "serve it on an accelerator, or in forerun"


def _is_gated(at: Any) -> bool:
    return at.config.kind == "dspark" and at.config.markov_head_type != "vanilla"


def _is_anchored(at: Any) -> bool:
    return at.config.kind in ("dflash", "dflash2") and at.config.sample_from_anchor


TRAITS = (
    *(
        Trait(
            lambda at, stored=stored: at.config.kind != "dspark" and stored(at.config),  # type: ignore[misc]
            what,
            [("degrades", "sglang", "takes the target's instead")],
            RETRAIN,
        )
        for what, stored in (
            ("an embedding of its own", lambda config: config.own_embedding),
            ("a reduced vocabulary", lambda config: config.reduced_vocabulary),
            (OWN_LM_HEAD, lambda config: config.own_lm_head and not config.reduced_vocabulary),
        )
    ),
    # vLLM's loader. Its model runner V1, the only one of its CPU build, stops at more.
    WHOLE_ORDER,
    SORTED_STATES,
    Trait(
        lambda at: at.config.hidden_act != "silu",
        "the activation {config.hidden_act}",
        [("fails", "vllm", "has heads with silu only"), ("degrades", "llama.cpp", "computes silu in its place")],
        "train with silu",
    ),
    Trait(
        lambda at: at.config.mlp_bias,
        "biases of the MLP",
        [("degrades", "vllm", "does not use them, without a message"), ("fails", "llama.cpp", STOPS)],
        RETRAIN,
    ),
    Trait(_is_anchored, ANCHOR, [("fails", "vllm", OF_DSPARK), ("degrades", "llama.cpp", OF_DSPARK)], RETRAIN),
    Trait(
        _is_gated,
        TABLE,
        [("fails", "vllm", "has no place for what the table is multiplied with, and stops")],
        "train one with vanilla",
    ),
    Trait(
        lambda at: at.config.kind == "dspark",
        "a DSpark head",
        [("check", "vllm", 'stops on a CPU: "Model Runner V1 does not support: dspark speculative decoding"')],
        ACCELERATOR,
    ),
    Trait(
        lambda at: at.config.kind == "dflash2",
        "a DFlash 2 head",
        [("check", "vllm", 'stops on a CPU: "Model Runner V1 does not support: DFlash candidate-head drafts"')],
        ACCELERATOR,
    ),
    Trait(
        lambda at: at.config.kind not in ("dspark", "dflash2") and at.config.full_layers,
        "layers with and without a window",
        [("check", "vllm", "stops on a CPU, where it has no model runner V2")],
        ACCELERATOR,
    ),
    # Where llama.cpp's converter has no name for a tensor, or its loader wants one more
    Trait(lambda at: at.config.attention_bias, "biases of the attention", [("fails", "llama.cpp", STOPS)], RETRAIN),
    Trait(
        lambda at: at.config.reduced_vocabulary and at.config.kind != "dspark",
        "a reduced vocabulary",
        [("fails", "llama.cpp", STOPS)],
        RETRAIN,
    ),
    Trait(lambda at: at.config.kind == "domino", "a Domino head", [("fails", "llama.cpp", STOPS)], RETRAIN),
    Trait(_is_gated, "another table than vanilla", [("fails", "llama.cpp", STOPS)], RETRAIN),
    Trait(
        lambda at: at.config.hidden_size != at.config.target_hidden_size,
        "a head {config.hidden_size} wide",
        [("fails", "llama.cpp", "takes the target's states to be as wide as the head")],
        "train one as wide as the target",
    ),
    Trait(
        lambda at: at.config.kind == "dspark" and at.config.own_lm_head and not at.config.reduced_vocabulary,
        OWN_LM_HEAD,
        [("degrades", "llama.cpp", "takes the target's instead")],
        RETRAIN,
    ),
    LAST_BOUNDARY,
    # All engines
    Trait(
        lambda at: at.config.is_causal or at.config.causal_windows,
        "places of a block that do not see those behind them",
        [("degrades", "sglang trtllm", "is not known to read the key")],
        RETRAIN,
    ),
    Trait(
        lambda at: at.config.sliding_window is not None,
        "a sliding window",
        [
            (
                "check",
                "vllm sglang trtllm llama.cpp",
                "counts the window from the query or from the root: publishers differ",
            )
        ],
        COMPARE,
    ),
    Trait(
        lambda at: not at.config.qk_norm,
        NO_NORMS,
        [
            ("fails", "llama.cpp", "stops without them"),
            ("fails", "sglang trtllm", "wants Qwen3's layers"),
            ("degrades", "vllm", "has norms there, which nothing in the file fills"),
        ],
        RETRAIN,
    ),
    Trait(
        lambda at: 0 in at.shown,
        "reads the embeddings (boundary 0)",
        [("degrades", "sglang trtllm", "counts layers from 0, so the id -1 is written")],
        "train on boundaries from 1",
    ),
    Trait(_is_gated, TABLE, [("check", "sglang trtllm", "is not known to read it")], COMPARE),
    Trait(
        always,
        "layer ids and mask token",
        [("check", "trtllm", f"reads them from {TRTLLM}")],
        "export --to trtllm",
    ),
    Trait(
        always,
        "a {config.kind} head",
        [("check", "modelopt", "exports such heads, but is not known to read them")],
        "train on with forerun",
    ),
    Trait(
        lambda at: at.config.kind == "dspark",
        "a DSpark head",
        [("fails", "lmdeploy", NO_SUCH_DRAFTER)],
        "use vLLM or SGLang",
    ),
    Trait(
        lambda at: at.config.kind == "dflash2",
        "convolutions and a selector of paths",
        [("degrades", "trtllm lmdeploy", "is not known to read them")],
        "use vLLM or SGLang, or train a DSpark head",
    ),
    Trait(
        lambda at: at.config.kind == "domino",
        "a Domino head",
        [
            (
                "degrades",
                "vllm trtllm lmdeploy",
                "reads a DFlash head in it and passes the correction over, so that later tokens fit each other less",
            )
        ],
        "use SGLang, or train a DSpark head",
    ),
    Trait(
        lambda at: at.config.kind == "domino",
        "a Domino head",
        [
            (
                "check",
                "sglang",
                "corrects 2,048 likely tokens only, at temperature 0, on one CUDA device (its pull request 36899)",
            )
        ],
        COMPARE,
    ),
)
AS_THEY_ARE, EXPORT = "(as the files are)", "forerun export --to vllm"
STORED = (
    Trait(
        lambda at: at.keys.get(NON_CAUSAL) is None and at.config.causal_windows,
        f"no {NON_CAUSAL} {AS_THEY_ARE}",
        [("degrades", "vllm", "takes it for true, speculators means false")],
        EXPORT,
    ),
    Trait(
        lambda at: at.keys.get(NON_CAUSAL) is False and (at.config.full_layers or at.config.sliding_window is None),
        f"{NON_CAUSAL} false beside layers without a window {AS_THEY_ARE}",
        [("degrades", "vllm", "means them by it, too")],
        EXPORT,
    ),
    Trait(
        lambda at: at.config.kind == "dspark" and at.keys.get("sample_from_anchor") is None,
        f"no sample_from_anchor {AS_THEY_ARE}",
        [("degrades", "vllm", "takes it for false, speculators means true")],
        EXPORT,
    ),
)
"""These traits say what vLLM makes of keys in the speculators format (``configs/speculators/algos.py``)."""


class BlockEngines(Engines):
    """Known facts about engines and heads that draft a block."""

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        return apply_traits(STORED if KIND in stored.config else (), head, target, keys=stored.config)


def _sglang(launch: Launch) -> str:
    config = launch.head.config
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {METHODS[config.kind].upper()} "
        f"--speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-draft-tokens {config.block_size if config.kind == 'domino' else config.max_depth + 1}"
    )


def _trtllm(launch: Launch) -> Mapping[str, str]:
    config = launch.head.config
    kind = {"dflash": "DFlash", "dspark": "DSpark"}[METHODS[config.kind]]
    more = {"mask_token_id": config.mask_token_id, "target_layer_ids": to_outputs(config.boundaries)}
    return trtllm_file(kind, config.max_depth, launch.directory, more)


_OWN: dict[str, dict[str, Any]] = {
    "vllm": {
        "command": lambda launch: vllm_line(
            launch.target.name_or_path,
            method=METHODS[launch.head.config.kind],
            model=str(launch.directory),
            num_speculative_tokens=launch.head.config.max_depth,
        )
    },
    "sglang": {"command": _sglang},
    "trtllm": {"files": _trtllm, "counting": f"`max_draft_len` in `{TRTLLM}` counts drafted tokens."},
    "llama.cpp": {
        "command": lambda launch: start_lines_with(
            launch.directory,
            launch.target.name_or_path,
            f"draft-{METHODS[launch.head.config.kind]}",
            launch.head.config.max_depth,
        )
    },
    "speculators": {},
}
# EAGLE's destinations, with this kind's own launch commands.
ENGINE_FACTS = BlockEngines(
    destinations={name: dataclasses.replace(DESTINATIONS[name], **own) for name, own in _OWN.items()}, traits=TRAITS
)
