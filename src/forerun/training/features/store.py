"""Keeps features on disk, with a manifest of what they were made from, and reads them
for windows.

A directory holds ``manifest.json`` and, per shard, ``shard-00000.bin`` and ``shard-00000.json``. The first is one
record per token: the states at each boundary, then `LAST_HIDDEN`, then (float8 only) one float32 scale per state. The
second names the shard's documents, their lengths in tokens and their CRC-32 (2.1 GiB/s on one core, SHA-256 1.4), with
which each is compared when it is first read; a shard counts once it is there.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, DataError, NumericError
from forerun.losses.objective import FeatureBatch
from forerun.model.checks import check_directory, explain_load_error
from forerun.model.identity import checkpoint_folder
from forerun.model.load import weight_parts
from forerun.model.names import resolve
from forerun.training.data.store import PackedWindows, PreparedData
from forerun.types import LAST_HIDDEN, Boundary
from forerun.writing import (
    ManifestKind,
    TokenizerIdentity,
    format_bytes,
    free_bytes,
    read_object,
    read_sealed,
    write_sealed,
)

Records = NDArray[np.uint8]
SHARD_BYTES = 1 << 30
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
KIND = ManifestKind(
    format="forerun-features", version=3, what="a feature store", remedy="make one with: forerun features"
)
# How states may be stored. float8 takes half the bytes; every state then has a float32 scale of its own.
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")}
SHORT = {"float8": "float8_e4m3fn", "fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SCALE_BYTES = 4
RECORDS = "shard-*.json"


class FeatureWriter:
    """Adds documents to a store, shard by shard.

    Opening an unfinished one goes on with what no finished shard holds. A context manager: leaving
    it, also by Ctrl-C, finishes the shard at the last whole document.
    """

    def __init__(self, directory: Path, manifest: FeatureManifest, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Start or resume; DataError if the directory holds other features, a broken shard, or something else."""
        if shard_bytes < 1:
            raise ArgumentError(f"a shard needs at least one byte, got {shard_bytes}")
        self.directory, self.manifest, self._shard_bytes = directory, manifest, shard_bytes
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.glob(RECORDS)):
            FeatureManifest.read(directory).refuse_other(manifest, directory, reading=False)
        elif any(not path.name.startswith(("manifest.json", "shard-")) for path in directory.iterdir()):
            raise DataError(f"{directory} is not empty and no feature store: choose another directory")
        else:
            KIND.write(directory, asdict(manifest))
        self._shards = [Shard(path, manifest) for path in sorted(directory.glob(RECORDS))]
        for stale in directory.glob("*.partial"):
            stale.unlink()
        # Documents in finished shards and in the open one.
        self.done: set[int] = {document for shard in self._shards for document in shard.documents}
        self._file: BinaryIO | None = None
        self._open: list[tuple[int, int, int]] = []  # Document, length and checksum of what the open shard holds

    @property
    def tokens(self) -> int:
        """Return the tokens in finished shards and in the open one."""
        finished = sum(sum(shard.lengths) for shard in self._shards)
        return finished + sum(length for _, length, _ in self._open)

    def append(self, document: int, features: Mapping[Boundary, Tensor]) -> None:
        """Add the states (L, Ht) of one document at every boundary of the manifest and at
        `LAST_HIDDEN`.

        DataError if it is there already, its states do not fit the manifest, or the disk is full;
        NumericError for NaN.
        """
        if document in self.done:
            raise DataError(f"document {document} is in {self.directory} already")
        records = encode(features, self.manifest, f"document {document}")
        with self._full_disk_explained():
            if self._file is None:
                self._file = self._path(".bin.partial").open("wb")
            self._file.write(records.data)
        # One statement, so that Ctrl-C finds the document either counted or not.
        self._open.append((document, len(records), zlib.crc32(records.data)))
        self.done.add(document)
        if self._open_bytes() >= self._shard_bytes:
            self._seal()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._file is None:
            return
        if self._open and (error is None or not _is_full(error)):
            self._seal()
        else:
            self._file.close()
            self._path(".bin.partial").unlink(missing_ok=True)

    def _path(self, suffix: str) -> Path:
        """Return the path of a file of the open shard, which takes the first free number: a damaged
        one may have been deleted.
        """
        names = {shard.path.stem for shard in self._shards}
        stem = next(stem for stem in map("shard-{:05d}".format, itertools.count()) if stem not in names)
        return self.directory / f"{stem}{suffix}"

    def _open_bytes(self) -> int:
        return sum(length for _, length, _ in self._open) * self.manifest.record_bytes

    def _seal(self) -> None:
        """Finish the open shard: its bytes are on the disk before its record says so."""
        assert self._file is not None
        documents, lengths, checksums = zip(*self._open, strict=True)
        with self._full_disk_explained():
            # An interrupted write may have left part of a document behind the last whole one.
            self._file.truncate(self._open_bytes())
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            record = self._path(".json")
            self._path(".bin.partial").replace(record.with_suffix(".bin"))
            write_sealed(record, {"documents": documents, "lengths": lengths, "crc32": checksums})
        self._file, self._open = None, []
        self._shards.append(Shard(record, self.manifest))

    @contextmanager
    def _full_disk_explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not _is_full(error):
                raise
            count, room = len(self._shards), format_bytes(self._shard_bytes)
            raise DataError(
                f"the disk is full: shard {count} in {self.directory} could not be written. The {count} finished "
                f"shards are safe; make room (a shard takes up to {room}) and run the same command again to go on."
            ) from error


