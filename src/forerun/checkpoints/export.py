"""Writes a head for one serving engine, proves what was written, and says how to start the engine with it.

What the engine would silently degrade is refused. Knows no engine and no kind of head: they are in `engines`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts, differences
from forerun.checkpoints.diagnose import diagnose
from forerun.checkpoints.engines import Destination, Launch, destinations_for, engines_for
from forerun.checkpoints.files import README, parse, read_files, write_head
from forerun.checkpoints.findings import Finding
from forerun.checkpoints.registry import format_for
from forerun.drafters.heads.kinds import kind_named
from forerun.errors import ArgumentError, CheckpointError, nearest
from forerun.types import LAST_HIDDEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What `export_head` did."""

    directory: Path
    format_name: str
    findings: tuple[Finding, ...]
    """What this engine does with the head; empty for ``hf``."""
    command: str
    """Starts the engine, or forerun, with target and head."""
    notes: tuple[str, ...]
    """What reading could not know for certain."""


def export_head(
    head_dir: str | Path, target: TargetFacts, to: str, output: str | Path, *, force: bool = False
) -> Exported:
    """Write the head in `head_dir` to `output` as the engine `to` reads it, and read it back bit for bit.

    Args:
        head_dir: directory or hub id of a head in any known format.
        target: the model that it drafts for.
        to: hf, or an engine that reads such heads: of EAGLE's, vllm, sglang, trtllm or speculators.
        output: a new or empty directory, or a former export.
        force: write also what the engine degrades or cannot load.

    Raises:
        ArgumentError: `to` is unknown, or `output` holds other things or is `head_dir`.
        CheckpointError: the head cannot be read, the engine would not serve it as trained, or what was written is
            not what was read.
    """
    stored = read_files(head_dir)
    directory = Path(output).expanduser().absolute()
    if directory.resolve() == stored.directory.resolve():
        raise ArgumentError(f"{directory} is the head itself; name another directory")
    head = parse(stored, num_layers=target.num_layers)
    destination = _destination(to, head.config.kind)
    format_name = destination.format_name or format_for(head.config.kind)
    findings = [finding for finding in diagnose(head, target) if finding.engine == destination.engine]
    if not force:
        _refuse(findings, destination)
    head, overrides = engines_for(head.config.kind).adapted(head, destination.engine)
    launch = Launch(head=head, target=target, directory=directory)
    texts = {README: _readme(launch, destination), **(destination.files(launch) if destination.files else {})}
    write_head(head, directory, format_name, target, overrides=overrides, texts=texts)
    _verify(head, directory)
    return Exported(
        directory=directory,
        format_name=format_name,
        findings=tuple(findings),
        command=destination.command(launch),
        notes=head.notes,
    )


def _destination(to: str, kind: str) -> Destination:
    known = destinations_for(kind)
    if to not in known:
        raise ArgumentError(
            f"cannot export to {to!r}; heads of the kind {kind} go to {', '.join(known)}.{nearest(to, known)}"
        )
    return known[to]


def _refuse(findings: list[Finding], destination: Destination) -> None:
    wrong = [finding for finding in findings if finding.severity not in ("ok", "check")]
    if wrong:
        listed = "; ".join(f"{finding.what}: {destination.title} {finding.why} ({finding.remedy})" for finding in wrong)
        raise CheckpointError(
            f"{destination.title} would not serve this head as it was trained. {listed}. "
            "To write it nevertheless: --force (force=True)"
        )


def _verify(head: HeadCheckpoint, directory: Path) -> None:
    """No layer count is given: the files must say themselves what the head reads."""
    wrong = differences(head, parse(read_files(directory)))
    if wrong:
        raise CheckpointError(
            f"{directory} does not hold what was to be written: {', '.join(wrong[:6])}; is the disk full or broken?"
        )


def _readme(launch: Launch, destination: Destination) -> str:
    config = launch.head.config
    whole = config.boundaries == (LAST_HIDDEN,)
    reads = "the last hidden state" if whole else f"the boundaries {list(config.boundaries)}"
    return f"""\
# {kind_named(config.kind).title} head for {launch.target.name_or_path}

Written by forerun for {destination.title}. It reads {reads} of the target ({launch.target.num_layers} layers) and
proposes {config.draft_vocab_size} of its {config.vocab_size} tokens.

```
{destination.command(launch)}
```

{destination.counting}
"""
