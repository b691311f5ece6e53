"""What is wrong for all to see is said within the first second: before torch and transformers are imported."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys

import pytest

from forerun.cli import VERBS
from forerun.drafters import DRAFTERS, declared_options, drafter_class

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
    "an unknown command": ("generat", "generat"),
    "an unknown option": ("generate demo --bogus", "--bogus"),
    "no number": ("generate demo -p x -n many", "many"),
    "no model": ("generate", "MODEL"),
    "an option misspelt": ("generate demo --temprature 1", "--temperature"),
    "no prompt": ("generate demo -p ''", "empty"),
    "an unknown drafter": ("generate demo -p x --drafter ngrm", "Did you mean 'ngram'"),
    "no draft": ("generate demo -p x --drafter ngram -k 0", "num_speculative_tokens"),
    "too long a draft": ("generate demo -p x --drafter ngram -k 900", "from 1 to 128"),
    "an unknown rule": ("generate demo -p x --drafter ngram --rule walk", "walk"),
    "a draft of nobody": ("generate demo -p x -k 3", "--drafter"),
    "a configuration that is no JSON": ("generate demo -p x --speculative-config '{method: ngram}'", "not JSON"),
    "a configuration that is a list": ("generate demo -p x --speculative-config '[1]'", "JSON object"),
    "an option without a value": ("generate demo -p x --drafter ngram --drafter-option size", "key=value"),
    "no folder": ("generate /nowhere/model -p x", "no directory /nowhere/model"),
    "no GGUF file": ("generate /nowhere/model.gguf -p x", "no file /nowhere/model.gguf"),
    "a folder without a model": ("generate / -p x", "no config.json"),
    "no dtype": ("generate demo -p x --dtype float8", "float8"),
    "no context": ("generate demo -p x --max-model-len 0", "at least 2"),
    "no device": ("generate demo -p x --device gpu", "'gpu' is no device"),
    "no device to serve on": ("serve demo --device cuda0", "'cuda0' is no device"),
    "an unknown option of a drafter": ("generate demo -p x --drafter ngram --drafter-option min_hit=2", "'min_hits'"),
    "a drafter without its model": ("generate demo -p x --drafter draft_model", "--drafter-model"),
    "a head that is not named": ("generate demo -p x --drafter medusa", "medusa needs a head"),
    "a draft model that is nowhere": (
        "generate demo -p x --drafter draft_model --drafter-model /nowhere/draft",
        "no directory /nowhere/draft",
    ),
    "a member whose head is nowhere": (
        "generate demo -p x --speculative-config "
        """'{"method": "merge", "drafters": ["ngram", {"method": "eagle3", "model": "/nowhere/head"}]}'""",
        "no directory /nowhere/head",
    ),
    "no answer": ("generate demo -p x -n 0", "Must be >= 1"),
    "no answer in the demo": ("demo -n 0", "Must be >= 1"),
    "a word too many": ("generate demo 'why?' -p x", "got 'why?'; give the prompt with --prompt"),
    "no such model on the hub": ("generate no/such-model -p x", "no directory no/such-model"),
    "a name misspelt": ("generate smolm2 -p x", "Did you mean 'smollm2'"),
    "a temperature below zero": ("generate demo -p x -t -1", "temperature"),
    "a chat without a model": ("chat /nowhere/model", "no directory"),
    "a server without rows": ("serve demo --max-num-seqs 0", "at least 1"),
    "a server without a model": ("serve /nowhere/model", "no directory"),
    "a server's unknown drafter": ("serve demo --drafter ngrm", "Did you mean 'ngram'"),
    "a proof without a model": ("certify /nowhere/model --drafter ngram", "no directory"),
    "nobody who asks": ("bench --server http://127.0.0.1:9 --concurrency 0", "at least 1"),
    "no acceptance rate": ("plan --alpha 2 -k 5", "in 0..1"),
}


UNLOADED = [
    *(["--help"], ["--version"], ["drafters"], ["heads"]),
    *([verb, "--help"] for verb in VERBS),
    *(["data", verb, "--help"] for verb in ("prepare", "regenerate")),
    ["plan", "--text", "code", "--params", "8e9", "--device", "h100", "--json"],
]


@pytest.fixture(scope="module")
def tried() -> list[tuple[int, list[str], str]]:
    """Of each command in one process: its exit code, which of `HEAVY` are imported by then, and what was written."""
    words = [shlex.split(arguments) for arguments, _ in REFUSED.values()] + UNLOADED
    command = [sys.executable, "-c", TRIED, json.dumps(words), json.dumps(HEAVY)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, env=offline)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_wrong_is_said_at_once(tried: list[tuple[int, list[str], str]]) -> None:
    for (case, (_, expected)), (code, imported, said) in zip(REFUSED.items(), tried, strict=False):
        assert (code, imported) == (2, []), (case, said)
        assert said.startswith("error: ") and expected in said and "Traceback" not in said, (case, said)


def test_options_read_in_the_source_are_those_of_the_class() -> None:
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    for name in DRAFTERS:
        fields = dataclasses.fields(drafter_class(name).Config)
        needed = {field.name: (field.default, field.default_factory) == unset for field in fields}
        assert list(declared_options(name).items()) == list(needed.items()), name


def test_what_needs_no_model_imports_none_of_its_libraries(tried: list[tuple[int, list[str], str]]) -> None:
    for arguments, (code, imported, said) in zip(UNLOADED, tried[len(REFUSED) :], strict=True):
        assert (code, imported) == (0, []), (arguments, said)
        assert arguments[-1:] != ["--help"] or " ".join(["forerun", *arguments[:-1]]) in said
        assert arguments != ["--help"] or all(verb in said for verb in VERBS)
