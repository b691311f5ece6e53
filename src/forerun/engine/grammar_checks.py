"""What is refused of a grammar before anything compiles it: size, depth, and chains of references, in linear time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

from forerun.errors import ArgumentError
from forerun.nesting import MAX_DEPTH, nesting

T = TypeVar("T")

MAX_CHARACTERS = {"json": 200_000, "regex": 20_000, "grammar": 200_000}
"""Of a text, by its kind."""
MAX_CHAIN = 100
"""References that lead from one to the next, of a schema (``$ref``) or of a grammar's rules: a compiler that calls
itself for each of them runs out of stack."""
MAX_CHOICES = 4096
MAX_CHOICE_CHARACTERS = 4096

_LARK_TEXT = re.compile(
    r'"(?:[^"\\\n]++|\\.)*+(?:"|\\?$)|/(?![/*])(?:[^/\\\n]++|\\.)++(?:/|\\?$)|//[^\n]*', re.MULTILINE
)
_LARK_NAME = re.compile(r"[?!]?\b([A-Za-z_]\w*+)(\s*(?:\[[^\]\n]*+\])?(?:\.\d++)?\s*:)?")


def check(kind: str, text: str) -> None:
    """Refuse a grammar that is too large, too deep, or whose references form too long a chain.

    Raises:
        ArgumentError: says what there is too much of.
    """
    most = MAX_CHARACTERS[kind]
    if len(text) > most:
        raise ArgumentError(f"structured outputs: the {kind} has {len(text)} characters; at most {most} are compiled")
    if (depth := nesting(text).depth) > MAX_DEPTH:
        raise ArgumentError(
            f"structured outputs: the {kind} nests {depth} levels deep; at most {MAX_DEPTH} are compiled"
        )
    chain = 0
    if kind == "json" and isinstance(schema := _parsed(text), dict | list):
        chain = _longest_chain(schema, id, _references(schema))
    elif kind == "grammar":
        rules = _rules(text)
        chain = _longest_chain("start", str, lambda name: ((1, other) for other in rules.get(name, ())))
    if chain > MAX_CHAIN:
        raise ArgumentError(
            f"structured outputs: the {kind} has a chain of {chain} references, each to the next; at most {MAX_CHAIN} "
            "are compiled: write what they stand for where it is used"
        )


def check_choices(choices: Iterable[str]) -> None:
    """Refuse a list of choices that is too long, or that holds one that is.

    Raises:
        ArgumentError: says which.
    """
    for count, choice in enumerate(choices, start=1):
        if count > MAX_CHOICES:
            raise ArgumentError(f"structured outputs: there are more than {MAX_CHOICES} choices")
        if len(choice) > MAX_CHOICE_CHARACTERS:
            raise ArgumentError(f"structured outputs: a choice has more than {MAX_CHOICE_CHARACTERS} characters")


def _longest_chain(start: T, key: Callable[[T], Hashable], edges: Callable[[T], Iterator[tuple[int, T]]]) -> int:
    """Weight of the heaviest way that begins at `start`; a way ends where it would come back to itself.

    Each node is walked through once, so this takes time in proportion to the edges.
    """
    heaviest = {key(start): 0}
    path = [(0, start, edges(start))]
    while path:
        weight, node, left = path[-1]
        own = key(node)
        for step, following in left:
            if key(following) not in heaviest:
                heaviest[key(following)] = 0
                path.append((step, following, edges(following)))
                break
            heaviest[own] = max(heaviest[own], step + heaviest[key(following)])
        else:
            path.pop()
            if path:
                before = key(path[-1][1])
                heaviest[before] = max(heaviest[before], weight + heaviest[own])
    return heaviest[key(start)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentError(f"structured outputs: the schema is not JSON: {error}") from error


def _references(schema: Any) -> Callable[[Any], Iterator[tuple[int, Any]]]:
    """From an object or list of the schema to those in it, and to what it refers to, which is one reference away."""

    def edges(value: Any) -> Iterator[tuple[int, Any]]:
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, dict | list):
                yield 0, inner
        reference = value.get("$ref") if isinstance(value, dict) else None
        if isinstance(reference, str) and isinstance(found := _found(schema, reference), dict | list):
            yield 1, found

    return edges


def _found(schema: Any, reference: str) -> Any:
    """What a reference within the document stands for; None for any other."""
    value = schema
    for part in reference.removeprefix("#").split("/")[1:] if reference.startswith("#") else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value if reference.startswith("#") else None


def _rules(text: str) -> dict[str, list[str]]:
    """Each rule of a grammar in Lark's notation, and the names in its body; strings are no names."""
    rules: dict[str, list[str]] = {}
    body: list[str] = []
    for match in _LARK_NAME.finditer(_LARK_TEXT.sub(" ", text)):
        name, defines = match.groups()
        if defines:
            body = rules.setdefault(name, [])
        else:
            body.append(name)
    return rules
