"""A training recipe is a YAML file, ``key=value`` words, or both; later words win over earlier ones
and over the file. Its settings have units and limits, which pydantic checks.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import torch
import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from forerun.devices import multiplies
from forerun.drafters.kinds import kind_named, objective_for
from forerun.errors import ArgumentError, choices, find_near, refuse
from forerun.losses.objective import STRICT, Count, Natural, NotNegative, Positive, Share, check_fields, complaint

Momentum = Annotated[float, Field(ge=0, lt=1)]
LOOP_MAY_CHANGE = frozenset({
    "max_seconds", "gradient_checkpointing", "save_every_s", "save_every_steps", "eval_every_steps", "keep_checkpoints",
    "log_every_steps", "patience", "find_rate",
})  # fmt: skip
"""A resumed run may set these anew; the rest decides what is trained."""
PARTS, LEAST_BETWEEN, MOST_EVALUATION = 10, 50, 0.2
"""The evaluations of a run where no number is given, the least steps between two, and the share of the time
of all steps beyond which one is left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSettings:
    """The settings of the training loop: how long, how fast and how carefully to train; ArgumentError names a
    field that is not allowed.
    """

    steps: Natural | None = None  # Optimizer steps in all, those of resumed runs included; none: what `epochs` comes to
    epochs: Positive = 1.0  # Passes over the data; read only where `steps` and `seconds` are none
    # Wall seconds of all steps, those of resumed runs included, instead of a number of steps: the rate falls with them
    seconds: Positive | None = None
    max_seconds: Positive | None = None  # Wall seconds of this run, evaluation included; then it saves and returns
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 3.0e-4  # Peak rate of AdamW, per step
    muon_learning_rate: Positive = 1.0e-3  # Peak rate of Muon, per step, scaled to AdamW's size of update
    find_rate: bool = False  # Before the first step, try factors on both rates in short runs from the same weights
    muon_momentum: Momentum = 0.95
    weight_decay: NotNegative = 0.01  # Decay of matrices, decoupled, per unit of rate; embeddings, norms: none
    # Shares of AdamW's first and second moment kept per step.
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = (0.9, 0.95)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Count | None = None  # Steps in which the rate rises linearly; None: `warmup_share` of all
    warmup_share: Share = 0.015  # Share of all steps; read only where `warmup_steps` is None
    min_rate_share: Share = 0.0  # Last rate of cosine and linear, as a share of the peak, in [0, 1]
    gradient_clip: NotNegative = 1.0  # Longest gradient, as Euclidean norm over all parameters; 0: no limit
    accumulation: Natural = 1
    # Dtype of activations (autocast), the rest is always float32; auto: bfloat16, or float32 on a CPU that emulates it
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    gradient_checkpointing: bool = False  # Compute activations again in the backward pass; the objective reads it
    seed: Count = 0  # Seed of dropout and the like, not of the data
    save_every_s: NotNegative = 600.0  # Wall seconds between checkpoints; 0: not by time. The end always saves
    save_every_steps: Count = 0  # Optimizer steps between checkpoints; 0: not by steps
    # Optimizer steps between evaluations; 0: only at the end. None: a tenth of the run, see `evaluates`
    eval_every_steps: Count | None = None
    patience: Natural | None = None  # Evaluations in a row without a better value that end training; None: any number
    best_metric: str | None = None  # The value of `evaluate` that decides which weights are best, higher is better
    keep_checkpoints: Count = 2  # Newest checkpoints kept; 0: all. The best weights are kept besides.
    log_every_steps: Natural = 10  # Optimizer steps between log lines; each averages over the steps since the last

    @property
    def moments(self) -> int:
        """Return how many numbers the optimizer remembers of each weight, at most."""
        return 2 if self.optimizer == "adamw" else 1

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.seconds is not None:
            raise ArgumentError("steps and seconds both say when training ends: leave one of them away")

    def halves(self, device: torch.device) -> bool:
        """Return whether activations on `device` are in bfloat16."""
        return multiplies(device, torch.bfloat16) if self.dtype == "auto" else self.dtype == "bfloat16"

    def total_steps(self, batches_per_epoch: int, step: int = 0, spent: float = 0.0) -> int:
        """Return the optimizer steps in all, at least 1, for data of so many batches per pass.

        For a run that `seconds` end it is what its pace comes to, that of `step` steps in `spent`
        seconds, and what `epochs` come to before the first.
        """
        if self.seconds is not None and step and spent:
            return step if spent >= self.seconds else max(step + 1, round(step * self.seconds / spent))
        if self.steps is not None:
            return self.steps
        return max(1, math.ceil(self.epochs * batches_per_epoch / self.accumulation - 1e-9))

    def evaluates(self, step: int, former: int, total: int, *, share: float = 0.0) -> bool:
        """Return whether to evaluate after `step` of `total` steps, where `former` was the last one evaluated.

        `share` is the time of evaluations so far, as a share of that of all steps.
        """
        if self.eval_every_steps is not None:
            return bool(self.eval_every_steps) and step % self.eval_every_steps == 0
        if share > MOST_EVALUATION or step - former < LEAST_BETWEEN:
            return False
        return PARTS * step // total > PARTS * former // total

    def warmup(self, total: int) -> int:
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_share * total)

    def fixed(self) -> dict[str, Any]:
        """Return the settings that a resumed run must keep, as ``training.<field>`` -> value."""
        return {f"training.{name}": value for name, value in asdict(self).items() if name not in LOOP_MAY_CHANGE}


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
    settings = objective_for(kind_named(kind)).Settings
    stated = values.get("kind", kind)
    if stated != kind:
        raise ArgumentError(f"the recipe is one for {stated}: forerun train {stated}")
    # As JSON: there pydantic's strict mode takes mappings for dataclasses, lists for tuples and names for enums.
    plain = json.dumps({"objective": {}, **values, "kind": kind}, default=str)
    recipe_of: Any = TrainRecipe
    try:
        return TypeAdapter(recipe_of[settings]).validate_json(plain)
    except ValidationError as error:
        raise ArgumentError("; ".join(_complaint(problem, settings) for problem in error.errors())) from None


