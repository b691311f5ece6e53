"""``forerun demo``: both arms, honest figures, the right exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Ran
from forerun.cli import demo, race
from forerun.sampling import Coins
from forerun.tree import TokenTree
from forerun.types import NodeLaws, Source, Verdict
from forerun.verify.argmax_walk import ArgmaxWalk

Forerun = Callable[..., Ran]


@pytest.fixture(autouse=True)
def short_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "PROMPT_CHARACTERS", 120)


def arguments(checkpoint: Path, draft: Path) -> list[object]:
    return ["demo", checkpoint, "--drafter", "draft_model", "--drafter-model", draft, "-k", 3, "-n", 16, "--repeats", 1]


def test_json(forerun: Forerun, checkpoint: Path, draft_checkpoint: Path) -> None:
    ran = forerun(*arguments(checkpoint, draft_checkpoint), "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and found["identical"] is True and found["drafter"] == "draft_model"
    assert found["speedup"] == pytest.approx(
        found["speculative_tokens_per_second"] / found["plain_tokens_per_second"], rel=1e-3
    )
    assert found["mean_acceptance_length"] > 1 and found["tokens"] == 16 and found["dtype"] == "float32"


def test_text(forerun: Forerun, checkpoint: Path, draft_checkpoint: Path) -> None:
    ran = forerun(*arguments(checkpoint, draft_checkpoint))
    assert ran.code == 0 and "\x1b" not in ran.out
    for words in ("plain", "speculative", "tokens/s", "speed-up", "identical: yes", "accepted draft"):
        assert words in ran.out, words


def test_a_wrong_token_is_seen(
    forerun: Forerun, checkpoint: Path, draft_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_in(self: ArgmaxWalk, tree: TokenTree, target: NodeLaws, coins: Coins) -> Verdict:
        kept = tuple(range(1, tree.size + 1))
        return Verdict(path=kept, next_token=target.argmax(tree.size), kind=Source.BONUS if kept else Source.TARGET)

    monkeypatch.setattr(ArgmaxWalk, "verify", all_in)
    ran = forerun(*arguments(checkpoint, draft_checkpoint), "--drafter-option", "temperature=1.0", "--json")
    found = json.loads(ran.out)
    assert ran.code == 1 and found["identical"] is False and found["numeric_tie"] is False
    assert found["first_difference"] >= 0


def test_repetition_counts_runs_that_came_before() -> None:
    assert race.repetition(list(range(40))) == 0.0
    assert race.repetition([7] * 40) == pytest.approx(32 / 33)
    assert race.repetition([1, 2, 3]) == 0.0
