"""This module writes and checks ``manifest.json`` of the directories that forerun writes, sealed
with a checksum. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import DataError, ForerunError
from forerun.writing import written

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MANIFEST = "manifest.json"
SEAL = "checksum"


def write_sealed(path: Path, entries: Mapping[str, Any]) -> None:
    """Save a JSON object with its checksum; a killed run leaves the old file or the new one."""
    with written(path) as fresh:
        fresh.write_text(json.dumps({**entries, SEAL: _hash(entries)}, indent=2) + "\n", encoding="utf-8")


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return what `write_sealed` was given; DataError, with the `remedy`, if it is no JSON object
    or has changed.
    """
    return _unseal(path, read_object(path, remedy), remedy)


def hash_file(path: Path) -> str:
    """Return the sha256 of a file, which is read whole."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_object(path: Path, remedy: str, kind: type[ForerunError] = DataError) -> dict[str, Any]:
    """Return the JSON object in a file; an error of this kind, with the `remedy`, if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise kind(f"{path} is no JSON ({error}); {remedy}") from error
    if not isinstance(found, dict):
        raise kind(f"{path} holds no JSON object; {remedy}")
    return found


def _unseal(path: Path, found: dict[str, Any], remedy: str) -> dict[str, Any]:
    if found.pop(SEAL, None) != _hash(found):
        raise DataError(f"{path} has changed since it was written: its checksum does not fit; {remedy}")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ManifestKind:
    """A `ManifestKind` describes one kind of directory and writes and reads its manifest."""

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
        found = read_object(path, self.remedy)
        if found.get("format") != self.format:
            raise DataError(f"{path} does not describe {self.what}; {self.remedy}")
        version = found.get("version")
        if version != self.version:
            older = isinstance(version, int) and version < self.version
            why = "an older forerun wrote it, without what this one checks" if older else "another forerun wrote it"
            raise DataError(
                f"{path} has format version {version!r}, this forerun reads {self.version}: {why}; {self.remedy}"
            )
        entries = _unseal(path, found, self.remedy)
        del entries["format"], entries["version"]
        return entries


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """A `TokenizerIdentity` tells one tokenizer from another."""

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
            vocabulary=_hash(sorted(vocabulary.items(), key=lambda item: (item[1], item[0]))),
            template=_hash(template) if template else "",
        )

    def record(self) -> dict[str, Any]:
        return asdict(self)
