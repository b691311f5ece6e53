"""A recipe turned into a run: target, data, features, head, objective, evaluation, and the finished head on disk.

Knows which parts belong together; what each does is in its own module.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun import demo
from forerun.checkpoints import HeadCheckpoint, TargetFacts, read_head, write_head
from forerun.drafters.heads.eagle import EagleHead
from forerun.errors import ArgumentError
from forerun.training.batch import FeatureBatch
from forerun.training.data.packing import PackedWindows
from forerun.training.data.store import PreparedData
from forerun.training.data.vocabulary import draft_vocabulary, token_counts
from forerun.training.evaluate import Evaluation
from forerun.training.features.extract import wanted_manifest
from forerun.training.features.manifest import loaded_from, target_hash
from forerun.training.features.offline import OfflineFeatures
from forerun.training.features.online import OnlineFeatures
from forerun.training.features.store import FeatureStore
from forerun.training.fresh import fresh_head, head_config
from forerun.training.loop import Parallel, state, tracker, train
from forerun.training.loop.distributed import spread
from forerun.training.loop.gradient import backward
from forerun.training.objectives.eagle3 import Eagle3Objective, FrozenTarget
from forerun.training.recipe import MAY_CHANGE, EvaluationRecipe, TrainRecipe, flat, to_plain
from forerun.training.target import load_target


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Everything that the loop needs, and what comes after it."""

    recipe: TrainRecipe
    model: Any
    data: PreparedData
    prompts: PreparedData | None
    """What is decoded while training."""
    head: EagleHead
    objective: Eagle3Objective
    batches: OnlineBatches | OfflineBatches
    evaluate: Callable[[int], Mapping[str, float]] | None

    def plan(self, place: Parallel) -> dict[str, Any]:
        """What the run will take: parameters, bytes, steps, and the time of a step, measured. Trains nothing.

        Args:
            place: this process among all; every one must call it.
        """
        settings, windows = self.recipe.training, self.recipe.windows
        weights = sum(weight.numel() for weight in self.head.trainable().values())
        steps = settings.total_steps(self.batches.steps_per_epoch)
        model = spread(self.objective, place)
        began = time.perf_counter()
        backward(model, self.batches, 0, settings, place)
        seconds = time.perf_counter() - began
        self.head.zero_grad()
        moments = 2 if settings.optimizer == "adamw" else 1
        return {
            "trainable_parameters": weights,
            "weights_gradients_and_optimizer_bytes": 4 * weights * (2 + moments),
            "target_bytes": int(self.model.get_memory_footprint()),
            "documents": len(self.data),
            "tokens": self.data.num_tokens,
            "steps": steps,
            "tokens_per_step": windows.rows * windows.length * settings.accumulation * place.world,
            "seconds_per_step": seconds,
            "hours": steps * seconds / 3600,
            "recipe": to_plain(self.recipe),
        }

    def fixed(self, place: Parallel) -> dict[str, Any]:
        """What a resumed run must keep besides the settings of the loop, by key.

        Directories count by what they hold, so that they may move.
        """
        values = flat(self.recipe).items()
        found = {key: value for key, value in values if key not in MAY_CHANGE and not key.startswith("training.")}
        contents = {"target": target_hash(loaded_from(self.recipe.target)), "data": self.data.hash}
        if self.prompts is not None:
            contents["evaluation.prompts"] = self.prompts.hash
        found |= {key: f"sha256 {digest[:16]}" for key, digest in contents.items()}
        if isinstance(self.batches, OfflineBatches):
            stored = self.batches.source.store.manifest
            found["features"] = f"{stored.dtype} by {stored.source}"
        # Twice the processes with half the rows see the same batches.
        found["windows.rows x processes"] = found.pop("windows.rows") * place.world
        return found

    def export(self, weights: Path) -> Path:
        """Write the head of a checkpoint to ``output/head``, in the flat format that every engine reads."""
        head = EagleHead(self.head.config)  # ours may be spread over several processes
        state.load_weights(weights, head)
        head.to(self.model.dtype)
        folder = Path(self.recipe.output) / "head"
        write_head(HeadCheckpoint.of(head), folder, "flat", TargetFacts.of(self.model.config, self.recipe.target))
        return folder


@dataclass(kw_only=True, slots=True)
class OnlineBatches:
    """Features computed when they are wanted."""

    windows: PackedWindows
    source: OnlineFeatures
    device: torch.device
    steps_per_epoch: int
    together: bool = False
    """Whether a pass of the target needs all processes, with the same tokens (tensor parallel)."""

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """The rank's share of a step. Together, all shares run one after the other, and the rank keeps its own."""
        mine = None
        for member in range(world) if self.together else (rank,):
            found = self.source.features(self.windows.batch(step, member, world).to(self.device))
            mine = found if member == rank else mine
        assert mine is not None
        return mine


