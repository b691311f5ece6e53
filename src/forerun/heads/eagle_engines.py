"""How serving engines treat EAGLE heads: how each loads them, what it silently degrades, and how it
is started.

A tensor that an engine allocates and nothing fills stays as it happens to be, and one that it has no place for is lost,
mostly without a message. Names are forerun's own. From reading vLLM 0.32 and 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4
(release candidates), llama.cpp 0.5.0 (``conversion/llama.py``, ``src/models/eagle3.cpp``), and LMDeploy 0.18 without
its loader; ModelOpt 0.47 by the keys of its configuration. vLLM 0.32 (``tests_vllm``) and llama.cpp (``tests_llama``)
were run on the CPU, no other engine.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.heads.decoders import IDS, LAYER_IDS, canonical_names, is_default, to_file, to_outputs
from forerun.heads.eagle import EagleConfig
from forerun.heads.eagle_files import FIRST_GENERATION, LATENT, LLAMA, POST_NORM, REGULAR, write_flat
from forerun.heads.engines import (
    COUNTING,
    EVERY,
    TOKENS,
    Destination,
    Engines,
    Finding,
    Launch,
    check,
    degrades,
    fails,
    forerun_line,
    ok,
    start_lines_with,
)
from forerun.heads.files import HeadCheckpoint, Shape, StoredFiles, TargetFacts, expected_shapes, some
from forerun.heads.keys import KIND, LAYERS, NESTED
from forerun.heads.keys import architectures as names_of
from forerun.heads.layers import LatentConfig
from forerun.types import LAST_HIDDEN

TRTLLM = "trtllm.yaml"
Shapes = dict[str, Shape]
SHARED = re.compile(r"embed_tokens\.weight|lm_head\.weight|d2t|t2d|.*rotary_emb\.inv_freq")
"""Tensors that are taken from the target, computed, or checked by `diagnose`."""
UPPER_NORM = re.compile(r"layers\.[1-9]\d*\.(input_layernorm|hidden_norm)\.weight")
"""A norm with two names, of which an engine reads one."""
RETRAIN = "train the head without it"
UNFILLED = "makes room for it, and nothing in the file fills it"


def adapt_head(head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
    """Change a head for an engine, see `Engines.adapt`."""
    config = head.config
    if engine == "sglang" and config.generation == 1 and not config.fc_bias:
        # Its EAGLE-1 has a bias whatever the file says. It is not announced: "bias" means the attention's there.
        weight = head.tensors["fc.weight"]
        tensors = {**head.tensors, "fc.bias": torch.zeros(len(weight), dtype=weight.dtype)}
        config = dataclasses.replace(config, fc_bias=True)
        return HeadCheckpoint(config=config, tensors=tensors, notes=head.notes), {}
    if engine == "llama.cpp" and config.fc_bias and not bool(head.tensors["fc.bias"].any()):
        # Its converter stops at a name that it does not know, whatever the numbers.
        tensors = {name: tensor for name, tensor in head.tensors.items() if name != "fc.bias"}
        return HeadCheckpoint(config=dataclasses.replace(config, fc_bias=False), tensors=tensors, notes=head.notes), {}
    if engine == "vllm" and config.generation == 1:
        return head, {"architectures": ["EagleLlamaForCausalLM"]}
    if engine == "trtllm" and config.generation == 3 and config.fc_bias:
        return head, {"bias": True}  # of fc, and there alone
    return head, {}


def sglang_window(config: EagleConfig) -> str:
    """Return the option that gives an EAGLE-3 head its window in SGLang, empty if none can. It is
    one for all layers and does not count the position itself.
    """
    window = config.sliding_window or 0
    fits = window > 1 and config.generation == 3 and not config.full_layers
    return f"--speculative-draft-window-size {window - 1}" if fits else ""


def mismatches(
    engine: str, config: EagleConfig, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Yield tensors that `engine` (one of `LOADERS`) cannot load, loses or leaves unfilled.

    `keys` are those of ``config.json``, without nesting but for ``eagle_config``; `config` is what they mean; `tensors`
    have canonical names, a norm above the first layer both of its own.
    """
    expected = LOADERS[engine](config, keys)
    given = {name: tensor for name, tensor in tensors.items() if name in expected or not SHARED.fullmatch(name)}
    odd = sorted(name for name in given.keys() & expected.keys() if tuple(given[name].shape) != expected[name])
    strict = engine == "llama.cpp"  # Its converter has a name for every tensor, or stops; its loader wants all of them
    # Nothing is lost with the other name of a norm, or with a bias of zeros.
    lost = sorted(
        name
        for name in given.keys() - expected.keys()
        if not (config.generation == 3 and UPPER_NORM.fullmatch(name))
        and (strict or not name.endswith(".bias") or bool(given[name].any()))
    )
    stopping = [name for name in lost if strict or (engine == "vllm" and not name.endswith(".bias"))]
    unfilled = sorted(expected.keys() - given.keys())
    complaints = (
        (odd, fails, f"expects {some([f'{name} {expected[name]}' for name in odd])}"),
        (stopping, fails, "has no place for it and stops"),
        ([name for name in lost if name not in stopping], degrades, "does not use it, without a message"),
        (unfilled, *((fails, "stops without it") if strict else (degrades, UNFILLED))),
    )
    for names, judged, why in complaints:
        if names:
            yield from judged(engine, some(names), why, RETRAIN)


