"""Where numbers go."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from forerun.errors import ArgumentError
from forerun.training.loop.trackers import Bar, JsonLines, tracker
from training.loop.toy import Numbers, Toy, settings, train


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_missing_package_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(ArgumentError, match=f"pip install {name}"):
        tracker(name, tmp_path, {})


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'wandbb' is unknown.*Did you mean 'wandb'"):
        tracker("wandbb", tmp_path, {})


def test_wandb_gets_every_value_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    fake = SimpleNamespace(
        init=lambda **keywords: calls.append(keywords),
        log=lambda values, step: calls.append((step, values["loss"])),
        finish=lambda: calls.append("finished"),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    opened = tracker("wandb", tmp_path / "run7", {"seed": 1})
    train(Toy(), Numbers(), settings(steps=2), tmp_path / "run7", trackers=[opened])
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run7" / "log.jsonl").read_text().splitlines()]
    begun = {"project": "forerun", "name": "run7", "config": {"seed": 1}}
    assert calls == [begun, (1, losses[0]), (2, losses[1]), "finished"]


def test_lines_are_averaged_over_the_steps_between(tmp_path: Path) -> None:
    train(Toy(), Numbers(), settings(steps=3, learning_rate=1e-30), tmp_path / "each")
    train(Toy(), Numbers(), settings(steps=3, learning_rate=1e-30, log_every_steps=3), tmp_path / "three")
    each, three = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("each", "three")
    )
    counts = [float(Numbers().batch(step, 0, 1).batch.loss_mask.sum()) for step in range(3)]
    pooled = sum(line["loss"] * count for line, count in zip(each, counts, strict=True)) / sum(counts)
    assert [line["step"] for line in three] == [3]
    assert three[0]["loss"] == pytest.approx(pooled, rel=1e-6)


def test_a_log_goes_on_after_the_step_that_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"st')
    lines = JsonLines(path, step=2)
    lines.log(3, {"a": float("inf")})
    lines.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2},
        {"step": 3, "a": None},
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_shows_loss_rate_and_speed(terminal: bool) -> None:
    text = io.StringIO()
    bar = Bar(lambda: 10, 0, Console(file=text, force_terminal=terminal, width=160))
    bar.log(3, {"loss": 1.25, "learning_rate": 1e-3, "tokens_per_second": 1234.4})
    bar.log(4, {"eval/acceptance": 2.5})
    bar.close()
    how_far = "3/10" if terminal else "step 3 of 10"
    for part in ("loss 1.2500", "rate 1.00e-03", "1,234 tokens/s", how_far, "step 4: acceptance 2.5"):
        assert part in text.getvalue()
