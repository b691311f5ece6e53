"""This module measures what an untrained head costs, trains the one that was chosen, and reads what the training
said.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.control.costs import CostModel, DraftCost
from forerun.decode.drafter import DrafterSetup
from forerun.drafters import build
from forerun.drafters.kinds import kind_named
from forerun.model.transformers_target import require_layers
from forerun.plan.measured import measure_draft
from forerun.speedup.choice import (
    FreeSpeed,
    HeadChoice,
    HeadForecast,
    HeadShape,
    TrainingBudget,
    TrainingProbe,
    choose_head,
    forecast_head,
)
from forerun.speedup.settings import SETTINGS, SpeedupRequest
from forerun.training.data.store import PackedWindows, PreparedData, coverage, draft_vocabulary, token_counts
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import TrainRecipe, make_recipe
from forerun.training.run import TrainingRun

if TYPE_CHECKING:
    from forerun.engine.llm import LLM

PROBE_DEPTH = 4  # Levels of the drafts that are timed
PROBED = 8192  # Draft vocabulary of the head that is measured


def choose_for(
    llm: LLM,
    request: SpeedupRequest,
    cost: CostModel,
    folder: Path,
    *,
    parameters: int,
    seconds: float,
    free: Mapping[str, FreeSpeed],
    tell: Callable[[str], None],
) -> tuple[HeadChoice, list[dict[str, Any]]]:
    """Choose what to train in `seconds`, and return that with everything that was considered.

    `parameters` are the target's.
    """
    data, trial = (PreparedData(folder / "prepared" / part) for part in ("train", "trial"))
    size = llm.target.vocab_size
    budget = TrainingBudget(
        seconds=max(0.0, seconds),
        tokens=int(data.manifest["counts"]["counted_tokens"]),
        target_parameters=parameters,
    )
    counts, tried = token_counts(data, size), token_counts(trial, size)
    vocabularies = {
        wanted: coverage(tried, draft_vocabulary(counts, wanted))
        for wanted in SETTINGS.head.vocab_sizes
        if wanted < size
    }
    forecasts = list[HeadForecast]()
    for kind in SETTINGS.head.kinds if request.kind is None else (request.kind,):
        shapes = [_shape(llm, kind, None, 1.0)]
        shapes += [_shape(llm, kind, wanted, share) for wanted, share in vocabularies.items()]
        probed = min(shapes, key=lambda one: abs((one.vocab_size or size) - PROBED))
        tell(f"an untrained {kind} head")
        # TrainingRun loads the target once more, and measures what a step takes.
        probe = _probe(llm, request, folder, data, probed)
        forecasts += [
            forecast_head(dataclasses.replace(shape, steps=steps), probe, budget, cost, free)
            for shape in shapes
            for steps in (SETTINGS.head.steps if "steps" in _settings_of(kind) else (1,))
        ]
    choice = choose_head(forecasts, free, budget, forced=request.kind is not None)
    return choice, [HeadChoice(best=one, train=False, reason="").record() for one in forecasts]


def _settings_of(kind: str) -> set[str]:
    """Return the names of the settings that a kind's objective has."""
    from forerun.drafters.kinds import objective_for

    return {field.name for field in dataclasses.fields(objective_for(kind_named(kind)).Settings)}


def _head(llm: LLM, kind: str, vocab_size: int | None, device: str) -> Any:
    """Return a head with random weights."""
    known = kind_named(kind)
    config = known.head.Config.for_target(
        known.name, require_layers(llm.target, kind).model, vocab_size, SETTINGS.head.options.get(kind, {})
    )
    with torch.device(device):
        return known.head(config)


def _shape(llm: LLM, kind: str, vocab_size: int | None, share: float) -> HeadShape:
    head = _head(llm, kind, vocab_size, "meta")
    parameters = sum(weight.numel() for weight in head.trainable().values())
    return HeadShape(kind=kind, vocab_size=vocab_size, steps=7, parameters=parameters, coverage=share)


