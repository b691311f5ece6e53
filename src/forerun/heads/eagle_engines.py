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
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from forerun.errors import list_some
from forerun.heads.decoders import IDS, canonical_names, to_file, to_outputs
from forerun.heads.eagle import EagleConfig
from forerun.heads.eagle_files import FIRST_GENERATION, LATENT, LLAMA, REGULAR, write_flat
from forerun.heads.eagle_findings import INPUTS, RETRAIN, SPECULATORS, STORED, TRAITS
from forerun.heads.engines import (
    COUNTING,
    TOKENS,
    Destination,
    Engines,
    Finding,
    Launch,
    apply_traits,
    degrades,
    fails,
    forerun_line,
    start_lines_with,
    trtllm_file,
    trtllm_line,
    vllm_line,
)
from forerun.heads.files import TRTLLM, HeadCheckpoint, Shape, StoredFiles, TargetFacts, expected_shapes
from forerun.heads.keys import KIND, LAYERS, NESTED
from forerun.heads.keys import architectures as names_of
from forerun.types import LAST_HIDDEN

Shapes = dict[str, Shape]
SHARED = re.compile(r"embed_tokens\.weight|lm_head\.weight|d2t|t2d|.*rotary_emb\.inv_freq")
"""Tensors that are taken from the target, computed, or checked by `diagnose`."""
UPPER_NORM = re.compile(r"layers\.[1-9]\d*\.(input_layernorm|hidden_norm)\.weight")
"""A norm with two names, of which an engine reads one."""
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
    stored = {name: tensor for name, tensor in tensors.items() if name in expected or not SHARED.fullmatch(name)}
    odd = sorted(name for name in stored.keys() & expected.keys() if tuple(stored[name].shape) != expected[name])
    strict = engine == "llama.cpp"  # Its converter has a name for every tensor, or stops; its loader wants all of them
    # Nothing is lost with the other name of a norm, or with a bias of zeros.
    lost = sorted(
        name
        for name in stored.keys() - expected.keys()
        if not (config.generation == 3 and UPPER_NORM.fullmatch(name))
        and (strict or not name.endswith(".bias") or bool(stored[name].any()))
    )
    stopping = [name for name in lost if strict or (engine == "vllm" and not name.endswith(".bias"))]
    unfilled = sorted(expected.keys() - stored.keys())
    complaints = (
        (odd, fails, f"expects {list_some([f'{name} {expected[name]}' for name in odd])}"),
        (stopping, fails, "has no place for it and stops"),
        ([name for name in lost if name not in stopping], degrades, "does not use it, without a message"),
        (unfilled, *((fails, "stops without it") if strict else (degrades, UNFILLED))),
    )
    for names, judged, why in complaints:
        if names:
            yield from judged(engine, list_some(names), why, RETRAIN)


