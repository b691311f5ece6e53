"""The header of a GGUF file: metadata, the table of its tensors, and the files that a model is split into.

Of a large vocabulary only the number of its entries is read, so that a header takes milliseconds.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.errors import CheckpointError, list_some, refuse
from forerun.model.checks import MAGIC

VERSIONS = (2, 3)
SOURCE = "gguf_file.txt"  # Names the file in the folder that `gguf.folder_of` makes
_LONG = 1000  # Entries of a list of numbers that are a vocabulary's, and in no configuration

PART = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")
"""Matches the stem of a file that is one part of a model, named as llama.cpp expects; the first
part has number 1.
"""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9
"""Type numbers of metadata: for scalars their `struct` formats, then strings and lists."""

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Tensor types that hold floating-point numbers as they are; any other is quantised."""


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that `path` is, or is a part of, in their order, there or not."""
    match = PART.fullmatch(path.stem)
    if match is None:
        return [path]
    count = int(match["parts"])
    return [path.with_name(f"{match['name']}-{part:05}-of-{count:05}{path.suffix}") for part in range(1, count + 1)]


def find_parts(path: Path) -> list[Path]:
    """Return the files of the model that a file is, or is a part of. Raises CheckpointError if some
    are missing.
    """
    parts = parts_of(path)
    if absent := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is one of {len(parts)} parts of a model, and {list_some(absent, 3)} "
            f"{'are' if len(absent) > 1 else 'is'} not beside it: put all parts into one directory"
        )
    return parts


class GgufTensor(NamedTuple):
    """The place of a tensor in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # Shape in torch's order: the last dimension is contiguous
    type: int
    offset: int  # From the beginning of all tensors of its file, bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file but its tensors."""

    path: Path
    metadata: Mapping[str, Any]  # Metadata; of long lists, and lists of strings, only the number of entries
    short: tuple[tuple[int, int], ...]  # From where to where entries lie that are no such list
    tensors: tuple[GgufTensor, ...]
    table: tuple[int, int]  # From where to where the tensors' entries lie
    start: int  # Offset at which the tensors begin
    more: tuple[GgufHeader, ...] = ()  # Headers of the parts behind this one

    @property
    def everything(self) -> list[GgufTensor]:
        """The tensors of all parts."""
        return [tensor for part in (self, *self.more) for tensor in part.tensors]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def ends(self) -> list[int]:
        """The token ids that end an answer: end of text, of turn, of message."""
        found = (self.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return sorted({token for token in found if token is not None})

    def stated(self, key: str, default: Any = None) -> Any:
        """Return what the file states of its architecture under `key`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def context_length(self) -> int:
        """Most positions of a sequence."""
        return int(self.stated("context_length", 2048))

    @property
    def weights_bytes(self) -> int:
        return sum(self.bytes_of(tensor) for tensor in self.everything)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values in float16, over all layers."""
        heads, layers = self.stated("attention.head_count", 1), int(self.stated("block_count", 1))
        most = max(heads) if isinstance(heads, list) else heads
        wide = self.stated("embedding_length", 0) // most
        size = self.stated("attention.key_length", wide) + self.stated("attention.value_length", wide)
        if latent := self.stated("attention.kv_lora_rank"):
            return 2 * layers * (latent + self.stated("rope.dimension_count", 0))
        keeping = self.stated("attention.head_count_kv", heads)
        return 2 * size * (sum(keeping) if isinstance(keeping, list) else layers * keeping)

    @property
    def quantisation(self) -> str:
        """The type of most weights by its name in the format, for example ``"Q4_K"``."""
        from gguf import GGMLQuantizationType

        sizes = Counter[int]()
        for tensor in self.everything:
            sizes[tensor.type] += prod(tensor.shape)
        return GGMLQuantizationType(max(sizes, key=lambda kind: sizes[kind])).name

    def identity(self) -> dict[str, Any]:
        """Return what tells this file's passes from those of others: its structure and types, not its weights."""
        shapes = sorted((tensor.name, tensor.shape, tensor.type) for tensor in self.everything)
        return {
            "architecture": self.architecture,
            "quantisation": self.quantisation,
            "bytes": self.weights_bytes,
            "tensors": hashlib.sha256(repr(shapes).encode()).hexdigest(),
        }

    @property
    def dtype(self) -> torch.dtype:
        """The file's own floating type: the narrow one if norms are float32 between narrow weights,
        bfloat16 if anything is quantised.
        """
        types = {tensor.type for tensor in self.everything}
        if not types <= _FLOATS.keys() or 30 in types:
            return torch.bfloat16
        return torch.float16 if 1 in types else torch.float32

    def bytes_of(self, tensor: GgufTensor) -> int:
        """Return the bytes of a tensor in the file. Raises CheckpointError if the package ``gguf``
        does not know its type.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        except (ValueError, KeyError) as error:
            raise CheckpointError(
                f"{self.path} stores {tensor.name} as type {tensor.type}, which the package gguf {version('gguf')} "
                "does not know: update it, or take the file in another quantisation"
            ) from error
        return prod(tensor.shape) // block * size

    @property
    def end(self) -> int:
        """The bytes that the file must have."""
        return self.start + max((tensor.offset + self.bytes_of(tensor) for tensor in self.tensors), default=0)

    def check(self) -> None:
        """Raise CheckpointError unless this is a whole language model."""
        kind = self.metadata.get("general.type", "model")
        parts = self.metadata.get("split.count", 1)
        present = 1 + len(self.more)
        tensors = len(self.everything)
        announced = self.metadata.get("split.tensors.count", tensors)
        refuse(
            (
                kind == "mmproj" or self.architecture == "clip",
                f"{self.path} is the projector of a multimodal model (mmproj), no language model: name the model's own "
                "GGUF file",
            ),
            (
                kind != "model" or not self.architecture,
                f"{self.path} holds no language model but {kind!r}: name a model's GGUF file",
            ),
            (
                parts > 1 and (parts != present or self.metadata.get("split.no", 0) != 0),
                f"{self.path} is one of {parts} parts of a model, which are looked for beside it by their names: "
                f"call the first NAME-{1:05}-of-{parts:05}.gguf, and the others likewise",
            ),
            (
                present > 1 and announced != tensors,
                f"{self.path} and the parts beside it hold {tensors} tensors, {announced} are announced: they are not "
                "the parts of one model; download or copy them again",
            ),
            error=CheckpointError,
        )

    def check_generates(self) -> None:
        """Raise CheckpointError for a model that turns texts into vectors or scores."""
        pooled = self.stated("pooling_type", 0)
        if pooled or self.stated("attention.causal") is False:
            raise CheckpointError(
                f"{self.path} holds a {self.architecture} model for embeddings or scores, which generates no text: "
                "name a language model's GGUF file"
            )


class GgufReader:
    """Reads a header's numbers and strings in order; raises struct.error or ValueError if it ends
    too early.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.place = content, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        """Read the numbers that a format of `struct` describes."""
        found = struct.unpack_from(form, self.content, self.place)
        self.place += struct.calcsize(form)
        return found

    def skip(self, count: int) -> None:
        """Pass over so many bytes."""
        self.place += count
        if self.place > len(self.content):
            raise ValueError("a text reaches beyond the end")

    def string(self) -> str:
        """Read a text, behind its length."""
        [length] = self.numbers("<Q")
        start = self.place
        self.skip(length)
        return self.content[start : self.place].decode("utf-8")

    def value(self, kind: int) -> tuple[Any, bool]:
        """Return one entry's value, and whether it is the whole value (True) or only the length of
        a list (False).
        """
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0], True
        if kind == _STRING:
            return self.string(), True
        if kind != _LIST:
            raise ValueError(f"an entry has the unknown type {kind}")
        inner, count = self.numbers("<IQ")
        if inner in _SCALARS:
            if count <= _LONG:
                return list(self.numbers(f"<{count}{_SCALARS[inner][1]}")), True
            self.skip(count * struct.calcsize(_SCALARS[inner]))
        elif inner == _STRING:
            for _ in range(count):
                self.skip(self.numbers("<Q")[0])
        else:
            raise ValueError(f"a list has entries of the type {inner}")
        return count, False