def _probe(llm: LLM, request: SpeedupRequest, folder: Path, data: PreparedData, shape: HeadShape) -> TrainingProbe:
    """Measure a draft and a training step of an untrained head."""
    draft = _time_drafts(llm, shape, data)
    recipe = make_training(request, folder, shape, seconds=1.0, output=folder / "probe")
    run = TrainingRun(recipe, Parallel.from_environment("ddp"))
    steps = [float(run.measure()["seconds_per_step"]) for _ in range(2)]
    windows = PackedWindows(data, length=recipe.windows.length, rows=1, seed=0)
    counted = data.manifest["counts"]["counted_tokens"] / windows.steps_per_epoch()
    return TrainingProbe(shape=shape, step_s=min(steps), counted=counted, draft=draft)


def _time_drafts(llm: LLM, shape: HeadShape, data: PreparedData) -> DraftCost:
    target = llm.target
    head = _head(llm, shape.kind, shape.vocab_size, "cpu").to(target.device, target.dtype).eval()
    setup = DrafterSetup(target=target, tokenizer=llm.tokenizer, rows=target.rows, slots=target.slots)
    depth = min(PROBE_DEPTH, head.config.max_depth or PROBE_DEPTH)
    options = {"model": head, "num_speculative_tokens": depth, "shape": (1,) * depth}
    drafter = build(shape.kind, options, setup)
    longest = int(data.lengths.argmax())
    text = data.document(longest)[0][: llm.max_model_len // 2].tolist()
    return measure_draft(target, drafter, text, depth=depth)


def make_training(
    request: SpeedupRequest, folder: Path, shape: HeadShape, *, seconds: float, output: Path
) -> TrainRecipe[Any]:
    """Return the recipe that trains a head of `shape` for `seconds` on the completions in `folder`, and evaluates it
    on the trial prompts.
    """
    settings = SETTINGS.head
    objective = {"steps": shape.steps} if "steps" in _settings_of(shape.kind) else {}
    values: dict[str, Any] = {
        "target": request.model,
        "target_dtype": request.dtype,
        "data": str(folder / "prepared" / "train"),
        "output": str(output),
        "draft": {"vocab_size": shape.vocab_size, "options": dict(settings.options.get(shape.kind, {}))},
        "objective": objective,
        "windows": {"length": settings.window, "rows": 1},
        "training": {
            "seconds": seconds,
            "learning_rate": settings.learning_rate,
            "warmup_steps": settings.warmup_steps,
            "save_every_s": 120.0,
        },
        "evaluation": {"prompts": str(folder / "prepared" / "trial"), "prompt_tokens": settings.window},
    }
    return make_recipe(shape.kind, values)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTraining:
    """A `HeadTraining` is the run of ``forerun train`` for what was chosen."""

    recipe: TrainRecipe[Any]

    @classmethod
    def of(cls, request: SpeedupRequest, choice: Mapping[str, Any], folder: Path) -> HeadTraining:
        """Return the training of a choice's record, in a folder of its own: another budget begins anew."""
        shape = HeadShape(
            kind=choice["kind"],
            vocab_size=choice["draft_vocab_size"],
            steps=choice["unrolled_steps"],
            parameters=choice["parameters"],
            coverage=choice["coverage"],
        )
        seconds = choice["training_seconds"]
        output = folder / "training" / f"{shape.kind}-{seconds:.0f}s"
        return cls(recipe=make_training(request, folder, shape, seconds=seconds, output=output))

    def run(self) -> dict[str, Any]:
        """Train, on from where an earlier run stopped, and return the outcome of `TrainingRun.train`."""
        return TrainingRun(self.recipe, Parallel.from_environment("ddp")).train()

    def history(self) -> dict[str, Any]:
        """Return loss and acceptance over steps, as the log has them."""
        lines = (Path(self.recipe.output) / "log.jsonl").read_text(encoding="utf-8").splitlines()
        entries = [json.loads(line) for line in lines]
        losses = [[one["step"], one["loss"]] for one in entries if one.get("loss") is not None]
        found = [
            {"step": one["step"], **{name[5:]: value for name, value in one.items() if name.startswith("eval/")}}
            for one in entries
        ]
        return {"losses": losses, "evaluations": [one for one in found if len(one) > 1]}
