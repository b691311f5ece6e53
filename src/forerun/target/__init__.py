"""A transformers causal language model, seen as "score this token tree"."""

from forerun.target.buckets import Buckets
from forerun.target.model import Target
from forerun.target.nouns import Plan, Resume, Scored

__all__ = ["Buckets", "Plan", "Resume", "Scored", "Target"]
