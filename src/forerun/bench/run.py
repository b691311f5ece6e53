"""This module runs the loads one after the other, on the server and on its baseline, and keeps what
is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from forerun.bench.client import RequestOptions, Server, ServerError
from forerun.bench.load import BenchLoad, LoadResult, converse, measure
from forerun.bench.summary import summarise
from forerun.bench.workloads import Task

Tell = Callable[[str, int], None]
"""A `Tell` is called with what is being measured, and how many tasks are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A `Bench` says what is measured on which servers."""

    server: Server
    baseline: Server | None
    loads: Sequence[tuple[BenchLoad, Sequence[Task]]]
    """The loads, each with the tasks that it asks."""
    asking: RequestOptions
    limits: Mapping[str, float]
    """Limits of a good request, in ms."""
    warmup: Sequence[Task]

    def __post_init__(self) -> None:
        """Check that the endpoint can be asked every task; DataError if not."""
        if self.asking.endpoint == "completions":
            for task in (task for _, tasks in self.loads for task in tasks):
                task.prompt()

    async def run(self, record: dict[str, Any], save: Callable[[], None], tell: Tell) -> int:
        """Measure the loads that `record` does not hold yet, call `save` after each, and return how
        many there were.

        ServerError: nobody answers, or every request of a load failed.
        """
        loads: list[dict[str, Any]] = record.setdefault("loads", [])
        done = {load["load"] for load in loads}
        left = [(load, tasks) for load, tasks in self.loads if load.label not in done]
        if not left:
            return 0
        async with AsyncExitStack() as opened:
            for server in (self.baseline, self.server):
                if server is not None:
                    await opened.enter_async_context(server)
                    for task in self.warmup:
                        await converse(server, task, self.asking, 0.0)
            record |= {"engine": self.server.engine, "served_model": self.server.model}
            for load, tasks in left:
                loads.append(await self._measured(load, tasks, tell))
                save()
        return len(left)

    async def _measured(self, load: BenchLoad, tasks: Sequence[Task], tell: Tell) -> dict[str, Any]:
        """Return the server's figures; with a baseline also its figures, the speed-up, and the
        number of identical answers.
        """
        base = None
        if self.baseline is not None:
            base = await self._on(self.baseline, load, tasks, lambda done: tell(f"baseline, {load.label}", done))
        found = await self._on(self.server, load, tasks, lambda done: tell(load.label, done))
        record = summarise(found, self.limits)
        if base is not None:
            record["baseline"] = summarise(base, self.limits)
            before = record["baseline"]["output_throughput"]
            record["speedup"] = record["output_throughput"] / before if before else None
            said = _texts(base)
            record["identical_answers"] = sum(said.get(turn) == text for turn, text in _texts(found).items())
        return record

    async def _on(
        self, server: Server, load: BenchLoad, tasks: Sequence[Task], tell: Callable[[int], None]
    ) -> LoadResult:
        found = await measure(server, tasks, load, self.asking, tell)
        errors = [answer.error for answer in found.answers]
        if all(errors):
            raise ServerError(f"all {len(errors)} requests to {server.url} failed; the first: {errors[0]}")
        return found


def _texts(found: LoadResult) -> dict[tuple[str, int], str]:
    """Return the answers without an error, by task and index of the question."""
    asked = Counter[str]()
    texts = {}
    for answer in found.answers:
        if answer.error is None:
            texts[answer.task, asked[answer.task]] = answer.text
        asked[answer.task] += 1
    return texts
