"""The application has the routes, streams, error envelopes, the OpenAPI description and the page at
``/``.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from forerun.engine.async_llm import all_or_none, whole_output
from forerun.errors import EngineError, ForerunError
from forerun.serve import logs
from forerun.serve.completing import ChatWriter, CompletionWriter, Event, Writer, size_of
from forerun.serve.guards import (
    LOAD_DRAFTER,
    OPEN_PATHS,
    UPDATE_WEIGHTS,
    Guard,
    RequestRecorder,
    StrictRoute,
    answer_refusal,
    own_path,
    run_aside,
    unless_gone,
)
from forerun.serve.handling import (
    Tagged,
    chat_format_of,
    chat_jobs,
    check_model,
    completion_jobs,
    merge_streams,
    names_of,
)
from forerun.serve.items import ItemWriter, MessagesWriter, ResponsesWriter
from forerun.serve.protocol.anthropic import CountRequest, MessagesRequest
from forerun.serve.protocol.errors import ApiError, bad_request, from_validation, internal_error, no_such_path, refusal
from forerun.serve.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadDrafterRequest,
    TokenizeRequest,
    UpdateWeightsRequest,
)
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.session import Job, Session, State

T = TypeVar("T")
Tags = Annotated[list[Literal["weights", "kv_cache"]] | None, Query()]
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # Keep proxies from holding the stream back
_PAGE = {"index.html": "text/html", "playground.css": "text/css", "playground.js": "text/javascript"}  # The playground


def build_app(session: Session) -> FastAPI:
    """Build everything that clients see; the model is loaded when the application starts."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(session.start())
        yield
        await session.drain()
        loading.cancel()

    # No /docs and /redoc: their pages load scripts from elsewhere, and are blank without a network.
    app = FastAPI(title="forerun", version=version("forerun"), lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = StrictRoute
    settings = session.settings
    app.add_middleware(Guard, settings=settings)
    if settings.allowed_origins:
        origins = list(settings.allowed_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(
        RequestRecorder, settings=settings, count=partial(session.metrics.count, "forerun:http_requests", 1)
    )
    _add_errors(app, messages=settings.log_prompts)
    _add_completions(app, session)
    _add_tokens(app, session)
    _add_operations(app, session)
    _add_trainer(app, session)
    _add_playground(app)
    _describe(app, keyed=bool(settings.api_keys))
    return app


def _add_errors(app: FastAPI, *, messages: bool) -> None:
    """Add the handlers of errors; `messages` says whether the log may hold the texts of unexpected
    errors.
    """

    async def answer(http: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = from_validation(error.errors(), error.body)
        elif isinstance(error, HTTPException):
            error = ApiError(error.status_code, str(error.detail), headers=error.headers)
            if error.status == 405:
                routes = (route for route in app.routes if route.matches(http.scope)[0] is Match.PARTIAL)
                allowed = ", ".join(sorted({method for route in routes for method in getattr(route, "methods", ())}))
                error = ApiError(405, f"only {allowed} is served here", headers={"Allow": allowed})
            elif error.status == 404:
                paths = [route.path for route in app.routes if isinstance(route, APIRoute) and route.include_in_schema]
                error = no_such_path(own_path(http.scope), paths)
        assert isinstance(error, ApiError)
        if error.status == 400 and error.__cause__ is not None and not isinstance(error.__cause__, ForerunError):
            logs.write_error(error.__cause__, message=messages)  # the client is not told what it says
        return answer_refusal(http.scope, error)

    for kind in (ApiError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _add_completions(app: FastAPI, session: Session) -> None:
    name = session.settings.model_name

    @app.post("/v1/chat/completions", responses=_STREAM)
    async def chat(body: ChatRequest, http: Request) -> Response:
        jobs, chat_format = await _prepare(session, http, body, lambda: chat_jobs(session, body))
        writer = ChatWriter(body, name, session.tokenizer, chat_format, predicted=jobs[0].copies_prediction)
        return await _respond(session, http, jobs, writer)

    @app.post("/v1/completions", responses=_STREAM)
    async def complete(body: CompletionRequest, http: Request) -> Response:
        jobs = await _prepare(session, http, body, lambda: completion_jobs(session, body))
        writer = CompletionWriter(body, name, session.tokenizer, predicted=jobs[0].copies_prediction)
        return await _respond(session, http, jobs, writer)

    @app.post("/v1/responses", responses=_STREAM)
    async def respond(body: ResponsesRequest, http: Request) -> Response:
        jobs, chat_format = await _prepare(session, http, body, lambda: chat_jobs(session, body.chat(), names_of(body)))
        return await _respond(session, http, jobs, ResponsesWriter(body, name, session.tokenizer, chat_format))

    @app.post("/v1/messages", responses=_STREAM)
    async def message(body: MessagesRequest, http: Request) -> Response:
        jobs, chat_format = await _prepare(session, http, body, lambda: chat_jobs(session, body.chat(), names_of(body)))
        return await _respond(session, http, jobs, MessagesWriter(body, name, chat_format))


async def _respond(session: Session, http: Request, jobs: list[Job], writer: Writer | ItemWriter) -> Response:
    """Return the whole response, or a stream that has begun, so that what the engine refuses is still
    a 400.
    """
    if (record := logs.RECORD.get()) is not None:
        record.stream = writer.body.stream
    if not writer.body.stream:
        with session.admitted(sum(job.params.n for job in jobs)):
            work = all_or_none(whole_output(session.answer(job)) for job in jobs)
            outputs = await unless_gone(http, work)
            size = sum(
                size_of(completion.tokens, output.prompt_logprobs)
                for output in outputs
                for completion in output.outputs
            )
            return await run_aside(http, size, lambda: JSONResponse(writer.whole(outputs)))
    events = _events(session, http, jobs, writer)
    try:
        first = await unless_gone(http, anext(events))
    except BaseException:
        await events.aclose()
        raise

    async def sent() -> AsyncIterator[str]:
        try:
            async with aclosing(events):
                yield first
                async for event in events:
                    yield event
        except Exception as error:
            if not isinstance(error, ApiError):
                logs.write_error(error, message=session.settings.log_prompts)
                error = internal_error()
            yield _format_event(error.body(own_path(http.scope)))
        if isinstance(writer, Writer):
            yield "data: [DONE]\n\n"  # which only the completion endpoints have

    return StreamingResponse(sent(), media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _events(session: Session, http: Request, jobs: list[Job], writer: Writer | ItemWriter) -> AsyncGenerator[str]:
    """Yield the completions as server-sent events."""
    with session.admitted(sum(job.params.n for job in jobs)):
        async with aclosing(merge_streams([session.answer(job) for job in jobs])) as chunks:
            async for tagged in chunks:
                size = size_of(tagged.chunk.tokens, tagged.chunk.prompt_logprobs)
                for text in await run_aside(http, size, partial(_texts, writer, tagged)):
                    yield text
            for event in writer.closing_events():
                yield _format_event(event)


def _texts(writer: Writer | ItemWriter, tagged: Tagged) -> list[str]:
    """Return the events of one chunk as texts."""
    return [_format_event(event) for event in writer.events(tagged)]


def _format_event(event: Event) -> str:
    """Format a server-sent event; its ``type``, where it has one, is its name, too."""
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _add_tokens(app: FastAPI, session: Session) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        def answer() -> Response:
            llm = session.engine.llm
            if body.messages is not None:
                messages = [message.plain() for message in body.messages]
                prompt = llm.chat_prompt(messages, add_generation_prompt=body.add_generation_prompt)
                ids = prompt["prompt_token_ids"]
            else:
                ids = llm.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
            strings = session.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            counts = {"count": len(ids), "max_model_len": llm.max_model_len}
            return JSONResponse({**counts, "tokens": ids, "token_strs": strings})

        return await _prepare(session, http, body, answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        def answer() -> Response:
            vocabulary = session.engine.llm.target.vocab_size
            wrong = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise bad_request(f"token id {wrong} is outside the vocabulary of {vocabulary}", "tokens")
            return JSONResponse({"prompt": session.tokenizer.decode(body.tokens)})

        return await _prepare(session, http, body, answer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: Request) -> dict[str, int]:
        def answer() -> dict[str, int]:
            prompt = chat_format_of(session.engine.llm, session.settings, body.chat()).prompt
            return {"input_tokens": len(prompt["prompt_token_ids"])}

        return await _prepare(session, http, body, answer)


def _add_operations(app: FastAPI, session: Session) -> None:
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        """Describe the model under one of its names, for clients of OpenAI's API and of
        Anthropic's.
        """
        since = datetime.fromtimestamp(started, UTC).isoformat()
        openai = {"id": name, "object": "model", "created": started}
        anthropic = {"type": "model", "display_name": name, "created_at": since}
        llm = session.engine.llm
        chats = bool(llm.tokenizer is not None and llm.tokenizer.chat_template)
        about = {
            "owned_by": "forerun",
            "root": session.settings.model_name,
            "max_model_len": llm.max_model_len,
            "runs_as": llm.target.runs_as,
            "chat": chats,
        }
        speculation = {
            "drafters": session.drafters(),
            "max_speculative_tokens": {name: session.longest(name) for name in session.drafters()},
            "traces": session.settings.allow_traces,
        }
        return {**openai, **anthropic, **about, "speculation": speculation}

    @app.get("/v1/models")
    @app.get("/v1/models/", include_in_schema=False)  # Else the next route takes it for a model without a name
    async def models() -> dict[str, Any]:
        names = session.settings.model_names
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return {"object": "list", "data": [card(name) for name in names], **ends}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(session, name)
        return card(name)

    @app.post(LOAD_DRAFTER, include_in_schema=False)  # the operator's, no client's
    async def load_drafter(body: LoadDrafterRequest) -> dict[str, Any]:
        await session.load_drafter(body.model)
        return {"success": True, "message": f"new requests are drafted for by {body.model}"}

    @app.get("/health", responses=_NOT_READY)
    @app.get("/ping", responses=_NOT_READY)
    @app.post("/ping", include_in_schema=False)
    async def health() -> Response:
        state = session.health
        alive = state in (State.READY, State.SLEEPING)  # As vLLM: who sleeps must not be restarted for it
        return JSONResponse({"status": state.value}, status_code=200 if alive else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": session.in_flight}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version("forerun")}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return PlainTextResponse(session.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_playground(app: FastAPI) -> None:
    def show(name: str) -> Callable[[], Response]:
        text = (files("forerun.serve") / "playground" / name).read_text(encoding="utf-8")
        return lambda: Response(text, media_type=_PAGE[name])

    for path in ("/", *(f"/{name}" for name in _PAGE)):
        app.add_api_route(path, show(path[1:] or "index.html"), include_in_schema=False)


async def _prepare(session: Session, http: Request, body: Any, make: Callable[[], T]) -> T:
    """Return what `make` makes of a body; a large body is handled in a thread of its own.

    A complaint of the engine becomes a 400.
    """

    def checked() -> T:
        try:
            return make()
        except ApiError as error:
            error.rename(names_of(body))
            raise
        except EngineError:
            raise
        except ValidationError as error:
            wrong = from_validation(error.errors())
            wrong.rename(names_of(body))
            raise wrong from None
        except (ForerunError, ValueError) as error:
            raise refusal(error, names_of(body)) from error

    check_model(session, body.model)
    return await run_aside(http, len(await http.body()), checked)


# The OpenAPI description, made honest: every status that a route can have, and the key that it needs. FastAPI
# documents a 422 that this server never sends, and none of the errors that it does send.

_ERRORS = {
    400: "The request cannot be served; `param` names the parameter.",
    401: "No valid API key.",
    404: "No such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; `Retry-After` says when to come back.",
    500: "The server made a mistake.",
    503: "The server is loading, draining, or has too many connections; `Retry-After` says when to come back.",
}
Answers = dict[int | str, dict[str, Any]]
_STREAM: Answers = {200: {"content": {"text/event-stream": {"schema": {}}}}}  # Events, each JSON after ``data:``
_NOT_READY: Answers = {
    503: {
        "description": "The server is loading, draining, or has failed.",
        "content": {"application/json": {"schema": {}}},
    }
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ENVELOPES = {
    "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
}


def _describe(app: FastAPI, *, keyed: bool) -> None:
    """Correct what `app.openapi` says about errors and keys; `keyed` says whether the server wants
    a key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        description = FastAPI.openapi(app)  # which keeps it
        schemas = description["components"]["schemas"]
        del schemas["HTTPValidationError"], schemas["ValidationError"]
        schemas |= _ENVELOPES
        description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in description["paths"].items():
            for method, operation in methods.items():
                answers = operation["responses"]
                answers.pop("422", None)
                if "503" not in answers:  # which /health says in its own words
                    answers |= _errors(path, posts=method == "post")
                if keyed and path not in OPEN_PATHS:
                    operation["security"] = [{"key": []}]
        return description

    app.openapi = openapi  # type: ignore[method-assign]


def _errors(path: str, *, posts: bool) -> dict[str, Any]:
    """Return the error responses of a route, by status."""
    envelope = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{envelope}"}}}
    headers = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds."}}
    return {
        str(status): {"description": words, "content": content} | ({"headers": headers} if status in (429, 503) else {})
        for status, words in _ERRORS.items()
        if posts or status in (401, 408, 500, 503)
    }


def _add_trainer(app: FastAPI, session: Session) -> None:
    """Add the routes of a trainer that takes its rollouts from this server: it changes the weights, and sends it to
    sleep.

    Names and shapes are SGLang's (``/update_weights_from_disk``, ``/get_weight_version``) and vLLM's (``/sleep``,
    ``/wake_up``, ``/is_sleeping``). The operator turns them on, and the `Guard` closes them to whoever lacks the
    operator's key.
    """
    served = "default"  # SGLang's word for the weights that the server was started with

    async def update(body: UpdateWeightsRequest) -> dict[str, Any]:
        nonlocal served
        mode = "abort" if body.abort_all_requests else body.mode
        engine = session.engine
        await _told(engine.update_weights_from_disk(body.model_path, mode=mode), body.model_path)
        served = body.weight_version or body.model_path
        message = "new requests get the new weights"
        return {"success": True, "message": message, "weight_version": served, "num_paused_requests": 0}

    async def weight_version() -> dict[str, str]:
        return {"weight_version": served}

    async def sleep(level: int = 1, mode: Literal["wait", "abort"] = "abort") -> Response:
        await _told(session.engine.sleep(level, mode=mode))
        return Response()

    async def wake_up(tags: Tags = None) -> Response:
        await _told(session.engine.wake_up(tags))
        return Response()

    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": session.engine.llm.is_sleeping}

    for path in UPDATE_WEIGHTS:
        app.add_api_route(path, update, methods=["POST"], include_in_schema=False)
    app.add_api_route("/get_weight_version", weight_version, methods=["GET"], include_in_schema=False)
    app.add_api_route("/sleep", sleep, methods=["POST"], include_in_schema=False)
    app.add_api_route("/wake_up", wake_up, methods=["POST"], include_in_schema=False)
    app.add_api_route("/is_sleeping", is_sleeping, methods=["GET"], include_in_schema=False)


async def _told(work: Awaitable[None], path: str = "") -> None:
    """Wait for the engine; what it refuses is a 400 that quotes the trainer's own `path`."""
    try:
        await work
    except EngineError:
        raise
    except ForerunError as error:
        raise ApiError(400, str(error), param="model_path" if path else None, to_operator=True) from error
