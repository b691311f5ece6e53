"""This module turns request bodies into jobs for the engine, and their chunks into one merged
stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from forerun.errors import about
from forerun.serve.chat_format import ChatFormat, chat_format_of
from forerun.serve.guards import CLIENT
from forerun.serve.protocol.errors import ApiError, bad_request
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest, Sampling, join_text
from forerun.serve.session import Job, Session
from forerun.types import SamplingParams, StreamChunk, StructuredOutputs

MAX_SCORED = 500_000  # Log-probabilities of prompts in one request: about 100 bytes each until they are written
_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""These parameters say what the answer must look like."""


class Tagged(NamedTuple):
    """A `Tagged` chunk has the number of the job that it belongs to."""

    job: int
    chunk: StreamChunk


def chat_jobs(
    session: Session, body: ChatRequest, names: Mapping[str, str] | None = None
) -> tuple[list[Job], ChatFormat]:
    """Return the one job of a chat request, and how its answers are to be read.

    `names` are those of `names_of`, where the request was another one.
    """
    llm = session.engine.llm
    chat_format = chat_format_of(llm, session.settings, body)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = _params(session, body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    form = chat_format.constrained(body, params.structured_outputs, llm.grammar_mark)
    skips = params.skip_special_tokens and not chat_format.hides_marks(session.tokenizer)
    params = replace(params, structured_outputs=form, skip_special_tokens=skips)
    _check_scored(params, len(chat_format.prompt["prompt_token_ids"]))
    return [_job(session, body, chat_format.prompt, params, names)], chat_format


def completion_jobs(session: Session, body: CompletionRequest) -> list[Job]:
    """Return a job for each prompt."""
    prompts, answers = body.prompts, session.settings.most_answers
    if len(prompts) * body.n > answers:
        raise bad_request(
            f"{len(prompts)} prompts with n = {body.n} are more than the {answers} answers that this server takes; "
            "send fewer",
            "prompt",
        )
    most, limit = session.settings.max_tokens, body.max_tokens
    if most is not None and "max_tokens" not in body.model_fields_set:
        limit = min(limit, most)
    params = _params(session, body, limit, body.logprobs)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    named: list[dict[str, Any]]
    named = [{"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in prompts]
    if params.prompt_logprobs is not None:  # so many for each token
        named = [session.engine.llm.read_prompt(one, params) for one in named]
        _check_scored(params, sum(len(one["prompt_token_ids"]) for one in named))
    return [_job(session, body, prompt, params) for prompt in named]


def check_model(session: Session, asked: str | None) -> None:
    """Refuse a model that is not served here."""
    names = session.settings.model_names
    if asked is not None and asked not in names:
        raise ApiError(
            404,
            "there is no such model here; this server has",
            param="model",
            code="model_not_found",
            quoted=asked,
            listed=names,
        )


async def merge_streams(streams: Sequence[AsyncIterator[StreamChunk]]) -> AsyncGenerator[Tagged]:
    """Yield chunks of several jobs as they come; leaving early ends them all, and the first error
    ends it.
    """
    inbox: asyncio.Queue[Tagged | BaseException | None] = asyncio.Queue(maxsize=1)

    async def pump(job: int, stream: AsyncIterator[StreamChunk]) -> None:
        try:
            async for chunk in stream:
                await inbox.put(Tagged(job=job, chunk=chunk))
            await inbox.put(None)
        except Exception as error:
            await inbox.put(error)

    tasks = [asyncio.create_task(pump(job, stream)) for job, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await inbox.get()
            if isinstance(item, BaseException):
                try:
                    raise item
                finally:
                    del item  # which names this frame, and would be kept by it
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _job(
    session: Session,
    body: Sampling,
    prompt: dict[str, Any],
    params: SamplingParams,
    names: Mapping[str, str] | None = None,
) -> Job:
    if body.return_speculation_trace and not session.settings.allow_traces:
        raise bad_request(
            "this server gives no traces (it was started without --allow-traces)", "return_speculation_trace"
        )
    client, longest = CLIENT.get(), session.settings.request_timeout_s
    _at_most(body.timeout_s, longest, "timeout_s")
    if body.prediction is not None:
        prompt = {**prompt, "prediction": join_text(body.prediction.content)}
    options = {
        "speculative": session.speculation(body.speculative, predicted=body.prediction is not None),
        "trace": body.return_speculation_trace,
        "timeout_s": longest if body.timeout_s is None else body.timeout_s,
        "cache_salt": client.cache_salt(body.cache_salt),
        "client": client.name,
        "user": body.user,
        "priority": body.priority,
    }
    return Job(
        prompt=prompt,
        params=params,
        options=options,
        names=names or names_of(body),
        recorded="store" not in body.model_fields_set,
    )


def _at_most(value: float | None, most: float | None, name: str) -> None:
    if value is not None and most is not None and value > most:
        got = f"{value:.12g}" if isinstance(value, float) else value  # an integer may be too large for a float
        raise bad_request(f"{name} is at most {most:.12g} here, got {got}", name)


def _params(session: Session, body: Sampling, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    settings, most = session.settings, session.settings.max_tokens
    _at_most(body.n, min(settings.max_n, settings.most_answers), "n")
    _at_most(max_tokens, most, "max_tokens")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("not in streams: leave out stream or prompt_logprobs", "prompt_logprobs")
    names = {field.name for field in fields(SamplingParams)} & Sampling.model_fields.keys()
    values = {name: getattr(body, name) for name in names}
    values |= {"max_tokens": most if max_tokens is None else max_tokens, "logprobs": logprobs}
    values["structured_outputs"] = _form(body)
    if body.logit_bias is not None:
        values["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
    try:
        return SamplingParams(**values)
    except ValueError as error:
        first = str(error).split()[0]
        raise bad_request(str(error), first if first in names else None) from error


def _check_scored(params: SamplingParams, length: int) -> None:
    """Refuse more log-probabilities of prompts than one request may cost; `length` counts the
    tokens of all prompts.
    """
    numbers = 0 if params.prompt_logprobs is None else length * (params.prompt_logprobs + 1)
    if numbers > MAX_SCORED:
        message = f"{numbers} log-probabilities of prompts are asked for, at most {MAX_SCORED} in one request: "
        message += "ask for fewer of the likeliest, or send fewer or shorter prompts"
        raise bad_request(message, "prompt_logprobs")


def names_of(body: Any) -> dict[str, str]:
    """Return a body's names for the engine's ``prompt`` and ``structured_outputs``, where they
    differ.
    """
    names = dict[str, str]()
    if getattr(body, "prompt", None) is None:
        names["prompt"] = "input" if hasattr(body, "input") else "messages"
    form = next((name for name in _FORMS if getattr(body, name, None) is not None), None)
    form = form or ("text.format" if hasattr(body, "input") else None) or ("tools" if hasattr(body, "tools") else None)
    return names if form is None else {**names, "structured_outputs": form}


def _form(body: Sampling) -> StructuredOutputs | None:
    given = {name: value for name in _FORMS if (value := getattr(body, name)) is not None}
    if len(given) > 1:
        one, other, *_ = given
        raise bad_request(f"give either {one} or {other}, not both", other)
    for name, value in given.items():
        older = name.removeprefix("guided_")
        with about(name):
            return value.structured() if older == name else StructuredOutputs(**{older: value})
    return None
