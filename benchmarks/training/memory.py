"""Peak memory of a training step by number of unrolled steps T: ``python memory.py``.

Every configuration runs in a process of its own, on random features, with the training loop's own step. On the CPU the
peak is that of the resident set (``VmHWM``, reset after a warm-up step; glibc is told to give freed blocks back at
once) and, beside it, what the allocator handed out above the start of the step, from torch's profiler. On CUDA it is
``max_memory_allocated``. The goal counts growth per extra step as a share of one step's float32 logits (B, S, Vd).
The target is not there: its features come once, whatever T is.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn

from benchmarks.suite.goals import at_most
from forerun.heads.eagle import Eagle3Objective, Eagle3Settings, EagleConfig, EagleHead
from forerun.losses.objective import FeatureBatch, FrozenTarget
from forerun.training.loop.distributed import Parallel, wrap_parallel
from forerun.training.loop.update import backward, build_optimizers, scale
from forerun.training.recipe import TrainSettings
from forerun.types import LAST_HIDDEN

GOAL = 0.15
"""Growth per extra step, as a share of one step's logits."""
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Freed blocks leave the resident set, so that its peak is that of what is in use."""
BOUNDARIES = (2, 4, 6)
MEBIBYTE = 2**20


class RandomBatches:
    """One batch of random features, again and again."""

    steps_per_epoch = 1

    def __init__(self, given: Mapping[str, Any], device: torch.device) -> None:
        shape = (given["rows"], given["length"])
        tokens = common.whole_windows(torch.randint(given["vocab"], shape)).to(device)
        features = {
            boundary: torch.randn(*shape, given["hidden"], dtype=torch.bfloat16, device=device)
            for boundary in (*BOUNDARIES, LAST_HIDDEN)
        }
        self._batch = FeatureBatch(batch=tokens, features=features)

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """The same for every step."""
        return self._batch


def head_of(given: Mapping[str, Any]) -> EagleHead:
    """A head of one layer with heads of 64."""
    hidden = given["hidden"]
    config = EagleConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
        head_dim=64,
        vocab_size=given["vocab"],
        draft_vocab_size=given["draft_vocab"],
        boundaries=BOUNDARIES,
        own_lm_head=given["lm_head"] == "own",
    )
    head = EagleHead(config).float()
    head.set_vocabulary(torch.arange(given["draft_vocab"]))
    return head


def measure_one(given: Mapping[str, Any]) -> dict[str, float]:
    """Peak bytes of one step, after one step of warm-up; in a process of its own."""
    device = torch.device(given["device"])
    if given["threads"]:
        torch.set_num_threads(given["threads"])
    torch.manual_seed(0)
    head = head_of(given).to(device).train()
    embedding = nn.Embedding(given["vocab"], given["hidden"]).to(device, torch.bfloat16).requires_grad_(False)
    target = FrozenTarget(embedding=embedding, lm_head=embedding.weight)
    objective = Eagle3Objective(
        head, target, Eagle3Settings(steps=given["steps"], gradient_checkpointing=given["checkpointing"])
    )
    parallel = Parallel(device=device)
    model, batches = wrap_parallel(objective, parallel), RandomBatches(given, device)
    settings = TrainSettings(optimizer="adamw")
    optimizers = build_optimizers(head, settings)

    def step() -> None:
        sums = backward(model, batches, 0, 0.0, settings, parallel)
        scale(head, 1 / sums.weight, settings.gradient_clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peak = torch.cuda.max_memory_allocated()
        return {"peak": peak, "allocated": peak - before}
    reset = _reset_peak()
    step()
    return {"peak": _peak(reset), "allocated": _allocated(step)}


def _reset_peak() -> bool:
    """Linux: let the peak of the resident set begin anew; False where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _peak(reset: bool) -> int:
    """Bytes: since the reset, or of the whole process."""
    if not reset:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) * 1024


def _allocated(step: Any) -> int:
    """Most bytes that torch's allocator had handed out in a step, above what it held at its start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def in_a_process(given: Mapping[str, Any]) -> dict[str, float]:
    """What `measure_one` finds, in a fresh process."""
    command = [sys.executable, __file__, "--one", json.dumps(given)]
    done = subprocess.run(command, env={**os.environ, **GLIBC}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{given} failed:\n{done.stderr[-2_000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def configurations(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is measured, T in the innermost loop."""
    fixed = {"rows": arguments.rows, "length": arguments.length, "vocab": arguments.vocab}
    fixed |= {"draft_vocab": arguments.draft_vocab, "device": arguments.device, "threads": arguments.threads}
    return [
        {**fixed, "hidden": hidden, "lm_head": lm_head, "checkpointing": checkpointing, "steps": steps}
        for hidden in arguments.hidden
        for lm_head in arguments.lm_heads
        for checkpointing in (False, True)
        for steps in arguments.steps
    ]


def summary(runs: Sequence[Mapping[str, Any]], logits: int) -> dict[str, Any]:
    """Growth over T of one head, as shares of the logits' bytes."""
    first, last = runs[0], runs[-1]
    extra = max(1, last["steps"] - first["steps"])
    shares = {
        kind: (last[kind] - first[kind]) / extra / logits if len(runs) > 1 else 0.0 for kind in ("peak", "allocated")
    }
    return {
        "hidden": first["hidden"],
        "lm_head": first["lm_head"],
        "checkpointing": "yes" if first["checkpointing"] else "no",
        **{f"T={run['steps']}, MiB": run["peak"] / MEBIBYTE for run in runs},
        "growth / logits": shares["peak"],
        "the same, allocator": shares["allocated"],
    }


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, nargs="+", default=list(range(1, 8)), help="T, ascending")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512], help="hidden sizes, multiples of 64")
    parser.add_argument("--lm-heads", nargs="+", choices=("own", "shared"), default=["own"], help="trained or frozen")
    parser.add_argument("--draft-vocab", type=int, default=32_768)
    parser.add_argument("--vocab", type=int, default=32_768, help="of the target")
    parser.add_argument("--length", type=int, default=1024, help="S, tokens of a window")
    parser.add_argument("--rows", type=int, default=1, help="B, windows of a step")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main() -> None:
    """Measure, and write the entry ``memory`` of training.json."""
    arguments = arguments_of()
    if arguments.one:
        sys.stdout.write(json.dumps(measure_one(json.loads(arguments.one))) + "\n")
        return
    machine = common.start(arguments)
    runs = []
    for given in configurations(arguments):
        common.say(f"hidden {given['hidden']}, T = {given['steps']}, checkpointing {given['checkpointing']}")
        runs.append({**given, **in_a_process(given)})
    logits = arguments.rows * arguments.length * arguments.draft_vocab * 4
    each = len(arguments.steps)
    lines = [summary(runs[start : start + each], logits) for start in range(0, len(runs), each)]
    goals = [
        at_most(
            f"growth of the peak per extra step / logits, hidden {line['hidden']}, lm_head {line['lm_head']}, "
            f"checkpointing {line['checkpointing']}",
            GOAL,
            line["growth / logits"],
            f"allocator {line['the same, allocator']:.3f}; logits of a step are {logits / MEBIBYTE:.0f} MiB",
        )
        for line in lines
    ]
    report = {"machine": machine, "settings": vars(arguments), "logits_bytes": logits, "runs": runs, "goals": goals}
    tables = [common.rows_table("Peak of a training step", lines), common.goals_table(goals)]
    common.finish("memory", arguments, report, tables)


if __name__ == "__main__":
    main()
