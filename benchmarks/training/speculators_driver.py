"""Train an EAGLE-3 head with speculators 0.9 on a CPU; runs in speculators' own environment, started by peers.py.

``python speculators_driver.py JOB.json RESULT.json``. Features come from a plain forward pass of the target in bfloat16
and go to the files that speculators reads; then its own command-line configuration and Trainer run. Four changes are
made to it in memory (no file is edited): the local rank and the device type say "cpu", the device barrier of its step
timer does nothing, and its log lines go to stderr. Knows nothing of forerun: the two libraries share no process.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from speculators.train import cli
from speculators.train import trainer as trainer_module
from speculators.train.config import TrainConfig
from torch import Tensor
from transformers import AutoModelForCausalLM

VALIDATION_WINDOWS = 2
"""speculators wants a validation split; one batch of it costs a third of a step."""
WINDOWS_AT_ONCE = 8
Job = dict[str, Any]


def say(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class LogLines(logging.Handler):
    """speculators logs metrics as mappings that no handler prints."""

    def emit(self, record: logging.LogRecord) -> None:
        """As it is."""
        say(str(record.msg))


def patch_for_cpu(seen: dict[str, float]) -> None:
    """All four; `seen` gets the steps and the seconds of training."""
    trainer = trainer_module.Trainer
    initialize, run, set_up_metrics = trainer.__init__, trainer.run_training, cli.setup_metric_logger
    trainer_module.get_local_rank = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_: None

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.device_type = "cpu"

    def timed(self: Any) -> None:
        began = time.perf_counter()
        run(self)
        seen["training_seconds"] = time.perf_counter() - began
        seen["steps"] = self.global_step
        seen["trainable_parameters"] = sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    def spoken(*args: Any, **kwargs: Any) -> None:
        set_up_metrics(*args, **kwargs)  # takes away handlers that were there before
        logging.getLogger("speculators.metrics").addHandler(LogLines())

    trainer.__init__, trainer.run_training, cli.setup_metric_logger = on_cpu, timed, spoken


def arranged(windows: Tensor, seed: int) -> Tensor:
    """The windows in the order from which speculators' own shuffle makes the given one; validation at the end."""
    shuffled = np.random.default_rng(seed=seed).permutation(np.arange(len(windows)))
    placed = torch.empty_like(windows)
    placed[torch.from_numpy(shuffled)] = windows
    return torch.cat([placed, windows[:VALIDATION_WINDOWS]])


@torch.no_grad()
def extract(job: Job, windows: Tensor, folder: Path) -> None:
    """Write token columns and, per window, the states (S, boundaries + 1, H) that speculators reads.

    The last one is the output of the last layer before the final norm: speculators applies that norm itself.
    """
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.bfloat16).eval()
    layers, caught = model.model.layers, {}
    wanted = [*job["boundaries"], len(layers)]

    def hook(boundary: int) -> Any:
        def catch(_module: Any, _inputs: Any, output: Any) -> None:
            caught[boundary] = output[0] if isinstance(output, tuple) else output

        return catch

    for boundary in wanted:
        layers[boundary - 1].register_forward_hook(hook(boundary))
    states = folder / "hidden_states"
    states.mkdir(parents=True)
    for first in range(0, len(windows), WINDOWS_AT_ONCE):
        tokens = windows[first : first + WINDOWS_AT_ONCE]
        model.model(input_ids=tokens, use_cache=False)
        joined = torch.stack([caught[boundary] for boundary in wanted], dim=2)
        for row, ids in enumerate(tokens):
            tensors = {"hidden_states": joined[row].contiguous(), "token_ids": ids.contiguous()}
            save_file(tensors, states / f"hs_{first + row}.safetensors")
    length = windows.shape[1]
    columns = {
        "input_ids": windows.tolist(),
        "loss_mask": [[1] * length] * len(windows),
        "seq_len": [length] * len(windows),
    }
    data = Dataset.from_dict(columns)
    data.set_format("torch")
    data.save_to_disk(str(folder))


def flags(job: Job, data: Path, count: int) -> list[str]:
    """The command line of ``speculators train``."""
    switch = "--" if job["post_norm"] else "--no-"
    chosen = {
        "verifier-name-or-path": job["target"],
        "data-path": data,
        "save-path": job["output"],
        "speculator-type": "eagle3",
        "num-workers": 0,
        "draft-attn-impl": "sdpa",
        "loss-implementation": "eager",
        "total-seq-len": job["rows"] * job["length"],
        "on-missing": "raise",
        "epochs": 1,
        "log-freq": 20,
        "train-data-ratio": (count + 0.5) / (count + VALIDATION_WINDOWS),
        "ttt-steps": job["ttt_steps"],
        "lr": job["learning_rate"],
        "seed": job["seed"],
    }
    words = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    words += ["--target-layer-ids", *map(str, job["boundaries"])]
    return words + [switch + name for name in ("norm-before-fc", "norm-before-residual", "norm-output")]


def main(job_file: str, result_file: str) -> None:
    """The clock covers everything but imports: target, features, head, training, weights on disk."""
    job: Job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    everything = load_file(job["windows"])["windows"]
    seen: dict[str, float] = {}
    patch_for_cpu(seen)
    began = time.perf_counter()
    count = job["steps"] * job["rows"]
    windows = everything[torch.arange(count) % len(everything)]
    data = Path(job["output"]) / "data"
    extract(job, arranged(windows, job["seed"]), data)
    extracted = time.perf_counter()
    cli.main(TrainConfig.resolve(flags(job, data, count)))
    ended = time.perf_counter()
    result = {
        **seen,
        "seconds": ended - began,
        "feature_seconds": extracted - began,
        "tokens": count * windows.shape[1],
        "head": str(Path(job["output"]) / "0"),
    }
    Path(result_file).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
