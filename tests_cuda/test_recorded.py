"""CUDA graphs: passes are recorded and replayed, change nothing, and survive other threads."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from place import DEVICE, DRAFT, EAGLE3, TREE, differences, given, greedy, no_recording_failed, shipped, tokens_of, wait

from forerun.devices import attention_kernels
from forerun.model import recordings
from forerun.model.recordings import Recordings
from simulated.steps import runners

pytestmark = pytest.mark.cuda_alone
LENGTHS = (30, 4, 120, 60, 9)
PARAMS = [greedy(count) for count in (40, 8, 24, 60, 30)]


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded from now on."""
    monkeypatch.setattr(Recordings, "on", classmethod(lambda cls, device: cls(None)))


@pytest.mark.parametrize("config", [None, EAGLE3, TREE, DRAFT], ids=["plain", "eagle3", "eagle3-tree", "draft_model"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_passes_are_recorded_and_replays_change_nothing(
    config: Any, dtype: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; in bfloat16 a pass that was padded to another shape may round otherwise."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(recordings, "LEAST_WIDTH", 64)
    with no_recording_failed(caplog):
        llm = shipped(config, dtype=dtype)
        began = time.perf_counter()
        first = tokens_of(llm.generate(given(LENGTHS), PARAMS))
        middle = time.perf_counter()
        kept, forwards = len(llm.target.recordings), list[int]()
        llm.target._base.register_forward_pre_hook(lambda *_: forwards.append(1))
        again = tokens_of(llm.generate(given(LENGTHS), PARAMS, cache_salt="again"))
        wait()
        ended = time.perf_counter()
        assert llm.target.recordings.active and kept > 2
        heads = [len(runner.recordings) for runner in runners(llm)]
        assert all(heads) and all(runner.recordings.active for runner in runners(llm))
    without(monkeypatch)
    bare = shipped(config, dtype=dtype)
    assert not bare.target.recordings.active
    bare.generate(given((5,)), greedy(4))
    start = time.perf_counter()
    expected = tokens_of(bare.generate(given(LENGTHS), PARAMS))
    print(  # noqa: T201
        f"{dtype}: {kept} recordings of the target, {heads} of heads, {len(forwards)} passes not replayed; "
        f"first {middle - began:.2f} s, again {ended - middle:.2f} s, unrecorded {time.perf_counter() - start:.2f} s"
    )
    if dtype == "float32":
        assert not differences(first, expected)
    assert len(forwards) <= 3 * len(LENGTHS) + 6, "prompts run as they come, other passes are replayed"
    assert dtype != "float32" or not differences(again, expected)


def test_the_one_used_least_lately_goes_and_its_memory_is_no_others() -> None:
    """More keys than are kept, of one pool, called in an order that makes every result another's neighbour."""
    kept = Recordings.on(torch.device(DEVICE))
    weights = {size: torch.randn(size, size, device=DEVICE) for size in range(1, 90)}

    def work(size: int) -> Any:
        return lambda inputs: torch.softmax(inputs @ weights[size], -1).cumsum(-1) + inputs

    with torch.inference_mode():
        for turn in range(2):
            for size in [*range(1, 90), *range(80, 20, -7), 3, 88]:
                inputs = torch.randn(4, size, device=DEVICE) * (turn + 1)
                found = kept.run(size, work(size), inputs)
                torch.testing.assert_close(found, work(size)(inputs), msg=f"size {size}, turn {turn}")
    assert kept.active and len(kept) == recordings._MOST


def test_few_recordings_are_enough(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Of which some are always being dropped and made anew."""
    monkeypatch.setattr(recordings, "_MOST", 2)
    monkeypatch.setattr(recordings, "LEAST_WIDTH", 32)
    with no_recording_failed(caplog):
        llm = shipped(EAGLE3)
        found = tokens_of(llm.generate(given(LENGTHS), PARAMS))
        assert len(llm.target.recordings) == 2
    without(monkeypatch)
    assert not differences(found, tokens_of(shipped().generate(given(LENGTHS), PARAMS)))


def test_three_engines_record_at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each in a thread of its own, with many widths and batches, so that both record all the time."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(recordings, "LEAST_WIDTH", 16)
    engines, barrier = [shipped(EAGLE3), shipped(DRAFT), shipped(TREE)], threading.Barrier(3, timeout=60)

    def answer(llm: Any) -> list[list[list[int]]]:
        barrier.wait()
        return [tokens_of(llm.generate(given(LENGTHS), PARAMS, cache_salt=str(turn))) for turn in range(2)]

    with no_recording_failed(caplog), ThreadPoolExecutor(3) as threads:
        found = list(threads.map(answer, engines))
        assert all(llm.target.recordings.active for llm in engines)
    without(monkeypatch)
    expected = tokens_of(shipped().generate(given(LENGTHS), PARAMS))
    for turns in found:
        for texts in turns:
            assert not differences(texts, expected)


def test_an_engine_that_is_gone_leaves_little_memory() -> None:
    held = []
    for _ in range(4):
        llm = shipped(EAGLE3)
        llm.generate(given((30, 60)), greedy(20))
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated() / 2**20, torch.cuda.memory_reserved() / 2**20))
    print("MiB allocated and reserved after each engine:", [(round(a, 1), round(b, 1)) for a, b in held])  # noqa: T201
    assert held[-1][0] - held[1][0] < 8 and held[-1][1] - held[1][1] < 64


FAILING = """
import logging, torch
from forerun.model.recordings import Recordings
logging.basicConfig(level=logging.WARNING)
kept, stream = Recordings.on(torch.device(DEVICE)), torch.cuda.current_stream()
inputs = torch.arange(6.0, device=DEVICE)
found = kept.run("reads", lambda given: given * given.sum().item(), inputs)
assert found.tolist() == [0, 15, 30, 45, 60, 75], found
assert not kept.active and torch.cuda.current_stream() == stream
print("SAID: the text goes on")
other = Recordings.on(torch.device(DEVICE))
print("SAID:", other.run("sum", lambda given: given + 1, inputs).tolist(), "others still record:", other.active)
torch.randn(3, device=DEVICE)
print("SAID: random numbers are drawn")
"""


def test_where_recording_fails_work_goes_on() -> None:
    """In a process of its own: what torch keeps of a recording that failed would be there in other tests."""
    command = [sys.executable, "-c", FAILING.replace("DEVICE", repr(DEVICE))]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    print(ran.stdout, ran.stderr[-3000:])  # noqa: T201
    assert "SAID: the text goes on" in ran.stdout and "recording on the device failed" in ran.stderr, ran.stderr
    assert "SAID: random numbers are drawn" in ran.stdout and "others still record: True" in ran.stdout, ran.stderr


def test_kernels_are_as_before_when_threads_have_left_attention() -> None:
    before, barrier = torch.backends.cuda.cudnn_sdp_enabled(), threading.Barrier(4, timeout=20)
    inside = list[bool]()

    def attend(_: int) -> None:
        for _ in range(200):
            with attention_kernels(torch.device(DEVICE)):
                inside.append(torch.backends.cuda.cudnn_sdp_enabled())
        barrier.wait()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(attend, range(4)))
    assert torch.backends.cuda.cudnn_sdp_enabled() == before and not any(inside)
