"""What a training run is made of: a recipe file, ``key=value`` words, or both, as one typed value.

Later words win over earlier ones and over the file. Knows which values there are, not what is made of them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forerun.drafters.heads.kinds import kind_named
from forerun.errors import ArgumentError, nearest
from forerun.training.evaluate import EvaluationSettings
from forerun.training.loop.settings import TrainSettings
from forerun.training.objectives import objective_for

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowSettings:
    """How documents become batches."""

    length: int = 2048
    """Tokens per window; shorter documents share one, longer ones are cut."""
    rows: int = 1
    """Windows per process and step."""
    min_tokens: int = 1
    """Pieces with fewer tokens to learn are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftSettings:
    """The head."""

    vocab_size: int | None = None
    """Tokens that the head can propose, the most frequent of the data; None is all of them."""
    start: str | None = None
    """Directory of a head to go on from, instead of a fresh one."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Variant and shape: the `OPTIONS` of the kind's configuration, of EAGLE-3 ``boundaries``, ``fc_norm``, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRecipe:
    """What is decoded while training, and from which prompts."""

    prompts: str | None = None
    """Prepared data, held out of training, whose first documents are cut to prompts; None: no evaluation."""
    count: int = 8
    """Prompts, at most."""
    prompt_tokens: int = 128
    """Tokens of each, from the start of its document."""
    settings: EvaluationSettings = field(default_factory=EvaluationSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRecipe:
    """One run of ``forerun train KIND``."""

    kind: str
    """Of the head."""
    target: str
    """Directory or hub id of the model to draft for."""
    data: str
    """Directory that ``forerun data prepare`` wrote."""
    output: str
    """Directory of checkpoints, log and the finished head."""
    mode: str = "online"
    """``online`` runs the target beside the head; ``offline`` reads `features`."""
    features: str | None = None
    """Directory that `forerun features` wrote."""
    target_dtype: str = "bfloat16"
    """Of the frozen target."""
    target_parallel: str = "none"
    """With several processes, where the target does not fit one device: ``fsdp`` gives each a part of every layer's
    weights, ``tp`` a part of its computation (transformers' ``tp_plan``)."""
    trackers: tuple[str, ...] = ()
    """``tensorboard``, ``wandb`` or ``trackio``, beside the console and ``log.jsonl``."""
    draft: DraftSettings = field(default_factory=DraftSettings)
    objective: Any
    """The settings of the kind's objective."""
    windows: WindowSettings = field(default_factory=WindowSettings)
    training: TrainSettings = field(default_factory=TrainSettings)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)

    def __post_init__(self) -> None:
        if self.mode not in ("online", "offline"):
            raise ArgumentError(
                f"mode is 'online' or 'offline', got {self.mode!r}.{nearest(self.mode, ('online', 'offline'))}"
            )
        if self.target_parallel not in ("none", "fsdp", "tp"):
            raise ArgumentError(f"target_parallel is 'none', 'fsdp' or 'tp', got {self.target_parallel!r}")
        if (self.mode == "offline") != (self.features is not None):
            raise ArgumentError("mode=offline and features=DIRECTORY belong together: give both or neither")


def read_recipe(
    kind: str, path: str | Path | None, words: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> TrainRecipe:
    """A recipe for a kind of head from a YAML file, then from flags, then from ``key.sub=value`` words.

    Raises:
        ArgumentError: the file is no mapping, a word is not ``key=value``, a key is unknown (the message names the
            nearest), something is missing, or a value has the wrong type.
    """
    values = _from_file(path) if path is not None else {}
    values.update({name: value for name, value in (flags or {}).items() if value is not None})
    for word in words:
        _apply(values, word)
    return make_recipe(kind, values)


def make_recipe(kind: str, values: Mapping[str, Any]) -> TrainRecipe:
    """A recipe for a kind of head from plain mappings; errors as `read_recipe`."""
    settings, stated = objective_for(kind_named(kind)).Settings, values.get("kind", kind)
    if stated != kind:
        raise ArgumentError(f"the recipe is one for {stated}: forerun train {stated}")
    return build(TrainRecipe, {"objective": {}, **values, "kind": kind}, hints={"objective": settings})


def to_plain(recipe: TrainRecipe) -> dict[str, Any]:
    """Every value, defaults included, as JSON and YAML know them."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(recipe)))
    return plain


MAY_CHANGE = frozenset(
    {"output", "trackers", "target_parallel", "objective.gradient_checkpointing", "evaluation.settings.rows"}
)
"""What a resumed run may set anew, besides what `TrainSettings` allows. All else decides what is trained, or which
weights are the best."""


def flat(recipe: Any, where: str = "") -> dict[str, Any]:
    """Every value of a recipe under its whole key: ``objective.steps``."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(recipe):
        value = getattr(recipe, item.name)
        nested = dataclasses.is_dataclass(value)
        found.update(flat(value, f"{where}{item.name}.") if nested else {where + item.name: value})
    return found


def build(cls: type[T], values: Mapping[str, Any], where: str = "", hints: Mapping[str, Any] | None = None) -> T:
    """A dataclass from plain mappings, strictly; `hints` say types that the class leaves open."""
    fields = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
    hints = {**typing.get_type_hints(cls), **(hints or {})}
    for name in values:
        if name not in fields:
            raise ArgumentError(
                f"unknown key {where + name!r}; there are {', '.join(where + known for known in fields)}."
                f"{nearest(name, fields)}"
            )
    unset = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [
        name for name, item in fields.items() if (item.default, item.default_factory) == unset and name not in values
    ]
    if missing:
        raise ArgumentError(f"missing: {', '.join(where + name for name in missing)}")
    return cls(**{name: _typed(hints[name], value, where + name) for name, value in values.items()})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """`value` as the type that `hint` wants; whole numbers are fine where fractions are wanted."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if not isinstance(value, Mapping):
            raise ArgumentError(f"{name} holds further keys, got {value!r}")
        return build(hint, value, f"{name}.")
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
        return None if value is None else _typed(choices[0], value, name)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        known = [str(item.value) for item in hint]
        if value not in known:
            raise ArgumentError(f"{name} is one of {', '.join(known)}, got {value!r}.{nearest(str(value), known)}")
        return hint(value)
    if origin is typing.Literal:
        return value  # the dataclass says what is allowed
    wanted = origin or hint
    if wanted is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        return _number(value, name)
    if wanted is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if isinstance(wanted, type) and not (isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))):
        raise ArgumentError(f"{name} must be {wanted.__name__}, got {value!r}")
    return value


def _number(value: float | str, name: str) -> float:
    """YAML reads 1e-3 as text."""
    try:
        return float(value)
    except ValueError:
        raise ArgumentError(f"{name} must be a number, got {value!r}") from None


def _from_file(path: str | Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ArgumentError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ArgumentError(f"{path} must hold keys and values, see recipes/ for examples")
    return values


def _apply(values: dict[str, Any], word: str) -> None:
    import yaml

    name, equals, text = word.partition("=")
    if not equals or not name:
        raise ArgumentError(f"{word!r} is not key=value; for example training.learning_rate=1e-3")
    *path, last = name.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            raise ArgumentError(f"{name}: {part} holds a value, not further keys")
    values[last] = yaml.safe_load(text)
