"""Redirects functions, methods and forwards of transformers' modelling files to ours while a pass of forerun runs.

At any other time they are the file's own, so that a model which a user handed in stays what it was.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import nn

from forerun.model.inputs import Pass, current

Function = Callable[..., Any]


def redirect(owner: type[nn.Module], name: str, ours: Function, of: Callable[[Pass], Any]) -> None:
    """Redirect what the forward of the class `owner` calls `name`, a method of its or a function of its file, to `ours`
    while ``of(pass)`` is not None.

    `ours` is called with ``of(pass)``, with the original and with what the forward handed over.
    """
    of_file: dict[str, Any] = inspect.unwrap(owner.forward).__globals__
    is_method = hasattr(owner, name)
    original = getattr(owner, name) if is_method else of_file.get(name)
    if original is None or getattr(original, "redirects", False):
        return

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        context = of(current())
        return original(*args, **kwargs) if context is None else ours(context, original, *args, **kwargs)

    vars(redirected)["redirects"] = True
    if is_method:
        setattr(owner, name, redirected)
    else:
        of_file[name] = redirected


def names_of(kind: type[nn.Module]) -> Iterator[str]:
    """Yield the names that a class's forward uses, and those of its arguments."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is not None:
        yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        yield from _used(code)


def _used(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:  # Comprehensions, before Python 3.12
        if isinstance(inner, CodeType):
            yield from _used(inner)
