"""The demo corpus: the Python standard library's own sources, split into training and held-out files.

Knows which files are read, how they are split and how a chat example is cut out of a module. Does not know tokenizers,
models or training.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.03
PROMPT_CHARACTERS = (4_000, 40_000)
"""A held-out file of this length ships as a prompt: long enough to ask with, short enough to carry."""
MAX_FILE_BYTES = 400_000
SKIPPED_FOLDERS = {"site-packages", "__pycache__", "lib2to3", "idle_test", "ensurepip", "pydoc_data"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One module of the standard library: `name` relative to its root, and its text."""

    name: str
    text: str


def read_standard_library(root: Path | None = None) -> list[SourceFile]:
    """Every readable, distinct ``.py`` file below `root` (default: this interpreter's library), sorted by name."""
    root = root or Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    files = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS & set(path.parts) or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if text.strip() and digest not in seen:
            seen.add(digest)
            files.append(SourceFile(name=str(path.relative_to(root)), text=text))
    return files


def is_held_out(file: SourceFile) -> bool:
    """A share of all files, chosen by a hash of their name: library, tests and code pages as they come."""
    digest = hashlib.sha256(file.name.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def is_prompt(file: SourceFile) -> bool:
    """A held-out file worth continuing: of middle length, and not a table of characters."""
    low, high = PROMPT_CHARACTERS
    return is_held_out(file) and low <= len(file.text) <= high and not file.name.startswith("encodings/")


def is_library(file: SourceFile) -> bool:
    """A module that others import: harder to predict than a test or a code page."""
    return "test" not in file.name and not file.name.startswith("encodings/")


def split(files: list[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """The training files and the held-out files."""
    return [file for file in files if not is_held_out(file)], [file for file in files if is_held_out(file)]


def conversations(file: SourceFile) -> Iterator[list[dict[str, str]]]:
    """A chat for every documented function of moderate length: its docstring asks, its source answers."""
    try:
        module = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return
    lines = file.text.splitlines(keepends=True)
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        wish = (ast.get_docstring(node) or "").strip()
        source = "".join(lines[node.lineno - 1 : node.end_lineno]).rstrip()
        if wish and source and 80 < len(source) < 3_000:
            request = f"Write the function `{node.name}`. {wish.splitlines()[0]}"
            yield [
                {"role": "user", "content": request},
                {"role": "assistant", "content": textwrap.dedent(source)},
            ]
