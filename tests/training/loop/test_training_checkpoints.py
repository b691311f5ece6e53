"""Nothing saved is lost: exact resume, writes that fail, rotation, and checkpoints that do not fit."""

import errno
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ArgumentError, CheckpointError, OutOfMemoryError
from forerun.training.loop import checkpoint
from forerun.training.loop.trainer import TrainResult
from training.loop.toy import Head, Numbers, Pressed, Toy, logged, run, settings, train, weights

KEYS = ("loss", "accuracy", "learning_rate", "gradient_norm", "tokens")


def same_files(one: Path, other: Path) -> None:
    """All tensors, counters and random states of two checkpoints agree to the bit; not the clock."""
    for name in (checkpoint.MODEL, checkpoint.OPTIMIZER):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert left
        assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())
    assert (one / checkpoint.RANDOM).read_text() == (other / checkpoint.RANDOM).read_text()
    progress = [json.loads((path / checkpoint.STATE).read_text())["progress"] for path in (one, other)]
    assert all(seconds > 0 for seconds in (found.pop("seconds") for found in progress))
    assert progress[0] == progress[1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_interrupt_and_resume_equal_an_uninterrupted_run_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    """With dropout, so that the random state counts, and into a head that begins elsewhere."""
    whole = Toy(head=Head(dropout=0.3))
    run(tmp_path / "whole", whole, optimizer=optimizer, accumulation=2, dtype="bfloat16")
    first = Pressed(presses={5: [signal.SIGINT]})
    first.head = Head(dropout=0.3)
    assert run(tmp_path / "cut", first, optimizer=optimizer, accumulation=2, dtype="bfloat16", steps=3).interrupted
    random.random(), np.random.random(), torch.rand(3)
    again = Toy(head=Head(seed=9, dropout=0.3))
    result = run(tmp_path / "cut", again, optimizer=optimizer, accumulation=2, dtype="bfloat16", steps=3)
    assert result.steps == 3
    same_files(tmp_path / "whole" / "checkpoint-3", tmp_path / "cut" / "checkpoint-3")
    assert all(torch.equal(weights(again.head)[name], tensor) for name, tensor in weights(whole.head).items())


def test_a_run_cut_in_two_equals_one_and_so_does_its_log(tmp_path: Path) -> None:
    run(tmp_path / "whole", steps=6)
    cut = tmp_path / "cut"
    assert run(cut, Pressed(presses={2: [signal.SIGINT]}), steps=6).steps == 3
    with (cut / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "loss": 99}\n{"step": 5, "lo')  # a killed run leaves later lines, and half a line
    assert run(cut, steps=6).steps == 6
    same_files(tmp_path / "whole" / "checkpoint-6", cut / "checkpoint-6")
    lines = [[{key: line[key] for key in ("step", *KEYS)} for line in logged(run)] for run in (tmp_path / "whole", cut)]
    assert lines[0] == lines[1]


def test_data_go_on_where_they_were_with_another_accumulation(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(Numbers):
        def batch(self, step: int, rank: int, world: int):
            seen.append(step)
            return super().batch(step, rank, world)

    train(Toy(), Watched(), settings(steps=2, accumulation=3), tmp_path)
    train(Toy(), Watched(), settings(steps=4, accumulation=1), tmp_path, allow_changes=True)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_checkpoint_that_does_not_fit_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "free_bytes", lambda folder: 100)
    with pytest.raises(CheckpointError, match=r"has 100 bytes free, and a checkpoint needs .* make room"):
        run(tmp_path, steps=2)
    assert not list(tmp_path.glob("checkpoint-*"))


def test_a_disk_that_fills_before_the_first_checkpoint_does_not_promise_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No checkpoint had been written yet\..*start again") as caught:
        run(tmp_path, steps=2)
    assert "goes on" not in str(caught.value)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, steps=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}

    def full(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, steps=4, allow_changes=True)
    message = str(caught.value)
    assert "checkpoint-4 failed" in message
    assert "No space left" in message
    assert "checkpoint-2 is intact" in message
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()} == before
    assert not list(tmp_path.glob(".*")), "the half-written one does not keep the disk full"
    monkeypatch.undo()
    assert run(tmp_path, steps=4, allow_changes=True).steps == 4


