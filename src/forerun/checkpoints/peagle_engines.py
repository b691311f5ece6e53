"""How serving engines treat P-EAGLE heads, from vLLM's sources; vLLM 0.32 was run with one
(``tests_vllm``).

vLLM alone drafts with them, from 0.16 on, as EAGLE-3 with ``parallel_drafting`` and its model runner V1. The others'
loaders of EAGLE-3 heads drop ``mask_hidden`` or stop at it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.checkpoints.eagle_engines import DESTINATIONS, EagleEngines
from forerun.checkpoints.engines import TOKENS, Destination, Finding, Launch, fails


class PEagleEngines(EagleEngines):
    """Known facts about engines and P-EAGLE heads; what vLLM does with EAGLE-3's layers holds for
    these.
    """

    def adapt(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        return head, {}

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
        yield from (finding for finding in super().findings(head, target) if finding.engine == "vllm")
        config, what = head.config, "a P-EAGLE head"
        yield from fails(
            "sglang trtllm llama.cpp lmdeploy modelopt",
            what,
            "does not read mask_hidden: it has no such head",
            "use vLLM",
        )
        if config.latent is not None or not (config.use_aux_hidden_state or config.qk_norm):
            shape = "one target state" if config.latent is None else "latent attention"
            why = "has no mask_hidden in such a head, and stops"
            yield from fails("vllm", f"{what} with {shape}", why, "train it on boundaries, with ordinary attention")

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        return (finding for finding in super().file_findings(stored, head, target) if finding.engine == "vllm")


def _vllm(launch: Launch) -> str:
    speculation = {
        "method": "eagle3",
        "model": str(launch.directory),
        "num_speculative_tokens": TOKENS,
        "parallel_drafting": True,
    }
    return shlex.join(["vllm", "serve", launch.target.name_or_path, "--speculative-config", json.dumps(speculation)])


def _destinations() -> dict[str, Destination]:
    """Return the destinations of EAGLE's heads that draft in parallel."""
    vllm = dataclasses.replace(DESTINATIONS["vllm"], command=_vllm)
    return {"vllm": vllm, "speculators": DESTINATIONS["speculators"]}


PEagleEngines.destinations = _destinations()
