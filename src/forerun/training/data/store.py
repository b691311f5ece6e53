"""Prepared data: token ids and masks of many documents, memory-mapped, in a directory with a strict manifest.

``tokens.bin`` (int32), ``mask.bin`` (uint8), ``offsets.bin`` (int64, one more than documents), and ``manifest.json``
with the sha256 of each, which is compared whenever the directory is opened: five bytes a token, of which a processor
hashes more than 1 GB a second. The directory is written under a temporary name and renamed when it is complete. Knows
no tokenizer beyond its identity.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forerun.errors import DataError, VocabularyMismatchError
from forerun.manifests import ManifestKind, digest_of
from forerun.training.data.identity import TokenizerIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = ManifestKind(
    format="forerun-prepared-data", version=2, what="prepared data", remedy="make some with: forerun data prepare"
)
PARTS: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1"), "offsets": np.dtype("<i8")}
"""Name of each ``.bin`` file and its numbers."""


class PreparedData:
    """A prepared directory, opened: documents are views into memory-mapped files.

    Use `open`. ``len(data)`` is the number of documents.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], parts: Mapping[str, NDArray[Any]]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tokens: NDArray[np.int32] = parts["tokens"]
        """(num_tokens,) int32: all documents behind one another."""
        self.mask: NDArray[np.uint8] = parts["mask"]
        """(num_tokens,) uint8: 1 where the assistant wrote the token."""
        self.offsets: NDArray[np.int64] = parts["offsets"]
        """(documents + 1,) int64: document i is ``tokens[offsets[i]:offsets[i + 1]]``."""

    @classmethod
    def open(cls, folder: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> PreparedData:
        """Open a directory that `forerun data prepare` wrote, and read all of it once to compare the checksums.

        Args:
            folder: the directory.
            tokenizer: if given, it must be the one that made the data.

        Raises:
            DataError: no prepared data, another version, or a file that was cut short or changed.
            VocabularyMismatchError: made with another tokenizer, or conversations with another chat template.
        """
        folder = Path(folder)
        manifest = KIND.read(folder)
        counts = {name: int(manifest["counts"][name]) for name in ("documents", "tokens")}
        lengths = {"tokens": counts["tokens"], "mask": counts["tokens"], "offsets": counts["documents"] + 1}
        parts = {name: _mapped(folder, name, length, manifest["content"][name]) for name, length in lengths.items()}
        data = cls(folder, manifest, parts)
        if tokenizer is not None:
            data.check_tokenizer(TokenizerIdentity.of(tokenizer))
        return data

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def hash(self) -> str:
        """sha256 of tokens, mask and offsets as they were written; the data's name in every record of provenance."""
        return str(self.manifest["hash"])

    @property
    def tokenizer(self) -> TokenizerIdentity:
        """Whose token ids these are."""
        return TokenizerIdentity(**self.manifest["tokenizer"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(documents,) int64: tokens of each document."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Tokens (length,) int32 and mask (length,) uint8 of one document, read-only views.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens[start:end], self.mask[start:end]

    def check_tokenizer(self, given: TokenizerIdentity) -> None:
        """Refuse another tokenizer than the one that made the data; the messages name both.

        Raises:
            VocabularyMismatchError: the vocabularies differ, or the data holds conversations of another template.
        """
        own = self.tokenizer
        again = "prepare the data with the target's own tokenizer"
        if own.vocabulary != given.vocabulary:
            raise VocabularyMismatchError(
                f"{self.folder} was prepared with the tokenizer of {own.name!r} ({own.vocab_size} tokens), "
                f"which is not that of {given.name!r} ({given.vocab_size} tokens); {again}"
            )
        if own.template != given.template and self.manifest["counts"].get("conversations", 0):
            raise VocabularyMismatchError(
                f"{self.folder} holds conversations written with the chat template of {own.name!r}, "
                f"which is not that of {given.name!r}; {again}"
            )


class PreparedWriter:
    """Writes a prepared directory; a context manager. Nothing appears under the final name unless `finish` was called.

    Args:
        folder: where the data goes; must not exist, or be an empty directory.

    Raises:
        DataError: there is something already.
    """

    def __init__(self, folder: Path) -> None:
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise DataError(f"{folder} exists and is not empty; choose another --output or remove it first")
        self.folder = folder
        self.documents = 0
        self.tokens = 0
        self.counted = 0
        self._partial = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
        self._files: dict[str, IO[bytes]] = {}
        self._hashes = {name: hashlib.sha256() for name in PARTS}

    def __enter__(self) -> PreparedWriter:
        self._partial.mkdir(parents=True)
        self._files = {name: (self._partial / f"{name}.bin").open("wb") for name in PARTS}
        self._append("offsets", np.zeros(1, np.int64))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for file in self._files.values():
            # What a full disk left in the buffer fails again here; the first error is the one to show.
            try:
                file.close()
            except OSError:
                continue
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, tokens: Sequence[int], mask: Sequence[bool]) -> None:
        """Append a document."""
        assert len(tokens) == len(mask) > 0
        counted = np.asarray(mask, bool)
        self._append("tokens", np.asarray(tokens, np.int64))
        self._append("mask", counted)
        self.documents += 1
        self.tokens += len(tokens)
        self.counted += int(counted.sum())
        self._append("offsets", np.array([self.tokens], np.int64))

    def finish(self, tokenizer: TokenizerIdentity, about: Mapping[str, Any]) -> PreparedData:
        """Write the manifest, give the directory its name, and open it.

        Args:
            tokenizer: whose ids these are.
            about: further entries of the manifest; its ``counts`` are completed here.
        """
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        content = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        counts = {"documents": self.documents, "tokens": self.tokens, "counted_tokens": self.counted}
        manifest = {
            "hash": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
            "tokenizer": tokenizer.record(),
            **about,
            "counts": {**counts, **about.get("counts", {})},
            "content": content,
        }
        KIND.write(self._partial, manifest)
        os.replace(self._partial, self.folder)
        return PreparedData.open(self.folder)

    def _append(self, name: str, numbers: NDArray[Any]) -> None:
        data = numbers.astype(PARTS[name]).tobytes()
        self._files[name].write(data)
        self._hashes[name].update(data)


def _mapped(folder: Path, name: str, length: int, digest: str) -> NDArray[Any]:
    path, kind = folder / f"{name}.bin", PARTS[name]
    expected = length * kind.itemsize
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        state = "is missing" if found is None else f"has {found:,} bytes"
        raise DataError(f"{path} {state}, the manifest says {expected:,}; prepare the data again")
    if digest_of(path) != digest:
        raise DataError(f"{path} has changed since it was written: its checksum does not fit; prepare the data again")
    # A plain array on the same pages: slicing one is several times faster than slicing a memmap.
    numbers: NDArray[Any] = np.asarray(np.memmap(path, kind, mode="r", shape=(length,)))
    return numbers
