"""``forerun deploy ENGINE MODEL`` writes what starts the same drafter on another engine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import Parameter
from rich.text import Text

from forerun.cli import console
from forerun.cli.options import SPECULATION, Flag, Json, PlannedOptions, SpeculationOptions
from forerun.cli.plan import FORECAST, ForecastOptions, PlanOptions, on_paper
from forerun.errors import ArgumentError, refuse
from forerun.writing import write_file

if TYPE_CHECKING:
    from forerun.deploy.launch import Command, Deployment, Forecast


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class DeployForecastOptions:
    """The options that say what is accepted and what passes cost, as in `forerun plan`.

    From these, the draft length at each batch and the cost of what the engine cannot do are
    predicted.
    """

    device: str | None = None
    """Device that it runs on: h100, b200, 4090, ... (`forerun plan`)."""
    dtype: str = "auto"
    """Number format of the target's weights: bf16, fp8, int4, ..."""
    max_batch: int = 64
    """Most sequences that are decoded together."""
    load: ForecastOptions = FORECAST


FORECASTING = DeployForecastOptions()


def deploy(
    engine: str,
    model: str,
    /,
    *,
    tp: int = 1,
    pp: int = 1,
    nodes: int = 1,
    head_address: str | None = None,
    port: int = 8000,
    engine_version: str | None = None,
    out: Path | None = None,
    run: Flag = False,
    force: Flag = False,
    speculation: SpeculationOptions = SPECULATION,
    forecasting: DeployForecastOptions = FORECASTING,
    json: Json = False,
) -> int:
    """Write what starts the same drafter on another engine: commands, files, and what that engine does otherwise.

    Parameters
    ----------
    engine
        vllm, sglang, trtllm, llamacpp or dynamo.
    model
        Directory or hub id of the target; for llama.cpp a GGUF file, ollama:NAME or lmstudio:NAME, too.
    tp
        Devices that share every layer.
    pp
        Groups of devices that share the layers out.
    nodes
        Machines that hold the model together.
    head_address
        Address of the first of several machines.
    port
        TCP port of the OpenAI-compatible API.
    engine_version
        Version to write for; the newest that is known here if not given.
    out
        Directory for the files and the commands: deploy.sh, or a script for each machine.
    run
        Start it here.
    force
        Go on for a version that is not known, or with a head that the engine serves worse than it was trained.
    """
    from forerun.control.config import SpeculativeConfig
    from forerun.deploy.launch import DeployRequest, choose_version, find_engine, find_model

    chosen = find_engine(engine)
    version, notes = choose_version(chosen, engine_version, force=force)
    where: dict[str, Any] = {"tp": tp, "pp": pp, "nodes": nodes, "head_address": head_address, "port": port, "out": out}
    forecast = _forecast(forecasting, speculation, tp, notes)
    with console.telling("reading"):
        requested = speculation.config() or {}
        config = SpeculativeConfig.parse(requested or None)
        where |= {"adaptive": requested.get("adaptive") is True, "force": force}
        request = DeployRequest(model=find_model(model), config=config, version=version, forecast=forecast, **where)
        writer = chosen(request)
        deployment = dataclasses.replace(writer.deployment(), notes=(*notes, *writer.notes))
    if out is not None:
        _write(deployment, out)
    if json:
        record = {
            **dataclasses.asdict(deployment),
            "commands": [{**dataclasses.asdict(command), "line": command.line} for command in deployment.commands],
            "schedule": [list(stretch) for stretch in deployment.schedule],
        }
        console.write_json({"engine": engine, "version": version, **record})
    else:
        _show(deployment, written=out is not None)
    return _start(deployment, chosen.title, out) if run else 0


