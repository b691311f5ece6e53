"""llama.cpp of this machine drafts with a head: its converter makes GGUF files, its server answers.

What became of each draft is read off the stream: with ``timings_per_token`` every token comes with how many tokens were
drafted and accepted so far (``tools/server/server-context.cpp`` of llama.cpp 0.5.0).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from forerun.checkpoints.gguf import OUTTYPES, SCRIPT, conversion
from forerun.deploy.compare import Answer
from forerun.deploy.engines.llamacpp import SERVER, LlamaCpp
from forerun.deploy.gguf_converter import UNKNOWN
from forerun.deploy.trial import ROWS, Drafting, Installed, Question, RefusedError, last_lines
from forerun.errors import ArgumentError, ForerunError

LOADING = 1800.0
"""Seconds that the server may take to load a model."""


class InLlamaCpp(Installed):
    """llama.cpp's sources, with ``llama-server`` built in ``build/bin`` or on the path."""

    title: ClassVar[str] = "llama.cpp"

    def __init__(self, drafting: Drafting, sources: Path | None, python: Path) -> None:
        """`python`: has what the converter imports. ArgumentError: something is not there, or llama.cpp has no
        counterpart of the kind."""
        way = LlamaCpp.ways.get(drafting.kind)
        if way is None or not way.model:
            have = ", ".join(kind for kind, way in LlamaCpp.ways.items() if way.model)
            raise ArgumentError(f"llama.cpp does not draft with files of a {drafting.kind} head; it does with {have}")
        if sources is None or not (sources / SCRIPT).is_file():
            raise ArgumentError(
                f"{sources or 'nothing'} is no directory of llama.cpp's sources with its {SCRIPT}; name it: "
                "--llama-cpp DIR"
            )
        self.way, self.sources, self.python, self.server = way.name, sources, python, server_of(sources)
        super().__init__(drafting, server_version(self.server))

    def answers(self, question: Question) -> list[Answer]:
        """See `Installed.answers`."""
        drafting = self.drafting
        with tempfile.TemporaryDirectory() as work:
            folder, dtype = Path(work), question.dtype
            target = converted(self.sources, self.python, Path(drafting.target), folder / "target.gguf", dtype=dtype)
            head = converted(
                self.sources,
                self.python,
                Path(drafting.head),
                folder / "head.gguf",
                dtype=dtype,
                target=None if drafting.kind == "draft_model" else drafting.target,
            )
            self.notes += [UNKNOWN] if UNKNOWN in last_lines(folder.glob("*.log"), 10**6) else []
            words = ["-m", str(target), "-md", str(head), "--spec-type", self.way]
            words += ["--spec-draft-n-max", str(drafting.k), "-c", str(ROWS * question.room), "-np", str(ROWS)]
            kept = "f32" if dtype == "float32" else "f16"  # its keys and values, and its drafter's
            words += [word for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (flag, kept)]
            with serving(self.server, words, folder / "server.log") as address, ThreadPoolExecutor(ROWS) as pool:
                return list(pool.map(lambda prompt: _answer(address, prompt, question.tokens), question.prompts))


def server_of(sources: Path) -> Path:
    """``llama-server`` as it was built there, or of the path. ArgumentError: there is none."""
    built = sources / "build" / "bin" / SERVER
    found = built if built.is_file() else shutil.which(SERVER)
    if found is None:
        raise ArgumentError(f"there is no {built}, and no {SERVER} on the path; build it (cmake --build)")
    return Path(found)


def server_version(server: Path) -> str:
    """What ``llama-server --version`` says: number, build and commit."""
    told = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"version: (.+)", told.stdout + told.stderr)
    return found[1] if found else "unknown"


def converted(sources: Path, python: Path, folder: Path, file: Path, *, dtype: str, target: str | None = None) -> Path:
    """A directory as a GGUF file; what the converter says is in a ``.log`` beside it.

    Raises:
        RefusedError: llama.cpp's converter stops at these files.
        ForerunError: this Python lacks what the converter imports.
    """
    script = importlib.util.find_spec("forerun.deploy.gguf_converter")
    assert script is not None and script.origin is not None
    command = [str(python), script.origin, str(sources)]
    command += conversion(folder, target=target, outtype=OUTTYPES[dtype], file=file)
    log = file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, stdout=out, stderr=out, check=False)
    if done.returncode == 0 and file.is_file():
        return file
    said = last_lines([log], 1)
    if said.startswith("ModuleNotFoundError"):
        raise ForerunError(f"{python} cannot run llama.cpp's converter: {said}; install it, or name another: --python")
    raise RefusedError(f"its converter: {said}")


@contextlib.contextmanager
def serving(server: Path, words: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a ``llama-server`` with these arguments, until the block is left.

    Raises:
        RefusedError: it stops before it answers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [str(server), *words, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--no-webui"]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + LOADING
        while not _healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RefusedError(f"its server: {_complaint(log)}")
            time.sleep(0.1)
        yield address
    except (urllib.error.URLError, ConnectionError) as error:
        raise RefusedError(f"its server: {_complaint(log)} ({error})") from error
    finally:
        process.terminate()
        process.wait()


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as found:
            return bool(found.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _complaint(log: Path) -> str:
    """The first line of the log that tells of an error, or the last line."""
    lines = log.read_text(errors="replace").splitlines()
    wrong = [line for line in lines if re.search(r"error|\bE\b|GGML_ASSERT|abort", line)]
    return (wrong or lines or ["it said nothing"])[0 if wrong else -1]


def _answer(address: str, prompt: Sequence[int], tokens: int) -> Answer:
    body = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "cache_prompt": False}
    body |= {"stream": True, "return_tokens": True, "timings_per_token": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode(), headers)
    ids, text, drafted, accepted = list[int](), "", list[int](), list[int]()
    before = (0, 0)
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if not line.startswith(b"data: "):
                continue
            part: dict[str, Any] = json.loads(line[6:])
            if part.get("stop"):
                break  # whole tokens came before
            ids += part["tokens"]
            text += part["content"]
            now = tuple(part["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted"))
            if now != before:
                drafted.append(now[0] - before[0])
                accepted.append(now[1] - before[1])
            before = now
    return Answer(token_ids=ids, text=text, drafted=drafted, accepted=accepted)
