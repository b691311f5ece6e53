"""The keyword arguments of `LLM`: their types, and what takes the place of vLLM's arguments that are missing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from forerun.errors import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LoadingArguments(TypedDict, total=False):
    """The arguments of `LLM` that say how the model is loaded, see `load_target`."""

    backend: str  # ``"auto"``, ``"transformers"`` or ``"llama.cpp"``
    device_map: Any  # Placement of each module, as in transformers; excludes `device`
    tp_plan: Any  # ``"auto"`` under torchrun: tensor parallel
    adapter: str | Path | None  # Directory or hub id of a PEFT adapter
    revision: str | None  # Of the hub id
    trust_remote_code: bool
    token: str | bool | None  # Hugging Face token; None: ``HF_TOKEN`` or the one that is stored
    self_check: bool  # Compare small trees with plain forwards first, which may shorten the context
    repack: bool | None  # Replace modules by faster ones in place; None: only in a model that is loaded here
    speculative_model: str | None  # Of older vLLM tutorials, like the next three
    num_speculative_tokens: int | None
    ngram_prompt_lookup_max: int | None
    ngram_prompt_lookup_min: int | None


class EngineArguments(LoadingArguments, total=False):
    """All keyword arguments of `LLM` and of `AsyncLLM`."""

    tokenizer: str | Path | PreTrainedTokenizerBase | bool | None
    chat_template: str | Path | None
    speculative_config: Mapping[str, Any] | str | None
    dtype: str
    device: str | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    enable_prefix_caching: bool
    kv_cache_tokens: int | None
    seed: int | None
    reproducible: bool
    check: bool


_ONE_DEVICE = "a model runs on one device; tp_plan='auto' under torchrun, or device_map, spreads it over several"
_CACHE_SIZE = "the cache is sized in tokens: kv_cache_tokens, max_model_len and max_num_seqs"
_CHECKPOINT_DECIDES = "the checkpoint says how its weights are quantised; open one that is, or a GGUF file"
_NO_OFFLOAD = "the cache is not swapped out: requests that do not fit are preempted and continue later"
_CHUNKED = "long prompts are always prefilled in chunks, of max_num_batched_tokens"
_SAMPLING = "what differs from the checkpoint's generation_config.json stands in SamplingParams"

INSTEAD = {
    "block_size": _CACHE_SIZE,
    "cpu_offload_gb": "device_map places modules on the CPU, as in transformers",
    "data_parallel_size": "start a process for each copy of the model",
    "disable_log_requests": "it is not needed: an LLM logs no requests",
    "disable_log_stats": "an LLM logs no statistics; they are in each output's speculation",
    "distributed_executor_backend": _ONE_DEVICE,
    "download_dir": "the environment's HF_HOME says where models are kept",
    "enable_chunked_prefill": _CHUNKED,
    "enable_lora": "adapter=... opens the model with one PEFT adapter",
    "enable_sleep_mode": "LLM.sleep and LLM.wake_up need no preparation",
    "enforce_eager": "nothing is compiled; FORERUN_NO_GRAPHS=1 leaves CUDA graphs out",
    "generation_config": _SAMPLING,
    "gpu_memory_utilization": _CACHE_SIZE,
    "hf_token": "call it token",
    "kv_cache_dtype": "the cache has the model's dtype; a smaller one would change the outputs",
    "kv_cache_memory_bytes": _CACHE_SIZE,
    "load_format": "safetensors and GGUF files are recognised",
    "max_lora_rank": "adapter=... opens the model with one PEFT adapter",
    "num_gpu_blocks_override": _CACHE_SIZE,
    "override_generation_config": _SAMPLING,
    "pipeline_parallel_size": _ONE_DEVICE,
    "quantization": _CHECKPOINT_DECIDES,
    "skip_tokenizer_init": "tokenizer=False works on token ids alone",
    "swap_space": _NO_OFFLOAD,
    "tensor_parallel_size": _ONE_DEVICE,
    "tokenizer_mode": "transformers chooses the tokenizer; tokenizer=... takes another",
}
"""Arguments of vLLM's `LLM` map to what takes their place."""


def check_keywords(given: Iterable[str]) -> None:
    """Raise TypeError for an unknown keyword of `LLM`, naming the nearest one or what takes the place of vLLM's."""
    known = EngineArguments.__annotations__
    for name in given:
        if name in INSTEAD:
            raise TypeError(f"LLM() has no argument {name!r}, which is vLLM's: {INSTEAD[name]}")
        if name not in known:
            raise TypeError(f"LLM() has no argument {name!r}.{nearest(name, known, 0.8)}")
