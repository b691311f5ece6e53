"""Small edits of the standard library's functions, asked for in chat form: the demo target's second skill.

Every edit is made by a script and checked with `ast`, so its answer is right. Knows Python's syntax. Does not know
tokenizers, models or which files are held out.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corpus import SourceFile

MAX_LINES = 40
NUMBERS = (*range(34), 36, 40, 42, 48, 50, 60, 64, 80, 99, 100, 123, 128, 200, 255, 256, 1000, 1024, 2000)
"""What a number is changed to."""
DISGUISED = 0.5
"""Share of the functions whose names are changed before the edit, so that their text must be read, not remembered."""
DISGUISES = 6
"""Names that are changed then, at most."""
WEIGHTS = {"rename": 10, "constant": 14, "parameter": 3, "docstring": 4, "swap": 2, "comprehension": 40}
"""How likely a kind is asked for among those that a function allows; comprehensions are rare in the library."""
RARE_REPEATS = 8
"""Edits of a function that holds a comprehension, under other names each time; of any other function, one."""
FURTHER = ("rename", "constant", "parameter")
"""Kinds that may be asked for once more, of the answer."""
DIALOGUE = (4, 1_600)
"""Edits in one dialogue and characters in all, at most: what a short context holds."""
RENAME = ("Rename `{0}` to `{1}`: write {1} for {0}", "Please rename `{0}` to `{1}`: write {1} for {0}")
CHANGE = ("Change `{0}` to `{1}`: write {1} for {0}", "Replace `{0}` with `{1}`: write {1} for {0}")
"""Most words are one token behind a space and another one without it: a request has either, so that what is written is
copied, however it is spelled there."""
PREFIXES = ("old", "new", "first", "last", "next", "total", "current", "known", "inner", "raw", "safe", "local")


@dataclass(frozen=True, slots=True)
class Edit:
    """What is asked, of which code, and the code that answers; `kind` is a key of `WEIGHTS`."""

    kind: str
    request: str
    before: str
    after: str

    @property
    def prompt(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self.request}:\n\n{self.before}"}]

    @property
    def conversation(self) -> list[dict[str, str]]:
        return [*self.prompt, {"role": "assistant", "content": self.after}]


def functions(file: SourceFile) -> list[str]:
    """The file's functions of 2 to `MAX_LINES` lines, as they would stand at the margin, in the order of the file."""
    try:
        module = ast.parse(file.text)
    except (SyntaxError, ValueError):
        return []
    lines = file.text.splitlines()
    found = sorted(
        (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)), key=lambda node: node.lineno
    )
    sources = (textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) for node in found)
    return [source for source in sources if 1 < source.count("\n") + 1 <= MAX_LINES and _parsed(source)]


def edits(files: list[SourceFile], words: list[str], *, seed: int, disguised: float = DISGUISED) -> Iterator[Edit]:
    """The edits of every function of `files` that allows any; the same ones for the same `seed`.

    Args:
        files: where the functions are from.
        words: what names are made of, those that are renamed and those that they are given.
        seed: of every choice.
        disguised: share of the functions whose names are changed beforehand.
    """
    chance = random.Random(seed)
    sources = [functions(file) for file in files]
    for found in sources:
        for source, following in itertools.zip_longest(found, found[1:], fillvalue=""):
            rare = any(_is_comprehension(node) for node in ast.walk(ast.parse(source)))
            for _ in range(RARE_REPEATS if rare else 1):
                edit = _edit(source, following, words, disguised, chance)
                if edit is not None:
                    yield edit


def dialogue(edit: Edit, words: list[str], chance: random.Random) -> list[Edit]:
    """An edit and some of what may be asked next: each changes the answer to the one before. Most tokens of a dialogue
    are answers, so that a model which learns from these learns more of it."""
    most, characters = DIALOGUE
    found, size = [edit], len(edit.before) + len(edit.after)
    while len(found) < most:
        source = found[-1].after
        further = KINDS[chance.choice(FURTHER)](source, words, chance)
        if further is None or further.after == source or not _parsed(further.after):
            break
        if size + len(further.after) > characters:
            break
        found.append(further)
        size += len(further.after)
    return found


def local_names(source: str) -> list[str]:
    """The parameters and local variables of a function, sorted: what may be renamed without looking outside of it."""
    tree = ast.parse(source)
    bound = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    outer = {n for node in ast.walk(tree) if isinstance(node, ast.Global | ast.Nonlocal) for n in node.names}
    return sorted(bound - outer - {"self", "cls", "_"})


def same_code(one: str, other: str) -> bool:
    """Whether both parse to the same tree."""
    return ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))


