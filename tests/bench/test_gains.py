"""The goals of training: runs of seconds train, stop, go on and are measured beside their goals."""

import json
from pathlib import Path

import pytest

from benchmarks.training import gains
from forerun import demo
from forerun.cli import main as forerun

SHORT = "windows={length: 64, rows: 1}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.jsonl").write_text(json.dumps({"id": "0", "text": demo.prompts()[0].text[:4000]}) + "\n")
    words = ("data", "prepare", str(folder / "text.jsonl"), "--target", "demo", "--output", str(folder / "train"))
    assert forerun([*words, "--max-length", "64", "--split-long"]) == 0
    return folder / "train"


@pytest.mark.slow
def test_every_run_is_trained_once_and_held_against_its_goal(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--seconds", "1", "--prompts", "1", "--tokens", "8", "--data", str(data), "--work", str(tmp_path)]
    words += ["--only", "distill", "layerskip", "--out", str(tmp_path), "--json"]
    words += [word for run in ("distill", "adaspec", "layerskip") for word in ("--set", f"{run}:{SHORT}")]
    gains.main(words)
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert json.loads((tmp_path / "training.json").read_text())["gains"]["goals"] == report["goals"]
    goals = {goal["what"]: goal for goal in report["goals"]}
    for temperature in ("T = 0", "T = 1"):
        assert goals[f"acceptance, DistillSpec / draft model as it ships, {temperature}"]["goal"] == ">= 1.1"
        assert goals[f"acceptance, AdaSPEC / DistillSpec at equal steps, {temperature}"]["goal"] == ">= 1"
        assert any(what.startswith("acceptance, exit after") and what.endswith(temperature) for what in goals)
    assert goals["target's held-out loss, LayerSkip / before"]["goal"] == "<= 1.02"
    steps = [json.loads(line)["step"] for line in (tmp_path / "distill" / "log.jsonl").read_text().splitlines()]
    filtered = [json.loads(line)["step"] for line in (tmp_path / "adaspec" / "log.jsonl").read_text().splitlines()]
    assert steps[-1] == filtered[-1] and said.err.count("forerun train") == 3
    gains.main([word for word in words if word != "layerskip"])
    assert capsys.readouterr().err.count("holds a finished run") == 2, "what is finished is only measured"


def test_a_wrong_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gains.main(["--set", "distil:training.seed=1"])
    assert "expected RUN:KEY=VALUE with a run of distill" in capsys.readouterr().err
