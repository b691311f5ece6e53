"""The parts of a transformers causal LM, found without knowing its family: base, layers, norm,
output head.

Also the hidden states at layer boundaries (boundary b is the residual stream after b layers), and passes over some of
the layers: a shallow copy of the base model gets a slice of them, stored states injected in front and a tap behind.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from forerun.errors import UNSERVED, ArgumentError, UnsupportedModelError
from forerun.types import LAST_HIDDEN, Boundary


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerRange:
    """The layers to run: from boundary `start` to boundary `stop`, without the sublayers in `skip`."""

    start: int = 0  # Boundary whose states go in; 0 runs from the embeddings
    stop: int  # Boundary whose states come out: the residual stream after this many layers, before the final norm
    skip: frozenset[tuple[int, str]] = frozenset()  # (layer, "attn" or "mlp"): sublayers that add nothing

    def check(self, layers: int) -> None:
        """Raise ArgumentError unless the range fits a model of that many layers."""
        if not 0 <= self.start < self.stop <= layers:
            raise ArgumentError(f"a plan needs 0 <= start < stop <= {layers}, got {self.start} and {self.stop}")
        for layer, part in self.skip:
            if part not in ("attn", "mlp") or not self.start <= layer < self.stop:
                raise ArgumentError(
                    f"cannot skip {(layer, part)!r}: expected (layer, 'attn' or 'mlp') with a layer in "
                    f"{self.start}..{self.stop - 1}"
                )


def shallow(module: nn.Module) -> nn.Module:
    """Return a copy that shares every parameter and submodule, whose children may be replaced
    without touching the original. A forward that accelerate or a compiler put on the instance is
    dropped, for it would call the original.
    """
    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)
    for name in ("forward", "_hf_hook", "_old_forward"):
        twin.__dict__.pop(name, None)
    twin.__dict__["_compiled_call_impl"] = None
    return twin


def replace_module(module: nn.Module, path: str, part: nn.Module) -> nn.Module:
    """Return a shallow copy of `module` with `part` at the dotted `path`; modules along the path
    are copied likewise.
    """
    name, _, rest = path.partition(".")
    twin = shallow(module)
    twin._modules[name] = replace_module(module.get_submodule(name), rest, part) if rest else part
    return twin


def base_name(model: Any) -> str:
    """Return the name of the child without the output head: the one that the class names, else the
    one that holds the embedding. Raises UnsupportedModelError if there is none, or several.
    """
    prefix = str(model.base_model_prefix)
    if isinstance(model._modules.get(prefix), nn.Module):
        return prefix
    embedding = model.get_input_embeddings()
    holding = [
        name for name, child in model.named_children() if any(part is embedding for part in list(child.modules())[1:])
    ]
    if len(holding) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has no base model under {prefix!r}: expected a causal LM")
    return str(holding[0])


def base_of(model: Any) -> nn.Module:
    """Return the model without its output head."""
    return model.get_submodule(base_name(model))


CACHE_ARGUMENTS = ("past_key_values", "cache")  # Until transformers 5.23, and from 5.24 on


def cache_argument(module: nn.Module) -> str:
    """Return the name of the cache argument of a module's forward. If the forward passes on any
    keyword, the name is transformers' own.
    """
    taken = inspect.signature(type(module).forward).parameters
    places = [taken, BaseModelOutputWithPast.__dataclass_fields__]
    return next(name for names in places for name in CACHE_ARGUMENTS if name in names)


_TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def pass_lock(base: nn.Module) -> threading.RLock:
    """Return the lock to hold while a base model runs. Two engines may share a model object, and
    its hooks, joint products and skipped sublayers belong to one pass at a time.
    """
    return _TURNS.setdefault(base, threading.RLock())


def layers_of(base: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """Return the dotted name and the list of the decoder layers: the one ModuleList of that length,
    nearest to the input embedding; one of half that length where each layer counts as two, since it has two attentions
    (LongCat). Raises UnsupportedModelError if none has that length, or several lie equally near.
    """
    every_list = {name: module for name, module in base.named_modules() if name and isinstance(module, nn.ModuleList)}
    lists = {name: module for name, module in every_list.items() if len(module) == count}
    if not lists:
        lists = {name: module for name, module in every_list.items() if 2 * len(module) == count}
    embedding = None
    with suppress(AttributeError, NotImplementedError):  # A wrapper of a decoder, as BART's
        embedding = base.get_input_embeddings()  # type: ignore[operator]
    owners = {name: base.get_submodule(name.rpartition(".")[0]) for name in lists}
    beside = [name for name, owner in owners.items() if any(module is embedding for module in owner.modules())]
    depth = min((name.count(".") for name in lists), default=0)
    nearest = beside or [name for name in lists if name.count(".") == depth]
    if len(nearest) != 1:
        raise UnsupportedModelError(
            f"{type(base).__name__}: expected one list of {count} decoder layers, found "
            f"{', '.join(nearest) or 'none'}. {UNSERVED}"
        )
    return nearest[0], lists[nearest[0]]


def norm_after_layers(base: nn.Module, count: int) -> tuple[str, nn.Module]:
    """Return the name and module of the one child behind the layers whose weights are all vectors.
    Raises UnsupportedModelError unless there is exactly one.
    """
    owner, _, last = layers_of(base, count)[0].rpartition(".")
    children = list(base.get_submodule(owner).named_children())
    after = children[[name for name, _ in children].index(last) + 1 :]
    norms = [
        (f"{owner}.{name}" if owner else name, child)
        for name, child in after
        if list(child.parameters()) and all(weight.dim() == 1 for weight in child.parameters())
    ]
    if len(norms) != 1:
        names = ", ".join(name for name, _ in norms) or "none"
        raise UnsupportedModelError(f"{type(base).__name__}: expected one norm after the layers, found {names}")
    return norms[0]


def device_of(module: nn.Module) -> torch.device:
    """Return the device that a module computes on, also if accelerate keeps its weights elsewhere
    between calls.
    """
    hook = getattr(module, "_hf_hook", None)
    placed = getattr(hook, "execution_device", None)
    if placed is not None:
        return torch.device("cuda", placed) if isinstance(placed, int) else torch.device(placed)
    return next(module.parameters()).device


def is_spread(model: Any) -> bool:
    """Return whether modules stand on several devices, on disk, or in shards, so that repacking
    would break them.
    """
    placed = getattr(model, "hf_device_map", None) or {}
    return len(set(placed.values())) > 1 or "disk" in placed.values() or bool(getattr(model, "_tp_size", None))


def is_quantised(model: nn.Module) -> bool:
    """Return whether weights are stored as integers or below 16 bits, by transformers or with
    torch's own int8 layers.
    """
    if getattr(model, "is_quantized", False):
        return True
    return any(type(module).__module__.startswith("torch.ao.nn.quantized") for module in model.modules())


class _States:
    """An output that looks like a base model's; everything but the last hidden state is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """A stand-in for the base model that returns the states it was given, and has its attributes."""

    states: Tensor

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.__dict__["real"] = real  # Not as a child: its weights are not the stub's

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["real"], name)

    @property
    def decoder(self) -> _Stub:
        """The decoder that OPT and similar models call inside their base model: the stub itself."""
        return self

    def forward(self, *_args: object, **_kwargs: object) -> _States:
        return _States(self.states)


