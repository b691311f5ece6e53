"""Turns a name or a loaded model into a checked `Target`: plan memory, load, repack, prove. The
order matters: the references of the self-check are run before anything is repacked.

The proof decides whether a model may be served, and with which of our replacements: one
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
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import nn

from forerun import writing
from forerun.devices import trim_heap
from forerun.errors import UNSERVED, ArgumentError, ForerunError, OutOfMemoryError, UnsupportedModelError, refuse
from forerun.model import self_check
from forerun.model.cache import promised_bytes
from forerun.model.gguf_files import file_of
from forerun.model.kernels import accelerate, blocks, products
from forerun.model.kernels.packing import count_weights, freed_bytes, list_in_blocks, unpack
from forerun.model.layers import base_name, base_of, device_of, is_quantised, layers_of, replace_module, turn_of
from forerun.model.load import (
    LoadOptions,
    keeps_blocks,
    open_model,
    read_config,
    resolved_dtype,
    stored_bytes,
    without_wrapper,
)
from forerun.model.masks import FULL, UNMASKED, WITH_STATES
from forerun.model.names import resolve, tokenizer_beside
from forerun.model.sample import sample
from forerun.model.states.rows import MOST
from forerun.model.support import auto_class, context_length, name_of, refuse_config, refusing, text_config

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
    """Return the checked target; see `TransformersTarget.load`."""
    if rows < 1 or (slots is not None and slots < 1) or min(reserve, reserve_per_slot) < 0:
        raise ArgumentError(f"rows and slots must be at least 1, got {rows} and {slots}")
    named, sizes = isinstance(source, (str, Path)), _Sizes(rows, slots, reserve, reserve_per_slot)
    model, slots = _open(cls, source, options, sizes) if named else _adopt(source, options, sizes)
    settle(model)
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
        in_blocks = bool(list_in_blocks(model))
        key = fingerprint(model, faster, options.compile, in_blocks) if named and options.adapter is None else None
        trial, limit = prove_model(cls, model, tokenizer, faster_now, _room(model), key)
    elif faster_now is not None:
        faster_now(sample(model, tokenizer), None)
    target: Made = cls(model, rows=rows, slots=slots)
    if limit is not None:
        target.max_length = min(target.max_length, limit)
    if trial is not None:
        target.reserve(trial)
    if target.states is not None and target.states.nbytes():
        _log.info("recurrent states take %.2f MiB a row", target.states.nbytes() / rows / 2**20)
    trim_heap()  # The weights as they were before they were repacked
    return target


@torch.inference_mode()
def settle(model: Any) -> None:
    """Run a model that changes its weights at its first forward (RWKV scales them), before any is repacked."""
    if getattr(base_of(model), "layers_are_rescaled", True) is False:
        with refusing(model, plainly=True):
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)


def refuse_unservable(cls: type[Any], model: Any, tokenizer: Any) -> None:
    """Refuse a model that was loaded for training, by the same errors as where it is served."""
    prove_model(cls, model, lambda: tokenizer, None, _room(model), fingerprint(model, False, False))


def _room(model: Any) -> int:
    return available_bytes(device_of(model.get_input_embeddings()))


def _accelerate(
    model: Any, options: LoadOptions, named: bool, ids: Sequence[int], accepted: Sequence[str] | None
) -> None:
    """Make the model faster; modules are compared on the text `ids` unless they were `accepted` before."""
    done = accelerate.accelerate(model, compile=options.compile, ids=ids, accepted=accepted)
    _log.info("%s: %s", name_of(model), done)
    if named:
        _let_go_of_files(model)


def _let_go_of_files(model: Any) -> None:
    """Copy the few weights that were not repacked. transformers leaves them in the mapped file, and
    one of them keeps everything that was read of it in memory.
    """
    rest = [own for own in (*model.parameters(), *model.buffers()) if own.device.type == "cpu"]
    if sum(own.nbytes for own in rest) < freed_bytes(model):
        for own in rest:
            own.data = own.data.clone()


class _Sizes(NamedTuple):
    """The sizes that memory is planned for."""

    rows: int
    slots: int | None  # Slots of a row; None: nobody asked for a number
    reserve: int  # Bytes to leave free
    reserve_per_slot: int  # The same, for each slot of a row


def open_named(name: str | Path, options: LoadOptions) -> Any:
    """Open a model by its name (`names.resolve`), as `open_model` does, unchecked and without progress bars."""
    path = resolve(name)
    return open_model(path, options, read_config(path, options), quiet=True)


def _open(cls: type[Made], name: str | Path, options: LoadOptions, sizes: _Sizes) -> tuple[Any, int]:
    if options.device is not None and options.device_map is not None:
        raise ArgumentError("device and device_map exclude each other")
    typed, name = name, resolve(name)
    config = read_config(name, options)
    if options.tokenizer is not None:
        options.tokenizer()  # A checkpoint without one fails before its weights are read
    in_blocks = _keeps_blocks(name, options, config)
    weights = stored_bytes(name, options, config, in_blocks=in_blocks)
    device = options.first_device() if options.device_map is None and options.tp_plan is None else None
    dtype = resolved_dtype(options, config) or torch.float32
    states = 0 if device is None else states_bytes_per_row(cls, config, dtype)
    text = config.get_text_config(decoder=True)
    slots = _slots(text, sizes, device, weights, dtype.itemsize, states=states * sizes.rows)
    _log.info("reading %.2f GB of weights", weights / 1e9)
    model = open_model(name, options, config, quiet=weights < _SMALL, in_blocks=in_blocks)
    model.named_by_user = str(typed)
    return model, slots


def _keeps_blocks(name: str | Path, options: LoadOptions, config: Any) -> bool:
    """Return whether weights may stay in a GGUF file's blocks, or become such: they do where our own products in bf16
    take them and are no slower for it.
    """
    placed = options.device_map is not None or options.tp_plan is not None or options.adapter is not None
    return (
        (file_of(name) is not None or keeps_blocks(options, config))
        and not placed
        and options.repack is not False
        and options.first_device().type == "cpu"
        and resolved_dtype(options, config) is torch.bfloat16
        and products.ready(torch.bfloat16)
        and blocks.fast()
    )


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
    return model.eval(), _slots_beside(model, sizes)


def check_room(model: Any, rows: int, slots: int) -> None:
    """Raise OutOfMemoryError unless a cache of so many rows and slots fits beside a loaded model."""
    _slots_beside(model, _Sizes(rows, slots, 0, 0))


def _slots_beside(model: Any, sizes: _Sizes) -> int:
    """Return the slots of a row as `_slots` does, for a model that is loaded."""
    device = None if is_spread(model) else device_of(model.get_input_embeddings())
    return _slots(text_config(model), sizes, device, 0, model.dtype.itemsize)


def _slots(
    config: Any, sizes: _Sizes, device: torch.device | None, weights: int, itemsize: int, *, states: int = 0
) -> int:
    """Return the slots of a row; fewer than the default where memory is short. Raises
    OutOfMemoryError if the slots asked for do not fit. Without a `device` the model goes on
    several: transformers decides what fits where, and nothing is checked before.
    """
    rows, slots = sizes.rows, sizes.slots
    if slots is None:
        slots = default_slots(context_length(config))
    if device is None:
        return slots
    plan = MemoryPlan(
        rows=rows,
        slots=slots,
        weights=weights,
        token=cache_bytes_per_token(config, itemsize) + sizes.reserve_per_slot,
        probs=rows * SCORED_NODES * config.vocab_size * (itemsize + 4),
        states=states,
        reserve=sizes.reserve,
    )
    available = available_bytes(device)
    fitting = plan.fitting_slots(available)
    halves = replace(plan, weights=weights // 2, token=plan.token // 2, probs=plan.probs * 3 // 4, states=states // 2)
    if sizes.slots is None and LEAST_SLOTS <= fitting < slots:
        _log.warning("%d slots a row instead of %d: the memory of %s ends there", fitting, slots, device)
        return fitting
    plan.check(available, str(device), halves if itemsize == torch.float32.itemsize else None)
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
    states: int = 0  # Recurrent states of all rows, with their copies for prefixes
    reserve: int = 0  # For the drafter

    @property
    def cache(self) -> int:
        """KV cache of all rows and slots, including the slot that padding is written to."""
        return self.token * self.rows * (self.slots + 1)

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.probs + self.states + self.reserve

    def check(self, available: int, where: str, halves: MemoryPlan | None = None) -> None:
        """Raise OutOfMemoryError, with what to lower and what would fit, unless the plan fits into `available` bytes.
        `halves` is the same plan in bfloat16, where this one is in float32.
        """
        if self.total <= available:
            return
        advice = list[str]()
        if halves is not None and halves.total <= available:
            advice.append(f"In bfloat16 (dtype='bfloat16') {halves.total / _GIB:.2f} GiB are needed, which fit.")
        if (slots := self.fitting_slots(available)) > 0:
            rows = max(1, slots * self.rows // self.slots)
            lower = f"Lower slots (max_model_len, kv_cache_tokens) to {slots}"
            advice.append(lower + (f", or rows (max_num_seqs) to {rows}." if rows < self.rows else "."))
        elif (rows := self.fitting_rows(available)) > 0:
            advice.append(f"Lower rows (max_num_seqs) to {rows}.")
        elif not advice:
            advice.append('Use a smaller dtype, a quantised checkpoint, or device_map="auto" to offload layers.')
        if self.weights > available - self.reserve:
            room = self._weights_room(available)
            advice.append(f"A model whose weights take {room / _GIB:.2f} GiB would fit with one row of {LEAST_SLOTS}.")
        states = f"recurrent states {self.states / _GIB:.2f}, " if self.states else ""
        raise OutOfMemoryError(
            f"{self.total / _GIB:.2f} GiB are needed on {where}, {available / _GIB:.2f} GiB are free: "
            f"weights {self.weights / _GIB:.2f}, KV cache {self.cache / _GIB:.2f} ({self.rows} rows x {self.slots} "
            f"slots), {states}logits and probabilities {self.probs / _GIB:.2f}, drafter {self.reserve / _GIB:.2f}. "
            f"{' '.join(advice)}"
        )

    def _weights_room(self, available: int) -> int:
        """Return the bytes that weights may take beside one row of few slots."""
        least = self.token * LEAST_SLOTS + (self.probs + self.states) // self.rows + self.reserve
        return max(0, available - least)

    def fitting_slots(self, available: int) -> int:
        """Return the most slots of a row that would fit with as many rows; 0 if none."""
        room = available - self.weights - self.probs - self.states - self.reserve
        return max(0, room // max(1, self.token * self.rows) - 1)

    def fitting_rows(self, available: int) -> int:
        """Return the most rows that would fit with as many slots; 0 if none."""
        fixed = self.weights + self.reserve
        return max(0, (available - fixed) * self.rows // max(1, self.total - fixed))


def states_bytes_per_row(cls: type[Any], config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of recurrent states that a row takes with its copies for prefixes, before anything is loaded:
    two tokens are run through the model without weights. 0 where it keeps none, or needs weights to run.
    """
    family = auto_class(config)
    layers = {*(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())}
    stateful = getattr(family._model_mapping.get(type(config), None), "_is_stateful", False)
    if not stateful and layers.isdisjoint(WITH_STATES):
        return 0
    try:
        with torch.device("meta"):
            model = family.from_config(copy.deepcopy(config), dtype=dtype).eval()
        model.set_experts_implementation("batched_mm")  # Which runs without numbers in any dtype
        trial = cls(model, rows=1, slots=8)
        trial.prefill([0], [[0, 0]])
    except Exception as error:  # whatever a family does that needs numbers
        _log.debug("%s: its states are not planned: %s", config.model_type, error)
        return 0
    return 0 if trial.states is None else (1 + MOST) * int(trial.states.nbytes())


