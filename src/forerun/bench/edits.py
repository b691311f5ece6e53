"""Small edits of a piece of source code: what an answer to "change this file" looks like. Knows no model.

The demo model cannot follow an instruction, so the edited text is not generated but replayed (`forerun.bench.replay`).
"""

from __future__ import annotations

import keyword
import random
import re
from collections import Counter
from collections.abc import Callable

_NAME = re.compile(r"\b[a-z_][a-z0-9_]{3,}\b")
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def edited(text: str, seed: int) -> str:
    """`text` with one name changed everywhere, one line dropped, one line added and one number changed.

    A change for which the text has no place is left out. The same seed gives the same edit.
    """
    chance = random.Random(seed)
    changes: tuple[Callable[[str, random.Random], str], ...] = (_rename, _drop_line, _add_line, _change_number)
    for change in changes:
        text = change(text, chance)
    return text


def _rename(text: str, chance: random.Random) -> str:
    counts = Counter(name for name in _NAME.findall(text) if not keyword.iskeyword(name))
    often = sorted(name for name, count in counts.items() if 3 <= count <= 8)
    if not often:
        return text
    name = chance.choice(often)
    return re.sub(rf"\b{re.escape(name)}\b", f"new_{name}", text)


def _drop_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    full = [index for index, line in enumerate(lines) if line.strip()]
    if len(full) > 4:
        del lines[chance.choice(full[1:-1])]
    return "".join(lines)


def _add_line(text: str, chance: random.Random) -> str:
    lines = text.splitlines(keepends=True)
    full = [index for index, line in enumerate(lines) if line.strip()]
    if len(full) > 4:
        place = chance.choice(full[1:-1])
        indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
        lines.insert(place, f"{indent}# Checked by hand, see the report of last week.\n")
    return "".join(lines)


def _change_number(text: str, chance: random.Random) -> str:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return text
    found = chance.choice(numbers)
    return f"{text[: found.start()]}{int(found.group()) + 1}{text[found.end() :]}"
