"""This module turns request bodies into jobs for the engine, and their chunks into one merged
stream; and it knows how a model writes chats: reasoning and tool calls, as its chat template or
the operator says.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from forerun.engine.grammar import source
from forerun.engine.llm import LLM
from forerun.engine.prompts import check_tools
from forerun.errors import ArgumentError, about
from forerun.model.templates import read_variables
from forerun.serve.guards import CLIENT
from forerun.serve.protocol.errors import ApiError, bad_request
from forerun.serve.protocol.hints import note_hint
from forerun.serve.protocol.requests import ChatRequest, CompletionRequest, Sampling, join_text
from forerun.serve.reasoning import Marks, begins_inside, find_marks, read_reasoning
from forerun.serve.session import Job, Session
from forerun.serve.settings import ServeSettings
from forerun.serve.tools.base import Lark, ToolFormat
from forerun.serve.tools.formats import FORMATS, find_format
from forerun.serve.tools.incoming import Incoming, Kind, PieceReader, Steps
from forerun.types import CompletionOutput, SamplingParams, StreamChunk, StructuredOutputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")
"""These are arguments of `LLM.chat_prompt`, which no template variable may replace."""
_SWITCHES = ("enable_thinking", "thinking")  # Variables of chat templates that switch reasoning: Qwen's and DeepSeek's


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatFormat:
    """The way in which the completions of one request are written."""

    prompt: dict[str, Any]  # The conversation as the model reads it, `LLM.chat_prompt`
    format: ToolFormat | None = None  # Format of tool calls; None where the model may not make any
    marks: Marks | None = None  # Marks of reasoning; None where there is none, or the template has already ended it
    inside: bool = False  # The completion begins within the reasoning
    forced: bool = False  # The completion has to be a call

    def reader(self) -> PieceReader:
        """Return a reader for one completion: reasoning first, then text and calls."""
        return PieceReader(self._read, forced=self.forced)

    def _read(self, text: Incoming) -> Steps[None]:
        called = False
        if self.marks is not None:
            called = yield from read_reasoning(text, self.marks, self.format, inside=self.inside)
        if self.format is not None:
            yield from self.format.read(text, called=called)
        else:
            yield from text.rest(Kind.CONTENT)

    def new_id(self) -> str:
        """Return an id for a call."""
        assert self.format is not None, "who calls has a format"
        return self.format.new_id()

    def hides_marks(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether marks that must be seen are special tokens, which are left out of texts."""
        marks = [] if self.format is None else [self.format.mark, *self.format.marks]
        marks += [] if self.marks is None else [self.marks.open, self.marks.close]
        if not marks:
            return False
        return any(token.special and token.content in marks for token in tokenizer.added_tokens_decoder.values())

    def constrained(
        self, body: ChatRequest, own: StructuredOutputs | None, mark: Callable[[str], str]
    ) -> StructuredOutputs | None:
        """Return what the completion must look like, reasoning and calls included; None where it may be
        anything.

        `own` is what the request wants its text to look like; `mark` is `GrammarCompiler.mark`, only
        called if there is a grammar.
        """
        if own is not None and body.must_call:
            raise bad_request(
                "a completion that must be a call has no other format; leave one of both out", "tool_choice"
            )
        bound = False
        if self.format is not None:
            strict = any(function.strict for function in self.format.functions)
            hidden = len(body.callable_tools) < len(body.offered)
            bound = body.must_call or strict or hidden or not body.many_calls or own is not None
        if not bound and (own is None or self.marks is None):
            return own
        lark = Lark(mark)
        content = None if own is None else lark.rule(_write_form(own))
        if self.format is not None:
            try:
                content = self.format.grammar(lark, forced=body.must_call, many=body.many_calls, content=content)
            except ArgumentError as error:
                raise bad_request(str(error), "tools") from error
        assert content is not None, "calls or a form of the text"
        if self.marks is not None:
            thought = f"{lark.until(self.marks.close)} BLANKS"
            thought = thought if self.inside else lark.rule(f"({lark.mark(self.marks.open)} {thought})?")
            content = f"{thought} {content}"
        return StructuredOutputs(grammar=lark.text(content))


