"""GGUF files as models of transformers: what it reads of a file but its weights, kept in a small folder.

transformers reads such files, too, but through a reader that takes a minute for a large vocabulary and starts anew for
configuration, tokenizer and weights. Here the file's header is read once. transformers' own converters make of it
the configuration, the tokenizer and the chat template; `gguf_weights` reads the weights from the file at every start.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A model may be split into parts, files that are
called ``NAME-00001-of-00003.gguf``; the first holds the metadata.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from forerun.errors import CheckpointError, ForerunError, UnsupportedModelError, first_line
from forerun.model.checks import MAGIC
from forerun.model.gguf_files import PART, SOURCE, VERSIONS, GgufHeader, file_of, read_model_header
from forerun.model.gguf_weights import converters, read_values
from forerun.model.load import LoadOptions, open_model, quiet_transformers, read_config, save_model
from forerun.model.support import refuse_config
from forerun.writing import cache_root, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

CACHE = "gguf"  # Folder below `cache_root`
FORM = 3  # Version of the folders; another number makes all anew
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
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Scaling parameters of every published Llama 3; a file states only the frequencies that follow
from them.
"""


def folder_of(path: Path) -> Path:
    """Return a small folder with what transformers reads of a GGUF file but its weights: the tokenizer and, where it
    reads the architecture, the configuration. It is made where the cache folder has none.

    Raises CheckpointError: no GGUF file, cut short, no language model, a part is missing, or the tokenizer is missing
    or of a kind that is not read.
    """
    header = read_model_header(path)
    files = [part.path for part in (header, *header.more)]
    states = [(str(file), about.st_size, about.st_mtime_ns) for file in files for about in [file.stat()]]
    key = hashlib.sha256(str((FORM, version("transformers"), states)).encode()).hexdigest()[:12]
    stem = header.path.stem if len(files) == 1 else PART.sub(r"\g<name>", header.path.stem)
    name = re.sub(r"[^\w.-]", "_", stem) or CACHE
    folder = cache_root() / CACHE / f"{name}-{key}"
    if not folder.is_dir():
        _describe(header, folder)
    return folder


def checkpoint_of(path: Path) -> Path:
    """Return the folder of a file that transformers runs: with its configuration and its tokenizer, and without weights
    (`with_weights`). Raises, besides the errors of `folder_of`, UnsupportedModelError for an architecture that
    transformers does not read from GGUF files, or forerun not at all.
    """
    header = read_model_header(path)
    header.check_generates()
    folder = folder_of(path)
    if not (folder / "config.json").is_file():
        _config(header)  # Which says why there is none
    return folder


def with_weights(name: str | Path) -> str | Path:
    """Return the directory of a model (`names.resolve`) for what reads weights from checkpoints alone: into the folder
    of a GGUF file they are written, dequantised to the file's own dtype.
    """
    if file_of(name) is not None and not any(Path(name).glob("*.safetensors")):
        config = read_config(name, LoadOptions())
        model = open_model(name, LoadOptions(dtype=config.dtype, device="cpu"), config, quiet=True)
        with replace_folder(Path(name)) as fresh:
            shutil.copytree(name, fresh, dirs_exist_ok=True)
            save_model(model, None, fresh)
    return name


def _describe(header: GgufHeader, folder: Path) -> None:
    """Write the folder so that a reader never finds half of it."""
    converters()  # Which says what is wrong with a transformers that has none
    with quiet_transformers(quiet=True):
        tokenizer = _tokenizer(header)
        try:
            config = _config(header)
        except UnsupportedModelError as error:
            _log.debug("%s", error)
            config = None
    try:
        with replace_folder(folder) as fresh:
            tokenizer.save_pretrained(fresh)
            if config is not None:
                config.save_pretrained(fresh)
            (fresh / SOURCE).write_text(str(header.path), encoding="utf-8")
    except OSError as error:
        if not folder.is_dir():  # else another process was as busy and quicker
            raise CheckpointError(
                f"what describes {header.path} cannot be kept in {folder.parent}: {error.strerror or error}; "
                "FORERUN_CACHE names another folder"
            ) from error


def _settings(header: GgufHeader) -> dict[str, Any]:
    """Return the configuration's keys as transformers reads them. Raises UnsupportedModelError if
    it does not read such models.
    """
    legacy = converters()
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS, get_gguf_config

    if header.architecture in GGUF_CONFIG_ARCHS:
        names = tuple(tensor.name for tensor in header.everything)
        return cast(dict[str, Any], get_gguf_config(dict(header.metadata), names))
    with _twin(header) as twin:
        try:
            settings: dict[str, Any] = legacy.load_gguf_checkpoint(str(twin))["config"]
        except ValueError as error:
            read = ", ".join(sorted({*legacy.GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS}))
            raise UnsupportedModelError(
                f"{header.path} is of the architecture {header.architecture}, which transformers "
                f"{version('transformers')} does not read from GGUF files (only {read}): name a checkpoint of "
                "transformers instead"
            ) from error
    embedding = next((tensor for tensor in header.everything if tensor.name == "token_embd.weight"), None)
    if embedding is not None:
        settings["vocab_size"] = embedding.shape[0]
    settings.pop("_model_name_or_path", None)
    return _complete_settings(header, settings)


def _complete_settings(header: GgufHeader, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, completed with what else the file states and this kind of model knows."""
    from transformers import CONFIG_MAPPING

    def stated(key: str) -> Any:
        return header.metadata.get(f"{header.architecture}.{key}")

    defaults = CONFIG_MAPPING[settings["model_type"]]().to_dict()
    ropes = defaults.get("rope_parameters") or {}
    for key, name in _STATED.items():
        if stated(key) and (name in defaults or (name == "rope_theta" and name in ropes)):
            settings.setdefault(name, stated(key))
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
    ropes = getattr(config, "rope_parameters", None) or {}
    rope = ropes.get("full_attention", ropes)
    if rope.get("rope_type", "default") != "default":
        return  # transformers knows more of this architecture

    def stated(name: str) -> Any:
        return header.metadata.get(f"{header.architecture}.rope.scaling.{name}")

    kind = stated("type")
    tensors = {tensor.name: tensor for tensor in header.everything}
    scaling: dict[str, Any] | None = None
    if kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": stated("factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = stated("original_context_length")
    elif (stored := tensors.get(_ROPE_FACTORS)) is not None:
        scaling = _llama3_scaling(read_values(header, stored.name), rope["rope_theta"])
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
    most = float(factors.max())
    low, high, original = _LLAMA3.values()
    turns = original * theta ** -(np.arange(len(factors)) / len(factors)) / (2 * np.pi)  # Within that many positions
    share = np.clip((turns - low) / (high - low), 0, 1)
    fits = np.allclose(factors, 1 / ((1 - share) / most + share), rtol=1e-3)
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


def _config(header: GgufHeader) -> Any:
    """Return transformers' configuration of the file's model. Raises UnsupportedModelError where transformers does not
    read it from GGUF files, or forerun not at all.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.for_model(**_settings(header), dtype=header.dtype)
    except ForerunError:
        raise
    except Exception as error:
        raise CheckpointError(f"{header.path} cannot be converted: {first_line(error)}") from error
    _scale_rope(header, config)
    refuse_config(config)
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
