"""Checkpoints whose weights are stored in 8 or 4 bits: which of them stay so, and the values of the others.

A library of its own multiplies each format, on a GPU. Where that is missing, and on a CPU, weights are dequantised when
they are loaded, and the model is a plain one then: checked, packed and drafted for as any other. transformers itself
dequantises MXFP4; this module does it for FP8 in blocks, GPTQ, AWQ and compressed-tensors. Integers of 4 and 8 bits
stay so on a CPU whose products take a GGUF file's blocks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from forerun.errors import UnsupportedModelError, warn_once
from forerun.model.kernels import blocks
from forerun.model.kernels.blocks import StoredRows

_log = logging.getLogger(__name__)

PACKAGES = {
    "fp8": ("kernels",),
    "mxfp4": ("kernels", "triton"),
    "compressed-tensors": ("compressed_tensors",),
    "awq": ("gptqmodel",),
    "gptq": ("gptqmodel", "optimum"),
}
"""Packages that transformers needs to multiply by the stored weights of each format, by its quantisation method."""
_MULTIPLY = ("cuda", "xpu")  # Types of devices that these packages have kernels for
_OTHER_FP8 = (".scale", ".qscale_weight")  # Ends of names of scales in FP8 whose weights may have 4 bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # Where in a word of AWQ its eight columns stand
_ACTIVATIONS = (".input_scale", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")
"""Ends of names of tensors that scale activations or a cache in 8 bits, which the plain model has not."""
_BITS = 32  # Of a word of packed weights
BLOCK = 32  # Weights of one of GGUF's blocks
_Q4_0, _Q4_1, _Q8_0 = 2, 3, 8  # GGUF's numbers for types of blocks
_IN_BLOCKS = {4: 20, 8: 34}  # Bytes of a block at most, by bits of a weight


def method_of(config: Any) -> str | None:
    """Return the name of the quantisation method that a configuration names, None where weights are plain."""
    found = _settings(config)
    return None if found is None else str(found.get("quant_method", "unknown"))


def dequantises(config: Any, device: torch.device) -> bool:
    """Return whether the weights are dequantised when they are loaded onto `device`."""
    method = method_of(config)
    return method in PACKAGES and (device.type not in _MULTIPLY or bool(_lacking(method)))


def tell(name: str | Path, config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Say that weights are dequantised: where a package is missing that would multiply by them, as a warning."""
    method = method_of(config)
    assert method is not None, "only what is quantised is dequantised"
    message = "%s: its weights (%s) are dequantised to %s"
    if device.type in _MULTIPLY:
        message += ", which takes more memory and time: there is no %s (pip install %s)"
        lacking = _lacking(method)
        names = " or ".join(lacking), " ".join(lacking).replace("_", "-")
        warn_once(_log, f"package for {method}", message, name, method, dtype, *names)
    else:
        _log.info(message, name, method, dtype)


def plain_config(config: Any, *, ours: bool) -> Any:
    """Return a copy of a configuration that transformers loads dequantised: one that asks for that, or names no
    quantisation where the weights that it is handed are `ours`.
    """
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        settings = getattr(part, "quantization_config", None)
        if settings is None:
            continue
        if ours:
            del part.quantization_config
        else:
            part.quantization_config = {**_as_dict(settings), "dequantize": True}
    return plain


def reads(config: Any, names: Iterable[str]) -> bool:
    """Return whether this module reads the tensors of these names when they are dequantised, and not transformers."""
    return method_of(config) in READERS and not any(name.endswith(_OTHER_FP8) for name in names)


class QuantisedWeights(NamedTuple):
    """The weights of a checkpoint, plain or in blocks, by the names of its tensors."""

    tensors: dict[str, Tensor]  # All; one that stays in blocks is here in shape and dtype only, and takes no memory
    stored: dict[str, StoredRows]  # Those that stay in blocks


