"""What the documents print: their commands and blocks of Python, in order."""

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
SHELL, OTHER = ("", "sh", "bash", "console"), ("text", "json", "yaml")
"""Languages of blocks that hold commands and nothing else, and of blocks that hold none."""
PROGRAMS = r"(?:\S*/)?(?:forerun|make|python3?|torchrun|pip|docker|curl) "
"""What begins a command where it stands in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """A command, or a block of Python, as a reader finds it."""

    page: str
    """Path below the repository's root."""
    line: int
    text: str
    python: bool = False
    inline: bool = False
    """It stands in a sentence, where a part of a command may stand for it."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[str]:
    """Every document of the repository but the recipes, whose commands tests/training/test_recipes.py runs."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "." and path.name != "build"]
    found = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    found += [ROOT / "deploy" / name for name in ("Dockerfile", "compose.yaml", "forerun.service")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def printed(page: str) -> list[Printed]:
    """What `page` prints, from its top to its end."""
    readers = {".md": markdown, "": _dockerfile, ".yaml": _compose, ".service": _unit}
    text = (ROOT / page).read_text(encoding="utf-8")
    return sorted(readers[Path(page).suffix](page, text), key=lambda found: found.line)


def markdown(page: str, text: str) -> Iterator[Printed]:
    """The lines of its shell blocks, its blocks of Python, and inline code that begins as a command does."""
    fences = re.findall(r"^ *```", text, re.MULTILINE)
    blocks = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(fences) == 2 * len(blocks), f"{page}: a block is indented, not closed, or of a strange language"
    prose = text
    for block in blocks:
        language, start = block[1], text.count("\n", 0, block.start()) + 2
        if language == "python":
            yield Printed(page=page, line=start, text=block[2], python=True)
        elif language in SHELL:
            yield from _lines(page, start, block[2])
        else:
            assert language in OTHER, f"{page}:{start}: no block of {language!r} is known to tests/examples/printed.py"
        prose = prose.replace(block[0], "\n" * block[0].count("\n"), 1)
    for code in re.finditer(rf"`({PROGRAMS}[^`]+)`", prose):
        line = prose.count("\n", 0, code.start()) + 1
        yield Printed(page=page, line=line, text=" ".join(code[1].split()), inline=True)


def _lines(page: str, start: int, block: str) -> Iterator[Printed]:
    """One command a line, or on several that end in a backslash or are a request's body; comments are for people."""
    bodies = re.compile(r"-d '[^']*'")
    joined = bodies.sub(lambda body: body[0].replace("\n", " \0"), block.replace("\\\n", " \0"))
    for number, command in enumerate(joined.splitlines()):
        if command.strip() and not command.startswith("#"):
            line = start + number + "\n".join(joined.splitlines()[:number]).count("\0")
            yield Printed(page=page, line=line, text=command.replace("\0", "").strip())


def _compose(page: str, text: str) -> Iterator[Printed]:
    words = yaml.safe_load(text)["services"]["forerun"]["command"]
    filled = [re.sub(r"\$\{\w+:-(\w*)\}", r"\1", word) for word in words]
    yield Printed(page=page, line=1, text=shlex.join(["forerun", "serve", *filled]))


def _dockerfile(page: str, text: str) -> Iterator[Printed]:
    parts = [json.loads(re.search(rf"^{key} (\[.*\])$", text, re.MULTILINE)[1]) for key in ("ENTRYPOINT", "CMD")]
    yield Printed(page=page, line=1, text=shlex.join(parts[0] + parts[1]))


def _unit(page: str, text: str) -> Iterator[Printed]:
    started = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1]
    arguments = re.search(r"^#\s+FORERUN_ARGUMENTS=(.*)$", text, re.MULTILINE)[1]
    yield Printed(page=page, line=1, text=started.replace("$FORERUN_ARGUMENTS", arguments))
