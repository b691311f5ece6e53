"""A transformers causal language model, seen as "score this token tree"."""

from forerun.model.nouns import Plan, Scored
from forerun.model.padding import Buckets
from forerun.model.target import Target

__all__ = ["Buckets", "Plan", "Scored", "Target"]
