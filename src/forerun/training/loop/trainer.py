"""The training loop decides where a run begins, steps, evaluates, writes checkpoints, and ends.

Before the first step a range test may try several learning rates in short runs from the same weights, on the same
batches. Each trial warms up and falls to zero like a run of its own, so that a high rate is judged by what it leaves,
not by its noise. A run is longer than a trial and wants a lower rate, so of rates that are nearly as good the lowest is
taken.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from forerun.errors import ArgumentError, CheckpointError, NumericError
from forerun.losses.objective import Batches, Objective
from forerun.training.loop import checkpoint
from forerun.training.loop.distributed import Parallel, gather_parameters, wrap_parallel
from forerun.training.loop.trackers import Bar, JsonLines, Tracker
from forerun.training.loop.update import Sums, backward, build_optimizers, scale, set_rate
from forerun.training.recipe import TrainSettings
from forerun.writing import tidy, write_file

FACTORS = (1.0, 3.0, 10.0, 30.0)
"""Factors on both peak rates, lowest first. The defaults suit large heads and long runs; small heads that train for an
hour want more."""
LEAST = 24  # Steps of a trial
WARMUP = 0.2  # Share of a trial in which the rate rises
ALIKE = 0.06  # Share of the loss by which a higher rate must be better
WORSE = 1.2  # Times the best loss at which no higher rate is tried


def try_rates(training: Training, steps: int) -> dict[float, float]:
    """Map each factor to the mean loss of the last quarter of its trial of so many steps, in nats; infinite where it
    came apart. Weights, optimizers, which have no state so far, and random states are afterwards what they were.

    All processes must call it.
    """
    weights = [parameter for parameter in training.module.parameters() if parameter.requires_grad]
    former_weights = [weight.detach().clone() for weight in weights]
    losses = dict[float, float]()
    for factor in FACTORS:
        with checkpoint.preserve_random():
            losses[factor] = _try_rate(training, factor, steps)
        with torch.no_grad():
            for weight, former in zip(weights, former_weights, strict=True):
                weight.copy_(former)
        for optimizer in training.optimizers:
            optimizer.state.clear()
        if losses[factor] > WORSE * min(losses.values()):
            break  # a higher one would be worse still
    return losses


def _try_rate(training: Training, factor: float, steps: int) -> float:
    settings, losses = training.settings, list[float]()
    for step in range(steps):
        position = step * settings.accumulation
        sums = backward(training.model, training.batches, position, 0.0, settings, training.parallel)
        rising = (step + 1) / max(1, round(WARMUP * steps))
        norm = training.move(sums, factor * min(1.0, rising, 1 - step / steps), {})
        if sums.broken or not math.isfinite(norm):
            return math.inf
        losses += [sums.loss / sums.weight] if sums.weight else []
    last = losses[-max(1, len(losses) // 4) :]
    return sum(last) / len(last) if last else math.inf


def choose_factor(losses: Mapping[float, float]) -> float:
    """Return the factor with the lowest loss; of those that are alike the lowest factor, and 1 where all came apart."""
    best = min(losses.values())
    if not math.isfinite(best):
        return 1.0
    return min(factor for factor, loss in losses.items() if loss <= best * (1 + ALIKE))


Evaluate = Callable[[int], Mapping[str, float]]
Reason = Literal["finished", "already_finished", "interrupted", "time", "no_gain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """How training ended."""

    # "already_finished": an earlier run had done all steps; "time": `max_seconds` have passed; "no_gain": `patience`
    reason: Reason
    steps: int
    tokens: int
    loss: float | None  # Nats per counted prediction in the last step of this run that had any
    best: float | None
    best_step: int | None  # Its weights are in ``output/best``
    checkpoint: Path  # Path of the last one. Under FSDP2 the module stays sharded: read the weights from here.
    seconds: float  # Of this run, from the loading of its checkpoint to its end
    training_seconds: (
        float  # Of the steps, earlier runs into the same output included: what `seconds` of a recipe limits
    )
    evaluation_seconds: float  # Of the evaluations, earlier runs included

    @property
    def interrupted(self) -> bool:
        return self.reason == "interrupted"


class Training:
    """Trains an objective's module in place, on from the newest checkpoint in `output`;
    on all processes.

    The first SIGINT or SIGTERM lets the step finish, saves and returns; the second raises `KeyboardInterrupt`.

    Args:
        objective: the loss; its module must be on the device. Trainable parameters are turned into float32.
        output: directory of ``checkpoint-<step>/``, ``best/``, ``log.jsonl`` and ``run.json``.
        parallel: None is a single process on the device of the module.
        trackers: besides ``log.jsonl`` and the console; used by the first process, closed at the end.
        evaluate: optimizer step -> values. All processes call it, with whole parameters and the module in eval mode;
            the first one's values count. Random draws in it do not touch training.
        recipe: what else decides what is trained, by key, as plain values: data, target, ... A checkpoint of another
            one is refused without `allow_changes`. Keys with ``evaluation.`` in front say what `evaluate` measures.

    NumericError for a loss or gradient that is not finite, CheckpointError where nothing can be written or read:
    earlier checkpoints are intact. ArgumentError for nothing to train.
    """

    def __init__(
        self,
        objective: Objective,
        batches: Batches,
        settings: TrainSettings,
        output: Path,
        *,
        parallel: Parallel | None = None,
        trackers: Sequence[Tracker] = (),
        evaluate: Evaluate | None = None,
        recipe: Mapping[str, Any] | None = None,
        allow_changes: bool = False,
    ) -> None:
        self.began, self.batches, self.settings = time.monotonic(), batches, settings
        self.output, self.evaluate = output, evaluate
        fixed = self.recipe = json.loads(json.dumps({**(recipe or {}), **settings.fixed()}))
        self.module = module = objective.parameters_module()
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if not trainable:
            raise ArgumentError(
                "The objective's module has no trainable parameter; set requires_grad on what shall learn."
            )
        for parameter in trainable:
            parameter.data = parameter.data.float()
        self.parallel = parallel = parallel or Parallel(device=trainable[0].device)
        start = parallel.on_first(lambda: start_from(output, fixed, allow_changes=allow_changes))
        self.saved = path = start.path if start else None
        if path:
            parallel.on_first(lambda: checkpoint.load_weights(path, module))
        self.model = wrap_parallel(objective, parallel)
        self.rates, self.optimizers = objective.rates, build_optimizers(module, settings, objective.rates(0.0))
        if path:
            checkpoint.load_optimizers(path, module, self.optimizers, parallel)
        self.progress = start.progress if start else checkpoint.Progress()
        self.saved_step, self.saved_at = self.progress.step if start else -1, time.monotonic()
        self.interrupts, self.window, self.last = Interrupts(), Sums(), dict[str, float]()
        self.loss: float | None = None
        step = self.progress.step
        checkpoint.begin_random(start.random if start else [], settings.seed, parallel.rank, step)
        parallel.on_first(lambda: _write_run(self))
        self.trackers: list[Tracker] = []
        if parallel.first:
            self.trackers = [JsonLines(output / "log.jsonl", step), Bar(lambda: self.total, step), *trackers]

    def run(self) -> TrainResult:
        """Step until there is a reason to stop."""
        first = self.progress.step
        self.module.train()
        with self.interrupts, ExitStack() as stack:
            for tracker in self.trackers:
                stack.callback(tracker.close)
            if first < self.total:
                moments, best = self.settings.moments, self.evaluate is not None
                self.parallel.on_first(lambda: checkpoint.check_room(self.output, self.module, moments, best=best))
            if self.settings.find_rate and first == 0:
                self._find_rate()
            while True:
                reason, save_due = self._consult()
                over = self.progress.step >= self.total
                if over and self.window.tokens:
                    self._log_window()
                if reason or save_due:  # before an evaluation, which may fail
                    self._save()
                done = self.progress
                share = done.evaluation_seconds / max(done.seconds, 1e-9)
                due = over or self.settings.evaluates(done.step, done.evaluated, self.total, share=share)
                if due and reason != "interrupted" and self.evaluate and self.progress.evaluated != self.progress.step:
                    self._evaluate(self.evaluate)
                patience = self.settings.patience
                if reason is None and patience is not None and self.progress.stale >= patience:
                    reason = "no_gain"
                    self._save()
                if reason:
                    break
                self._step()
        assert self.saved is not None
        return TrainResult(
            reason="already_finished" if reason == "finished" and self.progress.step == first else reason,
            steps=self.progress.step,
            tokens=self.progress.tokens,
            loss=self.loss,
            best=self.progress.best,
            best_step=self.progress.best_step,
            checkpoint=self.saved,
            seconds=time.monotonic() - self.began,
            training_seconds=self.progress.seconds,
            evaluation_seconds=self.progress.evaluation_seconds,
        )

    @property
    def total(self) -> int:
        """Return the steps in all, as far as can be said by now; the same on all processes between
        `_consult` and the step.
        """
        return self.settings.total_steps(self.batches.steps_per_epoch, self.progress.step, self.progress.seconds)

    def _consult(self) -> tuple[Reason | None, bool]:
        """Return whether to stop and whether to save: the same on all processes, whoever was
        signalled and whatever clocks.
        """
        now, step, settings = time.monotonic(), self.progress.step, self.settings
        late = settings.max_seconds is not None and now - self.began >= settings.max_seconds
        old = bool(settings.save_every_s) and now - self.saved_at >= settings.save_every_s
        mine = [self.interrupts.requested, *((late, old, self.progress.seconds) if self.parallel.first else (0, 0, 0))]
        interrupted, late_votes, old_votes, spent = self.parallel.sums(torch.tensor(mine, dtype=torch.float64))
        self.progress.seconds = spent
        save_due = step > 0 and (old_votes > 0 or _due(step, settings.save_every_steps))
        if interrupted:
            return "interrupted", save_due
        if step >= self.total:
            return "finished", save_due
        return "time" if late_votes else None, save_due

    def _step(self) -> None:
        began = time.monotonic()
        settings, progress = self.settings, self.progress
        done = progress.step / self.total
        sums = backward(self.model, self.batches, progress.position, done, settings, self.parallel)
        if sums.broken:
            raise NumericError(self._not_finite("loss", sums.broken))
        factor = rate_factor(progress.step, self.total, settings)
        norm = self.move(sums, factor * progress.rate_factor, self.rates(done))
        if not math.isfinite(norm):
            positions = range(progress.position, progress.position + settings.accumulation)
            ranks = self.parallel.world
            raise NumericError(self._not_finite("gradient", list(itertools.product(positions, range(ranks)))))
        self.loss = sums.loss / sums.weight if sums.weight else self.loss
        progress.step += 1
        progress.position += settings.accumulation
        progress.tokens += sums.tokens
        sums.seconds = time.monotonic() - began
        progress.seconds += sums.seconds
        self.window.add(sums)
        rate = settings.learning_rate * factor * progress.rate_factor
        self.last = {"learning_rate": rate, "gradient_norm": norm}
        if _due(progress.step, settings.log_every_steps):
            self._log_window()

    def _log_window(self) -> None:
        """Log a line about the steps since the last one."""
        self._log({**self.window.means(), **self.last, "tokens": self.progress.tokens})
        self.window = Sums()

    def move(self, sums: Sums, factor: float, rates: Mapping[str, float]) -> float:
        """Move the weights by `factor` of their peak rates, and of each part's by what `rates` has for it; return the
        norm of the gradient before clipping. Where that or a loss is not finite nothing moves.
        """
        norm = 0.0
        if sums.weight and not sums.broken:  # else no prediction counted, and there is nothing to follow
            # Gradients are means over processes: undone here, together with the division by the weight.
            norm = scale(self.module, self.parallel.world / sums.weight, self.settings.gradient_clip)
            if math.isfinite(norm):
                set_rate(self.optimizers, factor, rates)
                for optimizer in self.optimizers:
                    optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        return norm

    def _not_finite(self, what: str, where: Sequence[tuple[int, int]]) -> str:
        places = " or ".join(f"batch {position} of rank {rank}" for position, rank in where)
        latest = f"the last checkpoint is {self.saved}" if self.saved else "no checkpoint had been written yet"
        return (
            f"The {what} of step {self.progress.step + 1} is not finite: {places}, of {self.parallel.world}. This "
            f"step changed no weight, nothing was overwritten, and {latest}. Look at that batch, or lower the learning "
            f"rate{' (with --allow-changes)' if self.saved else ''}, and start again."
        )

    def _evaluate(self, evaluate: Evaluate) -> None:
        """Evaluate, keep the weights if they are the best, and let the checkpoint of this step, if any, know."""
        self._judge(evaluate)
        if (path := self.saved) is not None and self.saved_step == self.progress.step:
            self.parallel.on_first(lambda: checkpoint.save_progress(path, self.progress))

    def _judge(self, evaluate: Evaluate) -> None:
        step, began = self.progress.step, time.monotonic()
        self.module.eval()
        try:
            with gather_parameters(self.model), checkpoint.preserve_random():
                values = {name: float(value) for name, value in evaluate(step).items()}
        finally:
            self.module.train()
        values, seconds = self.parallel.share((values, time.monotonic() - began))
        self.progress.evaluation_seconds += seconds
        self.progress.evaluated = step
        self._log({f"eval/{name}": value for name, value in values.items()})
        deciding = self.settings.best_metric or next(iter(values), None)
        if deciding is None:
            return
        if deciding not in values:
            raise ArgumentError(f"best_metric={deciding!r} is not among the values of evaluation: {sorted(values)}.")
        best = self.progress.best
        self.progress.stale += 1
        if math.isfinite(values[deciding]) and (best is None or values[deciding] > best):
            self.progress.stale = 0
            checkpoint.save_best(self.output, self.module, self.parallel, step, values)
            self.progress.best, self.progress.best_step = values[deciding], step

    def _find_rate(self) -> None:
        """Look for the best factor on the peak rates, keep it, and log what each one came to."""
        # All trials together are a tenth of the run, within limits. In eight steps a rate that is too high looks no
        # worse than it is, but one that is right looks bad: SmolLM2's head wants more.
        losses = try_rates(self, min(40, max(LEAST, self.total // (10 * len(FACTORS)))))
        rate = self.settings.learning_rate
        self._log({f"loss at rate {factor * rate:.1e}": loss for factor, loss in losses.items()})
        self.progress.rate_factor = choose_factor(losses)
        self._log({"found_learning_rate": self.progress.rate_factor * rate})

    def _save(self) -> None:
        if self.saved_step == self.progress.step:
            return
        self.saved = checkpoint.save(
            self.output, self.module, self.optimizers, self.progress, self.parallel, self.recipe
        )
        self.saved_step, self.saved_at = self.progress.step, time.monotonic()
        if self.parallel.first:
            checkpoint.rotate(self.output, self.settings.keep_checkpoints)

    def _log(self, values: Mapping[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(self.progress.step, values)


ECHO_S = 1.0  # torchrun passes on the Ctrl-C that the terminal has already sent to every process: it arrives twice


class Interrupts:
    """While entered (main thread), SIGINT and SIGTERM set `requested`; another one raises `KeyboardInterrupt`."""

    def __init__(self) -> None:
        self.requested = False
        self._since = 0.0
        self._former: dict[int, Any] = {}
        self._echo_s = ECHO_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._former = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.requested:
            self.requested, self._since = True, now
        elif now - self._since >= self._echo_s:
            raise KeyboardInterrupt


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def rate_factor(step: int, total: int, settings: TrainSettings) -> float:
    """Return the factor on the peak learning rate at a step from 0, in (0, 1] for steps below
    `total`.

    It warms up linearly; then it goes from 1 at the end of warm-up to `min_rate_share` at step
    `total`, one after the last.
    """
    warmup = settings.warmup(total)
    if step < warmup:
        return (step + 1) / warmup
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    left = 0.5 * (1 + math.cos(math.pi * done)) if settings.schedule == "cosine" else 1 - done
    return settings.min_rate_share + (1 - settings.min_rate_share) * left


def start_from(output: Path, recipe: Mapping[str, Any], *, allow_changes: bool) -> checkpoint.Saved | None:
    """Return the newest checkpoint, to go on from; None to begin anew.

    What was left half-written is removed; where evaluation measures something else than before, the
    best value so far is forgotten, and where the caller allows changes also if ``best/`` is lost.
    Errors as in `Training`.
    """
    tidy(output)
    path = checkpoint.latest(output)
    if path is None:
        return None
    saved = checkpoint.Saved(path)
    changed = _changes(saved.recipe, recipe)
    if changed and not allow_changes:
        raise ArgumentError(
            f"{path} was trained under another recipe: {'; '.join(changed.values())}. Give the former values or "
            "another output directory, or go on under the new recipe with --allow-changes (allow_changes=True)."
        )
    lost = saved.progress.best is not None and not (output / "best" / checkpoint.MODEL).is_file()
    if lost and not allow_changes:
        raise CheckpointError(
            f"{output / 'best'} is missing, the best weights (of step {saved.progress.best_step}) that {path.name} "
            "goes on from. Copy best/ beside the checkpoint from where that came from, or go on with --allow-changes "
            "(allow_changes=True), which forgets them and keeps the best from here on."
        )
    if lost or any(key.startswith("evaluation.") or key == "training.best_metric" for key in changed):
        saved.progress.best, saved.progress.best_step, saved.progress.evaluated = None, None, 0
    return saved


def _changes(former: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, str]:
    """Map keys of the recipe that differ to the former and the new value, in words."""

    def shown(values: Mapping[str, Any], key: str) -> str:
        return repr(values[key]) if key in values else "not recorded"

    pairs = {key: (shown(former, key), shown(recipe, key)) for key in {**former, **recipe}}
    return {key: f"{key} was {was}, is {now}" for key, (was, now) in pairs.items() if was != now}


def _write_run(training: Training) -> None:
    """Write ``output/run.json``; the runs that went before in this directory move into "previous"."""
    path = training.output / "run.json"
    settings = training.settings
    parallel = training.parallel
    try:
        former = json.loads(path.read_text(encoding="utf-8"))
        previous = [*former.pop("previous", []), former]
    except (OSError, ValueError, AttributeError):
        previous = []
    cuda = parallel.device.type == "cuda"
    packages = ("forerun", "torch", "transformers")
    run = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "seed": settings.seed,
        "settings": asdict(settings),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "device": torch.cuda.get_device_name(parallel.device) if cuda else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "world": parallel.world,
        "mode": parallel.mode,
        "recipe": training.recipe,
        "steps": training.total,
        "resumed_from": training.saved,
        "previous": previous,
    }
    try:
        write_file(path, json.dumps(run, indent=1, default=str) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error}. Choose another output, or make room.") from error


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
