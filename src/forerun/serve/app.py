"""The application: routes, guards and error envelopes put together. Knows no model."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, ClassVar, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from forerun.engine.async_llm import all_or_none
from forerun.errors import ForerunError
from forerun.serve import logs, schema, sse
from forerun.serve.bodies import StrictRoute, aside
from forerun.serve.chat_format import ChatFormat, chat_format_of, reasoning_tokens
from forerun.serve.completing import AnswerWriter, ChatWriter, CompletionWriter
from forerun.serve.guards import BodyLimit, KeyCheck, Recorder, own_path
from forerun.serve.handling import Tagged, chat_jobs, check_model, completion_jobs, merged, unless_gone
from forerun.serve.items import Event, ItemWriter
from forerun.serve.messaging import MessagesWriter
from forerun.serve.playground import FILES, page
from forerun.serve.protocol import answers
from forerun.serve.protocol.anthropic import CountRequest, MessagesRequest
from forerun.serve.protocol.errors import ApiError, bad_request, from_validation, mistake, refusal
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from forerun.serve.protocol.responses import ResponsesRequest
from forerun.serve.session import Job, Session, State, collected
from forerun.serve.tools.incoming import Kind, Piece
from forerun.types import RequestOutput

# ``/v1/responses``: what comes back, whole or as a sequence of events. Knows no engine and no HTTP.


_PARTS = {Kind.CONTENT: "output_text", Kind.REASONING: "reasoning_text"}


class ResponsesWriter(AnswerWriter):
    """Writes one response.

    Args:
        body: what was asked.
        model: the served name.
        chat_format: how the answer is to be read.
    """

    marks_end: ClassVar[bool] = False

    def __init__(self, body: ResponsesRequest, model: str, chat_format: ChatFormat) -> None:
        self.body, self._model, self._chat_format = body, model, chat_format
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._reader, self._items = chat_format.reader(), _Items(chat_format.new_id)
        self._output: RequestOutput | None = None
        self._sequence = 0

    @property
    def streams(self) -> bool:
        return self.body.stream

    @property
    def begun(self) -> bool:
        return self._sequence > 0

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        [output] = outputs
        for _ in self._items.add(self._reader.whole(output.outputs[0].text)):
            pass
        for _ in self._items.close():
            pass
        return self._response(output)

    def events(self, tagged: Tagged) -> Iterator[Event]:
        if not self.begun:
            yield self._numbered({"type": "response.created", "response": self._response(None)})
            yield self._numbered({"type": "response.in_progress", "response": self._response(None)})
        pieces = self._reader.feed(tagged.chunk.text)
        yield from map(self._numbered, self._items.add(pieces))
        self._output = tagged.chunk.output or self._output

    def closing_events(self) -> Iterator[Event]:
        assert self._output is not None, "a stream ends with its output"
        yield from map(self._numbered, self._items.add(self._reader.close()))
        yield from map(self._numbered, self._items.close())
        response = self._response(self._output)
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self._numbered({"type": f"response.{kind}", "response": response})

    def _numbered(self, event: Event) -> Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}

    def _response(self, output: RequestOutput | None) -> dict[str, Any]:
        """The response object: finished with an `output`, else in progress."""
        body = self.body.model_dump(by_alias=True, exclude_none=True, exclude={"input"})
        kept = {name: body.get(name) for name in ("instructions", "max_output_tokens", "temperature", "top_p")}
        found = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "model": self._model,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": list(self._items.done),
            **kept,
            "text": body.get("text", {"format": {"type": "text"}}),
            "tools": body.get("tools", []),
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": self.body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "metadata": self.body.metadata or {},
            "usage": None,
        }
        return found if output is None else {**found, **self._ending(output)}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        answer = output.outputs[0]
        prompt, completion = len(output.prompt_token_ids), len(answer.token_ids)
        reasoning = reasoning_tokens(self._chat_format, answer.text, answer.tokens)
        complete = answer.finish_reason == "stop"
        why = "max_output_tokens" if answer.finish_reason == "length" else answer.finish_reason
        return {
            "status": "completed" if complete else "incomplete",
            "incomplete_details": None if complete else {"reason": why},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + completion,
            },
            "metrics": answers.metrics([output]),
        }


class _Items(ItemWriter):
    """The output items, as they are written."""

    def opening(self, kind: Kind, name: str) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self.item = {"type": "function_call", "id": f"fc_{secrets.token_hex(16)}"}
            self.item |= {"call_id": self.new_call_id(), "name": name, "arguments": ""}
        elif kind is Kind.REASONING:
            self.item = {"type": "reasoning", "id": f"rs_{secrets.token_hex(16)}", "summary": [], "content": []}
        else:
            self.item = {"type": "message", "id": f"msg_{secrets.token_hex(16)}", "role": "assistant", "content": []}
        self.item["status"] = "in_progress"
        yield {"type": "response.output_item.added", "output_index": len(self.done), "item": dict(self.item)}
        if kind is not Kind.ARGUMENTS:
            yield self._about("content_part.added", part=_part(kind, ""))

    def delta(self, piece: Piece) -> Event:
        return self._about(f"{self._name}.delta", delta=piece.text, **self._no_logprobs)

    def closing(self, kind: Kind) -> Iterator[Event]:
        if kind is Kind.ARGUMENTS:
            self.item["arguments"] = self.text
            yield self._about(f"{self._name}.done", arguments=self.text, name=self.item["name"])
        else:
            part = _part(kind, self.text)
            self.item["content"] = [part]
            yield self._about(f"{self._name}.done", text=self.text, **self._no_logprobs)
            yield self._about("content_part.done", part=part)
        self.item["status"] = "completed"
        yield {"type": "response.output_item.done", "output_index": len(self.done), "item": self.item}

    @property
    def _name(self) -> str:
        return _PARTS.get(self.kind, "function_call_arguments") if self.kind is not None else ""

    @property
    def _no_logprobs(self) -> dict[str, Any]:
        return {"logprobs": []} if self.kind is Kind.CONTENT else {}

    def _about(self, event: str, **more: Any) -> Event:
        place = {"item_id": self.item["id"], "output_index": len(self.done)}
        part = {} if self.kind is Kind.ARGUMENTS else {"content_index": 0}
        return {"type": f"response.{event}", **place, **part, **more}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind is Kind.CONTENT else {}
    return {"type": _PARTS[kind], "text": text, **more}


T = TypeVar("T")


def build_app(session: Session) -> FastAPI:
    """Everything that clients see; the model is loaded when the application starts."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(session.start())
        yield
        await session.drain()
        loading.cancel()

    app = FastAPI(title="forerun", version=version("forerun"), lifespan=lifespan)
    app.router.route_class = StrictRoute
    _add_guards(app, session)
    _add_errors(app, messages=session.settings.log_prompts)
    _add_completions(app, session)
    _add_tokens(app, session)
    _add_operations(app, session)
    _add_playground(app)
    schema.describe(app, keyed=bool(session.settings.api_keys))
    return app


