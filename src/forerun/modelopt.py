"""This module has nvidia-modelopt's names for speculative decoding: a program for ModelOpt 0.47 runs when its imports
of ``modelopt.torch.speculative``, ``modelopt.torch.opt`` and ``modelopt.torch.export`` become ``forerun.modelopt``.
"""

from __future__ import annotations

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

__all__ = [
    "DFLASH_DEFAULT_CFG",
    "EAGLE1_DEFAULT_CFG",
    "EAGLE3_DEFAULT_CFG",
    "EAGLE_MTP_DEFAULT_CFG",
    "DFlashConfig",
    "EagleConfig",
    "HFARValidation",
    "MedusaConfig",
    "OfflineStates",
    "calibrate_frequent_vocab",
    "convert",
    "enable_huggingface_checkpointing",
    "export_hf_checkpoint",
    "export_speculative_decoding",
    "read_draft_vocabulary",
    "restore",
    "save",
]
