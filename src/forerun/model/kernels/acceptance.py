"""Decides whether a faster forward may replace a module's own: element by element, on states of the
model itself.

The unit of a value is what rounding moves it by: one in its last place, or, where a sum cancels, as much as the
module's own answer moves when every entry of its input is rounded up or down by one in its last place. A forward that
is right up to its order of summation stays within a few units of every value, however small that value is beside the
others of its tensor; one that forgets a term misses the small values by hundreds. Rounding has no direction: one that
makes all values a little too large is wrong, however little that is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from forerun.model.inputs import Pass, current, running
from forerun.model.kernels import fused, streamed

log = logging.getLogger(__name__)

UNITS, UNITS_FLOAT32 = 8, 256
"""The most units by which a value may differ. In 16 bits, where sums are kept in float32 and
rounded once or twice, 1.3 was seen. In float32 sums of thousands of terms themselves round in
another order.
"""


MOST_BIAS = 1 / 32
"""The largest mean difference in one direction, as a share of the most that one value may differ
by. Sound forwards have 0.006 units in 16 bits and 0.2 in float32; a norm of weights around 40 that
forgets its 1 + has 3 in bf16.
"""


GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch_modules._global_forward_hooks,
    torch_modules._global_forward_pre_hooks,
)
"""The hooks on all modules of the process (``register_module_forward_hook``)."""


class Inside:
    """The modules inside one whose work a kernel does, which bypasses them. Where one of them is exchanged, hooked or
    patched, the module's own forward must run. They are looked at in the first pass of each prompt, see `Pass.prompt`.
    """

    def __init__(self, module: nn.Module) -> None:
        found = [
            (owner._modules, name, part)
            for owner in module.modules()
            for name, part in owner._modules.items()
            if part is not None
        ]
        self.places = [children for children, _, _ in found], [name for _, name, _ in found]
        self.held: list[nn.Module] = [part for _, _, part in found]
        self.hooks = [hooks for part in self.held for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self.prompt: object | None = None  # The `Pass.prompt` at which they were intact

    def intact(self) -> bool:
        """Return whether none was exchanged since this was made, and none is hooked or has a forward of its own but
        for those of this package.
        """
        prompt = current().prompt
        if prompt is not None and prompt is self.prompt:
            return True
        forwards = map(dict.get, map(vars, self.held), repeat("forward"))
        found = (
            not any(self.hooks)
            and not any(GLOBAL_HOOKS)
            and [*map(dict.get, *self.places)] == self.held
            and all(forward is None or isinstance(forward, ModuleForward) for forward in forwards)
        )
        self.prompt = prompt if found else None
        return found


class ModuleForward:
    """A forward that may take the place of a module's own."""

    def __init__(self, module: nn.Module, weight: Any) -> None:
        self.module = module
        self.inside = Inside(module)
        self.plain = module.forward
        self.device, self.dtype = weight.device, weight.dtype
        self.width = 0  # Width of the states, if the forward can be tried on states alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what `plain`, the module's own forward, computes."""
        raise NotImplementedError

    def random_states(self) -> Tensor:
        """Return normally distributed states (1, 24, width), the same at each call."""
        states = torch.randn(1, 24, self.width, generator=torch.Generator().manual_seed(0))
        return states.to(self.device, self.dtype)

    @property
    def ops(self) -> Any:
        """The fused operations of the module's device."""
        return fused(self.device)

    @property
    def tools(self) -> Any:
        """The operations of the module's device that are for few tokens."""
        return streamed(self.device)

    def answers(self, forward: Any, states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return everything that `forward`, this or the module's own, computes from `states` (.., size): outputs, and
        what it writes elsewhere. `kwargs` are the other arguments that the model passed to the module.
        """
        return [forward(states.contiguous(), **kwargs)]


@torch.inference_mode()
def accept(model: nn.Module, forwards: Sequence[ModuleForward], ids: Tensor) -> list[ModuleForward]:
    """Run a plain pass over `ids` (B, N) and try each forward on the states that reach its module. Returns those that
    answer as the module does, whenever it is called, and logs the others at debug level; the model is left as it was.
    """
    this = Pass(prompt=object())  # What is inside is looked at here, before it is hooked to see its states
    with running(this):
        forwards = [forward for forward in forwards if forward.inside.intact()]
    names = {module: name for name, module in model.named_modules()}
    alike = dict[ModuleForward, bool]()

    def try_forward(forward: ModuleForward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if alike.get(forward, True):
            states, others = _states_of(args, kwargs)
            alike[forward] = _is_alike(forward, states, others, names.get(module, "?"))

    handles = [
        forward.module.register_forward_pre_hook(partial(try_forward, forward), with_kwargs=True)
        for forward in forwards
    ]
    try:
        with running(this):
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [forward for forward in forwards if alike.get(forward, False)]


@torch.inference_mode()
def accept_alone(forwards: Sequence[ModuleForward]) -> list[ModuleForward]:
    """Accept forwards as `accept` does, on random states, for modules that no pass over tokens reaches (a head's)."""
    return [forward for forward in forwards if _is_alike(forward, forward.random_states(), {}, "a part of a head")]


def _is_alike(forward: ModuleForward, states: Tensor, kwargs: dict[str, Any], name: str) -> bool:
    wrong = difference(forward, states, kwargs)
    if wrong is not None:
        log.debug("%s (%s) keeps its forward: %s", name, type(forward.module).__name__, wrong)
    return wrong is None


def difference(forward: ModuleForward, states: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Describe how much a forward's answer to these states is wrong; None if it is right."""
    expected = forward.answers(forward.plain, states, kwargs)
    moved = forward.answers(forward.plain, nudge(states), kwargs)
    try:
        ours = forward.answers(forward, states, kwargs)
    except Exception as error:  # whatever a kernel cannot take, the module's own forward can
        return f"the faster one fails: {type(error).__name__}: {error}"
    wrong = next(filter(None, map(fault, ours, expected, moved)), None)
    return None if wrong is None else f"the faster one differs by {wrong}"


def fault(ours: Tensor, expected: Tensor, moved: Tensor) -> str | None:
    """Describe how much values (.., C) are wrong; None if they are right. `moved` are the expected
    values for inputs moved by `nudge`.
    """
    if ours.shape != expected.shape or ours.dtype != expected.dtype:
        return f"its shape or dtype: {tuple(ours.shape)} {ours.dtype}"
    most = UNITS if expected.dtype.itemsize < 4 else UNITS_FLOAT32
    differs = units(ours, expected, moved)
    if not (worst := float(differs.abs().max())) <= most:
        return f"{worst:.3g} units of rounding, {most} are allowed"
    if not (bias := float(differs.mean().abs())) <= most * MOST_BIAS:
        return f"{bias:.3g} units of rounding in the mean, always in one direction, {most * MOST_BIAS:g} are allowed"
    return None


def units(values: Tensor, expected: Tensor, moved: Tensor) -> Tensor:
    """Return the differences (N, C) of values (.., C) from the expected ones, in units of each
    value. A difference is positive where the value is too large in size, infinite where only one of
    the two is finite.
    """
    width = expected.shape[-1] if expected.dim() else 1
    ours, theirs, other = (each.reshape(-1, width).double() for each in (values, expected, moved))
    unit = last_place(expected.reshape(-1, width)).double()
    # Rounding hides many a movement, so that single ones say little: a token's share times a channel's, as geometric
    # means, which no single outlier moves. e^(0.635) undoes the mean of the logarithm of a normal variable's square.
    logs = ((other - theirs).square() + (unit / 4).square()).log()
    share = (logs.mean(0, keepdim=True) + logs.mean(1, keepdim=True) - logs.mean()).div(2).add(0.635).exp()
    larger = torch.where(theirs < 0, -1.0, 1.0) * (ours - theirs)
    differs = larger / torch.maximum(unit, share)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0.0, differs).nan_to_num(nan=math.inf)


def last_place(values: Tensor) -> Tensor:
    """Return one unit in the last place of each value, at least that of the smallest normal number."""
    limits = torch.finfo(values.dtype)
    exponent = values.double().abs().clamp(min=limits.smallest_normal).log2().floor()
    return torch.exp2(exponent) * limits.eps


def nudge(states: Tensor, places: int = 1, seed: int = 0) -> Tensor:
    """Return the states with every entry moved up or down by so many units in its last place, the
    same way at each call with this seed.
    """
    draw = torch.rand(states.shape, generator=torch.Generator().manual_seed(seed)).to(states.device)
    step = torch.where(draw < 0.5, -places, places) * last_place(states)
    return (states.double() + step).to(states.dtype)


def _states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return the states that a module is called with, and its other keyword arguments."""
    if args:
        return args[0], kwargs
    name = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return kwargs[name], {key: value for key, value in kwargs.items() if key != name}
