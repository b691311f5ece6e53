"""`forerun bench` on our own server: what it counts is what the server counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli import main
from serve.conftest import counters, serving

ENTRIES = [
    {"turns": ["x y x y x", "y x"], "category": "turns"},
    {"text": "a b a b a b", "category": "text"},
    {"prompt": "b a b a", "category": "prompt"},
]


def test_a_measurement_says_what_the_server_counted(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, ENTRIES)))
    drafter = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    with serving(checkpoint, speculative=drafter, api_keys=("secret",)) as live:
        words = ["bench", "--server", live.url, "--workload", str(tmp_path / "asked.jsonl"), "--concurrency", "2"]
        assert main([*words, "--api-key", "wrong"]) == 2
        assert "401" in capsys.readouterr().err
        words += ["--api-key", "secret", "-n", "24", "-t", "0", "--warmup", "0", "--extra-body", '{"ignore_eos": true}']
        assert main([*words, "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["loads"]
        counted = counters(live)
    assert (found["completed"], found["failed"], found["tokens_counted_by_server"]) == (4, 0, True)
    assert found["total_output_tokens"] == 4 * 24
    assert found["spec_decode_source"].startswith("the server's")
    drafts, accepted = found["spec_decode_num_drafts"], found["spec_decode_accepted_tokens"]
    assert drafts == counted["vllm:spec_decode_num_drafts_total{}"] > 0
    assert accepted == counted["vllm:spec_decode_num_accepted_tokens_total{}"]
    parts = found["categories"].values()
    assert sum(part["spec_decode_num_drafts"] for part in parts) == drafts, "each answer tells its own"
    assert sum(part["spec_decode_accepted_tokens"] for part in parts) == accepted
    positions = found["spec_decode_per_position_acceptance_rates"]
    assert sum(positions) == pytest.approx(accepted / drafts, abs=1e-3)
