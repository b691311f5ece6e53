"""``forerun datastore``: figures on stdout, one JSON object if asked for, one clear error for bad input."""

import json
from pathlib import Path

import pytest

from cli.conftest import Forerun
from forerun.drafters.lookup.rest import Datastore


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "the cat sat on the mat"}) + '\n{"broken\n')
    return path


def test_build_writes_a_datastore_that_generate_takes_for_this_target_alone(
    forerun: Forerun, checkpoint: Path, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "store"
    ran = forerun("datastore", "build", corpus, "--target", checkpoint, "--output", output, "--skip-bad", "--json")
    said = json.loads(ran.out)
    store = Datastore.open(output)
    assert ran.code == 0 and "line 2" in ran.err
    assert (said["documents"], said["tokens"], said["skipped"]) == (1, store.manifest.tokens, 1)
    assert said["tokenizer_sha256"] == store.manifest.tokenizer.vocabulary and said["sources"] == 1
    options = ["--drafter", "rest", "--drafter-option", f"datastore={output}", "-n", "4", "-t", "0", "--json"]
    assert forerun("generate", checkpoint, "--prompt", "the cat sat", *options).code == 0
    refused = forerun("generate", "demo", "--prompt", "import os", *options)
    assert refused.code == 2 and "built with the tokenizer of" in refused.err and refused.out == ""


def test_info_says_what_build_said(forerun: Forerun, checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "store"
    built = forerun("datastore", "build", corpus, "--tokenizer", checkpoint, "--output", output, "--skip-bad")
    told = forerun("datastore", "info", output, "--verify")
    assert built.code == told.code == 0 and built.out.startswith(told.out) and "1 documents" in told.out
    as_json = json.loads(forerun("datastore", "info", output, "--json").out)
    assert as_json["places"] == as_json["tokens"] - 1
