"""A child process that compiles grammars before the engine does: one that crashes the compiler ends
only this process.

Run as a script: it imports llguidance and nothing of forerun, which would take seconds. The first line of its input
is the tokenizer, every other one a grammar; each is answered by a line: why it is refused, or nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from functools import partial
from typing import Any

STACK_BYTES = 1 << 20
"""Stack of the thread that compiles here. Threads of the engine have at least twice as much: what
fits here fits there.
"""
MEMORY_BYTES = 2 << 30  # Address space of this process
TRIAL_S = 2.0
"""Processor time for compiling one grammar; beyond it this process ends. Ordinary schemas take
milliseconds. By the clock they take ten times as long where others work.
"""
MAX_ITEMS = 15_000
"""Most items of the parser in one step; llguidance's own limit is 50,000. With 128,000 tokens a
schema of 25 alternatives, objects that begin alike, needs 10,000, other ordinary ones less than
2,000. An ambiguous grammar takes 40 ms to get to this limit, and 470 ms to get to 50,000.
"""
_BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
"""Whitespace between the parts of a JSON text: as models write it, on one line or indented, but no
answer full of blanks.
"""


def compile_grammar(tokenizer: Any, kind: str, text: str) -> Any:
    """Return a matcher at the beginning of a grammar (`kind` ``json``, ``regex`` or ``grammar``),
    or in an error state. Raises ValueError if the text is none of its kind.
    """
    from llguidance import LLMatcher, LLParserLimits

    grammars: dict[str, Any] = {
        "json": partial(LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": _BLANKS}),
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    limits = LLParserLimits(step_max_items=MAX_ITEMS, verbose_errors=False)
    return LLMatcher(tokenizer, grammars[kind](text), log_level=0, limits=limits)


def complaint(matcher: Any) -> str:
    """Return why a matcher cannot go on, in one line; empty if it can."""
    if not matcher.is_error():
        stuck = matcher.is_stopped() and not matcher.is_accepting()
        return "no text that it begins can be ended" if stuck else ""
    first = str(matcher.get_error()).strip().split("\n", 1)[0]
    return "it is too large" if first.startswith("panic") else first[:300] or "it failed"


def try_grammar(tokenizer: Any, kind: str, text: str) -> str:
    """Return why a grammar is refused; empty if it is not."""
    try:
        matcher = compile_grammar(tokenizer, kind, text)
    except ValueError as error:
        return f"cannot be read: {str(error)[:300]}"
    if not (why := complaint(matcher)):
        own = matcher.deep_copy()
        own.compute_bitmask()
        why = complaint(own)
    return f"is not accepted: {why}" if why else ""


def _answer_all() -> None:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    _say("")
    for line in sys.stdin:
        _limit(TRIAL_S)
        why = try_grammar(tokenizer, **json.loads(line))
        _limit(0.0)
        _say(why)


def _limit(seconds: float) -> None:
    """End this process after so much processor time; 0: never. On systems other than Unix only the
    deadline does.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _say(why: str) -> None:
    sys.stdout.write(json.dumps(why) + "\n")
    sys.stdout.flush()


def _main() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (ImportError, ValueError, OSError):
        pass  # the deadline is left
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