def _add_guards(app: FastAPI, session: Session) -> None:
    settings = session.settings
    app.add_middleware(BodyLimit, most=settings.max_body_bytes)
    app.add_middleware(KeyCheck, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(Recorder, settings=settings, count=session.metrics.answered)


def _add_errors(app: FastAPI, *, messages: bool) -> None:
    """`messages`: whether the log may say what unexpected errors say."""

    def answer(http: Request, error: ApiError) -> JSONResponse:
        if (record := logs.current()) is not None:
            record.code = error.code
        return JSONResponse(error.body(own_path(http.scope)), status_code=error.status, headers=error.headers)

    async def of_api(http: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, ApiError)
        if error.status == 400 and error.__cause__ is not None and not isinstance(error.__cause__, ForerunError):
            logs.write_error(error.__cause__, message=messages)  # the client is not told what it says
        return answer(http, error)

    async def of_validation(http: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(http, from_validation(error.errors()))

    async def of_http(http: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return answer(http, ApiError(error.status_code, str(error.detail)))

    app.add_exception_handler(ApiError, of_api)
    app.add_exception_handler(RequestValidationError, of_validation)
    app.add_exception_handler(HTTPException, of_http)


def _add_completions(app: FastAPI, session: Session) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        check_model(session, body.model)
        jobs, chat_format = await _prepared(http, lambda: chat_jobs(session, body))
        writer = ChatWriter(body, session.settings.model_name, _tokenizer(session), chat_format)
        return await _respond(session, http, jobs, writer)

    @app.post("/v1/completions")
    async def complete(body: CompletionRequest, http: Request) -> Response:
        check_model(session, body.model)
        jobs = await _prepared(http, lambda: completion_jobs(session, body))
        writer = CompletionWriter(body, session.settings.model_name, _tokenizer(session))
        return await _respond(session, http, jobs, writer)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, http: Request) -> Response:
        check_model(session, body.model)
        jobs, chat_format = await _prepared(http, lambda: chat_jobs(session, body.chat()))
        return await _respond(session, http, jobs, ResponsesWriter(body, session.settings.model_name, chat_format))

    @app.post("/v1/messages")
    async def message(body: MessagesRequest, http: Request) -> Response:
        check_model(session, body.model)
        jobs, chat_format = await _prepared(http, lambda: chat_jobs(session, body.chat()))
        return await _respond(session, http, jobs, MessagesWriter(body, session.settings.model_name, chat_format))


async def _respond(session: Session, http: Request, jobs: list[Job], writer: AnswerWriter) -> Response:
    """The whole answer, or a stream that has begun: what the engine refuses is still a 400."""
    if (record := logs.current()) is not None:
        record.stream = writer.streams
    if not writer.streams:
        return JSONResponse(writer.whole(await unless_gone(http, _gathered(session, jobs))))
    events = _streamed(session, jobs, writer)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def rest() -> AsyncIterator[str]:
        async with aclosing(events):
            yield first
            async for one in events:
                yield one

    sent = sse.with_end(rest()) if writer.marks_end else rest()
    return StreamingResponse(sent, media_type="text/event-stream", headers=sse.HEADERS)


async def _gathered(session: Session, jobs: list[Job]) -> list[RequestOutput]:
    with session.admitted(sum(job.params.n for job in jobs)):
        return await all_or_none(collected(session.answer(job)) for job in jobs)


async def _streamed(session: Session, jobs: list[Job], writer: AnswerWriter) -> AsyncGenerator[str]:
    with session.admitted(sum(job.params.n for job in jobs)):
        async with aclosing(merged([session.answer(job) for job in jobs])) as chunks:
            try:
                async for tagged in chunks:
                    for data in writer.events(tagged):
                        yield sse.event(data)
                for data in writer.closing_events():
                    yield sse.event(data)
            except ApiError as error:
                if not writer.begun:
                    raise
                yield sse.event(writer.error_event(error))
            except Exception as error:
                if not writer.begun:
                    raise
                logs.write_error(error, message=session.settings.log_prompts)
                yield sse.event(writer.error_event(mistake()))


def _add_tokens(app: FastAPI, session: Session) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        check_model(session, body.model)
        llm = session.engine.llm

        def answer() -> Response:
            if body.messages is not None:
                messages = [message.plain() for message in body.messages]
                ids = _checked(lambda: llm.chat_prompt(messages))["prompt_token_ids"]
            else:
                ids = _tokenizer(session).encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
            return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": llm.max_model_len})

        return await aside(http, answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        check_model(session, body.model)
        vocabulary = session.engine.llm.target.vocab_size

        def answer() -> Response:
            wrong = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
            if wrong is not None:
                raise bad_request(f"token id {wrong} is outside the vocabulary of {vocabulary}", "tokens")
            return JSONResponse({"prompt": _tokenizer(session).decode(body.tokens)})

        return await aside(http, answer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, http: Request) -> dict[str, int]:
        check_model(session, body.model)
        llm = session.engine.llm
        chat_format = await _prepared(http, lambda: chat_format_of(llm, session.settings, body.chat()))
        return {"input_tokens": len(chat_format.prompt["prompt_token_ids"])}


def _add_operations(app: FastAPI, session: Session) -> None:
    started = int(time.time())

    def card() -> dict[str, Any]:
        """The model for clients of OpenAI's API and of Anthropic's."""
        name, since = session.settings.model_name, datetime.fromtimestamp(started, UTC).isoformat()
        card: dict[str, Any] = {"id": name, "object": "model", "created": started}
        card |= {"type": "model", "display_name": name, "created_at": since}
        card |= {"owned_by": "forerun", "max_model_len": session.engine.llm.max_model_len}
        card["speculation"] = {
            "drafters": session.drafters(),
            "max_speculative_tokens": {name: session.longest(name) for name in session.drafters()},
            "traces": session.settings.allow_traces,
        }
        return card

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        name = session.settings.model_name
        return {"object": "list", "data": [card()], "has_more": False, "first_id": name, "last_id": name}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        check_model(session, name)
        return card()

    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping", include_in_schema=False)
    async def health() -> Response:
        state = session.health
        return JSONResponse({"status": state.value}, status_code=200 if state is State.READY else 503)

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": session.in_flight}

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"version": version("forerun")}

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(session.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_playground(app: FastAPI) -> None:
    def show(name: str) -> Callable[[], Response]:
        text, kind = page(name)
        return lambda: Response(text, media_type=kind)

    for path in ("/", *(f"/{name}" for name in FILES)):
        app.add_api_route(path, show(path[1:] or "index.html"), include_in_schema=False)


def _tokenizer(session: Session) -> Any:
    tokenizer = session.engine.llm.tokenizer
    assert tokenizer is not None, "the server loads a model with its tokenizer"
    return tokenizer


async def _prepared(http: Request, make: Callable[[], T]) -> T:
    """What `make` makes of a body, large ones in a thread of their own; a complaint of the engine becomes a 400."""
    return await aside(http, lambda: _checked(make))


def _checked(make: Callable[[], T]) -> T:
    """What `make` returns; a complaint of the engine becomes a 400."""
    try:
        return make()
    except ApiError:
        raise
    except ValidationError as error:
        raise from_validation(error.errors()) from None
    except (ForerunError, ValueError) as error:
        raise refusal(error) from error