class OutputHead:
    """Maps hidden states after the final norm to raw logits, as the model itself computes them."""

    def __init__(self, model: Any) -> None:
        self._stub = _Stub(base_of(model))
        self._model = replace_module(model, base_name(model), self._stub)
        self._token = torch.zeros(1, 1, dtype=torch.int64)

    def __call__(self, states: Tensor) -> Tensor:
        """Compute (.., H) -> (.., V)."""
        self._stub.states = states if states.dim() == 3 else states.reshape(1, -1, states.shape[-1])
        logits: Tensor = self._model(input_ids=self._token, use_cache=False).logits.to(states.device)
        del self._stub.states
        return logits if states.dim() == 3 else logits.view(*states.shape[:-1], -1)


def check_boundaries(boundaries: Set[Boundary], layers: int) -> None:
    """Raise ArgumentError for a boundary that the model does not have."""
    for boundary in boundaries:
        if boundary != LAST_HIDDEN and not 0 <= boundary <= layers:
            raise ArgumentError(f"there is no layer boundary {boundary}: expected 0..{layers} or LAST_HIDDEN (-1)")


@contextmanager
def capture_states(layers: nn.ModuleList, boundaries: Set[Boundary]) -> Iterator[dict[Boundary, Tensor]]:
    """Capture the states (B, N, H) at the `boundaries` while open, in the yielded dict;
    `LAST_HIDDEN` is not captured.
    """
    caught: dict[Boundary, Tensor] = {}
    handles = [_hook(layers, boundary, caught) for boundary in boundaries if boundary != LAST_HIDDEN]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class Capture:
    """A hook on a layer that keeps the states at a boundary. What runs several layers in one call
    hands it these states by `keep`.
    """

    boundary: Boundary
    caught: dict[Boundary, Tensor]

    def keep(self, states: Tensor) -> None:
        """Keep the states (B, N, H) at its boundary."""
        self.caught[self.boundary] = states


