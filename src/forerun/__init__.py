"""forerun makes language models answer faster by speculative decoding, without changing what they answer.

Names are loaded when first used, so that importing the package (and ``forerun --help``) imports
no torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.control.config import SpeculativeConfig
    from forerun.engine.async_llm import AsyncLLM
    from forerun.engine.huggingface import hf
    from forerun.engine.llm import LLM
    from forerun.errors import ForerunError
    from forerun.training.convert.model import convert, enable_huggingface_checkpointing
    from forerun.training.convert.settings import EAGLE3_DEFAULT_CFG
    from forerun.types import (
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        Source,
        StepTrace,
        StreamChunk,
        StructuredOutputs,
    )

_HOMES = {
    "AsyncLLM": "forerun.engine.async_llm",
    "EAGLE3_DEFAULT_CFG": "forerun.training.convert.settings",
    "ForerunError": "forerun.errors",
    "LLM": "forerun.engine.llm",
    "SpeculativeConfig": "forerun.control.config",
    "convert": "forerun.training.convert.model",
    "enable_huggingface_checkpointing": "forerun.training.convert.model",
    "hf": "forerun.engine.huggingface",
}
"""These are the modules of the names in `__all__` that are not in `forerun.types`."""

__all__ = [
    "EAGLE3_DEFAULT_CFG",
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ForerunError",
    "RequestOutput",
    "SamplingParams",
    "Source",
    "SpeculativeConfig",
    "StepTrace",
    "StreamChunk",
    "StructuredOutputs",
    "convert",
    "enable_huggingface_checkpointing",
    "hf",
]

sys.meta_path.insert(0, importlib.import_module("forerun.moved").Moved())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "forerun.types")), name)


def __dir__() -> list[str]:
    return list(__all__)
