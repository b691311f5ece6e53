"""A transformers causal language model, seen as "score this token tree"."""

from forerun.target.buckets import Buckets
from forerun.target.model import Target
from forerun.target.nouns import Plan, Scored

__all__ = ["Buckets", "Plan", "Scored", "Target"]
