"""A run that is started again goes on under the recipe that it was begun with, or says what has changed."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.cli import main
from forerun.errors import ArgumentError
from forerun.training.data.store import PreparedData, write_prepared
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import flatten, make_recipe, read_recipe
from forerun.training.run import TrainingRun
from training.conftest import Trainer, words

HARMLESS = {
    *("output", "target_parallel", "trackers", "evaluation.settings.rows"),
    *("objective.gradient_checkpointing", "objective.flex_attention"),
    *("training.max_seconds", "training.gradient_checkpointing", "training.save_every_s", "training.save_every_steps"),
    *("training.eval_every_steps", "training.keep_checkpoints", "training.log_every_steps", "training.patience"),
    "training.find_rate",  # before the first step
}
"""What may change; all that is not here may not."""
ELSEWHERE = {"kind", "target", "data", "mode", "features", "evaluation.prompts", "output", "trackers"}
ELSEWHERE |= {"training.seconds"}
"""Keys that other tests change: directories, which count by what they hold; what is not given beside `steps`."""
OTHER: dict[str, Any] = {
    **{"target_dtype": "bfloat16", "target_parallel": "fsdp", "draft.start": "elsewhere"},
    **{"draft.options": {"boundaries": [1, 2, 3]}, "objective.divergence": "lk", "objective.writer": "target"},
    **{"training.steps": 2, "training.max_seconds": 1e9, "training.eval_every_steps": 1, "training.patience": 3},
    **{"training.optimizer": "muon", "training.betas": [0.5, 0.5], "training.schedule": "linear"},
    **{"training.warmup_steps": 1, "training.dtype": "bfloat16", "training.best_metric": "tree_t0"},
}
"""Another value of each key that is no number and no switch."""
SHA = "sha256 [0-9a-f]{16}"
KEYS = sorted(flatten(make_recipe("eagle3", {"target": "a", "data": "b", "output": "c"})).keys() - ELSEWHERE)


@pytest.fixture(scope="module")
def finished(target: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """A run of one step, and what it was made of."""
    output = tmp_path_factory.mktemp("finished") / "run"
    given = [word for word in words(target, prepared, output, 1) if re.match(r"[a-z_.]+=", word)]
    recipe = read_recipe("eagle3", None, given, {"target": str(target), "data": str(prepared), "output": str(output)})
    run = TrainingRun(recipe, Parallel())
    assert run.train()["reason"] == "finished"
    return run


def another(key: str, value: Any) -> Any:
    """Another value that is allowed."""
    if key in OTHER:
        return OTHER[key]
    return not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value / 2 or 0.25


def changed(recipe: Any, key: str, value: Any) -> Any:
    """A copy with another value."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(recipe, **{name: changed(getattr(recipe, name), rest, value) if rest else value})


def under(run: TrainingRun, key: str, value: Any) -> TrainingRun:
    """The same run by another recipe."""
    other = copy.copy(run)
    other.recipe = changed(run.recipe, key, value)
    return other


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_decides_what_is_trained_must_not_change(finished: TrainingRun, key: str) -> None:
    """Every key of the recipe in turn; one that is new is refused until somebody says that it is harmless."""
    former = json.loads(json.dumps(flatten(finished.recipe)[key]))
    value = another(key, former)
    other = under(finished, key, value)
    if key in HARMLESS:
        assert other.train()["reason"] == "already_finished"
        return
    named = "windows.rows x processes" if key == "windows.rows" else key
    with pytest.raises(ArgumentError, match=re.escape(f"under another recipe: {named} was {former!r}, is {value!r}. ")):
        other.train()


def test_half_the_rows_on_twice_the_processes_are_the_same_batches(finished: TrainingRun) -> None:
    halved = under(finished, "windows.rows", 2)
    assert halved.fixed() != finished.fixed()
    halved.parallel = Parallel(world=2)
    assert halved.fixed() == finished.fixed()