class FeatureStore:
    """A finished store, read through memory maps; many processes may read it at
    once.
    """

    def __init__(self, directory: str | Path, wanted: FeatureManifest | None = None) -> None:
        """Open a store that is complete and, with `wanted`, made from the same target, tokenizer
        and data.

        DataError, with both values, for another.
        """
        self.directory, self.manifest = Path(directory), FeatureManifest.read(Path(directory))
        if wanted is not None:
            self.manifest.refuse_other(wanted, self.directory, reading=True)
        self._shards = [Shard(path, self.manifest) for path in sorted(self.directory.glob(RECORDS))]
        # Document -> number of its shard, tokens before it in the shard, its tokens, its checksum.
        self._locations: dict[int, tuple[int, int, int, int]] = {}
        for index, shard in enumerate(self._shards):
            offsets = itertools.accumulate(shard.lengths, initial=0)
            places = zip(shard.documents, offsets, shard.lengths, shard.checksums, strict=False)
            self._locations |= {document: (index, first, size, check) for document, first, size, check in places}
        if len(self) != self.manifest.documents:
            raise DataError(
                f"{directory} is unfinished: it holds {len(self)} of {self.manifest.documents} documents; run the same "
                "forerun features command again to go on"
            )
        width = self.manifest.record_bytes
        self._records = [np.memmap(shard.path, np.uint8, "r").reshape(-1, width) for shard in self._shards]
        self._compared: set[int] = set()  # Documents whose checksum was found right

    def __len__(self) -> int:
        return len(self._locations)

    def read(self, document: int, offset: int = 0, length: int | None = None) -> dict[Boundary, Tensor]:
        """Return the states (length, Ht) of a document's tokens from `offset` on, at every boundary
        and `LAST_HIDDEN`.

        They are as stored, and bfloat16 for float8. DataError if there is no such document, it ends
        before, or it has changed.
        """
        if document not in self._locations:
            raise DataError(f"{self.directory} holds no document {document}; it has {len(self._locations)} documents")
        shard, first, size, checksum = self._locations[document]
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(
                f"document {document} has {size} tokens of features, tokens {offset}..{offset + length} "
                f"were asked for: {self.directory} is of other data"
            )
        records = self._records[shard][first : first + size]
        if document not in self._compared:
            if zlib.crc32(records.data) != checksum:
                path = self._shards[shard].path
                raise DataError(
                    f"document {document} in {path} has changed since it was written: its checksum does not fit; "
                    f"{_remedy(path)}"
                )
            self._compared.add(document)
        return decode(np.array(records[offset : offset + length]), self.manifest)

    def features(self, windows: PackedWindows, step: int, rank: int = 0, world: int = 1) -> FeatureBatch:
        """Return the batch of a step of `windows`, of the same prepared data, with its features (B,
        S, Ht) on the CPU.

        Padding is zero. A segment with an offset gets states that saw everything before it, as the
        head meets them when it drafts; `OnlineFeatures` sees the segment alone.
        """
        batch, by_boundary = windows.batch(step, rank, world), dict[Boundary, Tensor]()
        for segment in windows.segments(step, rank, world):
            for boundary, values in self.read(segment.document, segment.offset, segment.length).items():
                if boundary not in by_boundary:
                    by_boundary[boundary] = values.new_zeros(*batch.tokens.shape, values.shape[-1])
                by_boundary[boundary][segment.row, segment.column : segment.column + segment.length] = values
        return FeatureBatch(batch=batch, features=by_boundary)


