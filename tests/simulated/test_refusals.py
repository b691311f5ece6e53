"""What an accelerator or its libraries refuse: recordings, Triton, memory. The answer is right, and one line says why
it is slower; what does not fit is said before weights are read."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from contract.harness import PROMPTS, as_prompts, eagle_head, model
from forerun import LLM, SamplingParams
from forerun.errors import OutOfMemoryError
from forerun.model import kernels, memory, prepare
from forerun.model.recordings import Recordings, Work
from simulated.device import NAME, SimulatedDevice, moved

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True),
}


class Driver:
    """A driver that records so many times and replays so many times, and refuses what comes then."""

    def __init__(self, device: SimulatedDevice, records: int, replays: int) -> None:
        self.device, self.records, self.replays, self.refused = device, records, replays, 0

    def record(self, work: Work, inputs: tuple[Tensor, ...]) -> Work:
        if self.records == 0:
            self.refused += 1
            work(*inputs)  # As a capture that fails at its end: the work was done once
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.records -= 1
        replay = self.device.record(work, inputs)

        def replay_or_refuse(*given: Tensor) -> Any:
            if self.replays == 0:
                self.refused += 1
                raise RuntimeError("CUDA error: graph cannot be launched")
            self.replays -= 1
            return replay(*given)

        return replay_or_refuse


def answers(move: Callable[[Any], Any], params: SamplingParams) -> list[list[int]]:
    """Those of an engine with EAGLE-3 to two prompts at once, after it has answered one alone."""
    config = {"method": "eagle3", "model": move(eagle_head()), "adaptive": False, "num_speculative_tokens": 3}
    llm = LLM(move(model()), tokenizer=False, speculative_config=config, max_model_len=64, self_check=False)
    found = [*llm.generate(as_prompts(PROMPTS[:1]), params), *llm.generate(as_prompts(PROMPTS[:2]), params)]
    assert all(not answer.outputs[0].speculation.drafter_errors for answer in found)
    return [answer.outputs[0].token_ids for answer in found]


@cache
def on_the_cpu(setting: str) -> list[list[int]]:
    return answers(lambda module: module, PARAMS[setting])


@pytest.mark.parametrize(
    ("records", "replays", "setting"),
    [(0, 0, "greedy"), (3, 999, "sampled"), (999, 0, "sampled"), (999, 9, "greedy")],
)
def test_a_driver_that_refuses_a_graph_costs_speed_alone_and_is_named_once(
    records: int, replays: int, setting: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At the first recording, at a later one, at the first replay or in the midst of an answer."""
    with SimulatedDevice() as device:
        driver = Driver(device, records, replays)
        own = classmethod(lambda cls, place: cls(driver.record if place.type == NAME else None))
        monkeypatch.setattr(Recordings, "on", own)
        assert answers(moved, PARAMS[setting]) == on_the_cpu(setting)
    said = [record.message for record in caplog.records]
    assert driver.refused > 1, "the target's, the head's and the verdicts' recordings are refused one by one"
    assert len(said) == 1 and "work goes on without, which is slower: RuntimeError('CUDA error" in said[0]


@pytest.mark.parametrize(("found", "why"), [(False, "there is no Triton"), (True, "cannot load our kernels")])
def test_without_a_triton_that_serves_passes_run_in_torch(
    found: bool, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is too old has no `triton.jit` or lacks what our kernels import: here it is an empty module."""
    monkeypatch.setattr(kernels, "find_spec", lambda _name: found or None)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.delitem(sys.modules, "forerun.model.kernels.triton_ops", raising=False)
    kernels._triton.cache_clear()
    try:
        assert [kernels.fused(torch.device("cuda", 0)) for _ in range(3)] == [None] * 3
    finally:
        kernels._triton.cache_clear()
    assert len(caplog.records) == 1 and why in caplog.text and "run in torch, which is slower" in caplog.text


def test_too_small_a_device_says_what_fits_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model().save_pretrained(tmp_path)
    weights = sum(weight.nbytes for weight in model().parameters())
    free = 0.0
    monkeypatch.setattr(memory, "available_bytes", lambda _device: int(free))
    monkeypatch.setattr(prepare, "open_model", lambda *_args, **_named: pytest.fail("weights were read"))

    def said(**sizes: Any) -> str:
        with pytest.raises(OutOfMemoryError) as caught:
            LLM(str(tmp_path), tokenizer=False, device="cpu", dtype="float32", **sizes)
        return str(caught.value)

    free = 0.5 * weights
    assert "A model whose weights take" in said(max_num_seqs=1, max_model_len=64)
    free = 8 * weights
    text = said(max_num_seqs=4096, max_model_len=64)
    assert "GiB are needed on cpu" in text and "GiB are free" in text and "rows (max_num_seqs) to" in text
    free = memory.MemoryPlan(rows=1, slots=64, weights=weights, token=0, probs=0).total * 0.9
    text = said(max_num_seqs=1, max_model_len=16)
    assert "In bfloat16 (dtype='bfloat16')" in text and "which fit" in text
    free = 0.9 * weights
    with SimulatedDevice(), pytest.raises(OutOfMemoryError, match=r"are needed on sim:0.*max_num_seqs"):
        LLM(moved(model()), tokenizer=False, max_num_seqs=4096, max_model_len=64, self_check=False)
