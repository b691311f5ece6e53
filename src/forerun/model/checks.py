"""Checks of a model's name, dtype and device that need no weights. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path

from forerun.errors import CheckpointError, ForerunError, UnsupportedModelError, find_problem, nearest, refuse
from forerun.model.other_apps import find_kept
from forerun.shipped import MODELS, REAL

DTYPES = "'auto', 'float32', 'bfloat16' or 'float16'"  # Those that are documented
_DTYPES = {"auto", "float32", "bfloat16", "float16", "float", "half", "float64", "double"}
DEVICES = "cpu, cuda, cuda:1, xpu, mps, ..."
_DEVICE = re.compile(r"(cpu|cuda|xpu|mps|npu|hpu|mlu|musa|mtia|maia|xla)(:\d+)?")
MAGIC = b"GGUF"  # A GGUF file begins with it
HUB_TIMEOUT_S = 10.0  # For the one question that asks whether a hub id exists


def check(name: str | Path, dtype: str, device: str | None = None) -> None:
    """Raise the errors of `resolve`, of `load.read_config` and of `load.LoadOptions` that a model's
    name, dtype and device already show, before anything is imported or loaded.
    """
    refuse(
        (dtype not in _DTYPES, f"{dtype!r} is no dtype; expected {DTYPES}"),
        (device is not None and not _DEVICE.fullmatch(device), f"{device!r} is no device; expected {DEVICES}"),
    )
    check_found(name)
    path = Path(name).expanduser()
    if path.is_dir() and not next(path.glob("*.gguf"), None):
        check_directory(path)


def check_found(name: str | Path) -> None:
    """Raise CheckpointError if a name is no file, no directory, no shipped model, and no hub id that the hub knows."""
    path = Path(name).expanduser()
    if find_kept(name) is not None:
        return
    if path.suffix == ".gguf" or path.is_file():
        check_file(path)
    elif not path.exists() and str(name) not in (REAL, *MODELS):
        check_directory(name)
        _check_on_hub(str(name))


def _check_on_hub(name: str) -> None:
    """Ask the hub once, unless its answer lies in the cache, whether it has a model of that name.

    transformers asks for several files, each six times where there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except Exception as error:
        raise explain_load_error(name, error) from error


def check_file(path: Path) -> None:
    """Raise CheckpointError if there is no such file, or it does not begin as GGUF files do, whatever its name."""
    if not path.exists():
        raise CheckpointError(f"there is no file {path}: expected a GGUF file, a directory or a hub id (owner/name)")
    with path.open("rb") as file:
        begins = file.read(len(MAGIC)) == MAGIC
    if not begins:
        inside = (path.parent / "config.json").is_file()
        remedy = f"; name the directory that it lies in, {path.parent}" if inside else ""
        raise CheckpointError(
            f"{path} is a file and no GGUF file (it does not begin as one, or is empty): a model is a directory, a "
            f"GGUF file or a hub id (owner/name){remedy}"
        )


def check_directory(name: str | Path) -> None:
    """Raise CheckpointError if `name` is meant as a directory and is none, or holds no
    configuration.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} holds no config.json and no GGUF file: expected a checkpoint of transformers, or one .gguf file."
            f"{_instead(path)}"
        )
    meant = isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1
    if meant and not path.is_dir():
        raise CheckpointError(f"there is no directory {path}: expected a checkpoint of transformers or a hub id (a/b)")


def _instead(folder: Path) -> str:
    """Return a sentence on what a directory without a configuration holds, and what to name
    instead.
    """
    if (folder / "adapter_config.json").is_file():
        return " It holds a PEFT adapter: pass it as adapter=, and its base model as the model."
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        return f" It is a folder of the hub's cache: name {folder.name.removeprefix('models--').replace('--', '/')}."
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return f" Such are in it: {', '.join(inside[:4])}." if inside else ""


_UNREACHED = {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"}


def explain_load_error(name: str | Path, error: Exception) -> ForerunError:
    """Turn an error while opening `name` into one that says what to do."""
    kinds = set[str]()
    link: BaseException | None = error
    while link is not None:
        kinds.add(type(link).__name__)
        link = link.__cause__ or link.__context__
    text = str(error).strip() or type(error).__name__
    first, token = text.splitlines()[0], "set HF_TOKEN (or pass token=)"
    meant = nearest(str(name), [REAL, *MODELS]) if "/" not in str(name) else ""
    lacking = find_problem(
        (
            "GatedRepoError" in kinds or "gated repo" in text,
            f"{name} is gated: accept its licence at https://huggingface.co/{name}, then {token}",
        ),
        (
            "RepositoryNotFoundError" in kinds or "is not a valid model identifier" in text,
            f"there is no directory and no public model {name} on the hub; for a private one {token}.{meant}",
        ),
        (
            not Path(name).exists() and ("connect" in text or kinds & _UNREACHED),
            f"there is no directory {name}, and the hub cannot be reached for one of that name. Check the path, or the "
            f"network.{meant}",
        ),
        (
            "EntryNotFoundError" in kinds or "RemoteEntryNotFoundError" in kinds,
            f"{name} on the hub holds no config.json: expected a transformers checkpoint",
        ),
        (
            "ImportError" in kinds,  # A package that multiplies by quantised weights, or that the model's own code uses
            f"cannot open {name}: {first}. Without that package, load the checkpoint whose weights are not "
            "quantised, or a GGUF file of the model",
        ),
        (
            "HFValidationError" in kinds,
            f"there is no directory {name}, and no hub id is written so; expected DIR or owner/name",
        ),
    )
    foreign = find_problem(
        ("does not recognize this architecture" in text, f"{name}: {first}"),
        (
            "trust_remote_code" in text,
            f"{name} brings its own modelling code; pass trust_remote_code=True to run it",
        ),
    )
    if lacking is None and foreign is not None:
        return UnsupportedModelError(foreign)
    return CheckpointError(lacking or f"cannot open {name}: {first}")