def _vllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what vLLM loads. A Qwen3 layer has no other biases than those of queries, keys and
    values.
    """
    attention = bool(keys.get("attention_bias"))
    either = attention or bool(keys.get("bias"))
    if config.generation == 1:
        return _expected(config, qkv_bias=either, o_bias=either, fc_bias=False)
    return _expected(
        config,
        qkv_bias=attention,
        o_bias=either and not config.qk_norm,
        mlp_bias=config.mlp_bias and not config.qk_norm and config.latent is None,
        fc_bias=False,
        fc_norm=bool(keys.get("fc_norm")),
        **_fused(config, keys),
    )


def _sglang(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what SGLang loads: its EAGLE-1 always has a bias after ``fc``, its EAGLE-3 none for
    queries, keys and values.
    """
    fc_bias = bool(keys.get("bias"))
    either = bool(keys.get("attention_bias")) or fc_bias
    if config.generation == 1:
        return _expected(config, qkv_bias=either, o_bias=either, fc_bias=True, mlp_bias=False)
    expected = _expected(
        config,
        qkv_bias=False,
        o_bias=either,
        mlp_bias=False,
        fc_bias=fc_bias,
        qk_norm=False,
        **_fused(config, keys),
    )
    if keys.get("draft_vocab_size") is not None and not keys.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    whole = (config.hidden_size, config.hidden_size)
    return _hidden_norms(_without_fc(expected) if expected.get("fc.weight") == whole else expected)


def _trtllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what TensorRT-LLM loads; how many states ``fc`` reads is set in its YAML."""
    nested = keys.get(NESTED) or {}
    expected = _expected(
        config,
        qkv_bias=bool(keys.get("attention_bias")),
        o_bias=bool(keys.get("attention_bias")),
        fc_bias=bool(keys.get("bias")),
        qk_norm=False,
        norm_before_fc=bool(nested.get("norm_before_fc")),
        fc_norm=bool(keys.get("fc_norm")),
        next_layer_regular=nested.get(REGULAR) is not False,
    )
    if nested.get(REGULAR) is False:
        return expected
    return _hidden_norms(_without_fc(expected) if len(config.boundaries) == 1 else expected)


def _llama_cpp(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what llama.cpp's converter has names for: one layer without biases, three states, and
    of the norms around them only that of ``norm_before_fc``.
    """
    return _expected(
        config,
        qkv_bias=False,
        o_bias=False,
        fc_bias=False,
        mlp_bias=False,
        qk_norm=False,
        fc_norm=False,
        norm_before_fc=bool(keys.get("norm_before_fc")),
    )


LOADERS: dict[str, Callable[[EagleConfig, Mapping[str, Any]], Shapes]]
LOADERS = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llama.cpp": _llama_cpp}
"""Function per engine that maps (a head's configuration, its keys) to the names and shapes of all
tensors that the engine wants in the file.
"""
FIRST_TOO = ("vllm", "sglang")
"""Engines that also load EAGLE-1."""


def _expected(config: EagleConfig, *, qkv_bias: bool, o_bias: bool, **read: Any) -> Shapes:
    """Return names and shapes of a head as an engine reads it, with the fields `read` instead of
    those of `config`; latent attention has no biases.
    """
    shapes = expected_shapes(dataclasses.replace(config, attention_bias=config.latent is None, **read))
    absent = ([] if qkv_bias else ["q", "k", "v"]) + ([] if o_bias else ["o"])
    unbiased = tuple(f"self_attn.{name}_proj.bias" for name in absent)
    return {name: shape for name, shape in shapes.items() if not SHARED.fullmatch(name) and not name.endswith(unbiased)}


