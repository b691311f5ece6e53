"""These errors are meant for users: a message says what was wrong, what was expected and what to
do.
"""

from __future__ import annotations

import difflib
import logging
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

Made = TypeVar("Made")

UNSERVED = "No option of forerun changes that; transformers' own generate runs such a model."
"""This sentence ends the message about a model whose kind is refused."""

CLOSED = "the engine was closed and takes no more requests; make a new one"


class ForerunError(Exception):
    """The root of all errors that are meant for a user."""


class ArgumentError(ForerunError, ValueError):
    """An argument, option or request parameter is out of range, unknown or contradicts another."""

    param: str | None = None  # Its name, where `about` says so


class CheckpointError(ForerunError, ValueError):
    """A checkpoint is missing, corrupt, gated, or holds other tensors than its configuration announces."""


class DownloadError(ForerunError, ConnectionError):
    """A file that is downloaded at its first use is out of reach: no network, or not in the package index."""


class UnsupportedModelError(ForerunError, ValueError):
    """The target cannot be verified losslessly: recurrent state, an encoder, or a failed self-check."""


class VocabularyMismatchError(ForerunError, ValueError):
    """Drafter and target do not share the tokenizer that the method needs."""


class InvalidDraftError(ForerunError, ValueError):
    """A drafter proposed a tree that is no tree, or tokens outside the vocabulary."""


class OutOfMemoryError(ForerunError, MemoryError):
    """Weights, cache and distributions do not fit; the message says how much was needed and what to lower."""


class NumericError(ForerunError, ArithmeticError):
    """The model produced NaN or infinite logits."""


class NoTokenLeftError(ForerunError, ValueError):
    """A request's constraints ban every token."""


class RequestError(ForerunError):
    """A request ended because something that belongs to it alone raised.

    The cause is the original error; other requests are not concerned.
    """

    @classmethod
    def of(cls, error: BaseException) -> ForerunError:
        """Return the error that the caller is told: `error` itself if it was meant for users, else
        one that wraps it.
        """
        if isinstance(error, ForerunError):
            return error
        wrapped = cls(f"this request could not go on: {type(error).__name__}: {error}")
        wrapped.__cause__ = error
        return wrapped


class EngineError(ForerunError, RuntimeError):
    """A step failed, which ends every running request, and its cause is the error; or the engine was closed."""


class SlowReaderError(ForerunError):
    """A stream was ended because its reader does not read it."""


class DataError(ForerunError, ValueError):
    """An input file is not what its name or the documentation announces."""


def of_the_process(error: BaseException) -> bool:
    """Return whether an error has nothing to do with what raised it: Ctrl-C, an exit, a generator
    that is closed. Panics of libraries written in Rust (tokenizers, grammars) are no `Exception`
    either, but about what they are given.
    """
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)


class Failing(Protocol):
    """An object that can end with an error of its own."""

    error: ForerunError | None


class Isolation:
    """``with Isolation(row):`` turns an error inside the block into an error of that row.

    It stands around what is done for one row alone (its distribution, processors, grammar, stop strings).
    The row's error ends its request, and nothing is raised.
    """

    __slots__ = ("_row",)

    def __init__(self, row: Failing) -> None:
        self._row = row

    def __enter__(self) -> None:
        """Enter the block; there is nothing to prepare."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None or of_the_process(error):
            return False
        self._row.error = self._row.error or RequestError.of(error)
        return True


def find_problem(*cases: tuple[object, str]) -> str | None:
    """Return the message of the first case that applies, None where none does.

    A case is a condition and what is wrong where it holds.
    """
    return next((message for applies, message in cases if applies), None)


def refuse(*cases: tuple[object, str], error: type[Exception] = ArgumentError) -> None:
    """Raise `error` with the message of the first case that applies, see `find_problem`."""
    if (message := find_problem(*cases)) is not None:
        raise error(message)


def refuse_below(prefix: str, settings: object, **least: int) -> None:
    """Raise ArgumentError if one of the settings is below its least value; None stands for no limit.

    `prefix` stands before its name: ``"--"`` where it is an option's, whose name has dashes.
    """
    for name, value in least.items():
        given = getattr(settings, name)
        if given is not None and not given >= value:
            shown = name.replace("_", "-") if prefix == "--" else name
            raise ArgumentError(f"{prefix}{shown} must be at least {value}, got {given}")


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN or infinity, which Python's reader of JSON takes, and others do not."""
    raise ValueError(f"there is no {name} in JSON")


