"""What `forerun train` leaves behind, without the training."""

import json
from dataclasses import asdict
from pathlib import Path

from forerun.training.loop.checkpoint import FORMAT, RANDOM, STATE, Progress


def checkpoint_of(output: Path, *, step: int, seconds: float) -> None:
    """The checkpoint of a step, as far as it says how long the run took."""
    folder = output / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    record = {"format": FORMAT, "progress": asdict(Progress(step=step, seconds=seconds)), "recipe": {}}
    (folder / STATE).write_text(json.dumps(record))
    (folder / RANDOM).write_text("[]")
