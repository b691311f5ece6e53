"""Trackers record training: a JSONL file and the console always; TensorBoard, W&B and trackio by
name.

They are not accelerate's: their global `PartialState` sets threads and device of the process that
logs, and so the bits of what it computes.
"""

from __future__ import annotations

import importlib
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forerun.errors import ArgumentError, CheckpointError, nearest
from forerun.writing import write_file

INTERVAL = "_interval"
"""The end of the name of half of a value's 95 % interval, in the value's own unit."""


class Tracker(Protocol):
    """Records values by step."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` after optimizer step number `step` (from 1); names with "eval/" come from evaluation."""

    def close(self) -> None:
        """Write out what is held back."""


class JsonLines(Tracker):
    """Writes one JSON object per call to a file; values that are not finite become
    null.
    """

    def __init__(self, path: Path, step: int = 0) -> None:
        """Continue `path` after `step`: lines of later steps, which a killed run left, are dropped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if _upto(line, step)]
            write_file(path, "".join(f"{line}\n" for line in lines))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line; CheckpointError if the disk refuses."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        try:
            self._file.write(json.dumps({"step": step, **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._file.name} cannot be written: {error}. Checkpoints are intact; make room and resume."
            ) from error

    def close(self) -> None:
        self._file.close()


def _upto(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # a line that a kill cut short


class Bar(Tracker):
    """A progress bar on stderr: loss, learning rate, tokens per second, time left; plain
    lines if no terminal.
    """

    def __init__(self, total: Callable[[], int], step: int = 0, console: Console | None = None) -> None:
        """Show that `step` of `total` optimizer steps are done.

        `total` may change while training; `console` None is stderr.
        """
        self._console = console or Console(stderr=True)
        self._total, self._spoken = total, -math.inf
        self._held_out = ""  # What the last evaluation found
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("training", total=total(), completed=step)
        self._bar.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if "loss" not in values:
            self._print(f"step {step}: {_headline(values)}")
            name, value = next(iter(values.items()), ("", 0.0))
            if name.startswith("eval/"):
                self._held_out = f"  held out {value:.2f}"
            return
        rate, speed = values.get("learning_rate", math.nan), values.get("tokens_per_second", math.nan)
        rates = [value for name, value in values.items() if name.startswith("acceptance_")]
        accepted = f"  accepts {1 + sum(rates):.2f} of given text" if rates else ""
        text = f"loss {values['loss']:.4f}{accepted}{self._held_out}  rate {rate:.2e}  {speed:,.0f} tokens/s"
        if self._console.is_terminal:
            self._bar.update(self._task, total=self._total(), completed=step, description=text)
        elif time.monotonic() - self._spoken >= 10 or step >= self._total():
            self._spoken = time.monotonic()
            self._print(f"step {step:,} of {self._total():,}  {text}")

    def _print(self, text: str) -> None:
        """Print a line, which is broken between words in a terminal alone."""
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        self._bar.stop()


def _headline(values: Mapping[str, float]) -> str:
    """Return what is worth a line on the console: no shares by depth, and intervals behind their values."""
    plain = {name.removeprefix("eval/"): value for name, value in values.items()}
    parts = list[str]()
    for name, value in plain.items():
        if name.startswith("acceptance_") or name.endswith(INTERVAL):
            continue
        half = plain.get(name + INTERVAL)
        # An acceptance length is 1 at least
        parts.append(
            f"{name} {value:.4g}" + ("" if half is None else f" ({max(1, value - half):.3g} to {value + half:.3g})")
        )
    return "  ".join(parts)


class Remote(NamedTuple):
    """A tracker of a package's own functions."""

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "trackio": "trackio"}


def tracker(name: str, output: Path, config: Mapping[str, Any]) -> Tracker:
    """Return a tracker by name, told the `config`; ArgumentError for an unknown one, or if its
    package is not installed.
    """
    if name not in PACKAGES:
        raise ArgumentError(
            f"tracker {name!r} is unknown; expected one of {', '.join(PACKAGES)}.{nearest(name, PACKAGES)}"
        )
    try:
        module: Any = importlib.import_module(PACKAGES[name])
    except ImportError as error:
        raise ArgumentError(f"tracker {name!r} needs a package that is not installed: pip install {name}") from error
    if name != "tensorboard":
        module.init(project="forerun", name=output.name, config=dict(config))
        return Remote(lambda step, values: module.log(dict(values), step=step), module.finish)
    writer = module.SummaryWriter(str(output / "tensorboard"))

    def log(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)

    return Remote(log, writer.close)
