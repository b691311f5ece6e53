"""Where a run begins: nowhere, or at a checkpoint that fits. Knows no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from forerun.errors import ArgumentError, CheckpointError, DataError
from forerun.training.loop import files, state
from forerun.training.loop.distributed import Parallel
from forerun.writing import tidy


def start_from(
    output: Path, resume: Path | Literal["auto", "never"], data_hash: str, parallel: Parallel
) -> state.Saved | None:
    """The checkpoint to go on from, as the first process sees it, on all; none: begin anew.

    Removes what an earlier run left half-written in `output`.

    Raises:
        ArgumentError: "never", but `output` holds checkpoints; or a path, but `output` holds later ones.
        CheckpointError: no such checkpoint, or it is incomplete.
        DataError: it was trained on other data.
    """

    def look() -> state.Saved | None:
        tidy(output)
        path = _choose(output, resume)
        if path is None:
            return None
        saved = state.read(path)
        if data_hash and saved.data_hash and data_hash != saved.data_hash:
            raise DataError(
                f"{path} was trained on data with hash {saved.data_hash}, these have {data_hash}: its position in the "
                "data means nothing here. Give the former data, or another output directory."
            )
        return saved

    return parallel.on_first(look)


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
