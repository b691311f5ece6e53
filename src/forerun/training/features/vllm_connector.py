"""This KV connector for vLLM on the CPU writes a prompt's states in the very step that computed
them.

vLLM's own ``ExampleHiddenStatesConnector`` (0.32) copies through pinned memory, which only an
accelerator has, in the step after the prompt's last; where engine and caller share a process, that
step never comes. Here a file is whole before its path is told (``KVConnectorBase_V1.wait_for_save``
comes once a step), so there is no lock. It needs whole prompts in one step: no chunked prefill, no
prefix cache. vLLM imports it, under the name that `vllm_source` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

LAYER = "cache_only_layers"  # Part of the name of the one layer whose cache holds states instead of keys and values


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedPrompt:
    """A prompt that this step computes as a whole."""

    path: str
    tokens: list[int]
    blocks: list[int]  # Blocks of the states' cache, in order


@dataclass(frozen=True, kw_only=True)
class CapturedPrompts(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there when types are checked
    """The scheduler's message to the workers about one step."""

    prompts: list[CapturedPrompt]


class PromptStatesConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Both sides of the connector: the scheduler's names the prompts,
    the worker's writes them.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._folder = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["shared_storage_path"])
        groups = kv_cache_config.kv_cache_groups
        self._group = next(i for i, group in enumerate(groups) if any(LAYER in name for name in group.layer_names))
        self._block_size: int = groups[self._group].kv_cache_spec.block_size
        self._cache: Tensor | None = None

    # The scheduler's side.

    def build_connector_meta(self, scheduler_output: Any) -> CapturedPrompts:
        """Return the prompts of this step; one that is cut up is left out, and its reader finds no
        file.
        """
        scheduled: Mapping[str, int] = scheduler_output.num_scheduled_tokens
        return CapturedPrompts(
            prompts=[
                CapturedPrompt(
                    path=self._path(new.req_id), tokens=new.prompt_token_ids, blocks=new.block_ids[self._group]
                )
                for new in scheduler_output.scheduled_new_reqs
                if scheduled[new.req_id] == len(new.prompt_token_ids)
            ]
        )

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        """Free the blocks, because the file has been written, and tell the caller the path."""
        return False, {"hidden_states_path": self._path(request.request_id)}

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any]]:
        return self.request_finished_all_groups(request, block_ids)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Do nothing: no state is ever loaded."""

    # The worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Keep the states' cache (blocks, boundaries, block size, Ht); ValueError for blocks of another size."""
        self._cache = next(cache for name, cache in kv_caches.items() if LAYER in name)
        if self._cache.shape[2] != self._block_size:
            raise ValueError(f"expected blocks of {self._block_size} states, the cache is {tuple(self._cache.shape)}")

    def wait_for_save(self) -> None:
        """Write ``hidden_states`` (tokens, boundaries, Ht) and ``token_ids`` of each prompt of this step."""
        prompts = self._get_connector_metadata().prompts
        # Every rank of a tensor-parallel target has the same states.
        if not prompts or get_tensor_model_parallel_rank() != 0:
            return
        assert self._cache is not None
        for prompt in prompts:
            states = self._cache[prompt.blocks].transpose(1, 2).flatten(0, 1)[: len(prompt.tokens)]
            save_file(
                {"hidden_states": states.cpu().contiguous(), "token_ids": torch.tensor(prompt.tokens)}, prompt.path
            )

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: a prompt is written when its step is over."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: no state is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: no state is ever loaded."""

    def _path(self, request: str) -> str:
        return str(self._folder / f"{request}.safetensors")
