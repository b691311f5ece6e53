"""Tokens coloured by where they came from, and the line of statistics. Knows rich, not the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from forerun.types import CompletionOutput, OutputToken, RequestOutput, Source, SpeculationStats

STYLES: dict[Source, str] = {
    Source.DRAFT: "on #1f4d2b",
    Source.RECOVERED: "yellow underline",
    Source.BONUS: "cyan dim",
    Source.TARGET: "",
}
COLOURLESS_STYLES: dict[Source, str] = {
    Source.DRAFT: "bold",
    Source.RECOVERED: "underline",
    Source.BONUS: "dim",
    Source.TARGET: "",
}
MEANINGS: dict[Source, str] = {
    Source.DRAFT: "accepted draft",
    Source.RECOVERED: "recovered",
    Source.BONUS: "bonus",
    Source.TARGET: "plain",
}


def styles_for(console: Console) -> dict[Source, str]:
    """Colours, or shapes alone where ``NO_COLOR`` is set."""
    return COLOURLESS_STYLES if console.no_color else STYLES


def coloured(tokens: Iterable[OutputToken], console: Console) -> Text:
    """The tokens' text, each in the style of its source; a line break is never tinted."""
    styles = styles_for(console)
    text = Text()
    for token in tokens:
        for line in token.text.splitlines(keepends=True):
            body = line.rstrip("\r\n")
            text.append(body, styles[token.source]).append(line[len(body) :])
    return text


def legend(console: Console) -> Text:
    """One line that names the styles."""
    styles = styles_for(console)
    parts = [Text(f" {meaning} ", styles[source]) for source, meaning in MEANINGS.items()]
    return Text("  ").join(parts)


def tokens_per_second(output: RequestOutput) -> float | None:
    """Decoding speed of the first answer: tokens after the first over the time after the first."""
    answer = output.outputs[0]
    if not output.decode_s or len(answer.token_ids) < 2:
        return None
    return (len(answer.token_ids) - 1) / output.decode_s


def statistics_line(output: RequestOutput) -> Text:
    """Tokens, speed and acceptance of one finished request."""
    answer = output.outputs[0]
    parts = [f"{len(answer.token_ids)} tokens"]
    speed = tokens_per_second(output)
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if output.time_to_first_token_s is not None:
        parts.append(f"first after {output.time_to_first_token_s * 1000:.0f} ms")
    stats = answer.speculation
    if stats.num_spec_steps:
        parts.append(f"{stats.mean_acceptance_length:.2f} tokens per target pass")
        parts.append(f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafted tokens kept")
    parts.append(f"ended by {answer.finish_reason}")
    return Text(" · ".join(parts), "dim")


def speculation_record(stats: SpeculationStats) -> dict[str, Any]:
    """The `speculation` object of ``--json``."""
    return {
        "steps": stats.num_spec_steps,
        "plain_steps": stats.num_plain_steps,
        "drafted": stats.num_draft_tokens,
        "accepted": stats.num_accepted_draft_tokens,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "draft_acceptance_rate": round(stats.draft_acceptance_rate, 4),
        "acceptance_per_depth": [round(share, 4) for share in stats.acceptance_per_depth],
    }


def answer_record(output: RequestOutput, answer: CompletionOutput, *, with_tokens: bool) -> dict[str, Any]:
    """One answer as ``generate --json`` prints it."""
    speed = tokens_per_second(output)
    record: dict[str, Any] = {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "speculation": speculation_record(answer.speculation),
        "time_to_first_token_s": output.time_to_first_token_s,
        "tokens_per_second": None if speed is None else round(speed, 3),
    }
    if with_tokens:
        record["tokens"] = [
            {"id": token.id, "text": token.text, "source": str(token.source)} for token in answer.tokens
        ]
    return record
