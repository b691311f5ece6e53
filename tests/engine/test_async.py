"""The same engine under asyncio."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.engine import async_llm
from forerun.engine.prompts import Lane, Lanes, PromptReader
from forerun.errors import EngineError, ForerunError, SlowReaderError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = ["the cat sat", "the dog and the dog", "mat", "on the log the cat"]


@pytest.fixture
async def llm(checkpoint: Path) -> AsyncIterator[AsyncLLM]:
    drafter = {"method": "ngram"}
    async with AsyncLLM(str(checkpoint), dtype="float32", speculative_config=drafter, max_num_seqs=2) as llm:
        yield llm


async def test_one_thread_loads_and_steps(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, OpenMP has more threads than there are cores, and a step on two cores took twice as long."""
    threads = set[str]()

    def noted(before: Any) -> Any:
        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            threads.add(threading.current_thread().name)
            return before(self, *arguments, **keywords)

        return call

    monkeypatch.setattr(torch.nn.Linear, "forward", noted(torch.nn.Linear.forward))
    monkeypatch.setattr(LLM, "__init__", noted(LLM.__init__))
    async with AsyncLLM(str(checkpoint), dtype="float32") as llm:
        await llm.generate(PROMPTS[0], GREEDY)
    assert len(threads) == 1


async def test_a_stream_and_leaving_it_early(llm: AsyncLLM) -> None:
    text = ""
    async for chunk in llm.stream(PROMPTS[0], GREEDY):
        text += chunk.text
    assert text == (await llm.generate(PROMPTS[0], GREEDY))[0].outputs[0].text
    stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=150, ignore_eos=True))
    async for _ in stream:
        break
    await stream.aclose()
    await llm.generate(PROMPTS[2], GREEDY)
    assert not llm.llm.engine.busy


async def test_a_cancelled_task_frees_its_row(llm: AsyncLLM) -> None:
    task = asyncio.create_task(llm.generate(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True)))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await llm.generate(PROMPTS[2], GREEDY)
    assert not llm.llm.engine.busy


STEPS: dict[str, type] = {"request": PromptReader, "queue": LLM}
"""Methods that a request goes through, and their classes."""


@pytest.mark.parametrize("step", STEPS)
async def test_a_task_cancelled_submitting_leaves_nothing(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    whole = getattr(STEPS[step], step)

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.1)
        return whole(*arguments, **keywords)

    monkeypatch.setattr(STEPS[step], step, slow)
    task = asyncio.create_task(llm.generate(PROMPTS[0], GREEDY))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.3)
    assert not llm.llm.engine.busy
    assert len(await llm.generate(PROMPTS[1], GREEDY)) == 1


