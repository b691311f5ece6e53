"""GGUF files as models: each is converted once into a transformers checkpoint in the cache folder.

transformers reads such files, too, but through a reader that takes a minute for a large vocabulary and starts anew for
configuration, tokenizer and weights. Here the file's header is read once. transformers' own converters make of it
the configuration, the names and layouts of the tensors, the tokenizer and the chat template; the package ``gguf``
dequantises. The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A model may be split into parts,
files that are called ``NAME-00001-of-00003.gguf``; the first holds the metadata.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import re
import shutil
import struct
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from forerun.errors import CheckpointError, ForerunError, UnsupportedModelError, refuse
from forerun.model.load import quiet_transformers, save_model
from forerun.model.support import refuse_config
from forerun.writing import cache_root, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

CACHE = "gguf"  # Folder below `cache_root`
MAGIC = b"GGUF"
FORM = 2  # Version of the kept checkpoints; another number converts everything anew
_VERSIONS = (2, 3)
_SAMPLE = 2**20  # Bytes of a file's beginning that tell it from others, with its size and time
_LONG = 1000  # Entries of a list of numbers that are a vocabulary's, and in no configuration

_PART = re.compile(r"(?P<name>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})")
"""Matches the stem of a file that is one part of a model, named as llama.cpp expects; the first
part has number 1.
"""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _LIST = 8, 9
"""Type numbers of metadata: for scalars their `struct` formats, then strings and lists."""

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
"""Tensor types that hold floating-point numbers as they are; any other is quantised."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS.values()}

_STATED = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
}
"""Keys of a file's metadata and their names in transformers' configuration. transformers'
converters leave out one or the other, and the model would silently be another one.
"""
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
"""Layer counts of the two published Gemmas whose queries are scaled by hidden size / heads instead
of the head size. No file states it; llama.cpp, too, goes by the number of layers.
"""
_ROPE_FACTORS = "rope_freqs.weight"  # Divisors of the frequencies; not a weight of the model
_NO_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
"""Matches tensors that a model computes itself."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling parameters of every published Llama 3; a file states only the frequencies that follow
from them.
"""


