"""The threads in which requests are prepared."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from forerun.engine.prompts import Lane, Lanes


@pytest.fixture
async def lanes() -> AsyncIterator[Lanes]:
    made = Lanes("test")
    yield made
    made.close()


@pytest.mark.parametrize("lane", [Lane.LARGE, Lane.GRAMMAR])
async def test_clients_take_turns(lanes: Lanes, lane: Lane) -> None:
    """However much one of them has sent before."""
    release, done = threading.Event(), list[str]()

    def work(name: str) -> None:
        release.wait(20)
        done.append(name)

    tasks = list[asyncio.Task[None]]()
    for name in (*["first"] * 20, *["second"] * 2, "third"):
        tasks.append(asyncio.create_task(lanes.run(lane, partial(work, name), client=name)))
        await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks)
    assert done[:5] == ["first", "second", "third", "first", "second"] and len(done) == 23


async def test_what_waits_for_its_turn_is_dropped_with_its_task(lanes: Lanes) -> None:
    release, done = threading.Event(), list[str]()

    def work(name: str) -> None:
        release.wait(20)
        done.append(name)

    sent = [("one", "runs"), ("one", "waits for its turn"), ("two", "in the line"), ("three", "last")]
    tasks = [asyncio.create_task(lanes.run(Lane.LARGE, partial(work, name), client=client)) for client, name in sent]
    await asyncio.sleep(0.05)
    for task in tasks[1:3]:
        task.cancel()
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["runs", "last"]


async def test_what_waits_for_its_turn_ends_with_the_lanes(lanes: Lanes) -> None:
    release = threading.Event()
    tasks = [asyncio.create_task(lanes.run(Lane.LARGE, partial(release.wait, 20), client="one")) for _ in range(3)]
    await asyncio.sleep(0.05)
    lanes.close()
    release.set()
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert first is True and all(isinstance(error, RuntimeError) for error in others)
