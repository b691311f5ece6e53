"""Two processes train the model that one process trains, however it is spread; and checkpoints change hands."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun.errors import ArgumentError
from forerun.training.loop.distributed import Parallel
from ports import free_ports
from training.conftest import run_twice
from training.loop.toy import Head, Numbers, Toy, train, weights
from training.loop.worker import CUT, MODES, OPTIMIZERS, STEPS, choice

TOLERANCE = 1e-5


def score(toy: Toy) -> float:
    return -toy(Numbers().batch(0, 0, 1)).loss.item()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process made, and then two: a directory per scenario."""
    folder = tmp_path_factory.mktemp("distributed")
    for optimizer in OPTIMIZERS:
        toy = Toy()
        train(
            toy,
            Numbers(),
            choice(optimizer, eval_every_steps=2, save_every_steps=CUT),
            folder / f"single-{optimizer}",
            evaluate=lambda step, toy=toy: {"score": score(toy)},
        )
    [port] = free_ports(1)
    said = run_twice(Path(__file__).with_name("worker.py"), str(folder), MASTER_PORT=str(port))
    assert ["rank 0 done" in said[0], "rank 1 done" in said[1]] == [True, True]
    return folder


def stored(path: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    return load_file(path / f"checkpoint-{step}" / "model.safetensors")


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=TOLERANCE, msg=name)


def curve(path: Path, name: str) -> list[float]:
    lines = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_equal_one(folder: Path, mode: str, optimizer: str) -> None:
    single, spread = folder / f"single-{optimizer}", folder / f"{mode}-{optimizer}"
    moved = max(float((stored(single)[name] - tensor).abs().max()) for name, tensor in weights(Head()).items())
    assert moved > 100 * TOLERANCE, "else equality would say nothing"
    assert_same(stored(single), stored(spread))
    assert len(curve(spread, "loss")) == STEPS
    for name in ("loss", "gradient_norm", "accuracy"):  # AdamW and Muon forgive a factor in the gradient, its norm not
        assert curve(spread, name) == pytest.approx(curve(single, name), abs=TOLERANCE)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_results_are_the_same_on_both(folder: Path, mode: str, optimizer: str) -> None:
    spread = folder / f"{mode}-{optimizer}"
    first, second = (json.loads((spread / f"result-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[2] == STEPS * 8 * 4, "tokens of both"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_best_weights_are_whole(folder: Path, mode: str, optimizer: str) -> None:
    one, two = (folder / f"{name}-{optimizer}" / "best" for name in ("single", mode))
    assert_same(load_file(one / "model.safetensors"), load_file(two / "model.safetensors"))
    values = [json.loads((path / "best.json").read_text()) for path in (one, two)]
    assert values[0]["step"] == values[1]["step"]
    assert values[0]["values"]["score"] == pytest.approx(values[1]["values"]["score"], rel=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_accumulation_on_two_processes_equals_one_big_batch(folder: Path, mode: str) -> None:
    assert_same(stored(folder / "single-adamw"), stored(folder / f"{mode}-accumulated"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_two_go_on_from_one(folder: Path, mode: str, optimizer: str) -> None:
    assert_same(stored(folder / f"single-{optimizer}"), stored(folder / f"one-to-{mode}-{optimizer}"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", MODES)
def test_one_goes_on_from_two(folder: Path, tmp_path: Path, mode: str, optimizer: str) -> None:
    toy = Toy(head=Head(seed=7))
    for name in (f"checkpoint-{CUT}", "best"):
        shutil.copytree(folder / f"{mode}-{optimizer}" / name, tmp_path / name)
    train(toy, Numbers(), choice(optimizer), tmp_path)
    assert_same(stored(folder / f"single-{optimizer}"), stored(tmp_path))


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    alone = Parallel.from_environment("fsdp", "cpu")
    assert (alone.rank, alone.world, alone.mode, alone.first) == (0, 1, "single", True)
    alone.close()
    with pytest.raises(ArgumentError, match="mode='dp' is unknown"):
        Parallel.from_environment("dp", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ArgumentError, match="choose ddp or fsdp"):
        Parallel.from_environment("single", "cpu")
