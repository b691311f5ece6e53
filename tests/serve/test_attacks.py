"""Beside every attack that we know, another user is served within a second, and memory comes back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "serving" / "soak.py"
MINUTES = 0.6
GROWTH = 0.15
"""Of memory. In so short a run the warm-up is a few seconds, and later allocations of a small process weigh more."""


@pytest.mark.slow
def test_nothing_leaks_sticks_or_is_miscounted(checkpoint: Path, tmp_path: Path) -> None:
    report, log = tmp_path / "report.json", tmp_path / "log.json"
    words = ["--model", checkpoint, "--drafter", "ngram", "--minutes", MINUTES, "--growth", GROWTH]
    command = [sys.executable, SOAK, *words, "--json", report, "--log", log]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(report.read_text())
    assert len(found["checks"]) == 11 and all(check["holds"] for check in found["checks"].values())
    assert found["requests"] > 100 and found["answers"] > 50 and found["left"] > 10 and found["greedy_texts"] > 5
    assert {"400", "401", "404", "413", "415"} <= set(found["statuses"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request" and line["route"].startswith("/v1")]
    assert len(requests) > 100 and not [line for line in lines if line["level"] == "error"]


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving" / "attacks.py"
DRAFTER = ("--", "--drafter", "draft_model", "--drafter-model", "demo-draft")


def attacked(report: Path, *words: str) -> list[dict[str, object]]:
    command = [sys.executable, str(SCRIPT), "--json", str(report), *words, *DRAFTER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    found: list[dict[str, object]] = json.loads(report.read_text())
    assert ran.returncode == 0, [one for one in found if one["faults"]]
    return found


@pytest.mark.slow
def test_no_attack_is_noticed(tmp_path: Path) -> None:
    assert len(attacked(tmp_path / "report.json")) > 50


@pytest.mark.slow
def test_the_script_works(tmp_path: Path) -> None:
    """With what answers at once, and no limit on time: the machine that runs this does other things, too."""
    words = ("--only", "^(start: start|arguments, 900 levels)$", "--most-ms", "60000", "--growth", "1")
    assert [one["statuses"] for one in attacked(tmp_path / "report.json", *words)] == [{"400": 4}] * 2
