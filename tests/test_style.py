"""House style, measured with `ast`: full annotations, docstrings on public names, no endless function or file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sources import FILES, ROOT, tree_of

MAX_FILE, MAX_FUNCTION, MAX_POSITIONAL = 700, 80, 6
PACKAGE = [path for path in FILES if path.is_relative_to(ROOT / "src/forerun")]
RIDDLES = re.compile(r"(Of|What|Whether|As|Where|Whose|The same)\b")
"""How a docstring begins that is no sentence, or none that stands alone."""
LAWS_LIVE_HERE = ("core", "decode", "drafters", "certify")
"""Where `p` and `q` would be read as probabilities, and literature disagrees about which is whose."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def length(function: Function) -> int:
    """Lines from ``def`` to the end, the docstring not counted: documentation is never too long."""
    first = function.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def public(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Public classes, functions and methods with a body of their own. An override inherits its docstring."""
    for node in body:
        if isinstance(node, (ast.ClassDef, *Function.__args__)) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef) and not node.bases:
                yield from public(node.body, f"{node.name}.")


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, its classes and functions, and of attributes and constants, which follow their value."""
    for node in ast.walk(tree):
        body = node.body if isinstance(node, (ast.Module, ast.ClassDef, *Function.__args__)) else []
        for before, statement in zip([None, *body], body, strict=False):
            documented = before is None or isinstance(before, (ast.Assign, ast.AnnAssign))
            value = statement.value if isinstance(statement, ast.Expr) else None
            if documented and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.value.strip()


def test_there_is_something_to_measure() -> None:
    assert len(FILES) > 20


def test_function_lengths() -> None:
    lengths = {f"{path.name}:{function.name}": length(function) for path in FILES for function in functions(path)}
    assert not {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION}


def test_the_first_sentence_of_a_docstring_stands_alone() -> None:
    found = [(path.name, text) for path in PACKAGE for text in docstrings(tree_of(path))]
    riddles = [f"{name}: {text[:60]}" for name, text in found if RIDDLES.match(text)]
    assert len(found) > 3000
    assert not riddles


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in homes.items() if len(places) > 1}
    assert not shared, "a class name means one thing in the whole package: put the room's noun before it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file(path: Path) -> None:
    text, tree = path.read_text(encoding="utf-8"), tree_of(path)
    assert len(text.splitlines()) <= MAX_FILE
    assert ast.get_docstring(tree), "a module says what it knows"
    missing = [name for name, node in public(tree.body) if not ast.get_docstring(node) and not _trivial(node)]
    assert not missing, f"no docstring: {missing}"
    assert not re.search(r"/(home|Users)/\w+/", text), "a home path"
    for node in ast.walk(tree):
        _check_node(node, path)


def _trivial(node: ast.AST) -> bool:
    """A property or override of one line, which its name says completely."""
    decorated = bool(getattr(node, "decorator_list", []))
    return isinstance(node, Function) and len(node.body) == 1 and (decorated or length(node) <= 3)


def _kernel(node: ast.AST) -> bool:
    """Of Triton: pointers, strides and sizes, of which its compiler finds the types."""
    return any(ast.unparse(one).startswith("triton.jit") for one in getattr(node, "decorator_list", []))


def _check_node(node: ast.AST, path: Path) -> None:
    where = f"{path.name}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, Function) and not _kernel(node):
        arguments = [*node.args.posonlyargs, *node.args.args]
        arguments = [a for a in arguments if a.arg not in ("self", "cls")]
        assert len(arguments) <= MAX_POSITIONAL, f"{where}: {len(arguments)} positional parameters"
        every = [*arguments, *node.args.kwonlyargs]
        assert all(a.annotation for a in every) and node.returns, f"{where}: {node.name} is not fully annotated"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        assert node.func.id != "print", f"{where}: print"
    if isinstance(node, ast.ImportFrom):
        assert all(alias.name != "*" for alias in node.names), f"{where}: import *"
    if isinstance(node, ast.ExceptHandler):
        assert node.type is not None, f"{where}: bare except"
    if set(path.relative_to(ROOT).parts) & set(LAWS_LIVE_HERE):
        _check_names(node, where)


def _check_names(node: ast.AST, where: str) -> None:
    """No `p` or `q`; `p = self.params` and `for p in parameters()` are no probabilities."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign) and not (isinstance(node.value, ast.Attribute) and node.value.attr == "params"):
        targets = list(node.targets)
    if isinstance(node, Function):
        targets = [ast.Name(id=argument.arg) for argument in (*node.args.args, *node.args.kwonlyargs)]
    names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    assert not names & {"p", "q"}, f"{where}: call it target_probs or draft_probs"
