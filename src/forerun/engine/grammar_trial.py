"""A child process that compiles grammars before the engine does, so that a grammar that crashes the compiler ends only
this process.

It runs as a script and imports llguidance but nothing of forerun, which would take seconds. The first line of its input
is the tokenizer, every further line a grammar. It replies to each with one line: the reason for a refusal, or nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from functools import partial
from typing import Any

STACK_BYTES = 1 << 20
"""Stack of the thread that compiles, bytes. The engine's threads have at least twice as much, so what compiles here
compiles there.
"""
MEMORY_BYTES = 2 << 30  # Limit of this process's address space
TRIAL_S = 2.0
"""Most processor time for compiling one grammar, after which this process ends. Common schemas take milliseconds. Wall
time is no measure: on a busy machine it is ten times as long.
"""
MAX_ITEMS = 15_000
"""Most items of the parser in one step; llguidance's own limit is 50,000. With a vocabulary of 128,000 tokens, a schema
of 25 alternative objects that begin alike needs 10,000, other common ones less than 2,000. An ambiguous grammar reaches
this limit after 40 ms, and 50,000 after 470 ms.
"""
_BLANKS = r"( |\n{1,2}[ \t]{0,20})?"
"""Whitespace allowed between the parts of a JSON text: on one line or indented, as models write it, but bounded."""


def compile_grammar(tokenizer: Any, kind: str, text: str) -> Any:
    """Return a matcher at the beginning of a grammar (`kind`: ``json``, ``regex`` or ``grammar``); it is in an error
    state if the grammar is wrong. Raises ValueError if the text cannot be parsed as that kind.
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
    """Return a matcher's error in one line; empty if there is none."""
    if not matcher.is_error():
        stuck = matcher.is_stopped() and not matcher.is_accepting()
        return "no text that it begins can be ended" if stuck else ""
    lines = str(matcher.get_error()).strip().split("\n")
    if lines[0].startswith("panic"):
        return "it is too large"
    reasons = [line for line in lines[1:] if line.startswith("error:")]  # A regex parser says why further down
    return " ".join([lines[0][:300], *reasons[:1]]) or "it failed"


def try_grammar(tokenizer: Any, kind: str, text: str) -> str:
    """Return the reason for which a grammar is refused; empty if it is accepted."""
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
    """Let the operating system end this process after `seconds` of processor time; 0: no limit. Outside Unix only the
    engine's deadline applies.
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
        pass  # The deadline applies
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
