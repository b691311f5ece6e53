"""Reads the headers of safetensors files: are they whole, and how large are the tensors. Loads no tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from forerun.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
BITS |= {"I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def read_header(path: Path) -> Mapping[str, Any]:
    """Tensor name -> dtype, shape and offsets.

    Raises:
        CheckpointError: the file is truncated or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path} is truncated or no safetensors file: its header does not fit its {size} bytes"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupt: its safetensors header cannot be read ({error})") from error
    if size != 8 + length + end:
        raise CheckpointError(
            f"{path} is corrupt: {size} bytes, but its header announces {8 + length + end}; copy it again"
        )
    return header


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    Raises:
        CheckpointError: there are none, the index is broken, or it names files that are not there.
    """
    if (directory / INDEX).is_file():
        files = listed_files(directory)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{directory} is incomplete: {INDEX} names {', '.join(absent)}, which are not there")
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    found = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{directory} holds no {SINGLE} or {INDEX} (found: {found}). forerun loads safetensors only, never pickle; "
        "convert with model.save_pretrained(directory) of transformers."
    )


def listed_files(directory: Path) -> list[Path]:
    """The files that a sharded checkpoint's index names, whether they are there or not.

    Raises:
        CheckpointError: the index is broken.
    """
    index = directory / INDEX
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is corrupt: no weight_map can be read ({error})") from error
    return [directory / name for name in names]


def weight_bytes(directory: Path, float_bytes: int | None) -> int:
    """Bytes of a checkpoint's tensors in memory, floats at `float_bytes` each (None: as stored)."""
    return sum(_bytes(entry, float_bytes) for entry in _entries(directory))


def _entries(directory: Path) -> Iterator[Mapping[str, Any]]:
    for path in weight_files(directory):
        yield from read_header(path).values()


def _bytes(entry: Mapping[str, Any], float_bytes: int | None) -> int:
    kind = entry["dtype"]
    bits = 8 * float_bytes if float_bytes is not None and kind in FLOATS else BITS.get(kind, 8)
    return int(prod(entry["shape"])) * bits // 8
