"""The OpenAPI description, made honest: every status that a route can answer with, and the key that it needs.

FastAPI documents a 422 that this server never sends, and none of the errors that it does send.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from forerun.serve.guards import OPEN_PATHS

ERRORS = {
    400: "The request cannot be answered; `param` names the parameter.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "The server made a mistake.",
    503: "The server is loading, draining, or has too many connections; `Retry-After` says when to come back.",
}
RETRY = (429, 503)
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Answer with events where ``stream`` is true."""

ENVELOPE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
"""OpenAI's."""
ANTHROPIC_ENVELOPE = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def describe(app: FastAPI, *, keyed: bool) -> None:
    """Let `app.openapi` tell the truth.

    Args:
        keyed: the server wants a key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _corrected(found, keyed=keyed)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _corrected(found: dict[str, Any], *, keyed: bool) -> dict[str, Any]:
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= {"Error": ENVELOPE, "AnthropicError": ANTHROPIC_ENVELOPE}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in found["paths"].items():
        for method, operation in methods.items():
            _describe_operation(operation, path, posts=method == "post")
            if keyed and path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
    return found


def _describe_operation(operation: dict[str, Any], path: str, *, posts: bool) -> None:
    answers = operation["responses"]
    answers.pop("422", None)
    if path in STREAMED:
        answers["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics":
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path in ("/health", "/ping"):
        answers["503"] = {**answers["200"], "description": "The server is loading, draining, or has failed."}
        return
    for status, description in ERRORS.items():
        if posts or status in (401, 408, 500, 503):
            answers[str(status)] = _answer(status, description, "Anthropic" if path.startswith("/v1/messages") else "")


def _answer(status: int, description: str, whose: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{whose}Error"}}},
    }
    if status in RETRY:
        answer["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return answer
