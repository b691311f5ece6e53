"""Datastores for `rest`: a corpus as token ids with a sorted index of positions, memory-mapped.

A directory, which `training.data.datastore` writes, holds

* ``tokens.bin``, uint32 little endian: `SEPARATOR`, then every document followed by `SEPARATOR`.
* ``suffixes.bin``, uint32 little endian: places in ``tokens.bin``, those that have a token of their document before
  them and hold one, sorted by the `SORTED_TOKENS` tokens *before* the place, read backwards: the suffix array of the
  reversed text. All places that follow the same words stand together, for any number of words.
* ``manifest.json``: version, tokenizer, counts, and for both files the bytes and the sha256.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.errors import DataError, VocabularyMismatchError
from forerun.manifests import ManifestKind, TokenizerIdentity, hash_file

KIND = ManifestKind(
    format="forerun-datastore", version=2, what="a datastore", remedy="make one with: forerun datastore build"
)
TOKENS, SUFFIXES = "tokens.bin", "suffixes.bin"
ITEM: np.dtype[np.uint32] = np.dtype("<u4")
SEPARATOR = 2**32 - 1  # Stands between documents; no token, and larger than any
SORTED_TOKENS = 64  # How many tokens before a place decide its order: no match can be longer
MOST_ITEMS = 2**32 - 2  # Most numbers in ``tokens.bin``: places are 32 bits wide


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datastore:
    """A datastore directory, memory-mapped: of files of any size only what is looked at is read.
    Use `open`.
    """

    folder: Path
    manifest: Manifest
    tokens: NDArray[np.uint32]  # (N,) see the top of this file
    places: NDArray[np.uint32]  # (places,) see the top of this file

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Open a directory that `forerun datastore build` wrote. Raises DataError if there is none,
        it has another version, or is damaged.
        """
        folder = Path(folder).expanduser()
        value = KIND.read(folder)
        files = {name: StoredFile(**stored) for name, stored in value["files"].items()}
        tokenizer = TokenizerIdentity(**value["tokenizer"])
        manifest = Manifest(**{**value, "files": files, "tokenizer": tokenizer, "sources": tuple(value["sources"])})
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
        # Plain arrays are used: indexing a `np.memmap` costs several times more.
        tokens, places = (np.asarray(np.memmap(folder / name, dtype=ITEM, mode="r")) for name in (TOKENS, SUFFIXES))
        return cls(folder=folder, manifest=manifest, tokens=tokens, places=places)

    def verify(self) -> None:
        """Compare every byte with the manifest's hashes, which is slow. Raises DataError if one has
        changed.
        """
        for name, stored in self.manifest.files.items():
            if StoredFile.of(self.folder / name) != stored:
                raise DataError(f"{self.folder / name} has changed since it was written; {KIND.remedy}")

    def longest(self, text: Sequence[int], *, shortest: int, longest: int) -> DatastoreMatch | None:
        """Find the longest end of `text`, of `shortest` to `longest` tokens, that occurs; None if
        none does. Places are sorted by the tokens before them read backwards, so those that match
        one token more are a part of those that match so far: one interval, narrowed token by token,
        O(log(places)) for each.
        """
        start, stop, length = 0, len(self.places), 0
        for back, token in enumerate(reversed(text[-longest:]), start=1):
            narrower = self._narrowed(start, stop, back, token)
            if narrower[0] == narrower[1]:
                break
            (start, stop), length = narrower, back
        return DatastoreMatch(length, range(start, stop)) if length >= shortest else None

    def _narrowed(self, start: int, stop: int, back: int, token: int) -> tuple[int, int]:
        """Return the part of the places ``start:stop`` that have `token` `back` tokens before them.
        All of them match ``back - 1`` tokens, none a separator, so the index stays within the file.
        """
        tokens, places = self.tokens, self.places

        def before(place: int) -> int:
            return int(tokens[place - back])

        left = bisect_left(places, token, start, stop, key=before)
        if left == stop or before(int(places[left])) != token:
            return left, left
        return left, bisect_right(places, token, left, stop, key=before)

    def continuations(self, match: DatastoreMatch, length: int, most: int) -> NDArray[np.uint32]:
        """Return what followed a match: (H, length) uint32, ended early by a separator where a
        document ends. Of more than `most` places an evenly spaced sample is taken.
        """
        chosen = self.places[match.places.start : match.places.stop]
        if len(chosen) > most:
            chosen = chosen[np.arange(most) * len(chosen) // most]
        grid = chosen.astype(np.int64)[:, None] + np.arange(length)
        found: NDArray[np.uint32] = self.tokens[np.minimum(grid, len(self.tokens) - 1)]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """One ``.bin`` file as it was written."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Describe an existing file; reads all of it."""
        return cls(bytes=path.stat().st_size, sha256=hash_file(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of ``manifest.json``."""

    tokenizer: TokenizerIdentity  # Tokenizer of these token ids
    documents: int
    tokens: int  # Tokens of all documents, separators not counted
    places: int  # Entries of ``suffixes.bin``
    largest_token: int  # The largest token id that occurs
    sorted_tokens: int  # Longest match that the order allows, tokens
    files: Mapping[str, StoredFile]  # Files by name
    sources: tuple[Mapping[str, Any], ...] = ()  # Name and sha256 of each data file

    def check_tokenizer(self, given: TokenizerIdentity | None, vocabulary: int, where: Path) -> None:
        """Raise VocabularyMismatchError if token ids mean something else to the target, whose ids
        are below `vocabulary`. `given` is its tokenizer; None where the engine works on token ids
        alone: then sizes must do.
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


class DatastoreMatch(NamedTuple):
    """The places that follow the longest stretch of the text's end that occurs in the datastore."""

    length: int  # Tokens that match
    places: range  # Indices into the sorted places
