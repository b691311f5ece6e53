"""One thing that a serving engine does with a head. Knows no rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def ok(engine: str, what: str, why: str) -> Finding:
    """The engine reads it as it was trained."""
    return Finding(engine=engine, severity="ok", what=what, why=why)


def degrades(engine: str, what: str, why: str, remedy: str) -> Finding:
    """The engine loads it and drafts worse."""
    return Finding(engine=engine, severity="degrades", what=what, why=why, remedy=remedy)


def fails(engine: str, what: str, why: str, remedy: str) -> Finding:
    """The engine does not load or run it."""
    return Finding(engine=engine, severity="fails", what=what, why=why, remedy=remedy)


def all_engines(severity: Severity, what: str, why: str, remedy: str) -> Iterator[Finding]:
    """The same of every engine."""
    for engine in ENGINES:
        yield Finding(engine=engine, severity=severity, what=what, why=why, remedy=remedy)
