"""The small models that ship with forerun, and the held-out files and edits that serve as prompts. Imports no torch.

Wherever a model is named, ``demo`` means the shipped target, ``demo-draft`` its draft model and ``demo-eagle3`` its
EAGLE-3 head. How they were trained is in ``recipes/demo``; what they are, in the ``README.md`` next to each.
``smollm2`` means SmolLM2-135M-Instruct, a small real model, which is downloaded at its first use.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ArgumentError, CheckpointError

FOLDER = Path(__file__).parent
MODELS = {"demo": "target", "demo-draft": "draft", "demo-eagle3": "eagle3"}  # Name of a shipped model -> its folder
REAL = "smollm2"  # The name of a real model that is downloaded, unless there is a directory of that name
CONTEXT = 300  # Tokens of an excerpt of a held-out file, where no other length is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One file of the standard library that no shipped model was trained on."""

    name: str  # Its module file, for example ``"graphlib.py"``
    text: str  # The whole file; cut it where the answer shall begin


def resolve(name: str | Path) -> str | Path:
    """Return the folder of a shipped model for its name, SmolLM2's file for ``smollm2``; anything else unchanged.

    Raises:
        CheckpointError: the files of a shipped model are missing.
        DownloadError: SmolLM2 is not here yet, and cannot be downloaded.
    """
    if str(name) == REAL and not Path(name).exists():
        from forerun.demo.download import smollm2

        return smollm2()
    if str(name) not in MODELS:
        return name
    folder = FOLDER / MODELS[str(name)]
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"the shipped model {str(name)!r} is missing from {folder}; train it with: python recipes/demo/make.py"
        )
    return folder


def prompts() -> list[Prompt]:
    """The shipped held-out files, sorted by name."""
    paths = sorted((FOLDER / "prompts").glob("*.py.txt"))
    names = (path.name.removesuffix(".txt").replace("--", "/") for path in paths)
    return [Prompt(name=name, text=path.read_text(encoding="utf-8")) for name, path in zip(names, paths, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A small edit of a function that no shipped model was trained on, asked for as a user would."""

    name: str  # Its kind and a number, for example ``"rename-3"``
    request: str  # What is asked, and the function
    answer: str  # The function as it shall be: made by a script and checked with `ast`

    @property
    def function(self) -> str:
        """The function as it is, which the request shows."""
        return self.request.partition("\n\n")[2]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that asks for it."""
        return [{"role": "user", "content": self.request}]


def edits() -> list[Edit]:
    """The shipped edits. Their file, ``demo/prompts/edits.jsonl``, holds conversations as `forerun data` reads them."""
    lines = (FOLDER / "prompts" / "edits.jsonl").read_text(encoding="utf-8").splitlines()
    found = ((record["id"], record["messages"]) for record in map(json.loads, lines))
    return [Edit(name=name, request=asked["content"], answer=answered["content"]) for name, (asked, answered) in found]


def contexts(tokenizer: Any, *, count: int, length: int = CONTEXT) -> list[list[int]]:
    """`count` excerpts of `length` tokens out of the held-out files. ArgumentError: they do not hold as many."""
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