def to_plain(recipe: TrainRecipe[Any]) -> dict[str, Any]:
    """Return all values, defaults included, as JSON types."""
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


HOW = ("objective.gradient_checkpointing", "objective.flex_attention")  # the figures are computed, not what they are
MAY_CHANGE = ("output", "trackers", "target_parallel", "evaluation.settings.rows", *HOW)
"""Keys that a resumed run may change, besides those that `TrainSettings` allows."""


def flatten(recipe: Any, where: str = "") -> dict[str, Any]:
    """Return all values of a recipe by their full keys, such as ``objective.steps``."""
    values: dict[str, Any] = {}
    for item in dataclasses.fields(recipe):
        value, key = getattr(recipe, item.name), where + item.name
        values |= flatten(value, f"{key}.") if dataclasses.is_dataclass(value) else {key: value}
    return values


def _complaint(found: Mapping[str, Any], settings: type) -> str:
    """Put one of pydantic's errors into words; `settings` are those of the objective."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    path: list[str] = [part for part in found["loc"] if isinstance(part, str)]
    key = ".".join(path)
    if found["type"] == "unexpected_keyword_argument":
        keys = [item.name for item in dataclasses.fields(_type_at(path[:-1], settings))]
        where = key[: -len(path[-1])]
        if close := find_near(path[-1], keys, 0.8):
            return f"unknown key {key!r}. Did you mean {where + close!r}?"
        everywhere = _keys(TrainRecipe, settings)
        last_parts = {one.rpartition(".")[2] for one in everywhere}
        if close := find_near(path[-1], last_parts, 0.8):
            meant = [repr(one) for one in everywhere if one.rpartition(".")[2] == close]
            return f"unknown key {key!r}. Did you mean {' or '.join(meant)}?"
        return f"unknown key {key!r}.{choices(key, [where + name for name in keys])}"
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
    hints, names = typing.get_type_hints(made), list[str]()
    for item in dataclasses.fields(made):
        hint = settings if item.name == "objective" else hints[item.name]
        key = where + item.name
        names += _keys(hint, settings, f"{key}.") if dataclasses.is_dataclass(hint) else [key]
    return names


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
