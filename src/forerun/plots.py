"""This module uses matplotlib without a display, and asks for it before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forerun.errors import ArgumentError

COLOURS = ("#1f6feb", "#d29922", "#8b949e", "#2da44e", "#a371f7", "#cf222e")
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Raise ArgumentError for a plot that could not be drawn, before anything is measured for it."""
    if path is None:
        return
    if path.suffix.lower() not in _SUFFIXES:
        raise ArgumentError(f"a plot is a file that ends in {', '.join(_SUFFIXES)}, got {path}")
    pyplot()


def pyplot() -> Any:
    """Return ``matplotlib.pyplot``; ArgumentError if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ArgumentError("plots need matplotlib: pip install 'forerun[bench]', or leave --plot out") from error
    mpl.use("Agg")
    from matplotlib import pyplot as found

    return found


def save(figure: Any, path: Path) -> None:
    """Write a figure and close it."""
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot().close(figure)
