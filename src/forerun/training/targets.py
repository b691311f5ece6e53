"""This module trains the target itself: alone, so that its first layers draft better, or together
with a head.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from forerun.checkpoints import TargetFacts
from forerun.errors import ArgumentError
from forerun.training.data.store import PreparedData
from forerun.training.draft_models import blank_model, load_trainable, write_model
from forerun.training.objectives.medusa2 import TargetAndHead
from forerun.training.recipe import EvaluationSettings, TrainRecipe
from forerun.training.trained import Trained, TrainedHead, branches, copy_for_drafting
from forerun.types import Boundary


class TrainedTarget(Trained):
    """A `TrainedTarget` is a copy of the target, which learns; the target as it was stands beside
    it.
    """

    folder: ClassVar[str] = "model"
    drafts_by: ClassVar[tuple[str, ...]] = ("chain", "chain_half", "chain_three_quarters", "tree")
    module: Any
    boundaries: tuple[Boundary, ...] = ()

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        draft = recipe.draft
        if draft.vocab_size is not None or draft.options or draft.start is not None:
            raise ArgumentError(
                "the target itself is trained; leave draft.vocab_size, draft.options and draft.start away"
            )
        check_whole(recipe)

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.tokenizer = tokenizer
        self.module = load_trainable(self.recipe.target)

    def blank(self) -> nn.Module:
        return blank_model(self.module)

    def target(self, model: Any) -> Any:
        return copy_for_drafting(self.module, model)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        """Return chains of exits after a quarter, half and three quarters of the layers, and a
        ``tree`` of the first.
        """
        layers, chain = self.module.config.get_text_config().num_hidden_layers, (1,) * settings.num_speculative_tokens
        names = {"chain": 1, "chain_half": 2, "chain_three_quarters": 3}
        exits = {name: max(1, min(layers - 1, layers * quarters // 4)) for name, quarters in names.items()}
        shapes = {name: {"method": "early_exit", "exit_layer": one, "shape": chain} for name, one in exits.items()}
        return shapes | {"tree": {**shapes["chain"], "shape": (branches(settings), *chain[1:])}}

    def write(self, module: Any, folder: Path, facts: TargetFacts) -> None:
        """Write the model as transformers does; ``{"method": "early_exit"}`` drafts with it."""
        write_model(module, self.module.generation_config, self.tokenizer, folder)


class TrainedTargetAndHead(Trained):
    """A `TrainedTargetAndHead` is a copy of the target and a head for it, which learn together."""

    folder: ClassVar[str] = "model"
    beside: ClassVar[tuple[str, ...]] = ("head",)
    module: TargetAndHead
    boundaries: tuple[Boundary, ...] = ()

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        check_whole(recipe)
        self.head = TrainedHead(recipe)

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        self.tokenizer = tokenizer
        self.head.start(model, tokenizer, data)
        self.module = TargetAndHead(load_trainable(self.recipe.target), self.head.module)

    def blank(self) -> nn.Module:
        return TargetAndHead(blank_model(self.module.model), self.head.blank())

    def target(self, model: Any) -> Any:
        return copy_for_drafting(self.module.model, model)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        return self.head.shapes(model, settings)

    def write(self, module: Any, folder: Path, facts: TargetFacts) -> None:
        """Write the target as transformers does, and beside it the head, which drafts for that one."""
        write_model(module.model, self.module.model.generation_config, self.tokenizer, folder)
        self.head.write(module.head, folder.parent / self.beside[0], replace(facts, name_or_path=str(folder)))


def check_whole(recipe: TrainRecipe[Any]) -> None:
    """Raise ArgumentError where the target, which is trained, would be distributed over processes."""
    if recipe.target_parallel != "none":
        raise ArgumentError("the target is trained from its whole weights: target_parallel=none")
