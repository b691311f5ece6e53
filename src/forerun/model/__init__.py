"""A causal language model, seen as "score this token tree".

Names are loaded when first used, so that a model's name can be looked at (`names`) without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.model.inputs import Buckets, Scored
    from forerun.model.kernels.native import largest, top_ids
    from forerun.model.layers import LayerRange
    from forerun.model.target import Target
    from forerun.model.transformers_target import TransformersTarget

_HOMES = {
    "Buckets": "inputs",
    "LayerRange": "layers",
    "Scored": "inputs",
    "Target": "target",
    "TransformersTarget": "transformers_target",
    "largest": "kernels.native",
    "top_ids": "kernels.native",
}

__all__ = ["Buckets", "LayerRange", "Scored", "Target", "TransformersTarget", "largest", "top_ids"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun.model' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forerun.model.{_HOMES[name]}"), name)
