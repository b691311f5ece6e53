"""Reasoning that a model writes before its answer, between marks."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ArgumentError, choices
from forerun.serve.tools.incoming import Incoming, Kind, Steps


@dataclass(frozen=True, slots=True)
class Marks:
    """What encloses the reasoning."""

    open: str
    close: str
    inside: bool = False  # Every answer begins within the reasoning, whether or not anything opened it


PARSERS: dict[str, Marks] = {
    "qwen3": Marks("<think>", "</think>"),
    "deepseek_r1": Marks("<think>", "</think>", inside=True),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def marks_of(parser: str, template: str) -> Marks | None:
    """The marks of a ``--reasoning-parser``: a name, two marks with a blank between them, ``none``, or ``auto``."""
    if parser == "none":
        return None
    if parser == "auto":
        shown = (marks for marks in PARSERS.values() if marks.open in template or marks.close in template)
        return next(shown, None)
    if parser in PARSERS:
        return PARSERS[parser]
    both = parser.split()
    if len(both) == 2:
        return Marks(both[0], both[1])
    known = ("auto", "none", *PARSERS)
    marks = "or give two marks such as '<think> </think>'"
    raise ArgumentError(f"there is no reasoning-parser {parser!r}.{choices(parser, known)[:-1]}; {marks}.")


def begins_inside(marks: Marks, prompt: str) -> bool:
    """Whether an answer to this prompt begins within the reasoning: the template has opened it at the prompt's end."""
    return marks.inside or prompt.rstrip().endswith(marks.open)


def read_reasoning(text: Incoming, marks: Marks, *, inside: bool) -> Steps[None]:
    """Read the reasoning at the beginning of an answer, without its marks and the blanks around them; nothing where
    there is none. Reasoning that is never closed goes on to the end of the text."""
    start = text.at
    opened = yield from text.opens(marks.open)
    if not opened and not inside:
        text.at = start
        return
    yield from text.skip_blanks()
    yield from text.until(marks.close, Kind.REASONING)
    yield from text.skip_blanks()
    text.reasoned = text.at
