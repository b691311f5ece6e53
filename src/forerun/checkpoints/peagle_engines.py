"""What serving engines make of P-EAGLE heads, from vLLM's sources; no engine was run with one.

vLLM alone drafts with them, from 0.16 on, as EAGLE-3 with ``parallel_drafting``. The others' loaders of EAGLE-3 heads
drop ``mask_hidden`` or stop at it.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from forerun.checkpoints.base import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.checkpoints.eagle_engines import DESTINATIONS, EagleEngines
from forerun.checkpoints.engines import TOKENS, Destination, Finding, Launch, check, fails


class PEagleEngines(EagleEngines):
    """What is known of engines and P-EAGLE heads; what vLLM does with EAGLE-3's layers holds for these."""

    def adapted(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
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
        wide = len(config.boundaries) * config.target_hidden_size
        room = (3 if config.use_aux_hidden_state else 1) * config.hidden_size
        if wide != room:
            why = f"has had room for {room} values of mask_hidden, the head has {wide}; newer versions may differ"
            yield from check("vllm", f"reads {len(config.boundaries)} boundaries", why, "try it there")
        if config.qk_norm:
            why = "is not known to read mask_hidden beside norms of queries and keys"
            yield from check("vllm", "qk_norm in parallel drafting", why, "compare its acceptance with ours")

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
    """Those of EAGLE's heads that draft in parallel."""
    vllm = dataclasses.replace(DESTINATIONS["vllm"], command=_vllm)
    return {"vllm": vllm, "speculators": DESTINATIONS["speculators"]}


PEagleEngines.destinations = _destinations()
