"""This module decides whether a model may be served, and with which of our replacements: one
judgement for all who load a target.

The structure is checked in float32, on a copy of the model or of its first layers, where errors
show that rounding hides in 16 bits; the whole is checked in the model's own dtype (`self_check`).
What fails with faster modules alone is served without them; a model is refused if it fails as
transformers made it, and then the message says what would help, which has been tried.

A result is kept on disk, so that a second start of the same model need not repeat it. Kept is only
that nothing was found, and which modules were accepted: by the model's configuration and files,
forerun's own sources, the versions of torch and transformers, the device and what was asked for.
Whatever limits a context or is put back is found, and told, at every start.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from forerun import writing
from forerun.errors import UNSERVED, ForerunError, UnsupportedModelError
from forerun.model import self_check
from forerun.model.kernels import accelerate
from forerun.model.layers import base_name, base_of, is_quantised, layers_of, replace_module, turn_of
from forerun.model.sample import sample
from forerun.model.support import name_of, refusing, text_config

_SOURCES = Path(__file__).parents[1]
_READ = ("model", "core")  # Folders whose sources decide what a pass computes


def fingerprint(model: Any, *asked: object) -> str | None:
    """Return the key that a verdict is kept under; None where the weights are in no folder, so that
    they cannot be told from others. `asked` is whatever else decides about the model's passes.
    """
    folder = _folder(model)
    if folder is None or getattr(model, "peft_config", None):
        return None
    files = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    device = torch.device(model.device)
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    versions = torch.__version__, transformers.__version__, _sources()
    made = str(folder.resolve()), model.config.to_json_string(), str(model.dtype), device.type
    told = str((made, found, chip, versions, asked))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def read_verdict(key: str | None) -> list[str] | None:
    """Return the modules that were accepted when the model was found right; None if nothing is
    known.
    """
    if key is None:
        return None
    told = writing.read_kept(_path(key))
    accepted = told.get("accepted") if isinstance(told, dict) else None
    right = isinstance(accepted, list) and all(isinstance(name, str) for name in accepted)
    return accepted if right else None


def keep(key: str | None, name: str, accepted: Sequence[str]) -> None:
    """Keep that a model was found right with these modules replaced. A folder that cannot be
    written to is no error.
    """
    if key is not None:
        writing.keep(_path(key), {"model": name, "accepted": list(accepted)}, "the self-check's result")


def _folder(model: Any) -> Path | None:
    """Return the folder that a model's files were loaded from, also for a model of the hub."""
    name = str(getattr(model, "name_or_path", "") or "")
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=getattr(model.config, "_commit_hash", None))
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _path(key: str) -> Path:
    return writing.cache_root() / "checked" / f"{key}.json"


