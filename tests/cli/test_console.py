"""Progress of long work, where stderr is no terminal."""

from __future__ import annotations

import time

import pytest

from forerun.cli import console


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_bar_is_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress_bar("answering", total=2_000, done=200) as update:
        for seconds in (0, 40, 30, 20, 50):
            clock[0] += seconds
            update(advance=300)
    lines = [line.partition(" after ")[0] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["answering: 1,100 of 2,000", "answering: 1,700 of 2,000"]


def test_a_spinner_is_a_line_a_minute(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with console.telling("certifying") as tell:
        tell("soon")
        clock[0] += 61
        tell("a rule")
        tell("another")
    assert capsys.readouterr().err.splitlines() == ["certifying: a rule"]