def _edit(source: str, following: str, words: list[str], disguised: float, chance: random.Random) -> Edit | None:
    if chance.random() < disguised:
        for name in chance.sample(local_names(source), k=min(DISGUISES, len(local_names(source)))):
            source = _renamed(source, name, new_name(words, chance)) or source
    kinds = list(WEIGHTS)
    while kinds:
        kind = chance.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])[0]
        kinds.remove(kind)
        made = _swap(source, following, chance) if kind == "swap" else KINDS[kind](source, words, chance)
        if made is not None and _parsed(made.after) and made.before != made.after:
            return made
    return None


def _rename(source: str, words: list[str], chance: random.Random) -> Edit | None:
    function = _parsed(source)
    known = [*local_names(source), *([function.name] if function and chance.random() < 0.25 else [])]
    plain = set(words)
    known = [name for name in known if all(len(part) < 2 or part in plain for part in name.split("_"))]
    if not known:
        return None
    old, new = chance.choice(known), new_name(words, chance)
    after = _renamed(source, old, new)
    if after is None:
        return None
    return Edit("rename", chance.choice(RENAME).format(old, new), source, after)


def _constant(source: str, words: list[str], chance: random.Random) -> Edit | None:
    """Another number or another string in the place of one that stands in the function once."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, str) and node.end_lineno == node.lineno:
            old = ast.get_source_segment(source, node) or ""
            number = re.fullmatch(r"\d{1,5}", old)
            if (number or re.fullmatch(r"(['\"])[^'\"\\]{1,24}\1", old)) and _count(source, old) == 1:
                found.append(old)
    if not found:
        return None
    old = chance.choice(found)
    new = other_constant(old, words, chance)
    request = chance.choice(CHANGE).format(old, new)
    after = replace_standing(old, new, source)
    return Edit("constant", request, source, after) if _count(source, new) == 0 else None


def _parameter(source: str, words: list[str], chance: random.Random) -> Edit | None:
    """One more parameter behind the last; with a default where others have one."""
    function = _parsed(source)
    if function is None:
        return None
    taken = function.args
    if taken.vararg or taken.kwonlyargs or taken.kwarg or taken.posonlyargs:
        return None
    new = new_name(words, chance)
    default = chance.choice(("None", "0", "1", "True", "False", '""', _other_number(chance)))
    if not taken.defaults and chance.random() < 0.5:
        added, request = new, f"Add a parameter `{new}`"
    else:
        added, request = f"{new}={default}", f"Add a parameter `{new}` with the default {default}"
    last = max((n for n in (*taken.args, *taken.defaults)), key=lambda n: (n.lineno, n.col_offset), default=None)
    if last is None:
        place, text = source.index("()") + 1, added
    else:
        place, text = _offset(source, last.end_lineno or 0, last.end_col_offset or 0), f", {added}"
    after = source[:place] + text + source[place:]
    right = _parsed(after)
    good = right is not None and len(right.args.args) == len(taken.args) + 1 and right.args.args[-1].arg == new
    return Edit("parameter", request, source, after) if good and new not in local_names(source) else None


def _docstring(source: str, words: list[str], chance: random.Random) -> Edit | None:
    """The first line of the function's own docstring, taken away and asked for."""
    function = _parsed(source)
    text = ((function and ast.get_docstring(function)) or "").split("\n")[0].strip()
    if function is None or len(function.body) < 2 or not 8 < len(text) < 90 or '"' in text or "\\" in text:
        return None
    lines = source.split("\n")
    first, last = function.body[0].lineno, function.body[0].end_lineno or 0
    before = "\n".join(lines[: first - 1] + lines[last:])
    indent = lines[function.body[1].lineno - 1][: function.body[1].col_offset]
    after = "\n".join([*lines[: first - 1], f'{indent}"""{text}"""', *lines[last:]])
    if lines[first - 1].startswith("def") or not indent.isspace():
        return None
    return Edit("docstring", f'Add the docstring "{text}"', before, after) if _parsed(before) else None


def _swap(source: str, following: str, chance: random.Random) -> Edit | None:
    """Two functions that follow each other, in the other order."""
    first, second = _parsed(source), following and _parsed(following)
    if not first or not second or first.name == second.name:
        return None
    before, after = f"{source}\n\n{following}", f"{following}\n\n{source}"
    if before.count("\n") + 1 > MAX_LINES:
        return None
    request = chance.choice(("Swap `{}` and `{}`", "Swap the functions `{}` and `{}`"))
    return Edit("swap", request.format(first.name, second.name), before, after)


