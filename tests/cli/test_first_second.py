"""What is wrong for all to see is said within the first second: before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forerun.cli import VERBS

HEAVY = ("torch", "transformers", "numba", "fastapi")
TRIED = """
import contextlib, io, json, sys
from forerun.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(said := io.StringIO()), contextlib.redirect_stderr(said):
        code = main(words)
    imported = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
    print(json.dumps([code, imported, said.getvalue()]))
"""
REFUSED = {
    "an unknown command": (["generat"], "generat"),
    "an unknown option": (["generate", "demo", "--bogus"], "--bogus"),
    "no number": (["generate", "demo", "-p", "x", "-n", "many"], "many"),
    "no prompt": (["generate", "demo", "-p", ""], "empty"),
    "an unknown drafter": (["generate", "demo", "-p", "x", "--drafter", "ngrm"], "Did you mean 'ngram'"),
    "too long a draft": (["generate", "demo", "-p", "x", "--drafter", "ngram", "-k", "900"], "from 1 to 128"),
    "an unknown rule": (["generate", "demo", "-p", "x", "--drafter", "ngram", "--rule", "walk"], "walk"),
    "no folder": (["generate", "/nowhere/model", "-p", "x"], "no directory /nowhere/model"),
    "no GGUF file": (["generate", "/nowhere/model.gguf", "-p", "x"], "no file /nowhere/model.gguf"),
    "a folder without a model": (["generate", "/", "-p", "x"], "no config.json"),
    "no dtype": (["generate", "demo", "-p", "x", "--dtype", "float8"], "float8"),
    "no context": (["generate", "demo", "-p", "x", "--max-model-len", "0"], "at least 2"),
    "a temperature below zero": (["generate", "demo", "-p", "x", "-t", "-1"], "temperature"),
    "a chat without a model": (["chat", "/nowhere/model"], "no directory"),
    "a server without rows": (["serve", "demo", "--max-num-seqs", "0"], "at least 1"),
    "a server without a model": (["serve", "/nowhere/model"], "no directory"),
    "a server's unknown drafter": (["serve", "demo", "--drafter", "ngrm"], "Did you mean 'ngram'"),
    "a proof without a model": (["certify", "/nowhere/model", "--drafter", "ngram"], "no directory"),
    "nobody who asks": (["bench", "--server", "http://127.0.0.1:9", "--concurrency", "0"], "at least 1"),
    "no acceptance rate": (["plan", "--alpha", "2", "-k", "5"], "in 0..1"),
}


UNLOADED = [["--help"], ["--version"], ["drafters"], *([verb, "--help"] for verb in VERBS)]


@pytest.fixture(scope="module")
def tried() -> list[tuple[int, list[str], str]]:
    """Of each command in one process: its exit code, which of `HEAVY` are imported by then, and what was written."""
    words = [arguments for arguments, _ in REFUSED.values()] + UNLOADED
    command = [sys.executable, "-c", TRIED, json.dumps(words), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_wrong_is_said_at_once(tried: list[tuple[int, list[str], str]]) -> None:
    for (case, (_, expected)), (code, imported, said) in zip(REFUSED.items(), tried, strict=False):
        assert (code, imported) == (2, []), (case, said)
        assert expected in said, case


def test_what_needs_no_model_imports_none_of_its_libraries(tried: list[tuple[int, list[str], str]]) -> None:
    for arguments, (code, imported, said) in zip(UNLOADED, tried[len(REFUSED) :], strict=True):
        assert (code, imported) == (0, []), (arguments, said)
