"""What is known of serving engines and one kind of head: how they load it and how they are started with it.

A kind of which nothing is said here is written for forerun and for trainers alone. Knows no engine and no kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from forerun.checkpoints.base import HeadCheckpoint, StoredFiles, TargetFacts
from forerun.checkpoints.findings import Finding, all_engines
from forerun.checkpoints.registry import FORMATS, format_for
from forerun.drafters.heads.kinds import kind_named, named

DRAFTED = 5
"""Tokens per step (``num_speculative_tokens``) in the launch lines: a chain, which every engine can draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """What a launch line is made of."""

    head: HeadCheckpoint
    target: TargetFacts
    directory: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """One value of ``--to``."""

    title: str
    format_name: str | None
    """None: the format in which heads of the kind are written."""
    engine: str | None
    """Whose findings count; None: nobody's."""
    command: Callable[[Launch], str]
    counting: str
    """How this engine counts the tokens of a step."""
    files: Callable[[Launch], Mapping[str, str]] | None = None
    """Further files that the engine reads, name -> content."""


class Engines:
    """What engines make of heads of a kind; nothing is known by default."""

    destinations: ClassVar[Mapping[str, Destination]] = {}
    """What ``--to`` can be, beside forerun itself."""

    def adapted(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        """The head as `engine` wants it, and the keys of ``config.json`` that must be its own; None: as it is."""
        return head, {}

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        """What engines do with the head, if it is written in their format."""
        title = kind_named(head.config.kind).title
        why = "nothing is known here of how it reads such heads"
        return all_engines("check", f"a {title} head", why, "try it there, and compare the acceptance with forerun's")

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        """What would go wrong if an engine were given these files; `head` is what they mean."""
        return ()


def engines_for(kind: str) -> Engines:
    """What is known of engines and heads of a kind."""
    path = FORMATS[format_for(kind)].engines
    found: Engines = named(path)() if path else Engines()
    return found


def destinations_for(kind: str) -> dict[str, Destination]:
    """What ``--to`` can be for heads of a kind."""
    return {**engines_for(kind).destinations, "hf": FORERUN}


def _forerun(launch: Launch) -> str:
    return (
        f"forerun generate {shlex.quote(launch.target.name_or_path)} --drafter {launch.head.config.kind} "
        f"--drafter-model {shlex.quote(str(launch.directory))} --prompt 'def '"
    )


FORERUN = Destination(
    title="forerun and trainers",
    format_name=None,
    engine=None,
    command=_forerun,
    counting="`-k` counts drafted tokens.",
)
