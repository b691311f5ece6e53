"""Every registered drafter on the tiny target, in four settings, and what is compared between devices."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from contract.harness import PROMPTS, Variant, as_prompts, eagle_head, model, variants
from drafters.tied import SPEED, tied
from forerun import LLM, SamplingParams
from forerun.control.measuring import load_or_measure
from forerun.drafters.kinds import KINDS

Move = Callable[[nn.Module], nn.Module]
"""Makes a copy of a module on another device."""
LENGTH = 7
SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=LENGTH),
    "top-p": SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=LENGTH),
    "penalties": SamplingParams(
        **{"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.3},
        **{"logit_bias": {3: 1.0}, "seed": 4, "max_tokens": LENGTH},
    ),
    "logprobs": SamplingParams(
        **{"temperature": 0.0, "logprobs": 3, "logprobs_mode": "processed_logprobs", "frequency_penalty": 0.3},
        **{"prompt_logprobs": 2, "max_tokens": LENGTH},
    ),
}
AUTO = Variant("auto", options={"model": eagle_head()})
EVERY: list[Variant | None] = [None, *variants(), SPEED, AUTO]
OF_HEADS = [one for one in EVERY if one is not None and one.method in KINDS and KINDS[one.method].trains == "head"]


@pytest.fixture
def quickly_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes cost, which `auto` asks for, is measured in no time and kept nowhere."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setitem(load_or_measure.__kwdefaults__, "seconds", 0.1)
    monkeypatch.setitem(load_or_measure.__kwdefaults__, "repeats", 1)


class Near(tuple[float, ...]):
    """Numbers that are equal but for rounding."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Near) and list(self) == pytest.approx(list(other), abs=1e-5)

    __hash__ = tuple.__hash__


@dataclass(frozen=True)
class Answer:
    """What is compared between devices."""

    token_ids: list[int]
    ranks: list[Any]
    """Of the likeliest tokens at each place."""
    logprobs: Near
    """The same; but for rounding, since a pass may be padded to another size."""
    drafted: int
    accepted: int
    drafter_errors: int


def on_device(value: Any, move: Move) -> Any:
    """A drafter's options with the models among them on the device."""
    if isinstance(value, nn.Module):
        return move(value)
    if isinstance(value, Mapping):
        return {name: on_device(inner, move) for name, inner in value.items()}
    return [on_device(inner, move) for inner in value] if isinstance(value, list) else value


def answers(
    variant: Variant | None, params: SamplingParams, *, move: Move | None = None, device: str = "cpu"
) -> list[Answer]:
    """What the tiny target answers to the suite's prompts, three at once, on the CPU or where `move` puts models, which
    is a `device` of that type."""
    config = None if variant is None else variant.config()
    target: Any = tied() if variant is SPEED else model()
    if move is not None:
        target, config = move(target), on_device(config, move)
    llm = LLM(target, tokenizer=False, speculative_config=config, max_num_seqs=3, max_model_len=64, self_check=False)
    assert llm.target.device.type == device
    with llm.engine.drafting.free_of_charge() if variant is AUTO else nullcontext():
        outputs = [output.outputs[0] for output in llm.generate(as_prompts(PROMPTS[:3]), params)]
    return [
        Answer(
            token_ids=output.token_ids,
            ranks=[{t: one.rank for t, one in (token.top_logprobs or {}).items()} for token in output.tokens],
            logprobs=Near(one.logprob for token in output.tokens for one in (token.top_logprobs or {}).values()),
            drafted=output.speculation.num_draft_tokens,
            accepted=output.speculation.num_accepted_draft_tokens,
            drafter_errors=output.speculation.drafter_errors,
        )
        for output in outputs
    ]


def drafters(llm: LLM) -> list[Any]:
    """Those that are in use, taken out of what guards them."""
    found = []
    for active in llm.engine.drafting._active.values():
        drafter = active.drafter
        while hasattr(drafter, "drafter"):
            drafter = drafter.drafter
        found.append(drafter)
    return found


def runners(llm: LLM) -> list[Any]:
    """What runs the heads that draft."""
    return [drafter.runner for drafter in drafters(llm) if hasattr(drafter, "runner")]


def kept(variant: Variant, move: Move) -> list[Tensor]:
    """On the CPU, what the runner of a head keeps of three texts in their midst: keys and values, and the last
    features."""
    llm = LLM(
        move(model()),
        **{"tokenizer": False, "speculative_config": {"adaptive": False, **on_device(variant.config(), move)}},
        **{"max_num_seqs": 3, "max_model_len": 64, "self_check": False},
    )
    for prompt in as_prompts(PROMPTS[:3]):
        llm.submit(prompt, SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True))
    for _ in range(8):
        llm.engine.step()
    [runner] = runners(llm)
    cache = getattr(runner, "_cache", None)
    places = [(layer, row, runner.lengths[row]) for layer in (cache._stores if cache else ()) for row in range(3)]
    return [*(part.cpu() for place in places for part in cache.read(*place)), runner._features.cpu()]
