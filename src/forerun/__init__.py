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
    from forerun.training.convert.modelopt import (
        DFLASH_DEFAULT_CFG,
        DFlashConfig,
        EagleConfig,
        HFARValidation,
        MedusaConfig,
        OfflineStates,
        calibrate_frequent_vocab,
        export_hf_checkpoint,
        export_speculative_decoding,
        read_draft_vocabulary,
        restore,
        save,
    )
    from forerun.training.convert.settings import EAGLE1_DEFAULT_CFG, EAGLE3_DEFAULT_CFG, EAGLE_MTP_DEFAULT_CFG
    from forerun.types import (
        CompletionOutput,
        RequestOutput,
        SamplingParams,
        Source,
        SpeculationStats,
        StepTrace,
        StreamChunk,
        StructuredOutputs,
    )

_MODELOPT, _SETTINGS = "forerun.training.convert.modelopt", "forerun.training.convert.settings"
_HOMES = {
    "AsyncLLM": "forerun.engine.async_llm",
    "DFLASH_DEFAULT_CFG": _MODELOPT,
    "DFlashConfig": _MODELOPT,
    "EAGLE1_DEFAULT_CFG": _SETTINGS,
    "EAGLE3_DEFAULT_CFG": _SETTINGS,
    "EAGLE_MTP_DEFAULT_CFG": _SETTINGS,
    "EagleConfig": _MODELOPT,
    "ForerunError": "forerun.errors",
    "HFARValidation": _MODELOPT,
    "LLM": "forerun.engine.llm",
    "MedusaConfig": _MODELOPT,
    "OfflineStates": _MODELOPT,
    "SpeculativeConfig": "forerun.control.config",
    "calibrate_frequent_vocab": _MODELOPT,
    "convert": "forerun.training.convert.model",
    "enable_huggingface_checkpointing": "forerun.training.convert.model",
    "export_hf_checkpoint": _MODELOPT,
    "export_speculative_decoding": _MODELOPT,
    "hf": "forerun.engine.huggingface",
    "read_draft_vocabulary": _MODELOPT,
    "restore": _MODELOPT,
    "save": _MODELOPT,
}
"""These are the modules of the names in `__all__` that are not in `forerun.types`."""

__all__ = [
    "DFLASH_DEFAULT_CFG",
    "EAGLE1_DEFAULT_CFG",
    "EAGLE3_DEFAULT_CFG",
    "EAGLE_MTP_DEFAULT_CFG",
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "DFlashConfig",
    "EagleConfig",
    "ForerunError",
    "HFARValidation",
    "MedusaConfig",
    "OfflineStates",
    "RequestOutput",
    "SamplingParams",
    "Source",
    "SpeculationStats",
    "SpeculativeConfig",
    "StepTrace",
    "StreamChunk",
    "StructuredOutputs",
    "calibrate_frequent_vocab",
    "convert",
    "enable_huggingface_checkpointing",
    "export_hf_checkpoint",
    "export_speculative_decoding",
    "hf",
    "read_draft_vocabulary",
    "restore",
    "save",
]

sys.meta_path.insert(0, importlib.import_module("forerun.moved").Moved())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "forerun.types")), name)


def __dir__() -> list[str]:
    return list(__all__)
