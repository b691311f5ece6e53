"""A transformers causal language model, seen as "score this token tree"."""

from forerun.model.inputs import Scored
from forerun.model.kernels.native import largest, top_ids
from forerun.model.layers import Plan
from forerun.model.padding import Buckets
from forerun.model.target import Target

__all__ = ["Buckets", "Plan", "Scored", "Target", "largest", "top_ids"]