def choices(name: str, known: Iterable[str], are: str = "There are") -> str:
    """Return the hint that follows an unknown name: ``" Did you mean 'x'? There are x, y, z."``

    The nearest name comes first, before a list that may be long.
    """
    names = list(known)
    return f"{nearest(name, names)} {are} {', '.join(names)}."


def refuse_unknown(what: str, name: str, known: Iterable[str], are: str = "There are") -> None:
    """Raise ArgumentError for a name that is not among the known ones, with the hint of `choices`."""
    names = list(known)
    if name not in names:
        raise ArgumentError(f"{what} {name!r}.{choices(name, names, are)}")


_OWN = (str(Path(__file__).parent), "<")
"""The beginnings of the names of forerun's own files, and of code that is in no file."""


def outside_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the calls of a traceback from the first one that is not forerun's on."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.filename.startswith(_OWN) for frame in frames]
    return list(frames[own.index(False) :]) if False in own else []


def find_place(error: BaseException) -> str:
    """Return `` (file.py:12)``, the last line outside forerun, and outside of installed packages where there is one,
    that an error came through; an empty string if there is none.
    """
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    outside = [frame for frame in outside_frames(error) if not frame.filename.startswith(_OWN)]
    frames = [frame for frame in outside if not frame.filename.startswith(installed)] or outside
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def list_some(names: Sequence[str], most: int = 6) -> str:
    """Join the first few names, and say how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def first_line(error: Exception) -> str:
    """Return the first line of what an error says, the name of its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


NEAR = 0.8
"""The least share of equal letters of a name that is suggested for another where no list of names follows: one letter
in five is wrong.
"""

_WARNED = set[str]()


def forget_warnings() -> None:
    """Let `warn_once` say everything again."""
    _WARNED.clear()


def warn_once(log: logging.Logger, about: str, message: str, *values: object, level: int = logging.WARNING) -> None:
    """Log a warning, or a line of another `level`, unless this process was told `about` the same before."""
    if about not in _WARNED:
        _WARNED.add(about)
        log.log(level, message, *values)


@contextmanager
def about(param: str) -> Iterator[None]:
    """Name the parameter in each ArgumentError that leaves the block and does not name one yet."""
    try:
        yield
    except ArgumentError as error:
        error.param = error.param or param
        raise


def check_arguments(call: str, given: Iterable[str], known: Collection[str], instead: Mapping[str, str]) -> None:
    """Raise TypeError for a keyword that a `call` does not have, which names the nearest, or what takes the place of
    another engine's: `instead` by its name.
    """
    for name in given:
        if name in instead:
            raise TypeError(f"{call}() has no argument {name!r}: {instead[name]}")
        if name not in known:
            raise TypeError(f"{call}() has no argument {name!r}.{nearest(name, known, NEAR)}")


def name_unknown_arguments(instead: Mapping[str, str], *more: str) -> Callable[[Made], Made]:
    """Let a dataclass or a method check its keywords by `check_arguments`, and positional arguments that it has not by
    their names in another engine, `more`.
    """

    def decorate(made: Made) -> Made:
        called: Any = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]
        known = signature(called).parameters
        most = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in known.values())

        @wraps(called)
        def checked(*values: object, **given: object) -> object:
            beyond = more[: max(0, len(values) - most)]
            check_arguments(getattr(made, "__name__", ""), [*beyond, *given], known, instead)
            return called(*values, **given)

        if not isinstance(made, type):
            return cast(Made, checked)
        setattr(made, "__init__", checked)  # noqa: B010 (mypy takes an assignment for a mistake)
        return made

    return decorate


def find_near(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return the known name that is nearest, or an empty string where none is near."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ``" Did you mean 'x'?"``, or an empty string where no known name is near."""
    near = find_near(name, known, cutoff)
    return f" Did you mean {near!r}?" if near else ""
