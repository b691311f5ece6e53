"""Where a run begins: nowhere, or at a checkpoint that fits. Knows no weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from forerun.errors import ArgumentError, CheckpointError
from forerun.training.loop import files, state
from forerun.training.loop.distributed import Parallel
from forerun.writing import tidy


def start_from(
    output: Path,
    resume: Path | Literal["auto", "never"],
    recipe: Mapping[str, Any],
    parallel: Parallel,
    *,
    allow_changes: bool = False,
) -> state.Saved | None:
    """The checkpoint to go on from, as the first process sees it, on all; none: begin anew.

    Removes what an earlier run left half-written in `output`. Where evaluation measures something else than before, the
    best value so far is forgotten.

    Raises:
        ArgumentError: "never", but `output` holds checkpoints; or a path, but `output` holds later ones; or the
            checkpoint was trained under another recipe.
        CheckpointError: no such checkpoint, or it is incomplete.
    """

    def look() -> state.Saved | None:
        tidy(output)
        path = _choose(output, resume)
        if path is None:
            return None
        saved = state.read(path)
        changed = _changes(saved.recipe, recipe)
        if changed and not allow_changes:
            raise ArgumentError(
                f"{path} was trained under another recipe: {'; '.join(changed.values())}. Give the former values or "
                "another output directory, or go on under the new recipe with --allow-changes (allow_changes=True)."
            )
        if any(key.startswith("evaluation.") or key == "training.best_metric" for key in changed):
            saved.progress.best, saved.progress.best_step, saved.progress.evaluated = None, None, 0
        return saved

    return parallel.on_first(look)


def _changes(former: Mapping[str, Any] | None, recipe: Mapping[str, Any]) -> dict[str, str]:
    """Key -> what has become of it, in words."""
    if former is None:
        return {"": "an older forerun wrote it and did not record its recipe"}
    keys = [*former, *(key for key in recipe if key not in former)]
    missing = object()
    return {
        key: f"{key} was {_shown(former, key)}, is {_shown(recipe, key)}"
        for key in keys
        if former.get(key, missing) != recipe.get(key, missing)
    }


def _shown(recipe: Mapping[str, Any], key: str) -> str:
    return repr(recipe[key]) if key in recipe else "not recorded"


def _choose(output: Path, resume: Path | Literal["auto", "never"]) -> Path | None:
    newest = files.latest(output)
    if resume == "auto":
        return newest
    if resume == "never":
        if newest:
            raise ArgumentError(f"{output} holds {newest.name}, and resume is never; choose another output directory.")
        return None
    path = Path(resume)
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint {path}; expected a directory checkpoint-<step>.")
    if newest and newest.resolve() != path.resolve():
        raise ArgumentError(
            f"{output} holds {newest.name}, which is not {path}: two lines of training would mix. Choose another "
            "output directory to go on from the older checkpoint."
        )
    return path
