"""Element-wise parts of a head's layer that keep only their inputs for the backward pass.

Autograd would keep every value in between, in float32 for the norms: unrolled seven times, twice what the layer's
products keep. Without gradients these are the plain formulas. Knows no module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""Cosines and sines (B, N, D) of the positions."""
Activation = Callable[[Tensor], Tensor]


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of (.., size), computed in float32; in the dtype of `states`."""
    if _tracked(states, weight):
        normed: Tensor = _Norm.apply(states, weight, eps)  # type: ignore[no-untyped-call]
        return normed
    return _normed(states, weight, eps)[0]


def gated(activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
    """``activation(gate) * up``."""
    if _tracked(gate, up):
        product: Tensor = _Gated.apply(activation, gate, up)  # type: ignore[no-untyped-call]
        return product
    return activation(gate) * up


def rotate(states: Tensor, angles: Angles) -> Tensor:
    """Rotary position embedding of (B, heads, N, D), halves paired as in Llama."""
    cosine, sine = (part.unsqueeze(1) for part in angles)
    if _tracked(states, cosine, sine):
        rotated: Tensor = _Rotation.apply(states, cosine, sine)  # type: ignore[no-untyped-call]
        return rotated
    return _rotated(states, cosine, sine)


def _tracked(*tensors: Tensor) -> bool:
    """Whether a backward pass may follow. What was made in inference mode may not be kept for one."""
    return torch.is_grad_enabled() and not any(tensor.is_inference() for tensor in tensors)


def _normed(states: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = states.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * inverse).to(states.dtype)).to(states.dtype), inverse


class _Norm(torch.autograd.Function):
    """Keeps the states and one number for each of them."""

    @staticmethod
    def forward(context: Any, states: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, inverse = _normed(states, weight, eps)
        context.save_for_backward(states, weight, inverse)
        return normed

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, inverse = context.saved_tensors
        normed, flow = states.float() * inverse, upstream[0].float()
        weight_grad = (flow * normed).flatten(0, -2).sum(0).to(weight.dtype)
        pull = flow * weight.float()
        along = (pull * normed).mean(-1, keepdim=True)
        return pull.sub_(normed.mul_(along)).mul_(inverse).to(states.dtype), weight_grad, None


class _Gated(torch.autograd.Function):
    """Computes the activation once more."""

    @staticmethod
    def forward(context: Any, activation: Activation, gate: Tensor, up: Tensor) -> Tensor:
        context.activation = activation
        context.save_for_backward(gate, up)
        return activation(gate) * up

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = context.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            active = context.activation(gate)
        (gate_grad,) = torch.autograd.grad(active, gate, upstream[0] * up)
        return None, gate_grad, upstream[0] * active.detach()


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


class _Rotation(torch.autograd.Function):
    """Linear in the states: keeps the angles alone."""

    @staticmethod
    def forward(context: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        context.save_for_backward(cosine, sine)
        return _rotated(states, cosine, sine)

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = context.saved_tensors
        first, second = (upstream[0] * sine).chunk(2, dim=-1)
        return upstream[0] * cosine + torch.cat([second, -first], dim=-1), None, None