def _fused(config: EagleConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM and SGLang fuse: as many boundaries as they make room for, three where they
    find no number. Before latent attention they always fuse, and without ``norm_before_fc``.
    """
    nested = (keys.get(NESTED) or {}).get(IDS)
    count = keys.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    always = config.latent is not None
    found = not (config.use_aux_hidden_state or always) or count == len(config.boundaries)
    read = {"boundaries": config.boundaries if found else tuple(range(count)), "next_layer_regular": True}
    return {**read, **({"use_aux_hidden_state": True, "norm_before_fc": False} if always else {})}


def _without_fc(expected: Shapes) -> Shapes:
    """Return the shapes without the fusion: states that are as wide as the head are taken as they
    are.
    """
    return {name: shape for name, shape in expected.items() if not name.startswith(("fc.", "fc_norm.", "input_norm."))}


def _hidden_norms(expected: Shapes) -> Shapes:
    """Rename the norm above the first layer to the name that SGLang and TensorRT-LLM look for."""
    return {
        name.replace("input_layernorm", "hidden_norm") if UPPER_NORM.fullmatch(name) else name: shape
        for name, shape in expected.items()
    }


# What an engine does with the head itself, written in the engine's format.

UNKNOWN = "is not known to read it"
UNKNOWN_VARIANTS = ("qk_norm", "attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of `EagleConfig` that LMDeploy may or may not read; it is not known."""


def loading(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield how engines treat each tensor of the head, written in the flat format as each wants it."""
    config = head.config
    if config.generation == 3 and config.use_aux_hidden_state and LAST_HIDDEN in config.boundaries:
        return  # nothing can be written
    for engine in LOADERS if config.generation == 3 else FIRST_TOO:
        wanted, overrides = adapt_head(head, engine)
        keys = {**write_flat(wanted), **overrides}
        yield from mismatches(engine, wanted.config, keys, canonical_names(to_file(wanted)))


def _inputs(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, shown = head.config, list(head.config.boundaries)
    if config.hidden_size != config.target_hidden_size and not config.own_embedding:
        why = f"the head is {config.hidden_size} wide, the target's embeddings {config.target_hidden_size}"
        yield from fails(EVERY, "no embedding of its own", why, "store embed_tokens.weight with the head")
    if config.generation == 1:
        return
    if max(shown) > target.num_layers:
        why = f"the target has {target.num_layers} layers"
        remedy = "name the right target; or the ids in eagle_config are boundaries, not layers counted from 0"
        yield from fails(EVERY, f"reads boundaries {shown}", why, remedy)
    elif not config.use_aux_hidden_state:
        what, remedy = "reads the last hidden state (use_aux_hidden_state false)", "train on the default boundaries"
        yield from fails("llama.cpp", what, "its converter wants fc.weight over three boundaries", remedy)
        yield from degrades("lmdeploy", what, UNKNOWN, remedy)
    elif LAST_HIDDEN in shown:
        why = "EAGLE-3 layer ids cannot name the state after the final norm"
        yield from fails(EVERY, "reads the target's normed output", why, "train on boundaries")
    elif len(shown) != 3:
        what, remedy = f"reads {len(shown)} boundaries", "train on three"
        yield from fails("llama.cpp", what, "stops at any other number than three", remedy)
        yield from degrades("lmdeploy", what, UNKNOWN, remedy)
    yield from last_boundary(config.boundaries, target)
    yield from sorted_states(config.boundaries)
    if config.use_aux_hidden_state and 2 != shown[0] != LAST_HIDDEN:
        why = "takes ids that do not begin with 1 for boundaries in some of its targets (its pull request 25454)"
        yield from check(
            "sglang", f"reads boundaries {shown}", why, "compare its acceptance with ours, or begin with 2"
        )
    if 0 in shown:
        what, remedy = "reads the embeddings (boundary 0)", "train on boundaries from 1"
        yield from degrades("sglang", what, "counts layers from 0, so the id -1 is written; not tried", remedy)
        yield from fails("trtllm", what, "counts layers from 0, and takes -1 for the last layer", remedy)


def sorted_states(boundaries: Sequence[int]) -> Iterator[Finding]:
    """Yield a finding if boundaries are not ascending: vLLM (``EagleModelMixin``) captures states
    as its layers run, whatever the order of the ids.
    """
    if list(boundaries) != sorted(boundaries):
        what, why = f"reads boundaries {list(boundaries)}", "hands their states over in the order of the layers"
        yield from degrades("vllm", what, why, "train on ascending boundaries")


def last_boundary(boundaries: Sequence[int], target: TargetFacts) -> Iterator[Finding]:
    """Yield a finding if the last boundary is read: llama.cpp provides the state behind the last
    layer only for targets that have MTP layers there.
    """
    if target.num_layers in boundaries:
        what, why = f"reads boundary {target.num_layers}", "stops where the target is Llama's, Qwen3's or most others'"
        yield from check("llama.cpp", what, why, "try it: forerun doctor --run --engine llama.cpp")


def whole_order(head: HeadCheckpoint) -> Iterator[Finding]:
    """Yield a finding if the vocabulary is reordered: vLLM's loaders have a place for ``d2t`` only
    where the head's vocabulary is smaller than the target's.
    """
    if not head.config.reduced_vocabulary and bool(head.tensors["d2t"].any()):
        why = "has a place for d2t only beside a reduced vocabulary, and stops"
        yield from fails("vllm", "a vocabulary in another order", why, "sort the vocabulary")


def _layers(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, layers = head.config, head.config.num_hidden_layers
    unread = [flag for flag in UNKNOWN_VARIANTS if getattr(config, flag)]
    bias = head.tensors.get("fc.bias")
    for what in unread + (["fc.bias"] if bias is not None and bool(bias.any()) else []):
        yield from degrades("lmdeploy", what, UNKNOWN, RETRAIN)
    if config.norm_output:
        why = "hands the state before its norm to the next step, whatever the file says"
        yield from degrades("llama.cpp", "norm_output", why, RETRAIN)
    if config.norm_before_residual:
        why = "ignores the flag and adds the un-normed feature"
        yield from degrades("sglang trtllm lmdeploy", "norm_before_residual", why, RETRAIN)
    if config.qk_norm:
        yield from fails("sglang", "qk_norm", "has no EAGLE-3 architecture with norms of queries and keys", RETRAIN)
    if config.hidden_act != "silu":
        what, remedy = f"the activation {config.hidden_act}", "train the head with silu"
        yield from fails("vllm sglang", what, "has heads with silu only", remedy)
        yield from degrades("trtllm llama.cpp", what, "computes silu in its place", remedy)
        yield from degrades("lmdeploy", what, UNKNOWN, remedy)
    if config.fc_norm and config.norm_before_fc:
        what, remedy = "fc_norm together with norm_before_fc", "train with one of them"
        why = "applies norm_before_fc first, the head was trained the other way round"
        yield from degrades("vllm", what, why, remedy)
        yield from degrades("sglang", what, "applies both; the order is not known to be ours", remedy)
        yield from degrades("trtllm", what, "applies fc_norm alone", remedy)
    if config.latent is not None:
        yield from _latent(config, config.latent)
    if layers > 1:
        what = f"{layers} layers"
        yield from fails("llama.cpp", what, "its converter takes heads of one layer", "train one layer")
        yield from degrades("lmdeploy", what, "is not known to run more than one", "train one layer")
        why = "reads hidden_norm above the first layer; an export writes that norm under both names"
        if config.next_layer_regular:
            yield from ok("sglang trtllm" if config.latent is None else "trtllm", what, why)


def _latent(config: EagleConfig, latent: LatentConfig) -> Iterator[Finding]:
    """Yield findings about heads with latent attention; TensorRT-LLM knows them by their
    ``kv_lora_rank``.
    """
    what, ordinary = "latent attention", "train a head with ordinary attention"
    yield from fails("llama.cpp", what, "its converter takes heads with ordinary attention", ordinary)
    why = "reads such heads of Kimi's targets; others are not known"
    yield from check("lmdeploy", what, why, "compare its acceptance with ours")
    if config.num_hidden_layers > 1:
        yield from fails("sglang", f"{what} in more than one layer", "takes one layer, and stops", "train one layer")
    if latent.q_lora_rank is None:
        why, remedy = "needs q_lora_rank, and stops", "train the head with one"
        yield from fails("sglang trtllm lmdeploy", f"{what} without q_lora_rank", why, remedy)
    if not latent.rope_interleave:
        why, remedy = "rotates pairs that lie side by side, whatever the file says", "train with rope_interleave true"
        yield from degrades("vllm sglang trtllm", f"{what} rotated by halves", why, remedy)


def _window(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, window = head.config, head.config.sliding_window
    if window is None or window >= target.max_position_embeddings:
        return
    what, remedy = f"a sliding window of {window} positions", "train the head without a window"
    why = "has no window for draft heads: each layer looks back to the beginning"
    yield from degrades("trtllm llama.cpp", what, why, remedy)
    yield from degrades("lmdeploy", what, UNKNOWN, remedy)
    if config.generation == 1:
        yield from fails("vllm", what, "looks for layer_types behind those of the target, and stops", remedy)
    option = sglang_window(config)
    if option:
        why = f"reads no window from the file: its command line must have {option}"
        yield from check("sglang", what, why, "forerun export --to sglang")
    else:
        why = "has one window, of at least 2, for all layers, of EAGLE-3 heads only"
        yield from degrades("sglang", what, why, remedy)


def _modelopt(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield settings that ModelOpt has no key for: its own tools make a head without them, though
    the file states them.
    """
    config = head.config
    if config.generation == 1:
        what, remedy = "EAGLE-1", "export --to vllm, or train an EAGLE-3 head"
        yield from fails("modelopt", what, "gets EAGLE-3 heads only in its format", remedy)
        return
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
    unknown = [flag for flag in flags if getattr(config, flag)]
    if (config.sliding_window or target.max_position_embeddings) < target.max_position_embeddings:
        unknown.append("sliding_window")
    bias = head.tensors.get("fc.bias")
    if bias is not None and bool(bias.any()):
        unknown.append("fc.bias")
    for what in unknown:
        why = "has no key for it: engines read it from the file, its own tools do not"
        yield from check("modelopt", what, why, "do not train on with ModelOpt; serve the file as it is")


def _vocabulary(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield findings about embeddings and output heads, which some engines replace by the target's."""
    config = head.config
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        why = "takes the target's embedding for a head of the same width; right only if both are equal"
        yield from degrades("sglang trtllm", "an embedding of its own", why, "train with the target's embedding frozen")
    if config.generation == 1 and config.own_lm_head:
        what, remedy = "an output head of its own", "train with the target's output head"
        yield from fails("vllm", what, "has no place for one in EAGLE-1, and stops", remedy)
        why = "takes the target's output head for EAGLE-1; right only if both are equal"
        yield from degrades("sglang", what, why, remedy)
    yield from whole_order(head)
    if not config.reduced_vocabulary and bool(head.tensors["d2t"].any()):
        why = "reads d2t only for a reduced vocabulary; the order is lost"
        yield from degrades("trtllm", "a vocabulary in another order", why, "sort the vocabulary")
    if config.generation == 1 and config.reduced_vocabulary:
        what, remedy = "EAGLE-1 with d2t", "train on the whole vocabulary"
        yield from fails("vllm sglang lmdeploy", what, "reads no d2t for EAGLE-1", remedy)


def _generation(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    if head.config.generation == 1:
        remedy = "train an EAGLE-3 head"
        yield from fails("trtllm", "EAGLE-1", "the PyTorch backend loads EAGLE-3 only", remedy)
        yield from fails("llama.cpp", "EAGLE-1", "converts EAGLE-3 only", remedy)
        if "fc.bias" not in head.tensors:
            yield from ok("sglang", "no fc.bias", "would invent a random one; an export for SGLang writes zeros")
    ours, theirs = head.config.max_position_embeddings, target.max_position_embeddings
    if ours < theirs:
        what = f"made for {ours} positions, the target has {theirs}"
        yield from ok(EVERY, what, "beyond them drafts get worse or stop; answers stay right")


# What would go wrong if an engine were given the files as they lie: the remedy is to write them again.


def _tensors(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield tensors that an engine loads otherwise from these files than from an export of the
    head.
    """
    known = {(finding.engine, finding.what) for finding in loading(head, target)}
    engines = [name for name in LOADERS if head.config.generation == 3 or name in FIRST_TOO]
    keys = stored.config
    if KIND in keys:
        engines, keys = ["vllm", "llama.cpp"], {**keys[LAYERS], **keys}
    for engine in engines:
        others = mismatches(engine, head.config, keys, canonical_names(stored.tensors))
        yield from (other for other in others if (engine, other.what) not in known)


VLLM_NAMES = frozenset(
    """
    EagleCohereForCausalLM EagleLlamaForCausalLM EagleLlama4ForCausalLM EagleMiniCPMForCausalLM EagleMistralForCausalLM
    EagleMistralLarge3ForCausalLM EagleDeepSeekMTPModel Eagle3LlamaForCausalLM LlamaForCausalLMEagle3
    Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM Eagle3Qwen3ForCausalLM
    Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM
    """.split()  # noqa: SIM905 - as a literal it would have a line for each
)
"""EAGLE's architectures in vLLM's registry (``models/registry.py``)."""


def vllm_name(architecture: str, generation: int) -> str:
    """Return the name that vLLM (``EAGLEConfig``) looks for in its registry."""
    if generation == 1:
        return architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"
    known = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if known else f"Eagle3{architecture}"


def _keys(stored: StoredFiles, head: HeadCheckpoint) -> Iterator[Finding]:
    config, architectures = stored.config, names_of(stored.config)
    latent = head.config.latent is not None
    known = LATENT if latent else LLAMA if head.config.generation == 3 else FIRST_GENERATION
    if known not in architectures and not head.config.qk_norm:
        yield from fails("sglang", f"architectures {architectures}", f"loads {known} only")
    names = [vllm_name(name, head.config.generation) for name in architectures]
    if not VLLM_NAMES.intersection(names):
        why = f"has no architecture {', '.join(names)}" if names else "needs an architecture, and stops"
        yield from fails("vllm", f"architectures {architectures}", why)
    if latent and config.get("model_type") in ("deepseek_v3", "deepseek_v32"):
        yield from fails("vllm", f"model_type {config['model_type']}", "takes it for the target's own MTP layers")
    if "draft_vocab_size" not in config and head.config.generation == 3:
        yield from fails("sglang llama.cpp", "no draft_vocab_size", "needs the key, if only as null")
    if config.get("tie_word_embeddings") and head.config.own_lm_head:
        why = "puts the embedding in place of the head's lm_head"
        yield from degrades("sglang lmdeploy", "tie_word_embeddings", why)
    if "d2t" in stored.tensors and not head.config.reduced_vocabulary and not bool(head.tensors["d2t"].any()):
        yield from fails("vllm", "a d2t beside the whole vocabulary", "has no place for it, and stops")
    yield from _windows(config, head)
    if head.config.norm_output:
        if not config.get("norm_output"):
            yield from degrades("vllm sglang", f"only {POST_NORM}", "looks for norm_output at the top")
        if not (config.get(NESTED) or {}).get(POST_NORM):
            yield from degrades("trtllm", "only norm_output", f"looks for {POST_NORM} in {NESTED}")


def _windows(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    if head.config.sliding_window is None or head.config.generation == 1:
        return
    if not config.get("layer_types"):
        why = "applies a window only where layer_types names it"
        yield from degrades("vllm", "sliding_window without layer_types", why)
    if config.get("model_type") == "qwen3" and not config.get("use_sliding_window"):
        yield from degrades("vllm", "no use_sliding_window", "loses the window: Qwen3's configuration forgets it")


def _layer_ids(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, boundaries = stored.config, head.config.boundaries
    if LAST_HIDDEN in boundaries or is_default(boundaries, target.num_layers):
        return  # as those of EAGLE-1
    if not config.get(IDS):
        older = "the older runner reads them one layer early"
        where, runner = (LAYER_IDS, "its newer runner alone reads these") if config.get(LAYER_IDS) else (NESTED, older)
        why = f"looks for {IDS} at the top and takes its default layers; {runner}"
        yield from degrades("vllm", f"layer ids only in {where}", why)
        why = f"looks for {IDS} at the top, or takes its default layers"
        yield from degrades("llama.cpp", f"layer ids only in {where}", why)
    if not (config.get(NESTED) or {}).get(IDS):
        yield from degrades("sglang", f"no {NESTED}.{IDS}", "takes its default layers")
    if not (stored.directory / TRTLLM).is_file():
        why = f"needs eagle3_layers_to_capture: {to_outputs(boundaries)} in its YAML, or takes its default layers"
        yield from degrades("trtllm", "layer ids in config.json", why)


# How an engine is started.


def _vllm_line(launch: Launch) -> str:
    speculation = {"method": launch.head.config.kind, "model": str(launch.directory), "num_speculative_tokens": TOKENS}
    return shlex.join(["vllm", "serve", launch.target.name_or_path, "--speculative-config", json.dumps(speculation)])


def _sglang_line(launch: Launch) -> str:
    algorithm = "EAGLE3" if launch.head.config.generation == 3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-steps {TOKENS} --speculative-eagle-topk 1 --speculative-num-draft-tokens {TOKENS + 1} "
        f"{sglang_window(launch.head.config)}"
    ).strip()


def _trtllm_yaml(launch: Launch) -> Mapping[str, str]:
    """Return TensorRT-LLM's own file, with strings as JSON, which YAML understands."""
    config = launch.head.config
    speculation: dict[str, Any] = {"decoding_type": "Eagle3", "max_draft_len": TOKENS}
    speculation["speculative_model"] = json.dumps(str(launch.directory))
    if config.generation == 3:
        aux = config.use_aux_hidden_state  # -1 is the last hidden state
        speculation["eagle3_layers_to_capture"] = to_outputs(config.boundaries) if aux else [-1]
    if config.num_hidden_layers > 1:
        speculation["num_eagle_layers"] = config.num_hidden_layers
    return {TRTLLM: "speculative_config:\n" + "".join(f"  {key}: {value}\n" for key, value in speculation.items())}


def _llama_cpp_lines(launch: Launch) -> str:
    return start_lines_with(launch.directory, launch.target.name_or_path, "draft-eagle3", TOKENS)


DESTINATIONS: dict[str, Destination] = {
    "vllm": Destination(
        title="vLLM", engine="vllm", command=_vllm_line, counting="`num_speculative_tokens` counts drafted tokens."
    ),
    "sglang": Destination(
        title="SGLang",
        engine="sglang",
        command=_sglang_line,
        counting="`--speculative-num-draft-tokens` counts the last committed token too: one more than vLLM's number.",
    ),
    "trtllm": Destination(
        title="TensorRT-LLM",
        engine="trtllm",
        command=lambda launch: shlex.join(
            ["trtllm-serve", launch.target.name_or_path, "--config", str(launch.directory / TRTLLM)]
        ),
        files=_trtllm_yaml,
        counting=f"`max_draft_len` in `{TRTLLM}` counts drafted tokens. The layers to capture stand there, too.",
    ),
    "llama.cpp": Destination(
        title="llama.cpp",
        engine="llama.cpp",
        command=_llama_cpp_lines,
        counting=COUNTING,
    ),
    "modelopt": Destination(
        title="ModelOpt",
        format_name="modelopt",
        engine="modelopt",
        command=forerun_line,
        counting="`-k` counts drafted tokens. The file is laid out like ModelOpt's own exports.",
    ),
    "speculators": Destination(
        title="vLLM (speculators)",
        format_name="speculators",
        engine="vllm",
        command=lambda launch: shlex.join(["vllm", "serve", str(launch.directory)]),
        counting="`speculative_tokens` in `config.json` counts drafted tokens; vLLM finds the target there, too.",
    ),
}
"""Values of ``--to``, besides forerun itself."""


class EagleEngines(Engines):
    """Known facts about engines and EAGLE heads."""

    destinations = DESTINATIONS

    def adapt(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        return adapt_head(head, engine)

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        for part in (_inputs, loading, _layers, _window, _modelopt, _vocabulary, _generation):
            yield from part(head, target)

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        for finding in _as_stored(stored, head, target):
            remedy = f"forerun export --to {finding.engine if finding.engine in DESTINATIONS else 'hf'}"
            yield dataclasses.replace(finding, what=f"{finding.what} (as the files are)", remedy=remedy)


def _as_stored(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    yield from _tensors(stored, head, target)
    if KIND not in stored.config:
        yield from _keys(stored, head)
        yield from _layer_ids(stored, head, target)
        return
    yield from fails("sglang trtllm lmdeploy", "speculators format", "reads the flat format only")
    yield from _windows(stored.config[LAYERS], head)
    if stored.config[KIND] == "eagle3" and stored.config.get("norm_before_residual") is None:
        yield from degrades("vllm", "no norm_before_residual", "takes it for true, speculators means false")
