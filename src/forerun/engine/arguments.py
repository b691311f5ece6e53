"""The keyword arguments of `LLM` and their types."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

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
