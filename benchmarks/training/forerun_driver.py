"""Train an EAGLE-3 head with forerun; started by peers.py: ``python forerun_driver.py JOB.json RESULT.json``.

The training loop, objective and online features are those of ``forerun train eagle3``; only the windows come from a
file, so that both arms see the same ones in the same order. Knows no peer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import common
import torch
from common import Clock, WindowBatches
from safetensors.torch import load_file

from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleConfig, EagleHead
from forerun.heads.files import HeadCheckpoint, TargetFacts, write_head
from forerun.losses.objective import FrozenTarget
from forerun.training.features.online import OnlineFeatures
from forerun.training.loop import checkpoint
from forerun.training.loop.trainer import Training
from forerun.training.recipe import TrainSettings

Job = dict[str, Any]


def settings_of(job: Job) -> TrainSettings:
    """Muon and a linear schedule with 1 % of warm-up, as speculators' defaults are; one rate for both optimizers."""
    return TrainSettings(
        steps=job["steps"],
        optimizer="muon",
        learning_rate=job["learning_rate"],
        muon_learning_rate=job["learning_rate"],
        schedule="linear",
        warmup_share=0.01,
        seed=job["seed"],
        save_every_s=0,
        log_every_steps=20,
    )


def main(job_file: str, result_file: str) -> None:
    """The clock covers everything but imports: target, features, head, training, weights on disk."""
    job: Job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    windows = load_file(job["windows"])["windows"]
    began = time.perf_counter()
    model, _ = common.load_target(job["target"], "cpu", "bfloat16")
    names = ("norm_before_fc", "norm_before_residual", "norm_output")
    options = {name: job["post_norm"] for name in names} | {"own_lm_head": job["lm_head"] == "own"}
    config = EagleConfig.for_target("eagle3", model, None, {**options, "boundaries": tuple(job["boundaries"])})
    head = EagleHead.initial(model, config, seed=job["seed"])
    objective = Eagle3Objective(head, FrozenTarget.of(model), Eagle3Settings(steps=job["ttt_steps"]))
    clock = Clock("cpu")
    batches = WindowBatches(
        windows=windows, rows=job["rows"], source=OnlineFeatures(model, config.boundaries), clock=clock
    )
    output = Path(job["output"])
    if checkpoint.latest(output):
        raise SystemExit(f"{output} holds a checkpoint: a timed run begins anew, in another directory")
    result = Training(objective, batches, settings_of(job), output).run()
    facts = TargetFacts.of(model.config, job["target"])
    write_head(HeadCheckpoint.of(head.to(torch.bfloat16)), output / "head", "flat", facts)
    ended = time.perf_counter()
    found = {
        "seconds": ended - began,
        "training_seconds": result.seconds,
        "feature_seconds": clock.seconds["features"],
        "steps": result.steps,
        "trainable_parameters": sum(weight.numel() for weight in head.trainable().values()),
        "tokens": result.steps * job["rows"] * windows.shape[1],
        "head": str(output / "head"),
    }
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