def is_gguf(path: Path) -> bool:
    """Return whether a file begins as GGUF files do, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def parts_of(path: Path) -> list[Path]:
    """Return the files of the model that `path` is, or is a part of, in their order, there or not."""
    found = _PART.fullmatch(path.stem)
    if found is None:
        return [path]
    count = int(found["parts"])
    return [path.with_name(f"{found['name']}-{part:05}-of-{count:05}{path.suffix}") for part in range(1, count + 1)]


def checkpoint_of(path: Path, dtype: str | None = "auto") -> Path:
    """Return the directory of a GGUF file's checkpoint, which is made where the cache folder has none.

    Args:
        dtype: of the weights that are kept, which are rounded to it once. ``"auto"`` is the file's own, bfloat16 for a
            quantised one; None takes whatever is kept, for those who ask for no weights.

    Raises:
        CheckpointError: no GGUF file, cut short, no language model, a part is missing, or there is no room.
        UnsupportedModelError: an architecture that transformers does not read from GGUF files, or forerun not at all.
    """
    parts = _find_parts(path.expanduser())
    seal = hashlib.sha256(f"{FORM} {version('transformers')} ".encode())
    states = list[tuple[Path, int, int]]()
    for part in parts:
        with _readable(part):
            file, about = part.resolve(), part.stat()
            seal.update(f"{about.st_size} {about.st_mtime_ns} ".encode())
            with file.open("rb") as content:
                seal.update(content.read(_SAMPLE))
        states.append((file, about.st_size, about.st_mtime_ns))
    key, stem = seal.hexdigest()[:12], states[0][0].stem
    name = re.sub(r"[^\w.-]", "_", stem if len(parts) == 1 else _PART.sub(r"\g<name>", stem)) or CACHE
    kept = [cache_root() / CACHE / f"{name}-{one}-{key}" for one in DTYPES]
    found = [folder for folder in kept if folder.is_dir()]
    if dtype is None and found:
        return found[0]
    header = _join_parts([_header_once(*state) for state in states])
    wanted = DTYPES.get(dtype or "auto", header.dtype)
    folder = kept[list(DTYPES.values()).index(wanted)]
    if not folder.is_dir():
        _convert(header, wanted, folder)
    return folder


def _find_parts(path: Path) -> list[Path]:
    """Return the files of the model that a file is, or is a part of. Raises CheckpointError if some
    are missing.
    """
    parts = parts_of(path)
    if absent := [part.name for part in parts if not part.is_file()]:
        more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
        raise CheckpointError(
            f"{path} is one of {len(parts)} parts of a model, and {', '.join(absent[:3])}{more} "
            f"{'are' if len(absent) > 1 else 'is'} not beside it: put all parts into one directory"
        )
    return parts


class _Stored(NamedTuple):
    """The place of a tensor in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # Shape in torch's order: the last dimension is contiguous
    type: int
    offset: int  # From the beginning of all tensors of its file, bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """Everything in a GGUF file but its tensors."""

    path: Path
    metadata: Mapping[str, Any]  # Metadata; of long lists, and lists of strings, only the number of entries
    short: tuple[tuple[int, int], ...]  # From where to where entries lie that are no such list
    tensors: tuple[_Stored, ...]
    table: tuple[int, int]  # From where to where the tensors' entries lie
    start: int  # Offset at which the tensors begin
    more: tuple[_Header, ...] = ()  # Headers of the parts behind this one

    @property
    def everything(self) -> list[_Stored]:
        """The tensors of all parts."""
        return [tensor for part in (self, *self.more) for tensor in part.tensors]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def dtype(self) -> torch.dtype:
        """The file's own floating type: the narrow one if norms are float32 between narrow weights,
        bfloat16 if anything is quantised.
        """
        types = {tensor.type for tensor in self.everything}
        if not types <= _FLOATS.keys() or 30 in types:
            return torch.bfloat16
        return torch.float16 if 1 in types else torch.float32

    def bytes_of(self, tensor: _Stored) -> int:
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
            error=CheckpointError,
        )
        parts, found = self.metadata.get("split.count", 1), 1 + len(self.more)
        if parts > 1 and (parts != found or self.metadata.get("split.no", 0) != 0):
            raise CheckpointError(
                f"{self.path} is one of {parts} parts of a model, which are looked for beside it by their names: "
                f"call the first NAME-{1:05}-of-{parts:05}.gguf, and the others likewise"
            )
        announced = self.metadata.get("split.tensors.count", len(self.everything))
        if found > 1 and announced != len(self.everything):
            raise CheckpointError(
                f"{self.path} and the parts beside it hold {len(self.everything)} tensors, {announced} are announced: "
                "they are not the parts of one model; download or copy them again"
            )


