"""Ways in which a server is when it is told to end: what it does, who asks it, and the exit code that must follow.

    python tests/serve/drains.py [NAME ...]

runs each as a real process and prints its exit code and the seconds from the signal to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from ports import free_ports

SLACK_S = 1.0
"""After the drain time the process may still be there for so long."""
GIVEN_UP_S = 20.0
"""A process that is still there is killed."""
SHORT = {"prompt": "the", "max_tokens": 20, "ignore_eos": True, "temperature": 0}
LONG = {**SHORT, "max_tokens": 200}

SLOWER = """
import time
from forerun.engine.core import Engine
step = Engine.step
def slow(self):
    time.sleep({seconds})
    return step(self)
Engine.step = slow
"""
SLEEPS = SLOWER.format(seconds=1e6)
HOLDS_THE_INTERPRETER = """
import re, time
from forerun.engine.core import Engine
Engine.step = lambda self: time.sleep(1.5) or re.match("(a+)+$", "a" * 64 + "b")
"""
"""No thread of Python's runs any longer, from a second after the signal on."""
LOADS_FOR_EVER = """
import time
import forerun.engine.llm
forerun.engine.llm.load_tokenizer = lambda *_: time.sleep(1e6)
"""
BLOCKS_THE_LOOP = """
import time
import forerun.serve.app
forerun.serve.app.check_model = lambda *_: time.sleep(1e6)
"""
CLOSES_FOR_EVER = """
import asyncio
from forerun import AsyncLLM
AsyncLLM.close = lambda self: asyncio.sleep(1e6)
"""


@dataclass
class Asked:
    """A server that runs, and who talks to it."""

    url: str
    stack: ExitStack
    heard: list[Any] = field(default_factory=list)
    """What came back: a status and a text, or an error."""
    threads: list[threading.Thread] = field(default_factory=list)

    def post(self, body: dict[str, Any], times: int = 1, path: str = "/v1/completions") -> None:
        """Ask in the background."""

        def ask() -> None:
            try:
                answer = httpx.post(self.url + path, json=body, timeout=60)
                self.heard.append((answer.status_code, answer.text))
            except httpx.HTTPError as error:
                self.heard.append(repr(error))

        for _ in range(times):
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            self.threads.append(thread)

    def send(self, content: bytes) -> socket.socket:
        """Say this and read nothing."""
        host, port = self.url.removeprefix("http://").split(":")
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        one.connect((host, int(port)))
        self.stack.callback(one.close)
        one.sendall(content)
        return one

    def unread(self, body: dict[str, Any]) -> None:
        """Ask and read nothing."""
        text = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        )
        self.send(head.encode() + b"\r\n\r\n" + text)

    def busy(self) -> None:
        """Until a request is on its way."""
        end = time.monotonic() + 20
        while "num_requests_running" in (text := httpx.get(self.url + "/metrics").text) and time.monotonic() < end:
            if any(
                line.startswith("forerun:answers_admitted_total") and not line.endswith(" 0.0")
                for line in text.splitlines()
            ):
                return
            time.sleep(0.01)
        raise AssertionError("nothing was taken on")

    def flood(self) -> None:
        """Ask again and again until nobody answers."""

        def ask() -> None:
            with contextlib.suppress(httpx.HTTPError):
                while True:
                    httpx.post(self.url + "/v1/completions", json=SHORT, timeout=60)

        for _ in range(4):
            threading.Thread(target=ask, daemon=True).start()


def _leave(asked: Asked) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(asked.url + "/v1/completions", json=LONG, timeout=0.5)


@dataclass(frozen=True, kw_only=True)
class Drain:
    """One way."""

    load: Callable[[Asked], object] = lambda asked: None
    code: int = 0
    patch: str = ""
    """Run in the server's process before it starts."""
    drain_s: float = 1.0
    hidden_states: tuple[int, ...] = (signal.SIGTERM,)
    ready: bool = True
    """Wait until it is."""
    running: bool = False
    """Wait until something runs."""
    words: tuple[str, ...] = ()


