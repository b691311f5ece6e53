"""``forerun doctor`` reports environment, versions, devices and memory; for a head it reports how
engines serve it.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.text import Text

from forerun.cli import console
from forerun.cli.options import Flag, Json
from forerun.errors import ArgumentError, CheckpointError, refuse, refuse_unknown
from forerun.model.checks import check_directory

if TYPE_CHECKING:
    from forerun.deploy.trials.trial import EngineTrial, HeadDrafting
    from forerun.heads.engines import Finding, Severity
    from forerun.heads.files import TargetFacts

PACKAGES = (
    *("forerun", "torch", "transformers", "tokenizers", "safetensors"),
    *("huggingface_hub", "accelerate", "cyclopts", "rich"),
)
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
GIB = 2**30
RUNS = ("vllm", "llama.cpp")
"""A head can be tried in these engines; the first is the default."""
COLOURS = {"ok": "green", "check": "cyan", "degrades": "yellow", "fails": "bold red"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class TrialOptions:
    """The options that say how a head is tried in an engine."""

    python: Path = Path(sys.executable)
    """Python of the environment that has vLLM, or what llama.cpp's converter imports (torch,
    transformers, sentencepiece); by default this one.
    """
    llama_cpp: Path | None = None
    """Directory of llama.cpp's sources, with llama-server built in build/bin or on the path."""
    prompts: Path | None = None
    """File with one prompt a line, or JSON lines with 'prompt', 'messages' or 'turns'; by default held-out source files
    that ship with forerun."""
    num_speculative_tokens: Annotated[int | None, Parameter(alias="-k")] = None
    """Tokens of each draft; if not given, as many as the head drafts, 5 of one that drafts any number."""
    max_tokens: int = 64
    """Tokens of each completion."""
    dtype: str = "auto"
    """Number format of the target, here and in the engine; float32 parts two engines' texts least.
    """


TRIAL = TrialOptions()


def doctor(
    head: str | None = None,
    /,
    *,
    target: str | None = None,
    engine: tuple[str, ...] = (),
    run: Flag = False,
    trial: TrialOptions = TRIAL,
    json: Json = False,
) -> int:
    """Say what this machine offers, or what each serving engine does with a draft head.

    With --run the engine drafts with the head, and forerun does, for the same prompts: exit code 1 if it accepts less.

    Parameters
    ----------
    head
        Directory or hub id of a draft head, or of a PARD draft model. Exit code 1 if an engine cannot serve it.
    target
        Directory or hub id of the model that the head drafts for.
    engine
        Only these engines (vllm, sglang, trtllm, llama.cpp, lmdeploy, modelopt).
    run
        Load the head in the engine (vllm, the default, or llama.cpp), and compare what is accepted with forerun's own
        drafting.
    """
    engine = tuple("llama.cpp" if name == "llamacpp" else name for name in engine)
    if head is not None:
        chosen = engine or ((RUNS[0],) if run else ())
        refuse(
            (
                run and (len(chosen) > 1 or chosen[0] not in RUNS),
                f"--run runs a head in {' or '.join(RUNS)}, not in {', '.join(chosen)}; say --engine {RUNS[0]}, or "
                "nothing",
            ),
            (
                not run and trial != TRIAL,
                "--python, --llama-cpp, --prompts, -k, --max-tokens and --dtype say how to --run it",
            ),
        )
        return _examine_head(head, target, chosen, trial if run else None, json)
    if target is not None or engine or run:
        raise ArgumentError(
            "--target, --engine and --run belong to a head; name its directory first: forerun doctor HEAD"
        )
    with console.telling("looking around"):
        environment = examine()
    if json:
        console.write_json(environment)
        return 0
    table = console.table()
    for section, entries in environment.items():
        table.add_section()
        for row, (name, value) in enumerate(entries.items()):
            shown = Text(" ".join(value) if isinstance(value, list) else str(value))
            shown = Text("-", "dim") if value is None else shown
            table.add_row(Text(section if row == 0 else "", "bold"), name, shown)
    console.out().print(table)
    return 0


def _examine_head(
    head: str, target: str | None, engines: tuple[str, ...], options: TrialOptions | None, json: bool
) -> int:
    from forerun import shipped

    head = str(shipped.resolve(head))
    if not Path(head).expanduser().exists():
        check_directory(head)
    if target is None:
        raise ArgumentError("whether a head can be served depends on its model; add --target MODEL")
    with console.telling("reading the head"):
        from forerun.heads.engines import ENGINES, TOKENS, diagnose, diagnose_files, worst
        from forerun.heads.files import parse, read_files
        from forerun.heads.pard_files import PardModel

        for name in engines:
            refuse_unknown("unknown engine", name, ENGINES)
        facts = _facts(target)
        model = PardModel.at(head)
        notes = tuple[str, ...]()
        if model is not None:
            findings = list(model.findings(facts))
        else:
            stored = read_files(head)
            checkpoint = parse(stored, num_layers=facts.num_layers)
            notes = checkpoint.notes
            findings = diagnose(checkpoint, facts) + diagnose_files(stored, checkpoint, facts)
    chosen = engines or ENGINES
    verdicts = {name: worst(findings, name) for name in chosen}
    findings = [finding for finding in findings if finding.engine in chosen]
    trial = None
    if options is not None:
        from forerun.deploy.trials.trial import HeadDrafting

        kind, depth = ("pard", None) if model else (checkpoint.config.kind, checkpoint.config.max_depth)
        k = next(tokens for tokens in (options.num_speculative_tokens, depth, TOKENS) if tokens is not None)
        trial = _try_head(
            chosen[0], HeadDrafting(head=head, kind=kind, target=str(shipped.resolve(target)), k=k), options
        )
    if json:
        report = {
            "head": head,
            "engines": verdicts,
            "findings": [asdict(finding) for finding in findings],
            "notes": list(notes),
        }
        console.write_json(report if trial is None else {**report, "run": trial.as_json()})
    else:
        _show_verdicts(verdicts, findings)
        for note in notes:
            console.warn(note)
        if trial is not None:
            _show_trial(trial)
    return int("fails" in verdicts.values() or not (trial is None or trial.good))


