"""Clients that leave in the middle, and servers that are told to: the others notice nothing, and all ends in time."""

import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.engine.prompts import LARGE
from forerun.serve import guards
from ports import free_ports
from selection import slow
from serve.conftest import Live, counters, serving, wait_for
from serve.test_connections import connected, posted

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
ENDS_SLOWLY = """
import atexit, time
atexit.register(time.sleep, 5)
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
    """What came back: a status and a text; of an error 0 and what it says."""
    threads: list[threading.Thread] = field(default_factory=list)

    def post(self, body: dict[str, Any], times: int = 1, path: str = "/v1/completions") -> None:
        """Ask in the background."""

        def ask() -> None:
            try:
                answer = httpx.post(self.url + path, json=body, timeout=60)
                self.heard.append((answer.status_code, answer.text))
            except httpx.HTTPError as error:
                self.heard.append((0, repr(error)))

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
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        self.send(head.encode() + b"\r\n\r\n" + text)

    def busy(self) -> None:
        """Until a request is on its way."""
        taken_on = re.compile(r"^forerun:answers_admitted_total.* (?!0\.0$)", re.MULTILINE)
        wait_for(lambda: taken_on.search(httpx.get(self.url + "/metrics").text))

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
    signals: tuple[int, ...] = (signal.SIGTERM,)
    ready: bool = True
    """Wait until it is."""
    dumps: bool = False
    """Python may still run and not come to its end: a traceback says where."""
    running: bool = False
    """Wait until something runs."""


MUCH = {**SHORT, "logprobs": 20, "n": 16, "max_tokens": 60}
SLOW = SLOWER.format(seconds=0.1)
STREAM = {"stream": True}
DRAINS = {
    "idle": Drain(drain_s=5),
    "idle, Ctrl-C": Drain(signals=(signal.SIGINT,)),
    "while it loads": Drain(ready=False, patch=LOADS_FOR_EVER),
    "an answer that ends in time": Drain(load=lambda a: a.post(LONG), running=True, drain_s=10),
    "a stream that ends in time": Drain(load=lambda a: a.post(LONG | STREAM), running=True, drain_s=10),
    "many answers that end in time": Drain(load=lambda a: a.post(SHORT, times=12), running=True, drain_s=10),
    "no time at all": Drain(load=lambda a: a.post(LONG), running=True, drain_s=0, code=1, patch=SLOW),
    "an answer that takes too long": Drain(load=lambda a: a.post(LONG), running=True, code=1, patch=SLOW),
    "a stream that takes too long": Drain(load=lambda a: a.post(LONG | STREAM), running=True, code=1, patch=SLOW),
    "a queue that takes too long": Drain(load=lambda a: a.post(LONG, times=40), running=True, code=1, patch=SLOW),
    "an answer nobody reads": Drain(load=lambda a: a.unread(MUCH), running=True, drain_s=8),
    "a stream nobody reads": Drain(load=lambda a: a.unread(MUCH | STREAM | {"max_tokens": 200}), running=True, code=1),
    "half a head": Drain(load=lambda a: a.send(b"POST /v1/completions HTTP/1.1\r\nhost:")),
    "half a body": Drain(
        load=lambda a: a.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
    ),
    "fifty connections that say nothing": Drain(load=lambda a: [a.send(b"") for _ in range(50)]),
    "requests that keep coming": Drain(load=lambda a: a.flood(), running=True, drain_s=3),
    "a frozen engine": Drain(load=lambda a: a.post(SHORT), running=True, code=1, patch=SLEEPS),
    "a frozen engine, many wait": Drain(
        load=lambda a: a.post(SHORT | STREAM, times=20), running=True, code=1, patch=SLEEPS
    ),
    "a frozen engine, nobody waits": Drain(load=_leave, patch=SLEEPS),
    "the interpreter is held": Drain(
        load=lambda a: a.post(SHORT), running=True, code=1, patch=HOLDS_THE_INTERPRETER, dumps=True
    ),
    "a blocked event loop": Drain(
        load=lambda a: (a.post(SHORT), time.sleep(0.5)), code=1, patch=BLOCKS_THE_LOOP, dumps=True
    ),
    "an engine that cannot be closed": Drain(patch=CLOSES_FOR_EVER),
    "an interpreter that ends slowly": Drain(
        load=lambda a: a.post(LONG | STREAM), running=True, code=1, patch=SLOW + ENDS_SLOWLY
    ),
    "a second signal": Drain(
        **{"load": lambda a: a.post(LONG), "running": True, "code": -signal.SIGTERM, "drain_s": 30, "patch": SLOW},
        signals=(signal.SIGTERM, signal.SIGTERM),
    ),
}


@contextmanager
def served(drain: Drain, model: Path) -> Iterator[tuple[subprocess.Popen[str], Asked]]:
    """The server's process, ready and busy as it shall be."""
    [port] = free_ports(1)
    words = ["serve", str(model), "--port", str(port), "--dtype", "float32", "--drain-s", str(drain.drain_s)]
    # A shell starts background jobs without Ctrl-C, and their children inherit that.
    heard = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heard}\n{drain.patch}\nimport sys\nfrom forerun.cli import main\nsys.exit(main({words!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    with ExitStack() as stack:
        stack.enter_context(process)
        stack.callback(process.kill)
        asked = Asked(f"http://127.0.0.1:{port}", stack)
        wait_for(lambda: _health(asked.url) == (200 if drain.ready else 503), seconds=60)
        drain.load(asked)
        if drain.running:
            asked.busy()
        yield process, asked


def ended(drain: Drain, model: Path) -> tuple[int | None, float, str, list[Any]]:
    """Exit code (None: it had to be killed), seconds since the signal, what it wrote and what its clients heard."""
    with served(drain, model) as (process, asked):
        began = time.monotonic()
        for number in drain.signals:
            process.send_signal(number)
            time.sleep(0.3 if len(drain.signals) > 1 else 0)
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


def _health(url: str) -> int:
    try:
        return httpx.get(url + "/health").status_code
    except httpx.HTTPError:
        return 0


FAST = ("an interpreter that ends slowly", "many answers that end in time")


@pytest.mark.parametrize("name", [*FAST, *slow(*DRAINS)])
def test_the_process_ends(name: str, checkpoint: Path, request: pytest.FixtureRequest) -> None:
    drain = DRAINS[name]
    code, seconds, written, heard = ended(drain, checkpoint)
    assert code == drain.code, written
    if request.node.get_closest_marker("slow"):
        assert seconds <= drain.drain_s + SLACK_S
    if code == 0:
        assert all(status == 200 or "the server is draining" in text for status, text in heard)
    cut = [text for status, text in heard if "the server was stopped" in text]
    assert "Timeout" not in written or drain.dumps, written
    assert bool(cut) == (code == 1 and bool(heard)) or drain.dumps
    if cut:
        assert "cut off at the end of the drain time" in written
        counted = re.findall(r"route=/v1/completions status=.* prompt_tokens=\d completion_tokens=(\d+) ", written)
        assert counted and (drain.patch == SLEEPS or max(map(int, counted)) > 0), "of what was cut, too"


TEXT = "/v1/completions"
PROMPTS = ("the cat sat on", "the dog", "a log and a mat", "on the mat and")


def body(prompt: str, tokens: int = 40, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def leave(live: Live, seed: int) -> None:
    """Asks in one of several ways and goes at a moment of its own."""
    choose = random.Random(seed)
    chosen = choose.choice(({"enabled": False}, {"drafter": "ngram"}, {"num_speculative_tokens": 2}, None))
    asked = body(choose.choice(PROMPTS), 64, n=choose.randint(1, 3), stream=bool(seed % 2))
    if chosen is not None:
        asked["speculative"] = chosen
    if not asked["stream"]:
        with suppress(httpx.TimeoutException):
            httpx.post(live.url + TEXT, json=asked, timeout=httpx.Timeout(30, read=0.01 + 0.1 * choose.random()))
        return
    with httpx.stream("POST", live.url + TEXT, json=asked, timeout=30) as answer:
        for _, _ in zip(answer.iter_raw(), range(choose.randint(0, 4)), strict=False):
            pass


def test_others_leave_and_nobody_else_notices(live: Live) -> None:
    alone = {prompt: live.post(TEXT, body(prompt)).json()["choices"][0]["text"] for prompt in PROMPTS}
    before = counters(live)
    found = list[tuple[str, str]]()

    def stay(prompt: str) -> None:
        for _ in range(3):
            answer = live.post(TEXT, body(prompt))
            while answer.status_code == 429:
                answer = live.post(TEXT, body(prompt))
            found.append((prompt, answer.json()["choices"][0]["text"]))

    staying = [threading.Thread(target=stay, args=(prompt,)) for prompt in PROMPTS]
    leaving = [threading.Thread(target=leave, args=(live, seed)) for seed in range(16)]
    for thread in (*staying, *leaving):
        thread.start()
    for thread in (*staying, *leaving):
        thread.join(timeout=60)
    assert len(found) == 3 * len(PROMPTS) and all(text == alone[prompt] for prompt, text in found)
    wait_for(lambda: live.session.in_flight == 0 and not live.llm.engine.busy)
    assert live.llm.target.lengths == [0] * 4, "the rows are free"

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in counters(live).items() if key.startswith(name))

    assert grown('vllm:request_success_total{finished_reason="abort"') > 0
    wait_for(lambda: grown("forerun:answers_admitted_total") == grown("vllm:request_success_total"))


def test_who_leaves_before_a_first_token_gives_the_place_up(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all rows are busy: nothing has been sent whose failure would tell that nobody is there."""
    messages, release = [{"role": "user", "content": "the cat"}], threading.Event()
    asked: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": ["the", "the cat"]}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "the cat"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 9}),
    ]
    with serving(checkpoint) as live:
        engine = live.llm.engine
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: (release.wait(30), step())[1])
        for stream in (True, False):
            for path, more in asked:
                with connected(live) as leaving:
                    leaving.sendall(posted({**more, "stream": stream}, path))
                    wait_for(lambda: live.session.in_flight)
                wait_for(lambda: not live.session.in_flight)
        release.set()
        wait_for(lambda: not engine.busy)
        assert live.post(TEXT, body("the", 3)).status_code == 200


def test_what_waits_to_be_read_goes_when_its_client_leaves(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, release, seen = guards.read_json, threading.Event(), list[int]()

    def slow(content: bytes) -> Any:
        seen.append(len(content))
        release.wait(30)
        return read(content)

    def ended() -> float:
        wanted = 'forerun:http_requests_total{route="/tokenize"'
        return sum(count for name, count in counters(live).items() if name.startswith(wanted))

    with serving(checkpoint) as live:
        monkeypatch.setattr(guards, "read_json", slow)
        for _ in range(3):
            with connected(live) as leaving:
                leaving.sendall(posted({"prompt": "the cat " * LARGE}, "/tokenize"))
                wait_for(lambda: seen)
        wait_for(lambda: ended() == 3)
        release.set()
        assert live.post("/tokenize", {"prompt": "the cat " * LARGE}).status_code == 400  # beyond the context
        assert len(seen) == 2, "one was being read, and the last one"
