"""Keeps the self-check's result on disk, so that a second start of the same model need not repeat
it.

Kept is only that nothing was found, and which modules were accepted: by the model's configuration and files, forerun's
own sources, the versions of torch and transformers, the device and what was asked for. Whatever limits a context or is
put back is found, and told, at every start.
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

from forerun import caching

_SOURCES = Path(__file__).parents[1]
_READ = ("model", "core")  # Folders whose sources decide what a pass computes


def fingerprint(model: Any, *asked: object) -> str | None:
    """Return the key that a verdict is kept under; None where the weights are in no folder, so that
    they cannot be told from others. `asked` is whatever else decides about the model's passes.
    """
    folder = _folder(model)
    if folder is None or getattr(model, "peft_config", None):
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    device = torch.device(model.device)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = torch.__version__, transformers.__version__, _sources()
    made = str(folder.resolve()), model.config.to_json_string(), str(model.dtype), device.type
    told = str((made, found, chip, versions, asked))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def read_verdict(key: str | None) -> list[str] | None:
    """Return the modules that were accepted when the model was found right; None if nothing is
    known.
    """
    if key is None:
        return None
    told = caching.read_kept(_path(key))
    accepted = told.get("accepted") if isinstance(told, dict) else None
    right = isinstance(accepted, list) and all(isinstance(name, str) for name in accepted)
    return accepted if right else None


def keep(key: str | None, name: str, accepted: Sequence[str]) -> None:
    """Keep that a model was found right with these modules replaced. A folder that cannot be
    written to is no error.
    """
    if key is not None:
        caching.keep(_path(key), {"model": name, "accepted": list(accepted)}, "the self-check's result")


def _folder(model: Any) -> Path | None:
    """Return the folder that a model's files were loaded from, also for a model of the hub."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _path(key: str) -> Path:
    return caching.cache_root() / "checked" / f"{key}.json"


@cache
def _sources() -> str:
    """Return a hash of the code that computes a pass."""
    found = hashlib.sha256()
    for folder in _READ:
        for path in sorted((_SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()


def _processor() -> str:
    """Describe the CPU: its instructions decide which kernels run."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.cpu._is_amx_tile_supported()}"
