"""Catches hidden states at layer boundaries while a pass runs. Boundary b is the residual stream after b layers."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from forerun.errors import ArgumentError
from forerun.types import LAST_HIDDEN, Signal


def check_signals(signals: Set[Signal], layers: int) -> None:
    """Raise ArgumentError for a boundary that the model does not have."""
    for signal in signals:
        if signal != LAST_HIDDEN and not 0 <= signal <= layers:
            raise ArgumentError(
                f"there is no layer boundary {signal}: expected 0..{layers} or LAST_HIDDEN ({LAST_HIDDEN})"
            )


@contextmanager
def captured(layers: nn.ModuleList, signals: Set[Signal]) -> Iterator[dict[Signal, Tensor]]:
    """While open, the states (B, N, H) at the boundaries in `signals` land in the yielded dict, `LAST_HIDDEN` not."""
    caught: dict[Signal, Tensor] = {}
    handles = [_hook(layers, signal, caught) for signal in signals if signal != LAST_HIDDEN]
    try:
        yield caught
    finally:
        for handle in handles:
            handle.remove()


def _hook(layers: nn.ModuleList, signal: Signal, caught: dict[Signal, Tensor]) -> Any:
    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught[signal] = args[0] if args else kwargs["hidden_states"]

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        caught[signal] = output[0] if isinstance(output, tuple) else output

    if signal < len(layers):
        return layers[signal].register_forward_pre_hook(before, with_kwargs=True)
    return layers[-1].register_forward_hook(after)
