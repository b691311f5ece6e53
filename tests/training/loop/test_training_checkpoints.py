"""Nothing saved is lost: exact resume, writes that fail, rotation, and checkpoints that do not fit."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.errors import ArgumentError, CheckpointError, DataError
from forerun.training.loop import files, randomness, state, train
from training.loop.toy import Head, Numbers, Pressed, Toy, logged, run, settings, weights

KEYS = ("loss", "accuracy", "learning_rate", "gradient_norm", "tokens")


def same_files(one: Path, other: Path) -> None:
    """All tensors, counters and random states of two checkpoints agree to the bit."""
    for name in (state.MODEL, state.OPTIMIZER):
        left, right = load_file(one / name), load_file(other / name)
        assert left.keys() == right.keys()
        assert left
        assert all(torch.equal(tensor, right[key]) for key, tensor in left.items())
    assert (one / state.RANDOM).read_text() == (other / state.RANDOM).read_text()
    progress = [json.loads((path / state.STATE).read_text())["progress"] for path in (one, other)]
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
    lines = [
        [{key: line[key] for key in ("step", *KEYS)} for line in logged(path)] for path in (tmp_path / "whole", cut)
    ]
    assert lines[0] == lines[1]


def test_data_go_on_where_they_were_with_another_accumulation(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watched(Numbers):
        def batch(self, step: int, rank: int, world: int):  # type: ignore[no-untyped-def]
            seen.append(step)
            return super().batch(step, rank, world)

    train(Toy(), Watched(), settings(steps=2, accumulation=3), tmp_path)
    train(Toy(), Watched(), settings(steps=4, accumulation=1), tmp_path)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, steps=2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()}

    def full(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, steps=4)
    message = str(caught.value)
    assert "checkpoint-4 failed" in message
    assert "No space left" in message
    assert "checkpoint-2 is intact" in message
    assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-2").iterdir()} == before
    assert not list(tmp_path.glob(".*")), "the half-written one does not keep the disk full"
    monkeypatch.undo()
    assert run(tmp_path, steps=4).steps == 4


def test_a_kill_while_writing_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cleaned up by the dying process; the next one does it."""
    run(tmp_path, steps=2)

    class Killed(BaseException):
        pass

    def die(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(b"half")
        monkeypatch.setattr("forerun.writing.shutil.rmtree", lambda *_, **__: None)
        raise Killed

    monkeypatch.setattr(state, "save_file", die)
    with pytest.raises(Killed):
        run(tmp_path, steps=4)
    assert list(tmp_path.glob(".checkpoint-4.*.partial"))
    assert files.latest(tmp_path) == tmp_path / "checkpoint-2"
    monkeypatch.undo()
    assert run(tmp_path, steps=4).steps == 4
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("keep", "left"), [(2, {4, 6}), (1, {6}), (0, {2, 4, 6})])
def test_old_checkpoints_are_removed(tmp_path: Path, keep: int, left: set[int]) -> None:
    run(tmp_path, steps=6, save_every_steps=2, keep_checkpoints=keep)
    assert {step for step, _ in files.checkpoints(tmp_path)} == left
    assert not list(tmp_path.glob(".*"))


def test_the_newest_is_found_by_number(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-x", "checkpoint-11.bak"):
        (tmp_path / name).mkdir()
    assert files.latest(tmp_path) == tmp_path / "checkpoint-10"
    assert files.latest(tmp_path / "nowhere") is None


def test_saving_by_time(tmp_path: Path) -> None:
    run(tmp_path, steps=4, save_every_s=1e-9, keep_checkpoints=0)
    assert [step for step, _ in files.checkpoints(tmp_path)] == [1, 2, 3, 4]


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


def test_resume_from_a_path_and_never(tmp_path: Path) -> None:
    run(tmp_path / "one", steps=4, save_every_steps=2)
    former = tmp_path / "one" / "checkpoint-2"
    train(Toy(), Numbers(), settings(steps=4), tmp_path / "two", resume=former)
    same_files(tmp_path / "one" / "checkpoint-4", tmp_path / "two" / "checkpoint-4")
    with pytest.raises(ArgumentError, match="two lines of training"):
        train(Toy(), Numbers(), settings(steps=4), tmp_path / "one", resume=former)
    with pytest.raises(ArgumentError, match="holds checkpoint-4"):
        train(Toy(), Numbers(), settings(steps=4), tmp_path / "one", resume="never")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(Toy(), Numbers(), settings(steps=4), tmp_path / "three", resume=tmp_path / "nowhere")


def test_other_data_are_refused(tmp_path: Path) -> None:
    train(Toy(), Numbers(), settings(steps=1), tmp_path, data_hash="abc")
    with pytest.raises(DataError, match=r"hash abc, these have xyz"):
        train(Toy(), Numbers(), settings(steps=2), tmp_path, data_hash="xyz")


def test_a_checkpoint_of_another_optimizer_or_module_is_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match="another optimizer"):
        run(tmp_path, steps=2, optimizer="muon")
    toy = Toy()
    toy.head.frozen = torch.nn.Identity()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"unknown tensors \['frozen\.bias', 'frozen\.weight'\]"):
        run(tmp_path, toy, steps=2)


def test_damage_is_named(tmp_path: Path) -> None:
    run(tmp_path, steps=1)
    folder = tmp_path / "checkpoint-1"
    model = load_file(folder / state.MODEL)
    save_file(model | {"norm.bias": torch.zeros(3)}, folder / state.MODEL)
    with pytest.raises(CheckpointError, match=r"norm\.bias has shape \(3,\), the module wants \(6,\)"):
        run(tmp_path, steps=2)
    (folder / state.MODEL).write_bytes((folder / state.OPTIMIZER).read_bytes()[:50])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        run(tmp_path, steps=2)
    (folder / state.STATE).write_text("{")
    with pytest.raises(CheckpointError, match="no complete training checkpoint"):
        run(tmp_path, steps=2)
    shutil.rmtree(folder)
    assert run(tmp_path, steps=1).steps == 1


def test_random_states_survive_text() -> None:
    randomness.seed_all(3, 0)
    random.gauss(0, 1), np.random.normal(), torch.randn(3)
    text = randomness.capture()
    drawn = [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(2)]
    randomness.restore(text)
    assert [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(2)] == drawn
    randomness.seed_all(3, 1)
    assert torch.randn(3).tolist() != drawn[0][2]
