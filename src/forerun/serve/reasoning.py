"""This module reads the reasoning that a model writes before its final text, between marks."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ArgumentError, choices
from forerun.serve.tools.base import ToolFormat
from forerun.serve.tools.incoming import Incoming, Kind, Piece, Steps


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around the reasoning."""

    open: str
    close: str
    inside: bool = False  # Every completion begins within the reasoning, whether or not anything opened it


PARSERS: dict[str, Marks] = {
    "qwen3": Marks("<think>", "</think>"),
    "deepseek_r1": Marks("<think>", "</think>", inside=True),
    "mistral": Marks("[THINK]", "[/THINK]"),
    "seed_oss": Marks("<seed:think>", "</seed:think>"),
}


def find_marks(parser: str, template: str) -> Marks | None:
    """Return the marks of a ``--reasoning-parser``: a name, two marks with a blank between them,
    ``none``, or ``auto``.
    """
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
    parsers = ("auto", "none", *PARSERS)
    marks = "or give two marks such as '<think> </think>'"
    raise ArgumentError(f"there is no reasoning-parser {parser!r}.{choices(parser, parsers)[:-1]}; {marks}.")


def begins_inside(marks: Marks, prompt: str) -> bool:
    """Return whether a completion of this prompt begins within the reasoning, which the template has
    opened at its end.
    """
    return marks.inside or prompt.rstrip().endswith(marks.open)


def read_reasoning(text: Incoming, marks: Marks, calls: ToolFormat | None, *, inside: bool) -> Steps[bool]:
    """Read the reasoning at the beginning of a completion, without its marks and the blanks around
    them.

    Nothing is read where there is none. Reasoning that is never closed goes on to the end of the
    text, or to a call, which is read, too; returns whether one was. Whether it was a call shows at
    the end: a call in reasoning that is closed was a thought.
    """
    start = text.at
    opened = yield from text.opens(marks.open)
    if not opened and not inside:
        text.at = start
        return False
    yield from text.skip_blanks()
    more = () if calls is None else (calls.mark,)
    while (end := (yield from text.until(marks.close, Kind.REASONING, *more))) is not None:
        behind = text.at
        if text.text.endswith(marks.close, 0, behind):
            yield from text.skip_blanks()
            break
        if calls is not None and not (yield from text.holds(marks.close)) and (yield from calls.read_calls(text)):
            text.reasoned = end
            return True
        text.at = behind
        yield Piece(Kind.REASONING, text.text[end:behind])
    text.reasoned = text.at
    return False