def _vllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what vLLM loads. A Qwen3 layer has no other biases than those of queries, keys and
    values.
    """
    attention = bool(keys.get("attention_bias"))
    either = attention or bool(keys.get("bias"))
    if config.generation == 1:
        return _expect(config, qkv_bias=either, o_bias=either, fc_bias=False)
    return _expect(
        config,
        qkv_bias=attention,
        o_bias=either and not config.qk_norm,
        mlp_bias=config.mlp_bias and not config.qk_norm and config.latent is None,
        fc_bias=False,
        fc_norm=bool(keys.get("fc_norm")),
        **_fuse_states(config, keys),
    )


def _sglang(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what SGLang loads: its EAGLE-1 always has a bias after ``fc``, its EAGLE-3 none for
    queries, keys and values.
    """
    fc_bias = bool(keys.get("bias"))
    either = bool(keys.get("attention_bias")) or fc_bias
    if config.generation == 1:
        return _expect(config, qkv_bias=either, o_bias=either, fc_bias=True, mlp_bias=False)
    expected = _expect(
        config,
        qkv_bias=False,
        o_bias=either,
        mlp_bias=False,
        fc_bias=fc_bias,
        qk_norm=False,
        **_fuse_states(config, keys),
    )
    if keys.get("draft_vocab_size") is not None and not keys.get("tie_word_embeddings"):
        expected["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
    whole = (config.hidden_size, config.hidden_size)
    return _rename_norms(_without_fc(expected) if expected.get("fc.weight") == whole else expected)


def _trtllm(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what TensorRT-LLM loads; how many states ``fc`` reads is set in its YAML."""
    nested = keys.get(NESTED) or {}
    expected = _expect(
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
    return _rename_norms(_without_fc(expected) if len(config.boundaries) == 1 else expected)


def _llama_cpp(config: EagleConfig, keys: Mapping[str, Any]) -> Shapes:
    """Return what llama.cpp's converter has names for: one layer without biases, three states, and
    of the norms around them only that of ``norm_before_fc``.
    """
    return _expect(
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


def _expect(config: EagleConfig, *, qkv_bias: bool, o_bias: bool, **read: Any) -> Shapes:
    """Return names and shapes of a head as an engine reads it, with the fields `read` instead of
    those of `config`; latent attention has no biases.
    """
    shapes = expected_shapes(dataclasses.replace(config, attention_bias=config.latent is None, **read))
    absent = ([] if qkv_bias else ["q", "k", "v"]) + ([] if o_bias else ["o"])
    unbiased = tuple(f"self_attn.{name}_proj.bias" for name in absent)
    return {name: shape for name, shape in shapes.items() if not SHARED.fullmatch(name) and not name.endswith(unbiased)}


def _fuse_states(config: EagleConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return what vLLM and SGLang fuse: as many boundaries as they make room for, three where they
    find no number. Before latent attention they always fuse, and without ``norm_before_fc``.
    """
    nested = (keys.get(NESTED) or {}).get(IDS)
    count = keys.get("num_aux_hidden_states") or (len(nested) if nested else 3)
    always = config.latent is not None
    all_fit = not (config.use_aux_hidden_state or always) or count == len(config.boundaries)
    read = {"boundaries": config.boundaries if all_fit else tuple(range(count)), "next_layer_regular": True}
    return {**read, **({"use_aux_hidden_state": True, "norm_before_fc": False} if always else {})}


def _without_fc(expected: Shapes) -> Shapes:
    """Return the shapes without the fusion: states that are as wide as the head are taken as they
    are.
    """
    return {name: shape for name, shape in expected.items() if not name.startswith(("fc.", "fc_norm.", "input_norm."))}


def _rename_norms(expected: Shapes) -> Shapes:
    """Rename the norm above the first layer to the name that SGLang and TensorRT-LLM look for."""
    return {
        name.replace("input_layernorm", "hidden_norm") if UPPER_NORM.fullmatch(name) else name: shape
        for name, shape in expected.items()
    }


# What an engine does with the head itself, written in the engine's format.


def loading(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield how engines treat each tensor of the head, written in the flat format as each wants it."""
    config = head.config
    if config.generation == 3 and config.use_aux_hidden_state and LAST_HIDDEN in config.boundaries:
        return  # nothing can be written
    for engine in LOADERS if config.generation == 3 else FIRST_TOO:
        adapted, overrides = adapt_head(head, engine)
        keys = {**write_flat(adapted), **overrides}
        yield from mismatches(engine, adapted.config, keys, canonical_names(to_file(adapted)))


# What would go wrong if an engine were given the files as they lie: the remedy is to write them again.


def _tensors(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield tensors that an engine loads otherwise from these files than from an export of the
    head.
    """
    already_told = {(finding.engine, finding.what) for finding in loading(head, target)}
    engines = [name for name in LOADERS if head.config.generation == 3 or name in FIRST_TOO]
    keys = stored.config
    if KIND in keys:
        engines, keys = ["vllm", "llama.cpp"], {**keys[LAYERS], **keys}
    for engine in engines:
        others = mismatches(engine, head.config, keys, canonical_names(stored.tensors))
        yield from (other for other in others if (engine, other.what) not in already_told)


def vllm_name(architecture: str, generation: int) -> str:
    """Return the name that vLLM (``EAGLEConfig``) looks for in its registry."""
    if generation == 1:
        return architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"
    named_eagle3 = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if named_eagle3 else f"Eagle3{architecture}"


# How an engine is started.


def _sglang_line(launch: Launch) -> str:
    algorithm = "EAGLE3" if launch.head.config.generation == 3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-steps {TOKENS} --speculative-eagle-topk 1 --speculative-num-draft-tokens {TOKENS + 1} "
        f"{sglang_window(launch.head.config)}"
    ).strip()


def _trtllm_yaml(launch: Launch) -> Mapping[str, str]:
    config, more = launch.head.config, dict[str, Any]()
    if config.generation == 3:
        aux = config.use_aux_hidden_state  # -1 is the last hidden state
        more["eagle3_layers_to_capture"] = to_outputs(config.boundaries) if aux else [-1]
    if config.num_hidden_layers > 1:
        more["num_eagle_layers"] = config.num_hidden_layers
    return trtllm_file("Eagle3", TOKENS, launch.directory, more)


DESTINATIONS: dict[str, Destination] = {
    "vllm": Destination(
        title="vLLM",
        engine="vllm",
        command=lambda launch: vllm_line(
            launch.target.name_or_path,
            method=launch.head.config.kind,
            model=str(launch.directory),
            num_speculative_tokens=TOKENS,
        ),
        counting="`num_speculative_tokens` counts drafted tokens.",
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
        command=lambda launch: trtllm_line(launch.target.name_or_path, launch.directory),
        files=_trtllm_yaml,
        counting=f"`max_draft_len` in `{TRTLLM}` counts drafted tokens. The layers to capture stand there, too.",
    ),
    "llama.cpp": Destination(
        title="llama.cpp",
        engine="llama.cpp",
        command=lambda launch: start_lines_with(launch.directory, launch.target.name_or_path, "draft-eagle3", TOKENS),
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

    def adapt(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        return adapt_head(head, engine)

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        yield from apply_traits(INPUTS, head, target, count=len(head.config.boundaries))
        yield from loading(head, target)
        yield from apply_traits(TRAITS, head, target, option=sglang_window(head.config))

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        for finding in _as_stored(stored, head, target):
            yield dataclasses.replace(
                finding,
                what=f"{finding.what} (as the files are)",
                remedy=f"forerun export --to {finding.engine if finding.engine in DESTINATIONS else 'hf'}",
            )


ENGINE_FACTS = EagleEngines(destinations=DESTINATIONS)


def _as_stored(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    yield from _tensors(stored, head, target)
    if KIND in stored.config:
        yield from apply_traits(SPECULATORS, head, target, stored=stored, keys=stored.config[LAYERS])
        return
    architectures = names_of(stored.config)
    names = [vllm_name(name, head.config.generation) for name in architectures]
    yield from apply_traits(
        STORED,
        head,
        target,
        stored=stored,
        keys=stored.config,
        nested=stored.config.get(NESTED) or {},
        architectures=architectures,
        expected=LATENT if head.config.latent else LLAMA if head.config.generation == 3 else FIRST_GENERATION,
        names=names,
        listed=", ".join(names),
        outputs=to_outputs(head.config.boundaries) if LAST_HIDDEN not in head.config.boundaries else (),
    )
