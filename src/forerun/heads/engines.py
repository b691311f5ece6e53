"""Serving engines and heads: how each engine treats a head, and the export of a head for one of them.

The facts about a kind of head are its `Engines`; kinds without any are exported for forerun and trainers only. Heads
that an engine would silently degrade are refused. No engine is run.

The command lines for llama.cpp are those of 0.5.0: its converter (``convert_hf_to_gguf.py``, in its sources) makes GGUF
files of directories, and its server loads them.
"""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch

from forerun.drafters.kinds import import_named, kind_named
from forerun.errors import ArgumentError, CheckpointError, refuse_unknown
from forerun.heads.files import (
    README,
    TRTLLM,
    HeadCheckpoint,
    StoredFiles,
    TargetFacts,
    differences,
    format_for,
    locate_error,
    parse,
    read_files,
    write_head,
)
from forerun.types import LAST_HIDDEN

Severity = Literal["ok", "check", "degrades", "fails"]
"""The severity of a finding. ``check``: right only if the user does what the finding says. ``degrades``: the head loads
and drafts worse, mostly without a message. ``fails``: it does not load or run.
"""
SEVERITIES: tuple[Severity, ...] = ("ok", "check", "degrades", "fails")
ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp", "lmdeploy", "modelopt")
EVERY = " ".join(ENGINES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The effect of one property of a head in one engine."""

    engine: str
    severity: Severity
    what: str
    why: str  # The engine's treatment of it
    remedy: str = ""  # Advice; empty if nothing needs to be done


def worst(findings: Sequence[Finding], engine: str) -> Severity:
    """Return the worst severity of an engine's findings."""
    severities = [SEVERITIES.index(finding.severity) for finding in findings if finding.engine == engine]
    return SEVERITIES[max(severities, default=0)]


def _find(severity: Severity, engines: str, what: str, why: str, remedy: str = "") -> Iterator[Finding]:
    """Yield the same finding for each of these engines, whose names are separated by blanks."""
    for engine in engines.split():
        yield Finding(engine=engine, severity=severity, what=what, why=why, remedy=remedy)


ok, check, degrades, fails = (functools.partial(_find, severity) for severity in SEVERITIES)


class Trait(NamedTuple):
    """A property that a head may have, and how engines treat heads with it."""

    when: Callable[[Any], object]  # Condition on the values of `apply_traits`, which texts name in braces
    what: str
    treated: Sequence[tuple[Severity, str, str]]  # Severity, engines, and what these engines do
    remedy: str = ""


def always(_at: Any) -> bool:
    """Return True: every head of the kind has the trait."""
    return True


def apply_traits(traits: Iterable[Trait], head: HeadCheckpoint, target: TargetFacts, **more: Any) -> Iterator[Finding]:
    """Yield the findings of those traits that the head has; conditions and texts read the head, its
    `config`, the boundaries `shown`, the target, and `more`.
    """
    at = SimpleNamespace(head=head, config=head.config, shown=list(head.config.boundaries), target=target, **more)
    for trait in traits:
        for severity, engines, why in trait.treated if trait.when(at) else ():
            what, said = trait.what.format_map(vars(at)), why.format_map(vars(at))
            yield from _find(severity, engines, what, said, trait.remedy)


TOKENS = 5  # Tokens per step (``num_speculative_tokens``) in the launch lines: a chain, which every engine can draft


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The data for a launch command."""

    head: HeadCheckpoint
    target: TargetFacts
    directory: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    """One value of ``--to``."""

    title: str
    format_name: str | None = None  # None: the format in which heads of the kind are written
    engine: str | None = None  # Engine whose findings apply; None: none
    command: Callable[[Launch], str]
    counting: str  # How this engine counts the tokens of a step
    files: Callable[[Launch], Mapping[str, str]] = lambda launch: {}  # Further files that the engine reads, by name
    write: Callable[[Launch], Path] | None = None
    """Writes and checks the directory, if it contains more than the head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """How engines treat heads of a kind; nothing is known by default."""

    destinations: Mapping[str, Destination] = field(default_factory=dict)
    traits: Sequence[Trait] = ()  # Properties that heads of the kind may have, and what engines make of them

    def adapt(self, head: HeadCheckpoint, engine: str | None) -> tuple[HeadCheckpoint, dict[str, Any]]:
        """Return the head as `engine` wants it, and the keys of ``config.json`` that it needs;
        None: the head as it is.
        """
        return head, {}

    def findings(self, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        """Return how engines treat the head if it is written in their format."""
        if self.traits:
            return apply_traits(self.traits, head, target)
        return check(
            EVERY,
            f"a {kind_named(head.config.kind).title} head",
            "nothing is known here of how it reads such heads",
            "try it there, and compare the acceptance with forerun's",
        )

    def file_findings(self, stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> Iterable[Finding]:
        """Return the findings for engines that load these files as they are; `head` is the head that they contain."""
        return ()


def engines_for(kind: str) -> Engines:
    """Return the known facts about engines and heads of a kind."""
    path = kind_named(kind_named(kind).stored_as).engines
    engines: Engines = import_named(path) if path else Engines()
    return engines


def forerun_line(launch: Launch) -> str:
    """Return the command that drafts with the head in forerun."""
    drafter = ["--drafter", launch.head.config.kind, "--drafter-model", str(launch.directory)]
    return shlex.join(["forerun", "generate", launch.target.name_or_path, *drafter, "--prompt", "def "])


def vllm_line(target: str, **speculation: Any) -> str:
    """Return the command that serves `target` with vLLM and this speculative configuration."""
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculation)])


