"""This module simulates users, so many at a time or arriving at a rate; each asks its task's
questions in turn.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bench.client import BenchAnswer, RequestOptions, Server
from forerun.bench.counters import SpeculationCounts, diff_counts, sum_counts
from forerun.bench.workloads import Task
from forerun.errors import ArgumentError
from forerun.training.data.records import Message

Tell = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchLoad:
    """A `BenchLoad` says how requests come: exactly one of concurrency and rate is given."""

    concurrency: int | None = None
    """Users who each ask again as soon as they are answered."""
    rate: float | None = None
    """Users who arrive per second, whether or not others are answered."""
    burstiness: float = 1.0
    """Evenness of the arrivals: 1 is Poisson, less comes in bursts, more is evener (shape of the
    gamma distribution).
    """

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ArgumentError("a load is either --concurrency or --request-rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ArgumentError(f"--concurrency must be at least 1, got {self.concurrency}")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ArgumentError(f"--request-rate must be above 0 requests per second, got {self.rate}")
        if not 0 < self.burstiness < float("inf"):
            raise ArgumentError(f"--burstiness must be a number above 0, got {self.burstiness}")
        if self.rate is None and self.burstiness != 1:
            raise ArgumentError("--burstiness is of arrivals, which --request-rate has: leave it out, or give a rate")

    @property
    def label(self) -> str:
        """Return the load's name for tables, which is unique in a run."""
        if self.rate is not None:
            evenness = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
            return f"{self.rate:g} requests/s{evenness}"
        return "1 user" if self.concurrency == 1 else f"{self.concurrency} users"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return when each of `count` users comes, in seconds; all at once where the concurrency is
        given.
        """
        if self.rate is None:
            return [0.0] * count
        chance, now, found = random.Random(seed), 0.0, list[float]()
        for _ in range(count):
            found.append(now)
            now += chance.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """A `LoadResult` holds the answers of one load on one server."""

    load: BenchLoad
    answers: Sequence[BenchAnswer]
    seconds: float
    """Seconds from the first request to the last answer."""
    speculation: SpeculationCounts | None
    """Counts from the server's metrics, else from its answers; None where neither has any."""


async def measure(
    server: Server, tasks: Sequence[Task], load: BenchLoad, asking: RequestOptions, tell: Tell = lambda done: None
) -> LoadResult:
    """Ask all `tasks`; `tell` is called with the number that are done."""
    arrivals = load.arrivals(len(tasks), seed=0)
    slots = asyncio.Semaphore(load.concurrency or len(tasks) or 1)
    before = await server.metrics()
    began = time.perf_counter()
    done = 0

    async def user(task: Task, arrival: float) -> list[BenchAnswer]:
        nonlocal done
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        async with slots:
            found = await converse(server, task, asking, began)
        done += 1
        tell(done)
        return found

    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user(task, at)) for task, at in zip(tasks, arrivals, strict=True)]
    answers = [answer for one in users for answer in one.result()]
    seconds = time.perf_counter() - began
    after = await server.metrics()
    counted = None if before is None or after is None else diff_counts(before, after)
    told = sum_counts(answer.speculation for answer in answers)
    return LoadResult(load=load, answers=answers, seconds=seconds, speculation=counted or told)


async def converse(server: Server, task: Task, asking: RequestOptions, began: float) -> list[BenchAnswer]:
    """Ask one user's questions, each behind the server's own answers; the first that fails is the
    last.
    """
    if not task.questions or asking.endpoint == "completions":
        return [await server.ask(task, asking, began)]
    history: list[Message] = []
    found: list[BenchAnswer] = []
    for question in task.questions:
        answer = await server.ask(task, asking, began, history, question)
        found.append(answer)
        if answer.error is not None:
            break
        history += [*question, dict[str, Any](role="assistant", content=answer.text)]
    return found