class _Reader:
    """Reads a header's numbers and strings in order; raises struct.error or ValueError if it ends
    too early.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.place = content, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.content, self.place)
        self.place += struct.calcsize(form)
        return found

    def skip(self, count: int) -> None:
        self.place += count
        if self.place > len(self.content):
            raise ValueError("a text reaches beyond the end")

    def string(self) -> str:
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


def _join_parts(headers: Sequence[_Header]) -> _Header:
    """Join the headers of a model in several parts. Raises CheckpointError unless they make a whole
    language model.
    """
    header = replace(headers[0], more=tuple(headers[1:]))
    header.check()
    return header


@cache
def _header_once(path: Path, size: int, _time: int) -> _Header:
    """Run `_read_header` once for each state of a file."""
    if size < 24:
        raise CheckpointError(f"{path} is no GGUF file: it has {size} bytes; download or copy it again")
    with _readable(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        header = _read_header(path, _Reader(content))
    if size < header.end:
        raise CheckpointError(
            f"{path} is cut short: {size} bytes, its header announces {header.end}; download or copy it again"
        )
    return header


def _read_header(path: Path, reader: _Reader) -> _Header:
    magic, of_format, tensors, entries = reader.numbers("<4sIQQ")
    if magic != MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it does not begin as one; name a model's .gguf file")
    if of_format not in _VERSIONS:
        raise CheckpointError(
            f"{path} has GGUF version {of_format}; {' and '.join(map(str, _VERSIONS))} are read, on little-endian "
            "machines"
        )
    metadata, short = dict[str, Any](), list[tuple[int, int]]()
    try:
        for _ in range(entries):
            start, key = reader.place, reader.string()
            metadata[key], all_of_it = reader.value(reader.numbers("<I")[0])
            if all_of_it:
                short.append((start, reader.place))
        start, table = reader.place, list[_Stored]()
        for _ in range(tensors):
            name, [dimensions] = reader.string(), reader.numbers("<I")
            shape = reader.numbers(f"<{dimensions}Q")
            table.append(_Stored(name, shape[::-1], *reader.numbers("<IQ")))
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is cut short or corrupt: its header cannot be read to the end ({error}); download or copy it again"
        ) from error
    aligned = metadata.get("general.alignment", 32)
    return _Header(
        path=path,
        metadata=metadata,
        short=tuple(short),
        tensors=tuple(table),
        table=(start, reader.place),
        start=-(-reader.place // aligned) * aligned,
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a CheckpointError while open."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _convert(header: _Header, dtype: torch.dtype, folder: Path) -> None:
    """Write the checkpoint so that a reader never finds half of it."""
    model = tokenizer = None
    try:
        with quiet_transformers(quiet=True):
            settings = _settings(header)
            config = _config(header, settings)
            refuse_config(config)
            _check_room(header, dtype, folder)
            tokenizer = _tokenizer(header)
            model = _model(header, settings, config, dtype)
    except (ForerunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{header.path} cannot be converted: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    try:
        with replace_folder(folder) as fresh:
            save_model(model, tokenizer, fresh)
    except OSError as error:
        if not folder.is_dir():  # else another process was as busy and quicker
            raise CheckpointError(
                f"{header.path} cannot be kept in {folder.parent}: {error.strerror or error}; FORERUN_CACHE names "
                "another folder"
            ) from error
    size = sum(file.stat().st_size for file in folder.iterdir())
    _log.warning(
        "%s was converted to %s, %.2f GB that are kept in %s; remove the folder to have it made anew",
        header.path.name,
        str(dtype).removeprefix("torch."),
        size / 1e9,
        folder,
    )


def _check_room(header: _Header, dtype: torch.dtype, folder: Path) -> None:
    """Raise CheckpointError if the disk has no room for the converted checkpoint."""
    needed = sum(prod(tensor.shape) for tensor in header.everything) * dtype.itemsize
    parent = next(one for one in folder.parents if one.is_dir())
    if (free := shutil.disk_usage(parent).free) < needed:
        raise CheckpointError(
            f"{header.path} takes {needed / 1e9:.1f} GB as a checkpoint in {str(dtype).removeprefix('torch.')}, and "
            f"{parent} has {free / 1e9:.1f} GB left; FORERUN_CACHE names another folder"
        )


def _legacy() -> Any:
    """Return transformers' module of GGUF converters. Raises UnsupportedModelError if this version
    has others.
    """
    try:
        from transformers import modeling_gguf_pytorch_utils
        from transformers.integrations.gguf import GGUF_CONFIG_ARCHS  # noqa: F401
    except ImportError as error:
        raise UnsupportedModelError(
            f"GGUF files need transformers 5.24 or later, and this is {version('transformers')}: update it, or name a "
            "checkpoint of transformers"
        ) from error
    return modeling_gguf_pytorch_utils


def _settings(header: _Header) -> dict[str, Any]:
    """Return the configuration's keys as transformers reads them. Raises UnsupportedModelError if
    it does not read such models.
    """
    legacy = _legacy()
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

    if header.architecture in GGUF_CONFIG_ARCHS:
        names = tuple(tensor.name for tensor in header.everything)
        return cast(dict[str, Any], get_gguf_config(dict(header.metadata), names))
    with _twin(header) as twin:
        try:
            settings: dict[str, Any] = legacy.load_gguf_checkpoint(str(twin))["config"]
        except ValueError as error:
            known = ", ".join(sorted({*legacy.GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}))
            raise UnsupportedModelError(
                f"{header.path} is of the architecture {header.architecture}, which transformers "
                f"{version('transformers')} does not read from GGUF files (only {known}): name a checkpoint of "
                "transformers instead"
            ) from error
    embedding = next((one for one in header.everything if one.name == "token_embd.weight"), None)
    if embedding is not None:
        settings["vocab_size"] = embedding.shape[0]
    settings.pop("_model_name_or_path", None)
    return _complete_settings(header, settings)


def _complete_settings(header: _Header, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, completed with what else the file states and this kind of model knows."""
    from transformers import CONFIG_MAPPING

    def stated(key: str) -> Any:
        return header.metadata.get(f"{header.architecture}.{key}")

    known = CONFIG_MAPPING[settings["model_type"]]().to_dict()
    ropes = known.get("rope_parameters") or {}
    for key, own in _STATED.items():
        if stated(key) and (own in known or (own == "rope_theta" and own in ropes)):
            settings.setdefault(own, stated(key))
    if "global_head_dim" in settings:
        settings.pop("head_dim", None)  # Gemma 4 has heads of two sizes, of which a file says the larger
    wide = settings.get("hidden_size", 0) // settings.get("num_attention_heads", 1)
    head = settings.get("head_dim", wide)
    if "partial_rotary_factor" in ropes and stated("rope.dimension_count"):
        settings["partial_rotary_factor"] = stated("rope.dimension_count") / head
    if (layers := _SCALED_BY_WIDTH.get(header.architecture)) is not None:
        settings["query_pre_attn_scalar"] = wide if settings["num_hidden_layers"] == layers else head
    return settings


