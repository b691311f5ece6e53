"""A training recipe is a YAML file, ``key=value`` words, or both; later words win over earlier ones
and over the file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from forerun.drafters.kinds import kind_named, objective_for
from forerun.errors import ArgumentError, choices, nearest, refuse
from forerun.losses.objective import STRICT, Count, Natural, complaint
from forerun.training.loop.settings import TrainSettings

Settings = TypeVar("Settings")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """How documents are packed into batches."""

    length: Annotated[int, Field(ge=2)] = 2048  # Tokens per window; shorter documents share one, longer ones are cut
    rows: Natural = 1  # Windows per process and step
    min_tokens: Natural = 1  # Parts of documents with fewer counted tokens are dropped


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSettings:
    """The initial weights of what is trained, its size and its shape."""

    vocab_size: Natural | None = None  # Size of the draft vocabulary, the data's most frequent tokens; None: all
    start: str | None = None  # Directory or hub id of a head or draft model to continue from; None: a new head
    # `option_names` of the head's kind: ``boundaries``, ...; of a draft model what the target is shrunk to.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """The settings with which evaluation decodes."""

    max_tokens: Annotated[int, Field(ge=2)] = 64  # The first token has no draft
    num_speculative_tokens: Natural = 5  # Length of the chain and depth of the tree; at most what the head drafts
    top_k: Natural = 4
    nodes: Natural = 32  # Nodes of the dynamic tree, root not counted
    seed: Count = 0
    rows: Natural = 4  # Prompts at once


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecipe:
    """The prompts on which acceptance is measured during training, and how."""

    prompts: str | None = None  # Prepared data, held out; None: no evaluation
    count: Natural = 8  # Number of prompts, from the first documents that have one (`select_prompts`)
    prompt_tokens: Natural = 128  # Most tokens of a prompt; of plain text exactly this many
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe(Generic[Settings]):
    """The recipe of one run of ``forerun train KIND``."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", **STRICT)
    kind: str
    target: str  # Directory or hub id of the model to draft for
    data: str  # Directory that ``forerun data prepare`` wrote
    output: str  # Directory for checkpoints, log and the exported result
    mode: Literal["online", "offline"] = "online"  # Online runs the target during training; offline reads `features`
    features: str | None = None  # Directory that `forerun features` wrote
    target_dtype: str = "auto"  # The checkpoint's own, but float32 on a CPU that only emulates it
    target_parallel: Literal["none", "fsdp", "tp"] = "none"
    """If it does not fit one device; see `run.open_frozen_target`."""
    trackers: tuple[str, ...] = ()  # ``tensorboard``, ``wandb`` or ``trackio``, beside the console and ``log.jsonl``
    draft: DraftSettings = field(default_factory=DraftSettings)
    objective: Settings
    windows: WindowSettings = field(default_factory=WindowSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        refuse(
            (
                (self.mode == "offline") != (self.features is not None),
                "mode=offline and features=DIRECTORY belong together: give both or neither",
            ),
            (
                self.evaluation.prompts is None
                and (self.training.eval_every_steps or self.training.best_metric or self.training.patience),
                "training.eval_every_steps, training.best_metric and training.patience are about an evaluation, and "
                "there is none: name prepared data, held out, in evaluation.prompts, or leave them away",
            ),
            (
                self.training.find_rate and getattr(self.objective, "writer", "data") != "data",
                "training.find_rate reads the first batches several times, which objective.writer would write anew: "
                "find the rate in a run on the data's own text",
            ),
        )


def read_recipe(
    kind: str, path: str | Path | None, words: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> TrainRecipe[Any]:
    """Read a recipe for a kind from a YAML file, then from flags (by key), then from ``key.sub=value`` words. Raises
    ArgumentError for invalid keys or values; for an unknown key it names the nearest.
    """
    values: Any = {}
    if path is not None:
        try:
            values = yaml.load(Path(path).read_text(encoding="utf-8"), _Yaml)
        except yaml.YAMLError as error:
            raise ArgumentError(f"{path} is not YAML: {error}") from None
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise ArgumentError(f"{path} must hold keys and values, see recipes/ for examples")
        if "metadata" in values:
            from forerun.training.convert.modes import translate

            values = translate(values)
    for name, value in (flags or {}).items():
        if value is not None:
            _set(values, name, value)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name:
            raise ArgumentError(f"{word!r} is not key=value; for example training.learning_rate=1e-3")
        _set(values, name, yaml.load(text, _Yaml))
    _fill_empty_sections(values, TrainRecipe)
    return make_recipe(kind, values)


def _fill_empty_sections(values: dict[str, Any], made: type) -> None:
    """Put an empty mapping where a section has no keys, which YAML reads as null."""
    for name, hint in typing.get_type_hints(made).items():
        if name not in values or not (name == "objective" or dataclasses.is_dataclass(hint)):
            continue
        if values[name] is None:
            values[name] = {}
        if isinstance(values[name], dict) and name != "objective":
            _fill_empty_sections(values[name], hint)


def make_recipe(kind: str, values: Mapping[str, Any]) -> TrainRecipe[Any]:
    """Make a recipe for a kind of head from plain mappings. Raises as `read_recipe` does."""
    settings, stated = objective_for(kind_named(kind)).Settings, values.get("kind", kind)
    if stated != kind:
        raise ArgumentError(f"the recipe is one for {stated}: forerun train {stated}")
    # As JSON: there pydantic's strict mode takes mappings for dataclasses, lists for tuples and names for enums.
    plain = json.dumps({"objective": {}, **values, "kind": kind}, default=str)
    recipe_of: Any = TrainRecipe
    try:
        return TypeAdapter(recipe_of[settings]).validate_json(plain)
    except ValidationError as error:
        raise ArgumentError("; ".join(_complaint(found, settings) for found in error.errors())) from None


def to_plain(recipe: TrainRecipe[Any]) -> dict[str, Any]:
    """Return all values, defaults included, as JSON types."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


HOW = ("objective.gradient_checkpointing", "objective.flex_attention")  # the figures are computed, not what they are
MAY_CHANGE = ("output", "trackers", "target_parallel", "evaluation.settings.rows", *HOW)
"""Keys that a resumed run may change, besides those that `TrainSettings` allows."""


def flatten(recipe: Any, where: str = "") -> dict[str, Any]:
    """Return all values of a recipe by their full keys, such as ``objective.steps``."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(recipe):
        value, key = getattr(recipe, item.name), where + item.name
        found |= flatten(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return found


def _complaint(found: Mapping[str, Any], settings: type) -> str:
    """Put one of pydantic's errors into words; `settings` are those of the objective."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    path: list[str] = [part for part in found["loc"] if isinstance(part, str)]
    key = ".".join(path)
    if found["type"] == "unexpected_keyword_argument":
        known, where = [item.name for item in dataclasses.fields(_type_at(path[:-1], settings))], key[: -len(path[-1])]
        if not nearest(path[-1], known, 0.8):
            everywhere = _keys(TrainRecipe, settings)
            last_parts = {one.rpartition(".")[2] for one in everywhere}
            for close in difflib.get_close_matches(path[-1], last_parts, n=1, cutoff=0.8):
                meant = [repr(one) for one in everywhere if one.rpartition(".")[2] == close]
                return f"unknown key {key!r}. Did you mean {' or '.join(meant)}?"
        return f"unknown key {key!r}.{choices(key, [where + name for name in known])}"
    hint = _type_at(path, settings)
    if found["type"] == "missing" and len(path) == len(found["loc"]):
        return f"{key} is missing (--{key}, or {key}: in the recipe)"
    if dataclasses.is_dataclass(hint):
        return f"{key} holds further keys, got {found['input']!r}"
    return complaint(found, key, hint)


def _type_at(path: Sequence[str], settings: type) -> Any:
    hint: Any = TrainRecipe
    for name in path:
        hint = settings if name == "objective" else typing.get_type_hints(hint)[name]
    return hint


def _keys(made: type, settings: type, where: str = "") -> list[str]:
    """Return the whole keys of a recipe, such as ``training.steps``, for an objective with these `settings`."""
    hints, found = typing.get_type_hints(made), list[str]()
    for item in dataclasses.fields(made):
        hint = settings if item.name == "objective" else hints[item.name]
        key = where + item.name
        found += _keys(hint, settings, f"{key}.") if dataclasses.is_dataclass(hint) else [key]
    return found


class _Yaml(yaml.SafeLoader):  # type: ignore[misc]
    """Reads 1e-3 as a number, as YAML 1.2 does; for PyYAML, which follows YAML 1.1, it is text."""


_Yaml.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), [*"-+0123456789"])


def _set(values: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise ArgumentError(f"{name}: {part} holds a value, not further keys")
    values[last] = _merge(values.get(last), value)


def _merge(before: Any, value: Any) -> Any:
    """Merge two values: the later one wins; mappings are merged key by key."""
    if not isinstance(before, dict) or not isinstance(value, dict):
        return value
    return {**before, **{key: _merge(before.get(key), one) for key, one in value.items()}}
