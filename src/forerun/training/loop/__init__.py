"""The loop that trains any drafter: data in order, gradients exact for any number of processes, nothing saved is lost.

Knows steps, optimizers, checkpoints and processes. Does not know what a drafter is, where batches come from, or how the
loss is formed: those are `Batches` and `Objective`.
"""

from forerun.training.loop.distributed import Parallel
from forerun.training.loop.objective import Batches, LossReport, Objective
from forerun.training.loop.settings import TrainSettings
from forerun.training.loop.trackers import Tracker, tracker
from forerun.training.loop.trainer import TrainResult, train

__all__ = [
    "Batches",
    "LossReport",
    "Objective",
    "Parallel",
    "Tracker",
    "TrainResult",
    "TrainSettings",
    "tracker",
    "train",
]
