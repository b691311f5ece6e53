"""A transformers causal language model, seen as "score this token tree"."""

from forerun.target.model import Target
from forerun.target.nouns import Plan, Scored
from forerun.target.padding import Buckets

__all__ = ["Buckets", "Plan", "Scored", "Target"]
