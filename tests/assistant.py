"""An OpenAI-compatible endpoint that gives one answer to everything."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Assistant(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "assistant"}]} if self.path.endswith("/models") else {}))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"role": "assistant", "content": "four words of answer"}
        choice = {"delta" if asked.get("stream") else "message": said, "finish_reason": "stop"}
        found = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 2, "completion_tokens": 4}})
        self._send(f"data: {found}\n\ndata: [DONE]\n\n" if asked.get("stream") else found)

    def _send(self, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if text.startswith("data:") else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def assistant() -> Iterator[str]:
    """Its URL, which works until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Assistant)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