def _forecast(
    request: DeployForecastOptions, speculation: SpeculationOptions, tp: int, notes: list[str]
) -> Forecast | None:
    """Return what the planner says, None where it was told too little; add what is assumed to
    `notes`.
    """
    from forerun.deploy.launch import Forecast

    described = dataclasses.asdict(request.load)
    if not request.load.given and request.load.text is None:
        if request != FORECASTING:
            raise ArgumentError(
                "--device, --dtype, --max-batch and the like predict how much to draft, for which must be known what "
                "is accepted: give --text chat, --alpha 0.7, --acceptance or --rank-acceptance, too, or leave them out"
            )
        return None
    if request.load.params is None or request.device is None:
        raise ArgumentError("what does a pass cost? Give the target's --params 8e9 and its --device h100, too")
    limit = SpeculationOptions(num_speculative_tokens=speculation.num_speculative_tokens)
    planned = PlanOptions(
        tp=tp, loading=PlannedOptions(device=request.device, dtype=request.dtype), speculation=limit, **described
    )
    planned.check(None)
    shown = on_paper(planned)
    notes += [f"predicted: {note}" for note in shown.notes if note not in shown.verdict.notes]
    return Forecast(load=shown.load, max_batch=request.max_batch, ranks=planned.ranks)


def _lines(deployment: Deployment) -> list[str]:
    return [line for command in deployment.commands for line in (*_heading(deployment, command), command.line)]


def _heading(deployment: Deployment, command: Command) -> list[str]:
    """Return a comment that says where a command is typed, if there are several commands."""
    return [f"# {command.where}"] if len(deployment.commands) > 1 and command.where else []


def _scripts(deployment: Deployment) -> dict[str, str]:
    """Return a script for each machine or occasion.

    None waits for what never ends: of several servers all but the last run in the background, and
    end with it. What the user has to fill in is a comment.
    """
    scripts = dict[str, list[str]]()
    last = [command for command in deployment.commands if command.role == "serve"][-1:]
    for command in deployment.commands:
        lines = scripts.setdefault(command.script, [])
        lines += _heading(deployment, command)
        if command.role == "by hand":
            lines.append(f"# {command.line}")
        elif command.role == "serve" and command not in last:
            lines += [f"{command.line} &", 'trap "kill $!" EXIT', "trap exit INT TERM"]
        else:
            lines.append(command.line)
    return {name: "\n".join(lines) + "\n" for name, lines in scripts.items()}


def _write(deployment: Deployment, out: Path) -> None:
    """Write the files and scripts, in place of an older deployment's scripts."""
    scripts = _scripts(deployment)
    for pattern in ("deploy.sh", "convert.sh", "kubernetes.sh", "machine-*.sh"):
        for old in out.glob(pattern):
            old.unlink()
    for name, text in {**deployment.files, **scripts}.items():
        write_file(out / name, text)


def _show(deployment: Deployment, *, written: bool) -> None:
    """Print commands, and files that were not written, on stdout; what the engine does otherwise on
    stderr.
    """
    out = console.out()
    for line in _lines(deployment):
        out.print(Text(line))
    for name, text in deployment.files.items() if not written else ():
        out.print(Text(f"\n# {name}\n{text.rstrip()}"))
    for first, last, k in deployment.schedule:
        console.warn(f"batches {first} to {last}: {f'K = {k}' if k else 'nothing is drafted'}", "dim")
    for note in deployment.notes:
        console.warn(note)


def _start(deployment: Deployment, title: str, out: Path | None) -> int:
    """Run the servers until the last one ends; ArgumentError if they cannot be started here."""
    serving = [command for command in deployment.commands if command.role == "serve"]
    before = [command.line for command in deployment.commands if command.role == "before"]
    refuse(
        (not serving, "--run starts one machine's server; start each command on its machine"),
        (before, f"first, once: {'; '.join(before)}; then deploy what that writes"),
    )
    read = [name for name in deployment.files if any(name in command.words for command in serving)]
    if read and out is None:
        raise ArgumentError(f"{title} reads {', '.join(read)}: name a directory for it, --out DIR, beside --run")
    for command in serving:
        _check_installed(command.words, title)
    started = [subprocess.Popen(command.words, env={**os.environ, **command.environment}) for command in serving]
    try:
        return started[-1].wait()
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def _check_installed(words: Sequence[str], title: str) -> None:
    program = shutil.which(words[0])
    module = words[2] if words[1:2] == ("-m",) else None
    package = None if module is None else module.partition(".")[0]
    installed = program is not None and (
        package is None
        or subprocess.run(
            [program, "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"], check=False
        ).returncode
        == 0
    )
    if not installed:
        what = words[0] if package is None else f"python with {package}"
        raise ArgumentError(
            f"{title} is not installed here: there is no {what} on PATH; install it, or leave --run out"
        )
