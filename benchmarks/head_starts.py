"""How heads start on a real target, and what becomes of it: the first loss beside that of a guess, before and after the
fit to the first batches, and the held-out loss and acceptance while a head trains.

    python -m benchmarks.head_starts --target DIR --data PREPARED --held-out PREPARED --kinds eagle3 medusa --steps 120

The loss is the mean cross-entropy of the predictions in nats, whatever else a kind learns. Acceptance is the mean
number of tokens a pass that a greedy chain of the head's depths would bring on the held-out text, bonus included: it is
read off the loss's own metrics, nothing is decoded. Held-out figures are of the first `--windows` windows.
"""

from __future__ import annotations

import argparse
import logging
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from forerun.drafters.kinds import KINDS
from forerun.heads.start import cross_entropy
from forerun.losses.objective import FeatureBatch
from forerun.training.data.store import PackedWindows, PreparedData
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import make_recipe
from forerun.training.run import TrainingRun

FRESH = [one.name for one in KINDS.values() if one.trains == "head" and one.in_target is None and one.objective]
WHOLE = ("medusa", "hydra", "mlp_speculator", "kangaroo", "eagle")  # Kinds that propose all of the target's tokens


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", required=True, help="prepared data")
    parser.add_argument("--held-out", required=True, help="prepared data that is not trained on")
    parser.add_argument("--kinds", nargs="+", default=FRESH, choices=FRESH)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=0, help="steps to train; 0: none")
    parser.add_argument("--as-drawn", action="store_true", help="train what was drawn, without the fit")
    parser.add_argument("--vocab-size", type=int, help="draft vocabulary of kinds that may have one; all by default")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="held-out windows")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


class Run(TrainingRun):
    """A run that is fitted when it is asked to be, not when it trains."""

    def fit(self) -> None:
        """Leave the head as it is."""


def make_run(arguments: argparse.Namespace, kind: str, seed: int, output: str) -> Run:
    """Return a run of a kind whose head is drawn from `seed`."""
    draft: dict[str, Any] = {}
    if arguments.vocab_size and kind not in WHOLE:
        draft = {"vocab_size": arguments.vocab_size, "options": {"own_lm_head": True}}
    recipe = {
        "target": arguments.target,
        "data": arguments.data,
        "output": output,
        "draft": draft,
        "windows": {"length": arguments.length},
        "training": {
            "steps": max(1, arguments.steps),
            "learning_rate": arguments.learning_rate,
            "seed": seed,
            "log_every_steps": 10,
        },
    }
    return Run(make_recipe(kind, recipe), Parallel())


def held_out(run: TrainingRun, arguments: argparse.Namespace) -> list[FeatureBatch]:
    """Return the first windows of the held-out text with the states that the run's head reads."""
    windows = PackedWindows(PreparedData(arguments.held_out), length=arguments.length, rows=1, seed=0)
    count = min(arguments.windows, windows.steps_per_epoch())
    return [run.batches.source.features(windows.batch(step)) for step in range(count)]  # type: ignore[union-attr, call-arg]


@torch.no_grad()
def measure(run: TrainingRun, batches: Sequence[FeatureBatch]) -> tuple[float, float]:
    """Return the mean cross-entropy and the acceptance on batches."""
    module, sums = run.objective.parameters_module().eval(), dict[str, tuple[float, float]]()
    losses = [cross_entropy(run.objective, batch) for batch in batches]
    for batch in batches:
        for name, (value, count) in run.objective(batch).metrics.items():
            former = sums.get(name, (0.0, 0.0))
            sums[name] = (former[0] + float(value), former[1] + float(count))
    module.train()
    reached = [value / count for name, (value, count) in sums.items() if name.startswith("acceptance_") and count]
    return sum(losses) / len(losses), 1 + sum(reached)


def main() -> None:
    arguments, console = read_arguments(), Console()
    logging.getLogger("forerun").setLevel(logging.ERROR)
    names = ["kind", "seed", "a guess", "as drawn", "fitted"]
    if arguments.steps:
        names += [f"after {arguments.steps}", "acceptance at first", f"after {arguments.steps}"]
    table = Table(*names, title="first loss in nats, held out")
    for kind in arguments.kinds:
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                run = make_run(arguments, kind, seed, str(Path(folder) / "run"))
                batches = held_out(run, arguments)
                drawn, accepted = measure(run, batches)
                fitted = math.nan
                if not arguments.as_drawn:
                    TrainingRun.fit(run)
                    fitted, accepted = measure(run, batches)
                figures = [math.log(run.objective.head.config.draft_vocab_size), drawn, fitted]  # type: ignore[attr-defined]
                if arguments.steps:
                    run.train()
                    trained, later = measure(run, batches)
                    figures += [trained, accepted, later]
                row = [f"{figure:.2f}" for figure in figures]
                console.print(kind, seed, *row)
                table.add_row(kind, str(seed), *row)
    console.print(table)


if __name__ == "__main__":
    main()
