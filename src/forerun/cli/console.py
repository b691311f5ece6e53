"""The two consoles and JSON output. Knows where things are written, not what.

Rich honours ``NO_COLOR`` and writes no escape codes into a pipe; both consoles are made when they are first needed, so
that a redirected stream is the one that is used.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text


def out() -> Console:
    """The console for data: stdout, no markup and no guessing of highlights."""
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)


def log() -> Console:
    """The console for everything that is not data: stderr."""
    return Console(file=sys.stderr, highlight=False)


def report_error(message: str) -> None:
    """One clear red line on stderr."""
    log().print(Text("error: ", style="bold red").append(message, style="red"), soft_wrap=True)


def warn(message: str) -> None:
    """One yellow line on stderr."""
    log().print(Text(message, style="yellow"), soft_wrap=True)


def write_json(value: Any) -> None:
    """One JSON document on stdout; dataclasses become objects."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=_plain) + "\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)


@contextmanager
def working(message: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; silent where stderr is no terminal."""
    console = log()
    if not console.is_terminal:
        yield
        return
    with console.status(message):
        yield
