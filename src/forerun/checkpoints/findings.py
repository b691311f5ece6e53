"""One thing that a serving engine does with a head. Knows no rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "check", "degrades", "fails"]
"""``check``: right only if what the finding says is seen to. ``degrades``: it loads and drafts worse, mostly without a
message. ``fails``: it does not load or run."""
SEVERITIES: tuple[Severity, ...] = ("ok", "check", "degrades", "fails")
ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp", "lmdeploy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What one engine does with one property of a head."""

    engine: str
    severity: Severity
    what: str
    """The property, in words."""
    why: str
    """What the engine does with it."""
    remedy: str = ""
    """What to do; empty if nothing needs to be done."""


def worst(findings: Sequence[Finding], engine: str) -> Severity:
    """The verdict on an engine."""
    found = [SEVERITIES.index(finding.severity) for finding in findings if finding.engine == engine]
    return SEVERITIES[max(found, default=0)]
