"""This module defines what a run trains, by the role of its kind: how it starts, drafts in
evaluation, and is written.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from forerun.checkpoints import HeadCheckpoint, TargetFacts, format_for, read_head, write_head
from forerun.drafters.heads.base import Head, check_fits
from forerun.drafters.heads.kinds import HeadKind, Role, import_named, kind_named
from forerun.errors import ArgumentError, choices
from forerun.training.data.store import PreparedData, draft_vocabulary, token_counts
from forerun.training.features.store import find_loaded, target_hash
from forerun.training.recipe import EvaluationSettings, TrainRecipe
from forerun.types import Boundary

TRAINED: dict[Role, str] = {
    "head": "forerun.training.trained:TrainedHead",
    "draft_model": "forerun.training.draft_models:TrainedModel",
    "target": "forerun.training.targets:TrainedTarget",
    "target_and_head": "forerun.training.targets:TrainedTargetAndHead",
}
"""Each role of a kind maps to ``module:Class``, a `Trained`."""


def trained_class(kind: HeadKind) -> type[Trained]:
    """Return the class of a kind's role."""
    found: type[Trained] = import_named(TRAINED[kind.trains])
    return found


class Trained(ABC):
    """A `Trained` drafts for a target, before and after it was trained."""

    folder: ClassVar[str]  # Folder of the finished checkpoint, in the recipe's output
    beside: ClassVar[tuple[str, ...]] = ()  # Further folders that are written there
    writes: ClassVar[bool] = False  # True where it can write an answer alone
    drafts_by: ClassVar[tuple[str, ...]] = ("chain", "tree")  # The keys of `shapes`
    module: nn.Module
    boundaries: tuple[Boundary, ...]  # Layers at which the target is read, besides its last state

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        """Check the recipe; ArgumentError for what cannot be; nothing is loaded yet."""
        self.recipe, writer = recipe, recipe.objective.writer
        if writer != "data" and recipe.mode == "offline":
            raise ArgumentError(
                f"mode=offline has features of the data's own text: objective.writer={writer} is online"
            )
        if writer == "draft" and not self.writes:
            raise ArgumentError(
                f"what forerun train {recipe.kind} trains does not write alone: objective.writer=target lets the "
                "target write while it is drafted for"
            )
        if writer == "target" and recipe.target_parallel != "none":
            raise ArgumentError("objective.writer=target needs the whole target on each process: target_parallel=none")
        known = metric_names(self.drafts_by, recipe.evaluation.settings.num_speculative_tokens)
        if (metric := recipe.training.best_metric) is not None and metric not in known:
            raise ArgumentError(
                f"training.best_metric={metric!r} is not among the values of evaluation.{choices(metric, known)}"
            )

    @abstractmethod
    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        """Make the `module` for a target and its tokenizer, on the CPU or on the target's device."""

    @abstractmethod
    def blank(self) -> nn.Module:
        """Return a module of the same shape, for other weights; ours may be distributed over
        several processes.
        """

    def target(self, model: Any) -> Any:
        """Return the model that is drafted for in evaluation: the target `model`, unless it is what
        is trained.
        """
        return model

    @abstractmethod
    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        """Map each of `drafts_by` to a speculative configuration: how a copy of the module drafts
        for the target `model`.
        """

    @abstractmethod
    def write(self, module: nn.Module, folder: Path, facts: TargetFacts) -> None:
        """Write a trained module as a checkpoint that drafts."""

    def contents(self) -> dict[str, str]:
        """Map keys of the recipe to the hash of what their directory holds."""
        return {}


class TrainedHead(Trained):
    """A `TrainedHead` is a head on a frozen target."""

    folder: ClassVar[str] = "head"
    module: Head

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        self.kind = kind_named(recipe.kind)
        format_for(self.kind.stored_as)  # what could not be written need not be trained

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.module = self._head(model, data)
        self.boundaries = self.module.config.boundaries

    def blank(self) -> nn.Module:
        return type(self.module)(self.module.config)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        return head_shapes(self.module, model, settings)

    def write(self, module: nn.Module, folder: Path, facts: TargetFacts) -> None:
        assert isinstance(module, Head), "from `blank`"
        write_head(HeadCheckpoint.of(module), folder, format_for(module.config.kind), facts)

    def _head(self, model: Any, data: PreparedData) -> Head:
        draft, kind = self.recipe.draft, self.kind
        if draft.start is not None or kind.in_target is not None:
            if draft.options or draft.vocab_size is not None:
                what = "draft.start" if draft.start is not None else "the target"
                raise ArgumentError(f"{what} brings its own shape; leave draft.options and draft.vocab_size away")
            if draft.start is None:
                found = import_named(kind.in_target or "")(self.recipe.target)
            else:
                found = read_head(draft.start, num_layers=model.config.get_text_config().num_hidden_layers)
            own = found.config.kind
            if own != kind.stored_as:
                raise ArgumentError(
                    f"draft.start holds a head of the kind {own}; go on with it by: forerun train {own}"
                )
            if draft.start is not None:
                check_fits(found.config, TargetFacts.of(model.config, self.recipe.target), "draft.start")
            return found.build(torch.float32)  # type: ignore[no-any-return]
        config = kind.head.Config.for_target(kind.name, model, draft.vocab_size, draft.options)
        counts = token_counts(data, config.vocab_size) if config.reduced_vocabulary else None
        ids = None if counts is None else draft_vocabulary(counts, config.draft_vocab_size)
        return kind.head.initial(model, config, ids, seed=self.recipe.training.seed)


def head_shapes(head: Head, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
    """Return how a copy of a head drafts for the target `model` in evaluation, as `Trained.shapes`
    does.
    """
    depth = min(settings.num_speculative_tokens, head.config.max_depth or settings.num_speculative_tokens)
    base = {"method": head.config.kind, "model": copy_for_drafting(head, model), "num_speculative_tokens": depth}
    if kind_named(head.config.kind).drafts == "adapter":
        base["exit_below"] = 0.0  # measured as far as the chain goes
    return {
        "chain": {**base, "shape": (1,) * depth},
        "tree": {**base, "top_k": settings.top_k, "nodes": settings.nodes},
    }


def rate_name(shape: str, temperature: int, depth: int) -> str:
    """Return evaluation's name for the share of steps in which a shape got beyond a depth, from 0."""
    of = "" if (shape, temperature) == ("chain", 0) else f"{shape}_t{temperature}_"
    return f"acceptance_{of}{depth}"


def metric_names(shapes: Sequence[str], depths: int) -> list[str]:
    """Return the names of an evaluation's values: mean acceptance lengths, and the shares of so
    many depths.
    """
    pairs = [(shape, temperature) for temperature in (0, 1) for shape in shapes]
    lengths = [f"{shape}_t{temperature}" for shape, temperature in pairs]
    return [*lengths, *(rate_name(*pair, depth) for pair in pairs for depth in range(depths))]


def branches(settings: EvaluationSettings) -> int:
    """Return the chains below the root of a tree of fixed shape that has no more nodes than
    evaluation allows.
    """
    return max(1, min(settings.top_k, settings.nodes // settings.num_speculative_tokens))


def copy_for_drafting(module: nn.Module, model: Any) -> nn.Module:
    """Return a copy that drafts beside the target `model`."""
    return copy.deepcopy(module).to(model.device, model.dtype).eval()


def hash_checkpoints(names: Mapping[str, str | None]) -> dict[str, str]:
    """Map keys to the hash of the checkpoint that they name, where they name one."""
    return {key: target_hash(find_loaded(name)) for key, name in names.items() if name is not None}
