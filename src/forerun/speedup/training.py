"""Decides what is worth training within a budget, from the plan's figures, says why, and trains it.

What a head will accept cannot be known before it is trained. It is forecast by how many tokens it will see
(`expected_acceptance`); what drafting and a training step cost is measured with an untrained head, which costs as much
as a trained one; the rest is the planner's arithmetic.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.control.costs import CostModel, DraftCost
from forerun.drafters.kinds import kind_named
from forerun.heads.drafting import repack
from forerun.model.transformers_target import require_layers
from forerun.plan.measured import build_beside, measure_draft
from forerun.plan.planner import PlanLine, PlanLoad
from forerun.plan.planner import plan as make_plan
from forerun.speedup.settings import SETTINGS, SpeedupRequest
from forerun.training.data.store import PackedWindows, PreparedData, coverage, draft_vocabulary, token_counts
from forerun.training.loop.distributed import Parallel
from forerun.training.recipe import TrainRecipe, make_recipe
from forerun.training.run import TrainingRun

if TYPE_CHECKING:
    from forerun.engine.llm import LLM


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The shape of a head that can be chosen, and what follows from it."""

    kind: str
    vocab_size: int | None  # Tokens that it can propose; None: the target's whole vocabulary
    steps: int  # How often it is unrolled on its own features while it trains
    parameters: int  # Trained ones
    coverage: float  # Share of the trial completions' tokens that it can propose

    @property
    def words(self) -> str:
        """Return the shape in words."""
        vocabulary = "the whole vocabulary" if self.vocab_size is None else f"{self.vocab_size:,} tokens"
        return f"{self.kind}, draft vocabulary {vocabulary}, unrolled {self.steps} times"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingProbe:
    """The figures measured with an untrained head of one shape."""

    shape: HeadShape
    step_s: float  # Time of a training step
    counted: float  # Tokens of a step that the head learns, on average
    draft: DraftCost


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBudget:
    """The time and the data that there are to train with."""

    seconds: float
    tokens: int  # Different tokens to learn
    target_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadForecast:
    """The gain expected of a head of a shape."""

    shape: HeadShape
    training_steps: int
    tokens: float  # Tokens that it learns from, a repeated one as often as it still teaches something
    acceptance: float  # Of the first drafted token
    line: PlanLine  # The plan's best draft of at least one token, alone against plain decoding
    speedup: float  # With the free drafter where that one is faster


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeSpeed:
    """How fast a category is with the best drafter that needs no training."""

    speedup: float  # Over plain decoding; 1 where none helps
    share: float  # Of plain decoding's time


def expected_acceptance(tokens: float) -> float:
    """Return the share of first drafted tokens that a head is expected to have accepted when it has learned `tokens`.

    It grows with the logarithm: `HeadSettings` says from which runs that is read.
    """
    settings = SETTINGS.head
    decades = math.log10(max(tokens, 1.0) / settings.first_tokens)
    return min(settings.most_acceptance, max(0.0, settings.first_acceptance + settings.by_decade * decades))


def forecast_head(
    shape: HeadShape, probe: TrainingProbe, budget: TrainingBudget, cost: CostModel, free: Mapping[str, FreeSpeed]
) -> HeadForecast:
    """Forecast what a head of `shape` brings after a training as long as the budget allows."""
    settings = SETTINGS.head
    step_s = probe.step_s * _work(shape, budget) / _work(probe.shape, budget)
    training_steps = int(budget.seconds / step_s)
    tokens = min(training_steps * probe.counted, settings.most_epochs * budget.tokens)
    first = expected_acceptance(tokens) * shape.coverage
    # Beyond the depth that it was unrolled to, a head reads features that it has never seen.
    rates = [first if depth < shape.steps else first * settings.beyond_unrolling for depth in range(16)]
    survival = list(itertools.accumulate(rates, lambda before, rate: before * rate))
    more_ms = cost.pass_ms(1) * (shape.parameters - probe.shape.parameters) / budget.target_parameters
    draft = DraftCost(fixed_ms=probe.draft.fixed_ms, level_ms=max(0.0, probe.draft.level_ms + more_ms))
    lines = make_plan(PlanLoad(survival=survival, cost=cost, draft=lambda rows: draft)).lines
    line = max(lines[1:], key=lambda one: one.speedup)
    shares = sum(one.share for one in free.values())
    seconds = sum(one.share / max(one.speedup, line.speedup) for one in free.values())
    return HeadForecast(
        shape=shape,
        training_steps=training_steps,
        tokens=tokens,
        acceptance=first,
        line=line,
        speedup=shares / seconds if seconds else line.speedup,
    )


