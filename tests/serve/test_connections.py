"""Connections in crowds, that never say what they want or never read the answer; every attack that we know; no leak."""

import asyncio
import gc
import json
import re
import resource
import selectors
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from forerun import AsyncLLM
from forerun.errors import ArgumentError
from forerun.serve import server as http_server
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings
from serve.conftest import NAME, Live, counters, serving, wait_for

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def connected(live: Live, *, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """A raw connection."""
    address = urlsplit(live.url)
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect((address.hostname, address.port))
        yield connection


def everything(connection: socket.socket) -> tuple[int, str, dict[str, Any]]:
    """Status, headers and JSON of an answer after which the server closes."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), json.loads(body)


def healthy(connection: socket.socket) -> bool:
    """Asks once more on the same connection."""
    received = b""
    while not received.endswith(b'"}'):
        received += connection.recv(4096)
    return received.startswith(b"HTTP/1.1 200")


def posted(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_more_connections_than_allowed_are_told_to_come_back(checkpoint: Path) -> None:
    with serving(checkpoint, max_connections=10) as small:
        with ExitStack() as stack:
            kept = [stack.enter_context(connected(small)) for _ in range(10)]
            for connection in kept:
                connection.sendall(HEALTH)
                assert healthy(connection)
            with connected(small) as late:
                late.sendall(HEALTH)
                status, head, body = everything(late)
            assert status == 503 and "retry-after: 1" in head and "connection: close" in head
            assert body["error"]["code"] == "too_many_connections" and body["error"]["type"] == "server_error"
            kept[0].sendall(HEALTH)
            assert healthy(kept[0]), "who is in stays in"
        wait_for(lambda: small.get("/health").status_code == 200)
        assert counters(small)['forerun:connections_refused_total{code="too_many_connections"}'] == 1


def test_a_crowd_is_answered_to_the_last(checkpoint: Path) -> None:
    """300 connections, half of them while every place is taken: each gets a whole answer, nobody is hung up on."""
    statuses = list[int]()
    with serving(checkpoint, max_connections=20) as small, ExitStack() as stack, ExitStack() as places:
        for _ in range(20):
            kept = places.enter_context(connected(small))
            kept.sendall(HEALTH)
            assert healthy(kept)
        with selectors.DefaultSelector() as waiting:
            for number in range(300):
                if number == 150:
                    places.close()
                    wait_for(lambda: small.get("/health").status_code == 200)
                connection = stack.enter_context(connected(small))
                connection.sendall(HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                waiting.register(connection, selectors.EVENT_READ)
            while waiting.get_map():
                for key, _ in waiting.select(timeout=20):
                    assert isinstance(key.fileobj, socket.socket)
                    waiting.unregister(key.fileobj)
                    statuses.append(everything(key.fileobj)[0])
        assert len(statuses) == 300 and set(statuses) == {200, 503}
        assert small.get("/health").status_code == 200


def test_a_refusal_is_read_though_the_request_never_was(checkpoint: Path) -> None:
    """Closing a socket that holds unread bytes resets it; both ask before the server accepts anybody."""
    session = Session(ServeSettings(model_names=(NAME,), max_connections=1), lambda: AsyncLLM(str(checkpoint)))
    listener = socket.create_server(("127.0.0.1", 0))
    with (
        socket.create_connection(listener.getsockname()) as first,
        socket.create_connection(first.getpeername()) as late,
    ):
        first.sendall(HEALTH)
        late.sendall(HEALTH)
        server = http_server.server(session, host="127.0.0.1", port=0)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        status, _, body = everything(late)
        assert status == 503 and body["error"]["code"] == "too_many_connections"
    wait_for(lambda: session.state is not State.LOADING)
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nX-Slow: ",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{",
    ],
    ids=["nothing", "half a header", "half a body"],
)
@pytest.mark.parametrize("second", [False, True])
def test_a_request_that_does_not_arrive_is_given_up(hasty: Live, sent: bytes, second: bool) -> None:
    if second and not sent:
        pytest.skip("a connection may rest between requests")
    with connected(hasty) as connection:
        if second:
            connection.sendall(HEALTH)
            assert healthy(connection)
        connection.sendall(sent)
        status, _, body = everything(connection)
    assert status == 408 and body["error"]["code"] == "request_timeout"
    assert hasty.session.in_flight == 0


def test_an_answer_may_take_longer_than_a_request(hasty: Live) -> None:
    with connected(hasty) as connection:
        connection.sendall(posted({"prompt": "the", "max_tokens": 150, "ignore_eos": True, "n": 4}))
        received = b""
        while b'"usage"' not in received:
            received += (piece := connection.recv(65536))
            assert piece, received


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", b"GET /health HTTP/1.1\r\nX: " + b"x" * 200_000 + b"\r\n\r\n"]
)
def test_what_is_not_http_gets_the_envelope_too(live: Live, sent: bytes) -> None:
    with connected(live) as connection:
        connection.sendall(sent)
        status, _, body = everything(connection)
    assert status == 400 and body["error"]["code"] == "invalid_http"


@pytest.fixture(scope="module")
def hasty(checkpoint: Path) -> Iterator[Live]:
    """A server that waits for nobody."""
    with serving(checkpoint, receive_timeout_s=0.25) as running_one:
        yield running_one


WORDY = {"prompt": "the", "max_tokens": 150, "ignore_eos": True, "n": 4, "logprobs": 5}


def test_a_stream_that_nobody_reads_loses_its_rows(checkpoint: Path) -> None:
    with serving(checkpoint, send_buffer=4096, stream_buffer=8, send_timeout_s=0.5) as impatient:
        with connected(impatient, receive_buffer=2048) as deaf:
            deaf.sendall(posted({**WORDY, "stream": True}))
            wait_for(lambda: counters(impatient).get('vllm:request_success_total{finished_reason="abort"}') == 4)
            llm = impatient.llm
            wait_for(lambda: not llm.engine.busy and impatient.session.in_flight == 0)
            assert counters(impatient)["forerun:answers_admitted_total{}"] == 4
        assert impatient.post("/v1/completions", {"prompt": "the", "max_tokens": 2}).status_code == 200


def test_an_answer_that_nobody_reads_is_cut_off(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with (
        serving(checkpoint, send_buffer=4096, send_timeout_s=0.3) as impatient,
        connected(impatient, receive_buffer=2048) as deaf,
    ):
        deaf.sendall(posted(WORDY))
        wait_for(lambda: "its connection was cut" in caplog.text)
        received = b""
        while piece := deaf.recv(1 << 20):
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        [length] = re.findall(rb"content-length: (\d+)", head.lower())
        assert len(body) < int(length), "cut in the middle"
        assert counters(impatient)['forerun:connections_refused_total{code="unread"}'] == 1


def test_who_reads_slowly_is_served(checkpoint: Path) -> None:
    with (
        serving(checkpoint, send_buffer=4096, stream_buffer=1000, send_timeout_s=1.0) as patient,
        connected(patient, receive_buffer=2048) as slow,
    ):
        slow.sendall(posted({"prompt": "the", "max_tokens": 60, "ignore_eos": True, "logprobs": 20, "stream": True}))
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += (piece := slow.recv(2048))
            assert piece
        assert b"data: [DONE]" in received


def test_limits_of_the_machine_are_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    http_server.allow_files(1000)
    assert raised == []
    http_server.allow_files(2000)
    assert raised == [(2000, 4096)]
    with pytest.raises(ArgumentError, match="lower --max-connections by 904"):
        http_server.allow_files(5000)


def test_the_first_bytes_of_an_answer_wait_for_no_acknowledgement(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, made = list[int](), http_server.Connection.connection_made

    def noted(self: http_server.Connection, transport: Any) -> None:
        made(self, transport)
        connection = transport.get_extra_info("socket")
        seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(http_server.Connection, "connection_made", noted)
    live.get("/health")
    assert seen == [1]


SOAK = Path(__file__).parents[2] / "benchmarks" / "serving" / "soak.py"
MINUTES = 0.6
GROWTH = 0.15
"""Of memory. In so short a run the warm-up is a few seconds, and later allocations of a small process weigh more."""


@pytest.mark.slow
def test_nothing_leaks_sticks_or_is_miscounted(checkpoint: Path, tmp_path: Path) -> None:
    report, log = tmp_path / "report.json", tmp_path / "log.json"
    words = ["--model", checkpoint, "--drafter", "ngram", "--minutes", MINUTES, "--growth", GROWTH]
    command = [sys.executable, SOAK, *words, "--json", report, "--log", log]
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(report.read_text())
    assert len(found["checks"]) == 11 and all(check["holds"] for check in found["checks"].values())
    assert found["requests"] > 100 and found["answers"] > 50 and found["left"] > 10 and found["greedy_texts"] > 5
    assert {"400", "401", "404", "413", "415"} <= set(found["statuses"])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    requests = [line for line in lines if line["event"] == "request" and line["route"].startswith("/v1")]
    assert len(requests) > 100 and not [line for line in lines if line["level"] == "error"]


SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving" / "attacks.py"
DRAFTER = ("--", "--drafter", "draft_model", "--drafter-model", "demo-draft")


def attacked(report: Path, *words: str) -> list[dict[str, object]]:
    command = [sys.executable, str(SCRIPT), "--json", str(report), *words, *DRAFTER]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    found: list[dict[str, object]] = json.loads(report.read_text())
    assert ran.returncode == 0, [one for one in found if one["faults"]]
    return found


@pytest.mark.slow
def test_no_attack_is_noticed(tmp_path: Path) -> None:
    assert len(attacked(tmp_path / "report.json")) > 50


@pytest.mark.slow
def test_the_script_works(tmp_path: Path) -> None:
    """With what answers at once, and no limit on time: the machine that runs this does other things, too."""
    words = ("--only", "^(start: start|arguments, 900 levels)$", "--most-ms", "60000", "--growth", "1")
    assert [one["statuses"] for one in attacked(tmp_path / "report.json", *words)] == [{"400": 4}] * 2


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "x", "max_tokens": 4}),
    (TEXT, {"prompt": ["x", "y"], "max_tokens": 3, "n": 2, "temperature": 0.8}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "logprobs": 2, "stop": ["e"], "bad_words": ["a b"]}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "speculative": {"enabled": False}}),
    (TEXT, {"prompt": "x", "max_tokens": 4, "stream": True}),
    (CHAT, ASK),
    (CHAT, {**ASK, "stream": True, "user": "someone", "logit_bias": {"5": 1}}),
    (TEXT, {"prompt": "x", "frobnicate": 1}),
    (TEXT, {"prompt": "x", "temperature": -1}),
    (TEXT, {"prompt": "x", "structured_outputs": {"regex": "("}}),
    ("/tokenize", {"prompt": "x"}),
    ("/nowhere", {}),
]
KEY = "secret"
ROUNDS = 8
MOST = 60
"""Objects that may be left of `ROUNDS` x `REQUESTS`: half an object for each."""


@pytest.fixture(scope="module")
def own(checkpoint: Path) -> Iterator[Live]:
    """With a key: without one each request is a domain of its own, of which a drafter remembers the last 256."""
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    with serving(checkpoint, speculative=drafter, max_queue=32, api_keys=(KEY,)) as live:
        yield live


def ask(live: Live, client: httpx.Client, rounds: int) -> None:
    others = cancelled_timers()
    for _ in range(rounds):
        for path, body in REQUESTS:
            assert client.post(path, json=body).status_code in (200, 400, 404)
        with client.stream("POST", TEXT, json={"prompt": "x", "max_tokens": 100, "stream": True}) as left:
            next(left.iter_raw())
    wait_for(lambda: "num_requests_running" in live.get("/metrics").text and not running(live))
    wait_for(lambda: not cancelled_timers() - others, seconds=60)


def running(live: Live) -> float:
    lines = live.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def cancelled_timers() -> set[int]:
    """asyncio keeps a cancelled timer, and with it the request that it was set in, until its time has come: each answer
    sets one of some seconds that would close its connection. Servers of other tests in this process may hold theirs for
    longer, so a test waits for those of its own requests."""
    return {id(one) for one in gc.get_objects() if type(one) is asyncio.TimerHandle and one.cancelled()}


def held() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def test_requests_leave_nothing_behind(own: Live) -> None:
    with httpx.Client(base_url=own.url, timeout=30, headers={"authorization": f"Bearer {KEY}"}) as client:
        ask(own, client, ROUNDS)
        before = held()
        ask(own, client, ROUNDS)
        after = held()
    more = {name: count - before[name] for name, count in after.items() if abs(count - before[name]) > 3}
    assert sum(after.values()) - sum(before.values()) <= MOST, json.dumps(more, indent=1)
