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
CONFIG, ADAPTER, TOKENIZER = "config.json", "adapter_config.json", "tokenizer_config.json"
_HOLDS = {
    CONFIG: ("no config.json and no GGUF file", "a checkpoint of transformers, or one .gguf file"),
    ADAPTER: ("no adapter_config.json", "a PEFT adapter"),
}
"""A configuration's file maps to the words for a directory that lacks it, and for what was expected."""


def check(name: str | Path, dtype: str, device: str | None = None, adapter: str | Path | None = None) -> None:
    """Raise the errors of `resolve`, of `load.read_config` and of `load.LoadOptions` that the names of a model and its
    adapter, its dtype and device already show, before anything is imported or loaded.
    """
    refuse(
        (dtype not in _DTYPES, f"{dtype!r} is no dtype; expected {DTYPES}"),
        (device is not None and not _DEVICE.fullmatch(device), f"{device!r} is no device; expected {DEVICES}"),
    )
    check_found(name)
    path = Path(name).expanduser()
    if path.is_dir() and not next(path.glob("*.gguf"), None):
        check_directory(path)
    if adapter is not None:
        check_directory(adapter, file=ADAPTER)


def check_found(name: str | Path) -> None:
    """Raise CheckpointError if a name is no file, no directory, no shipped model, and no hub id that the hub knows."""
    path = Path(name).expanduser()
    if find_kept(name) is not None:
        return
    if path.suffix == ".gguf" or path.is_file():
        check_file(path)
    elif not path.exists() and str(name) not in (REAL, *MODELS):
        check_directory(name)


def check_on_hub(name: str, file: str, *, revision: str | None = None, token: str | bool | None = None) -> None:
    """Ask the hub once, unless its answer lies in the cache, whether it has that `file` of a model, and raise
    CheckpointError if not. A tokenizer may have another file.

    transformers asks for several files, each six times where there is no network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    files = (file, CONFIG, "tokenizer.json") if file == TOKENIZER else (file,)
    try:
        if not any(isinstance(try_to_load_from_cache(name, each, revision=revision), str) for each in files):
            get_hf_file_metadata(hf_hub_url(name, file, revision=revision), timeout=HUB_TIMEOUT_S, token=token)
    except Exception as error:
        if file != TOKENIZER or not isinstance(error, EntryNotFoundError):
            raise explain_load_error(name, error, file) from error


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


def check_directory(
    name: str | Path, *, file: str = CONFIG, revision: str | None = None, token: str | bool | None = None
) -> None:
    """Raise CheckpointError if `name` is a directory that lacks `file`, its configuration; is meant as a directory and
    is none; or is no hub id that the hub knows, see `check_on_hub`.
    """
    path = Path(name).expanduser()
    lacking, expected = _HOLDS[file]
    if path.is_dir():
        if not (path / file).is_file():
            raise CheckpointError(f"{path} holds {lacking}: expected {expected}.{_instead(path, file)}")
        return
    if isinstance(name, Path) or str(name).startswith((".", "/", "~")) or str(name).count("/") > 1:
        raise CheckpointError(f"there is no directory {path}: expected {expected}, or a hub id (owner/name)")
    check_on_hub(str(name), file, revision=revision, token=token)


def _instead(folder: Path, file: str) -> str:
    """Return a sentence on what a directory without the configuration `file` holds, and what to name instead."""
    if (folder / ADAPTER).is_file():
        return " It holds a PEFT adapter: pass it as adapter=, and its base model as the model."
    if (folder / "snapshots").is_dir() and folder.name.startswith("models--"):
        return f" It is a folder of the hub's cache: name {folder.name.removeprefix('models--').replace('--', '/')}."
    inside = sorted(path.parent.name for path in folder.glob(f"*/{file}"))
    return f" Such are in it: {', '.join(inside[:4])}." if inside else ""


_UNREACHED = {
    *("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectionError", "ConnectError"),
    *("ConnectTimeout", "ReadTimeout"),
}


def explain_load_error(name: str | Path, error: Exception, file: str = CONFIG) -> ForerunError:
    """Turn an error while opening `name`, whose configuration is `file`, into one that says what to do."""
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
            f"{name} on the hub holds no {file}: expected {_HOLDS.get(file, _HOLDS[CONFIG])[1]}",
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
