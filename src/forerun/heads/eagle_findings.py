"""The tables of what serving engines make of EAGLE heads: which properties each degrades or stops at, in a head
that is written for it and in files as they lie.

The versions that this was read from stand in `eagle_engines`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forerun.heads.decoders import IDS, LAYER_IDS, is_default
from forerun.heads.eagle_files import POST_NORM
from forerun.heads.engines import EVERY, Trait, always
from forerun.heads.files import TRTLLM
from forerun.heads.keys import KIND, NESTED
from forerun.types import LAST_HIDDEN

RETRAIN = "train the head without it"
UNKNOWN = "is not known to read it"
UNKNOWN_VARIANTS = ("qk_norm", "attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of `EagleConfig` that LMDeploy may or may not read; it is not known."""
NO_KEY = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
"""Flags of `EagleConfig` for which ModelOpt has no key."""
WINDOW = "a sliding window of {config.sliding_window} positions"


VLLM_NAMES = frozenset(
    """
    EagleCohereForCausalLM EagleLlamaForCausalLM EagleLlama4ForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM
    EagleMistralLarge3ForCausalLM EagleDeepSeekMTPModel Eagle3LlamaForCausalLM LlamaForCausalLMEagle3
    Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM Eagle3Qwen3ForCausalLM
    Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
)
"""EAGLE's architectures in vLLM's registry (``models/registry.py``)."""


def _captures(at: Any) -> bool:
    """Return whether the head reads boundaries that the target has."""
    fits = max(at.shown) <= at.target.num_layers
    return fits and at.config.generation == 3 and at.config.use_aux_hidden_state


def _has_window(at: Any) -> bool:
    """Return whether the head looks back less far than its target."""
    return at.config.sliding_window is not None and at.config.sliding_window < at.target.max_position_embeddings


def _is_reordered(at: Any) -> bool:
    return not at.config.reduced_vocabulary and bool(at.head.tensors["d2t"].any())


def _fc_biased(at: Any) -> bool:
    return "fc.bias" in at.head.tensors and bool(at.head.tensors["fc.bias"].any())


def _flags(names: Iterable[str]) -> dict[str, Callable[[Any], object]]:
    """Return the condition of each flag of a configuration, by its name."""
    return {name: lambda at, name=name: getattr(at.config, name) for name in names}  # type: ignore[misc]


def _layer_window(at: Any) -> bool:
    return at.config.sliding_window is not None and at.config.generation == 3


def _own_layers(at: Any) -> bool:
    """Return whether the layers that the head reads are others than those that engines assume."""
    return LAST_HIDDEN not in at.shown and not is_default(at.config.boundaries, at.target.num_layers)


SORTED_STATES = Trait(
    lambda at: at.shown != sorted(at.shown),
    "reads boundaries {shown}",
    [("degrades", "vllm", "hands their states over in the order of the layers")],
    "train on ascending boundaries",
)
"""vLLM (``EagleModelMixin``) captures states as its layers run, whatever the order of the ids."""
LAST_BOUNDARY = Trait(
    lambda at: at.target.num_layers in at.shown,
    "reads boundary {target.num_layers}",
    [("check", "llama.cpp", "stops where the target is Llama's, Qwen3's or most others'")],
    "try it: forerun doctor --run --engine llama.cpp",
)
"""llama.cpp provides the state behind the last layer only for targets that have MTP layers there."""
WHOLE_ORDER = Trait(
    _is_reordered,
    "a vocabulary in another order",
    [("fails", "vllm", "has a place for d2t only beside a reduced vocabulary, and stops")],
    "sort the vocabulary",
)
"""vLLM's loaders have a place for ``d2t`` only where the head's vocabulary is smaller than the target's."""
INPUTS = (
    Trait(
        lambda at: at.config.hidden_size != at.config.target_hidden_size and not at.config.own_embedding,
        "no embedding of its own",
        [
            (
                "fails",
                EVERY,
                "the head is {config.hidden_size} wide, the target's embeddings {config.target_hidden_size}",
            )
        ],
        "store embed_tokens.weight with the head",
    ),
    Trait(
        lambda at: max(at.shown) > at.target.num_layers,
        "reads boundaries {shown}",
        [("fails", EVERY, "the target has {target.num_layers} layers")],
        "name the right target; or the ids in eagle_config are boundaries, not layers counted from 0",
    ),
    Trait(
        lambda at: at.config.generation == 3 and not at.config.use_aux_hidden_state,
        "reads the last hidden state (use_aux_hidden_state false)",
        [
            ("fails", "llama.cpp", "its converter wants fc.weight over three boundaries"),
            ("degrades", "lmdeploy", UNKNOWN),
        ],
        "train on the default boundaries",
    ),
    Trait(
        lambda at: _captures(at) and LAST_HIDDEN in at.shown,
        "reads the target's normed output",
        [("fails", EVERY, "EAGLE-3 layer ids cannot name the state after the final norm")],
        "train on boundaries",
    ),
    Trait(
        lambda at: _captures(at) and LAST_HIDDEN not in at.shown and len(at.shown) != 3,
        "reads {count} boundaries",
        [("fails", "llama.cpp", "stops at any other number than three"), ("degrades", "lmdeploy", UNKNOWN)],
        "train on three",
    ),
    LAST_BOUNDARY,
    SORTED_STATES,
    Trait(
        lambda at: at.config.generation == 3 and at.config.use_aux_hidden_state and 2 != at.shown[0] != LAST_HIDDEN,
        "reads boundaries {shown}",
        [
            (
                "check",
                "sglang",
                "takes ids that do not begin with 1 for boundaries in some of its targets (its pull request 25454)",
            )
        ],
        "compare its acceptance with ours, or begin with 2",
    ),
    Trait(
        lambda at: 0 in at.shown,
        "reads the embeddings (boundary 0)",
        [
            ("degrades", "sglang", "counts layers from 0, so the id -1 is written; not tried"),
            ("fails", "trtllm", "counts layers from 0, and takes -1 for the last layer"),
        ],
        "train on boundaries from 1",
    ),
)
TRAITS = (
    *(
        Trait(when, flag, [("degrades", "lmdeploy", UNKNOWN)], RETRAIN)
        for flag, when in {**_flags(UNKNOWN_VARIANTS), "fc.bias": _fc_biased}.items()
    ),
    Trait(
        lambda at: at.config.norm_output,
        "norm_output",
        [("degrades", "llama.cpp", "hands the state before its norm to the next step, whatever the file says")],
        RETRAIN,
    ),
    Trait(
        lambda at: at.config.norm_before_residual,
        "norm_before_residual",
        [("degrades", "sglang trtllm lmdeploy", "ignores the flag and adds the un-normed feature")],
        RETRAIN,
    ),
    Trait(
        lambda at: at.config.qk_norm,
        "qk_norm",
        [("fails", "sglang", "has no EAGLE-3 architecture with norms of queries and keys")],
        RETRAIN,
    ),
    Trait(
        lambda at: at.config.hidden_act != "silu",
        "the activation {config.hidden_act}",
        [
            ("fails", "vllm sglang", "has heads with silu only"),
            ("degrades", "trtllm llama.cpp", "computes silu in its place"),
            ("degrades", "lmdeploy", UNKNOWN),
        ],
        "train the head with silu",
    ),
    Trait(
        lambda at: at.config.fc_norm and at.config.norm_before_fc,
        "fc_norm together with norm_before_fc",
        [
            ("degrades", "vllm", "applies norm_before_fc first, the head was trained the other way round"),
            ("degrades", "sglang", "applies both; the order is not known to be ours"),
            ("degrades", "trtllm", "applies fc_norm alone"),
        ],
        "train with one of them",
    ),
    # TensorRT-LLM knows latent attention by its `kv_lora_rank`.
    Trait(
        lambda at: at.config.latent,
        "latent attention",
        [("fails", "llama.cpp", "its converter takes heads with ordinary attention")],
        "train a head with ordinary attention",
    ),
    Trait(
        lambda at: at.config.latent,
        "latent attention",
        [("check", "lmdeploy", "reads such heads of Kimi's targets; others are not known")],
        "compare its acceptance with ours",
    ),
    Trait(
        lambda at: at.config.latent and at.config.num_hidden_layers > 1,
        "latent attention in more than one layer",
        [("fails", "sglang", "takes one layer, and stops")],
        "train one layer",
    ),
    Trait(
        lambda at: at.config.latent and at.config.latent.q_lora_rank is None,
        "latent attention without q_lora_rank",
        [("fails", "sglang trtllm lmdeploy", "needs q_lora_rank, and stops")],
        "train the head with one",
    ),
    Trait(
        lambda at: at.config.latent and not at.config.latent.rope_interleave,
        "latent attention rotated by halves",
        [("degrades", "vllm sglang trtllm", "rotates pairs that lie side by side, whatever the file says")],
        "train with rope_interleave true",
    ),
    Trait(
        lambda at: at.config.num_hidden_layers > 1,
        "{config.num_hidden_layers} layers",
        [
            ("fails", "llama.cpp", "its converter takes heads of one layer"),
            ("degrades", "lmdeploy", "is not known to run more than one"),
        ],
        "train one layer",
    ),
    *(
        Trait(
            lambda at, latent=latent: (  # type: ignore[misc]
                at.config.num_hidden_layers > 1
                and at.config.next_layer_regular
                and (at.config.latent is not None) is latent
            ),
            "{config.num_hidden_layers} layers",
            [("ok", engines, "reads hidden_norm above the first layer; an export writes that norm under both names")],
        )
        for engines, latent in (("sglang trtllm", False), ("trtllm", True))
    ),
    Trait(
        _has_window,
        WINDOW,
        [
            ("degrades", "trtllm llama.cpp", "has no window for draft heads: each layer looks back to the beginning"),
            ("degrades", "lmdeploy", UNKNOWN),
        ],
        "train the head without a window",
    ),
    Trait(
        lambda at: _has_window(at) and at.config.generation == 1,
        WINDOW,
        [("fails", "vllm", "looks for layer_types behind those of the target, and stops")],
        "train the head without a window",
    ),
    Trait(
        lambda at: _has_window(at) and at.option,
        WINDOW,
        [("check", "sglang", "reads no window from the file: its command line must have {option}")],
        "forerun export --to sglang",
    ),
    Trait(
        lambda at: _has_window(at) and not at.option,
        WINDOW,
        [("degrades", "sglang", "has one window, of at least 2, for all layers, of EAGLE-3 heads only")],
        "train the head without a window",
    ),
    Trait(
        lambda at: at.config.generation == 1,
        "EAGLE-1",
        [("fails", "modelopt", "gets EAGLE-3 heads only in its format")],
        "export --to vllm, or train an EAGLE-3 head",
    ),
    # ModelOpt's own tools make a head without what they have no key for, though the file states it.
    *(
        Trait(
            lambda at, when=when: at.config.generation == 3 and when(at),  # type: ignore[misc]
            flag,
            [("check", "modelopt", "has no key for it: engines read it from the file, its own tools do not")],
            "do not train on with ModelOpt; serve the file as it is",
        )
        for flag, when in {**_flags(NO_KEY), "sliding_window": _has_window, "fc.bias": _fc_biased}.items()
    ),
    # Embeddings and output heads, which some engines replace by the target's
    Trait(
        lambda at: at.config.own_embedding and at.config.hidden_size == at.config.target_hidden_size,
        "an embedding of its own",
        [
            (
                "degrades",
                "sglang trtllm",
                "takes the target's embedding for a head of the same width; right only if both are equal",
            )
        ],
        "train with the target's embedding frozen",
    ),
    Trait(
        lambda at: at.config.generation == 1 and at.config.own_lm_head,
        "an output head of its own",
        [
            ("fails", "vllm", "has no place for one in EAGLE-1, and stops"),
            ("degrades", "sglang", "takes the target's output head for EAGLE-1; right only if both are equal"),
        ],
        "train with the target's output head",
    ),
    WHOLE_ORDER,
    WHOLE_ORDER._replace(
        treated=[("degrades", "trtllm", "reads d2t only for a reduced vocabulary; the order is lost")]
    ),
    Trait(
        lambda at: at.config.generation == 1 and at.config.reduced_vocabulary,
        "EAGLE-1 with d2t",
        [("fails", "vllm sglang lmdeploy", "reads no d2t for EAGLE-1")],
        "train on the whole vocabulary",
    ),
    Trait(
        lambda at: at.config.generation == 1,
        "EAGLE-1",
        [
            ("fails", "trtllm", "the PyTorch backend loads EAGLE-3 only"),
            ("fails", "llama.cpp", "converts EAGLE-3 only"),
        ],
        "train an EAGLE-3 head",
    ),
    Trait(
        lambda at: at.config.generation == 1 and "fc.bias" not in at.head.tensors,
        "no fc.bias",
        [("ok", "sglang", "would invent a random one; an export for SGLang writes zeros")],
    ),
    Trait(
        lambda at: at.config.max_position_embeddings < at.target.max_position_embeddings,
        "made for {config.max_position_embeddings} positions, the target has {target.max_position_embeddings}",
        [("ok", EVERY, "beyond them drafts get worse or stop; answers stay right")],
    ),
)
WINDOWS = (
    Trait(
        lambda at: _layer_window(at) and not at.keys.get("layer_types"),
        "sliding_window without layer_types",
        [("degrades", "vllm", "applies a window only where layer_types names it")],
    ),
    Trait(
        lambda at: _layer_window(at) and at.keys.get("model_type") == "qwen3" and not at.keys.get("use_sliding_window"),
        "no use_sliding_window",
        [("degrades", "vllm", "loses the window: Qwen3's configuration forgets it")],
    ),
)
STORED = (
    Trait(
        lambda at: at.expected not in at.architectures and not at.config.qk_norm,
        "architectures {architectures}",
        [("fails", "sglang", "loads {expected} only")],
    ),
    Trait(
        lambda at: at.names and not VLLM_NAMES.intersection(at.names),
        "architectures {architectures}",
        [("fails", "vllm", "has no architecture {listed}")],
    ),
    Trait(
        lambda at: not at.names,
        "architectures {architectures}",
        [("fails", "vllm", "needs an architecture, and stops")],
    ),
    Trait(
        lambda at: at.config.latent and at.keys.get("model_type") in ("deepseek_v3", "deepseek_v32"),
        "model_type {keys[model_type]}",
        [("fails", "vllm", "takes it for the target's own MTP layers")],
    ),
    Trait(
        lambda at: "draft_vocab_size" not in at.keys and at.config.generation == 3,
        "no draft_vocab_size",
        [("fails", "sglang llama.cpp", "needs the key, if only as null")],
    ),
    Trait(
        lambda at: at.keys.get("tie_word_embeddings") and at.config.own_lm_head,
        "tie_word_embeddings",
        [("degrades", "sglang lmdeploy", "puts the embedding in place of the head's lm_head")],
    ),
    Trait(
        lambda at: "d2t" in at.stored.tensors and not at.config.reduced_vocabulary and not _is_reordered(at),
        "a d2t beside the whole vocabulary",
        [("fails", "vllm", "has no place for it, and stops")],
    ),
    *WINDOWS,
    Trait(
        lambda at: at.config.norm_output and not at.keys.get("norm_output"),
        f"only {POST_NORM}",
        [("degrades", "vllm sglang", "looks for norm_output at the top")],
    ),
    Trait(
        lambda at: at.config.norm_output and not at.nested.get(POST_NORM),
        "only norm_output",
        [("degrades", "trtllm", f"looks for {POST_NORM} in {NESTED}")],
    ),
    *(
        Trait(
            lambda at, listed=listed: (  # type: ignore[misc]
                _own_layers(at) and not at.keys.get(IDS) and bool(at.keys.get(LAYER_IDS)) is listed
            ),
            f"layer ids only in {where}",
            [
                ("degrades", "vllm", f"looks for {IDS} at the top and takes its default layers; {runner}"),
                ("degrades", "llama.cpp", f"looks for {IDS} at the top, or takes its default layers"),
            ],
        )
        for listed, where, runner in (
            (True, LAYER_IDS, "its newer runner alone reads these"),
            (False, NESTED, "the older runner reads them one layer early"),
        )
    ),
    Trait(
        lambda at: _own_layers(at) and not at.nested.get(IDS),
        f"no {NESTED}.{IDS}",
        [("degrades", "sglang", "takes its default layers")],
    ),
    Trait(
        lambda at: _own_layers(at) and not (at.stored.directory / TRTLLM).is_file(),
        "layer ids in config.json",
        [
            (
                "degrades",
                "trtllm",
                "needs eagle3_layers_to_capture: {outputs} in its YAML, or takes its default layers",
            )
        ],
    ),
)
"""These traits say what is wrong with files of the flat format, as they lie."""
SPECULATORS = (
    Trait(always, "speculators format", [("fails", "sglang trtllm lmdeploy", "reads the flat format only")]),
    *WINDOWS,
    Trait(
        lambda at: at.stored.config[KIND] == "eagle3" and at.stored.config.get("norm_before_residual") is None,
        "no norm_before_residual",
        [("degrades", "vllm", "takes it for true, speculators means false")],
    ),
)
"""These traits say what is wrong with files of the speculators format, as they lie."""
