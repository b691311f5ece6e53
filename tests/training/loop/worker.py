"""One process of the distributed tests: every scenario in turn, so that torch is imported once."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from forerun.cli import leave
from forerun.errors import CheckpointError, NumericError
from forerun.training.loop import checkpoint
from forerun.training.loop.distributed import Parallel
from training.loop.toy import Head, Numbers, Toy, settings, train

MODES = ("ddp", "fsdp")
OPTIMIZERS = ("adamw", "muon")
STEPS, CUT = 5, 3


def choice(optimizer: str, **values: object) -> object:
    """Muon rounds gradients to bfloat16, so that a last bit may change an entry by 2^-8: a small rate keeps 1e-5."""
    rates = {"optimizer": optimizer, "learning_rate": 2e-3, "muon_learning_rate": 1e-3, "steps": STEPS}
    return settings(**(rates | values))


def main(folder: Path) -> None:
    for mode in MODES:
        parallel = Parallel.from_environment(mode, "cpu")
        for optimizer in OPTIMIZERS:
            output = folder / f"{mode}-{optimizer}"
            same(output, optimizer, parallel)
            if optimizer == "muon":
                accumulated(output.with_name(f"{mode}-accumulated"), parallel)
        elastic(folder, mode, parallel)
        failures(folder / f"{mode}-failures", parallel)
    sys.stdout.write(f"rank {parallel.rank} done\n")
    parallel.wait()  # a process that leaves while the other still talks to it takes it down (gloo aborts)
    parallel.close()


def same(output: Path, optimizer: str, parallel: Parallel) -> None:
    """Other initial weights on the other process: the first one's count."""
    toy = Toy(head=Head(seed=parallel.rank))
    shapes: list[tuple[int, ...]] = []

    def evaluate(step: int) -> dict[str, float]:
        """Whole parameters, whatever the mode; the processes disagree, and the first one's word counts."""
        batch = Numbers().batch(0, 0, 1)
        loss = toy(batch).loss.item()
        shapes.append(tuple(toy.head.lm_head.weight.shape))
        return {"score": -loss * (1 + parallel.rank)}

    result = train(
        toy, Numbers(), choice(optimizer, eval_every_steps=2, save_every_steps=CUT), output,
        parallel=parallel, evaluate=evaluate,
    )  # fmt: skip
    assert set(shapes) == {(11, 6)}
    (output / f"result-{parallel.rank}.json").write_text(json.dumps([result.loss, result.best, result.tokens]))


def accumulated(output: Path, parallel: Parallel) -> None:
    train(
        Toy(), Numbers(parts=2), choice("adamw", accumulation=2), output, parallel=parallel
    )  # fmt: skip


def elastic(folder: Path, mode: str, parallel: Parallel) -> None:
    """Go on from what one process wrote."""
    for optimizer in OPTIMIZERS:
        start, output = f"checkpoint-{CUT}", folder / f"one-to-{mode}-{optimizer}"
        if parallel.first:
            for name in (start, "best"):
                shutil.copytree(folder / f"single-{optimizer}" / name, output / name)
        train(Toy(head=Head(seed=5)), Numbers(), choice(optimizer), output, parallel=parallel)


def failures(output: Path, parallel: Parallel) -> None:
    """What goes wrong on one process stops both, with the same words."""
    poisoned = Toy(poison=1 if parallel.rank == 1 else None)
    with pytest.raises(NumericError, match="batch 1 of rank 1"):
        train(poisoned, Numbers(), choice("adamw"), output, parallel=parallel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_file", _full)
        with pytest.raises(CheckpointError, match="No space left"):
            train(Toy(), Numbers(), choice("adamw"), output, parallel=parallel)
    assert parallel.share(parallel.rank) == 0
    assert parallel.sums(torch.ones(2)) == [2.0, 2.0]


def _full(*arguments: object, **keywords: object) -> None:
    raise OSError(28, "No space left on device")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave(0)
