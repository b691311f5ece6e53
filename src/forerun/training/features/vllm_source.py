"""Takes features from vLLM, through its ``extract_hidden_states`` method and the
connector that writes files.

By its documentation (features/speculative_decoding/extract_hidden_states; vllm >= 0.18) layer ids are boundaries, a
prompt's states come back as ``hidden_states`` (tokens, ids, Ht) beside ``token_ids``, the last boundary is before the
final norm, which `FinalNorm` applies. On an accelerator vLLM's own connector writes them, on the CPU `vllm_connector`.
"""

from __future__ import annotations

import copy
import fcntl
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from forerun.errors import ArgumentError, CheckpointError, DataError, UnsupportedModelError, refuse
from forerun.model.layers import base_name, base_of, norm_after_layers
from forerun.model.load import read_header, weight_files
from forerun.model.support import auto_class
from forerun.training.features.online import distinct_boundaries
from forerun.types import LAST_HIDDEN, Boundary


class FinalNorm:
    """Turns raw states (.., Ht) after the last layer into states after the final
    norm, on the CPU.
    """

    def __init__(self, directory: Path, config: Any) -> None:
        """Find the norm in the skeleton of the model that `config` describes and load its weights
        from `directory`.

        UnsupportedModelError if the module after the layers cannot be told, CheckpointError if its
        weights lack.
        """
        with torch.device("meta"):
            model: Any = auto_class(config).from_config(copy.deepcopy(config))
        try:
            name, norm = norm_after_layers(base_of(model), config.get_text_config(decoder=True).num_hidden_layers)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; use --source transformers") from None
        names, stored = set(norm.state_dict()), dict[str, Tensor]()
        keys = {prefix + own: own for prefix in (f"{base_name(model)}.{name}.", f"{name}.") for own in names}
        for path in weight_files(directory):
            if wanted := keys.keys() & read_header(path).keys():
                with safe_open(path, "pt") as file:
                    stored |= {keys[key]: file.get_tensor(key) for key in wanted}
        if set(stored) != names:
            raise CheckpointError(f"{directory} lacks the final norm's {', '.join(sorted(names - set(stored)))}")
        self._norm = norm.to_empty(device="cpu").eval().requires_grad_(False)
        self._norm.load_state_dict(stored, assign=True)
        self._dtype = next(iter(stored.values())).dtype

    @torch.no_grad()
    def __call__(self, states: Tensor) -> Tensor:
        """Apply the norm, (.., Ht) -> (.., Ht), in the dtype of its weights."""
        return self._norm(states.cpu().to(self._dtype))


