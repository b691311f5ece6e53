"""Tasks with a reward that can be checked: sums that are made here, and questions with a number as their answer.

Knows prompts and rewards; nothing of training.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*")
_TEACHER = {"role": "system", "content": "You add numbers."}


def make_sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Return so many sums of two digits, as conversations with the number that is right."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        one, two = chance.randint(2, 9), chance.randint(2, 9)
        question = {"role": "user", "content": f"{one} + {two} = ?"}
        found.append({"prompt": [_TEACHER, question], "answer": one + two})
    return found


def read_questions(path: Path) -> list[dict[str, Any]]:
    """Return the questions of a file of GSM8K's form: JSON lines with ``question`` and an ``answer`` that ends with
    ``#### NUMBER``. ValueError: a line has another form.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        told = json.loads(line)
        right = last_number(str(told.get("answer", "")).rpartition("####")[2])
        if "question" not in told or right is None:
            raise ValueError(f'{path}, line {number}: expected {{"question": ..., "answer": "... #### NUMBER"}}')
        found.append({"prompt": [{"role": "user", "content": told["question"]}], "answer": right})
    return found


def last_number(text: str) -> int | None:
    """Return the last whole number of a text, or None."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1].replace(",", "")) if numbers else None


def reward_last_number(completions: Sequence[Sequence[dict[str, str]]], answer: Sequence[int], **_: Any) -> list[float]:
    """Return 1 for each completion whose last number is right, else 0: a reward function of TRL's."""
    return [float(last_number(turns[0]["content"]) == right) for turns, right in zip(completions, answer, strict=True)]