def trtllm_file(kind: str, tokens: int, directory: Path, more: Mapping[str, Any]) -> Mapping[str, str]:
    """Return TensorRT-LLM's own file for a draft model, with values as JSON, which YAML understands."""
    speculation = {"max_draft_len": tokens, "speculative_model": str(directory), **more}
    lines = [f"  {key}: {json.dumps(value)}\n" for key, value in speculation.items()]
    return {TRTLLM: f"speculative_config:\n  decoding_type: {kind}\n" + "".join(lines)}


def trtllm_line(target: str, directory: Path) -> str:
    """Return the command that serves `target` with TensorRT-LLM and the file that lies beside the draft model."""
    return shlex.join(["trtllm-serve", target, "--config", str(directory / TRTLLM)])


NAMES_METHOD = ("eagle-", "eagle3", "dflash", "dspark")


def refuse_misread(path: str, remedy: str) -> None:
    """Raise ArgumentError if vLLM (``SpeculativeConfig``) would infer another method from the path than the configured
    one, as it does for all but EAGLE, DFlash and DSpark heads.
    """
    words = [word for word in NAMES_METHOD if word in path.lower()]
    if words:
        raise ArgumentError(
            f"vLLM takes a path with {words[0]!r} in it for a head of that kind, whatever it is told; {remedy}"
        )


def plainly_named(launch: Launch) -> Path:
    """Return the directory; ArgumentError if vLLM would misread its name (`refuse_misread`)."""
    kind = launch.head.config.kind
    refuse_misread(str(launch.directory), f"write the {kind} head to a path without it, not to {launch.directory}")
    return launch.directory


FORERUN = Destination(title="forerun and trainers", command=forerun_line, counting="`-k` counts drafted tokens.")


