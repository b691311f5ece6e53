"""`SpeculativeConfig`: vLLM's ``speculative_config`` as one typed value. Imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.drafters import AUTO, DRAFTERS, drafter_class, entry_named, methods
from forerun.drafters.kinds import KINDS
from forerun.errors import ArgumentError, CheckpointError, DataError, choices, refuse
from forerun.heads.catalogue import check_head_named
from forerun.model.checks import check_found
from forerun.model.other_apps import LM_STUDIO, OLLAMA
from forerun.writing import parse_json, read_object

MAX_SPECULATIVE_TOKENS = 128  # Larger K is refused: no drafter is that good, and the tree mask grows with its square

_ALIASES = {
    "drafter": "method",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "rejection_sample_method": "rule",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
    "max_matching_ngram_size": "prompt_lookup_max",
}
_RULE_ALIASES = {"strict": "token_rejection", "standard": "token_rejection"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """A speculative configuration: the drafter, its maximum draft length, and the verification rule."""

    method: str
    num_speculative_tokens: int | None = None  # Most drafted tokens on one path; None takes the method's own default
    rule: str | None = None  # A verification rule by name; None takes the best for how the draft was drawn
    adaptive: bool = True
    """Let the policy decide at every step how much to draft, or nothing, up to
    `num_speculative_tokens`. Models then draft deterministically for sampled requests that have a
    seed, so that their text repeats. False drafts the same at every step, as the drafter draws.
    """
    options: Mapping[str, Any] = field(default_factory=dict)  # The method's own options

    @classmethod
    def parse(cls, config: Mapping[str, Any] | str | SpeculativeConfig | None) -> SpeculativeConfig | None:
        """Build a configuration from a dict, from JSON, from a method's bare name, or from vLLM's
        ``speculative_config``; None and ``{"enabled": False}`` mean off.

        Raises:
            ArgumentError: no method can be inferred, or a value is out of range.
        """
        if config is None or isinstance(config, SpeculativeConfig):
            return config
        if isinstance(config, str):
            config = _from_json(config) if config.lstrip().startswith(("{", "[", '"')) else {"method": config.strip()}
        values = {_ALIASES.get(key, key): value for key, value in config.items()}
        enabled = values.pop("enabled", True)
        if enabled is False:
            return None
        method = _method(values)
        tokens = values.pop("num_speculative_tokens", None)
        adaptive = values.pop("adaptive", True)
        rule = values.pop("rule", None)
        refuse(
            (enabled is not True, f"enabled is true or false, got {enabled!r}"),
            (
                tokens is not None and (type(tokens) is not int or not 1 <= tokens <= MAX_SPECULATIVE_TOKENS),
                f"num_speculative_tokens must be a whole number from 1 to {MAX_SPECULATIVE_TOKENS}, got {tokens!r}",
            ),
            (not isinstance(adaptive, bool), f"adaptive is true or false, got {adaptive!r}"),
            (
                not adaptive and method == AUTO,
                f"{AUTO} is adaptive by nature; name a drafter to draft the same at every step",
            ),
            (rule is not None and not isinstance(rule, str), f"rule is the name of a verification rule, got {rule!r}"),
        )
        rule = _RULE_ALIASES.get(rule, rule)
        return cls(method=method, num_speculative_tokens=tokens, rule=rule, adaptive=adaptive, options=values)

    def with_model(self, model: str) -> SpeculativeConfig:
        """Return a copy in which `model`, a directory, replaces the configuration's only model, which may be that of a
        member in ``drafters``. Raises ArgumentError if it has none or several."""
        members = [dict(member) for member in members_of(self.named)]
        options = {**self.options, "drafters": members} if members else dict(self.options)
        holders = [holder for holder in (options, *members) if holder.get("model") is not None]
        if len(holders) != 1:
            models = f"{len(holders)} models" if holders else "no model that could be replaced"
            raise ArgumentError(f"drafter {self.method!r} has {models}; a new model can replace only a single one")
        holders[0]["model"] = model
        return dataclasses.replace(self, options=options)

    @property
    def named(self) -> dict[str, Any]:
        """The method and its own options, as a member of a combined drafter is written."""
        return {"method": self.method, **self.options}

    @property
    def drafter_options(self) -> dict[str, Any]:
        """The values that the drafter's `Config` is built from."""
        tokens = {} if self.num_speculative_tokens is None else {"num_speculative_tokens": self.num_speculative_tokens}
        return {**tokens, **self.options}

    @property
    def key(self) -> str:
        """A key that is equal for configurations that can share one drafter. Measured draft costs are kept under it."""
        options = {name: _plain(value) for name, value in sorted(self.drafter_options.items())}
        return f"{self.method}:{json.dumps(options, sort_keys=True)}"


