"""Write docs/reference.md: the Python API from its docstrings, and every option with its type, default and meaning from
where it is declared. ``python docs/make_reference.py``; `make docs` calls it, and a test compares."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forerun
from forerun import modelopt
from forerun.drafters import DRAFTERS, drafter_class
from forerun.drafters.kinds import KINDS, kind_named, objective_for
from forerun.errors import ArgumentError
from forerun.serve.settings import ServeSettings
from forerun.training.recipe import TrainRecipe

PAGE = Path(__file__).with_name("reference.md")
HEAD = """# Reference
Made from the source by `docs/make_reference.py`: what is said here stands beside the code.

"""
SHOWN = ("LLM", "AsyncLLM", "hf", "SamplingParams", "StructuredOutputs", "SpeculativeConfig", "RequestOutput")
SHOWN = (*SHOWN, "CompletionOutput", "SpeculationStats", "StreamChunk", "StepTrace", "Source", "ForerunError")
"""Public names, in the order of the page."""
OF_MODELOPT = ("convert", "enable_huggingface_checkpointing", "save", "restore", "export_speculative_decoding")
OF_MODELOPT = (*OF_MODELOPT, "export_hf_checkpoint", "calibrate_frequent_vocab", "read_draft_vocabulary")
OF_MODELOPT = (*OF_MODELOPT, "OfflineStates", "HFARValidation", "EagleConfig", "MedusaConfig", "DFlashConfig")
"""Names of `forerun.modelopt`, in the order of the page."""
CALLED = {"LLM", "AsyncLLM", "OfflineStates", "HFARValidation"}
"""Classes that are shown by their signatures; others by their fields."""
NUMBERS = {
    "Natural": "int >= 1",
    "Count": "int >= 0",
    "Positive": "float > 0",
    "NotNegative": "float >= 0",
    "Share": "0 <= float <= 1",
    "Momentum": "0 <= float < 1",
}
"""What the types of a recipe's numbers allow (`forerun.training.recipe`)."""
SECTIONS = ("Args", "Raises", "Returns", "Yields")


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A field of a configuration."""

    name: str
    kind: str
    default: str
    meaning: str


def options(cls: type) -> Iterator[Option]:
    """The fields of a dataclass, those of its bases first, with what is said beside, above or below each."""
    own = {field.name: field for field in dataclasses.fields(cls)}
    hidden = {name for name, field in own.items() if not field.init or name.startswith("_")}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base) or base.__module__ == "builtins":
            continue
        source = textwrap.dedent(inspect.getsource(base))
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        lines = source.splitlines()
        for node, following in zip(body.body, [*body.body[1:], None], strict=True):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            name = node.target.id
            if name not in own or name in hidden or "ClassVar" in ast.unparse(node.annotation):
                continue
            hidden.add(name)
            yield Option(name, _kind(node.annotation), _default(own[name]), _meaning(node, following, lines))


def _kind(annotation: ast.expr) -> str:
    """Without what pydantic and cyclopts are told."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        inner = annotation.slice
        return _kind(inner.elts[0] if isinstance(inner, ast.Tuple) else inner)
    said = ast.unparse(annotation).replace("'", '"').replace(" | ", " or ")  # no bar: it would end a cell
    return re.sub(r"\b(?:" + "|".join(NUMBERS) + r")\b", lambda found: NUMBERS[found[0]], said)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value: Any = getattr(field.default, "value", field.default)
        return repr(value).replace("'", '"') if not isinstance(value, type) else value.__name__
    if field.default_factory is not dataclasses.MISSING:
        return repr(field.default_factory()).replace("'", '"')
    return "required"


def _meaning(node: ast.AnnAssign, following: ast.stmt | None, lines: list[str]) -> str:
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return " ".join(inspect.cleandoc(str(following.value.value)).split())
    assert node.end_lineno is not None and node.end_col_offset is not None
    beside = lines[node.end_lineno - 1][node.end_col_offset :].partition("# ")[2].removesuffix("fmt: skip").strip()
    above, line = list[str](), node.lineno - 2
    while lines[line].strip().startswith("# ") and "---" not in lines[line]:
        above.insert(0, lines[line].strip().removeprefix("# "))
        line -= 1
    return " ".join([*above, *([beside] if beside else [])])


