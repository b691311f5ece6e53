"""What `auto` chooses among: the drafters that copy, those that the user names, and the model the user gives.

Imports no torch. Knows configurations, no drafter.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.drafters import AUTO, DRAFTERS, drafter_class, entry_named
from forerun.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from forerun.engine.config import SpeculativeConfig

_OPTIONS = ("drafters", "model", "reproducible")
_HEAD_KEYS = ("eagle", "draft_vocab_size", "speculators_model_type")


def arms_of(config: SpeculativeConfig) -> list[SpeculativeConfig]:
    """One configuration for each drafter that takes part; a named drafter itself where the method is not `auto`.

    `auto` takes every drafter that copies and needs no option of its own, `prediction` and `suffix` among them; those
    in option ``drafters``, a list of configurations, which replace the ones of the same name; and option ``model``, a
    draft model or head. Option ``reproducible`` is read by `repeats`.

    Raises:
        ArgumentError: an option that `auto` does not have, or `auto` within `auto`.
    """
    if config.method != AUTO:
        return [config]
    for option in config.options:
        if option not in _OPTIONS:
            raise ArgumentError(
                f"{AUTO} has no option {option!r}; it has {', '.join(_OPTIONS)}; options of a drafter belong into its "
                f"own entry of drafters.{nearest(option, _OPTIONS)}"
            )
    named = _named(config)
    taken = {arm.method for arm in named}
    free = [_like(config, {"method": name}) for name in DRAFTERS if name not in taken and _copies_as_it_is(name)]
    return [*free, *named]


def repeats(config: SpeculativeConfig) -> bool:
    """Whether what is drafted for sampled requests that have a seed is deterministic, so that their text repeats.

    So it is under `auto` unless option ``reproducible`` is false: who drafts depends there on what other requests
    showed and on the clock. A drafter that is named draws as it was told to.

    Raises:
        ArgumentError: ``reproducible`` is neither true nor false.
    """
    wanted = config.options.get("reproducible", True)
    if config.method == AUTO and not isinstance(wanted, bool):
        raise ArgumentError(f"{AUTO}: reproducible is true or false, got {wanted!r}")
    return config.method == AUTO and bool(wanted)


def _named(config: SpeculativeConfig) -> list[SpeculativeConfig]:
    given = config.options.get("drafters", ())
    if isinstance(given, str | Mapping) or not all(isinstance(one, str | Mapping) for one in given):
        raise ArgumentError(f'{AUTO}: drafters is a list of names or configurations such as {{"method": "rest", ...}}')
    named = [_like(config, {"method": one} if isinstance(one, str) else one) for one in given]
    if (model := config.options.get("model")) is not None:
        named.append(_like(config, {"method": method_of(model), "model": model}))
    if any(arm.method == AUTO for arm in named):
        raise ArgumentError(f"{AUTO} cannot choose itself; name other drafters in its option drafters")
    return named


def _like(config: SpeculativeConfig, values: Mapping[str, Any]) -> SpeculativeConfig:
    """A drafter's configuration, with the common limit of tokens where it has none of its own."""
    found = type(config).parse(values)
    if found is None:
        raise ArgumentError(f'{AUTO}: leave a drafter out of drafters instead of {{"enabled": false}}')
    limit = config.num_speculative_tokens
    if found.num_speculative_tokens is not None or limit is None or found.method == AUTO:
        return found
    known = {field.name for field in dataclasses.fields(drafter_class(found.method).Config)}
    return dataclasses.replace(found, num_speculative_tokens=limit if "num_speculative_tokens" in known else None)


def _copies_as_it_is(name: str) -> bool:
    """Whether the drafter copies and can be built without options."""
    if not entry_named(name).copies:
        return False
    missing = dataclasses.MISSING
    fields = dataclasses.fields(drafter_class(name).Config)
    return all(field.default is not missing or field.default_factory is not missing for field in fields)


def method_of(model: Any) -> str:
    """``eagle3`` or ``eagle`` for a head, else ``draft_model``: from the object, its directory, or a hub id's name."""
    generation = getattr(getattr(model, "config", None), "generation", None)
    if not isinstance(model, str | Path):
        return {1: "eagle", 3: "eagle3"}.get(generation, "draft_model") if generation else "draft_model"
    from forerun import demo

    file = Path(demo.resolve(model)).expanduser() / "config.json"
    if not file.is_file():
        name = str(model).lower().replace("-", "").replace("_", "")
        return "eagle3" if "eagle3" in name else "eagle" if "eagle" in name else "draft_model"
    return _method_in(file)


def _method_in(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
        config = json.loads(text)
    except (OSError, ValueError):
        return "draft_model"  # whose loader says what is wrong with the directory
    if not isinstance(config, dict) or not any(key in text.lower() for key in _HEAD_KEYS):
        return "draft_model"
    from forerun.checkpoints import read_head

    return "eagle3" if read_head(file.parent, num_layers=64).config.generation == 3 else "eagle"
