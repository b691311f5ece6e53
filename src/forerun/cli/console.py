"""This module makes the two consoles when needed, so that a redirected stream is used, and writes
JSON and progress.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry
    from cyclopts.help.specs import ColumnSpec
    from rich.console import ConsoleOptions

LINE_EVERY_S = 60.0  # Least time between lines of progress, where stderr is no terminal


def out() -> Console:
    """Return the console for data: stdout, without markup or guessed highlights."""
    return Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)


def log() -> Console:
    """Return the console for everything that is not data: stderr. In a terminal lines break between words."""
    console = Console(file=sys.stderr, highlight=False)
    console.soft_wrap = not console.is_terminal
    return console


def report_error(message: str) -> None:
    log().print(Text("error: ", style="bold red").append(message, style="red"))


def warn(message: str, style: str = "yellow") -> None:
    log().print(Text(message, style=style))


def table(*titles: str, title: str | None = None, numbers_from: int | None = None) -> Table:
    """Return an empty table, without a headline where there are no `titles`; columns `numbers_from`
    on hold numbers.
    """
    empty = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", show_header=bool(titles))
    for index, name in enumerate(titles):
        number = numbers_from is not None and index >= numbers_from
        empty.add_column(name, justify="right" if number else "left", no_wrap=index == 0 or number)
    return empty


def help_columns(console: Console, options: ConsoleOptions, entries: list[HelpEntry]) -> tuple[ColumnSpec, ...]:
    """Return the columns of ``--help``, in which no option's name is broken, and descriptions are running text."""
    from cyclopts.help.specs import AsteriskColumn, DescriptionColumn, DescriptionRenderer, NameColumn, NameRenderer

    labels = [" ".join(entry.display_labels_with_metavar).split() for entry in entries]
    words = [len(word) + (2 if place else 0) for label in labels for place, word in enumerate(label)]
    width = max(math.ceil(0.35 * console.width), *words)

    def describe(entry: HelpEntry) -> Any:
        said = " ".join(str(entry.description.primary_renderable).replace("``", "`").split())
        return DescriptionRenderer()(entry.copy(description=said))

    columns = (
        NameColumn.copy(renderer=NameRenderer(max_width=width), max_width=width),
        DescriptionColumn.copy(renderer=describe),
    )
    return (AsteriskColumn, *columns) if any(entry.required for entry in entries) else columns


def write_json(value: Any) -> None:
    """Write one line of JSON on stdout."""
    sys.stdout.write(json.dumps(json.loads(_dump(value)), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def pretty(value: Any) -> str:
    """Format `value` as indented JSON."""
    return _dump(value, indent=2).decode()


def _dump(value: Any, indent: int | None = None) -> bytes:
    """Return `value` as JSON, with null for infinity and NaN, because JSON does not have them."""
    from pydantic import TypeAdapter

    return TypeAdapter(Any).dump_json(value, indent=indent)


@contextmanager
def telling(beginning: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr whose words can be changed; where stderr is no terminal, print a
    line a minute.
    """
    with telling_news(beginning) as (tell, _):
        yield tell


@contextmanager
def telling_news(beginning: str) -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Show what `telling` shows, and yield with its function one that prints lines that stay."""
    console = log()

    def stay(words: str) -> None:
        console.print(Text(words, style="dim"))

    if not console.is_terminal:
        line = _line_a_minute(console)
        yield lambda words: line(f"{beginning}: {words}"), stay
        return
    with console.status(beginning) as status:
        yield lambda words: status.update(f"{beginning}: {words}"), stay


@contextmanager
def progress_bar(task: str, total: int | None = None, done: int = 0) -> Iterator[Callable[..., None]]:
    """Show a progress bar on stderr; where that is no terminal, print a line a minute.

    Yields rich's `Progress.update` of its one task.
    """
    from rich import progress

    console = log()
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), *times)
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        number = bar.add_task(task, total=total, completed=done)
        line = _line_a_minute(console)
        first: float | None = None  # What was done before: its pace says nothing of what is left

        def update(**changes: Any) -> None:
            nonlocal first
            bar.update(number, **changes)
            [now] = bar.tasks
            first = now.completed if first is None else first
            if not console.is_terminal:
                of = "" if now.total is None else f" of {now.total:,.0f}"
                elapsed = now.elapsed or 0.0
                line(f"{now.description}: {now.completed:,.0f}{of} after {elapsed:,.0f} s{_time_left(now, first)}")

        yield update


def _time_left(now: Any, first: float) -> str:
    """Return how long rich's task `now` will take at the pace since `first` was done, as an end of a sentence."""
    done = now.completed - first
    if now.total is None or done <= 0 or not now.elapsed:
        return ""
    seconds = (now.total - now.completed) * now.elapsed / done
    return f", about {seconds / 60:,.0f} min left" if seconds >= 90 else f", about {seconds:,.0f} s left"


def _line_a_minute(console: Console) -> Callable[[str], None]:
    """Return a function that prints its line unless it has printed within a minute, and nothing in
    the first minute.
    """
    last = time.monotonic()

    def line(words: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY_S:
            last = time.monotonic()
            console.print(Text(words, style="dim"), soft_wrap=True)

    return line