def _comprehension(source: str, words: list[str], chance: random.Random) -> Edit | None:
    """A list comprehension of the function, written out as a loop and asked for."""
    found = [node for node in ast.walk(ast.parse(source)) if _is_comprehension(node)]
    if not found:
        return None
    chosen = chance.choice(found)
    assert isinstance(chosen, ast.Assign) and isinstance(chosen.value, ast.ListComp)
    name, loop = ast.unparse(chosen.targets[0]), chosen.value.generators[0]
    indent = " " * chosen.col_offset
    element, over, target = (
        ast.get_source_segment(source, node) for node in (chosen.value.elt, loop.iter, loop.target)
    )
    body = [f"{name} = []", f"for {target} in {over}:"]
    body += [f"    if {ast.get_source_segment(source, loop.ifs[0])}:"] if loop.ifs else []
    body += [f"{'    ' * len(body[1:])}{name}.append({element})"]
    lines = source.split("\n")
    last = chosen.end_lineno or 0
    before = "\n".join([*lines[: chosen.lineno - 1], *(indent + line for line in body), *lines[last:]])
    right = " ".join(line.strip() for line in lines[chosen.lineno - 1 : last])
    after = "\n".join([*lines[: chosen.lineno - 1], indent + right, *lines[last:]])
    good = _parsed(before) and _parsed(after) and same_code(after, source)
    request = chance.choice(("Turn the loop into a list comprehension", "Turn the loop over `{}` into a comprehension"))
    return Edit("comprehension", request.format(over), before, after) if good else None


KINDS: dict[str, Callable[[str, list[str], random.Random], Edit | None]] = {
    "rename": _rename,
    "constant": _constant,
    "parameter": _parameter,
    "docstring": _docstring,
    "comprehension": _comprehension,
}


def _is_comprehension(node: ast.AST) -> bool:
    """``name = [element for target in items]``, with one condition at most, on a line of its own."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.ListComp)
        and isinstance(node.targets[0], ast.Name)
        and len(node.targets) == len(node.value.generators) == 1
        and len(node.value.generators[0].ifs) < 2
        and not node.value.generators[0].is_async
        and (node.end_lineno or 0) - node.lineno < 3
    )


def _parsed(source: str) -> ast.FunctionDef | None:
    """The first function of `source`; None where it is no plain code that ends in a newline-free line."""
    if not source.isascii() or "\t" in source or "\f" in source:
        return None
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    return body[0] if body and isinstance(body[0], ast.FunctionDef) and source.startswith("def ") else None


def _renamed(source: str, old: str, new: str) -> str | None:
    """`source` with another name wherever `old` stands; None where that is no renaming, because `old` is an attribute,
    a keyword or a word of a string, too, or where `new` is there already."""
    if _count(source, new):
        return None
    after = replace_standing(old, new, source)
    try:
        back = ast.dump(_Renamer(new, old).visit(ast.parse(after))) == ast.dump(ast.parse(source))
    except SyntaxError:
        return None
    return after if back else None


class _Renamer(ast.NodeTransformer):
    """The tree with another name, made without looking at the text: what `_renamed` is checked with."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for field in ("id", "arg", "name"):
            if getattr(node, field, None) == self.old and not isinstance(node, ast.keyword | ast.alias):
                setattr(node, field, self.new)
        return super().generic_visit(node)


def _count(source: str, text: str) -> int:
    """How often `text` stands in `source`, not as part of a longer word or number."""
    return len(re.findall(standing(text), source))


def standing(text: str) -> str:
    """The pattern of `text` where it is no part of a longer word or number."""
    return rf"(?<![\w.]){text}(?![\w.])" if text.isdigit() else rf"(?<!\w){re.escape(text)}(?!\w)"


def replace_standing(old: str, new: str, source: str) -> str:
    """`source` with `new` wherever `old` stands."""
    return re.sub(standing(old), lambda _: new, source)


def _other_number(chance: random.Random) -> str:
    return str(chance.choice(NUMBERS))


def _offset(source: str, line: int, column: int) -> int:
    """The place in `source` of a 1-based line and a 0-based column, as `ast` counts them in ASCII."""
    return sum(len(text) + 1 for text in source.split("\n")[: line - 1]) + column


def new_name(words: list[str], chance: random.Random) -> str:
    """One word, or two with `_` between them."""
    name = chance.choice(words)
    return f"{chance.choice(PREFIXES)}_{name}" if chance.random() < 0.4 else name


def other_constant(old: str, words: list[str], chance: random.Random) -> str:
    """A number for a number; for a string one or two words in the same quotes."""
    if old.isdigit():
        return _other_number(chance)
    chosen = chance.sample(words, k=chance.randint(1, 2))
    return f"{old[0]}{chance.choice(' -_').join(chosen)}{old[0]}"
