"""JSON bodies, read strictly: what one reader may take one way and another otherwise is refused.

Python's own reader takes ``NaN``, keeps the last of two equal keys, and lets through half of a surrogate pair, which no
answer could repeat. What a body costs is bounded before it is read (`nesting`), and large ones are read in a thread of
their own. Knows no parameter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from forerun.engine.prompts import Lane, Lanes
from forerun.nesting import MAX_DEPTH, nesting

T = TypeVar("T")

MAX_BRACKETS = 50_000
"""Objects and lists of one body: each takes Python as long as a thousand characters."""

MAX_ALL_KEYS = 100_000
"""Of all objects of one body together."""
MAX_KEYS = 10_000
"""Of one object: each that is not known makes a complaint of its own."""

_LANES = Lanes("forerun-bodies")


def read_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        JSONDecodeError: not UTF-8, no JSON, JSON that readers disagree about, or that is too deep or too much. FastAPI
            makes a 400 of it.
    """
    depth, brackets, keys = nesting(body)
    if depth > MAX_DEPTH:
        raise _unreadable(f"nested {depth} levels deep, at most {MAX_DEPTH} are read")
    if brackets > MAX_BRACKETS:
        raise _unreadable(f"it has {brackets} objects and lists, at most {MAX_BRACKETS} are read")
    if keys > MAX_ALL_KEYS:
        raise _unreadable(f"its objects have {keys} keys together, at most {MAX_ALL_KEYS} are read")
    try:
        text = body.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError:
        raise
    except UnicodeDecodeError as error:
        raise _unreadable(f"byte {error.start} is not UTF-8") from error
    except UnicodeEncodeError as error:
        raise _unreadable("a string has half of a surrogate pair") from error
    except RecursionError as error:
        raise _unreadable("nested too deeply") from error
    except ValueError as error:
        raise _unreadable(str(error)) from error
    return value


async def aside(request: Request, task: Callable[[], T]) -> T:
    """What `task` makes of a request: at once, or in a thread of its own where the body is large."""
    size = len(await request.body())
    return task() if Lane.of(size) is Lane.SMALL else await _LANES.run(Lane.LARGE, task)


class StrictRoute(APIRoute):
    """A route that reads and checks its body with `read_json` and `aside`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        kind: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def strict(request: Request) -> Response:
            own = _Request(request.scope, request.receive)
            own.kind = kind
            try:
                return await handler(own)
            except Exception as error:
                if isinstance(error.__cause__, RequestValidationError):
                    raise error.__cause__ from None  # FastAPI calls whatever is raised by reading a bad body
                raise

        return strict


class _Request(Request):
    kind: type[BaseModel] | None = None
    """Of the body."""

    async def json(self) -> Any:
        body = await self.body()
        return await aside(self, lambda: self._checked(body))

    def _checked(self, body: bytes) -> Any:
        """The body as its kind: FastAPI takes such a value as it is, and would check any other in the event loop."""
        value = read_json(body)
        if self.kind is None:
            return value
        try:
            return self.kind.model_validate(value)
        except ValidationError as error:
            raise RequestValidationError(
                [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False)]
            ) from None


def _unreadable(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise ValueError(f"an object has {len(pairs)} keys, at most {MAX_KEYS} are read")
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice[:64]!r} is there twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"there is no {name} in JSON")