def read_weights(files: list[Path], config: Any, dtype: torch.dtype, linear: Collection[str] = ()) -> QuantisedWeights:
    """Read the tensors of a checkpoint with its quantised ones as plain weights in `dtype`, or as blocks of a GGUF
    file.

    Args:
        linear: names of weights that stay in 4 or 8 bits where blocks can hold them.

    Raises:
        UnsupportedModelError: weights are packed in a way that is not read here.
    """
    settings = _settings(config)
    assert settings is not None, "only what is quantised is dequantised"
    return _convert(_StoredTensors(files), settings, dtype, linear)


def dequantise(tensors: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors with plain weights in the place of quantised ones, by the `quantization_config` of their
    checkpoint. Raises UnsupportedModelError for those that are not read here.
    """
    method = settings.get("quant_method")
    if method not in READERS:
        raise UnsupportedModelError(f"weights of the method {method} are not read here, only {', '.join(READERS)}")
    return _convert(tensors, settings, dtype, ()).tensors


def _convert(
    places: Mapping[str, Tensor], settings: Mapping[str, Any], dtype: torch.dtype, linear: Collection[str]
) -> QuantisedWeights:
    """Return what `read_weights` does of tensors that are read one by one."""
    loaded = QuantisedWeights({}, {})
    method = str(settings["quant_method"])
    kinds = dict[str, list[str]]()  # The tensors of each module
    for name in places:
        module, _, kind = name.rpartition(".")
        kinds.setdefault(module, []).append(kind)
    for name in places:
        module, _, kind = name.rpartition(".")
        weight = f"{module}.weight"
        parts = [part for part in kinds[module] if part in _PARTS[method]]
        if kind not in parts or _MARKS.isdisjoint(parts):
            if not name.endswith(_ACTIVATIONS):
                loaded.tensors[name] = places[name]
        elif weight not in loaded.tensors:
            tensors = {part: places[f"{module}.{part}"] for part in parts}
            matrix = _read_matrix(method, settings, module, tensors)
            rows = matrix.to_blocks() if weight in linear else None
            if rows is None:
                loaded.tensors[weight] = matrix.values().to(dtype)
            else:
                loaded.tensors[weight] = torch.zeros((), dtype=dtype).expand(matrix.codes.shape)
                loaded.stored[weight] = rows
    return loaded


class _StoredTensors(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is asked for."""

    def __init__(self, files: list[Path]) -> None:
        self._places = dict[str, Any]()
        for file in files:
            opened = safe_open(file, framework="pt")
            names: list[str] = opened.keys()  # type: ignore[no-untyped-call]
            self._places |= dict.fromkeys(names, opened)

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = self._places[name].get_tensor(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Matrix(NamedTuple):
    """A weight (outputs, inputs) in few bits."""

    codes: Tensor  # What is stored for each number: unsigned integers, or FP8 in float32
    scales: Tensor  # (outputs, inputs) float32
    zeros: Tensor | None  # (outputs, inputs) or (), the integer that stands for 0; None in FP8
    bits: int

    def values(self) -> Tensor:
        codes = self.codes if self.zeros is None else self.codes - self.zeros
        return codes * self.scales

    def to_blocks(self) -> StoredRows | None:
        """Return the weight in the blocks of 32 of a GGUF file, Q4_0, Q4_1 or Q8_0; None where these cannot hold it, or
        our kernels do not take it.
        """
        outputs, inputs = self.codes.shape
        if self.zeros is None or inputs % BLOCK or not blocks.stored_bytes(_Q4_1, outputs, inputs):
            return None
        scales = self.scales.reshape(outputs, -1, BLOCK)
        zeros = self.zeros.expand(outputs, inputs).reshape(outputs, -1, BLOCK)
        first, middle = scales[:, :, :1], 1 << (self.bits - 1)
        if not ((scales == first).all() and (zeros == zeros[:, :, :1]).all() and (first.half().float() == first).all()):
            return None  # Groups of other inputs, or a scale that 16 bits of GGUF do not hold
        centred, codes = bool((zeros == middle).all()), self.codes.reshape(outputs, -1, BLOCK)
        head = [first]
        if self.bits == 4:
            kind = _Q4_0 if centred else _Q4_1
            low, high = codes.chunk(2, 2)
            packed = (low | (high << 4)).to(torch.uint8)
            head += [] if centred else [-first * zeros[:, :, :1]]
        elif self.bits == 8 and centred:
            kind, packed = _Q8_0, (codes - middle).to(torch.int8).view(torch.uint8)
        else:
            return None
        numbers = torch.cat(head, 2).half().contiguous().view(torch.uint8)
        content = torch.cat([numbers, packed], 2).flatten(1).contiguous().numpy()
        return StoredRows(kind, content, np.arange(outputs))


def memory_bytes(headers: list[Mapping[str, Any]], config: Any, itemsize: int, *, in_blocks: bool = False) -> int:
    """Return the bytes that the weights of quantised files take as plain ones of `itemsize` bytes a number, or in
    blocks those that blocks may hold.
    """
    settings, total = _settings(config) or {}, 0
    groups = settings.get("config_groups") or {}
    of_groups = [int((group.get("weights") or {}).get("num_bits", 8)) for group in groups.values()]
    bits = int(settings.get("bits") or min(of_groups, default=4))
    for header in headers:
        for name, entry in header.items():
            count = prod(entry["shape"])
            if name.endswith((".qweight", ".weight_packed")):
                count *= _BITS // bits
                if in_blocks and bits in _IN_BLOCKS:
                    total += count * _IN_BLOCKS[bits] // BLOCK
                    continue
            elif name.endswith("_blocks"):
                count *= 2  # Two numbers in a byte of MXFP4
            total += count * itemsize
    return total


def _read_matrix(method: str, settings: Mapping[str, Any], module: str, tensors: Mapping[str, Tensor]) -> _Matrix:
    try:
        return READERS[method](tensors, settings)
    except (KeyError, RuntimeError, ValueError, ZeroDivisionError) as error:
        shapes = ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
        package = " ".join(PACKAGES[method]).replace("_", "-")
        raise UnsupportedModelError(
            f"{module}: weights of the method {method} that are packed like this are not read here ({shapes}; "
            f"{error!r}). Load the checkpoint that it was made from, or a GGUF file of the model; on a GPU "
            f"transformers may read it (pip install {package})"
        ) from error


def _read_gptq(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> _Matrix:
    """Read GPTQ: words of inputs below each other, and zeros that its first form holds one too small."""
    form = settings.get("checkpoint_format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ValueError(f"checkpoint_format {form!r}")
    scales = tensors["scales"].float()  # (groups, outputs)
    bits = _BITS * tensors["qzeros"].shape[1] // scales.shape[1]
    codes, zeros = _unpack(tensors["qweight"].T, bits), _unpack(tensors["qzeros"], bits) + (form == "gptq")
    groups = tensors.get("g_idx")
    if groups is None:
        groups = torch.arange(codes.shape[1]) // (codes.shape[1] // len(scales))
    groups = groups.long()
    return _Matrix(codes, scales.T[:, groups], zeros.T[:, groups], bits)


def _read_awq(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> _Matrix:
    """Read AWQ for GEMM: words of outputs beside each other, in an order of their own."""
    if settings.get("version", "gemm") != "gemm":
        raise ValueError(f"version {settings['version']!r} instead of 'gemm'")
    scales = tensors["scales"].float()
    order = torch.tensor(_AWQ_ORDER)  # (groups, outputs)
    codes, zeros = (
        torch.unflatten(_unpack(tensors[name], 4), 1, (-1, 8))[:, :, order].flatten(1).T
        for name in ("qweight", "qzeros")
    )
    each = codes.shape[1] // len(scales)
    return _Matrix(codes, scales.T.repeat_interleave(each, 1), zeros.repeat_interleave(each, 1), 4)


def _read_compressed(tensors: Mapping[str, Tensor], _settings: Mapping[str, Any]) -> _Matrix:
    """Read compressed-tensors: integers in words, or FP8 and int8 as they are, with scales for each row, group or
    block.
    """
    scales, zeros, bits = tensors["weight_scale"].float(), tensors.get("weight_zero_point"), 8
    if "weight_packed" in tensors:
        outputs, inputs = tensors["weight_shape"].tolist()
        words = tensors["weight_packed"]
        if words.dtype is not torch.int32:
            raise ValueError(f"words of {words.dtype}")
        bits = _BITS // -(-inputs // words.shape[1])
        codes = _unpack(words, bits)[:, :inputs]
        zeros = torch.tensor(1 << (bits - 1)) if zeros is None else _unpack(zeros.T, bits).T[:outputs]
    elif tensors["weight"].dtype is torch.int8:
        codes = tensors["weight"].int() + 128
        zeros = torch.tensor(128) if zeros is None else zeros.int() + 128
    else:
        codes, zeros = tensors["weight"].float(), None
    outputs, inputs = codes.shape
    groups = tensors.get("weight_g_idx")

    def spread(grid: Tensor) -> Tensor:
        ordered = groups is not None and int(groups.min()) >= 0
        return grid[:, groups.long()] if ordered and groups is not None else _spread(grid, outputs, inputs)

    return _Matrix(codes, spread(scales), zeros if zeros is None or not zeros.dim() else spread(zeros), bits)


def _read_fp8(tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> _Matrix:
    """Read DeepSeek's FP8: a scale for each block, whose last ones may be cut."""
    stored, scales = tensors["weight"], tensors["weight_scale_inv"]
    if stored.itemsize != 1 or not stored.is_floating_point() or not scales.is_floating_point():
        raise ValueError(f"weights of {stored.dtype} with scales of {scales.dtype}")
    codes, (outputs, inputs) = stored.float(), stored.shape
    return _Matrix(codes, _spread(scales.float(), outputs, inputs, settings.get("weight_block_size")), None, 8)


def _spread(grid: Tensor, outputs: int, inputs: int, block: Sequence[int] | None = None) -> Tensor:
    """Return the numbers of a grid of blocks, (rows, columns) or fewer dimensions, for each entry of a matrix. Raises
    ValueError where the grid does not divide the matrix and nothing says how large a block is.
    """
    grid = grid.reshape(-1, 1) if grid.dim() < 2 else grid
    rows, columns = grid.shape
    if block is None and (outputs % rows or inputs % columns):
        raise ValueError(f"a grid of {rows} x {columns} scales")
    tall, wide = (outputs // rows, inputs // columns) if block is None else block
    return grid.repeat_interleave(tall, 0)[:outputs].repeat_interleave(wide, 1)[:, :inputs]


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the integers (.., W * 32 / bits) that words (.., W) hold, those in the lowest bits first."""
    if _BITS % bits:
        raise ValueError(f"{bits} bits a weight")
    shifts = torch.arange(0, _BITS, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


KEPT = ("gptq", "awq", "compressed-tensors")  # Methods whose integers may stay so, in blocks
READERS: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], _Matrix]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed,
    "fp8": _read_fp8,
}
_IN_WORDS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
_COMPRESSED = {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
_PARTS = {
    "gptq": _IN_WORDS,
    "awq": _IN_WORDS,
    "compressed-tensors": frozenset({"weight", *_COMPRESSED}),
    "fp8": frozenset({"weight", "weight_scale_inv"}),
}
"""The last parts of the names of the tensors that one weight is stored in."""
_MARKS = frozenset({"qweight", "weight_packed", "weight_scale", "weight_scale_inv"})
"""Those of them that a module without quantised weights has not."""


def _lacking(method: str) -> list[str]:
    return [name for name in PACKAGES[method] if find_spec(name) is None]


def _settings(config: Any) -> dict[str, Any] | None:
    """Return the quantisation that a configuration, or that of its text, names."""
    of_model = getattr(config, "quantization_config", None)
    settings = of_model or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    return None if settings is None else _as_dict(settings)


def _as_dict(settings: Any) -> dict[str, Any]:
    return dict(settings if isinstance(settings, Mapping) else settings.to_dict())
