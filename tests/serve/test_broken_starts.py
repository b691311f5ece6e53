"""A start that fails ends the command: an exit code that is not 0 and one clear message, within seconds."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from conftest import loggers_restored
from forerun.cli import main
from serve.broken_starts import SECONDS, STARTS, Scene, run_one, taken

UNEXPECTED = {"-1 layers"}
"""What breaks inside of transformers: its traceback is in the log."""


@pytest.fixture
def scene(tmp_path: Path, checkpoint: Path, draft_checkpoint: Path) -> Scene:
    return Scene(folder=tmp_path, model=checkpoint, draft=draft_checkpoint)


def started(words: list[str]) -> int:
    """Exit code of ``forerun serve``; in a thread, for a server that came up would never end."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(main(["serve", *words])), daemon=True)
    with loggers_restored():
        thread.start()
        thread.join(SECONDS)
    assert codes, "the server runs"
    return codes[0]


@pytest.mark.parametrize("name", STARTS)
def test_the_command_ends_with_a_message(
    name: str, scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    words, expected = STARTS[name]
    with taken(words(scene)) as command:
        code = started(command)
    check(name, code, capsys.readouterr().err, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_and_so_does_the_process(name: str, scene: Scene) -> None:
    code, _, written = run_one(name, scene)
    check(name, code, written, STARTS[name][1])


def check(name: str, code: int | None, written: str, expected: str) -> None:
    """Of what a start came to."""
    assert code == (1 if name in UNEXPECTED else 2), written
    assert expected in written
    assert ("Traceback" in written) == (name in UNEXPECTED)
    errors = [line for line in written.splitlines() if " ERROR " in line or line.startswith("error: ")]
    assert len(errors) == 1 and len(written) < 8000, written


def test_a_long_exception_is_cut(
    scene: Scene, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says, and from however deep it comes."""

    def deep(depth: int) -> Any:
        if depth:
            return deep(depth - 1)
        raise RuntimeError("first " + "x" * 100_000 + " last")

    monkeypatch.setattr("forerun.cli.serve._load", lambda *_: deep(200))
    assert started([str(scene.model), "--port", "0"]) == 1
    written = capsys.readouterr().err
    assert written.count("Traceback") == 1 and "characters left out" in written and " last" in written
    assert len(written) < 6000
