"""What is collected: the right distributions at the right positions, answers held back whole, memory bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from adaptation.conftest import pieces
from contract.harness import PROMPTS, VARIANTS, Variant, as_prompts, llm
from forerun import LLM, SamplingParams
from forerun.engine.adapting import replay as module
from forerun.engine.adapting.drafter import AdaptedDrafter
from forerun.engine.adapting.learning import Throttle
from forerun.engine.adapting.replay import AnswerPiece, Collector, ReplayBuffer
from forerun.training.features.online import OnlineFeatures
from forerun.types import LAST_HIDDEN, Source


def collecting(variant: Variant, buffer: ReplayBuffer, **options: Any) -> tuple[LLM, Collector]:
    """An engine whose drafter's steps are noted; it learns nothing. A row's last answer is open until it is closed."""
    engine = llm(variant, rows=3)
    collector = Collector(
        buffer, **{"boundaries": frozenset({LAST_HIDDEN}), "context": False, "held_every": 3, **options}
    )
    throttle = Throttle(1.0, threading.Event())
    around: Callable[[Any], Any] = lambda drafter: AdaptedDrafter(drafter, collector, throttle)  # noqa: E731
    engine.engine.drafting.wrap(engine.engine.drafting.ensure(engine.speculative) or "", around)
    return engine, collector


def everything(buffer: ReplayBuffer) -> list[AnswerPiece]:
    return [*buffer.training(), *buffer.held(1000)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", ["draft_model chain", "draft_model tree", "eagle3 chain"])
def test_the_states_are_the_targets_and_every_answered_position_is_there(
    name: str, temperature: float, target: LlamaForCausalLM
) -> None:
    """Of a head those of its boundaries, context included."""
    method, label = name.split()
    variant = next(one for one in VARIANTS[method] if one.label == label)
    buffer, own = ReplayBuffer(2**22), frozenset({0, 1, 2}) if method == "eagle3" else frozenset[int]()
    params = [SamplingParams(temperature=temperature, top_k=0, max_tokens=30, seed=seed) for seed in range(5)]
    options = {"boundaries": own | {LAST_HIDDEN}, "context": bool(own)}
    engine, collector = collecting(variant, buffer, **options)
    outputs = engine.generate(as_prompts(PROMPTS), params, trace=True)
    collector.close(range(3))
    found = everything(buffer)
    for one in found:
        text = one.tokens.tolist()
        [wanted] = OnlineFeatures(target, sorted(own)).documents([text])
        assert set(one.states) == set(wanted) and one.temperature == temperature
        places = (np.flatnonzero(one.counted) - 1).tolist()
        assert places[-1] == len(text) - 2
        torch.testing.assert_close(one.states[LAST_HIDDEN][places], wanted[LAST_HIDDEN][places], atol=1e-4, rtol=1e-3)
        for boundary in own:
            torch.testing.assert_close(one.states[boundary], wanted[boundary][:-1], atol=1e-4, rtol=1e-3)
        assert all(len(states) == len(text) - 1 and not states.is_inference() for states in one.states.values())
    kinds = [trace.kind for output in outputs for trace in output.outputs[0].trace]
    assert buffer.rejected == sum(int(one.rejected.sum()) for one in found) == kinds.count(Source.RECOVERED) > 0
    # The first token of an answer comes before any drafter has spoken.
    assert buffer.positions == sum(one.positions for one in found) == sum(29 for _ in outputs)


def test_the_rejected_position_is_the_one_where_the_draft_was_wrong() -> None:
    buffer = ReplayBuffer(2**20)
    engine, collector = collecting(VARIANTS["draft_model"][0], buffer, held_every=2)
    [output] = engine.generate(as_prompts(PROMPTS[:1]), SamplingParams(temperature=0, max_tokens=20), trace=True)
    collector.close([0])
    [one] = everything(buffer)
    ends, expected = 0, []
    for trace in output.outputs[0].trace:
        expected += [False] * len(trace.path) + [trace.kind is Source.RECOVERED]
        ends += trace.emitted
    assert one.rejected[one.counted].tolist() == expected and ends == len(expected) == 19


def test_answers_are_held_back_whole_and_in_turn() -> None:
    buffer = ReplayBuffer(2**20)
    engine, collector = collecting(VARIANTS["draft_model"][0], buffer, held_every=3)
    for _ in range(3):  # one after the other: the first of three is held back, on all its pieces
        engine.generate(as_prompts(PROMPTS[:1]), SamplingParams(temperature=0, max_tokens=50))
    collector.close(range(3))
    assert [one.positions for one in buffer.held(9)] == [49]
    assert [one.positions for one in buffer.training()] == [49, 49]
    assert buffer.added == 2 and buffer.positions == 3 * 49


def test_long_answers_come_in_pieces_with_their_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.adapting.replay.PIECE", 8)
    monkeypatch.setattr("forerun.engine.adapting.replay.CONTEXT", 4)
    buffer = ReplayBuffer(2**20)
    engine, collector = collecting(VARIANTS["draft_model"][0], buffer, held_every=100)
    [output] = engine.generate(as_prompts(PROMPTS[:1]), SamplingParams(temperature=0, max_tokens=40))
    collector.close([0])
    text = PROMPTS[0] + output.outputs[0].token_ids
    at = len(PROMPTS[0])
    for one in buffer.held(100):
        size, before = one.positions, min(4, at)
        assert np.flatnonzero(one.counted).tolist() == list(range(before + 1, before + 1 + size))
        assert size < 12, "a step adds at most 4"
        assert one.tokens.tolist() == text[at - before : at + size + 1]
        at += size
    assert at == len(text) - 1


def test_memory_is_bounded_and_the_oldest_give_way(target: LlamaForCausalLM) -> None:
    made = pieces(target, 40) + [replace(one, held=True) for one in pieces(target, 40, seed=1)]
    limit = 16 * made[0].nbytes
    buffer = ReplayBuffer(limit)
    for one in made:
        buffer.add(one)
        assert buffer.nbytes <= limit
    assert [one.tokens.tolist() for one in buffer.training()] == [one.tokens.tolist() for one in made[26:40]]
    assert [one.tokens.tolist() for one in buffer.held(9)] == [one.tokens.tolist() for one in made[78:]]
    assert module.HELD_SHARE == 0.125


def test_collecting_that_fails_costs_no_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(2**20)
    engine, _ = collecting(VARIANTS["draft_model"][0], buffer)
    params = SamplingParams(temperature=0, max_tokens=20)
    [before] = engine.generate(as_prompts(PROMPTS[:1]), params)

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Collector, "observe", fails)
    [after] = engine.generate(as_prompts(PROMPTS[:1]), params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    assert after.outputs[0].speculation == before.outputs[0].speculation
