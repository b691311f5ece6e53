"""Turns a name or a loaded model into a checked `Target`: plan memory, load, repack, prove. The
order matters: the references of the self-check are run before anything is repacked.

The proof decides whether a model may be served, and with which of our replacements: one
judgement for all who load a target.

The structure is checked in float32, on a copy of the model or of its first layers, where errors
show that rounding hides in 16 bits; the whole is checked in the model's own dtype (`self_check`).
What fails with faster modules alone is served without them; a model is refused if it fails as
transformers made it, and then the message says what would help, which has been tried.

That nothing was found is kept on disk (`identity`). Whatever limits a context or is put back is found, and told, at
every start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from forerun.devices import trim_heap
from forerun.errors import UNSERVED, ArgumentError, ForerunError, UnsupportedModelError, refuse
from forerun.model import self_check
from forerun.model.gguf_files import file_of
from forerun.model.identity import keep_verdict, read_verdict, verdict_key
from forerun.model.kernels import accelerate, blocks, products
from forerun.model.kernels.packing import count_weights, freed_bytes, list_in_blocks, unpack
from forerun.model.layers import (
    base_name,
    base_of,
    device_of,
    is_quantised,
    is_spread,
    layers_of,
    pass_lock,
    replace_module,
)
from forerun.model.load import (
    LoadOptions,
    keeps_blocks,
    open_model,
    read_config,
    resolved_dtype,
    stored_bytes,
    without_wrapper,
)
from forerun.model.masks import WITH_STATES
from forerun.model.memory import Sizes, available_bytes, plan_slots, plan_slots_beside
from forerun.model.names import resolve, tokenizer_beside
from forerun.model.sample import sample
from forerun.model.states.rows import MOST
from forerun.model.support import auto_class, name_of, refuse_config, refusing, text_config

_log = logging.getLogger(__name__)

Made = TypeVar("Made", bound=Any)  # A `Target`, of whatever class; that module imports this one
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
    named = isinstance(source, (str, Path))
    sizes = Sizes(rows, slots, reserve, reserve_per_slot)
    model, slots = _open(cls, source, options, sizes) if named else _adopt(source, options, sizes)
    run_first_forward(model)
    # By default only a model that was loaded here is repacked: on one device, not quantised, without an adapter.
    plain = named and not (is_spread(model) or is_quantised(model) or getattr(model, "peft_config", None))
    faster = plain if options.repack is None else options.repack
    faster_now = partial(_accelerate, model, named) if faster else None
    tokenizer, folder = options.tokenizer, str(getattr(model, "name_or_path", ""))
    if tokenizer is None and Path(folder).is_dir():
        tokenizer = partial(tokenizer_beside, folder)
    trial, limit = None, None
    if options.self_check:
        _log.info("checking it against transformers")
        in_blocks = bool(list_in_blocks(model))
        key = verdict_key(model, faster, in_blocks) if named and options.adapter is None else None
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
def run_first_forward(model: Any) -> None:
    """Run a model that changes its weights at its first forward (RWKV scales them), before any is repacked."""
    if getattr(base_of(model), "layers_are_rescaled", True) is False:
        with refusing(model, plainly=True):
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)


def refuse_unservable(cls: type[Any], model: Any, tokenizer: Any) -> None:
    """Refuse a model that was loaded for training, by the same errors as where it is served."""
    prove_model(cls, model, lambda: tokenizer, None, _room(model), verdict_key(model, False))


def _room(model: Any) -> int:
    return available_bytes(device_of(model.get_input_embeddings()))


def _accelerate(model: Any, named: bool, ids: Sequence[int], accepted: Sequence[str] | None) -> None:
    """Make the model faster; modules are compared on the text `ids` unless they were `accepted` before."""
    done = accelerate.accelerate(model, ids=ids, accepted=accepted)
    _log.info("%s: %s", name_of(model), done)
    if named:
        _let_go_of_files(model)


def _let_go_of_files(model: Any) -> None:
    """Copy the few weights that were not repacked. transformers leaves them in the mapped file, and
    one of them keeps everything that was read of it in memory.
    """
    rest = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu"]
    if sum(tensor.nbytes for tensor in rest) < freed_bytes(model):
        for tensor in rest:
            tensor.data = tensor.data.clone()


def open_named(name: str | Path, options: LoadOptions) -> Any:
    """Open a model by its name (`names.resolve`), as `open_model` does, unchecked and without progress bars."""
    path = resolve(name)
    return open_model(path, options, read_config(path, options), quiet=True)


def _open(cls: type[Made], name: str | Path, options: LoadOptions, sizes: Sizes) -> tuple[Any, int]:
    if options.device is not None and options.device_map is not None:
        raise ArgumentError("device and device_map exclude each other")
    checkpoint = resolve(name)
    config = read_config(checkpoint, options)
    if options.tokenizer is not None:
        options.tokenizer()  # A checkpoint without one fails before its weights are read
    in_blocks = _keeps_blocks(checkpoint, options, config)
    weights = stored_bytes(checkpoint, options, config, in_blocks=in_blocks)
    device = options.first_device() if options.device_map is None and options.tp_plan is None else None
    dtype = resolved_dtype(options, config) or torch.float32
    states = 0 if device is None else states_bytes_per_row(cls, config, dtype)
    text = config.get_text_config(decoder=True)
    slots = plan_slots(sizes, text, device, dtype.itemsize, weights=weights, states=states * sizes.rows)
    _log.info("reading %.2f GB of weights", weights / 1e9)
    model = open_model(checkpoint, options, config, quiet=weights < _SMALL, in_blocks=in_blocks)
    model.named_by_user = str(name)
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


def _adopt(model: Any, options: LoadOptions, sizes: Sizes) -> tuple[Any, int]:
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
    device = device_of(model.get_input_embeddings())
    asked = device if options.device is None else torch.device(options.device)
    if dtype not in (None, model.dtype) or asked.type != device.type or asked.index not in (None, device.index):
        raise ArgumentError(
            f"this model is loaded already, in {model.dtype} on {device}, and is left as it is; move or convert it "
            "before, or pass its directory"
        )
    return model.eval(), plan_slots_beside(model, sizes)


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
        key: under which the verdict is kept, see `identity`; None: it is not.
        room: bytes that are free on its device; a float32 copy takes half of them at most.

    Raises:
        UnsupportedModelError: it fails although nothing of it is replaced any longer.
        NumericError: its weights or logits are not finite.
    """
    accepted = read_verdict(key)
    if accepted is not None:
        return _as_before(cls, model, faster, accepted), None
    limit = None
    removed = list[str]()
    with pass_lock(base_of(model)), self_check.short_windows(text_config(model)):
        self_check.check_embeddings(model)
        ids = sample(model, tokenizer)
        twin = None if self_check.is_exact(model) else _copy(model, self_check.whole_parameters(model), room)
        if twin is not None:
            limit = _structure(cls, twin, ids)
        expected = self_check.expect(_out_of_blocks(model, room), ids, sizes=twin is None)
        if faster is not None:
            faster(ids, None)
        trial, length, wrong = _check_trial(cls, model, expected)
        if wrong is not None:
            first = wrong
            for piece in accelerate.undo(model):
                removed.append(piece)
                trial, length, wrong = _check_trial(cls, model, expected)
                if wrong is None:
                    _log.warning("%s runs without %s: with that, %s", name_of(model), ", ".join(removed), first)
                    break
        if wrong is not None:
            raise UnsupportedModelError(
                f"{wrong}. Speculation would not be lossless. {_remedy(cls, model, ids, removed, room)}"
            )
    least = min((tokens for tokens in (limit, length) if tokens is not None), default=None)
    if least is None and not removed:
        keep_verdict(key, name_of(model), accelerate.list_replaced(model))
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
