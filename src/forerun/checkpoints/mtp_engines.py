"""How serving engines treat MTP layers: they read them in the target's own checkpoint, so an export
is a copy of it. From their loaders' sources; vLLM 0.32 was run with layers of ours
(``tests_vllm``), llama.cpp 0.5.0 with those that it refuses (``tests_llama``).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.engines import Destination, Engines, Finding, Launch, check, fails, plainly_named
from forerun.checkpoints.gguf import start_lines
from forerun.checkpoints.mtp import stitch

TOKENS = 3  # Tokens of a step in the launch lines, for which FastMTP trains


class MtpEngines(Engines):
    """Known facts about engines and MTP layers."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        if head.config.num_hidden_layers > 1:
            what = f"{head.config.num_hidden_layers} modules"
            yield from check("vllm sglang", what, "begins again with the first", "compare its acceptance with ours")
        if not head.config.norm_output:
            what, remedy = "several tokens from MiMo's module", "draft one token, or compare its acceptance with ours"
            yield from check("vllm sglang", what, "hands another state on, or refuses", remedy)
        elif head.config.latent is None:
            what, remedy = "several tokens from GLM's module", "draft one token, or compare its acceptance with ours"
            yield from check("vllm", what, "hands the state on before its norm", remedy)
        why, remedy = "is not known here to read these layers", "compare its acceptance with ours"
        yield from check("trtllm lmdeploy modelopt", "MTP layers", why, remedy)
        if not head.config.norm_output:
            what, why = "MTP layers of MiMo's kind", "has no converter for their target"
            yield from fails("llama.cpp", what, why, "use vLLM or SGLang")
        elif head.config.latent is not None:
            what, why = "MTP layers of DeepSeek's kind", "has a converter that drops them"
            yield from fails("llama.cpp", what, why, "use vLLM or SGLang")
        else:
            remedy = "convert the target with its layers there, and compare its acceptance with ours"
            yield from check("llama.cpp", "MTP layers", "reads GLM's; they were not tried here", remedy)


def _stitch(launch: Launch) -> Path:
    return stitch(launch.head, launch.target.name_or_path, launch.directory)


def _stitch_for_vllm(launch: Launch) -> Path:
    plainly_named(launch)
    return _stitch(launch)


def _vllm(launch: Launch) -> str:
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": TOKENS})
    return shlex.join(["vllm", "serve", str(launch.directory), "--speculative-config", speculation])


def _sglang(launch: Launch) -> str:
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-algorithm NEXTN --speculative-num-steps {TOKENS} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {TOKENS + 1}"
    )


def _llama_cpp(launch: Launch) -> str:
    directory = launch.directory
    return start_lines(directory, directory.with_name(f"{directory.name}.gguf"), "draft-mtp", TOKENS)


MtpEngines.destinations = {
    "vllm": Destination(
        title="vLLM",
        engine="vllm",
        command=_vllm,
        counting="`num_speculative_tokens` counts drafted tokens.",
        write=_stitch_for_vllm,
    ),
    "sglang": Destination(
        title="SGLang",
        engine="sglang",
        command=_sglang,
        counting="`--speculative-num-draft-tokens` counts the last committed token, too.",
        write=_stitch,
    ),
    "llama.cpp": Destination(
        title="llama.cpp",
        engine="llama.cpp",
        command=_llama_cpp,
        counting="`--spec-draft-n-max` counts drafted tokens.",
        write=_stitch,
    ),
}
