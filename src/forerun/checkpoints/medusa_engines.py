"""How serving engines treat Medusa heads: vLLM drafted with them up to 0.32, today's engines do
not.

From vLLM 0.32, which was run with one (``tests_vllm``), 0.33, SGLang 0.5.23, TensorRT-LLM 1.3-1.4, llama.cpp and
LMDeploy 0.18.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts
from forerun.checkpoints.engines import Destination, Engines, Finding, Launch, check, fails, plainly_named

HERE, NONE = "draft with it in forerun", "has no such drafter"


class MedusaEngines(Engines):
    """Known facts about engines and Medusa heads."""

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        what = "a Medusa head"
        why = "drafts a chain with it up to 0.32, with model runner V1; 0.33 has no such drafter"
        yield from check("vllm", what, why, f"serve with vLLM 0.32, or {HERE}")
        yield from fails("sglang trtllm llama.cpp lmdeploy", what, NONE, HERE)
        why = "trains such heads, but is not known to read this format"
        yield from check("modelopt", what, why, "train on with forerun")


def _vllm(launch: Launch) -> str:
    depth = launch.head.config.num_heads
    speculation = {"method": "medusa", "model": str(plainly_named(launch)), "num_speculative_tokens": depth}
    return shlex.join(["vllm", "serve", launch.target.name_or_path, "--speculative-config", json.dumps(speculation)])


MedusaEngines.destinations = {
    "vllm": Destination(
        title="vLLM",
        engine="vllm",
        command=_vllm,
        counting="`num_speculative_tokens` counts drafted tokens: at most the head's depths.",
    )
}
