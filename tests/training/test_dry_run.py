"""A dry run says what a recipe means without the target's weights, and what is odd about the data."""

import json
from pathlib import Path

import numpy as np
import pytest

from forerun.cli import main
from forerun.training import run
from forerun.training.data.store import about_answers, runs_in_circles
from forerun.training.dry_run import plan
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import read_recipe
from training.conftest import line_of
from training.data.conftest import store


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "hydra", "kangaroo", "mlp_speculator", "peagle"])
def test_a_fresh_head_is_planned_from_the_configuration_alone(
    kind: str, target: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in line_of(kind, target, prepared, tmp_path / "run", 300)[3:] if "=" in word]
    places = {"target": str(target), "data": str(prepared), "output": str(tmp_path / "run")}
    options = ["draft.options={boundaries: [1, 2, 3]}"] if kind in ("eagle3", "peagle") else []
    recipe = read_recipe(kind, None, [*words, *options], places)
    loaded = run.TrainingRun(recipe, Parallel())
    trainable = sum(weight.numel() for weight in loaded.module.parameters() if weight.requires_grad)
    monkeypatch.setattr(run, "open_frozen_target", lambda *_: pytest.fail("the target was loaded"))
    found = plan(recipe, Parallel())
    assert found["trainable_parameters"] == trainable and found["seconds_per_step"] > 0
    assert found["passes"] == pytest.approx(300 / loaded.batches.steps_per_epoch)
    assert any("passes over the data" in sentence for sentence in found["advice"])


def test_many_passes_long_documents_and_what_is_not_held_out_are_told(
    target: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["windows.length=16", "objective.steps=7", "draft.options={boundaries: [1, 2, 3]}", "draft.vocab_size=8"]
    line = [word for word in line_of("eagle3", target, prepared, tmp_path / "run", 2000, *more) if word != "--json"]
    assert main([*line, "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in (
        "2,000 steps are",
        "overfits",
        "splits",
        "evaluation.prompts",
        "objective.steps=5",
        "vocabulary of 8 tok",
    ):
        assert part in said
    assert json.loads(said[said.index("{") :])["training"]["steps"] == 2000


def test_circles_and_silence_are_told_of(tmp_path: Path) -> None:
    circle, text = [*range(20), *[5, 6, 7] * 20], [*range(90)]
    assert runs_in_circles(np.array(circle)) and not runs_in_circles(np.array(text))
    assert not runs_in_circles(np.array([1] * 20)), "too short to say"
    documents = [(ids, [False] + [True] * (len(ids) - 1)) for ids in (circle, text, [1, 2])]
    circles, silence = about_answers(store(tmp_path / "odd", documents))
    assert circles.startswith("33% of the answers run in circles") and silence.startswith("33% of the answers have two")
    assert list(about_answers(store(tmp_path / "plain", documents[1:2]))) == []
