"""Writes what a run found as one page, in HTML with its plots and in Markdown, with the commands that serve
it on other engines.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forerun.control.config import SpeculativeConfig
from forerun.deploy.launch import DeployRequest, choose_version, find_engine
from forerun.errors import CheckpointError, ForerunError, first_line
from forerun.heads.engines import engines_for, export_head
from forerun.heads.files import TargetFacts, read_head
from forerun.shipped import resolve
from forerun.speedup.compare import DECIDING, PLAIN, mean_speedup
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
        words = f"with {winner} completions come {gains}"
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
    """Return the speed-up that is sure although the best of several is looked at, 0 where too little was measured."""
    return float(figures.get("speedup_sure") or 0.0) if figures is not None else 0.0


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
        return "the model completed none of the held-out prompts"
    figures = comparison["figures"][best]
    gains = ", ".join(f"{_gain(one['all'])} at T = {name}" for name, one in figures.items())
    if mean_speedup(figures) > 1 and comparison["prompts"] < DECIDING:
        few = f"{comparison['prompts']} held-out prompts are too few to be sure (at least {DECIDING} are needed)"
        return f"{few}; with {best} completions came {gains}"
    trained = "" if found["training"]["head"] is not None else ", and no head was trained"
    return f"with the best, {best}, completions come {gains}{trained}"


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
        yield f"over {found['free']['best']}, the best that needs no training, completions with {name} come {gains}"
    first, then = found["machine"]["tokens_per_second"], comparison["plain_tokens_per_second"]
    if count and then < BUSY * first:
        yield (
            f"the machine was busy: plain decoding made {then:.0f} tokens/s beside the others, and {first:.0f} when "
            "it was measured at first; speeds are uncertain by more than their intervals say, tokens a pass are not"
        )
    if comparison["empty"]:
        yield f"{comparison['empty']} of the held-out completions are empty"
    if comparison["circles"]:
        yield (
            f"{comparison['circles']} of the {count} held-out completions at T = 0 end in a circle, which flatters "
            "lookup drafters"
        )
    unlike = sum(one["0"]["all"]["unlike_plain"] for one in comparison["figures"].values() if one["0"]["all"])
    if unlike:
        yield f"{unlike} greedy completions differ from plain decoding's by more than a numeric tie: please report this"


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
    lines: dict[str, dict[str, Any]] = {"forerun": {"lines": [shlex.join(here)], "notes": []}}
    for engine in ELSEWHERE:
        try:
            lines[engine] = _elsewhere(engine, model, folder, config, forecasts)
        except ForerunError as error:
            lines[engine] = {"lines": [], "notes": [first_line(error)]}
    return lines


def _elsewhere(
    name: str, model: str, folder: Path, config: Mapping[str, Any] | None, forecasts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the lines of another engine, with the head written as it reads it."""
    engine = find_engine(name)
    version, notes = choose_version(engine, None)
    speculation = None if config is None else dict(config)
    if speculation is not None and "model" in speculation:
        # `auto` with a head is the head alone elsewhere: other engines do not choose among drafters at each step.
        kind = read_head(speculation["model"]).config.kind
        head = _exported(engine.reads, kind, speculation["model"], model, folder / f"for-{name}")
        speculation = {"method": kind, "model": head}
        if length := forecasts.get(kind, {}).get("draft_length"):
            speculation["num_speculative_tokens"] = length
        if config is not None and config["method"] == "auto":
            notes.append(
                f"{engine.title} drafts with the head alone; forerun's `auto` copies as well, so measure there"
            )
    out, parsed = folder / f"serve-{name}", SpeculativeConfig.parse(speculation)
    writer = engine(DeployRequest(model=str(resolve(model)), config=parsed, version=version, out=out))
    made = writer.deployment()
    for file, text in made.files.items():
        write_file(out / file, text)
    return {"lines": [command.line for command in made.commands], "notes": [*notes, *writer.notes]}


def _exported(reads: str, kind: str, head: str, model: str, output: Path) -> str:
    """Return the folder of the head as an engine reads it: the head's own where nothing is known to be different."""
    if reads not in engines_for(kind).destinations:
        return head
    try:
        return str(export_head(head, TargetFacts.read(model), reads, output).directory)
    except CheckpointError as error:
        raise CheckpointError(f"the head cannot be served there: {first_line(error)}") from error


TEMPLATES = Path(__file__).parent
WIDTH, LABEL, BAR = 720, 150, 13  # Pixels of a plot, of its labels, and the height of a bar
CAPTIONS = {
    "loss": "The head's loss while it learned",
    "acceptance": "Tokens a pass with drafts of five, on trial prompts that it did not learn",
    "v": "What a pass of the model costs: where it rises slowly, drafts are cheap to check",
}
ENGINES = {"forerun": "Here", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}


