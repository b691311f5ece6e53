"""The engine tests' tiny checkpoints, and the command line as a function."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.conftest import checkpoint, draft_checkpoint
from forerun.cli import main

__all__ = ["checkpoint", "draft_checkpoint", "forerun"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One call of the command."""

    code: int
    out: str
    err: str


Forerun = Callable[..., Ran]


@pytest.fixture
def forerun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Forerun:
    """Runs ``forerun ARGUMENTS`` in this process, as if both streams were piped."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code=code, out=captured.out, err=captured.err)

    return run
