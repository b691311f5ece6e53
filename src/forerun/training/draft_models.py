"""This module trains a draft model: a small causal LM, one that exists or the target with fewer
layers and less width.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from forerun.checkpoints import TargetFacts
from forerun.drafters.draft_models.pard import PardDrafter, mark
from forerun.drafters.heads.kinds import import_named, kind_named
from forerun.drafters.vocabulary import check_tokenizers
from forerun.errors import ArgumentError, VocabularyMismatchError
from forerun.model.load import LoadOptions, open_model, read_config, save_model
from forerun.model.names import resolve, tokenizer_beside
from forerun.model.support import text_config
from forerun.training.data.store import PreparedData
from forerun.training.recipe import EvaluationSettings, TrainRecipe
from forerun.training.shrink import shrink
from forerun.training.trained import Trained, branches, copy_for_drafting, hash_checkpoints
from forerun.types import Boundary
from forerun.writing import written_folder


class TrainedModel(Trained):
    """A `TrainedModel` is a draft model with the target's tokenizer: a causal LM of any
    architecture that forerun serves.
    """

    folder: ClassVar[str] = "draft"
    writes: ClassVar[bool] = True
    module: Any
    boundaries: tuple[Boundary, ...] = ()

    def __init__(self, recipe: TrainRecipe[Any]) -> None:
        super().__init__(recipe)
        self.method: str = import_named(kind_named(recipe.kind).drafter).name  # Name of the drafter that uses it
        draft = recipe.draft
        if draft.vocab_size is not None:
            raise ArgumentError("a draft model has its tokenizer's vocabulary; leave draft.vocab_size away")
        if draft.start is not None and draft.options:
            raise ArgumentError("draft.start brings its own shape; leave draft.options away")
        if draft.start is None and not draft.options:
            raise ArgumentError(
                "there is no draft model: name one with --draft DIRECTORY, or say what the target shall be shrunk to, "
                "for example draft.options={layers: 4}"
            )
        if draft.start is None and recipe.target_parallel != "none":
            raise ArgumentError("the target is shrunk from its whole weights: target_parallel=none, or name a --draft")

    def start(self, model: Any, tokenizer: Any, data: PreparedData) -> None:
        start = self.recipe.draft.start
        self.tokenizer = tokenizer
        if start is None:
            self.module = shrink(model, self.recipe.draft.options).requires_grad_(True)
        else:
            self.module = load_trainable(start)
            path = resolve(start)
            theirs, sizes = tokenizer_beside(str(path)), [text_config(one).vocab_size for one in (self.module, model)]
            if theirs is not None:
                check_tokenizers(tokenizer, theirs)
            elif sizes[0] != sizes[1]:
                raise VocabularyMismatchError(
                    f"{start} has {sizes[0]} token ids and no tokenizer, the target has {sizes[1]}: nobody can tell "
                    "whether they mean the same. Put the tokenizer's files beside the draft model."
                )
        data.check_ids(text_config(self.module).vocab_size, f"the draft model ({start or 'the shrunk target'})")
        if self.method == PardDrafter.name:
            mark(self.module, tokenizer, self.recipe.objective.mask_token)

    def blank(self) -> nn.Module:
        return blank_model(self.module)

    def shapes(self, model: Any, settings: EvaluationSettings) -> dict[str, dict[str, Any]]:
        depth = settings.num_speculative_tokens
        base = {"method": self.method, "model": copy_for_drafting(self.module, model)}
        tree: dict[str, Any] = {"shape": (branches(settings), *(1,) * (depth - 1))}
        if self.method == PardDrafter.name:
            tree = {"num_speculative_tokens": depth, "nodes": settings.nodes}
        return {"chain": {**base, "shape": (1,) * depth}, "tree": {**base, **tree}}

    def write(self, module: Any, folder: Path, facts: TargetFacts) -> None:
        """Write the model as ``{"method": "draft_model", "model": folder}`` takes it, or ``pard``."""
        write_model(module, self.module.generation_config, self.tokenizer, folder)

    def contents(self) -> dict[str, str]:
        reference = getattr(self.recipe.objective, "reference", None)
        return hash_checkpoints({"draft.start": self.recipe.draft.start, "objective.reference": reference})


def load_trainable(name: str) -> Any:
    """Load the causal LM of a directory or hub id in float32 on the CPU, every weight trainable."""
    options = LoadOptions(dtype="float32", device="cpu")
    path = resolve(name, options.dtype)
    return open_model(path, options, read_config(path, options), quiet=True).requires_grad_(True)


def blank_model(model: Any) -> nn.Module:
    """Return a model of the same shape, for other weights."""
    with torch.random.fork_rng(devices=[]):
        made: nn.Module = type(model)(copy.deepcopy(model.config))
    return made


def write_model(model: Any, generation_config: Any, tokenizer: Any, folder: Path) -> None:
    """Write a causal LM and its tokenizer as transformers does."""
    model.generation_config = generation_config
    with written_folder(folder) as fresh:
        save_model(model, tokenizer, fresh)