class Shard:
    """One finished shard, by its record."""

    def __init__(self, record: Path, manifest: FeatureManifest) -> None:
        """Read the record; DataError, with both sizes, if the shard was cut short or changed."""
        self.path = record.with_suffix(".bin")
        stored = read_sealed(record, _remedy(self.path))
        self.documents: list[int] = stored["documents"]  # In the order in which they stand in the file
        self.lengths: list[int] = stored["lengths"]
        self.checksums: list[int] = stored["crc32"]  # CRC-32 of each document's records
        actual = self.path.stat().st_size if self.path.exists() else 0
        expected = sum(self.lengths) * manifest.record_bytes
        if actual != expected:
            raise DataError(
                f"{self.path} is cut short or was changed: {actual} bytes, expected {expected}; {_remedy(self.path)}"
            )


def encode(features: Mapping[Boundary, Tensor], manifest: FeatureManifest, name: str) -> Records:
    """Encode states (L, Ht) by boundary as records (L, record_bytes); DataError or NumericError,
    naming `name`, for others.
    """
    dtype, parts, scales = DTYPES[manifest.dtype], [], []
    expected = (len(next(iter(features.values()), ())), manifest.hidden_size)
    for boundary in (*manifest.boundaries, LAST_HIDDEN):
        shape = tuple(features[boundary].shape) if boundary in features else "nothing"
        if shape != expected:
            raise DataError(f"{name}, boundary {boundary}: expected states {expected}, got {shape}")
        states = features[boundary].detach().cpu()
        if dtype == torch.float8_e4m3fn:
            states = states.float()
            scale = (states.abs().amax(-1, keepdim=True) / _FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
            states = (states / scale).clamp(-_FLOAT8_MAX, _FLOAT8_MAX)
            scales.append(scale)
        stored = states.to(dtype).contiguous()
        if not torch.isfinite(stored.float()).all():
            raise NumericError(f"{name}, boundary {boundary}: NaN or infinite states in {manifest.dtype}; not stored")
        parts.append(stored.view(torch.uint8))
    parts += [scale.view(torch.uint8) for scale in scales]
    return torch.cat(parts, dim=1).numpy()


def decode(records: Records, manifest: FeatureManifest) -> dict[Boundary, Tensor]:
    """Decode records (L, record_bytes) to states (L, Ht) by boundary; the inverse of `encode` up to
    rounding.
    """
    stored, layers = DTYPES[manifest.dtype], (*manifest.boundaries, LAST_HIDDEN)
    raw = torch.from_numpy(records)
    width = manifest.hidden_size * stored.itemsize
    by_boundary = {}
    for index, boundary in enumerate(layers):
        states = raw[:, index * width : (index + 1) * width].contiguous().view(stored)
        if stored == torch.float8_e4m3fn:
            start = len(layers) * width + index * SCALE_BYTES
            scales = raw[:, start : start + SCALE_BYTES].contiguous().view(torch.float32)
            states = (states.float() * scales).to(torch.bfloat16)
        by_boundary[boundary] = states
    return by_boundary


def _remedy(path: Path) -> str:
    return f"delete {path.name} and {path.stem}.json and run the same forerun features command again"


def _is_full(error: BaseException) -> bool:
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


STRETCH = 512  # Documents that are sorted by length together
Capture = Callable[[Sequence[Sequence[int]]], Sequence[Mapping[Boundary, Tensor]]]
"""Maps whole documents (token ids) to their states (L, Ht) by boundary, as
``OnlineFeatures.documents`` does.
"""


def passes(lengths: Sequence[int], done: Set[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yield the documents of each pass, but for those in `done`: up to `batch_tokens` tokens with
    padding, or one longer.
    """
    if batch_tokens < 1:
        raise ArgumentError(f"a pass needs at least one token, got {batch_tokens}")
    for start in range(0, len(lengths), STRETCH):
        stretch = [index for index in range(start, min(start + STRETCH, len(lengths))) if index not in done]
        group: list[int] = []
        for index in sorted(stretch, key=lambda index: lengths[index]):
            # Lengths ascend: this document is the longest of the group.
            if group and (len(group) + 1) * lengths[index] > batch_tokens:
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def extract(
    capture: Capture,
    data: PreparedData,
    writer: FeatureWriter,
    *,
    batch_tokens: int = 8192,
    progress: Callable[..., None] = lambda **_: None,
) -> None:
    """Store the features of the documents that the writer lacks; `progress` is told to ``advance``
    by their tokens.
    """
    lengths = data.lengths.tolist()
    for group in passes(lengths, writer.done, batch_tokens):
        tokens = [data.document(index)[0].tolist() for index in group]
        for index, states in zip(group, capture(tokens), strict=True):
            writer.append(index, states)
            progress(advance=lengths[index])


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureManifest:
    """The origin of a store: target, data, tokenizer and dtype. Stores with equal manifests hold the same features."""

    target: str  # Directory or hub id, for people
    target_hash: str
    boundaries: tuple[Boundary, ...]  # In the order of the records; `LAST_HIDDEN` follows and is not listed
    dtype: str
    hidden_size: int
    tokenizer_hash: str
    template_hash: str  # Empty where there is no template
    data_hash: str
    documents: int  # In the prepared data, not only in finished shards
    tokens: int
    source: str = "transformers"  # Library that ran the target: transformers or vllm; they differ by rounding

    @property
    def record_bytes(self) -> int:
        """Return the bytes of one token: a vector for each boundary and `LAST_HIDDEN`, and for
        float8 a scale for each vector.
        """
        scale = SCALE_BYTES if self.dtype == "float8_e4m3fn" else 0
        return int((len(self.boundaries) + 1) * (self.hidden_size * DTYPES[self.dtype].itemsize + scale))

    @classmethod
    def read(cls, directory: Path) -> FeatureManifest:
        """Return the manifest of a store; DataError if there is none, it is broken or changed, or
        of another version.
        """
        stored = KIND.read(directory)
        return cls(**{**stored, "boundaries": tuple(stored["boundaries"])})

    def refuse_other(self, wanted: FeatureManifest, directory: Path, *, reading: bool) -> None:
        """Raise DataError, naming each field with both values, if this stored manifest is not the
        one that is wanted.

        With `reading` the stored dtype and source may be any; a resumed extraction must keep them.
        """
        # A target's name may differ: a directory may have moved.
        ignored = ("target", "dtype", "source") if reading else ("target",)
        names = [item.name for item in fields(self) if item.name not in ignored]
        other = [name for name in names if getattr(self, name) != getattr(wanted, name)]
        if other:
            shown = {name: (_format_value(getattr(self, name)), _format_value(getattr(wanted, name))) for name in other}
            differences = "; ".join(
                f"{name}: stored {stored}, wanted {asked}" for name, (stored, asked) in shown.items()
            )
            raise DataError(
                f"the features in {directory} (of {self.target}) do not belong to this run on {wanted.target}. "
                f"{differences}. Extract them again into another directory, or use what they were made from."
            )


def _format_value(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def parse_dtype(name: str) -> str:
    """Return the stored dtype's full name, from one of `DTYPES` or `SHORT`; else ArgumentError."""
    full = SHORT.get(name, name)
    if full not in DTYPES:
        raise ArgumentError(f"features are stored as bfloat16, float8, float16 or float32, not {name!r}")
    return full


def check_room(directory: Path, needed: int) -> int:
    """Return the free bytes where `directory` is or will be; DataError if there are fewer than
    `needed`.
    """
    free = free_bytes(directory)
    if needed > free:
        raise DataError(
            f"the features still need {format_bytes(needed)}, but {directory} has {format_bytes(free)} free: choose "
            "another directory, store them as float8, take fewer boundaries or less data, or train online without "
            "storing them"
        )
    return free


def describe(
    directory: Path,
    name: str,
    tokenizer: Any,
    data: PreparedData,
    boundaries: Sequence[Boundary],
    *,
    hidden_size: int,
    dtype: str = "bfloat16",
    source: str = "transformers",
) -> FeatureManifest:
    """Return the manifest of the features of `data` by the checkpoint in `directory`, for writing
    or for comparing.

    `name` is the target's for people. VocabularyMismatchError if another tokenizer made the data,
    DataError if there are no documents, CheckpointError if there is no target.
    """
    identity = TokenizerIdentity.of(tokenizer, name)
    data.check_tokenizer(identity)
    if len(data) == 0:
        raise DataError("the prepared data holds no documents")
    return FeatureManifest(
        target=identity.name,
        target_hash=target_hash(directory),
        boundaries=tuple(boundary for boundary in boundaries if boundary != LAST_HIDDEN),
        dtype=parse_dtype(dtype),
        hidden_size=hidden_size,
        tokenizer_hash=identity.vocabulary,
        template_hash=identity.template,
        data_hash=data.hash,
        documents=len(data),
        tokens=int(data.lengths.sum()),
        source=source,
    )


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """Raise DataError, naming the first, if a document is empty or longer than `limit` tokens."""
    for index, length in enumerate(lengths):
        if not 1 <= length <= limit:
            raise DataError(
                f"document {index} has {length} tokens, but the target takes 1..{limit}: prepare the data with a "
                "smaller maximum length"
            )


_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model"]
_UNWANTED = ["*/*", "consolidated*"]  # The same weights once more, in their makers' own layout; a * is any folder, too


def checkpoint_directory(target: str | Path) -> Path:
    """Return the directory of the target's files: a directory, a shipped model by its name, or a
    hub id, fetched.
    """
    name = resolve(target)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    check_directory(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except Exception as error:
        raise explain_load_error(name, error) from error


def find_loaded(target: str | Path) -> Path:
    """Return the directory of a target that has been loaded: its own, or a hub id's snapshot."""
    return checkpoint_folder(resolve(target)) or checkpoint_directory(target)


_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def target_hash(directory: Path) -> str:
    """Return a SHA-256 of a checkpoint: its configuration, its weight files' headers, and samples
    of their contents.

    Headers alone are the same for every fine-tune of a model; 64 KiB from all over each file tell
    them apart without reading the rest. CheckpointError if there is no configuration or no weights.
    """
    digest = hashlib.sha256()
    config = read_object(directory / "config.json", "expected a checkpoint of the target", CheckpointError)
    stable = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(stable, sort_keys=True).encode())
    for path, start in weight_parts(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            digest.update(path.name.encode() + file.read(start) + size.to_bytes(8, "little"))
            for offset in range(start, size, max(1, (size - start) // 16)):
                file.seek(offset)
                digest.update(file.read(4096))
    return digest.hexdigest()