def _work(shape: HeadShape, budget: TrainingBudget) -> float:
    """Return what a training step multiplies, in units that matter for comparing shapes: the target once forward, the
    head forward and backward as often as it is unrolled.
    """
    return budget.target_parameters + 3.0 * shape.parameters * shape.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadChoice:
    """The head to train, or none, with the reason."""

    best: HeadForecast | None  # The best of what was considered
    train: bool
    reason: str

    def record(self) -> dict[str, Any]:
        """Return the choice as a JSON object."""
        best = self.best
        fields: dict[str, Any] = {"train": self.train, "reason": self.reason}
        if best is None:
            return fields
        return fields | {
            "kind": best.shape.kind,
            "draft_vocab_size": best.shape.vocab_size,
            "coverage": round(best.shape.coverage, 4),
            "unrolled_steps": best.shape.steps,
            "parameters": best.shape.parameters,
            "training_steps": best.training_steps,
            "tokens": round(best.tokens),
            "expected_acceptance": round(best.acceptance, 4),
            "expected_tokens_per_pass": round(best.line.tokens_per_pass, 4),
            "expected_speedup_alone": round(best.line.speedup, 4),
            "expected_speedup": round(best.speedup, 4),
            "draft_length": best.line.k,
        }


def choose_head(
    forecasts: Sequence[HeadForecast], free: Mapping[str, FreeSpeed], budget: TrainingBudget, *, forced: bool
) -> HeadChoice:
    """Choose the fastest head, or none: where the budget is too short, the prompts too few, or the gain too small.

    `forced` trains in any case in which a step fits.
    """
    settings = SETTINGS.head
    best = max(forecasts, key=lambda one: (one.speedup, one.line.speedup, one.acceptance))
    minutes, steps = budget.seconds / 60, best.training_steps
    shape, line = best.shape.words, best.line
    shares = sum(one.share for one in free.values())
    spent = sum(one.share / one.speedup for one in free.values())
    without = shares / spent if spent else 1.0
    expected = (
        f"{shape}: {steps:,} steps fit in {minutes:.0f} min; of {best.tokens:,.0f} learned tokens it is expected to "
        f"have {best.acceptance:.0%} of first drafted tokens accepted, {line.tokens_per_pass:.2f} tokens a pass and "
        f"{line.speedup:.2f} x plain decoding alone"
    )
    together = f"{best.speedup:.2f} x where the faster of both drafts, against {without:.2f} x without it"
    if steps < settings.fewest_steps and not (forced and steps):
        step_s = budget.seconds / max(steps, 1)
        needed = f" (they take {settings.fewest_steps * step_s / 60:.0f} min)" if steps else ""
        reason = (
            f"the budget is too short for any head: {steps:,} training steps fit into the {minutes:.1f} min that are "
            f"left for training, and a head that has seen fewer than {settings.fewest_steps}{needed} drafts by chance"
        )
        return HeadChoice(best=best, train=False, reason=reason)
    if forced:
        return HeadChoice(best=best, train=True, reason=f"requested. {expected}; {together}")
    if best.speedup < settings.worth * without:
        reason = f"no head is worth its training. The best is {expected}; {together}"
        if best.tokens >= settings.most_epochs * budget.tokens:
            reason += f". More prompts help most: {budget.tokens:,} different tokens of completions are few"
        else:
            reason += ". A longer --budget helps most"
        return HeadChoice(best=best, train=False, reason=reason)
    return HeadChoice(best=best, train=True, reason=f"{expected}; {together}")


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
    entry = kind_named(kind)
    config = entry.head.Config.for_target(
        entry.name, require_layers(llm.target, kind).model, vocab_size, SETTINGS.head.options.get(kind, {})
    )
    with torch.device(device):
        return entry.head(config)


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
    repack(head)  # As the trained one will be
    depth = min(PROBE_DEPTH, head.config.max_depth or PROBE_DEPTH)
    options = {"model": head, "num_speculative_tokens": depth, "shape": (1,) * depth}
    drafter = build_beside(llm, shape.kind, options)
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


def recipe_of(request: SpeedupRequest, choice: Mapping[str, Any], folder: Path) -> TrainRecipe[Any]:
    """Return the recipe of a choice's record, with a folder of its own: another budget begins anew."""
    shape = HeadShape(
        kind=choice["kind"],
        vocab_size=choice["draft_vocab_size"],
        steps=choice["unrolled_steps"],
        parameters=choice["parameters"],
        coverage=choice["coverage"],
    )
    seconds = choice["training_seconds"]
    output = folder / "training" / f"{shape.kind}-{seconds:.0f}s"
    return make_training(request, folder, shape, seconds=seconds, output=output)


def read_history(folder: Path) -> dict[str, Any]:
    """Return loss and acceptance over steps, as the log in a training's folder has them."""
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    losses = [[one["step"], one["loss"]] for one in entries if one.get("loss") is not None]
    evaluations = [
        {"step": one["step"], **{name[5:]: value for name, value in one.items() if name.startswith("eval/")}}
        for one in entries
    ]
    return {"losses": losses, "evaluations": [one for one in evaluations if len(one) > 1]}