def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cleaned up by the dying process; the next one does it."""
    run(tmp_path, steps=2)

    class Killed(BaseException):
        pass

    def die(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        monkeypatch.setattr("forerun.writing.shutil.rmtree", lambda *_, **__: None)
        raise Killed

    monkeypatch.setattr(checkpoint, "save_file", die)
    with pytest.raises(Killed):
        run(tmp_path, steps=4, allow_changes=True)
    assert list(tmp_path.glob(".checkpoint-4.*.partial"))
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-2"
    monkeypatch.undo()
    assert run(tmp_path, steps=4, allow_changes=True).steps == 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("keep", "left"), [(2, {4, 6}), (1, {6}), (0, {2, 4, 6})])
def test_old_checkpoints_are_removed(tmp_path: Path, keep: int, left: set[int]) -> None:
    run(tmp_path, steps=6, save_every_steps=2, keep_checkpoints=keep)
    assert {step for step, _ in checkpoint.checkpoints(tmp_path)} == left
    assert not list(tmp_path.glob(".*"))


def test_the_newest_is_found_by_number(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "checkpoint-11.bak"):
        (tmp_path / name).mkdir()
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-10"
    assert checkpoint.latest(tmp_path / "nowhere") is None


def test_saving_by_time(tmp_path: Path) -> None:
    run(tmp_path, steps=4, save_every_s=1e-9, keep_checkpoints=0)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1, 2, 3, 4]


def test_an_evaluation_that_was_cut_off_is_made_up_for(tmp_path: Path) -> None:
    asked: list[int] = []

    def evaluate(step: int) -> dict[str, float]:
        asked.append(step)
        return {"a": 0.1 * step}

    choice = settings(steps=4, eval_every_steps=2)
    train(Pressed(presses={1: [signal.SIGINT]}), Numbers(), choice, tmp_path, evaluate=evaluate)
    assert asked == []
    result = train(Toy(), Numbers(), choice, tmp_path, evaluate=evaluate)
    assert asked == [2, 4]
    assert result.best == pytest.approx(0.4)
    train(Toy(), Numbers(), choice, tmp_path, evaluate=evaluate)
    assert asked == [2, 4], "a finished run does nothing"


def test_an_evaluation_that_fails_loses_nothing(tmp_path: Path) -> None:
    asked: list[int] = []

    def evaluate(step: int) -> dict[str, float]:
        asked.append(step)
        if len(asked) == 1:
            raise OutOfMemoryError("no room to decode")
        return {"a": 0.5}

    with pytest.raises(OutOfMemoryError):
        train(Toy(), Numbers(), settings(steps=4), tmp_path, evaluate=evaluate)
    assert checkpoint.latest(tmp_path) == tmp_path / "checkpoint-4"
    for _ in range(2):
        result = train(Toy(), Numbers(), settings(steps=4), tmp_path, evaluate=evaluate)
        assert (result.reason, result.best, result.best_step) == ("already_finished", 0.5, 4)
    assert asked == [4, 4], "made up for once, and known to the checkpoint since"


def test_a_copied_checkpoint_without_the_best_weights_says_what_is_missing(tmp_path: Path) -> None:
    """Before it trains; the best ones are copied, too, or forgotten."""

    def trained(folder: str, **more: bool) -> TrainResult:
        made = settings(steps=4, save_every_steps=2, eval_every_steps=1)
        return train(Toy(), Numbers(), made, tmp_path / folder, evaluate=lambda step: {"a": -step}, **more)

    assert trained("one").best_step == 1
    for step in (2, 4):
        folder = tmp_path / f"two-{step}"
        shutil.copytree(tmp_path / "one" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        named = rf"{folder}/best is missing, the best weights \(of step 1\).* Copy best/ .*--allow-changes"
        with pytest.raises(CheckpointError, match=named):
            trained(folder.name)
        forgotten = trained(folder.name, allow_changes=True)
        assert forgotten.best_step == step and (folder / "best" / checkpoint.MODEL).is_file()
    shutil.copytree(tmp_path / "one" / "checkpoint-2", tmp_path / "three" / "checkpoint-2")
    shutil.copytree(tmp_path / "one" / "best", tmp_path / "three" / "best")
    assert trained("three").best_step == 1


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interrupted after the first of two steps."""
    folder = tmp_path_factory.mktemp("begun")
    train(Pressed(presses={0: [signal.SIGINT]}), Numbers(), settings(steps=2), folder, recipe={"data": "abc"})
    assert checkpoint.latest(folder) == folder / "checkpoint-1"
    return folder


def again(begun: Path, output: Path, recipe: object = None, **values: object) -> TrainResult:
    """Start again, in a copy."""
    shutil.copytree(begun, output)
    allow = bool(values.pop("allow_changes", False))
    known = {"data": "abc"} if recipe is None else recipe
    made = settings(**({"steps": 2} | values))
    return train(Toy(), Numbers(), made, output, recipe=known, allow_changes=allow)


