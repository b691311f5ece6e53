"""Who imports whom, read with `ast`: no import cycle, no module that tests alone use, nothing undeclared.

Imports inside functions and under ``TYPE_CHECKING`` count: they tie modules together as others do. What stands in the
lists below is a debt: a new entry fails, and so does one that is paid and still listed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Set
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from forerun.errors import ArgumentError
from sources import FILES, ROOT, tree_of

SOURCE = ROOT / "src"
USERS = ("benchmarks", "deploy", "docs", "examples", "recipes")
"""Folders beside `src` whose scripts count as users of a module; tests do not."""
GROUND = (
    "types",
    "params",
    "errors",
    "devices",
    "writing",
    "moved",
    "nesting",
    "plots",
    "shipped",
    "endpoints",
    "option_groups",
    "other_engines",
    "intervals",
)
ORDER = (
    GROUND,
    ("core",),
    ("model",),
    ("decode",),
    ("drafters",),
    ("losses",),
    ("heads",),
    ("control",),
    ("engine",),
    ("training",),
    ("modelopt",),
    ("plan", "certify", "demo", "serve", "bench"),
    ("deploy",),
    ("speedup",),
    ("cli",),
    ("__main__",),
)
"""Packages and modules of forerun from the bottom up: nothing imports what stands in a later line. No exceptions."""
FOR_TESTS_ALONE: set[str] = set()
"""Modules that neither the package nor a script of `USERS` reaches."""
HOSTS = {
    "vllm": "the program that loads `forerun.training.features.vllm_connector`; it wants an environment of its own",
    "sglang": "the program that loads `forerun.deploy.sglang`; so does this one",
    "llama_cpp": "the extra `gguf`: llama.cpp, which is built from source",
    "conversion": "llama.cpp's sources, in which `forerun.deploy.trials.gguf_converter` runs",
    "convert_hf_to_gguf": "these, too",
    "triton": "it comes with torch for CUDA, and `forerun.model.kernels.triton_ops` asks for it",
}
"""Import names that are not declared, and why."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