def cache_bytes_per_token(config: Any, itemsize: int) -> int:
    """Return the KV bytes per token over all layers, from a text configuration. Latent attention
    (DeepSeek) caches its latents.
    """
    by_layer = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    types = getattr(config, "layer_types", None) or [FULL] * own
    keeping = [layer for layer, name in zip(by_layer[:own], types, strict=False) if name not in UNMASKED]
    return sum(map(_count_cached, keeping)) * itemsize


def _count_cached(config: Any) -> int:
    """Return how many numbers one layer caches per token."""
    if getattr(config, "kv_lora_rank", None):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if heads is None:  # It has no attention
        return 0
    return 2 * int(heads) * int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def available_bytes(device: torch.device) -> int:
    """Return the free bytes on a device; on the CPU also within the container's limit, and without
    what caches may still take.
    """
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).mem_get_info(device)[0])
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


def float32_copy(model: Any, most_parameters: int, most_bytes: int) -> Any | None:
    """Return a float32 copy of a causal LM that shares nothing with it: whole where it has
    `most_parameters` at most, else its first layers, every kind of layer among them. None where
    there can be no such copy: quantised weights, layers that cannot be run in part, more than
    `most_bytes`.
    """
    if is_quantised(model):
        return None
    try:
        part = model if count_weights(model) <= most_parameters else _first_layers(model)
    except ForerunError:
        return None
    if part is None or 4 * count_weights(part) > most_bytes:
        return None
    twin = copy.deepcopy(part)
    for _ in accelerate.undo(twin):  # packed weights have no other dtype
        pass
    for module in twin.modules():
        module.__dict__.pop("forward", None)  # What a trainer puts there calls the original
    rounded = [module for module in twin.modules() if _keeps_rounded_tables(module)]
    twin = twin.float().eval()
    for module in rounded:  # As it computes them in float32, or its own ways of running would differ by the rounding
        twin._init_weights(module)
    if part is not model:
        try:
            with torch.inference_mode():
                twin(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=twin.device), use_cache=False)
        except Exception as error:  # whatever its code expects of its layers' number
            _log.debug("%s: its first layers do not run alone: %s", type(model).__name__, error)
            return None
    return twin