MUCH = {**SHORT, "logprobs": 20, "n": 16, "max_tokens": 60}
DRAINS = {
    "idle": Drain(drain_s=5),
    "idle, Ctrl-C": Drain(hidden_states=(signal.SIGINT,)),
    "while it loads": Drain(ready=False, patch=LOADS_FOR_EVER),
    "an answer that ends in time": Drain(load=lambda a: a.post(LONG), running=True, drain_s=10),
    "a stream that ends in time": Drain(load=lambda a: a.post(LONG | {"stream": True}), running=True, drain_s=10),
    "many answers that end in time": Drain(load=lambda a: a.post(SHORT, times=12), running=True, drain_s=10),
    "no time at all": Drain(
        load=lambda a: a.post(LONG), running=True, drain_s=0, code=1, patch=SLOWER.format(seconds=0.1)
    ),
    "an answer that takes too long": Drain(
        load=lambda a: a.post(LONG), running=True, code=1, patch=SLOWER.format(seconds=0.1)
    ),
    "a stream that takes too long": Drain(
        load=lambda a: a.post(LONG | {"stream": True}), running=True, code=1, patch=SLOWER.format(seconds=0.1)
    ),
    "a queue that takes too long": Drain(
        load=lambda a: a.post(LONG, times=40), running=True, code=1, patch=SLOWER.format(seconds=0.1)
    ),
    "an answer nobody reads": Drain(load=lambda a: a.unread(MUCH), running=True, drain_s=8),
    "a stream nobody reads": Drain(
        load=lambda a: a.unread(MUCH | {"stream": True, "max_tokens": 200}), running=True, code=1
    ),
    "half a head": Drain(load=lambda a: a.send(b"POST /v1/completions HTTP/1.1\r\nhost:")),
    "half a body": Drain(
        load=lambda a: a.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    ),
    "fifty connections that say nothing": Drain(load=lambda a: [a.send(b"") for _ in range(50)]),
    "requests that keep coming": Drain(load=lambda a: a.flood(), running=True, drain_s=3),
    "a frozen engine": Drain(load=lambda a: a.post(SHORT), running=True, code=1, patch=SLEEPS),
    "a frozen engine, many wait": Drain(
        load=lambda a: a.post(SHORT | {"stream": True}, times=20), running=True, code=1, patch=SLEEPS
    ),
    "a frozen engine, nobody waits": Drain(load=_leave, patch=SLEEPS),
    "an engine that holds the interpreter": Drain(
        load=lambda a: a.post(SHORT), running=True, code=1, patch=HOLDS_THE_INTERPRETER
    ),
    "an event loop that is blocked": Drain(
        load=lambda a: (a.post(SHORT), time.sleep(0.5)), code=1, patch=BLOCKS_THE_LOOP
    ),
    "an engine that cannot be closed": Drain(patch=CLOSES_FOR_EVER),
    "a second signal": Drain(
        load=lambda a: a.post(LONG),
        running=True,
        code=-signal.SIGTERM,
        drain_s=30,
        patch=SLOWER.format(seconds=0.1),
        hidden_states=(signal.SIGTERM, signal.SIGTERM),
    ),
}
"""Name -> way."""


@contextmanager
def served(drain: Drain, model: Path) -> Iterator[tuple[subprocess.Popen[str], Asked]]:
    """The server's process, ready and busy as it shall be."""
    [port] = free_ports(1)
    words = [
        "serve",
        str(model),
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--drain-s",
        str(drain.drain_s),
        *drain.words,
    ]
    code = f"{drain.patch}\nimport sys\nfrom forerun.cli import main\nsys.exit(main({words!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    with ExitStack() as stack:
        stack.enter_context(process)
        stack.callback(process.kill)
        asked = Asked(f"http://127.0.0.1:{port}", stack)
        _until(lambda: _health(asked.url) == (200 if drain.ready else 503))
        drain.load(asked)
        if drain.running:
            asked.busy()
        yield process, asked


def ended(drain: Drain, model: Path) -> tuple[int | None, float, str, list[Any]]:
    """Exit code (None: it had to be killed), seconds since the signal, what it wrote and what its clients heard."""
    with served(drain, model) as (process, asked):
        began = time.monotonic()
        for number in drain.hidden_states:
            process.send_signal(number)
            time.sleep(0.3 if len(drain.hidden_states) > 1 else 0)
        code: int | None
        try:
            code = process.wait(timeout=drain.drain_s + GIVEN_UP_S)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
        process.kill()
        for thread in asked.threads:
            thread.join(10)
        written = process.communicate()[1]
    return code, seconds, written, asked.heard


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the server did not come up"
        time.sleep(0.05)


def _health(url: str) -> int:
    try:
        return httpx.get(url + "/health").status_code
    except httpx.HTTPError:
        return 0


def run_all(names: list[str]) -> None:
    """Print how each ends."""
    from engine.conftest import _write

    os.environ["COLUMNS"] = "200"
    with tempfile.TemporaryDirectory() as folder:
        model = _write(Path(folder), seed=0, layers=2)
        good = 0
        for name in names:
            drain = DRAINS[name]
            code, seconds, written, heard = ended(drain, model)
            in_time = code is not None and seconds <= drain.drain_s + SLACK_S
            good += in_time and code == drain.code
            what = f"{name:40} code {code} ({drain.code}) {seconds:5.2f} s of {drain.drain_s:g}"
            print(what, "" if in_time else "LATE", str(heard)[:60], written[-100:].encode(), flush=True)  # noqa: T201
        print(f"{good} of {len(names)} within the drain time + {SLACK_S:g} s and with their code")  # noqa: T201


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print what becomes of servers that are told to end.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a way to end; all of them if none is given")
    run_all(parser.parse_args().names or list(DRAINS))
