"""What is assumed where nothing was measured: acceptance by kind of text, temperature, methods. Each with its source.

Published figures of trained heads on large chat models. They are a beginning, not a promise: ``forerun plan MODEL
--drafter X --prompts FILE`` replaces all of them by a measurement.

Tokens per pass of a trained head (EAGLE-3 class) drafting a chain at temperature 0:

| text | tokens per pass | K | source |
|---|---|---|---|
| chat | 2.60 | 3 | vLLM's test of acceptance lengths: Llama-3.1-8B, EAGLE-3, MT-Bench (serving-engines sheet, 3) |
| code | 3.10 | 4 | Ling-Flash-2.0, EAGLE-3, HumanEval (serving-engines sheet, 3) |
| math | 3.41 | 4 | the same, GSM8K |
| creative | 2.09 | 4 | code times 0.91 / 1.35, the speed-ups of one MTP head on one Mac (llama.cpp; same sheet) |
| translation, summary | 1.76, 2.35 | 3 | chat times EAGLE-3's speed-ups on Spec-Bench, 2.36 and 3.14 over 3.48 |
| qa, rag | 2.20, 2.08 | 3 | the same, 2.94 and 2.78 over 3.48 (Vicuna-13B; algorithms sheet, 12.1) |

Temperature 1 leaves 0.92 of the tokens per pass at 0: mean of 4.50/4.78, 3.17/3.46, 2.46/2.76 (LK losses, K = 7;
training sheet, 8.6); between them a line, above 1 as at 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.engine.theory import alpha_of
from forerun.errors import ArgumentError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """What is known of one kind of text."""

    tokens: float
    """Per pass, bonus included, of a trained head drafting a chain of `k` at temperature 0."""
    k: int
    source: str
    trained: tuple[str, float] | None = None
    """Drafter and its speed-up on Spec-Bench, Vicuna-7B, A100, batch 1, temperature 0."""
    untrained: tuple[str, float] | None = None
    """The fastest without training of the same table."""


_BENCH = "EAGLE-3's tokens per pass on MT-Bench, scaled by its Spec-Bench speed-ups (Vicuna-13B)"
TEXTS: dict[str, Text] = {
    "chat": Text(
        tokens=2.60,
        k=3,
        source="Llama-3.1-8B, EAGLE-3, MT-Bench, T = 0, vLLM's test of acceptance lengths",
        trained=("eagle", 2.84),
        untrained=("recycling", 2.37),
    ),
    "code": Text(tokens=3.10, k=4, source="Ling-Flash-2.0, EAGLE-3, HumanEval"),
    "math": Text(
        tokens=3.41,
        k=4,
        source="Ling-Flash-2.0, EAGLE-3, GSM8K",
        trained=("eagle", 2.79),
        untrained=("recycling", 2.53),
    ),
    "creative": Text(
        tokens=3.10 * 0.91 / 1.35, k=4, source="code, scaled by one user's MTP speed-ups (0.91 over 1.35, llama.cpp)"
    ),
    "translation": Text(
        tokens=2.60 * 2.36 / 3.48, k=3, source=_BENCH, trained=("eagle", 1.88), untrained=("recycling", 2.02)
    ),
    "summary": Text(tokens=2.60 * 3.14 / 3.48, k=3, source=_BENCH, trained=("eagle", 2.34), untrained=("ngram", 2.66)),
    "qa": Text(tokens=2.60 * 2.94 / 3.48, k=3, source=_BENCH, trained=("eagle", 2.15), untrained=("recycling", 2.08)),
    "rag": Text(tokens=2.60 * 2.78 / 3.48, k=3, source=_BENCH, trained=("eagle", 2.13), untrained=("recycling", 2.02)),
}

HOT = (4.50 / 4.78 + 3.17 / 3.46 + 2.46 / 2.76) / 3
"""Tokens per pass at temperature 1 over those at 0."""


def text_named(name: str) -> Text:
    """A kind of text.

    Raises:
        ArgumentError: there are no figures for it; the message names the nearest.
    """
    key = name.lower()
    if key not in TEXTS:
        raise ArgumentError(f"no figures for text {name!r}; there are {', '.join(TEXTS)}.{nearest(key, TEXTS)}")
    return TEXTS[key]


def assumed_alpha(text: str, temperature: float) -> tuple[float, list[str]]:
    """Acceptance of a trained head on a kind of text, and what was assumed, one sentence each."""
    if temperature < 0:
        raise ArgumentError(f"temperature must be 0 (greedy) or more, got {temperature}")
    kind = text_named(text)
    share = 1 - (1 - HOT) * min(temperature, 1.0)
    tokens = max(1.0, kind.tokens * share)
    alpha = alpha_of(tokens, kind.k)
    notes = [
        f"acceptance {alpha:.2f}: a trained head reaches {kind.tokens:.2f} tokens per pass with K = {kind.k} on {text} "
        f"({kind.source})"
    ]
    if temperature > 0:
        notes.append(
            f"times {share:.2f} at temperature {temperature:g} (LK losses, three models, K = 7: T = 1 over T = 0)"
        )
    return alpha, notes