@cache
def _sources() -> str:
    """Return a hash of the code that computes a pass."""
    found = hashlib.sha256()
    for folder in _READ:
        for path in sorted((_SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                found.update(path.read_bytes())
    return found.hexdigest()


def _processor() -> str:
    """Describe the CPU: its instructions decide which kernels run."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.cpu._is_amx_tile_supported()}"


_log = logging.getLogger(__name__)


def float32_copy(model: Any, most_parameters: int, most_bytes: int) -> Any | None:
    """Return a float32 copy of a causal LM that shares nothing with it: whole where it has
    `most_parameters` at most, else its first layers, every kind of layer among them. None where
    there can be no such copy: quantised weights, layers that cannot be run in part, more than
    `most_bytes`.
    """
    if is_quantised(model):
        return None
    try:
        part = model if model.num_parameters() <= most_parameters else _first_layers(model)
    except ForerunError:
        return None
    if part is None or 4 * part.num_parameters() > most_bytes:
        return None
    twin = copy.deepcopy(part)
    for _ in accelerate.undo(twin):  # packed weights have no other dtype
        pass
    twin = twin.float().eval()
    if part is not model:
        try:
            with torch.inference_mode():
                twin(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=twin.device), use_cache=False)
        except Exception as error:  # whatever its code expects of its layers' number
            _log.debug("%s: its first layers do not run alone: %s", type(model).__name__, error)
            return None
    return twin


def is_spread(model: Any) -> bool:
    """Return whether modules stand on several devices, on disk, or in shards, so that repacking
    would break them.
    """
    placed = getattr(model, "hf_device_map", None) or {}
    return len(set(placed.values())) > 1 or "disk" in placed.values() or bool(getattr(model, "_tp_size", None))


def _first_layers(model: Any) -> Any | None:
    """Return a shallow copy with the fewest first layers among which there is one of every kind."""
    config = text_config(model)
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "hidden_size_per_layer_input", None):
        return None  # A layer's place in the list says what it reads
    name, layers = layers_of(base_of(model), config.num_hidden_layers)
    types = getattr(config, "layer_types", None) or [""] * len(layers)
    kinds = [(kind, _parts(layer)) for kind, layer in zip(types, layers, strict=True)]
    count = 1 + max(kinds.index(kind) for kind in set(kinds))
    path = f"{base_name(model)}.{name}"
    twin = replace_module(model, path, nn.ModuleList(layers[:count]))
    whole: Any = copy.deepcopy(model.config)
    part = whole.get_text_config(decoder=True)
    part.num_hidden_layers = count
    if getattr(part, "layer_types", None):
        part.layer_types = list(types[:count])
    # Every module along the path reads the configuration that it was made with: the whole or that of the text.
    owner: Any = twin
    for step in path.split("."):
        held = owner.__dict__.get("config")
        if held is not None:
            owner.__dict__["config"] = whole if held is model.config else part
        owner = owner.get_submodule(step)
    return twin


def _parts(layer: nn.Module) -> tuple[str, ...]:
    """Return the classes of a layer and of its modules, which tell dense layers from experts."""
    return tuple(sorted({type(module).__name__ for module in layer.modules()}))


Faster = Callable[[Sequence[int], Sequence[str] | None], None]  # (text, accepted) -> nothing
Made = TypeVar("Made", bound=Any)  # A `Target`, of whatever class


def prove_model(
    cls: type[Made],
    model: Any,
    tokenizer: Callable[[], Any] | None,
    faster: Faster | None,
    room: int,
    key: str | None,
) -> tuple[Made, int | None]:
    """Check a model as it is, and as `faster` leaves it. Returns a target of two rows that was
    tried, and the tokens up to which the model was found right; None: any number.

    Args:
        tokenizer: gives the model's tokenizer, or None; None: there is none.
        faster: called with a text, or with what of the model was replaced when it was found right before.
        key: under which the verdict is kept, see `verdicts`; None: it is not.
        room: bytes that are free on its device; a float32 copy takes half of them at most.

    Raises:
        UnsupportedModelError: it fails although nothing of it is replaced any longer.
        NumericError: its weights or logits are not finite.
    """
    accepted = read_verdict(key)
    if accepted is not None:
        return _as_before(cls, model, faster, accepted), None
    limit, removed = None, list[str]()
    with turn_of(base_of(model)), self_check.short_windows(text_config(model)):
        self_check.check_embeddings(model)
        ids = sample(model, tokenizer)
        twin = None if self_check.is_exact(model) else _copy(model, self_check.whole_parameters(model), room)
        if twin is not None:
            limit = _structure(cls, twin, ids)
        expected = self_check.expect(model, ids, sizes=twin is None)
        if faster is not None:
            faster(ids, None)
        trial, found, wrong = _check_trial(cls, model, expected)
        if wrong is not None:
            first = wrong
            for piece in accelerate.undo(model):
                removed.append(piece)
                trial, found, wrong = _check_trial(cls, model, expected)
                if wrong is None:
                    _log.warning("%s runs without %s: with that, %s", name_of(model), ", ".join(removed), first)
                    break
        if wrong is not None:
            raise UnsupportedModelError(
                f"{wrong}. Speculation would not be lossless. {_remedy(cls, model, ids, removed, room)}"
            )
    least = min((one for one in (limit, found) if one is not None), default=None)
    if least is None and not removed:
        keep(key, name_of(model), accelerate.list_replaced(model))
    return trial, least


def _as_before(cls: type[Made], model: Any, faster: Faster | None, accepted: Sequence[str]) -> Made:
    """Return a target of a model that was found right before, with one token in its cache, which
    sets the cache's shape.
    """
    _log.debug("%s was found right before", name_of(model))
    if faster is not None:
        faster((), accepted)
    with refusing(model):
        trial: Made = cls(model, rows=2, slots=1)
        trial.prefill([0], [[0]])
    return trial


def _check_trial(cls: type[Made], model: Any, expected: self_check.Expected) -> tuple[Made, int | None, str | None]:
    """Return a target of two rows, the tokens up to which it is right, and what is wrong with it."""
    with refusing(model):
        trial: Made = cls(model, rows=2, slots=expected.slots)
    return trial, *self_check.check(trial, expected)


def _copy(model: Any, most_parameters: int, room: int) -> Any | None:
    """Return a float32 copy of the model, or of its first layers, or None where there can be none."""
    return None if is_spread(model) else float32_copy(model, most_parameters, room // 2)


def _structure(cls: type[Any], twin: Any, ids: Sequence[int]) -> int | None:
    """Check a float32 copy, in which nothing is replaced, and return the tokens up to which it is
    right. Raises UnsupportedModelError if it is not.
    """
    _, limit, wrong = _check_trial(cls, twin, self_check.expect(twin, ids))
    if wrong is not None:
        raise UnsupportedModelError(f"{wrong}. Speculation would not be lossless. {UNSERVED}")
    return limit


def _remedy(cls: type[Any], model: Any, ids: Sequence[int], removed: Sequence[str], room: int) -> str:
    """Return a sentence on what helps a model that fails in its own dtype; the remedy is tried
    first.
    """
    without = f"It fails without {', '.join(removed)} too. " if removed else ""
    whole = None if model.dtype == torch.float32 else _copy(model, model.num_parameters(), room)
    if whole is not None:
        try:
            _structure(cls, whole, ids)
        except ForerunError as error:
            _log.debug("%s in float32: %s", name_of(model), error)
        else:
            return f"{without}In float32 it passes: load it with dtype='float32' (--dtype float32)"
    return f"{without}{UNSERVED}"
