"""This module lets llama.cpp on this machine draft with a head: its converter makes GGUF files, its
server answers.

The drafts are counted from the stream: with ``timings_per_token`` every token says how many tokens
were drafted and accepted so far (``tools/server/server-context.cpp`` of llama.cpp 0.5.0).
"""

from __future__ import annotations

import contextlib
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

from forerun.deploy.engines.llamacpp import SERVER, LlamaCpp
from forerun.deploy.trials.gguf_converter import UNKNOWN
from forerun.deploy.trials.trial import (
    HeadDrafting,
    InstalledEngine,
    RefusedError,
    TrialAnswer,
    TrialPrompts,
    last_lines,
    refuse_apart,
)
from forerun.errors import ArgumentError, ForerunError
from forerun.heads.engines import OUTTYPES, SCRIPT, conversion_arguments

LOADING = 1800.0
"""Seconds that the server may take to load a model."""


class InLlamaCpp(InstalledEngine):
    """Runs llama.cpp from its sources, with ``llama-server`` built in ``build/bin`` or on the path."""

    title: ClassVar[str] = "llama.cpp"

    def __init__(self, drafting: HeadDrafting, sources: Path | None, python: Path, rows: int = 1) -> None:
        """Find the converter and the server.

        Args:
            drafting: what is tried.
            sources: llama.cpp's directory.
            python: has what its converter imports.
            rows: completions at once; EAGLE-3 heads lose by more than one (`ONE_AT_A_TIME`).

        Raises:
            ArgumentError: something is not there, or llama.cpp has no counterpart of the kind.
        """
        way = LlamaCpp.ways.get(drafting.kind)
        if way is None or drafting.kind == "ngram":
            raise ArgumentError(
                f"llama.cpp does not draft with a {drafting.kind} head; it does with "
                f"{', '.join(kind for kind in LlamaCpp.ways if kind != 'ngram')}"
            )
        refuse_apart(drafting, LlamaCpp)
        if sources is None or not (sources / SCRIPT).is_file():
            raise ArgumentError(
                f"{sources or 'nothing'} is no directory of llama.cpp's sources with its {SCRIPT}; name it: "
                "--llama-cpp DIR"
            )
        for name in (drafting.target, drafting.head):
            if not Path(name).is_dir():
                raise ArgumentError(f"{name} is no directory, which llama.cpp's converter wants: hf download {name}")
        self.way, self.own_files = way.name, way.model
        self.sources, self.python, self.rows = sources, python, rows
        self.server = find_server(sources)
        super().__init__(drafting, server_version(self.server))

    def answers(self, question: TrialPrompts) -> list[TrialAnswer]:
        """Complete the prompts, as `InstalledEngine.answers` describes."""
        drafting = self.drafting
        with tempfile.TemporaryDirectory() as work:
            folder = Path(work)
            dtype = question.dtype
            words = ["-m", str(self._convert(drafting.target, folder / "target.gguf", dtype))]
            if self.own_files:
                words += ["-md", str(self._convert(drafting.head, folder / "head.gguf", dtype, is_head=True))]
            if any(UNKNOWN in log.read_text(errors="replace") for log in folder.glob("*.log")):
                self.notes.append(UNKNOWN)
            words += ["--spec-type", self.way, "--spec-draft-n-max", str(drafting.k)]
            words += ["-c", str(self.rows * question.room), "-np", str(self.rows)]
            cache_dtype = "f32" if dtype == "float32" else "f16"  # its keys and values, and its drafter's
            words += [word for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (flag, cache_dtype)]
            with (
                run_server(self.server, words, folder / "server.log") as address,
                ThreadPoolExecutor(self.rows) as pool,
            ):
                return list(pool.map(lambda prompt: _answer(address, prompt, question.tokens), question.prompts))

    def _convert(self, name: str, file: Path, dtype: str, *, is_head: bool = False) -> Path:
        for_head = self.drafting.target if is_head and self.drafting.kind != "draft_model" else None
        return convert_to_gguf(self.sources, self.python, Path(name), file, dtype=dtype, target=for_head)


def find_server(sources: Path) -> Path:
    """Return the ``llama-server`` built in `sources`, or the one on the path; ArgumentError if
    there is none.
    """
    built = sources / "build" / "bin" / SERVER
    server = built if built.is_file() else shutil.which(SERVER)
    if server is None:
        raise ArgumentError(f"there is no {built}, and no {SERVER} on the path; build it (cmake --build)")
    return Path(server)


def server_version(server: Path) -> str:
    """Return what ``llama-server --version`` says: number, build and commit."""
    told = subprocess.run([str(server), "--version"], capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"version: (.+)", told.stdout + told.stderr)
    return found[1] if found else "unknown"


def convert_to_gguf(
    sources: Path, python: Path, folder: Path, file: Path, *, dtype: str, target: str | None = None
) -> Path:
    """Convert a directory to a GGUF file, with the converter's output in a ``.log`` beside it.

    Raises:
        RefusedError: llama.cpp's converter stops at these files.
        ForerunError: this Python lacks what the converter imports.
    """
    command = [str(python), str(Path(__file__).with_name("gguf_converter.py")), str(sources)]
    command += conversion_arguments(folder, target=target, outtype=OUTTYPES[dtype], file=file)
    log = file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        done = subprocess.run(command, stdout=out, stderr=out, check=False)
    if done.returncode == 0 and file.is_file():
        return file
    complaint = last_lines([log], 1)
    if complaint.startswith("ModuleNotFoundError"):
        raise ForerunError(
            f"{python} cannot run llama.cpp's converter: {complaint}; install it, or name another: --python"
        )
    raise RefusedError(f"its converter: {complaint}")


@contextlib.contextmanager
def run_server(server: Path, words: Sequence[str], log: Path) -> Iterator[str]:
    """Run a ``llama-server`` with these arguments until the block is left, and yield its address.

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
    """Return the first line of the log that reports an error and is not called normal there, else
    the last line.
    """
    lines = log.read_text(errors="replace").splitlines()
    wrong = [line for line in lines if re.search(r"error|\bE\b|GGML_ASSERT|abort", line) and "is normal" not in line]
    return (wrong or lines or ["it said nothing"])[0 if wrong else -1]


def _answer(address: str, prompt: Sequence[int], tokens: int) -> TrialAnswer:
    body = {
        "prompt": list(prompt),
        "n_predict": tokens,
        "temperature": 0.0,
        "cache_prompt": False,
        "stream": True,
        "return_tokens": True,
        "timings_per_token": True,
    }
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
    return TrialAnswer(token_ids=ids, text=text, drafted=drafted, accepted=accepted)
