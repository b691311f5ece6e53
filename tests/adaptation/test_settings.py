"""What may be asked for, what is refused and how, and the figures an operator sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import forerun
from forerun import AsyncLLM, SamplingParams
from forerun.cli.serve import AdaptOptions
from forerun.drafters import DRAFTERS, drafter_class
from forerun.drafters.base import Drafter
from forerun.drafters.heads.kinds import KINDS
from forerun.engine.adapting import AdaptConfig, adapt_config
from forerun.engine.config import SpeculativeConfig
from forerun.errors import ArgumentError
from forerun.serve.session import Session
from forerun.serve.settings import ServeSettings

__all__ = ["forerun"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "none is configured"),
        (
            {"method": "ngram"},
            "'ngram' has nothing that could be trained.* that can adapt: draft_model, eagle3",
        ),
        ({"method": "tli", "model": "x"}, "'tli' has nothing that could be trained"),
        ({"method": "auto"}, "give it one as its model"),
    ],
)
def test_drafters_that_cannot_learn_are_refused(config: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        adapt_config(True, SpeculativeConfig.parse(config))
    assert adapt_config(None, SpeculativeConfig.parse(config)) is None


def test_drafters_that_can_learn_are_taken() -> None:
    for config in [{"method": method, "model": "x"} for method in ("draft_model", "eagle3", "medusa", "auto")]:
        assert adapt_config(True, SpeculativeConfig.parse(config)) == AdaptConfig()


def test_the_registry_says_which_can_learn() -> None:
    able = {name for name, entry in DRAFTERS.items() if entry.adapts}
    assert able == {"draft_model", *(name for name, kind in KINDS.items() if kind.trains == "head")}
    assert all(drafter_class(name).trainable is not Drafter.trainable for name in able)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0}, "share must be above 0 and at most 1"),
        ({"share": 1.5}, "share must be above 0 and at most 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"memory_bytes": 10}, "memory_bytes must be at least"),
        ({"held_every": 1}, "held_every must be at least 2"),
        ({"accepted_share": 2}, "accepted_share must be from 0 to 1"),
        ({"shares": 0.1}, "no field 'shares'.*Did you mean 'share'"),
        ({"share": "much"}, "wrong type"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        AdaptConfig.parse(values)


def test_flags() -> None:
    drafter = {"method": "draft_model", "model": "x"}
    assert AdaptOptions().config(drafter) is None
    asked = AdaptOptions(adapt=True, adapt_share=0.2, adapt_dir=Path("kept")).config(drafter)
    assert asked == AdaptConfig(share=0.2, directory=Path("kept"))
    with pytest.raises(ArgumentError, match="add --adapt"):
        AdaptOptions(adapt_share=0.2).config(drafter)


def test_the_command_says_so_before_anything_is_loaded(forerun: Any) -> None:
    ran = forerun("serve", "demo", "--drafter", "ngram", "--adapt")
    assert ran.code == 2 and "'ngram' has nothing that could be trained" in ran.err


@pytest.mark.parametrize("keys", [[], ["--api-key", "a", "--api-key", "b"]])
def test_a_server_that_may_learn_from_nobody_does_not_start(forerun: Any, keys: list[str]) -> None:
    drafter = ["--drafter", "draft_model", "--drafter-model", "demo-draft"]
    ran = forerun("serve", "demo", *drafter, "--adapt", *keys)
    assert ran.code == 2 and "--adapt-api-key" in ran.err and "--share-unnamed" in ran.err


def test_metrics(checkpoint: Path, draft_checkpoint: Path) -> None:
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "adaptive": False}

    def load(**more: Any) -> AsyncLLM:
        return AsyncLLM(str(checkpoint), speculative_config=drafter, dtype="float32", max_model_len=200, **more)

    async def figures(**more: Any) -> dict[str, float]:
        session = Session(ServeSettings(model_names=("tiny",)), lambda: load(**more))
        assert "adaptation" not in session.metrics.text().decode()
        await session.start()
        await session.engine.generate(["the cat"], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        text = session.metrics.text().decode()
        await session.drain()
        lines = [line for line in text.splitlines() if line.startswith("forerun:adaptation_")]
        return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    assert asyncio.run(figures()) == {}
    found = asyncio.run(figures(adapt=True))
    assert found["forerun:adaptation_examples_total"] >= 64
    assert found["forerun:adaptation_examples_total"] > found["forerun:adaptation_rejected_examples_total"] > 0
    assert found["forerun:adaptation_running"] == 1 and found["forerun:adaptation_stored_bytes"] > 0
    assert {f"forerun:adaptation_{name}_total" for name in ("updates", "swaps", "discarded", "rollbacks")} <= set(found)
    assert 0 < found["forerun:adaptation_share"] <= 1 and found["forerun:adaptation_version"] == 0
