"""Drafters: one file per method and one line in `DRAFTERS`, for draft heads in `kinds`.

What a drafter of your own imports is here, too (`__all__`). Those names are loaded when first used, so that importing
this imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.drafters.kinds import KINDS, import_named
from forerun.errors import ArgumentError, ForerunError, choices, find_place, refuse_unknown
from forerun.model.other_apps import LM_STUDIO, OLLAMA

if TYPE_CHECKING:
    from forerun.core.sampling import Sampler
    from forerun.core.tree import TokenTree
    from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, PerDomain
    from forerun.decode.scores import Scores
    from forerun.types import Budget, DraftKind, Drawn, Verdict

_HOMES = {
    **dict.fromkeys(("DraftContext", "Drafter", "DrafterSetup", "PerDomain"), "forerun.decode.drafter"),
    **dict.fromkeys(("Budget", "DraftKind", "Drawn", "Verdict"), "forerun.types"),
    "Sampler": "forerun.core.sampling",
    "Scores": "forerun.decode.scores",
    "TokenTree": "forerun.core.tree",
}
"""These are the modules of the names in `__all__`."""

__all__ = [
    "Budget",
    "DraftContext",
    "DraftKind",
    "Drafter",
    "DrafterSetup",
    "Drawn",
    "PerDomain",
    "Sampler",
    "Scores",
    "TokenTree",
    "Verdict",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun.drafters' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterEntry:
    """The registry's entry for one method."""

    path: str  # ``module:Class``, imported when the drafter is built
    summary: str
    needs_training: bool = False
    lossless: bool = True
    is_lookup: bool = False  # It looks tokens up, without a forward pass, so `auto` can query it at every step
    needs_prediction: bool = False  # It drafts nothing for a request without a prediction, unless option `text` is set


DRAFTERS: dict[str, DrafterEntry] = {
    "ngram": DrafterEntry(
        path="forerun.drafters.lookup.ngram:NgramDrafter",
        summary="copies what followed the same words earlier in prompt or output, across edits (prompt lookup)",
        is_lookup=True,
    ),
    "lookahead": DrafterEntry(
        path="forerun.drafters.self_drafting.lookahead:LookaheadDrafter",
        summary="the target guesses several positions at once; n-grams it has generated become drafts; no draft model",
    ),
    "jacobi": DrafterEntry(
        path="forerun.drafters.self_drafting.lookahead:JacobiDrafter",
        summary="a chain of guesses that every pass of the target corrects; no draft model",
    ),
    "suffix": DrafterEntry(
        path="forerun.drafters.lookup.suffix:SuffixDrafter",
        summary="copies after the longest match in this request and in past outputs (SuffixDecoding, SAM-Decoding)",
        is_lookup=True,
    ),
    "prediction": DrafterEntry(
        path="forerun.drafters.lookup.prediction:PredictionDrafter",
        summary="follows the output that the client predicted, across edits (Predicted Outputs)",
        is_lookup=True,
        needs_prediction=True,
    ),
    "first_of": DrafterEntry(
        path="forerun.drafters.combined.composed:FirstOfDrafter",
        summary="several drafters; the first draft that promises enough: lookup where a match is long, else a model",
    ),
    "merge": DrafterEntry(
        path="forerun.drafters.combined.composed:MergeDrafter",
        summary="several drafters, their trees joined under one node budget",
    ),
    "cascade": DrafterEntry(
        path="forerun.drafters.combined.cascade:CascadeDrafter",
        summary="a draft model that is itself sped up by a cheaper drafter (staged speculative decoding)",
    ),
    "draft_model": DrafterEntry(
        path="forerun.drafters.draft_models.draft_model:DraftModelDrafter",
        summary="any smaller causal LM with the same tokenizer; chain or tree, deterministic or sampled",
    ),
    "pard": DrafterEntry(
        path="forerun.drafters.draft_models.pard:PardDrafter",
        summary="a draft model that drafts all depths in one pass, from masks (PARD); the tree of the likeliest paths",
        needs_training=True,
    ),
    "tli": DrafterEntry(
        path="forerun.drafters.draft_models.tli:TliDrafter",
        summary="a causal LM with another tokenizer drafts the tokens that both vocabularies share; sampled or not",
    ),
    "slem": DrafterEntry(
        path="forerun.drafters.draft_models.slem:SlemDrafter",
        summary="a causal LM with any tokenizer drafts text, read again with the target's tokenizer",
    ),
    "quantized_self": DrafterEntry(
        path="forerun.drafters.draft_models.quantized_self:QuantizedSelfDrafter",
        summary="the target's own weights in 8 or 4 bits; chain or tree, deterministic or sampled",
    ),
    "skip_layers": DrafterEntry(
        path="forerun.drafters.self_drafting.skip_layers:SkipLayersDrafter",
        summary="the target itself without some attention and MLP sub-layers (Draft & Verify, SWIFT)",
    ),
    "early_exit": DrafterEntry(
        path="forerun.drafters.self_drafting.early_exit:EarlyExitDrafter",
        summary="the target's first layers draft, its others verify; pays on targets trained for it (LayerSkip)",
    ),
    "rest": DrafterEntry(
        path="forerun.drafters.lookup.rest:RestDrafter",
        summary="copies the continuation of the same words in a corpus (REST; see `forerun datastore build`)",
        is_lookup=True,
    ),
    "recycling": DrafterEntry(
        path="forerun.drafters.lookup.recycling:RecyclingDrafter",
        summary="the likeliest successors that the target last predicted for each token (Token Recycling)",
        is_lookup=True,
    ),
    **{
        kind.name: DrafterEntry(path=kind.drafter, summary=kind.summary, needs_training=kind.in_target is None)
        for kind in KINDS.values()
        if kind.trains == "head"
    },
}

