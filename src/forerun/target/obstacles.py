"""Why a model cannot be verified, in words: which of the things that forerun asks of a forward it does not do.

Asked only after the self-check has failed; decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forerun.errors import UNSERVED, ForerunError, UnsupportedModelError
from forerun.target.cache import SlotCache
from forerun.target.masks import MaskStyle
from forerun.target.parts import base_of, device_of
from forerun.target.support import text_config

_CLASH = "its layers fail on what forerun's KV cache gives them, views of one tensor that holds all rows"
_HIDDEN = 1
"""The token that the probe's second mask hides."""


def name_of(model: Any) -> str:
    """What a model is called in a message."""
    return str(getattr(model, "name_or_path", "")) or type(model).__name__


@contextmanager
def refusing(model: Any, *, plainly: bool = False) -> Iterator[None]:
    """While open, whatever a model's own code raises becomes an UnsupportedModelError that says what is missing.

    Args:
        model: a causal LM.
        plainly: it runs without a cache and a mask, so that nothing of forerun's can be missing.
    """
    try:
        yield
    except (ForerunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if plainly:
            raise UnsupportedModelError(f"{name_of(model)}: even a plain forward fails: {said}") from error
        raise UnsupportedModelError(
            f"{name_of(model)} cannot score a token tree: {obstacle(model, error) or _CLASH}. "
            f"forerun needs 4D attention masks, explicit positions and a KV cache. {UNSERVED}"
        ) from error


@torch.inference_mode()
def obstacle(model: Any, error: Exception | None = None) -> str | None:
    """What of a mask, positions and a cache `model` does not follow; None where that is not what is wrong.

    Args:
        model: a causal LM whose plain forward works.
        error: what it raised under forerun.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, SlotCache):
        return f"its layers ask the KV cache for {error.name!r}, for a state that forerun cannot roll back"
    steps = torch.arange(4).unsqueeze(0)
    try:
        plain = _states(model, steps, hide=False)
        hidden = _states(model, steps, hide=True)
    except Exception:
        return "it does not take a 4D attention mask, one entry for each pair of tokens"
    if torch.equal(plain, hidden):
        return "it ignores a 4D attention mask, one entry for each pair of tokens"
    if torch.equal(plain, _states(model, 3 * steps, hide=False)):
        return (
            "it ignores the positions that it is given and counts a token's position, or its ALiBi bias, from its "
            "place in the cache; siblings of a tree stand in different places at the same position"
        )
    return None


def _states(model: Any, positions: Tensor, *, hide: bool) -> Tensor:
    """(1, 4, H) of four tokens at `positions` (1, 4) under a causal mask, with or without token `_HIDDEN`."""
    base = base_of(model)
    device = device_of(model.get_input_embeddings())
    lowest = torch.finfo(model.dtype).min
    mask = torch.full((4, 4), lowest, dtype=model.dtype, device=device).triu(1)
    if hide:
        mask[_HIDDEN + 1 :, _HIDDEN] = lowest
    types = MaskStyle.of(text_config(model)).types
    mask = mask.view(1, 1, 4, 4)
    states: Tensor = base(
        input_ids=torch.arange(4, device=device).unsqueeze(0) % text_config(model).vocab_size,
        position_ids=positions.to(device),
        attention_mask=dict.fromkeys(types, mask) if len(types) > 1 else mask,
        use_cache=False,
    ).last_hidden_state
    return states
