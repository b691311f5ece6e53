"""The weights of a GGUF file, as the parameters of a transformers model: in the file's own blocks where our kernels
multiply these, else dequantised in memory.

transformers' converters say which parameter a tensor is, and in which order its rows lie there; our kernels dequantise
to bfloat16, the package ``gguf`` to everything else.
"""

from __future__ import annotations

import copy
import logging
import mmap
import re
from collections.abc import Collection, Iterator, Mapping
from importlib.metadata import version
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from forerun.errors import UnsupportedModelError, list_some
from forerun.model.gguf_files import GgufHeader, GgufTensor
from forerun.model.kernels import blocks, products
from forerun.model.kernels.blocks import StoredRows
from forerun.model.kernels.packing import pack
from forerun.model.support import auto_class

_log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_COMPUTED = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|blk\.\d+\.attn_rot_embd(\.weight)?")
"""Matches the names of tensors that a model computes itself."""


class GgufWeights(NamedTuple):
    """The weights of a model by the names of its parameters."""

    family: Any  # The class of transformers that has them
    tensors: dict[str, Tensor]  # All; one that stays in blocks is here in shape and dtype only, and takes no memory
    stored: dict[str, StoredRows]  # Those that stay in blocks


def read_weights(header: GgufHeader, config: Any, dtype: torch.dtype, *, in_blocks: bool) -> GgufWeights:
    """Read a file's weights for the model that `config` describes.

    Args:
        dtype: of whatever is dequantised.
        in_blocks: leave the weights of linear layers in blocks where our kernels take them so.

    Raises:
        UnsupportedModelError: the model has no place for some of the tensors.
    """
    with torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=dtype)
    converter, names = _converter(header, config, model)
    by_weight = {id(weight): name for name, weight in model.named_parameters()}
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    linear = {by_weight[id(layer.weight)] for layer in layers if in_blocks}
    loaded = GgufWeights(type(model), {}, {})
    unplaced = list[str]()
    read: dict[str, Any] = {"tensors": loaded.tensors}
    for tensor, content in read_tensors(header):
        name = names.get(tensor.name)
        rows = _stored_rows(converter, names, tensor, content) if dtype is torch.bfloat16 and name else None
        if name is None or rows is None:
            weights = _dequantise(tensor.type, content)
            converted = converter.process(
                weights=weights, name=tensor.name, tensor_key_mapping=names, parsed_parameters=read
            )
            if converted.name in names:
                loaded.tensors[names[converted.name]] = torch.from_numpy(np.array(converted.weights)).to(dtype)
            elif converted.name is not None and not _COMPUTED.fullmatch(
                tensor.name
            ):  # None: the converter put it in its place
                unplaced.append(tensor.name)
            continue
        if name in linear:
            loaded.stored[name] = rows
        if name in linear and tensor.name != _EMBEDDING:
            loaded.tensors[name] = torch.zeros((), dtype=dtype).expand(tensor.shape)
        else:
            loaded.tensors[name] = blocks.dequantise(rows, tensor.shape[1])
    if unplaced:
        raise UnsupportedModelError(
            f"{header.path} holds tensors for which a {config.model_type} model of transformers has no place: "
            f"{list_some(unplaced, 4)}. Without them it would be another model: name a checkpoint of transformers "
            "instead"
        )
    return loaded


def put_blocks(model: Any, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredRows]) -> None:
    """Pack the layers of a model with these weights that stay in blocks; what cannot be packed is dequantised."""
    lacking = {name for name in stored if not any(tensors[name].stride())}
    pack(model, stored)
    for name, weight in model.named_parameters():
        if name in lacking:
            weight.data = blocks.dequantise(stored[name], weight.shape[1]).to(weight.dtype)


def memory_bytes(header: GgufHeader, itemsize: int, *, in_blocks: bool) -> int:
    """Return the bytes that `read_weights` takes, as far as the header tells. The embedding is dequantised, and a head
    that is tied to it takes its blocks beside it.
    """
    total, tied = 0, all(tensor.name != _HEAD for tensor in header.everything)
    for tensor in header.everything:
        held = blocks.stored_bytes(tensor.type, *tensor.shape) if in_blocks and _takes(tensor) else 0
        if tensor.name == _EMBEDDING or not held:
            total += prod(tensor.shape) * itemsize
        if tensor.name != _EMBEDDING or tied:
            total += held
    return total


def find_not_finite(header: GgufHeader) -> str | None:
    """Return the name of a tensor with a number that is NaN or infinite."""
    names = (
        tensor.name
        for tensor, content in read_tensors(header)
        if not np.isfinite(_dequantise(tensor.type, content)).all()
    )
    return next(names, None)


def read_values(header: GgufHeader, name: str) -> np.ndarray[Any, Any]:
    """Return the values of the tensor of that name, float32."""
    return next(_dequantise(tensor.type, content) for tensor, content in read_tensors(header) if tensor.name == name)


def converters() -> Any:
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


def _converter(header: GgufHeader, config: Any, model: Any) -> tuple[Any, dict[str, str]]:
    """Return what brings the file's tensors into the form of a model's parameters, and their names there by those in
    the file.
    """
    theirs = converters()
    converter = theirs.TENSOR_PROCESSORS.get(header.architecture, theirs.TensorProcessor)(config=config.to_dict())
    return converter, theirs.get_gguf_hf_weights_map(_Names.of(model), converter)


def _stored_rows(
    converter: Any, names: Collection[str], tensor: GgufTensor, content: np.ndarray[Any, Any]
) -> StoredRows | None:
    """Return a matrix in blocks that our kernels take, with the row of the file that each row of the weight is: the
    converter is asked with the rows' numbers in place of the weights. None for another tensor, where the converter does
    anything else with it, and where the kernels make other values of its first rows than the package ``gguf``.
    """
    if not _takes(tensor):
        return None
    numbers = np.arange(tensor.shape[0])
    try:
        converted = converter.process(
            weights=numbers[:, None], name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
    except Exception as error:  # Bloom's counts the columns
        _log.debug("%s is converted as a whole: %s", tensor.name, error)
        return None
    order = np.array(converted.weights)
    if (
        converted.name != tensor.name
        or order.shape != (len(numbers), 1)
        or not np.array_equal(np.sort(order[:, 0]), numbers)
    ):
        return None
    first = order[: products.LANES, 0]
    expected = torch.from_numpy(_dequantise(tensor.type, content[first])).to(torch.bfloat16)
    same = torch.equal(blocks.dequantise(StoredRows(tensor.type, content, first), tensor.shape[1]), expected)
    return StoredRows(tensor.type, content, order[:, 0]) if same else None


def _takes(tensor: GgufTensor) -> bool:
    """Return whether our kernels take a tensor's blocks."""
    matrix = len(tensor.shape) == 2 and tensor.shape[1] % products.STEP == 0 and products.ready(torch.bfloat16)
    return matrix and blocks.stored_bytes(tensor.type, *tensor.shape) > 0


def _dequantise(kind: int, content: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values, float32, of a tensor of this type, or of some of its rows."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(content, GGMLQuantizationType(kind))


def read_tensors(header: GgufHeader) -> Iterator[tuple[GgufTensor, np.ndarray[Any, Any]]]:
    """Yield all tensors with their bytes in the mapped files, row by row (.., bytes of a row)."""
    for part in (header, *header.more):
        with part.path.open("rb") as file:
            content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
        for tensor in part.tensors:
            start = part.start + tensor.offset
            yield tensor, content[start : start + part.bytes_of(tensor)].reshape(*tensor.shape[:-1], -1)
