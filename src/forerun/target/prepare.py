"""From a name or a loaded model to a `Target` that has been checked: plan memory, load, repack, prove.

Order matters: the reference of the self-check is run before anything is repacked.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forerun.errors import ArgumentError
from forerun.target import self_check
from forerun.target.load import LoadOptions, open_model, read_config, resolved_dtype, stored_bytes, without_wrapper
from forerun.target.memory import MemoryPlan, available_bytes, cache_bytes_per_token, law_bytes
from forerun.target.obstacles import refusing
from forerun.target.parts import base_of, device_of, is_quantised, turn_of
from forerun.target.support import context_length, refuse_config, text_config

if TYPE_CHECKING:
    from forerun.target.model import Target

DEFAULT_TOKENS = 8192
"""Most tokens of a row where nobody asked for a number and the context is longer."""
HEADROOM = 129
"""Slots behind the context for the nodes of a tree that stands at its end."""
LEAST_SLOTS = 512
"""Where memory is short and nobody asked for a number, slots are lowered to this, not further."""
_SMALL = 2**30
"""Bytes of weights below which loading shows no progress."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much a target shall hold."""

    rows: int
    slots: int | None
    reserve: int
    """Bytes to leave free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What may be done to a model for speed."""

    repack: bool | None
    """None: repack what was loaded here, leave alone what was handed in."""
    compile: bool


def default_slots(context: int) -> int:
    """Slots of a row where nobody asked for a number."""
    return min(context, DEFAULT_TOKENS) + HEADROOM


def prepare(cls: type[Target], source: Any, options: LoadOptions, sizes: Sizes, speed: Speed, *, check: bool) -> Target:
    """The checked target; see `Target.load`."""
    if sizes.rows < 1 or (sizes.slots is not None and sizes.slots < 1) or sizes.reserve < 0:
        raise ArgumentError(f"rows and slots must be at least 1, got {sizes.rows} and {sizes.slots}")
    named = isinstance(source, (str, Path))
    model, slots = _open(source, options, sizes) if named else _adopt(source, options, sizes)
    faster = speed.compile or (speed.repack if speed.repack is not None else named and _plain(model))
    with turn_of(base_of(model)), self_check.short_windows(text_config(model)):
        expected = self_check.expect(model) if check else None
        if faster:
            _log.info("%s: %s", model.name_or_path, _accelerate(model, compile=speed.compile))
        with refusing(model):
            trial = cls(model, rows=2, slots=1 if expected is None else expected.slots)
        limit = self_check.check(trial, expected) if expected is not None else None
    target = cls(model, rows=sizes.rows, slots=slots)
    if limit is not None:
        target.max_length = min(target.max_length, limit)
    target.cache.reserve(trial.cache)
    return target


def _open(name: str | Path, options: LoadOptions, sizes: Sizes) -> tuple[Any, int]:
    if options.device is not None and options.device_map is not None:
        raise ArgumentError("device and device_map exclude each other")
    config = read_config(name, options)
    weights = stored_bytes(name, options, config)
    alone = options.device_map is None and options.tp_plan is None
    slots = _slots(
        config.get_text_config(decoder=True),
        sizes,
        _Room(
            device=options.first_device() if alone else None,
            weights=weights,
            itemsize=(resolved_dtype(options, config) or torch.float32).itemsize,
        ),
    )
    return open_model(name, options, config, quiet=weights < _SMALL), slots


def _adopt(model: Any, options: LoadOptions, sizes: Sizes) -> tuple[Any, int]:
    """A model that the caller has loaded; only its cache must still fit."""
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(
            f"a target is a directory, a hub id or a loaded transformers causal LM, got {type(model).__name__}"
        )
    if any((options.device_map, options.tp_plan, options.adapter, options.revision)):
        raise ArgumentError(
            "device_map, tp_plan, adapter and revision choose how a checkpoint is loaded; this model is loaded "
            "already: load it that way, or pass its directory"
        )
    model = without_wrapper(model)
    refuse_config(model.config, type(model))
    _leave_alone(model, options)
    device = None if _spread(model) else device_of(model.get_input_embeddings())
    room = _Room(device=device, weights=0, itemsize=model.dtype.itemsize)
    return model.eval(), _slots(text_config(model), sizes, room)


def _leave_alone(model: Any, options: LoadOptions) -> None:
    """Raise ArgumentError if a loaded model would have to be moved or converted."""
    dtype = None if options.dtype in ("auto", None) else resolved_dtype(options, model.config)
    place = device_of(model.get_input_embeddings())
    wanted = place if options.device is None else torch.device(options.device)
    if dtype not in (None, model.dtype) or wanted.type != place.type or wanted.index not in (None, place.index):
        raise ArgumentError(
            f"this model is loaded already, in {model.dtype} on {place}, and is left as it is; move or convert it "
            "before, or pass its directory"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Room:
    """Where a model goes, or stands."""

    device: torch.device | None
    """None: on several devices; transformers decides what fits where, and nothing is checked before."""
    weights: int
    itemsize: int


def _slots(config: Any, sizes: Sizes, room: _Room) -> int:
    """Slots of a row; fewer than the default where memory is short. Raises OutOfMemoryError."""
    slots = sizes.slots if sizes.slots is not None else default_slots(context_length(config))
    if room.device is None:
        return slots
    plan = MemoryPlan(
        rows=sizes.rows,
        slots=slots,
        weights=room.weights,
        token=cache_bytes_per_token(config, room.itemsize),
        laws=law_bytes(config, sizes.rows, room.itemsize),
        reserve=sizes.reserve,
    )
    available = available_bytes(room.device)
    fitting = plan.fitting_slots(available)
    if sizes.slots is None and LEAST_SLOTS <= fitting < slots:
        _log.warning("%d slots a row instead of %d: the memory of %s ends there", fitting, slots, room.device)
        return fitting
    plan.check(available, str(room.device))
    return slots


def _spread(model: Any) -> bool:
    """Whether modules stand on several devices, on disk, or in shards: repacking them would break that."""
    placed = getattr(model, "hf_device_map", None) or {}
    return len(set(placed.values())) > 1 or "disk" in placed.values() or bool(getattr(model, "_tp_size", None))


def _plain(model: Any) -> bool:
    """Whether the modules are those of the family: on one device, not quantised, without an adapter's layers."""
    return not (_spread(model) or is_quantised(model) or getattr(model, "peft_config", None))


def _accelerate(model: Any, *, compile: bool) -> Any:
    """Whatever `forerun.target.fast` can do for this model, in place; imported late because it registers kernels."""
    return importlib.import_module("forerun.target.fast").accelerate(model, compile=compile)
