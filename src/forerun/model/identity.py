"""Tells one model from another: by its weights, and by everything that decides what its passes compute.

A **fingerprint** knows the weights that a head was trained for. It is made of a few values of every tensor, rounded to
bfloat16, so that a conversion from float32 or other shards keep it, and a fine-tune of the same shape does not. Reading
it takes milliseconds, whatever the size of the checkpoint.

A **verdict** of the self-check is kept on disk, so that a second start of the same model need not repeat it. Kept is
only that nothing was found, and which modules were accepted: by the model's configuration and files, forerun's own
sources, the versions of torch and transformers, the device and what was asked for.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from forerun import writing
from forerun.errors import ForerunError
from forerun.model.load import weight_files

VALUES = 8  # Values of each tensor that are read, from its middle on
DTYPES = ("F32", "F16", "BF16")
SHARED = "lm_head."  # Some checkpoints write the output head that is the embedding, some do not
_SOURCES = Path(__file__).parents[1]
_READ = ("model", "core")  # Folders whose sources decide what a pass computes


def fingerprint(name: str | Path) -> str | None:
    """Return the fingerprint of the checkpoint in a directory or under a hub id that was loaded before, as hex digits.

    None where no weights of 16 or 32 bits can be found there.
    """
    folder = checkpoint_folder(name)
    if folder is None:
        return None
    try:
        sampled = {tensor: value for path in weight_files(folder) for tensor, value in _samples(path).items()}
    except (ForerunError, OSError, SafetensorError):
        return None
    digest = hashlib.sha256()
    for tensor, value in sorted(sampled.items()):
        digest.update(tensor.encode() + value)
    return digest.hexdigest()[:16] if sampled else None


def _samples(path: Path) -> dict[str, bytes]:
    """Return some values of each tensor of a safetensors file, as bfloat16."""
    sampled = dict[str, bytes]()
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.startswith(SHARED) or file.get_slice(name).get_dtype() not in DTYPES:
                continue
            values = file.get_tensor(name).flatten()  # Mapped: only what is taken of it is read
            middle = max(0, len(values) // 2 - VALUES)
            if len(values):
                taken = values[middle : middle + VALUES].to(torch.bfloat16)
                sampled[name] = taken.view(torch.uint8).numpy().tobytes()
    return sampled


def checkpoint_folder(name: str | Path, revision: str | None = None) -> Path | None:
    """Return the folder of a checkpoint's files: a directory, or where a model of the hub lies that was loaded before.
    None if there is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    try:
        config = try_to_load_from_cache(str(name), "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def verdict_key(model: Any, *asked: object) -> str | None:
    """Return the key that a verdict is kept under; None where the weights are in no folder, so that
    they cannot be told from others. `asked` is whatever else decides about the model's passes.
    """
    name = str(getattr(model, "name_or_path", "") or "")
    folder = checkpoint_folder(name, getattr(model.config, "_commit_hash", None)) if name else None
    if folder is None or getattr(model, "peft_config", None):
        return None
    paths = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    device = torch.device(model.device)
    # A CPU's instructions decide which kernels run.
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.cpu._is_amx_tile_supported()}"
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    versions = torch.__version__, transformers.__version__, _sources()
    checkpoint = str(folder.resolve()), model.config.to_json_string(), str(model.dtype), device.type
    return hashlib.sha256(str((checkpoint, files, chip, versions, asked)).encode()).hexdigest()[:32]


def read_verdict(key: str | None) -> list[str] | None:
    """Return the modules that were accepted when the model was found right; None if nothing is
    known.
    """
    if key is None:
        return None
    verdict = writing.read_kept(_path(key))
    accepted = verdict.get("accepted") if isinstance(verdict, dict) else None
    right = isinstance(accepted, list) and all(isinstance(name, str) for name in accepted)
    return accepted if right else None


def keep_verdict(key: str | None, name: str, accepted: Sequence[str]) -> None:
    """Keep that a model was found right with these modules replaced. A folder that cannot be
    written to is no error.
    """
    if key is not None:
        writing.keep(_path(key), {"model": name, "accepted": list(accepted)}, "the self-check's result")


def _path(key: str) -> Path:
    return writing.cache_root() / "checked" / f"{key}.json"


@cache
def _sources() -> str:
    """Return a hash of the code that computes a pass."""
    digest = hashlib.sha256()
    for folder in _READ:
        for path in sorted((_SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.read_bytes())
    return digest.hexdigest()
