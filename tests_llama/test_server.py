"""``llama-server`` as `forerun deploy` starts it, and as `forerun bench` measures it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from forerun.cli import main as forerun
from forerun.deploy.trials.try_llama_cpp import convert_to_gguf, find_server, run_server
from tests_llama.conftest import DFLASH, TARGET, head_of

K = DFLASH.k
DRAFTERS = {
    "ngram": [],
    "draft_model": ["--drafter-model", "draft.gguf"],
    "eagle3": ["--drafter-model", "eagle3.gguf"],
    "dspark": ["--drafter-model", "dspark.gguf"],
    "mtp": [],
}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_llama_server_knows_every_option_that_deploy_writes(
    drafter: str, sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(find_server(sources).parent))
    assert forerun(["deploy", "llamacpp", "m.gguf", "--drafter", drafter, *DRAFTERS[drafter]]) == 0
    assert "llama-server -m m.gguf" in capsys.readouterr().out


def test_a_deployed_head_serves_and_is_measured(
    work: Path, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python, server = Path(sys.executable), find_server(sources)
    target = convert_to_gguf(sources, python, TARGET, tmp_path / "target.gguf", dtype="float32")
    head = head_of(DFLASH, work)
    file = convert_to_gguf(sources, python, head, tmp_path / "head.gguf", dtype="float32", target=str(TARGET))
    monkeypatch.setenv("PATH", str(server.parent))
    capsys.readouterr()
    asked = ["deploy", "llamacpp", str(target), "--drafter", "dflash", "--drafter-model", str(file), "-k", str(K)]
    assert forerun([*asked, "--json"]) == 0
    (command,) = json.loads(capsys.readouterr().out)["commands"]
    words = command["words"][1:]
    at = words.index("--port")
    del words[at : at + 2]
    with run_server(server, [*words, "-c", "4096", "-np", "2"], tmp_path / "server.log") as address:
        measured = ["bench", "--server", address, "--num-prompts", "4", "--max-tokens", "24"]
        assert forerun([*measured, "-t", "0", "--concurrency", "1", "--json"]) == 0
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load["completed"] == 4 and load["failed"] == 0
    assert load["spec_decode_source"] == "the server's llamacpp:spec_decode counters"
    rates = load["spec_decode_per_position_acceptance_rates"]
    assert len(rates) == K and rates == sorted(rates, reverse=True)
    assert load["spec_decode_acceptance_length"] == pytest.approx(1 + sum(rates), abs=1e-3)
    assert load["spec_decode_num_drafts"] * K >= load["spec_decode_draft_tokens"] > 0
