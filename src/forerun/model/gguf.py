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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from forerun.errors import CheckpointError, ForerunError, UnsupportedModelError, first_line, list_some
from forerun.model.gguf_files import (
    DTYPES,
    MAGIC,
    PART,
    VERSIONS,
    GgufHeader,
    GgufTensor,
    find_parts,
    read_model_header,
    readable,
)
from forerun.model.load import quiet_transformers, save_model
from forerun.model.support import refuse_config
from forerun.writing import cache_root, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

CACHE = "gguf"  # Folder below `cache_root`
FORM = 2  # Version of the kept checkpoints; another number converts everything anew
_SAMPLE = 2**20  # Bytes of a file's beginning that tell it from others, with its size and time
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

_MADE_OF: dict[Path, GgufHeader] = {}
"""The files whose checkpoints this process has asked for, by the checkpoint's folder."""


def checkpoint_of(path: Path, dtype: str | None = "auto") -> Path:
    """Return the directory of a GGUF file's checkpoint, which is made where the cache folder has none.

    Args:
        dtype: of the weights that are kept, which are rounded to it once. ``"auto"`` is the file's own, bfloat16 for a
            quantised one; None takes whatever is kept, for those who ask for no weights.

    Raises:
        CheckpointError: no GGUF file, cut short, no language model, a part is missing, or there is no room.
        UnsupportedModelError: an architecture that transformers does not read from GGUF files, or forerun not at all.
    """
    kept = _kept(path)
    found = [folder for folder in kept if folder.is_dir()]
    if dtype is None and found:
        return found[0]
    header = read_model_header(path)
    header.check_generates()
    wanted = DTYPES.get(dtype or "auto", header.dtype)
    folder = kept[list(DTYPES.values()).index(wanted)]
    if not folder.is_dir():
        _convert(header, wanted, folder)
    _MADE_OF[folder] = header
    return folder


def can_convert(path: Path) -> bool:
    """Return whether a file's checkpoint is kept, or can be made: transformers reads the architecture, and the
    checkpoint takes a quarter of the disk's free room at most.
    """
    kept = _kept(path)
    if any(folder.is_dir() for folder in kept):
        return True
    header = read_model_header(path)
    try:
        with quiet_transformers(quiet=True):
            refuse_config(_config(header, _settings(header)))
        _check_room(header, header.dtype, kept[0], times=4)
    except (CheckpointError, UnsupportedModelError):
        return False
    return True


def tokenizer_of(path: Path) -> Path:
    """Return a directory with a GGUF file's tokenizer: its checkpoint, if one is kept, else one that is made for the
    tokenizer alone. Raises CheckpointError as `checkpoint_of` does, or if the tokenizer is missing or of a kind that is
    not read.
    """
    kept = _kept(path)
    alone = kept[0].with_name(kept[0].name.replace(next(iter(DTYPES)), "tokenizer"))
    for folder in (*kept, alone):
        if folder.is_dir():
            return folder
    with quiet_transformers(quiet=True):
        tokenizer = _tokenizer(read_model_header(path))
    with replace_folder(alone) as fresh:
        tokenizer.save_pretrained(fresh)
    return alone


def _kept(path: Path) -> list[Path]:
    """Return the folders where a model's checkpoints are kept, one for each of `DTYPES`, there or not."""
    parts = find_parts(path.expanduser())
    seal = hashlib.sha256(f"{FORM} {version('transformers')} ".encode())
    for part in parts:
        with readable(part), part.open("rb") as content:
            about = part.stat()
            seal.update(f"{about.st_size} {about.st_mtime_ns} ".encode())
            seal.update(content.read(_SAMPLE))
    key, stem = seal.hexdigest()[:12], parts[0].resolve().stem
    name = re.sub(r"[^\w.-]", "_", stem if len(parts) == 1 else PART.sub(r"\g<name>", stem)) or CACHE
    return [cache_root() / CACHE / f"{name}-{one}-{key}" for one in DTYPES]


def file_of(folder: Path) -> GgufHeader | None:
    """Return the file that a checkpoint was made of, if this process has asked for it by that file's name."""
    return _MADE_OF.get(folder)


