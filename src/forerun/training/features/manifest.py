"""The manifest of a feature store: what it was made from and how, compared before features are read or added."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from forerun import demo
from forerun.errors import ArgumentError, CheckpointError, DataError
from forerun.manifests import ManifestKind, TokenizerIdentity, read_object
from forerun.model.load import check_directory, explained, weight_files
from forerun.training.data.store import PreparedData
from forerun.types import LAST_HIDDEN, Boundary

KIND = ManifestKind(
    format="forerun-features", version=3, what="a feature store", remedy="make one with: forerun features"
)
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn")
}
"""How states may be stored. float8 takes half the bytes; every state then has a float32 scale of its own."""
SHORT = {"float8": "float8_e4m3fn", "fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureManifest:
    """What a feature store was made from and how; two stores with equal manifests hold the same features."""

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
    source: str = "transformers"  # What ran the target: transformers or vllm; their numbers differ by rounding

    @property
    def record_bytes(self) -> int:
        """Bytes of one token: a vector for each boundary and `LAST_HIDDEN`, and for float8 a scale for each vector."""
        scale = SCALE_BYTES if self.dtype == "float8_e4m3fn" else 0
        return (len(self.boundaries) + 1) * (self.hidden_size * DTYPES[self.dtype].itemsize + scale)

    def write(self, directory: Path) -> None:
        KIND.write(directory, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> FeatureManifest:
        """The manifest of a store; DataError if there is none, it is broken or changed, or of another version."""
        stored = KIND.read(directory)
        return cls(**{**stored, "boundaries": tuple(stored["boundaries"])})

    def refuse_other(self, wanted: FeatureManifest, directory: Path, *, reading: bool) -> None:
        """DataError, naming each field with both values, if this stored manifest is not the one that is wanted. With
        `reading` the stored dtype and source may be any; a resumed extraction must keep them."""
        # A target's name may differ: a directory may have moved.
        ignored = ("target", "dtype", "source") if reading else ("target",)
        names = [item.name for item in fields(self) if item.name not in ignored]
        pairs = {name: (getattr(self, name), getattr(wanted, name)) for name in names}
        other = {name: tuple(map(_shown, pair)) for name, pair in pairs.items() if pair[0] != pair[1]}
        if other:
            found = "; ".join(f"{name}: stored {stored}, wanted {asked}" for name, (stored, asked) in other.items())
            raise DataError(
                f"the features in {directory} (of {self.target}) do not belong to this run on {wanted.target}. "
                f"{found}. Extract them again into another directory, or use what they were made from."
            )


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def dtype_named(name: str) -> str:
    """The stored dtype's full name, from one of `DTYPES` or `SHORT`; else ArgumentError."""
    full = SHORT.get(name, name)
    if full not in DTYPES:
        raise ArgumentError(f"features are stored as bfloat16, float8, float16 or float32, not {name!r}")
    return full


def check_room(directory: Path, needed: int) -> int:
    """Free bytes where `directory` is or will be; DataError if there are fewer than `needed`."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"the features still need {human(needed)}, but {existing} has {human(free)} free: choose another "
            "directory, store them as float8, take fewer boundaries or less data, or train online without storing them"
        )
    return free


def human(count: float) -> str:
    """A number of bytes in the unit that suits it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


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
    """The manifest of the features of `data` by the checkpoint in `directory`, for writing or for comparing.

    `name` is the target's for people. VocabularyMismatchError if another tokenizer made the data, DataError if there
    are no documents, CheckpointError if there is no target.
    """
    identity = TokenizerIdentity.of(tokenizer, name)
    data.check_tokenizer(identity)
    if len(data) == 0:
        raise DataError("the prepared data holds no documents")
    return FeatureManifest(
        target=identity.name,
        target_hash=target_hash(directory),
        boundaries=tuple(boundary for boundary in boundaries if boundary != LAST_HIDDEN),
        dtype=dtype_named(dtype),
        hidden_size=hidden_size,
        tokenizer_hash=identity.vocabulary,
        template_hash=identity.template,
        data_hash=data.hash,
        documents=len(data),
        tokens=int(data.lengths.sum()),
        source=source,
    )


def wanted_manifest(
    target: str | Path, tokenizer: Any, data: PreparedData, boundaries: Sequence[Boundary], hidden_size: int
) -> FeatureManifest:
    """What ``FeatureStore.open(directory, wanted)`` compares a store with; `target` as in `checkpoint_directory`."""
    return describe(checkpoint_directory(target), str(target), tokenizer, data, boundaries, hidden_size=hidden_size)


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """DataError, naming the first, if a document is empty or longer than `limit` tokens."""
    for index, length in enumerate(lengths):
        if not 1 <= length <= limit:
            raise DataError(
                f"document {index} has {length} tokens, but the target takes 1..{limit}: prepare the data with a "
                "smaller maximum length"
            )


def checkpoint_directory(target: str | Path) -> Path:
    """The target's files: a directory, a shipped model by its name, or a hub id, fetched; or CheckpointError."""
    name = demo.resolve(target)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    check_directory(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]))
    except Exception as error:
        raise explained(name, error) from error


def loaded_from(target: str | Path) -> Path:
    """Where the files of a target that has been loaded lie: its directory, or a hub id's snapshot."""
    from huggingface_hub import try_to_load_from_cache

    name = demo.resolve(target)
    found = None if Path(name).expanduser().is_dir() else try_to_load_from_cache(str(name), "config.json")
    return Path(found).parent if isinstance(found, str) else checkpoint_directory(target)


_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def target_hash(directory: Path) -> str:
    """SHA-256 of a checkpoint: its configuration, its weight files' headers, and samples of their contents.

    Headers alone are the same for every fine-tune of a model; 64 KiB spread over each file tell them apart without
    reading the rest. CheckpointError if there is no configuration or no weights.
    """
    digest = hashlib.sha256()
    config = read_object(directory / "config.json", "expected a checkpoint of the target", CheckpointError)
    kept = {key: value for key, value in config.items() if key not in _VOLATILE}
    digest.update(json.dumps(kept, sort_keys=True).encode())
    for path in weight_files(directory):
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            start = 8 + int.from_bytes(head, "little")
            digest.update(path.name.encode() + head + file.read(start - 8) + size.to_bytes(8, "little"))
            for offset in range(start, size, max(1, (size - start) // 16)):
                file.seek(offset)
                digest.update(file.read(4096))
    return digest.hexdigest()
