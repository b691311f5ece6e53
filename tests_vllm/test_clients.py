"""``vllm bench serve`` measures forerun's server, and counts the drafts that the server counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from forerun.shipped import FOLDER
from serve.conftest import NAME, counters, serving

BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``: the wheel for CPUs has another name than its own command looks for."""
EAGLE3 = {"method": "eagle3", "model": str(FOLDER / "eagle3"), "num_speculative_tokens": 3, "adaptive": False}


def test_vllms_client_counts_what_the_server_counts(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = str(request.config.getoption("--vllm"))
    with serving(FOLDER / "target", speculative=EAGLE3) as live:
        words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--base-url", live.url]
        words += ["--model", NAME, "--tokenizer", str(FOLDER / "target"), "--dataset-name", "random"]
        words += ["--num-prompts", "3", "--random-input-len", "32", "--random-output-len", "24", "--temperature", "0"]
        words += ["--max-concurrency", "2", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r"]
        own = {"HF_HUB_OFFLINE": "1", **os.environ}
        ran = subprocess.run(
            [python, "-c", BENCH, *words], capture_output=True, text=True, timeout=300, env=own, check=False
        )
        counted = counters(live)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "r").read_text())
    assert found["completed"] == 3 and found["total_output_tokens"] == 3 * 24
    # Its own first request, which it does not count, is the server's, too.
    drafts = counted["vllm:spec_decode_num_drafts_total{}"]
    assert 0 < found["spec_decode_num_drafts"] <= drafts
    assert 1 <= found["spec_decode_acceptance_length"] <= 4
    assert len(found["spec_decode_per_position_acceptance_rates"]) == 3
