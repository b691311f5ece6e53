"""Finds the weights that a GGUF file holds in blocks which are multiplied as they are, and what memory that saves."""

from __future__ import annotations

import logging
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from forerun.model.gguf import converter_of, file_of, read_tensors
from forerun.model.gguf_files import GgufTensor
from forerun.model.kernels.blocks import StoredRows, stored_bytes

_log = logging.getLogger(__name__)

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_HALF = 2  # Bytes of a dequantised weight


def find_stored(model: Any) -> dict[str, StoredRows]:
    """Return the matrices that the GGUF file of a model's checkpoint holds in such blocks, by the names of the model's
    parameters. Empty where the checkpoint was made of no such file, or was not asked for by the file's name.
    """
    header = file_of(Path(model.name_or_path))
    if header is None:
        return {}
    processor, names = converter_of(header, model.config.to_dict(), model)
    found = dict[str, StoredRows]()
    for tensor, content in read_tensors(header):
        if tensor.name in names and _takes(tensor):
            order = _order_of_rows(processor, names, tensor)
            if order is not None:
                found[names[tensor.name]] = StoredRows(tensor.type, content.reshape(tensor.shape[0], -1), order)
    return found


def _takes(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 2 and stored_bytes(tensor.type, *tensor.shape) > 0


def _order_of_rows(processor: Any, names: dict[str, str], tensor: GgufTensor) -> np.ndarray[Any, Any] | None:
    """Return the row of the file that each row of the weight is, which the converter is asked with their numbers in
    place of the weights; None where it does anything else with them.
    """
    numbers = np.arange(tensor.shape[0])
    try:
        made = processor.process(
            weights=numbers[:, None], name=tensor.name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
    except Exception as error:  # Bloom's counts the columns
        _log.debug("%s is dequantised: %s", tensor.name, error)
        return None
    order = np.array(made.weights)
    kept = made.name == tensor.name and order.shape == (len(numbers), 1)
    return order[:, 0] if kept and np.array_equal(np.sort(order[:, 0]), numbers) else None


def saved_bytes(folder: Path) -> int:
    """Return how many bytes less the weights of a checkpoint take where those in blocks stay so, as far as the file's
    header tells. The embedding is dequantised, and a head that is tied to it takes its blocks beside it.
    """
    header = file_of(folder)
    if header is None:
        return 0
    tensors = header.everything
    tied = all(tensor.name != _HEAD for tensor in tensors)
    saved = 0
    for tensor in filter(_takes, tensors):
        if tensor.name != _EMBEDDING:
            saved += prod(tensor.shape) * _HALF - stored_bytes(tensor.type, *tensor.shape)
        elif tied:
            saved -= stored_bytes(tensor.type, *tensor.shape)
    return saved
