"""Opens a model on the back end that suits it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from forerun.errors import ArgumentError, CheckpointError, UnsupportedModelError, nearest
from forerun.model import llama_context
from forerun.model.gguf import checkpoint_of
from forerun.model.gguf_files import read_model_header
from forerun.model.gguf_weights import memory_bytes
from forerun.model.kernels import products
from forerun.model.llama_cpp import LlamaCppTarget
from forerun.model.load import LoadOptions, read_config
from forerun.model.memory import available_bytes
from forerun.model.names import gguf_file, resolve
from forerun.model.support import most_positions, text_config
from forerun.model.target import Target
from forerun.model.transformers_target import TransformersTarget

_log = logging.getLogger(__name__)

BACK_ENDS = ("auto", "transformers", "llama.cpp")


def load_target(model: Any, *, backend: str = "auto", tokens: int | None = None, **loading: Any) -> Target:
    """Open a directory, a hub id, a GGUF file or a loaded transformers model.

    Args:
        model: see `TransformersTarget.load` and `LlamaCppTarget.load`.
        backend: ``"llama.cpp"`` runs a GGUF file on llama.cpp's kernels, ``"transformers"`` runs everything else, and a
            GGUF file with it. ``"auto"`` chooses for a GGUF file, see `file_for_llama_cpp`.
        tokens: most tokens that all rows hold together, where the back end allocates its cache at once.
        loading: see the back ends' own `load`.

    Raises:
        ArgumentError: there is no such back end, or it does not run this model.
    """
    where = {name: loading.get(name) for name in ("dtype", "device")}
    file = file_for_llama_cpp(model, backend=backend, **where)
    if file is None:
        return TransformersTarget.load(model, **loading)
    return LlamaCppTarget.load(file, tokens=tokens, **loading)


def context_of(model: Any, **hub: Any) -> int:
    """Return the tokens of a model's context, by its configuration. `hub` are `revision`, `token` and
    `trust_remote_code` of `LoadOptions`.
    """
    if not isinstance(model, str | Path):
        return most_positions(text_config(model))
    file = gguf_file(model)
    if file is not None:
        return read_model_header(file).context_length
    return most_positions(read_config(resolve(model), LoadOptions(**hub)).get_text_config(decoder=True))


def file_for_llama_cpp(model: Any, *, backend: str = "auto", dtype: Any = None, device: Any = None) -> Path | None:
    """Return the GGUF file that llama.cpp runs where `load_target` is asked for this model, None where transformers
    runs it. ArgumentError: there is no such back end, or it does not run this model.

    ``"auto"``: on a CPU where our own kernels multiply a file's blocks as they are, a file that transformers can be
    given runs there: drafts of several tokens cost less (docs/gguf.md), and heads work. Else llama.cpp runs it, if it
    is installed.
    """
    backend = "llama.cpp" if backend == "llamacpp" else backend
    if backend not in BACK_ENDS:
        raise ArgumentError(f"there is no back end {backend!r}.{nearest(backend, BACK_ENDS)}")
    file = gguf_file(model) if isinstance(model, str | Path) else None
    if file is None and backend == "llama.cpp":
        raise ArgumentError(f"llama.cpp runs GGUF files, and {model!s:.200} is none: leave backend away")
    if backend != "auto":
        return file if backend == "llama.cpp" else None
    if file is None or dtype not in ("auto", None) or _multiplies_blocks(file, device):
        return None
    read_model_header(file).check_generates()  # Raises for what nothing runs, a broken file too
    if not llama_context.installed():
        _log.warning(
            "%s runs on transformers, dequantised in memory; llama.cpp would run the file as it is: %s",
            file.name,
            llama_context.INSTALL,
        )
        return None
    return file


def _multiplies_blocks(file: Path, device: Any) -> bool:
    """Return whether a file runs on a CPU, from its blocks, with our own kernels."""
    if device is not None:
        on_cpu = LoadOptions(device=str(device)).first_device().type == "cpu"
    else:
        accelerates = llama_context.installed() and llama_context.has_accelerator()
        on_cpu = not (torch.accelerator.is_available() or accelerates)
    return on_cpu and products.ready(torch.bfloat16) and _runs_on_transformers(file)


def _runs_on_transformers(file: Path) -> bool:
    """Return whether transformers reads a file's architecture, and the memory holds its weights as they are there."""
    try:
        checkpoint_of(file)
    except (CheckpointError, UnsupportedModelError):
        return False
    weights = memory_bytes(read_model_header(file), torch.bfloat16.itemsize, in_blocks=True)
    return weights < available_bytes(torch.device("cpu"))