@pytest.mark.parametrize(("name", "value"), [("steps", 3), ("betas", (0.5, 0.5)), ("optimizer", "muon")])
def test_a_changed_setting_is_refused_unless_asked_for(begun: Path, tmp_path: Path, name: str, value: object) -> None:
    """Which settings may change: tests/training/test_resume.py."""
    former, now = json.loads(json.dumps([getattr(settings(steps=2), name), value]))
    words = re.escape(f"under another recipe: training.{name} was {former!r}, is {now!r}. ")
    with pytest.raises(ArgumentError, match=f"{words}.*--allow-changes"):
        again(begun, tmp_path / "refused", **{name: value})
    assert checkpoint.latest(tmp_path / "refused") == tmp_path / "refused" / "checkpoint-1"
    if name == "optimizer":  # whose state is of another kind
        return
    result = again(begun, tmp_path / "allowed", allow_changes=True, **{name: value})
    assert result.reason == "finished" and result.steps == (3 if name == "steps" else 2)
    assert run_again(tmp_path / "allowed", **{name: value}).reason == "already_finished", "the new recipe is kept"


def run_again(output: Path, **values: object) -> TrainResult:
    made = settings(**({"steps": 2} | values))
    return train(Toy(), Numbers(), made, output, recipe={"data": "abc"})


def test_the_callers_recipe_is_kept_too(begun: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"data was 'abc', is 'xyz'; windows was not recorded, is 3\."):
        again(begun, tmp_path / "one", {"data": "xyz", "windows": 3})
    with pytest.raises(ArgumentError, match=r"data was 'abc', is not recorded"):
        again(begun, tmp_path / "two", {})
    result = again(begun, tmp_path / "three", {"data": "xyz"}, allow_changes=True)
    assert result.steps == 2
    assert checkpoint.Saved(result.checkpoint).recipe == {
        "data": "xyz",
        **json.loads(json.dumps(settings(steps=2).fixed())),
    }


def test_another_evaluation_forgets_the_best_of_the_former(tmp_path: Path) -> None:
    def trained(steps: int, prompts: str, value: float, **values: object) -> TrainResult:
        made = settings(steps=steps, **values)
        recipe = {"evaluation.prompts": prompts}
        return train(
            Toy(), Numbers(), made, tmp_path, recipe=recipe, allow_changes=True, evaluate=lambda step: {"a": value}
        )

    assert trained(1, "easy", 9.0).best == 9.0
    assert trained(2, "easy", 8.0).best == 9.0
    assert (trained(3, "hard", 2.0).best, trained(3, "hard", 3.0).best) == (2.0, 2.0)
    assert trained(4, "hard", 1.0, best_metric="a").best == 1.0


def test_a_checkpoint_of_another_optimizer_or_module_is_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match="another optimizer"):
        run(tmp_path, steps=2, optimizer="muon", allow_changes=True)
    toy = Toy()
    toy.head.frozen = torch.nn.Identity()
    with pytest.raises(CheckpointError, match=r"of another module.*(?s:.)*frozen\.bias.*frozen\.weight"):
        run(tmp_path, toy, steps=2, allow_changes=True)


def test_damage_is_named(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    folder = tmp_path / "checkpoint-1"
    model = load_file(folder / checkpoint.MODEL)
    save_file(model | {"norm.bias": torch.zeros(3)}, folder / checkpoint.MODEL)
    with pytest.raises(CheckpointError, match=r"norm\.bias: copying a param with shape .*\[3\].*\[6\]"):
        run(tmp_path, steps=2, allow_changes=True)
    (folder / checkpoint.MODEL).write_bytes((folder / checkpoint.OPTIMIZER).read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        run(tmp_path, steps=2, allow_changes=True)
    (folder / checkpoint.STATE).write_text("{")
    with pytest.raises(CheckpointError, match="no complete training checkpoint"):
        run(tmp_path, steps=2, allow_changes=True)
    shutil.rmtree(folder)
    assert run(tmp_path, steps=1).steps == 1


def test_random_states_survive_text() -> None:
    checkpoint.begin_random([], 3, 0, 0)
    random.gauss(0, 1), np.random.normal(), torch.randn(3)
    text = checkpoint.capture_random()
    drawn = [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(2)]
    checkpoint.restore_random(text)
    assert [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(2)] == drawn
    checkpoint.begin_random([], 3, 1, 0)
    assert torch.randn(3).tolist() != drawn[0][2]