def diagnose(head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """Return everything that is known about these engines and this head, at least one finding for
    each engine.
    """
    findings = [*_fits(head, target), *engines_for(head.config.kind).findings(head, target)]
    for key in head.unknown:
        why = "nothing is known of it: the engine may compute something else by it"
        remedy = "find out what it means; remove it if it means nothing"
        findings += check(EVERY, f"the key {key}", why, remedy)
    judged = {finding.engine for finding in findings}
    silent = " ".join(engine for engine in ENGINES if engine not in judged)
    return [*findings, *ok(silent, "everything in this head", "read as it was trained")]


def diagnose_files(stored: StoredFiles, head: HeadCheckpoint, target: TargetFacts) -> list[Finding]:
    """Return the findings for engines that load these files as they are; `head` is the head that they contain. Raises
    CheckpointError if a key that engines read has a value of another type.
    """
    try:
        return list(engines_for(head.config.kind).file_findings(stored, head, target))
    except Exception as error:
        raise locate_error(stored.directory, error) from error


def _fits(head: HeadCheckpoint, target: TargetFacts) -> Iterator[Finding]:
    """Yield what breaks every engine: sizes that are not the target's, NaN and infinity."""
    config = head.config
    for name, ours, theirs in (
        ("hidden states", config.target_hidden_size, target.hidden_size),
        ("a vocabulary", config.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            yield from fails(EVERY, f"made for {name} of {ours}", f"the target has {theirs}", "name the right target")
    broken = [name for name, tensor in head.tensors.items() if not bool(torch.isfinite(tensor).all())]
    if broken:
        yield from fails(EVERY, f"NaN or infinity in {broken[0]}", "every draft becomes noise", "train it again")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """The result of `export_head`."""

    directory: Path
    format_name: str
    findings: tuple[Finding, ...]  # The engine's findings about the head; empty for ``hf``
    command: str
    notes: tuple[str, ...]


def export_head(
    head_dir: str | Path, target: TargetFacts, to: str, output: str | Path, *, force: bool = False
) -> Exported:
    """Write the head in `head_dir` to `output` as the engine `to` reads it, and read it back bit for bit.

    Args:
        head_dir: directory or hub id of a head in any known format.
        to: hf, or what reads such heads: of EAGLE's, vllm, sglang, trtllm, llama.cpp, speculators or modelopt.
        output: a new or empty directory, or a former export.
        force: write also what the engine degrades or cannot load, instead of a CheckpointError.

    ArgumentError if `to` is unknown, or `output` holds other things or is `head_dir`.
    """
    stored, directory = read_files(head_dir), Path(output).expanduser().absolute()
    if directory.resolve() == stored.directory.resolve():
        raise ArgumentError(f"{directory} is the head itself; name another directory")
    head = parse(stored, num_layers=target.num_layers)
    kind, engines = head.config.kind, engines_for(head.config.kind)
    destinations = {**engines.destinations, "hf": FORERUN}
    refuse_unknown("cannot export to", to, destinations, f"Heads of the kind {kind} go to")
    destination = destinations[to]
    format_name = destination.format_name or format_for(kind)
    findings = [finding for finding in diagnose(head, target) if finding.engine == destination.engine]
    wrong = [finding for finding in findings if finding.severity in ("degrades", "fails")]
    if wrong and not force:
        listed = "; ".join(f"{finding.what}: {destination.title} {finding.why} ({finding.remedy})" for finding in wrong)
        raise CheckpointError(
            f"{destination.title} would not serve this head as it was trained. {listed}. "
            "To write it nevertheless: --force (force=True)"
        )
    head, overrides = engines.adapt(head, destination.engine)
    launch = Launch(head=head, target=target, directory=directory)
    if destination.write is not None:
        destination.write(launch)
    else:
        write_head(
            head,
            directory,
            format_name,
            target,
            overrides=overrides,
            texts={README: _readme(launch, destination), **destination.files(launch)},
        )
        # Read back without a layer count, for the files must say themselves what the head reads.
        lost = differences(head, parse(read_files(directory)))
        if lost:
            raise CheckpointError(
                f"{directory} does not hold what was to be written: {', '.join(lost[:6])}; is the disk full or broken?"
            )
    return Exported(
        directory=directory,
        format_name=format_name,
        findings=tuple(findings),
        command=destination.command(launch),
        notes=head.notes,
    )


def _readme(launch: Launch, destination: Destination) -> str:
    config = launch.head.config
    last = config.boundaries == (LAST_HIDDEN,)
    reads = "the last hidden state" if last else f"the boundaries {list(config.boundaries)}"
    return f"""\
# {kind_named(config.kind).title} head for {launch.target.name_or_path}

Written by forerun for {destination.title}. It reads {reads} of the target ({launch.target.num_layers} layers) and
proposes {config.draft_vocab_size} of its {config.vocab_size} tokens.

```
{destination.command(launch)}
```

{destination.counting}
"""


SCRIPT = "convert_hf_to_gguf.py"
OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
"""The converter's name of each dtype."""


def conversion_arguments(
    directory: Path, *, target: str | None = None, outtype: str = "bf16", file: Path | None = None
) -> list[str]:
    """Return the arguments of the converter.

    Args:
        directory: of a model, or of a head, which needs `target`.
        target: directory of the model that a head drafts for: layers, vocabulary and tokenizer are read there.
        outtype: one of `OUTTYPES`' values.
        file: to write; by default beside the directory, with its name and ``.gguf``.
    """
    for_head = ["--target-model-dir", target] if target is not None else []
    return [str(directory), *for_head, "--outtype", outtype, "--outfile", str(file or f"{directory}.gguf")]


def start_lines(target: Path, file: Path, name: str, most: int, head: Path | None = None) -> str:
    """Return the lines that make the GGUF files and start the server with the drafter `name`
    (``--spec-type``) of chains of up to `most` tokens. `target` becomes `file`, and `head`, where
    it is not in the target, a file beside its directory.
    """
    of_target = conversion_arguments(target, file=file)
    lines, server = [["python", SCRIPT, *of_target]], ["llama-server", "-m", of_target[-1]]
    if head is not None:
        of_head = conversion_arguments(head, target=str(target))
        lines.append(["python", SCRIPT, *of_head])
        server += ["-md", of_head[-1]]
    lines.append([*server, "--spec-type", name, "--spec-draft-n-max", str(most)])
    return "\n".join(map(shlex.join, lines))


def start_lines_with(head: Path, target: str, name: str, most: int) -> str:
    """Return the lines of `start_lines`, with the target's file written beside the head's directory."""
    return start_lines(Path(target), head.with_name(f"{Path(target).name}.gguf"), name, most, head)


COUNTING = "`--spec-draft-n-max` counts drafted tokens. The target is a directory on this machine, not a hub id."


# Texts of findings
DRAFT_HERE, NO_SUCH_DRAFTER = "draft with it in forerun", "has no such drafter"
