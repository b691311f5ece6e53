"""Writes a head for one serving engine, proves what was written, and says how to start the engine with it.

What the engine would silently degrade is refused. Knows each engine's launch line, not how to run it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.checkpoints.base import HeadCheckpoint, TargetFacts, differences
from forerun.checkpoints.diagnose import diagnose
from forerun.checkpoints.engines import adapted, sglang_window
from forerun.checkpoints.files import README, TRTLLM, parse, read_files, write_head
from forerun.checkpoints.findings import Finding
from forerun.checkpoints.layer_ids import to_outputs
from forerun.errors import ArgumentError, CheckpointError, nearest

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
    format_name: str
    engine: str | None
    """Whose findings count; None: nobody's."""
    command: Callable[[Launch], str]
    counting: str
    """How this engine counts the tokens of a step."""


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
        to: vllm, sglang, trtllm, speculators or hf.
        output: a new or empty directory, or a former export.
        force: write also what the engine degrades or cannot load.

    Raises:
        ArgumentError: `to` is unknown, or `output` holds other things or is `head_dir`.
        CheckpointError: the head cannot be read, the engine would not serve it as trained, or what was written is
            not what was read.
    """
    destination = _destination(to)
    stored = read_files(head_dir)
    directory = Path(output).expanduser().absolute()
    if directory.resolve() == stored.directory.resolve():
        raise ArgumentError(f"{directory} is the head itself; name another directory")
    head = parse(stored, num_layers=target.num_layers)
    findings = [finding for finding in diagnose(head, target) if finding.engine == destination.engine]
    if not force:
        _refuse(findings, destination)
    head, overrides = adapted(head, destination.engine)
    launch = Launch(head=head, target=target, directory=directory)
    texts = {README: _readme(launch, destination)}
    if to == "trtllm":
        texts[TRTLLM] = _yaml(launch)
    write_head(head, directory, destination.format_name, target, overrides=overrides, texts=texts)
    _verify(head, directory)
    return Exported(
        directory=directory,
        format_name=destination.format_name,
        findings=tuple(findings),
        command=destination.command(launch),
        notes=head.notes,
    )


def _destination(to: str) -> Destination:
    if to not in DESTINATIONS:
        raise ArgumentError(f"cannot export to {to!r}; there are {', '.join(DESTINATIONS)}.{nearest(to, DESTINATIONS)}")
    return DESTINATIONS[to]


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


def _vllm(launch: Launch) -> str:
    method = "eagle3" if launch.head.config.generation == 3 else "eagle"
    speculation = {"method": method, "model": str(launch.directory), "num_speculative_tokens": DRAFTED}
    quoted = shlex.quote(json.dumps(speculation))
    return f"vllm serve {shlex.quote(launch.target.name_or_path)} --speculative-config {quoted}"


def _speculators(launch: Launch) -> str:
    return f"vllm serve {shlex.quote(str(launch.directory))}"


def _sglang(launch: Launch) -> str:
    algorithm = "EAGLE3" if launch.head.config.generation == 3 else "EAGLE"
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(launch.target.name_or_path)} "
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {shlex.quote(str(launch.directory))} "
        f"--speculative-num-steps {DRAFTED} --speculative-eagle-topk 1 --speculative-num-draft-tokens {DRAFTED + 1} "
        f"{sglang_window(launch.head.config)}"
    ).strip()


def _trtllm(launch: Launch) -> str:
    config = shlex.quote(str(launch.directory / TRTLLM))
    return f"trtllm-serve {shlex.quote(launch.target.name_or_path)} --config {config}"


def _hf(launch: Launch) -> str:
    return (
        f"forerun generate {shlex.quote(launch.target.name_or_path)} --drafter eagle3 "
        f"--drafter-model {shlex.quote(str(launch.directory))} --prompt 'def '"
    )


def _yaml(launch: Launch) -> str:
    """Strings as JSON, which YAML understands."""
    config = launch.head.config
    lines = [
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {DRAFTED}",
        f"  speculative_model: {json.dumps(str(launch.directory))}",
    ]
    if config.generation == 3:
        lines += [f"  eagle3_layers_to_capture: {to_outputs(config.boundaries)}"]
    if config.num_hidden_layers > 1:
        lines += [f"  num_eagle_layers: {config.num_hidden_layers}"]
    return "\n".join(lines) + "\n"


def _readme(launch: Launch, destination: Destination) -> str:
    config = launch.head.config
    kind = "EAGLE-3" if config.generation == 3 else "EAGLE-1/2"
    reads = f"the boundaries {list(config.boundaries)}" if config.generation == 3 else "the last hidden state"
    return f"""\
# {kind} head for {launch.target.name_or_path}

Written by forerun for {destination.title}. It reads {reads} of the target ({launch.target.num_layers} layers) and
proposes {config.draft_vocab_size} of its {config.vocab_size} tokens.

```
{destination.command(launch)}
```

{destination.counting}
"""


DESTINATIONS: dict[str, Destination] = {
    "vllm": Destination(
        title="vLLM",
        format_name="flat",
        engine="vllm",
        command=_vllm,
        counting="`num_speculative_tokens` counts drafted tokens.",
    ),
    "sglang": Destination(
        title="SGLang",
        format_name="flat",
        engine="sglang",
        command=_sglang,
        counting="`--speculative-num-draft-tokens` counts the last committed token too: one more than vLLM's number.",
    ),
    "trtllm": Destination(
        title="TensorRT-LLM",
        format_name="flat",
        engine="trtllm",
        command=_trtllm,
        counting=f"`max_draft_len` in `{TRTLLM}` counts drafted tokens. The layers to capture stand there, too.",
    ),
    "speculators": Destination(
        title="vLLM (speculators)",
        format_name="speculators",
        engine="vllm",
        command=_speculators,
        counting="`speculative_tokens` in `config.json` counts drafted tokens; vLLM finds the target there, too.",
    ),
    "hf": Destination(
        title="forerun and trainers",
        format_name="flat",
        engine=None,
        command=_hf,
        counting="`-k` counts drafted tokens.",
    ),
}
"""What ``--to`` can be."""