async def test_time_counts_from_the_call(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from when others' large prompts and grammars have left time for this one."""
    request = PromptReader.request

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(0.2)
        return request(*arguments, **keywords)

    monkeypatch.setattr(PromptReader, "request", slow)
    [late] = await llm.generate(PROMPTS[0], GREEDY, timeout_s=0.1)
    assert late.outputs[0].finish_reason == "abort" and not late.outputs[0].token_ids
    [output] = await llm.generate(PROMPTS[0], GREEDY)
    assert output.time_to_first_token_s is not None and output.time_to_first_token_s >= 0.2


async def test_who_does_not_read_is_dropped(checkpoint: Path) -> None:
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        slow = llm.stream("the cat", params, max_unread=3)
        await anext(slow)
        [whole] = await llm.generate("the dog", params)
        assert len(whole.outputs[0].token_ids) == 60
        with pytest.raises(SlowReaderError, match="3 chunks"):
            async for _ in slow:
                pass
        assert not llm.llm.engine.busy and llm.llm.target.lengths == [0, 0]


async def test_who_keeps_up_with_many_answers_is_not_dropped(llm: AsyncLLM) -> None:
    """One step brings a chunk of each."""
    params = replace(GREEDY, n=4)
    chunks = [chunk async for chunk in llm.stream(PROMPTS[0], params, max_unread=1)]
    output = chunks[-1].output
    assert output is not None and [len(answer.token_ids) for answer in output.outputs] == [20] * 4


async def test_the_engine_does_not_run_ahead_of_a_loop_that_is_busy(llm: AsyncLLM) -> None:
    """Else a reader who takes every chunk at once would be cut off for those that pile up meanwhile."""
    text = ""
    async for chunk in llm.stream(PROMPTS[0], GREEDY, max_unread=1):
        text += chunk.text
        time.sleep(0.05)
    assert text == (await llm.generate(PROMPTS[0], GREEDY))[0].outputs[0].text


async def test_a_reader_takes_a_chunk_before_the_next_one_comes() -> None:
    """However long its delivery takes: else one who waits for nothing else would count as slow."""
    handover, loop, order = async_llm._Handover(), asyncio.get_running_loop(), list[str]()

    def deliver() -> None:
        time.sleep(0.1)
        loop.call_soon(order.append, "read")

    def step() -> None:
        for _ in range(3):
            handover.give(loop, deliver)
            handover.give(loop, partial(order.append, "next"))

    await asyncio.to_thread(step)
    await asyncio.sleep(0.1)
    assert order == ["read", "next"] * 3


def test_an_engine_outlives_the_loops_that_it_was_asked_from(checkpoint: Path) -> None:
    llm = AsyncLLM(str(checkpoint), dtype="float32")

    async def leave_early() -> None:
        async for _ in llm.stream(PROMPTS[0], SamplingParams(max_tokens=150, ignore_eos=True)):
            break

    for _ in range(3):
        asyncio.run(leave_early())
    answers = asyncio.run(asyncio.wait_for(llm.generate(PROMPTS[1], GREEDY), timeout=60))
    assert len(answers[0].outputs[0].token_ids) == 20
    asyncio.run(llm.close())


def test_several_loops_at_once(checkpoint: Path) -> None:
    """Also beside one that has stopped in the middle of an answer."""
    llm, stopped = AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=3), asyncio.new_event_loop()
    left = llm.stream(PROMPTS[0], SamplingParams(max_tokens=150, ignore_eos=True))
    stopped.run_until_complete(anext(left))

    def answers(prompt: str) -> list[list[int]]:
        async def ask() -> list[list[int]]:
            return [(await llm.generate(prompt, GREEDY))[0].outputs[0].token_ids for _ in range(4)]

        return asyncio.run(asyncio.wait_for(ask(), timeout=60))

    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        found = list(threads.map(answers, PROMPTS))
    alone = LLM(str(checkpoint), dtype="float32").generate(PROMPTS, GREEDY)
    assert found == [[output.outputs[0].token_ids] * 4 for output in alone]
    stopped.run_until_complete(left.aclose())
    stopped.run_until_complete(llm.close())
    stopped.close()


@pytest.mark.parametrize("step", [*STEPS, None])
async def test_a_closed_engine_says_so(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, step: str | None) -> None:
    """To whoever is being answered, waits to be, or asks afterwards."""
    llm = AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=2)
    if step is not None:
        whole = getattr(STEPS[step], step)
        monkeypatch.setattr(STEPS[step], step, lambda *given, **named: (time.sleep(0.2), whole(*given, **named))[1])
    long = SamplingParams(max_tokens=180, ignore_eos=True)
    tasks = [asyncio.create_task(llm.generate(prompt, long)) for prompt in PROMPTS]
    await asyncio.sleep(0.1)
    await llm.close()
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    late = (llm.generate(PROMPTS[0]), anext(llm.stream(PROMPTS[0])), asyncio.to_thread(llm.offer, {"method": "ngram"}))
    found += await asyncio.gather(*late, return_exceptions=True)
    assert [type(error) for error in found] == [EngineError] * 7 and issubclass(EngineError, ForerunError)
    assert all("the engine was closed" in str(error) for error in found)
    await llm.close()


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