def _facts(target: str) -> TargetFacts:
    from forerun.heads.files import TargetFacts

    try:
        return TargetFacts.read(target)
    except CheckpointError as error:
        if "/" in target:
            raise
        raise CheckpointError(
            f"{error}. --target names the model that the head drafts for; an engine is named by --engine"
        ) from error


def _try_head(name: str, drafting: HeadDrafting, options: TrialOptions) -> EngineTrial:
    from forerun import demo
    from forerun.deploy.trials.trial import InstalledEngine, run_trial
    from forerun.plan.prompts import read_prompts

    engine: InstalledEngine
    if name == "vllm":
        from forerun.deploy.trials.try_vllm import InVllm

        engine = InVllm(drafting, options.python)
    else:
        from forerun.deploy.trials.try_llama_cpp import InLlamaCpp

        engine = InLlamaCpp(drafting, options.llama_cpp, options.python)
    prompts = (
        read_prompts(options.prompts)
        if options.prompts is not None
        else [{"prompt": prompt.text[:800]} for prompt in demo.prompts()[:6]]  # Code, to be continued
    )
    with console.telling(f"drafting here, then in {engine.title}"):
        return run_trial(engine, prompts=prompts, tokens=options.max_tokens, dtype=options.dtype)


def _show_trial(trial: EngineTrial) -> None:
    name = f"{trial.engine} {trial.version}"
    for note in trial.notes:
        console.warn(note)
    if trial.refused:
        console.warn(f"{name} does not draft with it: {trial.refused.splitlines()[0]}", "bold red")
        return
    table = console.table("drafted token", f"accepted in {trial.engine}", "here", "of drafts")
    worse = trial.worse
    for position in trial.positions:
        ours, theirs = position.rates
        shown = Text(f"{theirs:.2f}", "yellow" if position in worse else "")
        table.add_row(str(position.index + 1), shown, f"{ours:.2f}", str(position.drafted[1]))
    table.add_section()
    table.add_row("mean acceptance length", f"{trial.lengths[1]:.2f}", f"{trial.lengths[0]:.2f}", "")
    console.out().print(table)
    if worse:
        console.warn(f"{name} accepts less of it than forerun: it loads or runs the head otherwise")
    else:
        console.out().print(Text(f"{name} drafts with it as forerun does", "green"))
    if trial.parted:
        console.warn(
            f"{trial.parted} completions in {trial.engine} differ from forerun's plain ones: near ties, unless --dtype "
            "float32"
        )


def _show_verdicts(verdicts: Mapping[str, Severity], findings: Sequence[Finding]) -> None:
    """Print a line for each engine, and each finding once, the worst first, with the engines that it concerns."""
    for engine, verdict in verdicts.items():
        console.out().print(Text(f"{engine:<10}", "bold").append(verdict, COLOURS[verdict]))
    engines: dict[Finding, list[str]] = {}
    for finding in findings:
        engines.setdefault(replace(finding, engine=""), []).append(finding.engine)
    table = console.table("finding", "effect", "fix")
    table.columns[0].no_wrap = False
    for finding in sorted(engines, key=lambda finding: -list(COLOURS).index(finding.severity)):
        table.add_section()
        what = Text(finding.what, COLOURS[finding.severity]).append(f" ({', '.join(engines[finding])})", "dim")
        table.add_row(what, finding.why, finding.remedy)
    console.out().print(table)


def examine() -> dict[str, dict[str, Any]]:
    """Return everything the table shows, as plain values; sizes in GiB."""
    import psutil

    memory = psutil.virtual_memory()
    told = ("HF_HOME", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
    return {
        "system": {"platform": platform.platform(), "python": platform.python_version()},
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": _cpu(),
        "devices": _devices(),
        "number formats": _dtypes(),
        "memory": {"total GiB": round(memory.total / GIB, 1), "available GiB": round(memory.available / GIB, 1)},
        "environment": {name: os.environ.get(name) for name in told}
        | {"HF_TOKEN": "set" if os.environ.get("HF_TOKEN") else None},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    from forerun.devices import processor_flags, processor_name
    from forerun.model.kernels import native

    flags = processor_flags()
    compiled = native.attention_kernel() is not None and native.fused_kernels() is not None
    return {
        "model": processor_name(),
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "bfloat16 kernels": "in C" if compiled else "in torch",
    }


def _devices() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        return {f"cuda:{i}": f"{card.name}, {card.total_memory / GIB:.0f} GiB" for i, card in enumerate(cards)}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = None if accelerator is None else accelerator.type
    return {"accelerator": kind, "used": kind or "cpu"}


def _dtypes() -> dict[str, Any]:
    """Multiply a small matrix in each format on the CPU, and return whether that runs, and whether
    it is fast.
    """
    import torch

    from forerun.devices import multiplies

    result: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        try:
            runs = bool(torch.isfinite(torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)).all())
        except RuntimeError:
            runs = False
        speed = "fast" if multiplies(torch.device("cpu"), dtype) else "emulated, slow: auto takes float32"
        result[str(dtype).removeprefix("torch.")] = speed if runs else "does not run"
    return result
