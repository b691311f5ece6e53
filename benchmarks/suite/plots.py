"""The benchmark's results as pictures: cost of a pass, decoding speed, acceptance lengths. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.suite.acceptance import Acceptance
from benchmarks.suite.speed import ArmSummary
from benchmarks.suite.steps import NODES, StepCosts
from benchmarks.suite.suite import Results
from forerun.errors import ArgumentError

_OURS, _THEIRS, _FLOOR = "#1f6feb", "#8b949e", "#d29922"


def draw(results: Results, folder: Path) -> list[Path]:
    """Write SVG and PNG files; returns their paths.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ArgumentError("plots need matplotlib: pip install 'forerun[bench]', or --no-plots") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    figures = {
        f"speed-{index}": _speed(pyplot, label, lines) for index, (label, lines) in enumerate(results.speed.items())
    }
    if results.steps is not None:
        figures["steps"] = _steps(pyplot, results.steps)
    if results.acceptance is not None:
        figures["acceptance"] = _acceptance(pyplot, results.acceptance)
    for name, figure in figures.items():
        for suffix in ("svg", "png"):
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, bbox_inches="tight", dpi=150)
            written.append(path)
        pyplot.close(figure)
    return written


def _speed(pyplot: Any, label: str, lines: list[ArmSummary]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 0.45 * len(lines) + 1.2))
    names = [line.arm for line in lines]
    colours = [_OURS if name.startswith("forerun") else _THEIRS for name in names]
    bars = axes.barh(names, [line.tokens_per_second for line in lines], color=colours)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second, decoding alone")
    axes.set_title(label, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _acceptance(pyplot: Any, found: Acceptance) -> Any:
    temperatures = sorted({line.temperature for line in found.lines})
    groups = [[line for line in found.lines if line.temperature == temperature] for temperature in temperatures]
    heights = [len(group) for group in groups]
    figure, panels = pyplot.subplots(
        len(groups), figsize=(8, 0.35 * sum(heights) + 1.5), sharex=True, squeeze=False, height_ratios=heights
    )
    for axes, lines, temperature in zip(panels[:, 0], groups, temperatures, strict=True):
        lengths = [line.length for line in lines]
        errors = [
            [max(0.0, line.length - line.low) for line in lines],
            [max(0.0, line.high - line.length) for line in lines],
        ]
        colours = [_OURS if line.method == "eagle3" else _THEIRS for line in lines]
        bars = axes.barh([line.label for line in lines], lengths, xerr=errors, color=colours, ecolor=_FLOOR)
        axes.bar_label(bars, fmt="%.2f", padding=3)
        axes.invert_yaxis()
        axes.set_title(f"T = {temperature:g}", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("tokens per pass, bonus included, and 95 % interval")
    figure.tight_layout()
    return figure


def _steps(pyplot: Any, costs: StepCosts) -> Any:
    figure, axes = pyplot.subplots(figsize=(6, 3.5))
    axes.plot(NODES, [costs.step_ms[nodes] for nodes in NODES], "o-", color=_OURS, label="whole pass")
    axes.plot(NODES, [costs.floor_ms[nodes] for nodes in NODES], "s--", color=_FLOOR, label="linear layers alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(NODES, [str(nodes) for nodes in NODES])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("scored nodes")
    axes.set_ylabel("ms")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
