"""The script for a GPU that is lent for minutes runs without one, too: each part prints lines, whatever happens."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from forerun.model.kernels.forwards import LAYERS_BY


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "gpu.jsonl").read_text().splitlines()]


def test_a_dry_run_prints_one_line_for_each_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([str(tmp_path), "ceiling", "step", "growth", "quantised", "--dry"])
    found = lines(tmp_path)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")] == found
    assert not [line for line in found if "failed" in line or "cut_after_s" in line]
    steps = [line for line in found if line["part"] == "step"]
    assert [(line["arm"], line["temperature"]) for line in steps] == [
        (arm, temperature) for temperature in (0.0, 0.8) for arm in ("plain", "suffix", "eagle3", "draft_model")
    ]
    assert all(line["wall_ms"] > 0 and line["tokens_a_step"] >= 1 for line in steps)
    assert [line["nodes"] for line in found if line["part"] == "growth"] == [1, 16, 8]
    assert [line["format"] for line in found if line["part"] == "quantised"] == list(gpu.FORMATS)
    assert found[-1]["part"] == "done"


def test_a_part_that_fails_or_takes_too_long_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_bench: gpu.Bench) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    def cut(_bench: gpu.Bench) -> None:
        raise gpu.CutError

    apart = list[tuple[list[str], dict[str, str]]]()
    monkeypatch.setattr(gpu, "run_module", lambda _bench, parts, environment: apart.append((parts, environment)))
    monkeypatch.setattr(gpu, "PARTS", {"first": (fail, 5), "second": (cut, 7), "third": (gpu.without, 5)})
    gpu.main([str(tmp_path), "first", "second", "third", "--dry"])
    first, second, _ = lines(tmp_path)
    assert "illegal memory access" in first["failed"] and second["cut_after_s"] == 7
    assert apart == [(["step"], {LAYERS_BY: "parts"})]
    with pytest.raises(SystemExit):
        gpu.main([str(tmp_path), "steps", "--dry"])
    assert "unknown part 'steps'; there are first, second, third" in capsys.readouterr().err


def test_a_lease_takes_twelve_minutes_at_most() -> None:
    assert sum(gpu.PARTS[name][1] for name in gpu.IN_A_LEASE) <= 12 * 60
