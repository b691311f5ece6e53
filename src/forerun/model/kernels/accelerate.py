"""Speeds up the passes of a loaded target: packed linear layers, folded attention, fused C kernels.

The replaced modules belong to the model object, so a model that a user handed in is only accelerated if asked.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.model.kernels import attention, forwards, packing
from forerun.model.kernels.packing import Packing
from forerun.model.layers import device_of
from forerun.model.sample import draw_tokens

log = logging.getLogger(__name__)

COMPARED = 48  # Tokens on which replaced modules are compared with their own forwards


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceleration:
    """A record of what `accelerate` did to a model."""

    packing: Packing
    folded_attention: bool
    forwards: int  # Norms, MLPs and attentions that run in fewer operations

    def __str__(self) -> str:
        done = {
            f"{self.packing.layers} linear layers packed, {self.packing.fused} groups fused": self.packing.layers,
            "folded attention": self.folded_attention,
            f"{self.forwards} modules in our own kernels": self.forwards,
        }
        words = ", ".join(what for what, some in done.items() if some)
        return words or "nothing to accelerate on this device and dtype"


@torch.inference_mode()
def accelerate(
    model: Any,
    *,
    ids: Sequence[int] = (),
    accepted: Collection[str] | None = None,
) -> Acceleration:
    """Make the passes of a causal LM in evaluation mode cheaper, in place.

    Args:
        ids: text on which what is replaced is compared with what was there; empty: what the model draws.
        accepted: the result of `list_replaced` when it was compared before: nothing is compared now.
    """
    packed = packing.pack(model)
    folds = (packed.layers > 0 or packing.list_in_blocks(model) or model.device.type != "cpu") and attention.suits(
        model
    )
    text: Tensor | None = None
    if folds and accepted is None:
        chosen = list(ids) or draw_tokens(model, COMPARED)
        text = torch.tensor([chosen[:COMPARED]], device=device_of(model.get_input_embeddings()))
        if wrong := attention.refusal(model, text):
            log.debug("attention is not folded: %s", wrong)
            folds = False
    elif accepted is not None:
        folds = folds and attention.NAME in accepted
    if folds:
        attention.install(model)
    count = forwards.install(model, text, accepted) if folds else 0
    return Acceleration(packing=packed, folded_attention=folds, forwards=count)


def list_replaced(model: Any) -> list[str]:
    """Return the names of what was compared and replaced in a model."""
    folded = [attention.NAME] if attention.is_installed(model) else []
    return [*folded, *forwards.list_installed(model)]


def undo(model: Any) -> Iterator[str]:
    """Undo `accelerate` piece by piece, the last first, and yield the name of each piece once it is
    removed. Packed weights go last.
    """
    if forwards.remove(model):
        yield "our kernels for norms, MLPs and attention"
    if attention.is_installed(model):
        model.set_attn_implementation("sdpa")
        yield "folded attention"
    if packing.unpack(model):
        yield "packed linear layers"
