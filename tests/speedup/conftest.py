"""A tiny target with a chat template, prompts for it, and passes that take made-up times."""

import json
from pathlib import Path

import pytest

from cli.conftest import Forerun, forerun
from engine.conftest import _write
from forerun.control import measuring
from forerun.control.costs import DraftCost
from forerun.plan import measured

__all__ = ["Forerun", "forerun"]

THINGS = ("the cat", "the dog", "a mat")
QUESTIONS = [(kind, f"{kind} {thing}") for kind in ("draw", "tell") for thing in THINGS]


@pytest.fixture(scope="session")
def deep_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine tests' target with the layers that an EAGLE-3 head reads."""
    return _write(tmp_path_factory.mktemp("deep"), seed=0, layers=4)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Six prompts of two categories."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"category": kind, "prompt": text}) + "\n" for kind, text in QUESTIONS))
    return path


@pytest.fixture(autouse=True)
def made_up_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes and drafts need not be timed, and what they cost is not kept."""
    monkeypatch.setattr(measuring, "cache_root", lambda: tmp_path / "cache")
    monkeypatch.setattr(measuring, "_time", lambda target, rows, point: 0.010 + 0.0005 * point[1] * point[2])
    monkeypatch.setattr(measured, "measure_draft", lambda *_, **__: DraftCost(fixed_ms=0.1, level_ms=0.1))
