"""Turns a name or a loaded model into a checked `Target`: plan memory, load, repack, prove. The
order matters: the references of the self-check are run before anything is repacked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from forerun.devices import trim_heap
from forerun.errors import ArgumentError, OutOfMemoryError, refuse
from forerun.model import proof
from forerun.model.cache import promised_bytes
from forerun.model.kernels import accelerate
from forerun.model.kernels.packing import packed_bytes
from forerun.model.layers import device_of, is_quantised
from forerun.model.load import LoadOptions, open_model, read_config, resolved_dtype, stored_bytes, without_wrapper
from forerun.model.names import resolve, tokenizer_beside
from forerun.model.proof import is_spread, prove_model
from forerun.model.sample import sample
from forerun.model.support import context_length, name_of, refuse_config, text_config

_log = logging.getLogger(__name__)

Made = TypeVar("Made", bound=Any)  # A `Target`, of whatever class; that module imports this one
SCORED_NODES = 16  # Nodes a row whose logits and float32 probabilities the plan counts
_GIB = 2**30
DEFAULT_TOKENS = 8192  # Most tokens of a row where nobody asked for a number and the context is longer
HEADROOM = 129  # Slots behind the context for the nodes of a tree that stands at its end
LEAST_SLOTS = 512  # If memory is short and nobody asked for a number, slots are lowered to this, not further
_SMALL = 2**30  # Bytes of weights below which loading shows no progress


def prepare(
    cls: type[Made],
    source: Any,
    options: LoadOptions,
    *,
    rows: int,
    slots: int | None,
    reserve: int,
    reserve_per_slot: int,
) -> Made:
    """Return the checked target; see `Target.load`."""
    if rows < 1 or (slots is not None and slots < 1) or min(reserve, reserve_per_slot) < 0:
        raise ArgumentError(f"rows and slots must be at least 1, got {rows} and {slots}")
    named, sizes = isinstance(source, (str, Path)), _Sizes(rows, slots, reserve, reserve_per_slot)
    model, slots = _open(source, options, sizes) if named else _adopt(source, options, sizes)
    # By default only a model that was loaded here is repacked: on one device, not quantised, without an adapter.
    plain = named and not (is_spread(model) or is_quantised(model) or getattr(model, "peft_config", None))
    faster = options.compile or (plain if options.repack is None else options.repack)
    faster_now = partial(_accelerate, model, options, named) if faster else None
    tokenizer, folder = options.tokenizer, str(getattr(model, "name_or_path", ""))
    if tokenizer is None and Path(folder).is_dir():
        tokenizer = partial(tokenizer_beside, folder)
    trial, limit = None, None
    if options.self_check:
        _log.info("checking it against transformers")
        key = proof.fingerprint(model, faster, options.compile) if named and options.adapter is None else None
        trial, limit = prove_model(cls, model, tokenizer, faster_now, _room(model), key)
    elif faster_now is not None:
        faster_now(sample(model, tokenizer), None)
    target: Made = cls(model, rows=rows, slots=slots)
    if limit is not None:
        target.max_length = min(target.max_length, limit)
    if trial is not None:
        target.cache.reserve(trial.cache)
    trim_heap()  # The weights as they were before they were repacked
    return target


def refuse_unservable(cls: type[Any], model: Any, tokenizer: Any) -> None:
    """Refuse a model that was loaded for training, by the same errors as where it is served."""
    prove_model(cls, model, lambda: tokenizer, None, _room(model), proof.fingerprint(model, False, False))


def _room(model: Any) -> int:
    return available_bytes(device_of(model.get_input_embeddings()))


def _accelerate(
    model: Any, options: LoadOptions, named: bool, ids: Sequence[int], accepted: Sequence[str] | None
) -> None:
    """Make the model faster; modules are compared on the text `ids` unless they were `accepted`
    before.
    """
    done = accelerate.accelerate(model, compile=options.compile, ids=ids, accepted=accepted)
    _log.info("%s: %s", name_of(model), done)
    if named:
        _let_go_of_files(model)


def _let_go_of_files(model: Any) -> None:
    """Copy the few weights that were not repacked. transformers leaves them in the mapped file, and
    one of them keeps everything that was read of it in memory.
    """
    rest = [own for own in (*model.parameters(), *model.buffers()) if own.device.type == "cpu"]
    if sum(own.nbytes for own in rest) < packed_bytes(model):
        for own in rest:
            own.data = own.data.clone()


class _Sizes(NamedTuple):
    """The sizes that memory is planned for."""

    rows: int
    slots: int | None  # Slots of a row; None: nobody asked for a number
    reserve: int  # Bytes to leave free
    reserve_per_slot: int  # The same, for each slot of a row


def _open(name: str | Path, options: LoadOptions, sizes: _Sizes) -> tuple[Any, int]:
    if options.device is not None and options.device_map is not None:
        raise ArgumentError("device and device_map exclude each other")
    typed, name = name, resolve(name, options.dtype)
    config = read_config(name, options)
    if options.tokenizer is not None:
        options.tokenizer()  # A checkpoint without one fails before its weights are read
    weights = stored_bytes(name, options, config)
    device = options.first_device() if options.device_map is None and options.tp_plan is None else None
    itemsize = (resolved_dtype(options, config) or torch.float32).itemsize
    slots = _slots(config.get_text_config(decoder=True), sizes, device, weights, itemsize)
    _log.info("reading %.2f GB of weights", weights / 1e9)
    model = open_model(name, options, config, quiet=weights < _SMALL)
    model.named_by_user = str(typed)
    return model, slots


def _adopt(model: Any, options: LoadOptions, sizes: _Sizes) -> tuple[Any, int]:
    """Take over a model that the caller has loaded; only its cache must still fit."""
    refuse(
        (
            not isinstance(model, torch.nn.Module) or not hasattr(model, "config"),
            f"a target is a directory, a hub id or a loaded causal LM, got {type(model).__name__}",
        ),
        (
            any((options.device_map, options.tp_plan, options.adapter, options.revision)),
            "device_map, tp_plan, adapter and revision say how to load, but this model is loaded already: load it "
            "that way, or pass its directory",
        ),
    )
    model = without_wrapper(model)
    refuse_config(model.config, type(model))
    dtype = None if options.dtype in ("auto", None) else resolved_dtype(options, model.config)
    place = device_of(model.get_input_embeddings())
    wanted = place if options.device is None else torch.device(options.device)
    if dtype not in (None, model.dtype) or wanted.type != place.type or wanted.index not in (None, place.index):
        raise ArgumentError(
            f"this model is loaded already, in {model.dtype} on {place}, and is left as it is; move or convert it "
            "before, or pass its directory"
        )
    device = None if is_spread(model) else place
    return model.eval(), _slots(text_config(model), sizes, device, 0, model.dtype.itemsize)


def _slots(config: Any, sizes: _Sizes, device: torch.device | None, weights: int, itemsize: int) -> int:
    """Return the slots of a row; fewer than the default where memory is short. Raises
    OutOfMemoryError if the slots asked for do not fit. Without a `device` the model goes on
    several: transformers decides what fits where, and nothing is checked before.
    """
    rows, slots = sizes.rows, sizes.slots
    if slots is None:
        slots = default_slots(context_length(config))
    if device is None:
        return slots
    token = cache_bytes_per_token(config, itemsize) + sizes.reserve_per_slot
    plan = MemoryPlan(
        rows=rows,
        slots=slots,
        weights=weights,
        token=token,
        probs=rows * SCORED_NODES * config.vocab_size * (itemsize + 4),
        reserve=sizes.reserve,
    )
    available = available_bytes(device)
    fitting = plan.fitting_slots(available)
    if sizes.slots is None and LEAST_SLOTS <= fitting < slots:
        _log.warning("%d slots a row instead of %d: the memory of %s ends there", fitting, slots, device)
        return fitting
    plan.check(available, str(device))
    return slots


def default_slots(context: int) -> int:
    """Return the slots of a row where nobody asked for a number."""
    return min(context, DEFAULT_TOKENS) + HEADROOM


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The bytes that a target needs on one device."""

    rows: int
    slots: int
    weights: int  # 0 where they are loaded already
    token: int  # KV cache per token of a row, all layers, the drafter's included
    probs: int  # Logits and probabilities of one step
    reserve: int = 0  # For the drafter

    @property
    def cache(self) -> int:
        """KV cache of all rows and slots, including the slot that padding is written to."""
        return self.token * self.rows * (self.slots + 1)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.probs + self.reserve

    def check(self, available: int, where: str) -> None:
        """Raise OutOfMemoryError, with what to lower, unless the plan fits into `available` bytes."""
        if self.total <= available:
            return
        advice = 'Use a smaller dtype, a quantised checkpoint, or device_map="auto" to offload layers.'
        if (slots := self.fitting_slots(available)) > 0:
            rows = max(1, slots * self.rows // self.slots)
            advice = f"Lower slots to {slots}" + (f", or rows to {rows}." if rows < self.rows else ".")
        raise OutOfMemoryError(
            f"{self.total / _GIB:.2f} GiB are needed on {where}, {available / _GIB:.2f} GiB are free: "
            f"weights {self.weights / _GIB:.2f}, KV cache {self.cache / _GIB:.2f} ({self.rows} rows x {self.slots} "
            f"slots), logits and probabilities {self.probs / _GIB:.2f}, drafter {self.reserve / _GIB:.2f}. {advice}"
        )

    def fitting_slots(self, available: int) -> int:
        """Return the most slots of a row that would fit with as many rows; 0 if none."""
        room = available - self.weights - self.probs - self.reserve
        return max(0, room // max(1, self.token * self.rows) - 1)


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """Return the KV bytes per token over all layers, from a text configuration. Latent attention
    (DeepSeek) caches its latents.
    """
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return sum(_cached_width(layer) for layer in by_layer[:own]) * itemsize


def _cached_width(config: Any) -> int:
    """Return how many numbers one layer caches per token."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * int(heads) * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes on a device; on the CPU also within the container's limit, and without
    what caches may still take.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return max(0, min(int(psutil.virtual_memory().available), _container_room()) - promised_bytes())


def _container_room(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes left in this control group (version 2); practically infinite where there is
    no limit.
    """
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
        cached = dict(line.split() for line in (root / "memory.stat").read_text(encoding="ascii").splitlines())
        return 2**62 if limit == "max" else int(limit) - used + int(cached.get("inactive_file", 0))
    except (OSError, ValueError):
        return 2**62
