"""What serving engines make of DFlash and DSpark heads, from their loaders' sources; no engine was run with one."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.eagle import to_outputs
from forerun.checkpoints.eagle_engines import DESTINATIONS, TRTLLM
from forerun.checkpoints.engines import Destination, Engines, Finding, Launch, check, degrades, fails

RETRAIN = "train one without it"
METHODS = {"dflash": "dflash", "dflash2": "dflash", "dspark": "dspark", "domino": "dflash"}
"""Kind -> what engines call its drafter; vLLM's and SGLang's for DFlash know DFlash 2, SGLang's Domino."""


class BlockEngines(Engines):
    """What is known of engines and heads that draft a block."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        config = head.config
        for what, stored in (
            ("an embedding of its own", config.own_embedding),
            ("a reduced vocabulary", config.reduced_vocabulary),
            ("an output head of its own", config.own_lm_head and not config.reduced_vocabulary),
        ):
            if stored and config.kind != "dspark":
                yield from degrades("sglang", what, "takes the target's instead", RETRAIN)
        if config.is_causal or config.causal_windows:
            what = "places of a block that do not see those behind them"
            yield from degrades("sglang trtllm", what, "is not known to read the key", RETRAIN)
        if config.sliding_window is not None:
            why = "counts the window from the query or from the root: publishers differ"
            yield from check(
                "vllm sglang trtllm llama.cpp", "a sliding window", why, "compare its acceptance with ours"
            )
        if not config.qk_norm:
            yield from fails("vllm sglang trtllm", "no norms of queries and keys", "wants Qwen3's layers", RETRAIN)
        if 0 in config.boundaries:
            what, remedy = "reads the embeddings (boundary 0)", "train on boundaries from 1"
            yield from degrades("vllm sglang trtllm", what, "counts layers from 0, so the id -1 is written", remedy)
        if config.kind == "dspark" and config.markov_head_type != "vanilla":
            what = f"a table with {config.markov_head_type}"
            yield from check(
                "sglang trtllm llama.cpp", what, "is not known to read it", "compare its acceptance with ours"
            )
        yield from check("trtllm", "layer ids and mask token", f"reads them from {TRTLLM}", "export --to trtllm")
        why = "reads what its converter makes of the head"
        yield from check(
            "llama.cpp", f"a {config.kind} head", why, "convert it there, and compare its acceptance with ours"
        )
        why = "exports such heads, but is not known to read them"
        yield from check("modelopt", f"a {config.kind} head", why, "train on with forerun")
        if config.kind == "dspark":
            yield from fails("lmdeploy", "a DSpark head", "has no such drafter", "use vLLM or SGLang")
        if config.kind == "dflash2":
            what, why = "convolutions and a selector of paths", "is not known to read them"
            yield from degrades("trtllm lmdeploy llama.cpp", what, why, "use vLLM or SGLang, or train a DSpark head")
        if config.kind == "domino":
            why = "reads a DFlash head in it and passes the correction over, so that later tokens fit each other less"
            what, remedy = "a Domino head", "use SGLang, or train a DSpark head"
            yield from degrades("vllm trtllm lmdeploy llama.cpp", what, why, remedy)
            why = "corrects 2,048 likely tokens only, at temperature 0, on one CUDA device (its pull request 36899)"
            yield from check("sglang", what, why, "compare its acceptance with ours")


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
    """TensorRT-LLM's own file; values as JSON, which YAML understands."""
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


def _destinations() -> dict[str, Destination]:
    """Those of EAGLE's heads, started in their own way."""
    own: dict[str, dict[str, Any]] = {
        "vllm": {"command": _vllm},
        "sglang": {"command": _sglang},
        "trtllm": {"files": _trtllm, "counting": f"`max_draft_len` in `{TRTLLM}` counts drafted tokens."},
        "speculators": {},
    }
    return {name: dataclasses.replace(DESTINATIONS[name], **changes) for name, changes in own.items()}


BlockEngines.destinations = _destinations()
