"""JSON bodies, read strictly: what one reader may take one way and another otherwise is refused.

Python's own reader takes ``NaN``, keeps the last of two equal keys, and lets through half of a surrogate pair, which no
answer could repeat. Knows no parameter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute


def read_json(body: bytes) -> Any:
    """The value that a body holds.

    Raises:
        JSONDecodeError: not UTF-8, no JSON, or JSON that readers disagree about. FastAPI makes a 400 of it.
    """
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


class StrictRoute(APIRoute):
    """A route that reads its body with `read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return strict


class _Request(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def _unreadable(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:64]!r} is there twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"there is no {name} in JSON")