def _convert(header: GgufHeader, dtype: torch.dtype, folder: Path) -> None:
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
        raise CheckpointError(f"{header.path} cannot be converted: {first_line(error)}") from error
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


def _check_room(header: GgufHeader, dtype: torch.dtype, folder: Path, times: int = 1) -> None:
    """Raise CheckpointError if the disk has no room for the converted checkpoint, or for so many of it."""
    needed = sum(prod(tensor.shape) for tensor in header.everything) * dtype.itemsize
    parent = next(one for one in folder.parents if one.is_dir())
    if (free := shutil.disk_usage(parent).free) < times * needed:
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


def _settings(header: GgufHeader) -> dict[str, Any]:
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


def _complete_settings(header: GgufHeader, settings: dict[str, Any]) -> dict[str, Any]:
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


def _scale_rope(header: GgufHeader, config: Any) -> None:
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
def _twin(header: GgufHeader) -> Iterator[Path]:
    """Yield a small copy of the file: the header without the vocabulary, and a hole for the
    tensors. transformers' reader finds the configuration there in 50 ms; in the whole file it takes
    seconds to pass a hundred thousand tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder) / "header.gguf"
        parts = (header, *header.more)
        with twin.open("wb") as out:
            out.write(struct.pack("<4sIQQ", MAGIC, VERSIONS[-1], len(header.everything), len(header.short)))
            for part in parts:
                with part.path.open("rb") as file:
                    for start, end in (*(header.short if part is header else ()), part.table):
                        file.seek(start)
                        out.write(file.read(end - start))
            aligned = header.metadata.get("general.alignment", 32)
            out.truncate(-(-out.tell() // aligned) * aligned + max(part.end - part.start for part in parts))
        yield twin


def _config(header: GgufHeader, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**settings)
    _scale_rope(header, config)
    return config


def _tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase:
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
        raise CheckpointError(
            f"the tokenizer of {header.path} ({kind}) cannot be converted: {first_line(error)}; in Python, "
            "tokenizer=DIRECTORY takes that of the model which the file was made from"
        ) from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings, **more)


def find_not_finite(header: GgufHeader) -> str | None:
    """Return the name of a tensor with a number that is NaN or infinite."""
    return next((name for name, values in _dequantise(header) if not np.isfinite(values).all()), None)


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


def converter_of(header: GgufHeader, settings: Mapping[str, Any], model: Any) -> tuple[Any, dict[str, str]]:
    """Return what brings the file's tensors into the form of a model's parameters, and their names there by those in
    the file.
    """
    legacy = _legacy()
    processor = legacy.TENSOR_PROCESSORS.get(header.architecture, legacy.TensorProcessor)(config=settings)
    return processor, legacy.get_gguf_hf_weights_map(_Names.of(model), processor)


def _model(header: GgufHeader, settings: dict[str, Any], config: Any, dtype: torch.dtype) -> Any:
    """Return the model with the file's weights. Raises CheckpointError if some are missing or
    misshapen.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    processor, names = converter_of(header, settings, model)
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
            f"{list_some(unplaced, 4)}. Without them it would be another model: name a checkpoint of transformers "
            "instead"
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
        raise CheckpointError(
            f"{header.path} lacks tensors that a {config.model_type} model has: {list_some(lacking, 4)}"
        )
    model.generation_config.eos_token_id = header.ends or model.generation_config.eos_token_id
    return model


def _dequantise(header: GgufHeader, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield the names and float32 values of the tensors with these names, or of all (None), one by
    one.
    """
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape

    for tensor, stored in read_tensors(header):
        if names is None or tensor.name in names:
            kind = GGMLQuantizationType(tensor.type)
            yield tensor.name, dequantize(stored.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind)


def read_tensors(header: GgufHeader) -> Iterator[tuple[GgufTensor, np.ndarray[Any, Any]]]:
    """Yield all tensors with their bytes in the mapped files."""
    for part in (header, *header.more):
        with part.path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        for tensor in part.tensors:
            start = part.start + tensor.offset
            yield tensor, content[start : start + part.bytes_of(tensor)]
