"""``forerun export`` and ``forerun doctor HEAD``: the shipped target, a fresh head, exit codes and JSON."""

import dataclasses
import json
from pathlib import Path

import pytest

from cli.conftest import Forerun
from forerun.heads.engines import ENGINES
from forerun.heads.files import read_head, write_head
from heads.samples import PLAIN, TARGET, sample

FOR_DEMO = dataclasses.replace(
    PLAIN, target_hidden_size=384, own_embedding=True, vocab_size=8192, draft_vocab_size=64, boundaries=(2, 4, 5)
)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return write_head(sample(FOR_DEMO), tmp_path / "head", "flat", TARGET)


def test_export_prints_the_launch_line_and_nothing_else(forerun: Forerun, head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = forerun("export", head, "--to", "vllm", "--target", "demo", "--output", out)
    assert ran.code == 0 and ran.out.startswith("vllm serve ") and ran.out.count("\n") == 1
    assert "read back bit for bit" in ran.err and read_head(out).config.boundaries == (2, 4, 5)
    ran = forerun("export", head, "--to", "speculators", "--target", "demo", "--output", out, "--json")
    found = json.loads(ran.out)
    assert found["format"] == "speculators" and found["directory"] == str(out) and found["notes"] == []
    assert found["command"] == f"vllm serve {out}" and {f["engine"] for f in found["findings"]} == {"vllm"}


def test_the_shipped_head_goes_by_its_name(forerun: Forerun, tmp_path: Path) -> None:
    ran = forerun("export", "demo-eagle3", "--to", "hf", "--target", "demo", "--output", tmp_path / "out")
    assert ran.code == 0 and read_head(tmp_path / "out").config.fc_norm


def test_export_refuses_and_can_be_forced(forerun: Forerun, tmp_path: Path) -> None:
    config = dataclasses.replace(FOR_DEMO, norm_before_residual=True)
    head = write_head(sample(config), tmp_path / "head", "flat", TARGET)
    arguments = ("export", head, "--to", "sglang", "--target", "demo", "--output", tmp_path / "out")
    ran = forerun(*arguments)
    assert ran.code == 2 and ran.out == "" and "norm_before_residual" in ran.err and "--force" in ran.err
    ran = forerun(*arguments, "--force")
    assert ran.code == 0 and "norm_before_residual" in ran.err


def test_doctor_judges_a_head(forerun: Forerun, head: Path) -> None:
    ran = forerun("doctor", head, "--target", "demo", "--json")
    found = json.loads(ran.out)
    assert ran.code == 0 and list(found["engines"]) == list(ENGINES)
    assert set(found["engines"].values()) == {"ok"} and len(found["findings"]) >= len(ENGINES)
    table = forerun("doctor", head, "--target", "demo")
    assert table.code == 0 and all(engine in table.out for engine in ENGINES) and "finding" in table.out
    assert len(table.out.split("fix")[1].split("made for")) <= 2, "what several engines have in common is told once"


def test_doctor_fails_for_the_engines_that_were_asked_for(forerun: Forerun, tmp_path: Path) -> None:
    head = write_head(sample(dataclasses.replace(FOR_DEMO, num_hidden_layers=2)), tmp_path / "head", "flat", TARGET)
    ran = forerun("doctor", head, "--target", "demo")
    assert ran.code == 1 and "fails" in ran.out
    ran = forerun("doctor", head, "--target", "demo", "--engine", "vllm", "--engine", "sglang")
    assert ran.code == 0 and "llama.cpp" not in ran.out


def test_what_must_be_seen_to_is_said_and_does_not_stop(forerun: Forerun, tmp_path: Path) -> None:
    """A key of which nothing is known, and a window that SGLang takes from its command line alone."""
    config = dataclasses.replace(FOR_DEMO, sliding_window=64, extra={"depth_gain": 2})
    head = write_head(sample(config), tmp_path / "head", "flat", TARGET)
    found = json.loads(forerun("doctor", head, "--target", "demo", "--json").out)
    assert found["engines"] == {
        "vllm": "check",
        "sglang": "check",
        **dict.fromkeys(("trtllm", "llama.cpp", "lmdeploy"), "degrades"),
        "modelopt": "check",
    }
    table = forerun("doctor", head, "--target", "demo", "--engine", "vllm")
    assert table.code == 0 and "check" in table.out and "depth_gain" in table.out
    ran = forerun("export", head, "--to", "sglang", "--target", "demo", "--output", tmp_path / "out")
    assert ran.code == 0 and ran.out.endswith("--speculative-draft-window-size 63\n") and "depth_gain" in ran.err
    assert json.loads((tmp_path / "out/config.json").read_text())["depth_gain"] == 2
    ran = forerun("export", head, "--to", "trtllm", "--target", "demo", "--output", tmp_path / "other")
    assert ran.code == 2 and "a sliding window of 64 positions" in ran.err