AUTO = "auto"
# Methods that the engine carries out with several drafters; none is a `Drafter` of its own.
CHOOSERS: dict[str, DrafterEntry] = {
    AUTO: DrafterEntry(
        path="", summary="chooses among the drafters, how much to draft, or not at all, by measured cost"
    )
}


def methods() -> dict[str, DrafterEntry]:
    """Return every method that a speculative configuration may name."""
    return {**DRAFTERS, **CHOOSERS}


def is_outside(name: str) -> bool:
    """Return whether a method names a drafter outside of this package, ``module:Class``. Imports nothing."""
    return ":" in name and not name.startswith((OLLAMA, LM_STUDIO))


def entry_named(name: str) -> DrafterEntry:
    """Return the registry's entry for a method. Imports nothing, unless the name is ``module:Class``, a drafter outside
    of this package. Raises ArgumentError, which names the nearest method or says what is wrong with the class.
    """
    registered = methods()
    if name in registered:
        return registered[name]
    if is_outside(name):
        return _from_outside(name)
    raise ArgumentError(
        f"unknown drafter {name!r}.{choices(name, registered)} A file of your own is named module:Class, and a model "
        "that drafts by --drafter-model (in Python: model); `forerun drafters` says what each is."
    )


def _from_outside(path: str) -> DrafterEntry:
    try:
        imported = import_named(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(
            f"drafter {path!r} cannot be imported ({error}); expected module:Class, the module's folder in PYTHONPATH"
        ) from error
    except Exception as error:
        raise ArgumentError(f"drafter {path!r} cannot be imported: {error!r}{find_place(error)}") from error
    from forerun.decode.drafter import Drafter

    is_drafter = isinstance(imported, type) and issubclass(imported, Drafter)
    if not is_drafter or not dataclasses.is_dataclass(getattr(imported, "Config", None)):
        raise ArgumentError(
            f"{path!r} is no drafter; expected a subclass of forerun.drafters.Drafter with a dataclass Config"
        )
    return DrafterEntry(path=path, summary=path)


def drafter_class(name: str) -> type[Drafter]:
    """Return the class of a method. Raises as `entry_named` does, and for methods that are no drafter themselves."""
    if name in CHOOSERS:
        raise ArgumentError(f"{name!r} chooses among drafters but is not one itself; name one of {', '.join(DRAFTERS)}")
    return import_named(entry_named(name).path)


def default_length(name: str) -> int | None:
    """Return a method's default `num_speculative_tokens`, or None if it has no such option."""
    if name in CHOOSERS:
        return None
    defaults = {field.name: field.default for field in dataclasses.fields(drafter_class(name).Config)}
    length = defaults.get("num_speculative_tokens")
    return length if isinstance(length, int) else None


def check_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return the `Config` of a method with these options. Raises ArgumentError for an unknown method or option, naming
    the nearest, and for an option that is missing or of the wrong type.
    """
    cls, unset = drafter_class(name), (dataclasses.MISSING, dataclasses.MISSING)
    fields = dataclasses.fields(cls.Config)
    check_option_names(name, options, {field.name: (field.default, field.default_factory) == unset for field in fields})
    try:
        return cls.Config(**options)
    except TypeError as error:
        raise ArgumentError(f"drafter {name!r}: an option has a wrong type ({error}); given {dict(options)}") from error
    except ForerunError:
        raise
    except Exception as error:
        raise ArgumentError(f"drafter {name!r} refuses {dict(options)}: {error!r}{find_place(error)}") from error


def check_option_names(name: str, options: Mapping[str, Any], declared: Mapping[str, bool]) -> None:
    """Raise ArgumentError for an unknown option, naming the nearest, and for a required one that is missing. `declared`
    maps the drafter's options to whether each is required."""
    for option in options:
        refuse_unknown(f"drafter {name!r} has no option", option, declared, "It has")
    missing = [option for option, needed in declared.items() if needed and option not in options]
    if missing:
        hint = (
            ": a directory, a hub id or a GGUF file (on the command line: --drafter-model)"
            if missing == ["model"]
            else ""
        )
        raise ArgumentError(f"drafter {name!r} needs {', '.join(missing)}{hint}; its options are {', '.join(declared)}")


def declared_options(name: str) -> dict[str, bool]:
    """Return the options of a drafter of this package, and whether each is required. They are read from the source,
    because importing the drafter imports torch, which takes seconds.
    """
    module, _, cls = DRAFTERS[name].path.partition(":")
    return _list_options(*_config_of(module, cls))


def _config_of(module: str, cls: str) -> tuple[str, str]:
    """Return module and name of a drafter's `Config`, its own or that of its base."""
    body, bases = _class_in(module, cls)
    for line in body:
        names = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        if [getattr(one, "id", None) for one in names] == ["Config"] and isinstance(line.value, ast.Name):
            return module, line.value.id
    return next(_config_of(*base) for base in bases)


def _list_options(module: str, cls: str) -> dict[str, bool]:
    body, bases = _class_in(module, cls)
    inherited = {name: needed for base in bases for name, needed in _list_options(*base).items()}
    fields = [
        line for line in body if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
    ]
    return inherited | {line.target.id: line.value is None for line in fields if isinstance(line.target, ast.Name)}


def _class_in(module: str, cls: str) -> tuple[list[Any], list[tuple[str, str]]]:
    """Return the body of a class of this package, and module and name of each base class in this package."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    where = {
        name.asname or name.name: line.module
        for line in tree.body
        if isinstance(line, ast.ImportFrom) and (line.module or "").startswith("forerun.")
        for name in line.names
    }
    if (other := where.get(cls)) is not None:
        return _class_in(other, cls)
    here = {line.name: line for line in tree.body if isinstance(line, ast.ClassDef)}
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in here[cls].bases]
    bases_here = [base.id for base in bases if isinstance(base, ast.Name) and base.id in {*here, *where}]
    return here[cls].body, [(where.get(base) or module, base) for base in bases_here]


def build(name: str, options: Mapping[str, Any], setup: DrafterSetup) -> Drafter:
    """Build a method's drafter with these options. Raises as `check_options` does, and ArgumentError if a class from
    outside cannot be made.
    """
    cls, config = drafter_class(name), check_options(name, options)
    if not is_outside(name):
        return cls(config, setup)  # type: ignore[call-arg]
    try:
        inspect.signature(cls).bind(config, setup)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"drafter {name!r} is made with (config, setup): define __init__(self, config, setup)"
        ) from error
    try:
        return cls(config, setup)  # type: ignore[call-arg]
    except ForerunError:
        raise
    except Exception as error:
        raise ArgumentError(f"drafter {name!r} cannot be made: {error!r}{find_place(error)}") from error