def _scale_rope(header: _Header, config: Any) -> None:
    """Set the rope scaling that the file states and transformers' converters leave out; without it
    the model would be another one. Raises UnsupportedModelError if the configuration has no key for
    it.
    """
    found = getattr(config, "rope_parameters", None) or {}
    rope = found.get("full_attention", found)
    if rope.get("rope_type", "default") != "default":
        return  # transformers knows more of this architecture

    def stated(name: str) -> Any:
        return header.metadata.get(f"{header.architecture}.rope.scaling.{name}")

    kind, tensors = stated("type"), {tensor.name: tensor for tensor in header.everything}
    scaling: dict[str, Any] | None = None
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": stated("factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = stated("original_context_length")
    elif (stored := tensors.get(_ROPE_FACTORS)) is not None:
        [(_, factors)] = _dequantise(header, {stored.name})
        scaling = _llama3_scaling(factors, rope["rope_theta"])
    elif kind in (None, "none") and not any(name.startswith("rope_factors") for name in tensors):
        scaling = {}
    if scaling is None:
        raise UnsupportedModelError(
            f"{header.path} scales its rope in a way that is not read from GGUF files (type {kind}, factors of its "
            "own): name a checkpoint of transformers instead"
        )
    rope.update(scaling)


def _llama3_scaling(factors: np.ndarray[Any, Any], theta: float) -> dict[str, Any] | None:
    """Return the Llama 3 scaling that these factors (D / 2,) come from, or None if they come from
    none.
    """
    most, (low, high, original) = float(factors.max()), _LLAMA3.values()
    turns = original * theta ** -(np.arange(len(factors)) / len(factors)) / (2 * np.pi)  # Within that many positions
    kept = np.clip((turns - low) / (high - low), 0, 1)
    fits = np.allclose(factors, 1 / ((1 - kept) / most + kept), rtol=1e-3)
    return {"rope_type": "llama3", "factor": round(most, 4), **_LLAMA3} if fits else None


