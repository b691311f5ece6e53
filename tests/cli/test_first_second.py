"""What is wrong for all to see is said within the first second: before torch and transformers are imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forerun.cli import VERBS

HEAVY = ("torch", "transformers", "numba", "fastapi")
TRIED = """
import json, sys
from forerun.cli import main
code = main(json.loads(sys.argv[1]))
print(json.dumps([code, [name for name in json.loads(sys.argv[2]) if name in sys.modules]]))
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


def tried(arguments: list[str]) -> tuple[int, list[str], str]:
    """The exit code, which of `HEAVY` were imported, and what was written."""
    command = [sys.executable, "-c", TRIED, json.dumps(arguments), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    *said, last = done.stdout.splitlines()
    code, imported = json.loads(last)
    return code, imported, "\n".join(said) + done.stderr


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_at_once(case: str) -> None:
    arguments, expected = REFUSED[case]
    code, imported, said = tried(arguments)
    assert (code, imported) == (2, []), said
    assert expected in said


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["drafters"], *([verb, "--help"] for verb in VERBS)])
def test_what_needs_no_model_imports_none_of_its_libraries(arguments: list[str]) -> None:
    code, imported, said = tried(arguments)
    assert (code, imported) == (0, []), said