def _keeps_rounded_tables(module: nn.Module) -> bool:
    """Return whether a module without weights computed its buffers (MiniMax's decays), and keeps them in 16 bits."""
    own = [buffer for buffer in module.buffers(recurse=False) if buffer.is_floating_point()]
    return any(buffer.itemsize < 4 for buffer in own) and not list(module.parameters(recurse=False))


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
    if getattr(part, "layer_types", None) and list(part.layer_types) != list(types[:count]):
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
        expected = self_check.expect(_out_of_blocks(model, room), ids, sizes=twin is None)
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


def _out_of_blocks(model: Any, room: int) -> Any:
    """Return a copy of the model with its weights dequantised, which transformers' own products take; the model itself
    where it has none in blocks, or the memory has no room for the copy.
    """
    if not list_in_blocks(model) or 2 * count_weights(model) * model.dtype.itemsize > room:
        return model
    twin = copy.deepcopy(model)
    unpack(twin)
    return twin


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
    whole = None if model.dtype == torch.float32 else _copy(model, count_weights(model), room)
    if whole is not None:
        try:
            _structure(cls, whole, ids)
        except ForerunError as error:
            _log.debug("%s in float32: %s", name_of(model), error)
        else:
            return f"{without}In float32 it passes: load it with dtype='float32' (--dtype float32)"
    return f"{without}{UNSERVED}"
