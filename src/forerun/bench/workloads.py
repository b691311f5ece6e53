"""This module reads the workloads: the shipped edits, files in the layouts of public benchmarks, or
hub data sets.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun import demo
from forerun.errors import ArgumentError, DataError, first_line
from forerun.training.data.records import BadRecords, Message, Record, read_entries, read_records

DEMO = "demo"
"""Name of the workload that ships with forerun."""
HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
FILES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt")
"""Form of a hub data set's name, and the file endings that no data set's name has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The prompts that one user sends."""

    id: str
    category: str
    questions: tuple[tuple[Message, ...], ...]
    """Prompts that are sent one after the other; each holds the messages that go before the
    server's next completion.
    """
    text: str = ""
    """A text to be continued, for a task without questions."""

    @property
    def said(self) -> tuple[str, ...]:
        """Return everything that is sent; tasks that send the same are repetitions."""
        return (self.text, *(repr(message) for question in self.questions for message in question))

    def prompt(self) -> str:
        """Return the text that ``/v1/completions`` continues; DataError for a conversation of
        several turns.
        """
        if self.text:
            return self.text
        messages = [message for question in self.questions for message in question]
        if len(messages) > 1:
            raise DataError(f"{self.id} is a conversation; a text can only be continued: leave --endpoint out")
        return str(messages[0]["content"])


def read_workload(names: Sequence[str], *, subset: str | None = None, split: str = "test") -> list[Task]:
    """Return the tasks of files, hub data sets (``org/name``) or ``demo``; DataError names the file
    and line that is bad.
    """
    return [task for name in names for task in _tasks(name, subset, split)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnTasks:
    """The tasks that the warm-up and each load send."""

    warmup: Sequence[Task]
    loads: Sequence[Sequence[Task]]
    """The tasks of each load."""
    apart: bool
    """True if each load and the warm-up have tasks of their own. Otherwise prefix caches and
    drafters that remember completions know what is sent again.
    """


def draw_tasks(
    tasks: Sequence[Task], *, loads: int, warmup: int, count: int | None = None, seed: int = 0
) -> DrawnTasks:
    """Draw `count` tasks for each load by `seed`, and others to warm up with where there are
    enough.

    Categories stay side by side, as they come. None: one load takes all but the warm-up's tasks, if
    these are half of all at most; several loads take all, and the warm-up the first ones.
    ArgumentError: a count below 1.
    """
    if count is not None and count < 1:
        raise ArgumentError(f"--num-prompts must be at least 1, got {count}")
    if count is None and loads == 1 and 2 * warmup <= len(tasks):
        count = len(tasks) - warmup
    if count is None or count >= len(tasks):
        return DrawnTasks(warmup=tasks[:warmup], loads=[tasks] * loads, apart=loads == 1 and not warmup)
    order = random.Random(seed).sample(range(len(tasks)), len(tasks))
    apart = warmup + loads * count <= len(tasks)

    def share(start: int, size: int) -> list[Task]:
        return [tasks[index] for index in sorted(order[start : start + size])]

    starts = [warmup + load * count for load in range(loads)] if apart else [min(warmup, len(tasks) - count)] * loads
    return DrawnTasks(warmup=share(0, warmup), loads=[share(start, count) for start in starts], apart=apart)


def count_repeated(drawn: DrawnTasks) -> int:
    """Count the tasks of the loads that send what the warm-up, an earlier load or an earlier task
    sent before.
    """
    counted = [task for load in drawn.loads for task in load]
    return len(counted) - len({task.said for task in counted} - {task.said for task in drawn.warmup})


def _tasks(name: str, subset: str | None, split: str) -> Iterable[Task]:
    if name == DEMO:
        for edit in demo.edits():
            kind = edit.name.partition("-")[0]
            yield Task(id=edit.name, category=kind, questions=(tuple(edit.messages),))
        return
    path = Path(name).expanduser()
    if path.exists() or not HUB.fullmatch(name) or path.suffix in FILES:
        records, fallback = read_records(path, BadRecords(skip=False, remedy="")), path.stem
    else:
        records, fallback = read_entries(_hub(name, subset, split), name, BadRecords(skip=False, remedy="")), name
    for record in records:
        yield _task(record, fallback)


def _hub(name: str, subset: str | None, split: str) -> Iterable[object]:
    try:
        load_dataset = importlib.import_module("datasets").load_dataset
    except ImportError as error:
        raise ArgumentError("a data set of the hub needs: pip install 'forerun[train]'") from error
    try:
        yield from load_dataset(name, subset, split=split)
    except Exception as error:
        raise DataError(
            f"there is no file {name}, and the hub's data set cannot be read: {first_line(error)}"
        ) from error


def _task(record: Record, fallback: str) -> Task:
    """Return a task of the record's prompts; the completions are left to the server."""
    category = record.category or fallback
    if record.text:
        return Task(id=record.id, category=category, questions=(), text=record.text)
    questions: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    for message in record.messages:
        if message["role"] == "assistant":
            continue
        waiting.append(message)
        if message["role"] in ("user", "tool"):
            questions.append(tuple(waiting))
            waiting = []
    if not questions:
        raise DataError(f"{record.where}: there is no prompt; expected a message of a user")
    return Task(id=record.id, category=category, questions=tuple(questions))