ACCELERATOR_CONNECTOR = {"kv_connector": "ExampleHiddenStatesConnector"}  # vLLM's own: copies, then writes in threads
CPU_CONNECTOR = {
    "kv_connector": "PromptStatesConnector",
    "kv_connector_module_path": "forerun.training.features.vllm_connector",
}
CPU_OPTIONS: Mapping[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": 2 << 30}
"""These options need no compiler, and a cache (bytes) for a pass or two; vLLM's own default wants
92 % of the memory.
"""
WRITE_TIMEOUT_S = 120.0  # Seconds that a prompt's states may take to be written once vLLM has answered


class VllmFeatures:
    """An offline vLLM engine that captures the target's residual stream; close it
    to free the files.
    """

    def __init__(
        self,
        target: str,
        boundaries: Sequence[Boundary],
        norm: Callable[[Tensor], Tensor],
        *,
        num_layers: int,
        max_tokens: int,
        batch_tokens: int = 8192,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start vLLM for documents of up to `max_tokens`, passes of up to `batch_tokens` tokens.

        `norm`: states at the last boundary -> LAST_HIDDEN, see `FinalNorm`; `engine_options`: more
        arguments of ``vllm.LLM``. ArgumentError if it is not installed or a boundary out of range,
        DataError if it does not start.
        """
        self.boundaries = distinct_boundaries(boundaries, num_layers)
        self._norm, self._last = norm, num_layers
        self._ids = sorted({*self.boundaries, num_layers})
        vllm = require_vllm()
        on_cpu = importlib.import_module("vllm.platforms").current_platform.is_cpu()
        transfer = importlib.import_module("vllm.config.kv_transfer").KVTransferConfig
        self._folder = tempfile.TemporaryDirectory(prefix="forerun-vllm-")
        # The prompt, the one token that is generated, and the one speculative slot must fit.
        longest = max_tokens + 2
        options = {
            "model": target,
            "max_model_len": longest,
            "max_num_batched_tokens": max(batch_tokens, longest),
            # A cached prefix would not be run, and its states not captured; a chunked prompt only in part.
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": self._ids}},
            },
            "kv_transfer_config": transfer(
                kv_role="kv_producer",
                kv_connector_extra_config={"shared_storage_path": self._folder.name},
                **(CPU_CONNECTOR if on_cpu else ACCELERATOR_CONNECTOR),
            ),
            **(CPU_OPTIONS if on_cpu else {}),
            **(engine_options or {}),
        }
        try:
            with _explain_failure("did not start"):
                self._engine = vllm.LLM(**options)
        except BaseException:
            self._folder.cleanup()
            raise
        self._sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0)

    def documents(self, documents: Sequence[Sequence[int]]) -> list[dict[Boundary, Tensor]]:
        """Return the states (L, Ht) of whole documents on the CPU; DataError if vLLM stopped, or
        answered with others.
        """
        prompts = [{"prompt_token_ids": list(tokens)} for tokens in documents]
        with _explain_failure("stopped"):
            outputs = self._engine.generate(prompts, self._sampling, use_tqdm=False)
        return [self._states(tokens, output) for tokens, output in zip(documents, outputs, strict=True)]

    def close(self) -> None:
        """Forget the engine and delete what its connector left."""
        del self._engine
        self._folder.cleanup()

    def _states(self, tokens: Sequence[int], output: Any) -> dict[Boundary, Tensor]:
        path = (getattr(output, "kv_transfer_params", None) or {}).get("hidden_states_path")
        if path is None:
            raise DataError(
                "vLLM gave no hidden_states_path: this version or this model does not support extract_hidden_states; "
                "use --source transformers"
            )
        stored = _load(Path(path))
        states, ids, size = stored["hidden_states"], stored["token_ids"].tolist(), len(tokens)
        refuse(
            (
                ids[:size] != list(tokens),
                f"vLLM returned the states of other tokens ({len(ids)}) than those it was given ({size})",
            ),
            (
                states.dim() != 3 or len(states) < size or states.shape[1] != len(self._ids),
                f"vLLM returned states {tuple(states.shape)}, expected {size} tokens x {len(self._ids)} boundaries",
            ),
            error=DataError,
        )
        by_id = dict(zip(self._ids, states[:size].unbind(1), strict=True))
        kept = {boundary: by_id[boundary] for boundary in self.boundaries}
        return {**kept, LAST_HIDDEN: self._norm(by_id[self._last])}


@contextmanager
def _explain_failure(what: str) -> Iterator[None]:
    """Turn vLLM's failures into `DataError`; the reason mostly stands in the log of one of its processes."""
    try:
        yield
    except Exception as error:
        raise DataError(f"vLLM {what}: {error} Its log above says why; or use --source transformers") from error


def _load(path: Path) -> Mapping[str, Tensor]:
    lock = path.with_name(f"{path.name}.lock")
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while lock.exists() and not _is_released(lock):
        if time.monotonic() > deadline:
            raise DataError(
                f"vLLM answered {WRITE_TIMEOUT_S:.0f} s ago and has not written its states. In one process with its "
                "engine its connector never does: unset VLLM_ENABLE_V1_MULTIPROCESSING; or use --source transformers"
            )
        time.sleep(0.005)
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise DataError(
            f"vLLM answered but wrote no states to {path}: its log says why; --source transformers does without it"
        ) from error
    finally:
        for file in (path, lock):
            file.unlink(missing_ok=True)


def _is_released(lock: Path) -> bool:
    """Return whether vLLM's connector has released the lock that it holds from the prompt's first
    step on.
    """
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def require_vllm() -> Any:
    """Import and return vllm; ArgumentError if it is not installed."""
    # stdout belongs to the command's result.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise ArgumentError(
            "the source vllm needs the package vllm (0.18 or newer): pip install vllm, or use --source transformers"
        ) from error
