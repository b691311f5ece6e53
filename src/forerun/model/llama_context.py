"""A model and a context of llama.cpp, through the low-level interface of llama-cpp-python (``llama.h``)."""

from __future__ import annotations

import ctypes
import logging
import weakref
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, ForerunError, OutOfMemoryError, UnsupportedModelError
from forerun.model.gguf_files import GgufHeader
from forerun.model.target import PREFILL_CHUNK

_log = logging.getLogger(__name__)

INSTALL = "pip install 'forerun[gguf]'"
MOST_SEQUENCES = 256  # Sequences of a context, a limit of llama.cpp
_INFO = 2  # Level of its log messages below which they are about the graph
_NO_SPACE = 1  # What `llama_decode` returns where no cell is free


def installed() -> bool:
    """Return whether llama-cpp-python is there. Nothing is imported."""
    return find_spec("llama_cpp") is not None


class LlamaBatch:
    """The tokens of one pass."""

    def __init__(self) -> None:
        self.tokens, self.positions = list[int](), list[int]()
        self.sequences = list[list[int]]()  # By token; it looks at what belongs to the first one
        self.wanted = list[bool]()  # By token: whether its logits are

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, position: int, sequences: list[int], *, wanted: bool) -> None:
        """Append a token; its list of sequences may grow until the batch is run."""
        self.tokens.append(token)
        self.positions.append(position)
        self.sequences.append(sequences)
        self.wanted.append(wanted)


class Context:
    """A model and a context of llama.cpp, with a unified cache of `tokens` cells."""

    def __init__(self, api: Any, header: GgufHeader, *, rows: int, tokens: int, layers: int) -> None:
        """Load the file; -1 `layers` are all of them on the accelerator. CheckpointError: llama.cpp cannot load it."""
        self._api, self.layers_offloaded = api, layers
        # What decides how fast llama.cpp's passes are here: its version and the instructions that it uses
        self.build = f"{version('llama_cpp_python')} {api.llama_print_system_info().decode()}"
        messages = _Messages(api)
        model = api.llama_model_default_params()
        model.n_gpu_layers = layers
        self._model = api.llama_model_load_from_file(str(header.path).encode(), model)
        if not self._model:
            raise CheckpointError(
                f"llama.cpp cannot load {header.path}: {messages.last}. If the file is newer than llama-cpp-python "
                f"{version('llama_cpp_python')}, update that: {INSTALL} -U"
            )
        weakref.finalize(self, api.llama_model_free, self._model)
        self.keeps_states = bool(api.llama_model_is_recurrent(self._model) or api.llama_model_is_hybrid(self._model))
        # llama.cpp allocates a recurrent state for each sequence: one for each row, and one from before the pass.
        self.sequences = 2 * rows if self.keeps_states else MOST_SEQUENCES
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = tokens, self.sequences, True
        params.n_batch = params.n_ubatch = min(tokens, PREFILL_CHUNK)
        params.n_threads = params.n_threads_batch = self.threads = torch.get_num_threads()
        params.no_perf = True
        params.swa_full = True  # Rows are cut back, and prefixes are used again
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise OutOfMemoryError(
                f"llama.cpp cannot make a cache of {tokens} tokens for {header.path}: {messages.last}"
            )
        self._most = int(params.n_batch)
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(self._most, 0, self.sequences)
        weakref.finalize(self, _free, api, self._batch, self._context)  # Before the model: the last is called first
        self.vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self.hidden_size = int(api.llama_model_n_embd(self._model))
        self.num_layers = int(api.llama_model_n_layer(self._model))
        self.max_length = int(api.llama_model_n_ctx_train(self._model))

    def run(self, batch: LlamaBatch) -> Tensor:
        """Run a batch, in parts where it is long, and return the logits (M, V) float32 of the tokens that are wanted.
        OutOfMemoryError: the cache is full.
        """
        parts = [self._part(batch, start) for start in range(0, len(batch), self._most)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, batch: LlamaBatch, start: int) -> Tensor:
        raw = self._batch
        end = min(len(batch), start + self._most)
        raw.n_tokens = end - start
        for index in range(start, end):
            at, sequences = index - start, batch.sequences[index]
            raw.token[at], raw.pos[at], raw.logits[at] = (
                batch.tokens[index],
                batch.positions[index],
                batch.wanted[index],
            )
            raw.n_seq_id[at] = len(sequences)
            for number, sequence in enumerate(sequences):
                raw.seq_id[at][number] = sequence
        code = self._api.llama_decode(self._context, raw)
        if code == _NO_SPACE:
            raise OutOfMemoryError(
                "llama.cpp's cache is full: lower max_num_seqs or max_model_len, or raise kv_cache_tokens"
            )
        if code:
            raise ForerunError(f"llama.cpp could not run a batch of {end - start} tokens (llama_decode: {code})")
        count = sum(batch.wanted[start:end])
        if not count:
            return torch.empty(0, self.vocab_size)
        logits = self._api.llama_get_logits(self._context)
        return torch.from_numpy(np.ctypeslib.as_array(logits, (count, self.vocab_size))).clone()

    def remove(self, sequence: int, start: int = 0) -> None:
        """Remove a sequence from position `start` on."""
        if not self._api.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise ForerunError(f"llama.cpp cannot remove the end of a sequence from position {start} on")

    def copy(self, source: int | None, target: int, start: int, end: int) -> None:
        """Let positions `start` to `end` of a sequence belong to another one, too."""
        if end > start:
            self._api.llama_memory_seq_cp(self._memory, source, target, start, end)


