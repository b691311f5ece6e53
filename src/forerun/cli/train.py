"""``forerun train KIND`` trains a draft head or model for your own model, from a recipe file, from
flags, or both.
"""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.cli import INTERRUPTED, OK, console, session
from forerun.cli.options import Flag, Json, traffic_files
from forerun.drafters.kinds import kind_named
from forerun.errors import ArgumentError

if TYPE_CHECKING:
    from forerun.training.recipe import TrainRecipe

_TITLES = {
    "finished": "trained",
    "already_finished": "nothing was trained",
    "interrupted": "interrupted: the same command goes on",
    "time": "stopped by training.max_seconds",
    "no_gain": "stopped: acceptance on held-out prompts no longer rises (training.patience)",
}
_LABELS = {"loss": "loss of the last step", "best": "best on held-out prompts"}
_SHOWN = (
    "steps",
    "tokens",
    "loss",
    "best",
    "best_step",
    "training_seconds",
    "evaluation_seconds",
    "seconds",
    "head",
    "draft",
    "model",
)
_FINISHED = (
    "{} holds a finished run: an earlier one did all {:,} steps. To train on, give more training.steps (or "
    "training.seconds) and --allow-changes; to begin anew, another output."
)


def train(
    kind: str,
    /,
    *words: str,
    target: str | None = None,
    data: str | None = None,
    output: str | None = None,
    from_traffic: Path | None = None,
    draft: str | None = None,
    mode: str | None = None,
    features: str | None = None,
    parallel: str = "ddp",
    dry_run: Flag = False,
    allow_changes: Flag = False,
    json: Json = False,
) -> int:
    """Train a draft head or model for your own model; goes on where an earlier run into the same output was stopped.

    Under torchrun every process runs this command. Ctrl-C saves and ends; a second one ends at once.

    Parameters
    ----------
    kind
        Of a head, a drafter that needs training (see: forerun drafters), such as eagle3; distill or pard, a draft
        model; layerskip, the target; or medusa2, the target with a head.
    words
        A recipe file (YAML), then key=value for anything in it: training.learning_rate=1e-3 draft.vocab_size=32000.
    target
        Directory or hub id of the model to draft for.
    data
        Prepared data (see: forerun data prepare).
    output
        Directory of checkpoints, log and what is finished.
    from_traffic
        Instead of --data: what a server recorded (forerun serve --record-traffic), its directory or one key's file.
        It is prepared into the output, once.
    draft
        Directory or hub id of the draft model that distill or pard trains, or of a head to go on from.
    mode
        online: the target runs beside the head; offline: features come from disk.
    features
        Directory that forerun features wrote, for offline.
    parallel
        With several processes: ddp, or fsdp for heads that do not fit one device.
    dry_run
        Say what the run means: parameters, memory, time, passes over the data, advice and the effective recipe; train
        nothing.
    allow_changes
        Go on from a checkpoint although the recipe has changed since.
    """
    kind_named(kind)
    file, assignments = _split(words)
    given = {"target": target, "data": data or from_traffic, "output": output}
    missing = [name for name, value in given.items() if value is None]
    missing = [name for name in missing if not any(word.startswith(f"{name}=") for word in assignments)]
    if file is None and missing:
        raise ArgumentError("; ".join(f"{name} is missing (--{name}, or {name}: in the recipe)" for name in missing))
    from forerun.training.dry_run import plan
    from forerun.training.loop.distributed import Parallel
    from forerun.training.recipe import read_recipe
    from forerun.training.run import TrainingRun

    flags = {"target": target, "data": data, "output": output, "mode": mode, "features": features, "draft.start": draft}
    if from_traffic is not None:
        if data is not None:
            raise ArgumentError("give either --data or --from-traffic, not both")
        flags["data"] = str(from_traffic)
    recipe = read_recipe(kind, file, assignments, flags)
    processes = Parallel.from_environment(parallel)  # type: ignore[arg-type]
    try:
        if from_traffic is not None:
            recipe = replace(recipe, data=processes.on_first(lambda: _prepare_traffic(from_traffic, recipe)))
        if dry_run:
            outcome = plan(recipe, processes)
        else:
            outcome = TrainingRun(recipe, processes).train(allow_changes=allow_changes)
        if processes.first:
            if outcome.get("reason") == "already_finished":
                console.warn(_FINISHED.format(recipe.output, outcome["steps"]))
            _show(outcome, dry_run=dry_run, json=json)
        processes.wait()  # a process that leaves while another still talks to it takes that one down (gloo aborts)
        return INTERRUPTED if outcome.get("interrupted") else OK
    finally:
        processes.close()


def _prepare_traffic(traffic: Path, recipe: TrainRecipe[Any]) -> str:
    """Prepare what a server recorded, unless an earlier run into the same output has; return the directory."""
    from forerun.training.data.prepare import prepare

    output = Path(recipe.output) / "traffic"
    if not output.is_dir():
        # What a server was killed in the middle of is the only line that may be bad.
        done = prepare(
            traffic_files(traffic),
            session.load_tokenizer(recipe.target),
            output,
            name=recipe.target,
            max_length=recipe.windows.length,
            split_long=True,
            skip_bad=True,
        )
        for complaint in done.complaints:
            console.warn(f"skipped: {complaint}")
    return str(output)


def _split(words: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    if words and "=" not in words[0]:
        path = Path(words[0])
        if not path.is_file():
            raise ArgumentError(f"there is no recipe file {path}; other words are key=value")
        return path, list(words[1:])
    return None, list(words)


def _show(outcome: dict[str, Any], *, dry_run: bool, json: bool) -> None:
    if json:
        console.write_json(outcome)
        return
    table = console.table(title="dry run: nothing is trained" if dry_run else _TITLES[outcome["reason"]])
    for name, value in outcome.items():
        if name not in ("recipe", "advice") if dry_run else name in _SHOWN and value is not None:
            number = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else None
            table.add_row(_LABELS.get(name, name.replace("_", " ")), number or str(value))
    console.out().print(table)
    if dry_run:
        for sentence in outcome["advice"]:
            console.out().print(f"* {sentence}")
        console.out().print_json(json_module.dumps(outcome["recipe"]))
