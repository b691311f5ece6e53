"""Servers as processes: started, looked at, paused while another is measured, stopped. Knows no requests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

PATIENCE_S = 420.0
"""Until a server must be healthy: vLLM compiles before it answers."""


@dataclass(kw_only=True, slots=True)
class Server:
    """An OpenAI-compatible server in a process group of its own."""

    name: str
    command: Sequence[str]
    """Without the port."""
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    _process: subprocess.Popen[Any] | None = None
    _out: IO[str] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it is healthy.

        Raises:
            SystemExit: it ended, or took too long; the message shows the end of its log.
        """
        self.port = free_port()
        self._out = self.log.open("w", encoding="utf-8")
        self._process = subprocess.Popen(
            [*self.command, "--port", str(self.port)],
            stdout=self._out,
            stderr=self._out,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                tail = "\n".join(self.log.read_text(encoding="utf-8").splitlines()[-25:])
                raise SystemExit(f"{self.name} did not start; {self.log} ends with\n{tail}")
            time.sleep(0.1)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def memory(self) -> int:
        """Resident bytes, with those of the processes that it started."""
        assert self._process is not None
        sizes = []
        own = psutil.Process(self._process.pid)
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                sizes.append(process.memory_info().rss)
        return sum(sizes)

    def pause(self) -> None:
        """Keep it from using the processor; it keeps its memory."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def stop(self) -> int | None:
        """End it and all that it started; the exit code, None where it never ran."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        if self._process is not None:
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        if self._out is not None:
            self._out.close()
        return self._process.returncode if self._process is not None else None

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def forerun(model: str, *words: str, log: Path) -> Server:
    """`forerun serve` of this environment, not started yet."""
    return Server(name="forerun", command=[sys.executable, "-m", "forerun.cli", "serve", model, *words], log=log)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