def chat_format_of(llm: LLM, settings: ServeSettings, body: ChatRequest) -> ChatFormat:
    """Return the prompt of a chat request and how its completions are written; refuse tools and choices
    that cannot be.
    """
    _check_choice(body)
    tools = [tool.plain() for tool in body.offered]
    template = ""
    if llm.tokenizer is not None and llm.tokenizer.chat_template:  # else the prompt's maker says so
        template = llm.tokenizer.get_chat_template(tools=[{}] if tools else None)
    kind = find_format(settings.tool_call_parser, template)
    if tools:
        check_tools(read_variables(template))
    if tools and kind is None:
        message = "this server was started with --tool-call-parser none; it reads no tool calls"
        if settings.tool_call_parser != "none":
            message = "the chat template of this model shows no known format of tool calls; if it has one, start the "
            message += f"server with --tool-call-parser and one of {', '.join(FORMATS)}"
        raise bad_request(message, "tools")
    messages = [message.plain() for message in body.messages]
    goes_on = body.continue_final_message
    ending = {
        "continue_final_message": goes_on,
        "add_generation_prompt": body.add_generation_prompt is not False and not goes_on,
    }
    marks = find_marks(settings.reasoning_parser, template)
    prompt = llm.chat_prompt(messages, tools or None, **ending, **_variables(body, template, marks is not None))
    begun = join_text(body.messages[-1].content or "") if goes_on else ""
    if marks is not None and not _may_reason(marks, prompt["prompt"], begun):
        marks = None
    functions = [tool.function.function() for tool in body.callable_tools]
    calls = kind(template, functions) if kind is not None and functions else None
    return ChatFormat(
        prompt=prompt,
        format=calls,
        marks=marks,
        forced=calls is not None and body.must_call,
        inside=marks is not None and (begins_inside(marks, prompt["prompt"]) or marks.open in begun),
    )


def was_cut(ended: CompletionOutput | StreamChunk) -> bool:
    """Return whether a completion ended where the model would have gone on."""
    return ended.finish_reason in ("length", "abort")


def reasoning_tokens(reader: PieceReader, answer: CompletionOutput) -> int:
    """Count the tokens of a completion, which `reader` has read, that are reasoning, marks included."""
    starts = accumulate((len(token.text) for token in answer.tokens[:-1]), initial=0)
    return sum(start < reader.incoming.reasoned for start in starts) if answer.tokens else 0


def _write_form(form: StructuredOutputs) -> str:
    """Write a form as the body of a rule in Lark's notation."""
    kind, text = source(form)
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", text)
    return {"json": f"%json {text}", "regex": f"/{escaped}/", "grammar": f"%lark {{\n{text}\n}}"}[kind]


def _may_reason(marks: Marks, prompt: str, begun: str) -> bool:
    """Return whether reasoning can still come: not where the prompt has ended it, nor behind the
    text of a message `begun`.
    """
    if begun.strip():
        return marks.open in begun and marks.close not in begun
    return not prompt.rstrip().endswith(marks.close)


def _variables(body: ChatRequest, template: str, reasons: bool) -> dict[str, Any]:
    """Return the template variables that the request sets.

    `reasons` says whether the model reasons where nothing is set.
    """
    variables = dict[str, Any]()
    sent = body.chat_template_kwargs or {}
    if reserved := [name for name in _RESERVED if name in sent]:
        raise bad_request(
            f"{', '.join(reserved)}: not a variable of the chat template, but a parameter of the request; send it "
            "beside chat_template_kwargs",
            "chat_template_kwargs",
        )
    if body.reasoning_effort is not None:
        if "reasoning_effort" in read_variables(template):
            variables["reasoning_effort"] = body.reasoning_effort
        else:
            note_hint("reasoning_effort", "the chat template of this model has no such variable")
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        switch = next((name for name in _SWITCHES if name in read_variables(template)), None)
        if switch is not None:
            variables[switch] = thinks
        elif thinks != reasons:
            raise bad_request(f"this model's reasoning cannot be {body.thinking.type}: it has no switch", "thinking")
    return {**variables, **sent}


