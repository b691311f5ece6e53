"""What serving engines make of EAGLE heads: how each loads them, what it silently degrades, and how it is started.

A tensor that an engine allocates and nothing fills stays as it happens to be, and one that it has no place for is lost,
mostly without a message. Names are forerun's own. From reading vLLM 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4 (release
candidates), llama.cpp and LMDeploy 0.18, the last two without their loaders; no engine is run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.checkpoints.base import HeadCheckpoint, Shape, StoredFiles, TargetFacts, expected_shapes, some
from forerun.checkpoints.eagle import IDS, canonical_names, is_default, to_file, to_outputs
from forerun.checkpoints.engines import (
    DRAFTED,
    ENGINES,
    Destination,
    Engines,
    Finding,
    Launch,
    Severity,
    all_engines,
    degrades,
    fails,
    ok,
)
from forerun.checkpoints.flat import FIRST_GENERATION, LLAMA, POST_NORM, write_flat
from forerun.checkpoints.keys import NESTED
from forerun.checkpoints.speculators import KIND, LAYERS
from forerun.drafters.heads.eagle import EagleConfig
from forerun.types import LAST_HIDDEN

TRTLLM = "trtllm.yaml"
Shapes = dict[str, Shape]
SHARED = re.compile(r"embed_tokens\.weight|lm_head\.weight|d2t|t2d|.*rotary_emb\.inv_freq")
"""Taken from the target, computed, or looked after by `diagnose`."""
UPPER_NORM = re.compile(r"layers\.[1-9]\d*\.(input_layernorm|hidden_norm)\.weight")
"""One norm under two names, of which an engine reads one."""
RETRAIN = "train the head without it"


def adapted(head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
    """The head as `engine` wants it, and the keys of ``config.json`` that must be its own; None: as it is."""
    config = head.config
    if engine == "sglang" and config.generation == 1 and not config.fc_bias:
        # Its EAGLE-1 has a bias whatever the file says. It is not announced: "bias" means the attention's there.
        weight = head.tensors["fc.weight"]
        tensors = {**head.tensors, "fc.bias": torch.zeros(len(weight), dtype=weight.dtype)}
        config = dataclasses.replace(config, fc_bias=True)
        return HeadCheckpoint(config=config, tensors=tensors, notes=head.notes), {}
    if engine == "vllm" and config.generation == 1:
        return head, {"architectures": ["EagleLlamaForCausalLM"]}
    if engine == "trtllm" and config.generation == 3 and config.fc_bias:
        return head, {"bias": True}  # of fc, and there alone
    return head, {}


def sglang_window(config: EagleConfig) -> str:
    """The option that gives an EAGLE-3 head its window, empty if none can: one for all layers, itself not counted."""
    window = config.sliding_window or 0
    fits = window > 1 and config.generation == 3 and not config.full_layers
    return f"--speculative-draft-window-size {window - 1}" if fits else ""


def mismatches(
    engine: str, config: EagleConfig, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[Finding]:
    """Tensors that `engine` cannot load, loses or leaves unfilled.

    Args:
        engine: of `LOADERS`.
        config: what keys and tensors mean.
        keys: of ``config.json``, without nesting but for ``eagle_config``.
        tensors: of the file, by canonical names; a norm above the first layer may have both of its names.
    """
    expected = LOADERS[engine](config, keys)
    given = {name: tensor for name, tensor in tensors.items() if name in expected or not SHARED.fullmatch(name)}
    odd = sorted(name for name in given.keys() & expected.keys() if tuple(given[name].shape) != expected[name])
    lost = sorted(name for name in given.keys() - expected.keys() if not _harmless(name, given[name], config))
    stopping = [name for name in lost if engine == "vllm" and not name.endswith(".bias")]
    complaints: tuple[tuple[list[str], Severity, str], ...] = (
        (odd, "fails", f"expects {some([f'{name} {expected[name]}' for name in odd])}"),
        (stopping, "fails", "has no place for it and stops"),
        ([name for name in lost if name not in stopping], "degrades", "does not use it, without a message"),
        (sorted(expected.keys() - given.keys()), "degrades", "makes room for it, and nothing in the file fills it"),
    )
    for names, severity, why in complaints:
        if names:
            yield Finding(engine=engine, severity=severity, what=some(names), why=why, remedy=RETRAIN)


def _harmless(name: str, tensor: Tensor, config: EagleConfig) -> bool:
    """Whether nothing is lost with it: the other name of a norm, or a bias of zeros."""
    return bool(config.generation == 3 and UPPER_NORM.fullmatch(name)) or (
        name.endswith(".bias") and not bool(tensor.any())
    )


def _vllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """What vLLM loads: a Qwen3 layer has no other biases than those of queries, keys and values."""
    attention = bool(keys.get("attention_bias"))
    either = attention or bool(keys.get("bias"))
    if config.generation == 1:
        return _expected(config, qkv_bias=either, o_bias=either, fc_bias=False)
    return _expected(
        config,
        qkv_bias=attention,
        o_bias=either and not config.qk_norm,
        mlp_bias=config.mlp_bias and not config.qk_norm,
        fc_bias=False,
        fc_norm=bool(keys.get("fc_norm")),
        boundaries=_counted(config, keys),
    )


def _sglang(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """What SGLang loads: its EAGLE-1 always has a bias after ``fc``, its EAGLE-3 none for queries, keys and values."""
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
        boundaries=_counted(config, keys),
    )
    if keys.get("draft_vocab_size") is not None and not keys.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    return _hidden_norms(_without_fc(expected) if expected["fc.weight"][1] == config.hidden_size else expected)


def _trtllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """What TensorRT-LLM loads; how many states ``fc`` reads stands in its YAML."""
    nested = keys.get(NESTED) or {}
    expected = _expected(
        config,
        qkv_bias=bool(keys.get("attention_bias")),
        o_bias=bool(keys.get("attention_bias")),
        fc_bias=bool(keys.get("bias")),
        qk_norm=False,
        norm_before_fc=bool(nested.get("norm_before_fc")),
        fc_norm=bool(keys.get("fc_norm")),
    )
    return _hidden_norms(_without_fc(expected) if len(config.boundaries) == 1 else expected)


LOADERS: dict[str, Callable[[EagleConfig, Mapping[str, Any]], Shapes]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
}
"""Engine -> (what a head means, its keys) -> name and shape of every tensor that the engine wants of the file."""


def _expected(config: EagleConfig, *, qkv_bias: bool, o_bias: bool, **read: Any) -> Shapes:
    """Names and shapes of a head as an engine reads it, with the fields `read` instead of those of `config`."""
    shapes = expected_shapes(dataclasses.replace(config, attention_bias=True, **read))
    absent = ([] if qkv_bias else ["q", "k", "v"]) + ([] if o_bias else ["o"])
    unbiased = tuple(f"self_attn.{name}_proj.bias" for name in absent)
    return {name: shape for name, shape in shapes.items() if not SHARED.fullmatch(name) and not name.endswith(unbiased)}


def _counted(config: EagleConfig, keys: Mapping[str, Any]) -> tuple[int, ...]:
    """As many boundaries as vLLM and SGLang make room for; three where they find no number."""
    nested = (keys.get(NESTED) or {}).get(IDS)
    count = keys.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    return config.boundaries if count == len(config.boundaries) else tuple(range(count))


def _without_fc(expected: Shapes) -> Shapes:
    """Without the fusion: states that are as wide as the head are taken as they are."""
    return {name: shape for name, shape in expected.items() if not name.startswith(("fc.", "fc_norm.", "input_norm."))}


def _hidden_norms(expected: Shapes) -> Shapes:
    """The norm above the first layer under the name that SGLang and TensorRT-LLM look for."""
    return {
        name.replace("input_layernorm", "hidden_norm") if UPPER_NORM.fullmatch(name) else name: shape
        for name, shape in expected.items()
    }


# What an engine does with the head itself, written in the engine's format.

UNKNOWN = "is not known to read it"
UNKNOWN_VARIANTS = ("qk_norm", "attention_bias", "mlp_bias", "norm_before_fc", "fc_norm", "norm_output")
"""Flags of `EagleConfig` of which it is not known whether llama.cpp and LMDeploy read them."""


def _boundaries(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    if config.generation == 1:
        return
    shown = list(config.boundaries)
    if max(shown) > target.num_layers:
        why = f"the target has {target.num_layers} layers"
        remedy = "name the right target; or the ids in eagle_config are boundaries, not layers counted from 0"
        yield from all_engines("fails", f"reads boundaries {shown}", why, remedy)
    elif LAST_HIDDEN in shown:
        why = "EAGLE-3 layer ids cannot name the state after the final norm"
        yield from all_engines("fails", "reads the target's normed output", why, "train on boundaries")
    elif not is_default(shown, target.num_layers):
        why = f"its converter always takes {[2, target.num_layers // 2, target.num_layers - 3]}"
        yield fails("llama.cpp", f"reads boundaries {shown}", why, "train on the default boundaries")
        if len(shown) != 3:
            yield degrades("lmdeploy", f"reads {len(shown)} boundaries", UNKNOWN, "train on three")
    if 0 in shown:
        what, remedy = "reads the embeddings (boundary 0)", "train on boundaries from 1"
        yield degrades("sglang", what, "counts layers from 0, so the id -1 is written; not tried", remedy)
        yield fails("trtllm", what, "counts layers from 0, and takes -1 for the last layer", remedy)


def _embedding(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    if config.hidden_size != config.target_hidden_size and not config.own_embedding:
        why = f"the head is {config.hidden_size} wide, the target's embeddings {config.target_hidden_size}"
        remedy = "store embed_tokens.weight with the head"
        yield from all_engines("fails", "no embedding of its own", why, remedy)


def loading(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """What engines do with each tensor of the head, written in the flat format as each wants it."""
    config = head.config
    if config.generation == 3 and LAST_HIDDEN in config.boundaries:
        return  # nothing can be written
    for engine in LOADERS if config.generation == 3 else ("vllm", "sglang"):
        wanted, overrides = adapted(head, engine)
        keys = {**write_flat(wanted), **overrides}
        yield from mismatches(engine, wanted.config, keys, canonical_names(to_file(wanted)))


def _variants(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    unread = [flag for flag in UNKNOWN_VARIANTS if getattr(config, flag)]
    bias = head.tensors.get("fc.bias")
    unread += ["fc.bias"] if bias is not None and bool(bias.any()) else []
    for engine, what in itertools.product(("llama.cpp", "lmdeploy"), unread):
        yield degrades(engine, what, UNKNOWN, RETRAIN)
    if config.norm_before_residual:
        for engine in ("sglang", "trtllm", "lmdeploy"):
            why = "ignores the flag and adds the un-normed feature"
            yield degrades(engine, "norm_before_residual", why, RETRAIN)
    if config.qk_norm:
        why = "has no EAGLE-3 architecture with norms of queries and keys"
        yield fails("sglang", "qk_norm", why, RETRAIN)
    if config.hidden_act != "silu":
        what, remedy = f"the activation {config.hidden_act}", "train the head with silu"
        for engine in ("vllm", "sglang"):
            yield fails(engine, what, "has heads with silu only", remedy)
        yield degrades("trtllm", what, "computes silu in its place", remedy)
        for engine in ("llama.cpp", "lmdeploy"):
            yield degrades(engine, what, UNKNOWN, remedy)


def _window(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """A sliding window that a sequence of the target can outgrow."""
    config = head.config
    window = config.sliding_window
    if window is None or window >= target.max_position_embeddings:
        return
    what, remedy = f"a sliding window of {window} positions", "train the head without a window"
    everything = "has no window for draft heads: each layer looks back to the beginning"
    for engine in ("trtllm", "llama.cpp"):
        yield degrades(engine, what, everything, remedy)
    yield degrades("lmdeploy", what, UNKNOWN, remedy)
    if config.generation == 1:
        yield fails("vllm", what, "looks for layer_types behind those of the target, and stops", remedy)
    option = sglang_window(config)
    if option:
        why = f"reads no window from the file: its command line must have {option}"
        yield Finding(engine="sglang", severity="check", what=what, why=why, remedy="forerun export --to sglang")
    else:
        yield degrades("sglang", what, "has one window, of at least 2, for all layers, of EAGLE-3 heads only", remedy)


def _both_norms(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    if not (head.config.fc_norm and head.config.norm_before_fc):
        return
    what = "fc_norm together with norm_before_fc"
    for engine, why in (
        ("vllm", "applies norm_before_fc first, the head was trained the other way round"),
        ("sglang", "applies both; the order is not known to be ours"),
        ("trtllm", "applies fc_norm alone"),
    ):
        yield degrades(engine, what, why, "train with one of them")


def _sharing(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Embeddings and output heads that an engine replaces by the target's."""
    config = head.config
    if config.own_embedding and config.hidden_size == config.target_hidden_size:
        why = "takes the target's embedding for a head of the same width; right only if both are equal"
        for engine in ("sglang", "trtllm"):
            yield degrades(engine, "an embedding of its own", why, "train with the target's embedding frozen")
    if config.generation == 1 and config.own_lm_head:
        why = "takes the target's output head for EAGLE-1; right only if both are equal"
        yield degrades("sglang", "an output head of its own", why, "train with the target's output head")


