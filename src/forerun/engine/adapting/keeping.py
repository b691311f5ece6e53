"""Accepted drafters on disk: ordinary transformers checkpoints, whole or not there at all, the last two of them.

``DIR/checkpoint-<version>`` with ``adaptation.json`` in it, and ``DIR/latest``, a link to the newest that serves. A
directory is written under a hidden name and renamed, the link likewise, so whoever is killed leaves the last one whole.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.errors import CheckpointError
from forerun.target import Target
from forerun.training.data.store import TokenizerIdentity
from forerun.training.loop import checkpoint
from forerun.writing import remove_folder, tidy, written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

RECORD, LATEST = "adaptation.json", "latest"
KEEP = 2
_EMBEDDINGS = 64
_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A checkpoint to go on from."""

    path: Path
    version: int
    state: dict[str, Tensor]
    record: Mapping[str, Any]


class Keeper:
    """The directory of one adapted drafter.

    Args:
        target: whose laws it learns; a checkpoint for another one is refused.
        tokenizer: saved with every checkpoint, so that it can be drafted with as it stands.
        dtype: of the weights on disk: that of the drafter as it was loaded.
    """

    def __init__(
        self, directory: Path, target: Target, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype
    ) -> None:
        self.directory, self._tokenizer, self._dtype = directory, tokenizer, dtype
        self._target = fingerprint(target)
        self._described: dict[str, Any] = {"target": self._target, "target_name": Path(target.name_or_path).name}
        if tokenizer is not None:
            self._described["tokenizer"] = TokenizerIdentity.of(tokenizer).record()

    def resume(self) -> Kept | None:
        """The newest checkpoint, or None; removes what an earlier process left half-written.

        Raises:
            CheckpointError: it adapts a drafter to another target, or cannot be read.
        """
        tidy(self.directory)
        path = self._served()
        if path is None:
            return None
        record = _read(path / RECORD)
        if record.get("target") != self._target:
            raise CheckpointError(
                f"{path} holds a drafter that was adapted to another target ({record.get('target_name')}); "
                "give another directory, or remove this one"
            )
        return Kept(path=path, version=int(record["version"]), state=_weights(path), record=record)

    def save(self, twin: Any, version: int, facts: Mapping[str, Any]) -> Path:
        """Write `twin`, float32, as the checkpoint of this version, and let ``latest`` point to it.

        Raises:
            CheckpointError: the disk is full, or refuses; what was there before is untouched.
        """

        def fill(folder: Path) -> None:
            with torch.no_grad():
                stored = copy.deepcopy(twin).to(self._dtype)
            stored.save_pretrained(folder)
            if self._tokenizer is not None:
                self._tokenizer.save_pretrained(folder)
            record = {"version": version, **self._described, **facts}
            (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

        path = checkpoint.write_directory(self.directory / f"checkpoint-{version}", fill)
        self._link(path)
        checkpoint.rotate(self.directory, KEEP)
        return path

    def withdraw(self, version: int) -> None:
        """This version was rolled back: ``latest`` is the one before it again, if there is one."""
        bad = self.directory / f"checkpoint-{version}"
        if not bad.is_dir():
            return
        before = [path for number, path in checkpoint.checkpoints(self.directory) if number < version]
        if before:
            self._link(before[-1])
        remove_folder(bad)
        if not before:  # only now: whoever is killed in between must not begin with the newest there is
            self._link(None)

    def _served(self) -> Path | None:
        """What ``latest`` points to; where there is no such link, the newest."""
        link = self.directory / LATEST
        return link.resolve() if link.is_symlink() and link.is_dir() else checkpoint.latest(self.directory)

    def _link(self, path: Path | None) -> None:
        link = self.directory / LATEST
        try:
            if path is None:
                link.unlink(missing_ok=True)
                return
            with written(link) as fresh:
                fresh.symlink_to(path.name, target_is_directory=True)
        except OSError as error:
            log.warning("%s could not be pointed to %s: %s", link, path, error)


def fingerprint(target: Target) -> str:
    """sha256 of a target's configuration, its vectors (norms, biases) and the first rows of its embedding.

    Enough to tell models apart without reading gigabytes. A fine-tune that left all of these as they were passes for
    the original: its drafter is then merely worse at first.
    """
    config = {key: value for key, value in target.config.to_dict().items() if key not in _VOLATILE}
    found = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    vectors = [weight for _, weight in sorted(target.model.named_parameters()) if weight.dim() == 1]
    for weight in (*vectors, target.model.get_input_embeddings().weight[:_EMBEDDINGS]):
        found.update(weight.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(record["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error!r}); --adapt-dir wants a directory of its own, written by forerun"
        ) from error
    return record


def _weights(path: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    try:
        state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded ({type(error).__name__}: {error}); remove it") from error
    return state
