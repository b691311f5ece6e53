"""What a datastore directory holds, and when it is refused.

* ``tokens.bin``, uint32 little endian: `SEPARATOR`, then every document followed by `SEPARATOR`.
* ``suffixes.bin``, uint32 little endian: places in ``tokens.bin``, those that have a token of their document before
  them and hold one, sorted by the `SORTED_TOKENS` tokens *before* the place, read backwards: the suffix array of the
  reversed text. All places that follow the same words stand together, for any number of words.
* ``manifest.json``: version, tokenizer, counts, and for both files the bytes and the sha256.

Knows files. Does not know how the order is made or searched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import DataError, VocabularyMismatchError
from forerun.manifests import ManifestKind, digest_of
from forerun.training.data.store import TokenizerIdentity

KIND = ManifestKind(
    format="forerun-datastore", version=2, what="a datastore", remedy="make one with: forerun datastore build"
)
TOKENS, SUFFIXES = "tokens.bin", "suffixes.bin"
ITEM: np.dtype[np.uint32] = np.dtype("<u4")
SEPARATOR = 2**32 - 1
"""Stands between documents; no token, and larger than any."""
SORTED_TOKENS = 64
"""How many tokens before a place decide its order: no match can be longer."""
MOST_ITEMS = 2**32 - 2
"""Most numbers in ``tokens.bin``: places are 32 bits wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One ``.bin`` file as it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Of a file that is there; reads all of it."""
        return cls(bytes=path.stat().st_size, sha256=digest_of(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What ``manifest.json`` says."""

    tokenizer: TokenizerIdentity
    """Whose token ids these are."""
    documents: int
    tokens: int
    """Of all documents, separators not counted."""
    places: int
    """Entries of ``suffixes.bin``."""
    largest_token: int
    """The largest token id that occurs."""
    sorted_tokens: int
    """Longest match that the order allows, tokens."""
    files: Mapping[str, StoredFile]
    """By file name."""
    sources: tuple[Mapping[str, Any], ...] = ()
    """Name and sha256 of each data file."""

    def check_tokenizer(self, given: TokenizerIdentity | None, vocabulary: int, where: Path) -> None:
        """Refuse token ids that mean something else to the target.

        Args:
            given: the target's tokenizer; None where the engine works on token ids alone: then sizes must do.
            vocabulary: token ids of the target are below this.
            where: the directory, for the message.

        Raises:
            VocabularyMismatchError: another tokenizer, or token ids that the target does not have.
        """
        own = self.tokenizer
        if given is not None and given.vocabulary != own.vocabulary:
            raise VocabularyMismatchError(
                f"{where} was built with the tokenizer of {own.name!r} ({own.vocab_size} tokens, sha256 "
                f"{own.vocabulary[:12]}), which is not that of {given.name!r} ({given.vocab_size} tokens, sha256 "
                f"{given.vocabulary[:12]}); build a datastore for this target: forerun datastore build --target"
            )
        if max(self.largest_token + 1, own.vocab_size if given is None else 0) > vocabulary:
            raise VocabularyMismatchError(
                f"{where} was built with the tokenizer of {own.name!r} ({own.vocab_size} tokens, the largest in use "
                f"{self.largest_token}), the target has {vocabulary} token ids; build a datastore for this target"
            )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``manifest.json``."""
    KIND.write(folder, asdict(manifest))


def read_manifest(folder: Path) -> Manifest:
    """Read ``manifest.json`` and compare the lengths of the files with it.

    Raises:
        DataError: no datastore, another version, a manifest that is damaged, or files that are missing or cut short.
    """
    value = KIND.read(folder)
    files = {name: StoredFile(**stored) for name, stored in value["files"].items()}
    tokenizer = TokenizerIdentity(**value["tokenizer"])
    manifest = Manifest(**{**value, "files": files, "tokenizer": tokenizer, "sources": tuple(value["sources"])})
    _check_lengths(folder, manifest)
    return manifest


def mapped(folder: Path, name: str) -> NDArray[np.uint32]:
    """One of the files, read-only and memory-mapped. A plain array: indexing a `np.memmap` costs several times more."""
    return np.asarray(np.memmap(folder / name, dtype=ITEM, mode="r"))


def verify(folder: Path, manifest: Manifest) -> None:
    """Read both files and compare them with the manifest's hashes: slow, finds bits that have changed.

    Raises:
        DataError: a file is not what was written.
    """
    for name, stored in manifest.files.items():
        if StoredFile.of(folder / name) != stored:
            raise DataError(f"{folder / name} has changed since it was written; {KIND.remedy}")


def _check_lengths(folder: Path, manifest: Manifest) -> None:
    items = {TOKENS: manifest.tokens + manifest.documents + 1, SUFFIXES: manifest.places}
    for name, count in items.items():
        path = folder / name
        if not path.is_file():
            raise DataError(f"{path} is missing; {KIND.remedy}")
        found, expected = path.stat().st_size, count * ITEM.itemsize
        if found != expected or manifest.files[name].bytes != expected:
            raise DataError(f"{path} holds {found:,} bytes where {expected:,} were written; {KIND.remedy}")
    if manifest.places == 0:
        raise DataError(f"the datastore in {folder} is empty; {KIND.remedy}")
