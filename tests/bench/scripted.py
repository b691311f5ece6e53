"""A server that answers by script, as other engines do: models, metrics, streamed answers, and every way to fail."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Sequence[dict[str, Any] | bytes | float]
"""Chunks, raw lines and pauses in seconds, one after the other."""


@dataclass
class Script:
    """What the server says, and what it was asked."""

    answer: Callable[[dict[str, Any]], Answer | tuple[int, str]]
    """Of a request's body; a status and a body instead where it refuses."""
    metrics: Callable[[int], str] = lambda come: ""
    """The page, once so many requests have come."""
    models: Sequence[str] = ("m",)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def said(*words: str, tokens: int | None = None, **last: Any) -> list[dict[str, Any] | bytes]:
    """A chat's chunks, one for each word, and the end."""
    chunks: list[dict[str, Any] | bytes] = [{"choices": [{"delta": {"content": word}}]} for word in words]
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    return [*chunks, {"choices": [], **usage, **last}, b"data: [DONE]\n\n"]


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The server's address while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, script.metrics(len(script.bodies)), "text/plain")
            else:
                models = [{"id": name, "owned_by": "scripted"} for name in script.models]
                self._send(200, json.dumps({"data": models}), "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                script.bodies.append(body)
                script.running += 1
                script.most = max(script.most, script.running)
            found = script.answer(body)
            if isinstance(found, tuple):
                self._answered()
                self._send(*found, "application/json")
            else:
                self._stream(found)

        def _answered(self) -> None:
            """Before the last bytes: whoever has them may ask again, or read the metrics, at once."""
            with script.lock:
                script.running -= 1

        def _stream(self, answer: Answer) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for place, part in enumerate(answer, 1):
                if place == len(answer):
                    self._answered()
                if isinstance(part, float):
                    time.sleep(part)
                else:
                    self.wfile.write(part if isinstance(part, bytes) else f"data: {json.dumps(part)}\n\n".encode())
                    self.wfile.flush()
            self.close_connection = True

        def _send(self, status: int, text: str, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(timeout=10)
        server.server_close()
