"""Between two tokenizers: what tokens spell, which of them both know, how one reads what the other wrote.

Text is handled as bytes, because a token may hold a part of a character. Knows tokenizers; no model, no distribution,
no cache.
"""

from forerun.drafters.draft_models.translation.encoding import Encoder, Span, whole_characters
from forerun.drafters.draft_models.translation.finding import draft_tokenizer, target_tokenizer
from forerun.drafters.draft_models.translation.intersection import Intersection, require
from forerun.drafters.draft_models.translation.reading import Dictionary, TextReading, TokenReading, opening_of
from forerun.drafters.draft_models.translation.spelling import Spelling, rendering

__all__ = [
    "Dictionary",
    "Encoder",
    "Intersection",
    "Span",
    "Spelling",
    "TextReading",
    "TokenReading",
    "draft_tokenizer",
    "opening_of",
    "rendering",
    "require",
    "target_tokenizer",
    "whole_characters",
]