def check_sizes(max_model_len: int | None, max_num_seqs: int, kv_cache_tokens: int | None) -> None:
    """Raise ArgumentError if an engine's sizes, named as in `LLM`, are out of range or contradict each other."""
    if max_num_seqs < 1:
        raise ArgumentError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
    if max_model_len is not None and max_model_len < 2:
        raise ArgumentError(f"max_model_len must be at least 2, got {max_model_len}")
    if max_model_len is not None and kv_cache_tokens is not None and kv_cache_tokens < max_model_len:
        raise ArgumentError(
            f"kv_cache_tokens {kv_cache_tokens} cannot hold one request of max_model_len {max_model_len}; lower that"
        )


def from_old_keywords(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the speculative keywords of older vLLM versions from `keywords`, and return them as a
    ``speculative_config``.
    """
    old = ("speculative_model", "num_speculative_tokens", "ngram_prompt_lookup_max", "ngram_prompt_lookup_min")
    keywords_given = {name: keywords.pop(name, None) for name in old}
    stated = {name: value for name, value in keywords_given.items() if value is not None}
    if not stated:
        return None
    model = stated.pop("speculative_model", None)
    if model is None:
        raise ArgumentError(f"{', '.join(stated)} given without speculative_model; use speculative_config={{...}}")
    return {"method": "ngram", **stated} if model == "[ngram]" else {"model": model, **stated}


def _from_json(text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ArgumentError(
            f"the speculative configuration is not JSON ({error}); expected for example "
            '{"method": "ngram", "num_speculative_tokens": 8}'
        ) from None
    if not isinstance(value, dict):
        raise ArgumentError(f"the speculative configuration must be a JSON object, got {type(value).__name__}")
    return value


def _method(values: dict[str, Any]) -> str:
    method, model = values.pop("method", None), values.get("model")
    if model in ("ngram", "[ngram]") and method in (None, "ngram"):
        method = "ngram"
        del values["model"]
    elif method is None and model is not None:
        method = "draft_model"
    if method is None:
        raise ArgumentError(f"the speculative configuration names no method; there are {', '.join(methods())}")
    entry_named(str(method))
    return str(method)


def _plain(value: Any) -> Any:
    """Convert a value to a JSON type; other objects, such as a loaded model, are represented by type and identity."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    return value if isinstance(value, str | int | float | bool | type(None)) else f"{type(value).__name__}@{id(value)}"


# --- the drafters that `auto` chooses among ---------------------------------------------------------------------------

_AUTO_OPTIONS = ("drafters", "model", "greedy_with_seed")
_COVERED = frozenset({"ngram"})
"""Drafters that `auto` queries only if the configuration names them: `suffix` finds what `ngram` finds. Querying both
took 1.01 times the passes' time on 24 questions of Spec-Bench (SmolLM2-135M-Instruct, T = 0), and 0.4 ms more host time
a step.
"""


def arms_of(config: SpeculativeConfig, *, every: bool = False) -> list[SpeculativeConfig]:
    """Return the configuration of each drafter that the policy chooses among: of one drafter if the method is not
    `auto`.

    For `auto` these are every lookup drafter that needs no option, such as `prediction` and `suffix`, but not `ngram`
    (`_COVERED`) unless `every` is set; the drafters in option ``drafters``, a list of configurations, which replace the
    ones of the same name; and the draft model or head in option ``model``. Raises ArgumentError for an option that
    `auto` does not have, and for `auto` within `auto`.
    """
    if config.method != AUTO:
        return [config]
    for option in config.options:
        if option not in _AUTO_OPTIONS:
            raise ArgumentError(
                f"{AUTO} has no option {option!r}.{choices(option, _AUTO_OPTIONS, 'It has')} Options of a drafter "
                "belong into its own entry of drafters."
            )
    named = _named(config)
    taken = {arm.method for arm in named} | (frozenset() if every else _COVERED)
    free = [_like(config, {"method": name}) for name in DRAFTERS if name not in taken and _needs_no_option(name)]
    return [*free, *named]


def greedy_with_seed(config: SpeculativeConfig) -> bool:
    """Return the option of that name: whether drafters under the policy draft deterministically for sampled requests
    with a seed. Their text then repeats, although how much is drafted, and by which drafter, depends on other requests
    and on the clock. Raises ArgumentError if the option is neither true nor false.
    """
    given = config.options.get("greedy_with_seed", True)
    if config.method == AUTO and not isinstance(given, bool):
        raise ArgumentError(f"{AUTO}: greedy_with_seed is true or false, got {given!r}")
    return bool(given)


def _named(config: SpeculativeConfig) -> list[SpeculativeConfig]:
    named = [_like(config, member) for member in members_of(config.named)]
    if (model := config.options.get("model")) is not None:
        named.append(_like(config, {"method": method_of(model), "model": model}))
    if any(arm.method == AUTO for arm in named):
        raise ArgumentError(f"{AUTO} cannot choose itself; name other drafters in its option drafters")
    return named


def _like(config: SpeculativeConfig, values: Mapping[str, Any]) -> SpeculativeConfig:
    """Return a member's configuration, with ``num_speculative_tokens`` of `config` if it has none of its own."""
    member = type(config).parse(values)
    if member is None:
        raise ArgumentError(f'{AUTO}: leave a drafter out of drafters instead of {{"enabled": false}}')
    limit = config.num_speculative_tokens
    if member.num_speculative_tokens is not None or limit is None or member.method == AUTO:
        return member
    options = {field.name for field in dataclasses.fields(drafter_class(member.method).Config)}
    return dataclasses.replace(member, num_speculative_tokens=limit if "num_speculative_tokens" in options else None)


def _needs_no_option(name: str) -> bool:
    """Return whether a method is a lookup drafter whose options all have defaults."""
    if not entry_named(name).is_lookup:
        return False
    needed = inspect.signature(drafter_class(name).Config).parameters.values()
    return all(parameter.default is not parameter.empty for parameter in needed)


def method_of(model: Any) -> str:
    """Return the method that drafts with a model: a head's kind, else ``pard`` or ``draft_model``. It is inferred from
    the object, the directory, or the name of a hub id.
    """
    if not isinstance(model, str | Path):
        config = getattr(model, "config", None)
        return str(getattr(config, "kind", "draft_model" if getattr(config, "pard_token", None) is None else "pard"))
    from forerun.model.names import resolve

    if str(model).endswith(".gguf") or str(model).startswith((OLLAMA, LM_STUDIO)):
        return "draft_model"  # The file is opened when the drafter is built
    folder = Path(resolve(model)).expanduser()
    if not (folder / "config.json").is_file():
        name = str(model).lower().replace("-", "").replace("_", "")
        kinds = ("peagle", "eagle3", "eagle", "dflash", "dspark", "medusa", "/pard")
        return next((kind.removeprefix("/") for kind in kinds if kind in name), "draft_model")
    try:
        config = read_object(folder / "config.json", "expected a model's configuration")
    except DataError:
        return "draft_model"  # Its loader says what is wrong with the directory
    from forerun.heads.files import is_head, read_head

    if is_head(folder):
        return str(read_head(folder, num_layers=config.get("num_target_layers") or 64).config.kind)
    return "pard" if "pard_token" in config else "draft_model"


def _all_options(config: SpeculativeConfig) -> list[Mapping[str, Any]]:
    """Return the options of a configuration, method included, and those of each member of a combined drafter."""
    return [{**config.options, "method": config.method}, *members_of(config.named)]


def members_of(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the options of each member in a combined drafter's option ``drafters``, method included. Raises
    ArgumentError if that is no list of names or configurations.
    """
    members = options.get("drafters", ())
    if not isinstance(members, list | tuple) or not all(isinstance(member, str | Mapping) for member in members):
        raise ArgumentError(
            f'{options.get("method")}: drafters is a list of names or configurations such as {{"method": "suffix"}}, '
            f"got {members!r}"
        )
    return [{"method": member} if isinstance(member, str) else member for member in members]


def list_members(options: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the options of a drafter and of those that it is made of, however deep. Raises as `members_of` does."""
    yield options
    for member in members_of(options):
        yield from list_members(member)


def check_models_named(config: SpeculativeConfig | None, target_name: str) -> None:
    """Raise the error of a drafter whose option ``model`` is missing, or whose model does not exist, before anything is
    loaded.
    """
    for options in [] if config is None else _all_options(config):
        kind, model = KINDS.get(str(options.get("method"))), options.get("model")
        if kind is not None and kind.trains == "head":
            check_head_named(kind, model, target_name)
        if isinstance(model, str):
            check_found(model)
        if kind is not None and kind.trains == "head" and kind.in_target is None and isinstance(model, str | Path):
            _refuse_whole_model(kind.name, Path(model).expanduser())


def _refuse_whole_model(method: str, folder: Path) -> None:
    """Raise ArgumentError where a directory that is named as a head's holds a whole model."""
    if not (folder / "config.json").is_file() or not next(folder.glob("*.safetensors"), None):
        return
    config = read_object(folder / "config.json", "expected a head's configuration", CheckpointError)
    whole = [name for name in config.get("architectures") or [] if str(name).endswith("ForCausalLM")]
    if not whole:
        return
    from forerun.heads.files import is_head  # Published heads name such a class, too: tensors tell them from models

    if not is_head(folder):
        raise ArgumentError(
            f"{folder} is a whole model ({whole[0]}), and {method} drafts with a head: --drafter draft_model drafts "
            "with a model (in Python: method)"
        )


def reads_layers(config: SpeculativeConfig | None) -> bool:
    """Return whether a drafter reads hidden states of the target or runs its layers, which needs the transformers back
    end.
    """
    for options in [] if config is None else _all_options(config):
        method = options.get("method")
        if method in (None, AUTO) and options.get("model") is not None:
            method = method_of(options["model"])
        if method in DRAFTERS and method != AUTO and drafter_class(str(method)).reads_layers:
            return True
    return False


def drafter_bytes(config: SpeculativeConfig | None) -> tuple[int, int]:
    """Return the bytes of the draft models' weights, and of their KV caches for each token of a row, as
    `memory.bytes_of_drafts` does.
    """
    from forerun.model.memory import bytes_of_drafts

    models = [] if config is None else [options.get("model") for options in _all_options(config)]
    return bytes_of_drafts(model for model in models if isinstance(model, str))
