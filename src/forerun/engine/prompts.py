"""Turns prompts and parameters into requests: chat template, token ids, resolved sampling parameters, stop ids.

It also has the threads that do this, so that neither the engine nor an event loop waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from forerun.control.config import SpeculativeConfig
from forerun.core.rng import completion_seed, request_seed
from forerun.core.rules import rule_named
from forerun.core.sampling import Sampler, check_token_ids
from forerun.decode.row import Row
from forerun.devices import trim_heap
from forerun.engine.completion import Completion, CompletionText, Detokenizer, Request
from forerun.engine.grammar import GrammarCompiler, MaskBudget
from forerun.errors import CLOSED, ArgumentError, CheckpointError, EngineError, about, find_near, nearest, warn_once
from forerun.model.templates import read_variables
from forerun.params import NEUTRAL, token_ids
from forerun.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_log = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; a dict may also hold a ``"prediction"`` of
the output, text or token ids, for the drafter of that name. Ids may be an array or tensor of one dimension.
"""

Speculative = SpeculativeConfig | Mapping[str, Any] | str | bool | None
"""The drafter of a request: None is the engine's own configuration, False is plain decoding, True is the engine's own
configuration and an error if it has none; or a configuration: a method's name, or vLLM's dict.
"""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prediction")


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Turns prompts and parameters into requests for one model."""

    tokenizer: PreTrainedTokenizerBase | None
    generation_config: Any  # transformers' `GenerationConfig` of the checkpoint, or None
    vocab_size: int
    context: int  # Most tokens of prompt and output together
    longest: int = 0  # The model's own context, which `context` may be raised to
    default_seed: int | None
    """Seed of the engine: a request without a seed gets one derived from it and from the request's number. None: a
    random one.
    """
    speculative: SpeculativeConfig | None = None  # Of requests that set none
    numbers: Iterator[int] = field(default_factory=itertools.count)  # Of the requests, in the order of their arrival

    def __post_init__(self) -> None:
        """Check the engine's seed, which is one as of a request (ArgumentError), and the generation configuration's
        defaults. Raises CheckpointError if they are not valid.
        """
        SamplingParams(seed=self.default_seed)
        try:
            self.resolve(SamplingParams())
            self.end_ids()
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the model's defaults in generation_config.json cannot be used: {error}; correct or remove the file"
            ) from error

    def tokens(self, prompt: Prompt, params: SamplingParams | None = None) -> tuple[str | None, list[int]]:
        """Return the prompt's text (None if it was truncated) and its token ids. Raises ArgumentError if it is empty,
        too long, or has ids outside the vocabulary. Without `params` there must be room for at least one more token.
        """
        with about("prompt"):
            return self._tokens(prompt, params)

    def _tokens(self, prompt: Prompt, params: SamplingParams | None) -> tuple[str | None, list[int]]:
        room = 1 if params is None or params.max_tokens is None else params.max_tokens
        most = None if params is None else params.truncate_prompt_tokens
        text, ids = self._read(prompt, whole=most is None)
        if most is not None:
            most = max(1, self.context - room) if most == -1 else most
            text, ids = (text, ids) if len(ids) <= most else (None, ids[-most:])
        if not ids:
            raise ArgumentError("the prompt is empty; give at least one token")
        return text, self._fitting("prompt", ids, room=min(room, 1))

    def request(
        self,
        number: int,
        prompt: Prompt,
        params: SamplingParams,
        *,
        speculative: Speculative = None,
        trace: bool = False,
        timeout_s: float | None = None,
    ) -> Request:
        """Build a request with its `n` completions for `LLM.queue`: tokenize it and compile its grammar. May be called
        in any thread while a step runs.

        Args:
            number: the next one of `numbers`; the request's id and, with `default_seed`, its seed are derived from it.
            speculative, trace, timeout_s: as for `LLM.generate`.

        Raises:
            ArgumentError: the prompt does not fit, or an option is out of range.
        """
        if timeout_s is not None and timeout_s <= 0:
            raise ArgumentError(f"timeout_s must be above 0, got {timeout_s}")
        config = self._config(speculative)
        text, ids = self.tokens(prompt, params)
        with about("prediction"):
            prediction = tuple(self.prediction(prompt))
        params = self.resolve(params)
        if params.stop_strings and self.tokenizer is None:
            raise ArgumentError("stop strings need a tokenizer, and there is none: use stop_token_ids")
        if params.seed is None and self.default_seed is not None:
            params = replace(params, seed=request_seed(self.default_seed, number))
        rule = config.rule if config is not None else None
        if rule == "argmax_walk" and not params.greedy:
            raise ArgumentError(f"rule {rule!r} is lossless at temperature 0 only; leave the rule out to sample")
        _check_bias(rule, params)
        request = Request(
            id=f"request-{number}", prompt=text, prompt_tokens=ids, params=params, speculative=config, trace=trace
        )
        request.timeout_s = timeout_s
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self.end_ids())
        with about("structured_outputs"):
            samplers = self._samplers(params, ids, sorted(stop_ids))
        for index, sampler in enumerate(samplers):
            row = Row(
                cache_row=-1,
                tokens=list(ids),
                prompt_length=len(ids),
                sampler=sampler,
                seed=completion_seed(seed, index),
                stop_ids=stop_ids,
                tokens_left=min(
                    self.context - len(ids), self.context if params.max_tokens is None else params.max_tokens
                ),
                rule=rule,
                traced=request.trace,
                prediction=prediction,
            )
            tokenizer = self.tokenizer if params.detokenize else None
            completion = Completion(
                request=request,
                index=index,
                row=row,
                detokenizer=Detokenizer(tokenizer, ids, skip_special=params.skip_special_tokens),
                text=CompletionText(stops=params.stop_strings, include_stop=params.include_stop_str_in_output),
            )
            request.completions.append(completion)
        return request

    def _config(self, speculative: Speculative) -> SpeculativeConfig | None:
        """Return the drafter's configuration of a request, None for plain decoding."""
        if speculative is True and self.speculative is None:
            raise ArgumentError(
                "speculative=True, but no drafter is configured: name one, speculative='auto', or make the LLM with "
                "speculative_config='auto'"
            )
        if speculative is None or speculative is True:
            return self.speculative
        return None if speculative is False else SpeculativeConfig.parse(speculative)

    def lane(self, prompt: Prompt, params: SamplingParams) -> Lane:
        """Return the lane in which `request` should run, so that no cheaper work waits for it."""
        outputs = params.structured_outputs
        if outputs is not None and not self.grammars.knows(outputs):
            return Lane.GRAMMAR
        parts = prompt.values() if isinstance(prompt, Mapping) else [prompt]
        return Lane.of(sum(len(part) for part in parts if isinstance(part, Sized)))

    def prediction(self, prompt: Prompt) -> list[int]:
        """Return the token ids of the output that the client predicts; empty if it predicts none. Raises ArgumentError
        if it is longer than the context, has ids outside the vocabulary, or is text without a tokenizer.
        """
        predicted = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        if predicted is None:
            return []
        ids = (
            self.encode("prediction", predicted, add_special_tokens=False) if isinstance(predicted, str) else predicted
        )
        return self._fitting("prediction", token_ids("the prediction", ids))

    def encode(self, name: str, text: str, *, add_special_tokens: bool = True, whole: bool = True) -> list[int]:
        """Return the token ids of a text. Raises ArgumentError if there is no tokenizer. With `whole` it also raises,
        before tokenizing, if the text has more characters than the context can hold even with the longest tokens.
        """
        if self.tokenizer is None:
            raise ArgumentError(
                f"the {name} is text, but the model has no tokenizer: pass token ids, or a tokenizer to LLM()"
            )
        if whole and len(text) > self.most_characters:
            raise self._too_long(name, f"{len(text)} characters, more than any {self.context} tokens have")
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @cached_property
    def most_characters(self) -> int:
        """Most characters of a text that the context can hold: its length times that of the longest token."""
        assert self.tokenizer is not None, "who has a text has a tokenizer"
        return self.context * max(map(len, self.tokenizer.get_vocab()), default=1)

    def _too_long(self, name: str, length: str) -> ArgumentError:
        return ArgumentError(
            f"the {name} has {length}, but the context holds {self.context} for prompt and output; shorten the {name}"
            + (f", or raise max_model_len: the model allows {self.longest}" if self.longest > self.context else "")
        )

    def _fitting(self, name: str, ids: list[int], *, room: int = 1) -> list[int]:
        if len(ids) + room > self.context:
            raise self._too_long(name, f"{len(ids)} tokens")
        check_token_ids(f"the {name}", ids, self.vocab_size)
        return ids

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Replace None by the generation configuration's value, or else by the neutral one, and check token ids."""
        values: dict[str, Any] = {}
        for name, neutral in NEUTRAL.items():
            if getattr(params, name) is None:
                configured = getattr(self.generation_config, name, None)
                values[name] = neutral if configured is None else configured
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) == -1:
                values[name] = self.vocab_size
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
            with about(name):
                check_token_ids(name, getattr(params, name) or (), self.vocab_size)
        return replace(params, **values)

    def _samplers(self, params: SamplingParams, prompt: Sequence[int], banned: Sequence[int]) -> list[Sampler]:
        """Return the sampler of each completion: one for all or, with structured outputs, one for each, because its
        grammar processor, which comes last, has a state.
        """
        words = self._bad_words(params.bad_words or ())
        outputs = params.structured_outputs
        if outputs is None:
            return [Sampler(params, prompt, banned_until_min=banned, bad_words=words)] * params.n
        samplers, budget = list[Sampler](), MaskBudget()
        for _ in range(params.n):
            grammar = self.grammars.processor(outputs, len(prompt), budget)
            with_grammar = replace(params, logits_processors=(*params.logits_processors, grammar))
            samplers.append(Sampler(with_grammar, prompt, banned_until_min=banned, bad_words=words))
        return samplers

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The grammar compiler for this tokenizer. Raises ArgumentError without a tokenizer."""
        if self.tokenizer is None:
            raise ArgumentError("structured outputs need a tokenizer")
        return GrammarCompiler(self.tokenizer, self.vocab_size, sorted(self.end_ids()))

    def end_ids(self) -> frozenset[int]:
        """Return the model's end tokens: the generation configuration's and the tokenizer's."""
        stated = getattr(self.generation_config, "eos_token_id", None)
        ids = set(stated) if isinstance(stated, list | tuple) else {stated}
        ids.add(getattr(self.tokenizer, "eos_token_id", None))
        return frozenset(int(token) for token in ids if token is not None)

    def _read(self, prompt: Prompt, *, whole: bool) -> tuple[str | None, list[int]]:
        content: Any = prompt
        if isinstance(prompt, Mapping):
            if unknown := [name for name in prompt if name not in _PROMPT_KEYS]:
                keys = ", ".join(map(repr, _PROMPT_KEYS))
                hint = nearest(str(unknown[0]), _PROMPT_KEYS) or " Leave it out."
                raise ArgumentError(f"a prompt dict may hold {keys}, got {unknown[0]!r}.{hint}")
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), token_ids("prompt_token_ids", prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ArgumentError(f"a prompt dict needs 'prompt' or 'prompt_token_ids', got {sorted(prompt)}")
            content = prompt["prompt"]
        if isinstance(content, str):
            return content, self.encode("prompt", content, whole=whole)
        return None, token_ids("a prompt that is no text", content)

    def _bad_words(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        if not words:
            return []
        if self.tokenizer is None:
            raise ArgumentError("bad_words needs a tokenizer; use logit_bias with token ids instead")
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        sequences = dict.fromkeys(tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return [ids for ids in sequences if ids]


def _check_bias(rule: str | None, params: SamplingParams) -> None:
    """Raise ArgumentError if processed log-probabilities are requested under a lossy rule, which samples from another
    distribution.
    """
    asked = params.logprobs is not None and params.logprobs_mode == "processed_logprobs"
    if rule is None or params.greedy or params.allow_biased or not asked or rule_named(rule).lossless:
        return
    raise ArgumentError(
        f"rule {rule!r} is lossy: it does not sample from the distribution that logprobs_mode 'processed_logprobs' "
        "tells of, and a gradient from them is biased; leave the rule out, ask for raw_logprobs, or take the target's "
        "all the same with allow_biased=True"
    )


def pair_prompts(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Pair each prompt with its parameters; both may be one or many, and a list of ints is one prompt. Raises
    ArgumentError for another type, or if the numbers of prompts and parameters differ.
    """
    content: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if not isinstance(content, str | Mapping | Sequence) or isinstance(content, bytes | bytearray):
        raise ArgumentError(
            f"prompts must be text, token ids, a dict, or a list of these, got {type(content).__name__}"
        )
    is_single = isinstance(content, str | Mapping) or (len(content) > 0 and isinstance(content[0], Integral))
    many: list[Any] = [content] if is_single else list(content)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(many)
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise ArgumentError("sampling_params must be a SamplingParams, or a list of them, one for each prompt")
    if len(params) != len(many):
        raise ArgumentError(f"{len(params)} sampling parameters for {len(many)} prompts; give one, or one for each")
    return list(zip(many, params, strict=True))


# --- the chat template ------------------------------------------------------------------------------------------------

_SANITIZE = "sanitize_control_tokens"  # transformers' argument: control tokens in messages are read as text
_marks: WeakKeyDictionary[PreTrainedTokenizerBase, re.Pattern[str]] = WeakKeyDictionary()


def conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    encode: Callable[[str], Sequence[int]],
) -> dict[str, Any]:
    """Apply the chat template, and return text and token ids.

    Control tokens, such as the marks of roles, come from the template only. If messages, tools or variables contain the
    text of one, it is tokenized as plain text.

    Args:
        variables: of the template, besides messages and tools; also ``continue_final_message`` (the last message is
            left open; default False) and ``add_generation_prompt`` (default True, unless the last message goes on).
        encode: tokenizes a text, unless it is too long.

    Raises:
        ArgumentError: a message has no content, the template takes no tools, a variable is an argument of the renderer,
            the template refuses the conversation, the text of a control token cannot be tokenized as text, or `encode`
            refuses the text.
    """
    if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
        raise ArgumentError('a conversation is a list of messages, each {"role": ..., "content": ...}')
    if any(message.get("content") is None and not message.get("tool_calls") for message in messages):
        raise ArgumentError("a message has no content; only an assistant's message with tool_calls may have none")
    goes_on = bool(variables.get("continue_final_message"))
    ending = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    names = variables.keys() - ending.keys()
    check_variables(tokenizer, names)
    known = read_variables(tokenizer.get_chat_template(tools=[{}] if tools else None))
    if tools:
        check_tools(known)
    for name in names - known:
        near = find_near(name, known)  # One line for each of the template's variables, whatever clients send
        text = "the chat template reads no variable %.80r, which changes nothing.%s"
        warn_once(_log, f"template variable {near}", text, name, nearest(name, known))
    options = {**ending, **variables}
    text = rendered(tokenizer, messages, tools, **options, tokenize=False)
    ids = encode(text)
    if written_mark(tokenizer, [messages, tools, variables]) is not None:
        ids = rendered(tokenizer, messages, tools, **options, tokenize=True, return_dict=False)
    return {"prompt": text, "prompt_token_ids": list(ids)}


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **options: Any,
) -> Any:
    """Render a conversation with the chat template, transformers' options and the template's variables. Only the
    template writes control tokens into token ids. Serving and training both use this. Raises ArgumentError as
    `conversation` does.
    """
    if options.get("tokenize", True) and (mark := written_mark(tokenizer, [messages, tools, options])) is not None:
        if _SANITIZE not in _arguments(tokenizer):
            raise _cannot(mark, f"{type(tokenizer).__name__} of this version of transformers has no {_SANITIZE}")
        options = {**options, _SANITIZE: True}
    formatted = template_messages(tokenizer, messages)
    try:
        return tokenizer.apply_chat_template(formatted, tools=[dict(tool) for tool in tools or ()] or None, **options)
    except Exception as error:  # A template is code of the checkpoint and may raise anything
        raise ArgumentError(f"the chat template refuses this conversation: {error}") from error


def check_tools(variables: Collection[str]) -> None:
    """Raise ArgumentError if a chat template that reads these variables takes no tools."""
    if "tools" not in variables:
        with about("tools"):
            raise ArgumentError(
                "the chat template of this model takes no tools; start the server with --chat-template FILE, a "
                "template that does, or, for a model that writes ChatML, with --chat-template hermes (in Python: "
                "LLM(chat_template='hermes'))"
            )


def check_variables(tokenizer: PreTrainedTokenizerBase, names: Iterable[str]) -> None:
    """Raise ArgumentError for names that are arguments of transformers' renderer, not variables of the chat
    template.
    """
    if reserved := sorted((_arguments(tokenizer) | {"messages"}).intersection(names)):
        raise ArgumentError(f"{', '.join(reserved)}: not a variable of the chat template; leave it out")


def _arguments(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    return set(inspect.signature(tokenizer.apply_chat_template).parameters)


# DeepSeek's templates, which contain this, take a call's arguments as text.
_TEXT_ARGUMENTS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"


def template_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages in the form that the chat template reads: a content as one text, and a tool call's arguments as
    an object, or as JSON text for some templates. A message of calls alone has an empty content there, or None.
    """
    messages = [_with_text(message) for message in messages]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    as_text = _TEXT_ARGUMENTS in tokenizer.get_chat_template(tools=[{}])
    return [_with_arguments(message, as_text) if message.get("tool_calls") else message for message in messages]


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Join the text parts of a message's content. Raises ArgumentError for other parts."""
    parts = message.get("content")
    if parts is None or isinstance(parts, str):
        return message
    if not isinstance(parts, Sequence) or not all(isinstance(part, Mapping) for part in parts):
        raise ArgumentError(f'a content is text or a list of parts {{"type": "text", "text": ...}}, got {parts!r:.80}')
    if other := next((part for part in parts if not isinstance(part.get("text"), str)), None):
        raise ArgumentError(f"a content part of type {other.get('type')!r:.80} cannot be read: only text is")
    return {**message, "content": "".join(part["text"] for part in parts)}


def _with_arguments(message: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
    calls = list[Any]()
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        if as_text and not isinstance(arguments, str):
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        elif not as_text and isinstance(arguments, str):
            with suppress(ValueError):  # A template may write text that is no JSON
                function = {**function, "arguments": json.loads(arguments or "{}")}
        calls.append({**call, "function": function} if "function" in call else function)
    content = message.get("content")
    return {**message, "content": content if content is not None or as_text else "", "tool_calls": calls}


def written_mark(tokenizer: PreTrainedTokenizerBase, given: Any) -> str | None:
    """Return the text of a control token that occurs in the user's messages, or None. Raises ArgumentError if it occurs
    in the name of a field, which transformers does not check.
    """
    marks = _marks.get(tokenizer)
    first_mark = None
    if marks is None:
        texts = [text for text in tokenizer.added_tokens_encoder if not text.isspace()]
        marks = _marks[tokenizer] = re.compile("|".join(map(re.escape, texts)) or "(?!)")
    for text, is_name in _strings(given):
        mark = marks.search(text)
        if mark is not None and is_name:
            raise _cannot(mark[0], f"it is part of the name of a field, {text[:80]!r}")
        first_mark = first_mark or (mark and mark[0])
    return first_mark


def _strings(given: Any) -> Iterator[tuple[str, bool]]:
    """Yield every string in nested lists and mappings, and whether it is a field's name."""
    left = [given]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value, False
        elif isinstance(value, Mapping):
            yield from ((name, True) for name in value if isinstance(name, str))
            left.extend(value.values())
        elif isinstance(value, Sequence):
            left.extend(value)


def _cannot(mark: str, reason: str) -> ArgumentError:
    return ArgumentError(
        f"{mark!r} is a control token of this model and cannot be read as text here: {reason}; leave it out"
    )


# --- the threads in which it is done ----------------------------------------------------------------------------------

LARGE = 50_000
"""Characters, bytes or tokens from which on a request is large: preparing it takes more than some milliseconds."""


class Lane(Enum):
    """Kinds of work that have a thread each, so that work of one kind does not wait for another kind."""

    SMALL = "small"
    LARGE = "large"
    GRAMMAR = "grammar"  # The thread waits for another process that compiles it

    @classmethod
    def of(cls, size: int) -> Lane:
        """Return the lane for work of this size in characters, bytes or tokens."""
        return cls.LARGE if size >= LARGE else cls.SMALL


class OneThread(ThreadPoolExecutor):
    """An executor with one thread; submitting to it after it was shut down raises EngineError."""

    def __init__(self, name: str) -> None:
        super().__init__(max_workers=1, thread_name_prefix=name)

    def submit(self, task: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        try:
            return super().submit(task, *arguments, **keywords)
        except RuntimeError:
            raise EngineError(CLOSED) from None


class Lanes:
    """An executor with a thread for each lane.

    After large work its thread sleeps for as long as the work took. A thread that runs Python code delays every
    operation of the engine's thread (the GIL), so that without pauses a series of large requests would almost stop the
    engine.

    Each client has at most one task in a line, so that clients take turns; only small tasks run in order of arrival.
    """

    def __init__(self, name: str) -> None:
        self._closed = False
        self._turns = WeakValueDictionary[tuple[asyncio.AbstractEventLoop, Lane, str], asyncio.Lock]()
        self._threads = {lane: OneThread(f"{name}-{lane.value}") for lane in Lane}

    async def run(self, lane: Lane, task: Callable[[], T], *, client: str | None = None) -> T:
        """Run a task in a lane's thread, and return its result. Raises its exception, or EngineError if the lanes are
        closed. A task that is cancelled after it has begun runs to its end. `client` is the task's client; None: a
        client of its own.
        """
        if client is None or lane is Lane.SMALL:
            return await self._run(lane, task)
        turn = self._turns.setdefault((asyncio.get_running_loop(), lane, client), asyncio.Lock())
        async with turn:
            return await self._run(lane, task)

    async def _run(self, lane: Lane, task: Callable[[], T]) -> T:
        threads, work = self._threads[lane], partial(contextvars.copy_context().run, task)
        loop = asyncio.get_running_loop()
        took: list[float] = []
        done = loop.run_in_executor(threads, partial(_time, work, took))
        if lane is Lane.LARGE:
            threads.submit(_rest, took)
        try:
            return await done
        except asyncio.CancelledError:
            waiting = asyncio.current_task()
            if self._closed and (waiting is None or not waiting.cancelling()):
                raise EngineError(CLOSED) from None
            raise
        finally:
            del done  # Its exception refers to this frame

    def close(self) -> None:
        """Take no more tasks, and drop those that have not begun."""
        self._closed = True
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def _rest(took: list[float]) -> None:
    """Sleep for as long as the work before took, then return its memory to the system, which glibc would keep."""
    time.sleep(sum(took))
    trim_heap()


def _time(work: Callable[[], T], took: list[float]) -> T:
    began = time.thread_time()
    try:
        return work()
    finally:
        took.append(time.thread_time() - began)
