"""How serving engines treat DFlash and DSpark heads, from their loaders' sources (vLLM 0.32 and
0.33, ``qwen3_dflash.py``, ``qwen3_dspark.py``; llama.cpp 0.5.0, ``conversion/qwen.py``,
``src/models/dflash.cpp``). On the CPU vLLM 0.32 was run with a DFlash head (``tests_vllm``),
llama.cpp with DFlash, DFlash 2 and DSpark (``tests_llama``), no other engine with any.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.checkpoints.eagle import to_outputs
from forerun.checkpoints.eagle_engines import DESTINATIONS, TRTLLM, last_boundary, sorted_states, whole_order
from forerun.checkpoints.engines import Destination, Engines, Finding, Launch, check, degrades, fails
from forerun.checkpoints.gguf import start_lines_with
from forerun.checkpoints.speculators import KIND, NON_CAUSAL

RETRAIN = "train one without it"
ANCHOR, OF_DSPARK = "a root that predicts the token after it (sample_from_anchor)", "takes that of DSpark heads only"
METHODS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "domino": "dflash"}
"""The name that engines give each kind's drafter. vLLM's and SGLang's for DFlash know DFlash 2,
SGLang's Domino.
"""


class BlockEngines(Engines):
    """Known facts about engines and heads that draft a block."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        config = head.config
        for what, stored in (
            ("an embedding of its own", config.own_embedding),
            ("a reduced vocabulary", config.reduced_vocabulary),
            ("an output head of its own", config.own_lm_head and not config.reduced_vocabulary),
        ):
            if stored and config.kind != "dspark":
                yield from degrades("sglang", what, "takes the target's instead", RETRAIN)
        yield from _vllm_loader(head)
        yield from _llama_cpp_loader(head, target)
        if config.is_causal or config.causal_windows:
            what = "places of a block that do not see those behind them"
            yield from degrades("sglang trtllm", what, "is not known to read the key", RETRAIN)
        if config.sliding_window is not None:
            why = "counts the window from the query or from the root: publishers differ"
            yield from check(
                "vllm sglang trtllm llama.cpp", "a sliding window", why, "compare its acceptance with ours"
            )
        if not config.qk_norm:
            what = "no norms of queries and keys"
            yield from fails("sglang trtllm", what, "wants Qwen3's layers", RETRAIN)
            yield from degrades("vllm", what, "has norms there, which nothing in the file fills", RETRAIN)
        if 0 in config.boundaries:
            what, remedy = "reads the embeddings (boundary 0)", "train on boundaries from 1"
            yield from degrades("sglang trtllm", what, "counts layers from 0, so the id -1 is written", remedy)
        if config.kind == "dspark" and config.markov_head_type != "vanilla":
            what = f"a table with {config.markov_head_type}"
            yield from check("sglang trtllm", what, "is not known to read it", "compare its acceptance with ours")
        yield from check("trtllm", "layer ids and mask token", f"reads them from {TRTLLM}", "export --to trtllm")
        why = "exports such heads, but is not known to read them"
        yield from check("modelopt", f"a {config.kind} head", why, "train on with forerun")
        if config.kind == "dspark":
            yield from fails("lmdeploy", "a DSpark head", "has no such drafter", "use vLLM or SGLang")
        if config.kind == "dflash2":
            what, why = "convolutions and a selector of paths", "is not known to read them"
            yield from degrades("trtllm lmdeploy", what, why, "use vLLM or SGLang, or train a DSpark head")
        if config.kind == "domino":
            why = "reads a DFlash head in it and passes the correction over, so that later tokens fit each other less"
            what, remedy = "a Domino head", "use SGLang, or train a DSpark head"
            yield from degrades("vllm trtllm lmdeploy", what, why, remedy)
            why = "corrects 2,048 likely tokens only, at temperature 0, on one CUDA device (its pull request 36899)"
            yield from check("sglang", what, why, "compare its acceptance with ours")

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        """Yield what vLLM makes of keys in the speculators format
        (``configs/speculators/algos.py``).
        """
        keys, config, remedy = stored.config, head.config, "forerun export --to vllm"
        if KIND not in keys:
            return
        if keys.get(NON_CAUSAL) is None and config.causal_windows:
            what, why = f"no {NON_CAUSAL} (as the files are)", "takes it for true, speculators means false"
            yield from degrades("vllm", what, why, remedy)
        if keys.get(NON_CAUSAL) is False and (config.full_layers or config.sliding_window is None):
            what, why = f"{NON_CAUSAL} false beside layers without a window (as the files are)", "means them by it, too"
            yield from degrades("vllm", what, why, remedy)
        if config.kind == "dspark" and keys.get("sample_from_anchor") is None:
            what, why = "no sample_from_anchor (as the files are)", "takes it for false, speculators means true"
            yield from degrades("vllm", what, why, remedy)