def join_parts(headers: Sequence[GgufHeader]) -> GgufHeader:
    """Join the headers of a model in several parts. Raises CheckpointError unless they make a whole
    language model.
    """
    header = replace(headers[0], more=tuple(headers[1:]))
    header.check()
    return header


def read_model_header(path: Path) -> GgufHeader:
    """Return the header of the model that a file is, or is a part of. Raises CheckpointError if it is no whole language
    model.
    """
    headers = list[GgufHeader]()
    for part in find_parts(path.expanduser()):
        with readable(part):
            about = part.stat()
        headers.append(header_once(part.resolve(), about.st_size, about.st_mtime_ns))
    return join_parts(headers)


def file_of(folder: str | Path) -> GgufHeader | None:
    """Return the header of the file that a folder stands for (`gguf.folder_of`); None for any other folder."""
    named = Path(folder) / SOURCE
    return read_model_header(Path(named.read_text(encoding="utf-8"))) if named.is_file() else None


@cache
def header_once(path: Path, size: int, _time: int) -> GgufHeader:
    """Run `_read_header` once for each state of a file."""
    if size < 24:
        raise CheckpointError(f"{path} is no GGUF file: it has {size} bytes; download or copy it again")
    with readable(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = _read_header(path, GgufReader(content))
    if size < header.end:
        raise CheckpointError(
            f"{path} is cut short: {size} bytes, its header announces {header.end}; download or copy it again"
        )
    return header


def _read_header(path: Path, reader: GgufReader) -> GgufHeader:
    magic, of_format, tensors, entries = reader.numbers("<4sIQQ")
    if magic != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin as one; name a model's .gguf file")
    if of_format not in VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {of_format}; {' and '.join(map(str, VERSIONS))} are read, on little-endian "
            "machines: update forerun, or take the file in one of these"
        )
    metadata, short = dict[str, Any](), list[tuple[int, int]]()
    try:
        for _ in range(entries):
            start, key = reader.place, reader.string()
            metadata[key], all_of_it = reader.value(reader.numbers("<I")[0])
            if all_of_it:
                short.append((start, reader.place))
        start, table = reader.place, list[GgufTensor]()
        for _ in range(tensors):
            name, [dimensions] = reader.string(), reader.numbers("<I")
            shape = reader.numbers(f"<{dimensions}Q")
            table.append(GgufTensor(name, shape[::-1], *reader.numbers("<IQ")))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is cut short or corrupt: its header cannot be read to the end; download or copy it again"
        ) from error
    aligned = metadata.get("general.alignment", 32)
    return GgufHeader(
        path=path,
        metadata=metadata,
        short=tuple(short),
        tensors=tuple(table),
        table=(start, reader.place),
        start=-(-reader.place // aligned) * aligned,
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError while open."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
