"""This module draws the conclusion of a comparison, and writes the lines that serve it here and elsewhere."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forerun.control.config import SpeculativeConfig
from forerun.deploy.launch import choose_version, find_engine
from forerun.deploy.requests import DeployRequest
from forerun.errors import CheckpointError, ForerunError, first_line
from forerun.heads.engines import engines_for, export_head
from forerun.heads.files import TargetFacts, read_head
from forerun.shipped import resolve
from forerun.speedup.compare import FEWEST, PLAIN, mean_speedup
from forerun.speedup.prompts import FEW
from forerun.writing import write_file

ELSEWHERE = ("vllm", "sglang", "llamacpp")
BUSY = 0.7  # Plain decoding's speed, as a share of what was measured at first, below which the machine was busy
NO_LOSS = 0.97  # Speed-ups of a category below this are named as a loss


def verdict_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is worth using, in words and figures: the arm that was fastest over both temperatures, or none."""
    comparison, figures = found["comparison"], found["comparison"]["figures"]
    answered = {name: one for name, one in figures.items() if mean_speedup(one) > 0}
    best = max(answered, key=lambda name: mean_speedup(answered[name]), default=PLAIN)
    sure = best != PLAIN and any(_lower(one["all"]) > 1 for one in figures[best].values())
    winner = best if sure and mean_speedup(figures[best]) > 1 else PLAIN
    if winner == PLAIN:
        words = f"nothing is worth it: {_why_nothing(found, best)}"
    else:
        gains = ", ".join(f"{_gain(one['all'])} at T = {name}" for name, one in figures[winner].items())
        words = f"with {winner} answers come {gains}"
    return {
        "worth_it": winner != PLAIN,
        "drafter": winner,
        "speculative_config": comparison["arms"].get(winner),
        "words": words,
        "trained": found["training"]["head"] is not None,
        "figures": {name: one["all"] for name, one in figures[winner].items()} if winner != PLAIN else {},
        "losses": [] if winner == PLAIN else list(_losses(figures[winner])),
        "certainty": list(_certainty(found)),
    }


def _lower(figures: Mapping[str, Any] | None) -> float:
    """Return the lower end of a speed-up's interval, 0 where too little was measured for one."""
    interval = None if figures is None else figures["speedup_interval"]
    return float(interval[0]) if interval else 0.0


def _gain(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "nothing"
    interval = figures["speedup_interval"]
    sure = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    return f"{figures['speedup']:.2f} x as fast{sure}"


def _why_nothing(found: Mapping[str, Any], best: str) -> str:
    """Say why plain decoding is best."""
    comparison = found["comparison"]
    if best == PLAIN:
        return "the model answered none of the held-out prompts"
    figures = comparison["figures"][best]
    gains = ", ".join(f"{_gain(one['all'])} at T = {name}" for name, one in figures.items())
    if mean_speedup(figures) > 1 and comparison["prompts"] < FEWEST:
        return f"{comparison['prompts']} held-out prompts are too few to be sure; with {best} answers came {gains}"
    trained = "" if found["training"]["head"] is not None else ", and no head was trained"
    return f"with the best, {best}, answers come {gains}{trained}"


def _losses(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yield the categories in which the winner is slower than plain decoding."""
    for temperature, one in figures.items():
        for category, part in one["categories"].items():
            if part["speedup"] < NO_LOSS:
                count = f"{part['prompts']} prompt{'s' if part['prompts'] > 1 else ''}"
                yield f"{category} at T = {temperature}: {_gain(part)}, {count}"


def _certainty(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield what limits the figures."""
    comparison = found["comparison"]
    count = comparison["prompts"]
    yield f"{count} held-out prompts, which neither the head nor the choice of a drafter has seen"
    if count < FEW:
        yield f"fewer than {FEW}: the intervals are wide, and those of single categories wider"
    for name, figures in comparison["over_free"].items():
        gains = ", ".join(f"{_gain(one)} at T = {temperature}" for temperature, one in figures.items())
        yield f"over {found['free']['best']}, the best that needs no training, answers with {name} come {gains}"
    first, then = found["machine"]["tokens_per_second"], comparison["plain_tokens_per_second"]
    if count and then < BUSY * first:
        yield (
            f"the machine was busy: plain decoding made {then:.0f} tokens/s beside the others, and {first:.0f} when "
            "it was measured at first; speeds are uncertain by more than their intervals say, tokens a pass are not"
        )
    if comparison["empty"]:
        yield f"{comparison['empty']} of the held-out answers are empty"
    if comparison["circles"]:
        yield (
            f"{comparison['circles']} of the {count} held-out answers at T = 0 end in a circle, which flatters every "
            "drafter that copies"
        )
    unlike = sum(one["0"]["all"]["unlike_plain"] for one in comparison["figures"].values() if one["0"]["all"])
    if unlike:
        yield f"{unlike} greedy answers differ from plain decoding's by more than a numeric tie: please report this"


def serving_lines(
    model: str, folder: Path, verdict: Mapping[str, Any], forecasts: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return for each engine the lines that serve the model with what won, or why there are none.

    The plan's `forecasts` say how long a head's drafts are best where they are as long at every step.
    """
    config = verdict["speculative_config"]
    here = ["forerun", "serve", model]
    if config is not None:
        here += ["--drafter", config["method"]]
        here += ["--drafter-model", config["model"]] if "model" in config else []
    found: dict[str, dict[str, Any]] = {"forerun": {"lines": [shlex.join(here)], "notes": []}}
    for engine in ELSEWHERE:
        try:
            found[engine] = _elsewhere(engine, model, folder, config, forecasts)
        except ForerunError as error:
            found[engine] = {"lines": [], "notes": [first_line(error)]}
    return found


def _elsewhere(
    name: str, model: str, folder: Path, config: Mapping[str, Any] | None, forecasts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the lines of another engine, with the head written as it reads it."""
    engine = find_engine(name)
    version, notes = choose_version(engine, None)
    wanted = None if config is None else dict(config)
    if wanted is not None and "model" in wanted:
        # `auto` with a head is the head alone elsewhere: other engines do not choose among drafters at each step.
        kind = read_head(wanted["model"]).config.kind
        head = _exported(engine.reads, kind, wanted["model"], model, folder / f"for-{name}")
        wanted = {"method": kind, "model": head}
        if length := forecasts.get(kind, {}).get("draft_length"):
            wanted["num_speculative_tokens"] = length
        if config is not None and config["method"] == "auto":
            notes.append(
                f"{engine.title} drafts with the head alone; forerun's `auto` copies as well, so measure there"
            )
    out, parsed = folder / f"serve-{name}", SpeculativeConfig.parse(wanted)
    made = engine.deployment(DeployRequest(model=str(resolve(model)), config=parsed, version=version, out=out), notes)
    for file, text in made.files.items():
        write_file(out / file, text)
    return {"lines": [command.line for command in made.commands], "notes": [*made.notes, *notes]}


def _exported(reads: str, kind: str, head: str, model: str, output: Path) -> str:
    """Return the folder of the head as an engine reads it: the head's own where nothing is known to be different."""
    if reads not in engines_for(kind).destinations:
        return head
    try:
        return str(export_head(head, TargetFacts.read(model), reads, output).directory)
    except CheckpointError as error:
        raise CheckpointError(f"the head cannot be served there: {first_line(error)}") from error