def _free(api: Any, batch: Any, context: Any) -> None:
    api.llama_batch_free(batch)
    api.llama_free(context)


class _Messages:
    """Collects what llama.cpp says from now on, and passes it to `logging`, level debug."""

    def __init__(self, api: Any) -> None:
        self._lines = list[str]()
        self._callback = api.llama_log_callback(self._hear)
        api.llama_log_set(self._callback, ctypes.c_void_p())
        _CALLBACKS.append(self._callback)  # llama.cpp calls it as long as the process lives

    def _hear(self, level: int, text: bytes, _data: Any) -> None:
        line = text.decode("utf-8", "replace").strip()
        if line and level >= _INFO:
            self._lines = [*self._lines[-15:], line]
            _log.debug("llama.cpp: %s", line)

    @property
    def last(self) -> str:
        """The first of the last lines that speaks of an error, or the last line."""
        errors = [line for line in self._lines if "error" in line.lower()]
        return (errors or self._lines or ["no reason is given"])[0]


_CALLBACKS = list[Any]()


def load_api() -> Any:
    """Return the module of llama.cpp's functions. Raises UnsupportedModelError if it is missing or too old."""
    try:
        import llama_cpp
    except Exception as error:
        why = "is not installed" if not installed() else f"cannot be imported ({type(error).__name__}: {error})"
        raise UnsupportedModelError(
            f"llama.cpp runs GGUF files, and llama-cpp-python {why}: {INSTALL}; or open the file with "
            "backend='transformers' (--backend transformers)"
        ) from error
    fields = {name for name, _ in llama_cpp.llama_context_params._fields_}
    if not {"kv_unified", "swa_full"} <= fields or not hasattr(llama_cpp, "llama_memory_seq_cp"):
        raise UnsupportedModelError(
            f"llama-cpp-python {version('llama_cpp_python')} is too old to score trees, 0.3.16 is needed: {INSTALL} -U"
        )
    return llama_cpp


def has_accelerator() -> bool:
    """Return whether the installed llama.cpp was built for an accelerator."""
    return bool(load_api().llama_supports_gpu_offload())


def offloads(api: Any, device: Any) -> bool:
    """Return whether layers go to an accelerator. Raises ArgumentError for one that it cannot use."""
    able = bool(api.llama_supports_gpu_offload())
    if device is not None and torch.device(device).type != "cpu" and not able:
        raise ArgumentError(
            f"this llama.cpp was built for the CPU and cannot use {device}; see llama-cpp-python's README"
        )
    return able and (device is None or torch.device(device).type != "cpu")
