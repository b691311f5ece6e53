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
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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


class Replacement(Protocol):
    """A forward that may replace a module's own. Any object with these four members can be tried."""

    module: nn.Module
    plain: Callable[..., Any]  # The module's own forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what `plain` computes."""
        ...

    def answers(self, forward: Callable[..., Any], states: Tensor, kwargs: dict[str, Any]) -> list[Tensor]:
        """Return everything that `forward`, this or the module's own, computes from `states` (..,
        size): outputs, and what it writes elsewhere. `kwargs` are the other arguments that the
        model passed to the module.
        """
        ...


@torch.inference_mode()
def accept(model: nn.Module, replacements: Sequence[Replacement], ids: Tensor) -> list[Replacement]:
    """Run a plain pass over `ids` (B, N) and try each replacement on the states that reach its
    module. Returns those that answer as the module does and logs the others at debug level; the
    model is left as it was.
    """
    names = {module: name for name, module in model.named_modules()}
    passed = dict[int, bool]()

    def trying(index: int, replacement: Replacement) -> Any:
        def try_it(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states, others = _states_of(args, kwargs)
            if index in passed and not passed[index]:
                return
            wrong = difference(replacement, states, others)
            passed[index] = wrong is None
            if wrong is not None:
                log.debug("%s (%s) keeps its forward: %s", names.get(module, "?"), type(module).__name__, wrong)

        return try_it

    handles = [
        each.module.register_forward_pre_hook(trying(index, each), with_kwargs=True)
        for index, each in enumerate(replacements)
    ]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [each for index, each in enumerate(replacements) if passed.get(index, False)]


@torch.inference_mode()
def accept_alone(replacements: Sequence[tuple[Replacement, Tensor]]) -> list[Replacement]:
    """Accept replacements as `accept` does, for modules that no pass over tokens reaches (a
    head's); each comes with states to try it on.
    """
    found = list[Replacement]()
    for each, states in replacements:
        wrong = difference(each, states, {})
        if wrong is None:
            found.append(each)
        else:
            log.debug("%s keeps its forward: %s", type(each.module).__name__, wrong)
    return found


def difference(replacement: Replacement, states: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Describe how much the replacement's answer to these states is wrong; None if it is right."""
    expected = replacement.answers(replacement.plain, states, kwargs)
    moved = replacement.answers(replacement.plain, nudge(states), kwargs)
    try:
        found = replacement.answers(replacement, states, kwargs)
    except Exception as error:  # whatever a kernel cannot take, the module's own forward can
        return f"the faster one fails: {type(error).__name__}: {error}"
    wrong = next(filter(None, map(fault, found, expected, moved)), None)
    return None if wrong is None else f"the faster one differs by {wrong}"


def fault(found: Tensor, expected: Tensor, moved: Tensor) -> str | None:
    """Describe how much values (.., C) are wrong; None if they are right. `moved` are the expected
    values for inputs moved by `nudge`.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"its shape or dtype: {tuple(found.shape)} {found.dtype}"
    most = UNITS if expected.dtype.itemsize < 4 else UNITS_FLOAT32
    differs = units(found, expected, moved)
    if not (worst := float(differs.abs().max())) <= most:
        return f"{worst:.3g} units of rounding, {most} are allowed"
    if not (bias := float(differs.mean().abs())) <= most * MOST_BIAS:
        return f"{bias:.3g} units of rounding in the mean, always in one direction, {most * MOST_BIAS:g} are allowed"
    return None


def units(found: Tensor, expected: Tensor, moved: Tensor) -> Tensor:
    """Return the differences (N, C) of values (.., C) from the expected ones, in units of each
    value. A difference is positive where the value is too large in size, infinite where only one of
    the two is finite.
    """
    width = expected.shape[-1] if expected.dim() else 1
    ours, theirs, other = (each.reshape(-1, width).double() for each in (found, expected, moved))
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


def nudge(states: Tensor) -> Tensor:
    """Return the states with every entry moved up or down by one unit in its last place, the same
    way at each call.
    """
    draw = torch.rand(states.shape, generator=torch.Generator().manual_seed(0)).to(states.device)
    step = torch.where(draw < 0.5, -1.0, 1.0) * last_place(states)
    return (states.double() + step).to(states.dtype)


def _states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return the states that a module is called with, and its other keyword arguments."""
    if args:
        return args[0], kwargs
    name = next(key for key, value in kwargs.items() if isinstance(value, Tensor) and value.is_floating_point())
    return kwargs[name], {key: value for key, value in kwargs.items() if key != name}
