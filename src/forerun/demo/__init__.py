"""The small models that ship with forerun, and the held-out files that serve as prompts. Imports no torch.

Wherever a model is named, ``demo`` means the shipped target, ``demo-draft`` its draft model and ``demo-eagle3`` its
EAGLE-3 head. How they were trained is in ``recipes/demo``; what they are, in the ``README.md`` next to each.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ArgumentError, CheckpointError

FOLDER = Path(__file__).parent
MODELS = {"demo": "target", "demo-draft": "draft", "demo-eagle3": "eagle3"}
"""Name of a shipped model -> its folder."""
PROMPT_SUFFIX = ".py.txt"
CONTEXT = 300
"""Tokens of an excerpt of a held-out file, where no other length is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One file of the standard library that no shipped model was trained on."""

    name: str
    """Its module file, for example ``"graphlib.py"``."""
    text: str
    """The whole file; cut it where the answer shall begin."""


def resolve(name: str | Path) -> str | Path:
    """The folder of a shipped model for its name; anything else unchanged.

    Raises:
        CheckpointError: the name is a shipped model's, but this installation lacks its files.
    """
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
    paths = sorted((FOLDER / "prompts").glob(f"*{PROMPT_SUFFIX}"))
    return [
        Prompt(name=path.name.removesuffix(".txt").replace("--", "/"), text=path.read_text(encoding="utf-8"))
        for path in paths
    ]


def contexts(tokenizer: Any, *, count: int, length: int = CONTEXT) -> list[list[int]]:
    """`count` excerpts of `length` tokens out of the shipped held-out files, from inside each file.

    `tokenizer` is of a transformers model; no special token is added.

    Raises:
        ArgumentError: the files do not hold that many excerpts.
    """
    encoded = [tokenizer.encode(prompt.text, add_special_tokens=False, verbose=False) for prompt in prompts()]
    excerpts: list[list[int]] = []
    taken = 0
    while len(excerpts) < count:
        # The first excerpt of every file starts behind its headline; later ones follow it.
        starts = [len(ids) // 8 + taken * length for ids in encoded]
        fresh = [
            ids[start : start + length]
            for ids, start in zip(encoded, starts, strict=True)
            if start + length <= len(ids)
        ]
        if not fresh:
            raise ArgumentError(
                f"the held-out files hold {len(excerpts)} excerpts of {length} tokens, {count} were asked for"
            )
        excerpts += fresh
        taken += 1
    return excerpts[:count]
