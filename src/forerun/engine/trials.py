"""The process that tries grammars (`grammar_trial`): started when first needed, and again when one has ended it.

Knows no grammar.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forerun.engine import grammar_trial

TRIAL_S = 2.0
"""Time to compile one grammar, seconds; ordinary schemas take some milliseconds."""
START_S = 60.0
"""Time for the process to start: a tokenizer of 256,000 tokens takes seconds on a machine that is busy."""


class Trials:
    """Tries one grammar at a time.

    Args:
        tokenizer: what llguidance's tokenizer is made from, as keywords.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        self._tokenizer = dict(tokenizer)
        self._process: subprocess.Popen[str] | None = None
        self._over: Callable[[], object] = lambda: None

    def tried(self, kind: str, text: str) -> str:
        """Why a grammar is refused; empty where it is not."""
        process = self._started()
        answer = _asked(process, {"kind": kind, "text": text}, TRIAL_S)
        if answer is None:
            return f"is too complex: it took more than {TRIAL_S:g} s, or more memory than there is, to compile"
        return answer

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._over()
            # -P: the modules beside the script are not its own.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(grammar_trial.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
            self._over = weakref.finalize(self, _ended, self._process)
            if _asked(self._process, self._tokenizer, START_S) is None:
                raise RuntimeError("the process that tries grammars does not start")
        return self._process


def _asked(process: subprocess.Popen[str], question: Mapping[str, Any], seconds: float) -> str | None:
    """The process's answer; None, and its end, where there is none in so many seconds."""
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    finally:
        timer.cancel()
    if answer.endswith("\n"):
        return str(json.loads(answer))
    _ended(process)
    return None


def _ended(process: subprocess.Popen[str]) -> None:
    """End the process and collect it."""
    process.kill()
    with suppress(OSError), process:  # closes its pipes, in which something may be left, and waits for it
        pass