@contextmanager
def _twin(header: _Header) -> Iterator[Path]:
    """Yield a small copy of the file: the header without the vocabulary, and a hole for the
    tensors. transformers' reader finds the configuration there in 50 ms; in the whole file it takes
    seconds to pass a hundred thousand tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "header.gguf"
        parts = (header, *header.more)
        with twin.open("wb") as out:
            out.write(struct.pack("<4sIQQ", MAGIC, _VERSIONS[-1], len(header.everything), len(header.short)))
            for part in parts:
                with part.path.open("rb") as file:
                    for start, end in (*(header.short if part is header else ()), part.table):
                        file.seek(start)
                        out.write(file.read(end - start))
            aligned = header.metadata.get("general.alignment", 32)
            out.truncate(-(-out.tell() // aligned) * aligned + max(part.end - part.start for part in parts))
        yield twin


def _config(header: _Header, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings)
    _scale_rope(header, config)
    return config


def _tokenizer(header: _Header) -> PreTrainedTokenizerBase:
    """Return the tokenizer with its chat template. Raises CheckpointError if the file holds none,
    or one of a kind that is not read.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if "tokenizer.ggml.tokens" not in header.metadata:
        raise CheckpointError(f"{header.path} holds no tokenizer: take a GGUF file that has one")
    try:
        architecture, vocabulary, settings = get_gguf_tokenizer(str(header.path))
        backend, more = convert_gguf_tokenizer(architecture, vocabulary)
    except Exception as error:
        kind = header.metadata.get("tokenizer.ggml.model")
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the tokenizer of {header.path} ({kind}) cannot be converted: {said}") from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


class _Names:
    """Parameter names of a model, in the form that `get_gguf_hf_weights_map` asks for. It would
    otherwise ask every submodule for its names, which takes seconds; files only use those of the
    model and its base model.
    """

    def __init__(self, config: Any, names: list[str], inner: Mapping[str, _Names]) -> None:
        self.config, self._names, self._inner = config, names, inner

    def state_dict(self) -> list[str]:
        return self._names

    def named_children(self) -> list[tuple[str, _Names]]:
        return list(self._inner.items())

    @classmethod
    def of(cls, model: Any) -> _Names:
        names, prefix = list(model.state_dict()), model.base_model_prefix
        inside = [name.removeprefix(f"{prefix}.") for name in names if name.startswith(f"{prefix}.")]
        return cls(model.config, names, {prefix: cls(model.config, inside, {})} if inside else {})


def _model(header: _Header, settings: dict[str, Any], config: Any, dtype: torch.dtype) -> Any:
    """Return the model with the file's weights. Raises CheckpointError if some are missing or
    misshapen.
    """
    from transformers import AutoModelForCausalLM

    legacy = _legacy()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    processor = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)(config=settings)
    names = legacy.get_gguf_hf_weights_map(_Names.of(model), processor)
    read, unplaced = dict[str, Any](tensors={}), list[str]()
    for name, weights in _dequantise(header):
        made = processor.process(weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=read)
        if made.name in names:
            read["tensors"][names[made.name]] = torch.from_numpy(np.array(made.weights)).to(dtype)
        elif made.name is not None and not _NO_WEIGHTS.fullmatch(name):  # None: the converter has put it in its place
            unplaced.append(name)
    if unplaced:
        raise UnsupportedModelError(
            f"{header.path} holds tensors for which a {config.model_type} model of transformers has no place: "
            f"{_some(unplaced)}. Without them it would be another model: name a checkpoint of transformers instead"
        )
    tensors = {name: tensor.to(dtype) for name, tensor in read["tensors"].items()}
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{header.path} holds tensors of other shapes than it announces: {str(error).splitlines()[-1].strip()}"
        ) from error
    model.tie_weights()
    if lacking := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise CheckpointError(f"{header.path} lacks tensors that a {config.model_type} model has: {_some(lacking)}")
    model.generation_config.eos_token_id = _ends(header) or model.generation_config.eos_token_id
    return model


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _ends(header: _Header) -> list[int]:
    """Return the token ids that end an answer: end of text, of turn, of message."""
    found = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({token for token in found if token is not None})


def _dequantise(header: _Header, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the names and float32 values of the tensors with these names, or of all (None), one by
    one.
    """
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape

    for part in (header, *header.more):
        with part.path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        for tensor in part.tensors:
            if names is not None and tensor.name not in names:
                continue
            start, kind = part.start + tensor.offset, GGMLQuantizationType(tensor.type)
            stored = content[start : start + part.bytes_of(tensor)]
            yield tensor.name, dequantize(stored.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind)