def _check_choice(body: ChatRequest) -> None:
    names = [tool.function.name for tool in body.tools or []]
    if len(set(names)) < len(names):
        raise bad_request("two tools have the same name", "tools")
    if not names and (body.must_call or body.chosen is not None):
        raise bad_request("tool_choice needs tools", "tool_choice")
    if not set(body.chosen or ()) <= set(names):
        raise bad_request("tool_choice names a function that is not among the tools", "tool_choice")


MAX_SCORED = 500_000  # Log-probabilities of prompts in one request: about 100 bytes each until they are written
_FORMS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""These parameters say what the completion must look like."""


class Tagged(NamedTuple):
    """A chunk with the number of the job that it belongs to."""

    job: int
    chunk: StreamChunk


def chat_jobs(
    session: Session, body: ChatRequest, names: Mapping[str, str] | None = None
) -> tuple[list[Job], ChatFormat]:
    """Return the one job of a chat request, and how its completions are to be read.

    `names` are those of `names_of`, where the request was another one.
    """
    llm = session.engine.llm
    chat_format = chat_format_of(llm, session.settings, body)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    params = _params(session, body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    form = chat_format.constrained(body, params.structured_outputs, llm.reader.grammars.mark)
    skips = params.skip_special_tokens and not chat_format.hides_marks(session.tokenizer)
    params = replace(params, structured_outputs=form, skip_special_tokens=skips)
    _check_scored(params, len(chat_format.prompt["prompt_token_ids"]))
    return [_job(session, body, chat_format.prompt, params, names)], chat_format


def completion_jobs(session: Session, body: CompletionRequest) -> list[Job]:
    """Return a job for each prompt."""
    prompts, answers = body.prompts, session.settings.most_answers
    if len(prompts) * body.n > answers:
        raise bad_request(
            f"{len(prompts)} prompts with n = {body.n} are more than the {answers} completions that this server takes; "
            "send fewer",
            "prompt",
        )
    most, limit = session.settings.max_tokens, body.max_tokens
    if most is not None and "max_tokens" not in body.model_fields_set:
        limit = min(limit or most, most)
    params = _params(session, body, limit, body.logprobs)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    named: list[dict[str, Any]]
    named = [{"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts]
    if params.prompt_logprobs is not None:  # This many for each token
        named = [session.engine.llm.read_prompt(prompt, params) for prompt in named]
        _check_scored(params, sum(len(prompt["prompt_token_ids"]) for prompt in named))
    return [_job(session, body, prompt, params) for prompt in named]


def check_model(session: Session, requested: str | None) -> None:
    """Refuse a model that is not served here."""
    if requested is not None and requested not in session.names:
        raise ApiError(
            404,
            "there is no such model here; this server has",
            param="model",
            code="model_not_found",
            quoted=requested,
            listed=session.names,
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
    client = CLIENT.get()
    longest = session.settings.request_timeout_s
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
    values["logprobs_mode"] = body.logprobs_mode or settings.logprobs_mode
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
        message = f"{numbers} log-probabilities of prompts are requested, at most {MAX_SCORED} in one request: "
        message += "request fewer of the likeliest, or send fewer or shorter prompts"
        raise bad_request(message, "prompt_logprobs")


def names_of(body: Any) -> dict[str, str]:
    """Return a body's names for what the engine, or a chat request, calls otherwise."""
    names = dict[str, str](getattr(body, "own_names", {}))
    if getattr(body, "max_completion_tokens", None) is not None:
        names["max_tokens"] = "max_completion_tokens"
    if getattr(body, "prompt", None) is None:
        names["prompt"] = "input" if hasattr(body, "input") else "messages"
    form = next((name for name in _FORMS if getattr(body, name, None) is not None), None)
    form = form or names.get("response_format") or ("tools" if hasattr(body, "tools") else None)
    return names if form is None else {**names, "structured_outputs": form}


def _form(body: Sampling) -> StructuredOutputs | None:
    forms = {name: value for name in _FORMS if (value := getattr(body, name)) is not None}
    if len(forms) > 1:
        first, other, *_ = forms
        raise bad_request(f"give either {first} or {other}, not both", other)
    for name, value in forms.items():
        older = name.removeprefix("guided_")
        with about(name):
            return value.structured() if older == name else StructuredOutputs(**{older: value})
    return None