def _vllm_loader(head: HeadCheckpoint) -> Iterator[Finding]:
    """Yield what vLLM's loader drops or stops at. Its model runner V1, the only one of its CPU
    build, stops at more.
    """
    config = head.config
    yield from whole_order(head)
    yield from sorted_states(config.boundaries)
    if config.hidden_act != "silu":
        yield from fails("vllm", f"the activation {config.hidden_act}", "has heads with silu only", "train with silu")
    if config.mlp_bias:
        yield from degrades("vllm", "biases of the MLP", "does not use them, without a message", RETRAIN)
    if config.kind in ("dflash", "dflash2") and config.sample_from_anchor:
        yield from fails("vllm", ANCHOR, OF_DSPARK, RETRAIN)
    if config.kind == "dspark" and config.markov_head_type != "vanilla":
        why = "has no place for what the table is multiplied with, and stops"
        yield from fails("vllm", f"a table with {config.markov_head_type}", why, "train one with vanilla")
    if config.kind == "dspark":
        why = 'stops on a CPU: "Model Runner V1 does not support: dspark speculative decoding"'
        yield from check("vllm", "a DSpark head", why, "serve it on an accelerator, or in forerun")
    elif config.kind == "dflash2":
        why = 'stops on a CPU: "Model Runner V1 does not support: DFlash candidate-head drafts"'
        yield from check("vllm", "a DFlash 2 head", why, "serve it on an accelerator, or in forerun")
    elif config.full_layers:
        why = "stops on a CPU, where it has no model runner V2"
        yield from check("vllm", "layers with and without a window", why, "serve it on an accelerator, or in forerun")


def _llama_cpp_loader(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield where llama.cpp's converter has no name for a tensor, or its loader wants one more."""
    config, stops = head.config, "has no place for it and stops"
    for what, stopping in (
        ("biases of the attention", config.attention_bias),
        ("biases of the MLP", config.mlp_bias),
        ("a reduced vocabulary", config.reduced_vocabulary and config.kind != "dspark"),
        ("a Domino head", config.kind == "domino"),
        ("another table than vanilla", config.kind == "dspark" and config.markov_head_type != "vanilla"),
    ):
        if stopping:
            yield from fails("llama.cpp", what, stops, RETRAIN)
    if not config.qk_norm:
        yield from fails("llama.cpp", "no norms of queries and keys", "stops without them", RETRAIN)
    if config.hidden_size != config.target_hidden_size:
        what, remedy = f"a head {config.hidden_size} wide", "train one as wide as the target"
        yield from fails("llama.cpp", what, "takes the target's states to be as wide as the head", remedy)
    if config.hidden_act != "silu":
        why = "computes silu in its place"
        yield from degrades("llama.cpp", f"the activation {config.hidden_act}", why, "train with silu")
    if config.kind in ("dflash", "dflash2") and config.sample_from_anchor:
        yield from degrades("llama.cpp", ANCHOR, OF_DSPARK, RETRAIN)
    if config.kind == "dspark" and config.own_lm_head and not config.reduced_vocabulary:
        yield from degrades("llama.cpp", "an output head of its own", "takes the target's instead", RETRAIN)
    yield from last_boundary(config.boundaries, target)


def _vllm(launch: Launch) -> str:
    config = launch.head.config
    speculation = {
        "method": METHODS[config.kind],
        "model": str(launch.directory),
        "num_speculative_tokens": config.max_depth,
    }
    return shlex.join(["vllm", "serve", launch.target.name_or_path, "--speculative-config", json.dumps(speculation)])


def _sglang(launch: Launch) -> str:
    config = launch.head.config
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {METHODS[config.kind].upper()} "
        f"--speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-draft-tokens {config.block_size if config.kind == 'domino' else config.max_depth + 1}"
    )


def _trtllm(launch: Launch) -> Mapping[str, str]:
    """Return TensorRT-LLM's own file, with values as JSON, which YAML understands."""
    config = launch.head.config
    speculation: dict[str, Any] = {
        "decoding_type": {"dflash": "DFlash", "dspark": "DSpark"}[METHODS[config.kind]],
        "max_draft_len": config.max_depth,
        "speculative_model": str(launch.directory),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": to_outputs(config.boundaries),
    }
    return {
        TRTLLM: "speculative_config:\n"
        + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in speculation.items())
    }


def _llama_cpp(launch: Launch) -> str:
    config = launch.head.config
    method = f"draft-{METHODS[config.kind]}"
    return start_lines_with(launch.directory, launch.target.name_or_path, method, config.max_depth)


def _destinations() -> dict[str, Destination]:
    """Return the destinations of EAGLE's heads with this kind's own launch commands."""
    own: dict[str, dict[str, Any]] = {
        "vllm": {"command": _vllm},
        "sglang": {"command": _sglang},
        "trtllm": {"files": _trtllm, "counting": f"`max_draft_len` in `{TRTLLM}` counts drafted tokens."},
        "llama.cpp": {"command": _llama_cpp},
        "speculators": {},
    }
    return {name: dataclasses.replace(DESTINATIONS[name], **changes) for name, changes in own.items()}


BlockEngines.destinations = _destinations()