def _depth(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    layers = head.config.num_hidden_layers
    if layers == 1:
        return
    what = f"{layers} layers"
    yield fails("llama.cpp", what, "its converter takes heads of one layer", "train one layer")
    yield degrades("lmdeploy", what, "is not known to run more than one", "train one layer")
    for engine in ("sglang", "trtllm"):
        yield ok(engine, what, "reads hidden_norm above the first layer; an export writes that norm under both names")


def _vocabulary(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config = head.config
    if config.generation == 3 and not config.own_lm_head:
        why = "needs draft_vocab_size and an output head in the checkpoint"
        yield fails("llama.cpp", "no output head of its own", why, "copy the target's head into the checkpoint")
    if not config.reduced_vocabulary and bool(head.tensors["d2t"].any()):
        why = "reads d2t only for a reduced vocabulary; the order is lost"
        yield degrades("trtllm", "a vocabulary in another order", why, "sort the vocabulary")
    if config.generation == 1 and config.reduced_vocabulary:
        for engine in ("vllm", "sglang", "lmdeploy"):
            yield fails(engine, "EAGLE-1 with d2t", "reads no d2t for EAGLE-1", "train on the whole vocabulary")


def _generation(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    if head.config.generation != 1:
        return
    yield fails("trtllm", "EAGLE-1", "the PyTorch backend loads EAGLE-3 only", "train an EAGLE-3 head")
    yield fails("llama.cpp", "EAGLE-1", "converts EAGLE-3 only", "train an EAGLE-3 head")
    if "fc.bias" not in head.tensors:
        yield ok("sglang", "no fc.bias", "would invent a random one; an export for SGLang writes zeros")


def _context(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    ours, theirs = head.config.max_position_embeddings, target.max_position_embeddings
    if ours < theirs:
        what = f"made for {ours} positions, the target has {theirs}"
        for engine in ENGINES:
            yield ok(engine, what, "beyond them drafts get worse or stop; answers stay right")


CHECKS: tuple[Callable[[HeadCheckpoint, TargetFacts], Iterator[Finding]], ...] = (
    _embedding,
    _boundaries,
    loading,
    _variants,
    _window,
    _both_norms,
    _sharing,
    _depth,
    _vocabulary,
    _generation,
    _context,
)


# What would go wrong if an engine were given the files as they lie: the remedy is to write them again.

TARGETS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "trtllm", "llama.cpp": "hf", "lmdeploy": "hf"}
"""Engine -> what to export for."""


def _tensors(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Tensors that an engine loads otherwise from these files than from an export of the head."""
    known = {(finding.engine, finding.what) for finding in loading(head, target)}
    engines = [name for name in LOADERS if head.config.generation == 3 or name != "trtllm"]
    keys = stored.config
    if KIND in keys:
        engines, keys = ["vllm"], {**keys[LAYERS], **keys}
    for engine in engines:
        for found in mismatches(engine, head.config, keys, canonical_names(stored.tensors)):
            if (engine, found.what) not in known:
                yield _finding(engine, found.severity, found.what, found.why)


def _speculators_files(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    for engine in ("sglang", "trtllm", "lmdeploy"):
        yield _finding(engine, "fails", "speculators format", "reads the flat format only")
    yield from _windows(config[LAYERS], head)
    if config.get("norm_before_residual") is None:
        yield _finding("vllm", "degrades", "no norm_before_residual", "takes it for true, speculators means false")


def _keys(stored: StoredFiles, head: HeadCheckpoint) -> Iterator[Finding]:
    config = stored.config
    architectures = config.get("architectures") or []
    known = LLAMA if head.config.generation == 3 else FIRST_GENERATION
    if known not in architectures and not head.config.qk_norm:
        yield _finding("sglang", "fails", f"architectures {architectures}", f"loads {known} only")
    if "draft_vocab_size" not in config and head.config.generation == 3:
        for engine in ("sglang", "llama.cpp"):
            yield _finding(engine, "fails", "no draft_vocab_size", "needs the key, if only as null")
    if config.get("tie_word_embeddings") and head.config.own_lm_head:
        for engine in ("vllm", "sglang", "lmdeploy"):
            yield _finding(
                engine, "degrades", "tie_word_embeddings", "puts the embedding in place of the head's lm_head"
            )
    yield from _windows(config, head)
    if head.config.norm_output:
        if not config.get("norm_output"):
            for engine in ("vllm", "sglang"):
                yield _finding(engine, "degrades", f"only {POST_NORM}", "looks for norm_output at the top")
        if not (config.get(NESTED) or {}).get(POST_NORM):
            yield _finding("trtllm", "degrades", "only norm_output", f"looks for {POST_NORM} in {NESTED}")


def _windows(config: Mapping[str, Any], head: HeadCheckpoint) -> Iterator[Finding]:
    if head.config.sliding_window is None or head.config.generation == 1:
        return
    if not config.get("layer_types"):
        why = "applies a window only where layer_types names it"
        yield _finding("vllm", "degrades", "sliding_window without layer_types", why)
    if config.get("model_type") == "qwen3" and not config.get("use_sliding_window"):
        why = "loses the window: Qwen3's configuration forgets it"
        yield _finding("vllm", "degrades", "no use_sliding_window", why)


def _layer_ids(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    config, boundaries = stored.config, head.config.boundaries
    nested = config.get(NESTED) or {}
    if is_default(boundaries, target.num_layers) or LAST_HIDDEN in boundaries:
        return
    if not config.get(IDS):
        why = f"looks for {IDS} at the top and takes its default layers; the older runner reads them one layer early"
        yield _finding("vllm", "degrades", f"layer ids only in {NESTED}", why)
    if not nested.get(IDS):
        yield _finding("sglang", "degrades", f"no {NESTED}.{IDS}", "takes its default layers")
    if not (stored.directory / TRTLLM).is_file():
        why = f"needs eagle3_layers_to_capture: {to_outputs(boundaries)} in its YAML, or takes its default layers"
        yield _finding("trtllm", "degrades", "layer ids in config.json", why)


def _finding(engine: str, severity: Severity, what: str, why: str) -> Finding:
    remedy = f"forerun export --to {TARGETS[engine]}"
    return Finding(engine=engine, severity=severity, what=f"{what} (as the files are)", why=why, remedy=remedy)


# How an engine is started.


def _vllm_line(launch: Launch) -> str:
    speculation = {"method": launch.head.config.kind, "model": str(launch.directory), "num_speculative_tokens": DRAFTED}
    quoted = shlex.quote(json.dumps(speculation))
    return f"vllm serve {shlex.quote(launch.target.name_or_path)} --speculative-config {quoted}"


def _speculators_line(launch: Launch) -> str:
    return f"vllm serve {shlex.quote(str(launch.directory))}"


def _sglang_line(launch: Launch) -> str:
    algorithm = "EAGLE3" if launch.head.config.generation == 3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-steps {DRAFTED} --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFTED + 1} "
        f"{sglang_window(launch.head.config)}"
    ).strip()


def _trtllm_line(launch: Launch) -> str:
    config = shlex.quote(str(launch.directory / TRTLLM))
    return f"trtllm-serve {shlex.quote(launch.target.name_or_path)} --config {config}"


def _yaml(launch: Launch) -> Mapping[str, str]:
    """TensorRT-LLM's own file; strings as JSON, which YAML understands."""
    config = launch.head.config
    lines = [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {DRAFTED}",
        f"  speculative_model: {json.dumps(str(launch.directory))}",
    ]
    if config.generation == 3:
        lines += [f"  eagle3_layers_to_capture: {to_outputs(config.boundaries)}"]
    if config.num_hidden_layers > 1:
        lines += [f"  num_eagle_layers: {config.num_hidden_layers}"]
    return {TRTLLM: "\n".join(lines) + "\n"}


DESTINATIONS: dict[str, Destination] = {
    "vllm": Destination(
        title="vLLM",
        format_name="flat",
        engine="vllm",
        command=_vllm_line,
        counting="`num_speculative_tokens` counts drafted tokens.",
    ),
    "sglang": Destination(
        title="SGLang",
        format_name="flat",
        engine="sglang",
        command=_sglang_line,
        counting="`--speculative-num-draft-tokens` counts the last committed token too: one more than vLLM's number.",
    ),
    "trtllm": Destination(
        title="TensorRT-LLM",
        format_name="flat",
        engine="trtllm",
        command=_trtllm_line,
        files=_yaml,
        counting=f"`max_draft_len` in `{TRTLLM}` counts drafted tokens. The layers to capture stand there, too.",
    ),
    "speculators": Destination(
        title="vLLM (speculators)",
        format_name="speculators",
        engine="vllm",
        command=_speculators_line,
        counting="`speculative_tokens` in `config.json` counts drafted tokens; vLLM finds the target there, too.",
    ),
}
"""What ``--to`` can be, beside forerun itself."""


class EagleEngines(Engines):
    """What is known of engines and EAGLE heads."""

    destinations = DESTINATIONS
    files = (TRTLLM,)

    def adapted(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        return adapted(head, engine)

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        return (finding for check in CHECKS for finding in check(head, target))

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        if KIND in stored.config:
            return [*_speculators_files(stored.config, head), *_tensors(stored, head, target)]
        found = [*_keys(stored, head), *_tensors(stored, head, target)]
        if head.config.generation == 3:
            found += _layer_ids(stored, head, target)
        return found
