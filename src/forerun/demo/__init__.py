"""This module has the prompts of the demo and of the tests: held-out files and edits for the
shipped models, and questions for a real one. The models themselves are found by `forerun.shipped`.
Imports no torch.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from forerun import shipped
from forerun.errors import ArgumentError

CONTEXT = 300  # Tokens of an excerpt of a held-out file, where no other length is requested


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One file of the standard library that no shipped model was trained on."""

    name: str  # Its module file, for example ``"graphlib.py"``
    text: str  # The whole file; cut it where the completion shall begin


def prompts() -> list[Prompt]:
    """Return the shipped held-out files, sorted by name."""
    paths = sorted((shipped.FOLDER / "prompts").glob("*.py.txt"))
    names = (path.name.removesuffix(".txt").replace("--", "/") for path in paths)
    return [Prompt(name=name, text=path.read_text(encoding="utf-8")) for name, path in zip(names, paths, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A small edit of a function that no shipped model was trained on, requested as a user would."""

    name: str  # Its kind and a number, for example ``"rename-3"``
    request: str  # The instruction, and the function
    answer: str  # The function as it shall be: made by a script and checked with `ast`

    @property
    def function(self) -> str:
        """Return the function as it is, which the request shows."""
        return self.request.partition("\n\n")[2]

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation that requests the edit."""
        return [{"role": "user", "content": self.request}]


def edits() -> list[Edit]:
    """Return the shipped edits. Their file, ``demo/prompts/edits.jsonl``, holds conversations as
    `forerun data` reads them.
    """
    lines = (shipped.FOLDER / "prompts" / "edits.jsonl").read_text(encoding="utf-8").splitlines()
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
            raise ArgumentError(
                f"the held-out files hold {len(excerpts)} excerpts of {length} tokens, {count} were requested"
            )
        excerpts += fresh
    return excerpts[:count]


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question to a chat model, as a user would put it."""

    name: str  # For example ``"edit"``
    title: str  # The kind of question, in a few words
    text: str

    @property
    def messages(self) -> list[dict[str, str]]:
        """Return the conversation with the question."""
        return [{"role": "user", "content": self.text}]


_LETTER = """\
Dear Mr Smith, thank you for you letter of 3 May. We has looked into the matter and found that the parcel were sent to
the wrong adress. We are very sorry for this mistake. A new parcel will be send to you today, and it should arive on
Friday."""

_HARBOUR = """\
The lighthouse at Sandhope was built in 1871, after four ships had been lost on the reef in one winter. For ninety
years a keeper lived there with his family, carried oil up its 144 steps every evening, and wrote the weather into a
book every three hours. In 1961 the lamp became electric, and the last keeper, Ada Finch, left the tower but stayed in
the village. The books that she and the keepers before her wrote are now read by scientists, who learn from them how
the storms on this coast have changed. Since 2009 the tower belongs to the village, which lets rooms to guests in
summer and pays for its paint with what they bring."""

QUESTIONS = (
    Question(
        name="chat",
        title="a question",
        text="Why is the sky blue by day and red at sunset? Explain it to a child in one paragraph.",
    ),
    Question(
        name="edit",
        title="an edit",
        text="Correct the spelling and grammar mistakes in this letter:\n\n" + _LETTER.replace("\n", " "),
    ),
    Question(
        name="summary",
        title="a summary",
        text=_HARBOUR.replace("\n", " ") + "\n\nSummarise this text in two sentences.",
    ),
)