def write_page(folder: Path, result: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Write ``page.html``, which needs no other file, and ``page.md``; `found` has what each stage found."""
    from jinja2 import Environment, FileSystemLoader

    shown = _shown_arm(result, found)
    values = {
        **found,
        "result": result,
        "name": Path(str(result["model"])).name,
        "shown": shown,
        "rows": list(_rows(found)),
        "evaluated": _best_evaluation(found["training"]),
        "categories": list(_categories(found["comparison"]["figures"])),
        "engines": {ENGINES[name]: one for name, one in result["serve"].items()},
        "plots": _plots(shown, found),
        "captions": CAPTIONS,
        "total_minutes": result["seconds_spent"] / 60,
    }
    how: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    for name, autoescape in (("page.html", True), ("page.md", False)):
        environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=autoescape, **how)
        environment.filters |= {"times": _times, "interval": _interval, "code": _code}
        write_file(folder / name, environment.get_template(f"{name}.jinja").render(values))


def _shown_arm(result: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arm whose categories are shown: the winner, or what came nearest; None where nothing was measured."""
    figures = found["comparison"]["figures"] or found["free"]["figures"]
    best = max(figures, key=lambda name: mean_speedup(figures[name]))
    name = result["drafter"] if result["drafter"] != PLAIN else best
    if mean_speedup(figures[name]) == 0:
        return None
    held_out = bool(found["comparison"]["figures"])
    return {"name": name, "figures": figures[name], "held_out": held_out}


def _rows(found: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield a line of the table for each arm and temperature, with the plan's forecast of greedy decoding."""
    comparison = found["comparison"]
    for name, by_temperature in comparison["figures"].items():
        forecast = comparison["forecasts"].get(name, {}).get("speedup")
        for temperature, one in by_temperature.items():
            if one["all"] is None:
                continue
            error = None
            if forecast is not None and temperature == "0":
                error = forecast / one["all"]["decode_speedup"] - 1
            yield {
                "name": name,
                "temperature": temperature,
                "forecast": forecast if temperature == "0" else None,
                "error": error,
                **one["all"],
            }


def _best_evaluation(training: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Return the evaluation of the weights that were kept; None where a kind of head is evaluated otherwise, or not."""
    evaluations = [
        one for one in training.get("evaluations", []) if {"chain_t0", "tree_t0", "chain_t1", "tree_t1"} <= set(one)
    ]
    return max(evaluations, key=lambda one: one["chain_t0"], default=None)


def _categories(figures: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yield a line for each category of held-out prompts, with what each arm brought there at each temperature."""
    parts = {
        (name, temperature): one["categories"]
        for name, by_temperature in figures.items()
        for temperature, one in by_temperature.items()
    }
    names = sorted({name for part in parts.values() for name in part})
    for name in names if len(names) > 1 else ():
        cells = [part.get(name) for part in parts.values()]
        count = max(one["prompts"] for one in cells if one is not None)
        yield {"name": name, "prompts": count, "cells": cells}


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def _interval(value: Sequence[float] | None) -> str:
    return "" if value is None else f"{value[0]:.2f} to {value[1]:.2f}"


def _code(text: str) -> str:
    """Return a text as HTML, with what stands between backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _plots(shown: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, str]:
    """Return the plots by name, as SVG."""
    v = [(float(nodes), float(cost)) for nodes, cost in found["machine"]["v"]]
    plots = {"v": draw_lines({"a pass": v}, across="tokens in a pass", up="cost, plain passes", log=True)}
    if shown is not None:
        categories = sorted({name for one in shown["figures"].values() for name in one["categories"]})
        bars = [("all", {t: one["all"] for t, one in shown["figures"].items()})]
        if len(categories) > 1:
            bars += [
                (name, {t: one["categories"].get(name) for t, one in shown["figures"].items()}) for name in categories
            ]
        plots["categories"] = draw_bars(bars)
    losses = found["training"].get("losses")
    if losses:
        points = [(float(step), float(loss)) for step, loss in losses]
        plots["loss"] = draw_lines({"loss": points}, across="training steps", up="loss, nats")
    lengths = found["training"].get("evaluations", [])
    if len(lengths) > 1:
        names = {"chain_t0": "T = 0", "chain_t1": "T = 1"}
        lines = {
            words: [(float(one["step"]), float(one[key])) for one in lengths if key in one]
            for key, words in names.items()
        }
        drawn = {name: points for name, points in lines.items() if points}
        plots["acceptance"] = draw_lines(drawn, across="training steps", up="acceptance length of the chain")
    return plots


def draw_bars(rows: Sequence[tuple[str, Mapping[str, Mapping[str, Any] | None]]]) -> str:
    """Draw speed-ups with their intervals, a group of bars for each row and one bar for each temperature."""
    every = [one for _, group in rows for one in group.values() if one is not None]
    most = max(1.2, *((one["speedup_interval"] or [0, one["speedup"]])[1] for one in every)) * 1.02
    scale = (WIDTH - LABEL - 60) / most
    parts, y = list[str](), 4.0
    for label, group in rows:
        height = len(group) * (BAR + 3)
        weight = ' class="strong"' if label == "all" else ""
        parts.append(
            f'<text x="{LABEL - 8}" y="{y + height / 2 + 3:.1f}" text-anchor="end"{weight}>{escape(label)}</text>'
        )
        for index, (temperature, one) in enumerate(group.items()):
            if one is not None:
                parts.append(_bar(one, f"T = {temperature}", index, y, scale))
            y += BAR + 3
        y += 8
    ticks = "".join(
        f'<line x1="{LABEL + tick * scale:.1f}" x2="{LABEL + tick * scale:.1f}" y1="0" y2="{y:.0f}" '
        f'class="{"one" if tick == 1 else "grid"}"/>'
        f'<text x="{LABEL + tick * scale:.1f}" y="{y + 14:.0f}" text-anchor="middle" class="dim">{tick:g}</text>'
        for tick in _ticks(0.0, most)
    )
    return _svg(WIDTH, y + 20, ticks + "".join(parts), "speed over plain decoding, by category")


def _bar(one: Mapping[str, Any], title: str, index: int, y: float, scale: float) -> str:
    speedup, interval = one["speedup"], one["speedup_interval"]
    end, middle = LABEL + speedup * scale, y + BAR / 2
    words = f"{title}: {speedup:.2f} x, {one['prompts']} prompts, {one['tokens_per_pass']:.2f} tokens a pass"
    shape = f'<rect x="{LABEL}" y="{y:.1f}" width="{speedup * scale:.1f}" height="{BAR}" rx="2" class="s{index}"/>'
    if interval:
        low, high = (LABEL + bound * scale for bound in interval)
        ends = "".join(f"M{x:.1f} {middle - 3:.1f}v6" for x in (low, high))
        shape += f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{ends}" class="whisker"/>'
        end = high
    number = f'<text x="{end + 6:.1f}" y="{middle + 4:.1f}" class="number">{speedup:.2f}</text>'
    return f"<g><title>{escape(words)}</title>{shape}{number}</g>"


def draw_lines(lines: Mapping[str, Sequence[tuple[float, float]]], *, across: str, up: str, log: bool = False) -> str:
    """Draw lines through points, with the horizontal axis by powers of two where it is `log`."""
    width, height, left, bottom = WIDTH // 2 - 10, 200, 40, 34
    points = [point for line in lines.values() for point in line]
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points) * 1.05
    least_x = min(x for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x / least_x) / max(1e-9, math.log2(most_x / least_x))) if log else x / max(1e-9, most_x)
        return left + share * (width - left - 12), height - bottom - y / most_y * (height - bottom - 16)

    parts = list[str]()
    for tick in _ticks(0.0, most_y, 4):
        _, y = place(most_x, tick)
        parts.append(f'<line x1="{left}" x2="{width - 12}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" class="dim">{tick:g}</text>')
    doubled = (
        [least_x * 2**power for power in range(int(math.log2(most_x / least_x)) + 1)] if log else _ticks(0.0, most_x, 4)
    )
    for tick in doubled:
        x, _ = place(tick, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{height - bottom + 15}" text-anchor="middle" class="dim">{tick:g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        placed = [place(x, y) for x, y in line]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="{path}" class="line l{index}"/>')
        if len(placed) <= 16:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" class="s{index}"/>' for x, y in placed]
        if len(lines) > 1:
            x, y = placed[-1]
            parts.append(
                f'<text x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end" class="number">{escape(name)}</text>'
            )
    parts.append(f'<text x="{left}" y="10" class="dim">{escape(up)}</text>')
    parts.append(f'<text x="{width - 12}" y="{height - 3}" text-anchor="end" class="dim">{escape(across)}</text>')
    return _svg(width, height, "".join(parts), f"{up} by {across}")


def _ticks(least: float, most: float, count: int = 6) -> list[float]:
    """Return about `count` round numbers from `least` to `most`."""
    rough = (most - least) / count
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [round(least + index * step, 10) for index in range(int((most - least) / step) + 1)]


def _svg(width: float, height: float, inside: str, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" aria-label="{escape(title)}">'
        f"{inside}</svg>"
    )
