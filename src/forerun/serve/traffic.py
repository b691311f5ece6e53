"""The server records its traffic, to train on: conversations in JSONL files, apart for each API key.

A line is one conversation in token ids: the prompt as the model read it, and one completion. ``forerun data prepare``
reads such files like any others, and needs nothing else. ``KEY.jsonl`` is written to, where KEY is the beginning of the
sha256 of the API key; when it has half of the bytes that a key may take, it becomes ``KEY.1.jsonl``, in the place of
the older one. Only the operator's account may read them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from forerun.engine.prompts import OneThread
from forerun.errors import ArgumentError, EngineError
from forerun.types import RequestOutput
from forerun.writing import alone

log = logging.getLogger(__name__)

UNNAMED = "unnamed"  # Whose files hold requests without a key


def owner_of(api_key: str | None) -> str:
    """Return what the files of a key are named by."""
    return UNNAMED if api_key is None else hashlib.sha256(api_key.encode()).hexdigest()[:32]


def files_of(folder: Path, owner: str) -> tuple[Path, Path]:
    """Return where the conversations of an owner are: the file that is written to, and the older one."""
    return folder / f"{owner}.jsonl", folder / f"{owner}.1.jsonl"


def delete(folder: Path, owner: str) -> int:
    """Delete what was recorded of an owner, also while a server records; return how many files that were."""
    count = 0
    for path in files_of(folder, owner):  # in this order: meanwhile the server may make the first one the second
        count += path.is_file()
        path.unlink(missing_ok=True)
    return count


class Traffic:
    """Records conversations in a folder, in a thread of its own; what cannot be written is left out."""

    def __init__(self, folder: Path, *, most_bytes: int, vocabulary: str) -> None:
        """Record at most `most_bytes` for each owner. `vocabulary`: sha256 of the tokenizer's, as `TokenizerIdentity`
        has it; a line with ids says whose they are. OSError: nothing can be written in the folder. ArgumentError:
        another server records in it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"--record-traffic: nothing may be written in {folder}")
        self._folder = folder
        self._most = most_bytes // 2
        self._vocabulary = vocabulary
        self._failed = False  # The last conversation could not be written
        self._stack = ExitStack()
        if not self._stack.enter_context(alone(folder)):
            raise ArgumentError(f"another server records its traffic in {folder}; give each a directory of its own")
        self._thread = OneThread("forerun-traffic")

    def record(self, owner: str, output: RequestOutput) -> None:
        """Have the completions of one prompt written, except for those that were cut off by an abort."""
        if any(answer.finish_reason in ("stop", "length") for answer in output.outputs):
            with suppress(EngineError):  # closed: the server ends
                self._thread.submit(self._record, owner, output)

    def close(self) -> None:
        """Wait until all is written."""
        self._thread.shutdown()
        self._stack.close()

    def _record(self, owner: str, output: RequestOutput) -> None:
        try:
            for answer in output.outputs:
                if answer.finish_reason in ("stop", "length") and answer.token_ids:
                    tokens = {"prompt_token_ids": output.prompt_token_ids, "token_ids": answer.token_ids}
                    line = {**tokens, "vocabulary": self._vocabulary}
                    self._append(owner, json.dumps(line, separators=(",", ":")).encode() + b"\n")
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("traffic is not recorded: %s", error)
            self._failed = True

    def _append(self, owner: str, line: bytes) -> None:
        """Write a line behind the last whole one: all of it, or nothing."""
        path, older = files_of(self._folder, owner)
        if len(line) > self._most:
            return
        if path.exists() and path.stat().st_size + len(line) > self._most:
            os.replace(path, older)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with open(descriptor, "r+b", buffering=0) as file:
            end = _end(file)
            file.truncate(end)
            file.seek(end)
            if (written := file.write(line)) != len(line):
                file.truncate(end)
                raise OSError(f"{written} of {len(line)} bytes could be written to {path}")


def _end(file: BinaryIO) -> int:
    """Return where the last whole line ends: a server that was killed may have left the beginning of one."""
    size = file.seek(0, os.SEEK_END)
    if not size:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.rfind(b"\n") + 1
