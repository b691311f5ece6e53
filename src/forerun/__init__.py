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
    from forerun.types import (
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        Source,
        SpeculationStats,
        StepTrace,
        StreamChunk,
        StructuredOutputs,
        StructuredOutputsParams,
    )

_HOMES = {
    "AsyncLLM": "forerun.engine.async_llm",
    "ForerunError": "forerun.errors",
    "LLM": "forerun.engine.llm",
    "SpeculativeConfig": "forerun.control.config",
    "hf": "forerun.engine.huggingface",
}
"""These are the modules of the names in `__all__` that are not in `forerun.types`."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ForerunError",
    "RequestOutput",
    "SamplingParams",
    "Source",
    "SpeculationStats",
    "SpeculativeConfig",
    "StepTrace",
    "StreamChunk",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "hf",
]

moved = importlib.import_module("forerun.moved")
sys.meta_path.insert(0, moved.Moved())


def __getattr__(name: str) -> Any:
    if name in moved.NOW_IN_MODELOPT:
        return moved.from_modelopt(name)
    if name not in __all__:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "forerun.types")), name)


def __dir__() -> list[str]:
    return list(__all__)
