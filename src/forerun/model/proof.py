"""Decides whether a model may be served, and with which of our replacements: one judgement for all
who load a target.

The structure is checked in float32, the whole in the model's own dtype (`self_check`). What fails with faster modules
alone is served without them; a model is refused if it fails as transformers made it, and then the message says what
would help, which has been tried.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from forerun.errors import UNSERVED, ForerunError, UnsupportedModelError
from forerun.model import self_check, verdicts
from forerun.model.kernels import accelerate
from forerun.model.layers import base_of, turn_of
from forerun.model.sample import sample
from forerun.model.support import name_of, refusing, text_config
from forerun.model.twin import float32_copy, is_spread

_log = logging.getLogger(__name__)

Faster = Callable[[Sequence[int], Sequence[str] | None], None]  # (text, accepted) -> nothing
Made = TypeVar("Made", bound=Any)  # A `Target`, of whatever class


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
    accepted = verdicts.read_verdict(key)
    if accepted is not None:
        return _as_before(cls, model, faster, accepted), None
    limit, removed = None, list[str]()
    with turn_of(base_of(model)), self_check.short_windows(text_config(model)):
        self_check.check_embeddings(model)
        ids = sample(model, tokenizer)
        twin = None if self_check.is_exact(model) else _copy(model, self_check.whole_parameters(model), room)
        if twin is not None:
            limit = _structure(cls, twin, ids)
        expected = self_check.expect(model, ids, sizes=twin is None)
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
            told = f"{wrong}. Speculation would not be lossless. {_remedy(cls, model, ids, removed, room)}"
            raise UnsupportedModelError(told)
    least = min((one for one in (limit, found) if one is not None), default=None)
    if least is None and not removed:
        verdicts.keep(key, name_of(model), accelerate.list_replaced(model))
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
    whole = None if model.dtype == torch.float32 else _copy(model, model.num_parameters(), room)
    if whole is not None:
        try:
            _structure(cls, whole, ids)
        except ForerunError as error:
            _log.debug("%s in float32: %s", name_of(model), error)
        else:
            return f"{without}In float32 it passes: load it with dtype='float32' (--dtype float32)"
    return f"{without}{UNSERVED}"
