"""Checks of a model's name and dtype that need no import and no file content. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ArgumentError, CheckpointError

DTYPES = "'auto', 'float32', 'bfloat16' or 'float16'"
_ALSO = {"float", "half", "float64", "double"}  # Other names that torch accepts


def check(name: str | Path, dtype: str) -> None:
    """Raise the errors of `resolve` and of `load.read_config` that a model's name and dtype already
    show, before anything is imported or loaded.
    """
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        check_file(path)
    if not path.is_file() and not next(path.glob("*.gguf"), None):
        check_directory(name)
    if f"'{dtype}'" not in DTYPES and dtype not in _ALSO:
        raise ArgumentError(f"{dtype!r} is no dtype; expected {DTYPES}")


def check_file(path: Path) -> None:
    """Raise CheckpointError if there is no such GGUF file."""
    if not path.exists():
        raise CheckpointError(f"there is no file {path}: expected a GGUF file, a directory or a hub id (owner/name)")


def check_directory(name: str | Path) -> None:
    """Raise CheckpointError if `name` is meant as a directory and is none, or holds no
    configuration.
    """
    path = Path(name).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise CheckpointError(f"{path} holds no config.json: expected a transformers checkpoint.{_instead(path)}")
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