class _CaptureInput(Capture):
    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.keep(args[0] if args else kwargs["hidden_states"])


class _CaptureOutput(Capture):
    def __call__(self, _module: nn.Module, _args: Any, output: Any) -> None:
        self.keep(output[0] if isinstance(output, tuple) else output)


def _hook(layers: nn.ModuleList, boundary: Boundary, caught: dict[Boundary, Tensor]) -> Any:
    if boundary < len(layers):
        return layers[boundary].register_forward_pre_hook(_CaptureInput(boundary, caught), with_kwargs=True)
    return layers[-1].register_forward_hook(_CaptureOutput(boundary, caught))


def captures_on(layer: nn.Module) -> list[Capture] | None:
    """Return the hooks on a layer that capture the states at its boundaries; None if there are others."""
    hooks: list[Any] = [*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()]
    captures = [hook for hook in hooks if isinstance(hook, Capture)]
    return captures if len(captures) == len(hooks) else None


_PARTS = {
    "attn": ("self_attn", "attn", "attention", "self_attention"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn"),
}


class _Inject(nn.Module):
    """A layer that returns `states`, whatever its input."""

    def __init__(self, attention_type: str | None) -> None:
        super().__init__()
        self.attention_type = attention_type
        self.states: Any = None

    def forward(self, *_args: object, **_kwargs: object) -> Any:
        return self.states


class _Tap(_Inject):
    """A layer that stores its input and passes it on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.states = args[0] if args else kwargs["hidden_states"]
        return self.states


class _Nothing(nn.Module):
    """A sublayer that adds nothing. It answers in the form of the `real` one, which is run at the
    first call to learn it.
    """

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        self.real = real
        self.extras: int | None = None  # Further members of the answer where it is a tuple; -1: it is a bare tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.extras is None:
            output = self.real(*args, **kwargs)
            self.extras = len(output) - 1 if isinstance(output, tuple) else -1
        zeros = torch.zeros_like(args[0] if args else kwargs["hidden_states"])
        return zeros if self.extras < 0 else (zeros, *[None] * self.extras)


class LayerRanges:
    """Runs slices of one base model; shallow copies are made once for each (start, stop)."""

    def __init__(self, base: nn.Module, layers_name: str, layers: nn.ModuleList) -> None:
        self._base = base
        self._lock = pass_lock(base)
        self._name = layers_name
        self._layers = layers
        self._copies: dict[tuple[int, int], tuple[nn.Module, _Inject, _Tap]] = {}
        self._stubs: dict[tuple[int, str], _Nothing] = {}

    def run(self, plan: LayerRange, inputs: dict[str, Any], states: Tensor | None) -> Tensor:
        """Return the states (B, N, H) at boundary ``plan.stop``; `states` are those at
        ``plan.start``, None for the embeddings.
        """
        with self._lock, self._without(plan):
            return self._through(plan.start, plan.stop, inputs, states)[0]

    def finish(self, states: Tensor, inputs: dict[str, Any], *, start: int | None = None) -> Tensor:
        """Run the layers from boundary `start` on (None: no layer), then the final norm: (B, N, H)
        -> LAST_HIDDEN.
        """
        end = len(self._layers)
        with self._lock:
            return self._through(end if start is None else start, end, inputs, states)[1]

    def _through(self, start: int, stop: int, inputs: dict[str, Any], states: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the states at boundary `stop`, before and after the final norm."""
        if (start, stop) not in self._copies:
            self._copies[start, stop] = self._copy(start, stop)
        model, inject, tap = self._copies[start, stop]
        inject.states = states
        try:
            normed: Tensor = model(**inputs).last_hidden_state
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UnsupportedModelError(
                f"{type(self._base).__name__}: its layers cannot be run in part: {type(error).__name__}: {error}"
            ) from error
        result = tap.states
        inject.states = tap.states = None
        return result, normed

    def _copy(self, start: int, stop: int) -> tuple[nn.Module, _Inject, _Tap]:
        if getattr(self._base.config, "hidden_size_per_layer_input", None):
            raise UnsupportedModelError(
                f"{type(self._base).__name__} feeds every layer an embedding by its place in the list: its layers "
                "cannot be run in part"
            )
        owner = self._name.rpartition(".")[0]
        config: Any = copy.deepcopy(self._base.get_submodule(owner).config)
        if 0 < start < stop and getattr(config, "rescale_every", None):
            raise UnsupportedModelError(
                f"{type(self._base).__name__} halves its states behind every {config.rescale_every}th layer of its "
                "list: its layers cannot be run in part"
            )
        types = getattr(config, "layer_types", None)
        first = types[min(start, len(types) - 1)] if types else None
        inject, tap = _Inject(first), _Tap(first)
        injected = [inject] if start > 0 else []
        layers = nn.ModuleList([*injected, *self._layers[start:stop], tap])
        twin = replace_module(self._base, self._name, layers)
        config.num_hidden_layers = len(injected) + stop - start + 1
        if types:
            kinds = [*[first for _ in injected], *types[start:stop], first]
            config_class = type(config)
            try:
                config.layer_types = kinds
            except AttributeError:  # A property of where the attention layers stand (Jamba, Bamba, Mamba)
                config.__class__ = type(config_class.__name__, (config_class,), {"layer_types": kinds})
        twin.get_submodule(owner).__dict__["config"] = config
        return twin, inject, tap

    @contextmanager
    def _without(self, plan: LayerRange) -> Iterator[None]:
        """Make the plan's skipped sublayers add nothing while open; the layers are put back
        whatever happens.
        """
        removed: list[tuple[nn.Module, str, nn.Module]] = []
        try:
            for layer, part in sorted(plan.skip):
                module, name = self._layers[layer], self._sublayer(layer, part)
                real = getattr(module, name)
                if (layer, part) not in self._stubs:
                    self._stubs[layer, part] = _Nothing(real)
                removed.append((module, name, real))
                module._modules[name] = self._stubs[layer, part]
            yield
        finally:
            for module, name, original in removed:
                module._modules[name] = original

    def _sublayer(self, layer: int, part: str) -> str:
        module, names = self._layers[layer], _PARTS[part]
        for name in names:
            if isinstance(getattr(module, name, None), nn.Module):
                return name
        raise UnsupportedModelError(
            f"{type(module).__name__} has no sublayer named {' or '.join(names)}: cannot skip {(layer, part)}"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Turn dropout and gradient checkpointing off while open, by evaluation mode, and put every module back as it
    was.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