Graph = Mapping[str, Set[str]]


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package and of the benchmark's by its name."""
    roots = {path: SOURCE if path.is_relative_to(SOURCE) else ROOT for path in FILES}
    return {module_name(path, root): tree_of(path) for path, root in roots.items()}


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted names that a file imports; ``from a import b`` may mean the module ``a.b`` and gives both."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def innermost(name: str, known: Set[str]) -> str | None:
    """The module that an imported name is or lies in; None where it is none of `known`."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def edges(tree: ast.Module, known: Set[str]) -> set[str]:
    """The modules of the package that a file imports."""
    return {found for name in imported(tree) if (found := innermost(name, known)) is not None}


@cache
def graph() -> dict[str, set[str]]:
    """The modules of the package that each one of them imports."""
    return {name: edges(tree, modules().keys()) for name, tree in modules().items()}


def named(tree: ast.Module, known: Set[str]) -> set[str]:
    """Modules that a file names in a string, as registries do: ``"forerun.drafters.lookup.ngram:NgramDrafter"``; or, as
    vLLM wants a plug-in named, ``"forerun.deploy.vllm.ForerunProposer"``."""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return {name for text in strings for name in (text.partition(":")[0], text.rpartition(".")[0]) if name in known}


def knots(graph: Graph) -> set[frozenset[str]]:
    """Sets of nodes that reach one another, single nodes only if they name themselves."""
    reach = {node: reached(graph, graph[node]) for node in graph}
    found = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]}
    return found


def reached(graph: Graph, start: Set[str]) -> set[str]:
    """All nodes on a way that begins at `start`, `start` included."""
    found, waiting = set[str](), list(start)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += graph.get(node, ())
    return found


def used() -> set[str]:
    """What is reached from the public names, the command line, ``python -m``, entry points and scripts of `USERS`."""
    known = modules().keys()
    ways = {at: graph()[at] | named(tree, known) | {at.rpartition(".")[0]} - {""} for at, tree in modules().items()}
    start = {"forerun", *(name for name in known if name.endswith(".__main__"))}
    verbs = re.search(
        r"^VERBS = \{(.*?)^\}", (SOURCE / "forerun/cli/__init__.py").read_text(), re.MULTILINE | re.DOTALL
    )
    assert verbs is not None
    start |= {"forerun.cli"} | {f"forerun.cli.{verb}" for verb in re.findall(r'^    "(\w+)":', verbs[1], re.MULTILINE)}
    groups = PROJECT.get("entry-points", {}).values()
    start |= {target.partition(":")[0] for group in groups for target in group.values()}
    for path in (path for folder in USERS for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        start |= edges(tree, known) | named(tree, known)
    return reached(ways, start)


def test_no_import_cycle() -> None:
    found = knots({name: others - {name} for name, others in graph().items()})
    assert not found, f"modules that import one another: {sorted(map(sorted, found))}"


def test_no_arrow_up() -> None:
    level = {name: height for height, names in enumerate(ORDER) for name in names}
    found: dict[tuple[str, str], set[str]] = {}
    for name, others in graph().items():
        own = name.split(".")[1] if name.startswith("forerun.") else None
        for other in others if own is not None else ():
            theirs = other.split(".")[1] if other.startswith("forerun.") else None
            assert own in level, f"{own} stands nowhere in ORDER"
            if theirs is not None and level[theirs] > level[own]:
                found.setdefault((own, theirs), set()).add(name)
    assert not found, f"they import what stands above them: {found}"


def test_no_module_for_tests_alone() -> None:
    found = modules().keys() - used()
    assert not found - FOR_TESTS_ALONE, f"imported by tests alone: {sorted(found - FOR_TESTS_ALONE)}"
    assert not FOR_TESTS_ALONE - found, f"used or gone, take it off the list: {sorted(FOR_TESTS_ALONE - found)}"


def test_the_package_needs_nothing_that_is_not_installed() -> None:
    found = {name for name, others in graph().items() if name.startswith("forerun") and beside(others)}
    assert not found, f"they import the benchmarks: {sorted(found)}"
    assert beside(modules().keys()), "nobody looks at the benchmarks any more"


def beside(names: Set[str]) -> set[str]:
    """Those of the modules that stand beside the package."""
    return {name for name in names if not name.startswith("forerun")}


def test_every_import_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in ("serve", "gguf", "train", "bench", "peft") for line in extras[extra]),
    ]
    declared = {distribution(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in lines}
    tops = {name.partition(".")[0] for tree in modules().values() for name in imported(tree)}
    known = packages_distributions()
    missing = {
        top
        for top in tops - sys.stdlib_module_names - HOSTS.keys() - {"forerun", "benchmarks"}
        if not {distribution(name) for name in known.get(top, [top])} & declared
    }
    assert not missing, f"imported and not declared in pyproject.toml: {sorted(missing)}"
    assert HOSTS.keys() <= tops


def test_what_tests_and_benchmarks_outside_ci_import_is_there() -> None:
    """Of files that run in other environments, or on another machine, names that forerun does not have any more."""
    missing = []
    for path in (*ROOT.glob("tests_*/*.py"), *ROOT.glob("benchmarks/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("forerun"):
                continue
            try:
                module = importlib.import_module(node.module or "")
            except (ImportError, ArgumentError) as error:
                assert any(host.replace("_", "-") in str(error) or host in str(error) for host in HOSTS), (path, error)
                continue
            for name in (alias.name for alias in node.names):
                inside = hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{name}") is not None
                if not hasattr(module, name) and not inside:
                    missing.append(f"{path.relative_to(ROOT)}: {node.module}.{name}")
    assert not missing


def distribution(name: str) -> str:
    """A distribution's name as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize(
    ("graph", "found"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"c"}, "c": {"b"}}, [{"b", "c"}]),
        ({"a": {"a"}}, [{"a"}]),
        ({"a": {"b"}, "b": {"a"}, "c": {"d"}, "d": {"c", "a"}}, [{"a", "b"}, {"c", "d"}]),
    ],
)
def test_cycles_are_found(graph: Graph, found: list[set[str]]) -> None:
    assert knots(graph) == {frozenset(knot) for knot in found}


def test_imports_that_are_not_at_the_top_count() -> None:
    text = "if TYPE_CHECKING:\n    from a.b import C\ndef f():\n    import a.d\n    from a import e\n"
    assert edges(ast.parse(text), {"a", "a.b", "a.d", "a.e"}) == {"a.b", "a.d", "a.e"}