def table(found: list[Option], prefix: str = "") -> str:
    """As Markdown."""
    rows = ["| option | type | default | |", "|---|---|---|---|"]
    for one in found:
        cells = (f"`{prefix}{one.name}`", f"`{one.kind}`", f"`{one.default}`", one.meaning.replace("``", "`"))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def text(docstring: str | None) -> str:
    """A docstring as Markdown: its sections are lists."""
    parts, section = list[str](), False
    for line in inspect.cleandoc(docstring or "").replace("``", "`").splitlines():
        if line.rstrip(":") in SECTIONS:
            parts += ["", f"**{line.rstrip(':')}**", ""]
            section = True
        elif section and re.match(r"    \S", line):
            parts.append(f"* {line.strip()}")
        elif section and line.strip():
            parts[-1] += f" {line.strip()}"
        else:
            parts.append(line)
    return "\n".join(parts).strip() + "\n"


def signature(called: Any, name: str) -> str:
    """As it is called, an argument a line where it is long."""
    found = inspect.signature(called)
    given = [one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values() if one.name != "self"]
    line = f"{name}{found.replace(parameters=given, return_annotation=inspect.Signature.empty)}"
    if len(line) > 100:
        inside = ",\n    ".join(map(str, _starred(given)))
        line = f"{name}(\n    {inside},\n)"
    return f"```text\n{line}\n```\n"


def _starred(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """With the star before those that are named."""
    kinds = [one.kind for one in parameters]
    for index, one in enumerate(parameters):
        if one.kind is one.KEYWORD_ONLY and kinds.index(one.kind) == index and one.VAR_POSITIONAL not in kinds:
            yield "*"
        yield str(one)


def api() -> Iterator[str]:
    """The public names."""
    own = {getattr(forerun, name).__name__ for name in forerun.__all__}  # One name for what has two
    public = {*own, *(name for name in modelopt.__all__ if not name.endswith("_DEFAULT_CFG"))}
    missing = public - {*SHOWN, *OF_MODELOPT}
    assert not missing, f"public, and not on the page: {missing}"
    yield "## Python\n"
    for module, name in [(forerun, name) for name in SHOWN] + [(modelopt, name) for name in OF_MODELOPT]:
        found = getattr(module, name)
        yield f"### `{module.__name__}.{name}`\n"
        if isinstance(found, type) and name not in CALLED:
            yield text(found.__doc__)
            if dataclasses.is_dataclass(found):
                yield table(list(options(found)))
            elif keys := getattr(found, "KEYS", {}):
                yield table([_mode_key(key, value) for key, value in keys.items()])
            continue
        yield signature(found, name)
        documented = found.__doc__ or (found.__init__.__doc__ if isinstance(found, type) else "")
        yield text(documented)
        members = vars(found).items() if isinstance(found, type) else ()
        for member, value in members:
            if not member.startswith("_") and isinstance(value, types.FunctionType):
                yield f"#### `{name}.{member}`\n"
                yield signature(value, f"{name[0].lower()}{name[1:]}.{member}".replace("lLM", "llm"))
                yield text(value.__doc__)


def _mode_key(name: str, key: Any) -> Option:
    """A key of a configuration of `convert`."""
    kind = "int" if key.default is None else type(key.default).__name__
    refusal = f"no other value: {key.refusal}" if key.refusal else ""
    return Option(name, kind, repr(key.default).replace("'", '"'), refusal)


def drafters() -> Iterator[str]:
    """Each drafter's options."""
    yield "## Drafters\nOptions of `speculative_config`, `--drafter-option` and a request's `speculative`, by method.\n"
    for name, entry in DRAFTERS.items():
        yield f"### `{name}`\n{entry.summary[0].upper()}{entry.summary[1:]}.\n"
        yield table(list(options(drafter_class(name).Config)))


def training() -> Iterator[str]:
    """The keys of a recipe."""
    yield "## Training\nKeys of a recipe, as in a file or behind `forerun train KIND`.\n"
    yield table(list(_keys(TrainRecipe, "")))
    yield "Keys of `objective`, by kind:\n"
    for kind in KINDS:
        try:
            settings = objective_for(kind_named(kind)).Settings
        except (ArgumentError, AttributeError):
            continue
        yield f"#### `objective` of `{kind}`\n"
        yield table(list(options(settings)), "objective.")


def _keys(cls: type, prefix: str) -> Iterator[Option]:
    hints = typing.get_type_hints(cls)
    for one in options(cls):
        hint = hints.get(one.name)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _keys(hint, f"{prefix}{one.name}.")
        elif not isinstance(hint, typing.TypeVar):
            yield dataclasses.replace(one, name=prefix + one.name)


def server() -> Iterator[str]:
    """The options of a server."""
    yield "## Server\nOptions of `forerun serve` and keys of its `--config` file; `_` is `-` on the command line.\n"
    yield table(list(options(ServeSettings)))


def page() -> str:
    """The whole."""
    return HEAD + "\n".join([*api(), *drafters(), *training(), *server()])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