def test_a_target_of_the_hub_is_the_one_in_a_directory(
    finished: TrainingRun, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what loading it has left in the cache; nothing more is fetched."""
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(target, cached / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert under(finished, "target", "org/name").fixed() == finished.fixed()


def test_directories_may_move_but_not_change(train: Trainer) -> None:
    """Target, data, features and evaluation prompts, each moved, then changed in its place."""
    target, data, features = (train.folder / name for name in ("target", "data", "features"))
    shutil.copytree(train.target, target)
    shutil.copytree(train.prepared, data)

    def extract(output: Path, *more: str) -> None:
        where = ("--target", str(train.target), "--data", str(train.prepared), "--output", str(output))
        assert main(["features", "--boundaries", "1,2,3", "--no-probe", "--yes", *where, *more]) == 0

    def line(*more: str, features: Path = features) -> list[str]:
        return train.eagle3(1, "mode=offline", f"features={features}", *more)

    extract(features)
    train(line())
    moved = shutil.copytree(features, train.folder / "moved")
    places = (f"target={target}", f"data={data}", f"evaluation.prompts={data}")
    assert main(line(*places, features=Path(moved))) == 0
    assert "holds a finished run: an earlier one did all 1 steps" in train.capsys.readouterr().err

    def differs(line: list[str], message: str) -> None:
        said = train.refused(line)
        assert re.search(message, said) and "--allow-changes" in said, said

    rounded, other = (train.folder / name for name in ("rounded", "other"))
    extract(rounded, "--dtype", "float8")
    differs(line(features=rounded), r"features was 'bfloat16 by transformers', is 'float8_e4m3fn by tr")
    former = PreparedData(train.prepared)
    write_prepared(other, [former.document(number) for number in range(3)], former.tokenizer)
    differs(line(f"evaluation.prompts={other}"), rf"evaluation\.prompts was '{SHA}', is '{SHA}'\.")
    differs(line("evaluation.prompts=null"), rf"evaluation\.prompts was '{SHA}', is None\.")
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"].mul_(1.1)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    online = train.eagle3(1, f"target={target}", f"data={other}", f"evaluation.prompts={other}")
    message = rf"target was '{SHA}', is '{SHA}'; data was '{SHA}', is '{SHA}'; mode was 'offline', is 'online'; "
    differs(online, message)
    train([*online, "--allow-changes"])


def test_a_finished_run_started_again_says_so(train: Trainer) -> None:
    line = train.eagle3(2)
    train(line)
    shutil.rmtree(train.folder / "run" / "head")
    assert main(line) == 0
    again = train.capsys.readouterr()
    outcome = json.loads(again.out)
    assert (outcome["reason"], outcome["loss"], outcome["steps"]) == ("already_finished", None, 2)
    assert "holds a finished run: an earlier one did all 2 steps" in " ".join(again.err.split())
    assert "--allow-changes" in again.err and Path(outcome["head"], "model.safetensors").is_file()
    assert main([word for word in line if word != "--json"]) == 0
    shown = train.capsys.readouterr().out
    assert "nothing was trained" in shown and "nan" not in shown.lower() and "loss" not in shown
    assert train([*line, "training.steps=3", "--allow-changes"])["reason"] == "finished"


def test_a_run_cut_behind_an_evaluation_equals_one_to_the_bit(target: Path, prepared: Path, tmp_path: Path) -> None:
    """An evaluation decodes with the target that training reads: it may not be repacked for that, which rounds."""
    given = ("training.eval_every_steps=1", "training.save_every_steps=1", "target_dtype=bfloat16")

    def start(output: Path) -> dict[str, Tensor]:
        line = [word for word in words(target, prepared, output, 2) if re.match(r"[a-z_.]+=", word)]
        places = {"target": str(target), "data": str(prepared), "output": str(output)}
        TrainingRun(read_recipe("eagle3", None, [*line, *given], places), Parallel()).train()
        stored = [load_file(output / "checkpoint-2" / f"{name}.safetensors") for name in ("model", "optimizer")]
        return stored[0] | stored[1]

    whole = start(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoint-2")
    cut = start(tmp_path / "cut")
    assert whole.keys() == cut.keys() and all(torch.equal(whole[name], cut[name]) for name in whole)