@dataclass(kw_only=True, slots=True)
class OfflineBatches:
    """Features read from disk."""

    source: OfflineFeatures
    device: torch.device
    steps_per_epoch: int

    def batch(self, step: int, rank: int, world: int) -> FeatureBatch:
        """The rank's share of a step."""
        found = self.source.features(step, rank, world)
        features = {boundary: states.to(self.device) for boundary, states in found.features.items()}
        return FeatureBatch(batch=found.batch.to(self.device), features=features)


def assemble(recipe: TrainRecipe, place: Parallel) -> Run:
    """Load and check everything, on the device of this process; nothing is trained yet.

    Raises:
        ForerunError: whatever does not fit together.
    """
    model, tokenizer = load_target(recipe.target, recipe.target_dtype, recipe.target_parallel, place)
    data = PreparedData.open(recipe.data, tokenizer=tokenizer)
    head = _head(recipe, model, data).to(model.device)
    settings = dataclasses.replace(
        recipe.objective,
        gradient_checkpointing=recipe.objective.gradient_checkpointing or recipe.training.gradient_checkpointing,
    )
    objective = Eagle3Objective(head, FrozenTarget.of(model), settings)
    windows = PackedWindows(
        data,
        length=recipe.windows.length,
        rows=recipe.windows.rows,
        seed=recipe.training.seed,
        min_tokens=recipe.windows.min_tokens,
    )
    prompts = PreparedData.open(recipe.evaluation.prompts) if recipe.evaluation.prompts is not None else None
    return Run(
        recipe=recipe,
        model=model,
        data=data,
        prompts=prompts,
        head=head,
        objective=objective,
        batches=_batches(recipe, model, tokenizer, windows, head, place.world),
        evaluate=None if prompts is None else _evaluation(recipe.evaluation, prompts, model, head),
    )


def _head(recipe: TrainRecipe, model: Any, data: PreparedData) -> EagleHead:
    if recipe.draft.start is not None:
        if recipe.draft.options or recipe.draft.vocab_size is not None:
            raise ArgumentError("draft.start brings its own shape; leave draft.options and draft.vocab_size away")
        layers = model.config.get_text_config().num_hidden_layers
        return read_head(recipe.draft.start, num_layers=layers).build(torch.float32)
    config = head_config(model, recipe.draft.vocab_size, recipe.draft.options)
    ids = None
    if config.reduced_vocabulary:
        ids = draft_vocabulary(token_counts(data, config.vocab_size), config.draft_vocab_size)
    return fresh_head(model, config, ids, seed=recipe.training.seed)


def _batches(
    recipe: TrainRecipe, model: Any, tokenizer: Any, windows: PackedWindows, head: EagleHead, world: int
) -> OnlineBatches | OfflineBatches:
    epoch = windows.steps_per_epoch(world)
    if recipe.mode == "online":
        source = OnlineFeatures(model, head.config.boundaries)
        return OnlineBatches(
            windows=windows,
            source=source,
            device=model.device,
            steps_per_epoch=epoch,
            together=recipe.target_parallel == "tp",
        )
    assert recipe.features is not None
    wanted = wanted_manifest(
        demo.resolve(recipe.target), tokenizer, windows.data, head.config.boundaries, head.config.target_hidden_size
    )
    store = FeatureStore.open(recipe.features, wanted)
    return OfflineBatches(source=OfflineFeatures(store, windows), device=model.device, steps_per_epoch=epoch)


def _evaluation(
    wanted: EvaluationRecipe, source: PreparedData, model: Any, head: EagleHead
) -> Callable[[int], Mapping[str, float]]:
    count = min(wanted.count, len(source))
    prompts = [source.document(index)[0][: wanted.prompt_tokens].tolist() for index in range(count)]
    evaluation = Evaluation(model, prompts, wanted.settings)
    return lambda step: evaluation(head)


def train_head(run: Run, place: Parallel, *, allow_changes: bool = False) -> dict[str, Any]:
    """Train, take the best weights, and write the finished head; what came out, for a report.

    Args:
        run: from `assemble`, on every process.
        place: this process among all.
        allow_changes: go on from a checkpoint that was trained under another recipe.
    """
    recipe, output = run.recipe, Path(run.recipe.output)
    trackers = [tracker(name, output, to_plain(recipe)) for name in recipe.trackers] if place.first else []
    result = train(
        run.objective,
        run.batches,
        recipe.training,
        output,
        parallel=place,
        trackers=trackers,
        evaluate=run.evaluate,
        recipe=run.fixed(place),
        allow_changes=allow_changes,
    )
    weights = output / "best" if result.best is not None else result.checkpoint
    outcome: dict[str, Any] = {
        "reason": result.reason,
        "steps": result.steps,
        "tokens": result.tokens,
        "loss": result.loss,
        "best": result.best,
        "best_step": result.best_step,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
    }
    return outcome | {"head": place.on_first(lambda: str(run.export(weights)))}
