"""This module writes files and folders atomically: whole or not at all; and ``manifest.json`` of the
directories that forerun writes, sealed with a checksum. Imports no torch.

What is being written, about to be replaced or being removed has a hidden name of its own, so
threads, processes and containers that share a folder do not meet there. A killed process leaves
only such names, and `tidy` cleans them up.

The cache folder (`cache_root`) holds compiled kernels, measured costs and whatever else can be made
again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import DataError, ForerunError

_LOCK = ".lock"
_PARTIAL, _OLD, _GONE = "partial", "old", "gone"
_HIDDEN = re.compile(rf"\.(.+)\.[0-9a-f]+\.({_PARTIAL}|{_OLD}|{_GONE})")


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`; what is written there replaces `path` when the block ends without an error.

    OSError: there is no room, or no permission; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = _hide(path, _PARTIAL)
    try:
        yield fresh
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write a text, whole or not at all. As `replace_file`."""
    with replace_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield a fresh folder that durably takes the place of `folder` if the block ends without an
    error. As `replace_file`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = _hide(folder, _PARTIAL)
    fresh.mkdir()
    try:
        yield fresh
        for path in (*fresh.rglob("*"), fresh):
            _make_durable(path)
        former = _hide(folder, _OLD)
        if folder.exists():
            folder.rename(former)
        try:
            fresh.rename(folder)
        except OSError:
            if former.exists():
                former.rename(folder)
            raise
        shutil.rmtree(former, ignore_errors=True)
        _make_durable(folder.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Yield whether no other process is in such a block for `folder`; a killed process leaves it.

    True where a file system, or the operating system, knows no locks, and where nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        yield True
        return
    try:
        yield _lock(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def free_bytes(folder: Path) -> int:
    """Return the free bytes where `folder` is or will be."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def format_bytes(count: float) -> str:
    """Format a number of bytes in the unit that suits it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def remove_folder(folder: Path) -> None:
    """Remove a folder at once, so that nobody ever sees half of it."""
    doomed = _hide(folder, _GONE)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def tidy(parent: Path) -> None:
    """Remove what killed processes left in `parent`, and undo replacements that were cut short.
    Only where nobody else writes.
    """
    for path in list(parent.iterdir()) if parent.is_dir() else []:
        match = _HIDDEN.fullmatch(path.name)
        if match is None:
            continue
        whole = parent / match[1]
        if match[2] == _OLD and not whole.exists():
            path.rename(whole)
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _hide(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.{kind}")


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_log = logging.getLogger(__name__)


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is none, also where it is nested too deeply to read."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_kept(path: Path) -> Any:
    """Return the JSON value that a file of the cache holds; None if it is missing or broken."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def keep(path: Path, value: Any, what: str) -> None:
    """Write a JSON value to a file of the cache; where that fails, log at debug level that `what`
    is not kept.
    """
    try:
        write_file(path, json.dumps(value))
    except OSError as error:
        _log.debug("%s is not kept: %s", what, error)


def cache_root() -> Path:
    """Return the cache folder: ``$FORERUN_CACHE``, else ``$XDG_CACHE_HOME/forerun``, else ``~/.cache/forerun``.

    A user without a home directory, as in a container, gets a private folder in the temporary directory.
    """
    chosen = os.environ.get("FORERUN_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "forerun"
    except RuntimeError:
        return _without_home()


@cache
def _without_home() -> Path:
    """Return a private folder in the temporary directory, the same one in every process.

    Where somebody else owns a folder of that name, each process gets a fresh one.
    """
    folder = Path(tempfile.gettempdir()) / f"forerun-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return folder if private else Path(tempfile.mkdtemp(prefix="forerun-"))


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"
SEAL = "checksum"


def write_sealed(path: Path, entries: Mapping[str, Any]) -> None:
    """Save a JSON object with its checksum; a killed run leaves the old file or the new one."""
    write_file(path, json.dumps({**entries, SEAL: hash_json(entries)}, indent=2) + "\n")


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return what `write_sealed` was given; DataError, with the `remedy`, if it is no JSON object
    or has changed.
    """
    return _unseal(path, read_object(path, remedy), remedy)


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, which is read whole."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_json(value: Any) -> str:
    """Return the sha256 of a value as JSON; what JSON has no form for counts by its text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def read_object(path: Path, remedy: str, kind: type[ForerunError] = DataError) -> dict[str, Any]:
    """Return the JSON object in a file; an error of this kind, with the `remedy`, if there is none."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise kind(f"{path} is no JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise kind(f"{path} holds no JSON object; {remedy}")
    return content


def _unseal(path: Path, found: dict[str, Any], remedy: str) -> dict[str, Any]:
    if found.pop(SEAL, None) != hash_json(found):
        raise DataError(f"{path} has changed since it was written: its checksum does not fit; {remedy}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestKind:
    """Describes one kind of directory and writes and reads its manifest."""

    format: str  # Name of the format in the manifest
    version: int
    what: str  # For people: a datastore
    remedy: str  # How such a directory is made

    def write(self, folder: Path, entries: Mapping[str, Any]) -> None:
        """Save what the directory holds; a killed run leaves the old file or the new one."""
        write_sealed(folder / MANIFEST, {"format": self.format, "version": self.version, **entries})

    def read(self, folder: Path) -> dict[str, Any]:
        """Return what the manifest holds; DataError if it is missing, changed, or of another kind
        or version.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(f"{folder} is not {self.what}, it has no {MANIFEST}; {self.remedy}")
        content = read_object(path, self.remedy)
        if content.get("format") != self.format:
            raise DataError(f"{path} does not describe {self.what}; {self.remedy}")
        version = content.get("version")
        if version != self.version:
            raise DataError(
                f"{path} has format version {version!r}, this forerun reads {self.version}: another version of forerun "
                f"wrote it; {self.remedy}"
            )
        entries = _unseal(path, content, self.remedy)
        del entries["format"], entries["version"]
        return entries


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """Tells one tokenizer from another."""

    name: str  # Directory name or hub id it was loaded from; for messages, not for comparison
    vocab_size: int
    vocabulary: str  # sha256 of the token strings and their ids
    template: str  # sha256 of the chat template; empty where there is none

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> TokenizerIdentity:
        """Return the identity of a loaded tokenizer; `name` overrides the one it carries."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        source = name or str(getattr(tokenizer, "name_or_path", "")) or "unnamed"
        path = Path(source)
        template: Any = tokenizer.chat_template
        return cls(
            # A directory by its last part: manifests travel, places on one machine do not.
            name=path.name if path.is_absolute() or path.exists() else source,
            vocab_size=max(vocabulary.values()) + 1,
            vocabulary=hash_json(sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))),
            template=hash_json(template) if template else "",
        )
