"""Beside every attack that we know, another user is served within a second, and memory comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
