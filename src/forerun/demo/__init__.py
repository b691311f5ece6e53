"""This module finds the demo models, and the held-out files and edits that serve as prompts.
Imports no torch.

Wherever a model is named, ``demo`` means the demo target, ``demo-draft`` its draft model and
``demo-eagle3`` its EAGLE-3 head. A checkout has them beside this file; other installations get them
from the package ``forerun-demo``. How they were trained is in ``recipes/demo``; what they are, in
the ``README.md`` next to each.

``smollm2`` means SmolLM2-135M-Instruct, a small real model, which is downloaded at its first use.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ArgumentError, CheckpointError

FOLDER = Path(__file__).parent
MODELS = {"demo": "target", "demo-draft": "draft", "demo-eagle3": "eagle3"}  # Name of a demo model -> its folder
PACKAGE = "forerun_demo"  # Has these folders where forerun was not installed from a checkout
REAL = "smollm2"  # The name of a real model that is downloaded, unless there is a directory of that name
CONTEXT = 300  # Tokens of an excerpt of a held-out file, where no other length is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A `Prompt` is one file of the standard library that no shipped model was trained on."""

    name: str  # Its module file, for example ``"graphlib.py"``
    text: str  # The whole file; cut it where the answer shall begin


def resolve(name: str | Path) -> str | Path:
    """Return the folder of a demo model for its name, SmolLM2's file for ``smollm2``; anything else unchanged.

    Raises:
        CheckpointError: the demo models are not installed.
        DownloadError: SmolLM2 is not here yet, and cannot be downloaded.
    """
    if str(name) == REAL and not Path(name).exists():
        from forerun.demo.download import smollm2

        return smollm2()
    if str(name) not in MODELS:
        return name
    folder = folder_of(str(name))
    if folder is None:
        raise CheckpointError(
            f"the demo model {str(name)!r} is not installed: pip install forerun-demo brings it. Or name another: "
            f"a directory, a hub id, a GGUF file, or {REAL}, a small real one that is downloaded once"
        )
    return folder


def folder_of(name: str) -> Path | None:
    """Return the folder of a demo model, None where the models are not installed."""
    package = importlib.util.find_spec(PACKAGE)
    roots = [FOLDER, *map(Path, package.submodule_search_locations or ())] if package else [FOLDER]
    folders = (root / MODELS[name] for root in roots)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def is_target(name: str | Path) -> bool:
    """Return whether a model's name, or its folder, is the demo target's."""
    return str(name) == "demo" or Path(name) == folder_of("demo")


def prompts() -> list[Prompt]:
    """Return the shipped held-out files, sorted by name."""
    paths = sorted((FOLDER / "prompts").glob("*.py.txt"))
    names = (path.name.removesuffix(".txt").replace("--", "/") for path in paths)
    return [Prompt(name=name, text=path.read_text(encoding="utf-8")) for name, path in zip(names, paths, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """An `Edit` is a small edit of a function that no shipped model was trained on, asked for as a
    user would.
    """

    name: str  # Its kind and a number, for example ``"rename-3"``
    request: str  # The instruction, and the function
    answer: str  # The function as it shall be: made by a script and checked with `ast`

    @property
    def function(self) -> str:
        """Return the function as it is, which the request shows."""
        return self.request.partition("\n\n")[2]

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation that asks for the edit."""
        return [{"role": "user", "content": self.request}]


def edits() -> list[Edit]:
    """Return the shipped edits. Their file, ``demo/prompts/edits.jsonl``, holds conversations as
    `forerun data` reads them.
    """
    lines = (FOLDER / "prompts" / "edits.jsonl").read_text(encoding="utf-8").splitlines()
    found = ((record["id"], record["messages"]) for record in map(json.loads, lines))
    return [Edit(name=name, request=asked["content"], answer=answered["content"]) for name, (asked, answered) in found]


def contexts(tokenizer: Any, *, count: int, length: int = CONTEXT) -> list[list[int]]:
    """Return `count` excerpts of `length` tokens out of the held-out files; ArgumentError if they
    do not hold as many.
    """
    encoded = [tokenizer.encode(prompt.text, add_special_tokens=False, verbose=False) for prompt in prompts()]
    excerpts: list[list[int]] = []
    for taken in itertools.count():
        if len(excerpts) >= count:
            break
        # The first excerpt of every file starts behind its headline; later ones follow it.
        behind = (ids[len(ids) // 8 + taken * length :][:length] for ids in encoded)
        fresh = [excerpt for excerpt in behind if len(excerpt) == length]
        if not fresh:
            found = f"the held-out files hold {len(excerpts)} excerpts of {length} tokens"
            raise ArgumentError(f"{found}, {count} were asked for")
        excerpts += fresh
    return excerpts[:count]
