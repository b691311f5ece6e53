"""Opens a checkpoint as a transformers causal LM, and refuses what is missing, broken or does not
fit.

transformers itself only warns about missing, unexpected and misshapen tensors and then runs with random weights. The
headers of safetensors files tell whether they are whole, and their size, before a tensor is loaded.
"""

from __future__ import annotations

import copy
import logging
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.devices import multiplies
from forerun.errors import ArgumentError, CheckpointError, ForerunError, UnsupportedModelError, list_some
from forerun.model import quantised_weights
from forerun.model.checks import ADAPTER, DEVICES, DTYPES, check_directory, explain_load_error
from forerun.model.gguf_files import GgufHeader, file_of
from forerun.model.gguf_weights import GgufWeights, memory_bytes, put_blocks, read_weights
from forerun.model.kernels.products import decodes
from forerun.model.quantised_weights import QuantisedWeights
from forerun.model.support import auto_class, refuse_config
from forerun.writing import parse_json

_log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def read_header(path: Path) -> Mapping[str, Any]:
    """Return tensor name -> dtype, shape and offsets. Raises CheckpointError if the file is
    truncated or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{path} is truncated or no safetensors file: its header exceeds its {size} bytes")
        try:
            header: dict[str, Any] = parse_json(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} is corrupt: its safetensors header cannot be read ({error})") from error
    if size != (announced := 8 + length + end):
        raise CheckpointError(f"{path} is corrupt: {size} bytes, its header announces {announced}; copy it again")
    return header


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights. Raises CheckpointError if there are none,
    or the index is broken.
    """
    if (directory / INDEX).is_file():
        files = listed_files(directory)
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise CheckpointError(f"{directory} is incomplete: {INDEX} names {', '.join(absent)}, which are not there")
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    inside = ", ".join(sorted(path.name for path in directory.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{directory} holds no {SINGLE} or {INDEX} (found: {inside}). Only safetensors are loaded, never pickle; "
        "convert with model.save_pretrained(directory) of transformers."
    )


def weight_parts(directory: Path) -> list[tuple[Path, int]]:
    """Return the files that hold a checkpoint's weights, or a GGUF file's, and where in each its header ends. Raises as
    `weight_files` does.
    """
    header = file_of(directory)
    if header is not None:
        return [(part.path, part.start) for part in (header, *header.more)]
    parts = list[tuple[Path, int]]()
    for path in weight_files(directory):
        with path.open("rb") as file:
            parts.append((path, 8 + int.from_bytes(file.read(8), "little")))
    return parts


def listed_files(directory: Path) -> list[Path]:
    """Return the files that a sharded checkpoint names, whether they exist or not. Raises
    CheckpointError if the index is broken.
    """
    index = directory / INDEX
    try:
        return [directory / name for name in sorted(set(parse_json(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is corrupt: no weight_map can be read ({error})") from error


def weight_bytes(directory: Path, float_bytes: int | None) -> int:
    """Return the bytes of a checkpoint's tensors in memory, floats at `float_bytes` each (None: as
    stored).
    """
    total = 0
    for entry in (entry for path in weight_files(directory) for entry in read_header(path).values()):
        start, end = entry["data_offsets"]
        if float_bytes is not None and entry["dtype"] in FLOATS:
            total += prod(entry["shape"]) * float_bytes
        else:
            total += end - start
    return total


_ONE_LOADS = threading.Lock()
"""Allows one load at a time: while transformers loads, torch's default dtype is the model's, for
all threads.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to open a checkpoint, named as in transformers' ``from_pretrained``, and what is done to
    the model afterwards.
    """

    dtype: Any = "auto"  # torch dtype or its name; "auto": see `resolved_dtype`
    device: Any = None  # None: the accelerator that torch finds (CUDA, XPU, MPS, ...), else the CPU
    device_map: Any = None  # Placement of each module (several GPUs, CPU or disk offload); excludes `device`
    tp_plan: Any = None  # "auto" under torchrun: tensor parallel
    adapter: str | Path | None = None  # Directory or hub id of a PEFT adapter
    revision: str | None = None
    trust_remote_code: bool = False
    token: str | bool | None = None  # Hugging Face token; None: ``HF_TOKEN`` or the one that is stored
    tokenizer: Any = None  # A function that gives the model's tokenizer, for the self-check; None: what lies beside it
    self_check: bool = True  # Compare small trees with plain forwards first, which may shorten the context
    repack: bool | None = None  # Make the modules faster in place (`accelerate`); None: only those loaded here

    @property
    def hub(self) -> dict[str, Any]:
        return {"revision": self.revision, "token": self.token, "trust_remote_code": self.trust_remote_code}

    def first_device(self) -> torch.device:
        """Return the device the model goes to if no map says otherwise. Raises ArgumentError if
        there is no such device.
        """
        if self.device is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, 0)
        return find_device(self.device)


def find_device(name: Any) -> torch.device:
    """Return the device of that name. Raises ArgumentError if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"{name!r} is no device; expected {DEVICES}") from error
    if device.type != "cpu" and (device.index or 0) >= (found := _count_devices(device)):
        raise ArgumentError(
            f"there is no device {device}: torch {torch.__version__} finds {found} of type {device.type}; "
            "leave device out to take what there is, or install a torch that is built for it"
        )
    return device


def _count_devices(device: torch.device) -> int:
    try:
        return int(torch.get_device_module(device).device_count())
    except (AttributeError, RuntimeError):  # This torch knows nothing of them
        return 0


def read_config(name: str | Path, options: LoadOptions) -> Any:
    """Return the configuration of a directory or hub id. Raises CheckpointError if it, or the
    generation defaults beside it, is missing, corrupt or gated, or there is no such adapter; UnsupportedModelError if
    it is of a kind that forerun does not verify.
    """
    from transformers import AutoConfig, GenerationConfig

    hub: dict[str, Any] = {"revision": options.revision, "token": options.token}
    check_directory(name, **hub)
    if options.adapter is not None:
        check_directory(options.adapter, file=ADAPTER, **hub)
    try:
        directory = _local(name, options)
        config = AutoConfig.from_pretrained(name, **options.hub)
        if directory is not None and (directory / "generation_config.json").is_file():
            # It is read again when the model is loaded, but there transformers takes a broken file for a missing one.
            GenerationConfig.from_pretrained(directory)
    except Exception as error:
        raise explain_load_error(name, error) from error
    refuse_config(config)
    return config


@contextmanager
def quiet_transformers(quiet: bool) -> Iterator[None]:
    """Limit transformers' log to errors while open, and hide its progress bars if `quiet`. Its
    warnings are raised as errors here instead.
    """
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if quiet:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def open_model(
    name: str | Path, options: LoadOptions, config: Any, *, quiet: bool = False, in_blocks: bool = False
) -> Any:
    """Load the model with its adapter, in evaluation mode. Raises CheckpointError if it is
    unreadable, or its tensors are not those that it names.

    `in_blocks`: pack the linear layers of a GGUF file as they stand in it (`gguf_weights`).
    """
    own_dtype = getattr(config, "dtype", None)
    dtype = resolved_dtype(options, config)
    if options.dtype in ("auto", None) and dtype is not None and dtype is not getattr(torch, str(own_dtype), own_dtype):
        _log.info("in %s: on this processor products in %s, the model's own dtype, are slower", dtype, own_dtype)
    placed = options.device_map
    parallel = dict[str, Any]()
    if options.tp_plan is not None:
        from transformers.distributed import DistributedConfig

        parallel["distributed_config"] = DistributedConfig(tp_plan=options.tp_plan)
    elif placed is None:
        placed = {"": str(options.first_device())}
    file = file_of(name)
    dequantised = _dequantises(options, config)
    if dequantised:
        dtype = dtype or torch.bfloat16
        quantised_weights.tell(name, config, options.first_device(), dtype)
    try:
        with _ONE_LOADS, quiet_transformers(quiet):
            family, plain, weights = _read(name, file, options, config, dtype, in_blocks=in_blocks)
            if weights is not None:
                parallel["state_dict"] = weights.tensors
            model, info = family.from_pretrained(
                name if weights is None else None,
                config=plain,
                dtype=dtype or "auto",
                device_map=placed,
                **parallel,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options.hub,
            )
    except ForerunError:
        raise
    except Exception as error:
        raise explain_load_error(name, error) from error
    text = config.get_text_config(decoder=True)
    unexpected = [key for key in info["unexpected_keys"] if not _of_mtp(text, key)]
    source, described = (name, "its config.json") if file is None else (file.path, "its metadata")
    _check_tensors(source, described, {**info, "unexpected_keys": unexpected})
    if weights is not None:
        model.name_or_path = model.config.name_or_path = str(name)
        if file is None:
            model.generation_config = _generation_config(name, options) or model.generation_config
        else:
            model.generation_config.eos_token_id = file.ends or model.generation_config.eos_token_id
        put_blocks(model, weights.tensors, weights.stored)
    return (attach_adapter(model, options) if options.adapter is not None else model).eval()


def _read(
    name: str | Path,
    file: GgufHeader | None,
    options: LoadOptions,
    config: Any,
    dtype: torch.dtype | None,
    *,
    in_blocks: bool,
) -> tuple[Any, Any, GgufWeights | QuantisedWeights | None]:
    """Return the class of transformers that opens a checkpoint, the configuration for it, and the weights, where it
    does not read these itself: a GGUF file's, and those of 8 or 4 bits that are read here.
    """
    family = auto_class(config)
    if file is not None:
        weights = read_weights(file, config, dtype or torch.float32, in_blocks=in_blocks)
        return weights.family, config, weights
    if not _dequantises(options, config):
        return family, config, None
    files = weight_files(_fetch(name, options))
    ours = quantised_weights.reads(config, chain.from_iterable(map(read_header, files)))
    plain = quantised_weights.plain_config(config, ours=ours)
    if not ours:
        return family, plain, None
    family = family._model_mapping[type(config)]
    linear = _linear_weights(family, plain) if in_blocks else ()
    return family, plain, quantised_weights.read_weights(files, config, dtype or torch.bfloat16, linear)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a causal LM, and the tokenizer if there is one, into an existing folder as transformers
    does. No progress bar is shown: the caller reports progress, and a server has no terminal.
    """
    with _ONE_LOADS, quiet_transformers(quiet=True):
        model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # safetensors writes files that only their owner may read


def stored_bytes(name: str | Path, options: LoadOptions, config: Any, *, in_blocks: bool = False) -> int:
    """Return the bytes of the weights, by their files' headers, else by the configuration. Raises
    CheckpointError if a file is broken.
    """
    resolved = resolved_dtype(options, config)
    quantised, dequantised = quantised_weights.method_of(config) is not None, _dequantises(options, config)
    directory = _local(name, options)
    file = None if directory is None else file_of(directory)
    if file is not None:
        return memory_bytes(file, (resolved or torch.float32).itemsize, in_blocks=in_blocks)
    if directory is not None and dequantised:
        headers = [read_header(path) for path in weight_files(directory)]
        itemsize = (resolved or torch.bfloat16).itemsize
        return quantised_weights.memory_bytes(headers, config, itemsize, in_blocks=in_blocks)
    if directory is not None:
        return weight_bytes(directory, None if resolved is None or quantised else resolved.itemsize)
    with _ONE_LOADS, torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), trust_remote_code=options.trust_remote_code)
    stays_quantised = quantised and not dequantised
    return int(model.num_parameters()) * (1 if stays_quantised else (resolved or torch.float32).itemsize)


def _dequantises(options: LoadOptions, config: Any) -> bool:
    """Return whether the weights of a checkpoint in 8 or 4 bits are loaded as plain ones."""
    known = type(config) in auto_class(config)._model_mapping
    return known and quantised_weights.dequantises(config, options.first_device())


def keeps_blocks(options: LoadOptions, config: Any) -> bool:
    """Return whether integers of 4 and 8 bits may stay so, in a GGUF file's blocks."""
    return _dequantises(options, config) and quantised_weights.method_of(config) in quantised_weights.KEPT


def _linear_weights(family: Any, config: Any) -> set[str]:
    """Return the names of the weights of linear layers."""
    with torch.device("meta"):
        model = family(copy.deepcopy(config))
    return {f"{name}.weight" for name, module in model.named_modules() if type(module) is nn.Linear}


def _fetch(name: str | Path, options: LoadOptions) -> Path:
    """Return the local directory of a checkpoint, downloaded if need be."""
    from huggingface_hub import snapshot_download

    local = _local(name, options)
    patterns = ["*.safetensors", "*.json"]
    if local is not None:
        return local
    return Path(snapshot_download(str(name), revision=options.revision, token=options.token, allow_patterns=patterns))


def _generation_config(name: str | Path, options: LoadOptions) -> Any:
    """Return the generation defaults beside a checkpoint, None where there are none."""
    from transformers import GenerationConfig

    directory = _fetch(name, options)
    there = (directory / "generation_config.json").is_file()
    return GenerationConfig.from_pretrained(directory) if there else None


def _local(name: str | Path, options: LoadOptions) -> Path | None:
    """Return the local directory of a checkpoint, also of a hub id whose weights were downloaded
    before; None if there is none.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache

    for file in (INDEX, SINGLE):
        file_path = try_to_load_from_cache(str(name), file, revision=options.revision)
        if isinstance(file_path, str):
            directory = Path(file_path).parent
            complete = file == SINGLE or all(shard.is_file() for shard in listed_files(directory))
            return directory if complete else None
    return None


def resolved_dtype(options: LoadOptions, config: Any) -> torch.dtype | None:
    """Return the floating type that the weights will have, or None if neither the caller nor the
    configuration says. "auto" is the checkpoint's own type, but float32 on a CPU whose products are
    slower in it, as they are where it is emulated: products of decoding where modules are repacked,
    else those of training.
    """
    auto = options.dtype in ("auto", None)
    dtype = getattr(config, "dtype", None) if auto else options.dtype
    named = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if named is not None and not isinstance(named, torch.dtype):
        raise ArgumentError(f"{dtype!r} is no dtype; expected {DTYPES}")
    placed = options.device_map is not None or options.tp_plan is not None
    quantised = quantised_weights.method_of(config) is not None
    if named is None or not auto or placed or (quantised and not _dequantises(options, config)):
        return named
    if quantised and named is torch.float16:
        named = torch.bfloat16  # Of which a CPU has products, and weights of few bits lose nothing
    fast = multiplies if options.repack is False else decodes
    return named if fast(options.first_device(), named) else torch.float32


def attach_adapter(model: Any, options: LoadOptions) -> Any:
    """Return the model with a PEFT adapter's layers in place, not merged. Raises CheckpointError if it does not fit."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise CheckpointError("adapter= needs the package peft: pip install peft") from error
    name = str(options.adapter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            wrapped = PeftModel.from_pretrained(model, name, revision=options.revision, token=options.token)
        except Exception as error:
            raise CheckpointError(f"the adapter {name} cannot be attached to this model: {error}") from error
    lacking = [str(entry.message) for entry in caught if "missing adapter keys" in str(entry.message)]
    if lacking:
        raise CheckpointError(f"the adapter {name} does not fit this model: {lacking[0]}")
    return without_wrapper(wrapped)


def without_wrapper(model: Any) -> Any:
    """Return the causal LM inside a PEFT wrapper. Raises UnsupportedModelError if the adapter adds
    virtual tokens, or changes weights only from some token on.
    """
    if not hasattr(model, "active_peft_config"):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise UnsupportedModelError(
            f"the adapter ({config.peft_type.value}) adds virtual tokens; take one that changes weights"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            "the adapter (aLoRA) changes weights from its invocation tokens on; take one that changes them throughout"
        )
    return model.get_base_model()


def _check_tensors(name: str | Path, described: str, info: dict[str, Any]) -> None:
    misshapen = [
        f"{key} {tuple(shape)}, expected {tuple(expected)}" for key, shape, expected in info["mismatched_keys"] or ()
    ]
    wrong = {"missing": info["missing_keys"], "unexpected": info["unexpected_keys"], "of the wrong shape": misshapen}
    complaints = [f"{what}: {list_some(sorted(map(str, names)))}" for what, names in wrong.items() if names]
    complaints += map(str, info.get("error_msgs") or ())
    if complaints:
        raise CheckpointError(
            f"the tensors of {name} are not those of {described}. {'. '.join(complaints)}. The checkpoint is "
            f"incomplete, or {described} is another model's."
        )


def _of_mtp(config: Any, name: str) -> bool:
    """Return whether a tensor belongs to the MTP layers that a checkpoint may bring, and
    transformers does not load.
    """
    match = re.match(r"(?:model\.)?(?:language_model\.)?(?:(mtp(?:_layers)?)|layers\.(\d+))\.", name)
    if match is None or match[1]:
        return match is not None
    more = getattr(config, "num_nextn_predict_layers", None) or 0
    return bool(config.num_hidden_layers <= int(match[2]) < config.num_hidden_layers + more)
