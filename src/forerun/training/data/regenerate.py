"""The target itself writes the answers of training data, with the local engine or an OpenAI-compatible endpoint.

A record is a script of questions; the engine or the endpoint answers them. Every finished record is appended as one
line at once, and a run that was stopped continues where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forerun.endpoints import ApiClient, ServerError, read_complaint
from forerun.engine.prompts import check_variables
from forerun.errors import ArgumentError, DataError, ForerunError, refuse
from forerun.training.data.records import EXAMPLES_KEPT, BadRecords, Message, Record, read_records
from forerun.types import SamplingParams, StreamChunk
from forerun.writing import hash_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forerun.engine.llm import LLM

TIMEOUT_S = 600.0  # Longest time for an endpoint's response
MOST_FAILURES = 20  # Records in a row that an unreachable endpoint may cost before the run gives up
SAMPLING = SamplingParams(max_tokens=1024)
IDENTITIES = ("weights", "chat_template")
"""Keys of `Director.asked` with digests of what answered, beside its name."""
_BEGINNING = b'{"id": '  # Every line of an output begins like this
Write = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class AnswerRun:
    """The records that are left to answer, with counts of progress and of the outcome."""

    def __init__(
        self,
        path: Path,
        output: Path,
        director: Director,
        *,
        limit: int | None = None,
        skip_bad: bool = False,
        tell: Callable[[AnswerRun], None] = lambda _: None,
    ) -> None:
        """Read the input, data of any kind that `forerun data prepare` reads, and see what an
        earlier run has finished.

        `limit` takes only the first records; `output` is JSONL to append to; `tell` is called after
        each record. DataError if the input cannot be used, or the output is no earlier run's;
        ArgumentError if they are one file, or if a record was answered under other settings.
        """
        refuse(
            (limit is not None and limit < 1, f"limit must be at least 1, got {limit}"),
            (
                path.resolve() == output.resolve(),
                f"--output {output} is the input; the answers need a file of their own",
            ),
        )
        bad = BadRecords(skip=skip_bad)
        records, seen = list[Record](), Counter[str]()
        for record in itertools.islice(read_records(path, bad), limit):
            seen[record.id] += 1
            count = seen[record.id]
            records.append(record if count == 1 else replace(record, id=f"{record.id}#{count}"))
        finished = _read_finished(output)
        self.director, self.output, self.tell = director, output, tell
        self.unidentified = 0  # Answered, but it is not known by which weights or template, at least on one side
        # Each with an id of its own in this input.
        self.records = [record for record in records if not self._is_answered(record, finished.get(record.id, ()))]
        self.total = len(records)  # Those of earlier runs included
        self.skipped, self.complaints = bad.count, bad.examples
        self.written = self.answers = self.tokens = 0  # Tokens of all answers, as stated by the engine or endpoint
        self.failed = 0  # Could not be answered; a later run tries them again

    @property
    def resumed(self) -> int:
        return self.total - len(self.records)

    @property
    def done(self) -> int:
        return self.resumed + self.written + self.failed

    def summary(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        counts = ("total", "resumed", "written", "answers", "failed", "skipped")
        return {"output": str(self.output), **{name: getattr(self, name) for name in counts}}

    def _is_answered(self, record: Record, lines: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether one of the earlier lines with the record's id is its own: not that of
        another prompt.
        """
        now = self.director.asked(record)
        same_prompt = [asked for asked in lines if asked.get("prompt") == now["prompt"]]
        if not same_prompt or now in same_prompt:
            return bool(same_prompt)

        def differing(former: Mapping[str, Any]) -> list[str]:
            # Earlier versions wrote no identities, and what answers at an endpoint has none.
            names = [name for name in {**former, **now} if name not in IDENTITIES or (name in former and name in now)]
            return [name for name in names if former.get(name) != now.get(name)]

        former = min(same_prompt, key=lambda asked: len(differing(asked)))
        changed = differing(former)
        if not changed:
            self.unidentified += 1
            return True
        shown = "; ".join(f"{name} was {former.get(name)!r}, is {now.get(name)!r}" for name in changed)
        raise ArgumentError(
            f"{self.output} has an answer to {record.where} under other settings: {shown}. Give the former values, or "
            "another --output"
        )

    def finish(self, record: Record, line: dict[str, Any] | Exception, write: Write) -> None:
        """Write the line of a record, or count that it could not be answered."""
        if isinstance(line, dict):
            write({**line, "asked": self.director.asked(record)})
            self.written += 1
        else:
            self.failed += 1
            if len(self.complaints) < EXAMPLES_KEPT:
                self.complaints.append(f"{record.where}: {line}")
        self.tell(self)


def with_engine(todo: AnswerRun, llm: LLM, *, concurrency: int, go_on: Callable[[], bool] = lambda: True) -> AnswerRun:
    """Answer the records with the local engine: when an answer is finished, the next question joins the batch. Once
    `go_on` returns False no further record begins; those that have begun are finished.
    """
    marks = special_marks(llm.tokenizer)
    ended = dict[str, StreamChunk]()  # The last chunks, by request

    def step() -> None:
        ended.update((chunk.request_id, chunk) for chunk in llm.engine.step() if chunk.output or chunk.error)

    async def ask(question: TargetPrompt) -> TargetAnswer:
        prompt: Any = question.prompt
        if question.messages:
            prompt = llm.chat_prompt(question.messages, question.tools or None, **question.variables)
        request = llm.submit(prompt, question.params)
        try:
            while request not in ended:
                await asyncio.sleep(0)  # until the next step
        finally:
            llm.abort(request)
        chunk = ended.pop(request)
        if chunk.error is not None:
            raise chunk.error
        assert chunk.output is not None
        written = chunk.output.outputs[0]
        if mark := find_hidden_mark(written.token_ids, marks):
            raise DataError(_HIDDEN.format(mark=mark))
        truncated = written.finish_reason == "length"
        if question.messages and not written.text and not truncated:
            raise DataError(_EMPTY)
        return TargetAnswer(written.text, truncated, tokens=len(written.token_ids))

    asyncio.run(_answer_all(todo, ask, concurrency, step, go_on))
    return todo


_EMPTY = "the target's answer has no text: it ended at once, and nothing but that end could be learned"
_HIDDEN = (
    "the target wrote the control token {mark!r} within its answer, which text leaves out; let a server answer that "
    "has a reasoning parser (--endpoint), or the target while a head trains (objective.writer=target)"
)


def special_marks(tokenizer: PreTrainedTokenizerBase | None) -> dict[int, str]:
    """Return the control tokens of a tokenizer, by id."""
    added = {} if tokenizer is None else tokenizer.added_tokens_decoder
    return {token: mark.content for token, mark in added.items() if mark.special}


def find_hidden_mark(token_ids: Sequence[int], marks: Mapping[int, str]) -> str | None:
    """Return the first of the special tokens `marks` inside an answer, which its text omits; those at its end are
    allowed.
    """
    end = max((place for place, token in enumerate(token_ids) if token not in marks), default=0)
    return next((marks[token] for token in token_ids[:end] if token in marks), None)


def with_endpoint(todo: AnswerRun, endpoint: Endpoint, *, concurrency: int, transport: Any = None) -> AnswerRun:
    """Answer everything with an endpoint, `concurrency` records at a time.

    `transport` replaces httpx's, for tests. ServerError if it refuses everything, or cannot be
    reached any more; what is written stays.
    """

    async def ask_all() -> None:
        async with ApiClient(endpoint.url, "--endpoint", timeout_s=TIMEOUT_S, transport=transport) as client:
            await _answer_all(todo, partial(endpoint.ask, client), concurrency)

    asyncio.run(ask_all())
    return todo


async def _answer_all(
    todo: AnswerRun,
    ask: Callable[[TargetPrompt], Awaitable[TargetAnswer]],
    concurrency: int,
    step: Callable[[], None] | None = None,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Run the scripts, `concurrency` at a time. `step`, if given, advances the engine that answers them; `go_on` as
    in `with_engine`.
    """
    # The workers share both.
    waiting = itertools.takewhile(lambda _: go_on(), todo.records)
    failures = 0

    async def work() -> None:
        nonlocal failures
        for record in waiting:
            script, answer = todo.director.script(record), None
            try:
                while isinstance(question := _next(script, answer), TargetPrompt):
                    answer = await ask(question)
                    todo.answers += 1
                    todo.tokens += answer.tokens
            except ServerError as error:
                failures += 1
                if failures >= MOST_FAILURES or not todo.answers:
                    raise
                todo.finish(record, error, write)
            except ForerunError as error:
                todo.finish(record, error, write)
            else:
                failures = 0
                todo.finish(record, question, write)

    with append_lines(todo.output) as write:
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(work()) for _ in range(min(concurrency, len(todo.records)))]
                while step is not None and not all(worker.done() for worker in workers):
                    await asyncio.sleep(0)  # until all have asked
                    step()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None


def _next(script: Script, answer: TargetAnswer | None) -> TargetPrompt | dict[str, Any]:
    try:
        return next(script) if answer is None else script.send(answer)
    except StopIteration as end:
        return end.value


@contextmanager
def append_lines(path: Path) -> Iterator[Write]:
    """Yield a function that appends a whole JSON line at once, or OSError; a line cut short by a
    crash is removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        with path.open("r+b") as lines:
            lines.truncate(sum(len(line) for line in lines if line.endswith(b"\n")))
    with path.open("ab", buffering=0) as file:

        def write(record: dict[str, Any]) -> None:
            data = (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="replace")
            if file.write(data) != len(data):
                raise OSError(f"{path} could not take a whole line; is the disk full? Run again to go on")

        yield write


def _read_finished(path: Path) -> dict[str, list[Mapping[str, Any]]]:
    """Return what was asked, by id, from an earlier run's output, if there is one. Raises DataError if the file is
    something else.
    """
    finished, alike = dict[str, list[Mapping[str, Any]]](), dict[str, Mapping[str, Any]]()
    for name, asked in read_lines(path, "record", lambda line: (str(line["id"]), dict(line["asked"]))):
        finished.setdefault(name, []).append(alike.setdefault(json.dumps(asked, sort_keys=True), asked))
    return finished


def read_lines(path: Path, what: str, read: Callable[[Any], T]) -> Iterator[T]:
    """Yield what `read` returns for each complete JSON line of an earlier run's output, if there is one. Raises
    DataError if a line is not a `what`, or the beginning of one at the end, which `append_lines` will remove.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            foreign = f"{path}, line {number} is no {what} of an earlier run; choose another --output"
            if not line.endswith(b"\n"):
                if not _BEGINNING.startswith(line[: len(_BEGINNING)]):
                    raise DataError(foreign)
                break
            try:
                item = read(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(foreign) from error
            yield item


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """The endpoint of the target, and how often failed requests are retried."""

    url: str  # Base, with or without ``/v1``
    model: str
    retries: int = 6  # Further attempts after the first, for timeouts, 429 and 5xx
    first_pause_s: float = 0.5  # Pause before the second attempt; doubles each time

    async def ask(self, client: ApiClient, question: TargetPrompt) -> TargetAnswer:
        """Ask one question; DataError if it is refused, ServerError if the endpoint stays busy or refuses all."""
        path = "/v1/chat/completions" if question.messages else "/v1/completions"
        sampling = {name: getattr(question.params, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
        asked: dict[str, Any] = {"prompt": question.prompt}
        if question.messages:
            asked = {"messages": question.messages, "chat_template_kwargs": dict(question.variables) or None}
        body = {"model": self.model, "tools": question.tools or None, **asked, **sampling}
        response = await self._post(client, path, {key: value for key, value in body.items() if value is not None})
        try:
            choice = response.json()["choices"][0]
            message = choice["message"] if question.messages else choice
            text = message["content" if question.messages else "text"] or ""
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            truncated = choice.get("finish_reason") == "length"
            tokens = int((response.json().get("usage") or {}).get("completion_tokens") or 0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ServerError(
                f"{client.url}{path} answered something that is no OpenAI response: {response.text[:200]!r}"
            ) from error
        if question.messages and not text and not truncated:
            raise DataError(_EMPTY)
        return TargetAnswer(text, truncated, thought if isinstance(thought, str) else "", tokens)

    async def _post(self, client: ApiClient, path: str, body: dict[str, Any]) -> Any:
        import httpx

        for attempt in itertools.count():
            response = None
            try:
                response = await client.http.post(client.url + path, json=body)
                if response.is_success:
                    return response
                trouble = f"status {response.status_code}: {read_complaint(response.text)}"
                if response.status_code < 500 and response.status_code not in BUSY:
                    kind = DataError if response.status_code in UNFIT else ServerError
                    raise kind(f"{self.url} refused the request with {trouble}")
            except httpx.TransportError as error:
                trouble = f"{type(error).__name__}: {error}"
            if attempt == self.retries:
                raise ServerError(f"{self.url} failed {attempt + 1} times, the last with {trouble}")
            await asyncio.sleep(self._pause(attempt, response))

    def _pause(self, attempt: int, response: Any) -> float:
        """Return the seconds to wait: what the server asks for, else twice as long each time, not
        all clients at once.
        """
        asked = response.headers.get("Retry-After", "") if response is not None else ""
        try:
            seconds = float(asked)
        except ValueError:
            seconds = self.first_pause_s * 2**attempt * random.uniform(0.5, 1.0)
        return min(max(seconds, 0.0), 60.0)


BUSY = frozenset({408, 409, 425, 429})  # Statuses besides 5xx that a later attempt may cure
UNFIT = frozenset({400, 413, 422})  # Statuses that blame this one request: for example, too long for the model


@dataclass(frozen=True, kw_only=True, slots=True)
class Director:
    """Makes the scripts of records."""

    tokenizer: PreTrainedTokenizerBase | None  # Cuts prompts out of plain texts; needed for those only
    prompt_tokens: int = 64  # Tokens of a plain text that are given; the target writes the rest
    params: SamplingParams = SAMPLING  # Its seed is mixed with a record's id and turn: a resumed run asks the same
    variables: Mapping[str, Any] = field(default_factory=dict)  # Variables of the chat template
    by: str = ""  # The name of the target, for `asked`
    weights: str = ""  # A digest of the target's weights, where it answers here; then the template counts, too

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or not self.params.max_tokens:
            raise ArgumentError(
                f"prompt_tokens and max_tokens must be at least 1, got {self.prompt_tokens} and "
                f"{self.params.max_tokens}"
            )
        if self.tokenizer is not None:
            check_variables(self.tokenizer, self.variables)

    def asked(self, record: Record) -> dict[str, Any]:
        """Return what decides the answers to a record, for its line: a digest of what it says, and
        the settings.
        """
        text = json.dumps([record.messages, record.tools, record.text], sort_keys=True, default=str)
        settings: dict[str, Any] = {
            "prompt": hashlib.sha256(text.encode()).hexdigest()[:16],
            "by": self.by,
            "weights": self.weights,
            **{name: getattr(self.params, name) for name in ("max_tokens", "temperature", "top_p", "seed")},
        }
        if record.messages:
            settings["chat_template_kwargs"] = dict(self.variables)
            template: Any = self.tokenizer.chat_template if self.weights and self.tokenizer is not None else None
            settings["chat_template"] = hash_json(template)[:16] if template else None
        else:
            settings["prompt_tokens"] = self.prompt_tokens
        return {name: value for name, value in settings.items() if value not in (None, "", {})}

    def script(self, record: Record) -> Script:
        """Return the questions of one record; advancing it raises DataError where nothing can be
        answered.
        """
        if record.tokens:
            raise DataError("recorded traffic holds the target's own answers; use it as it is (forerun data prepare)")
        return self._conversation(record) if record.messages else self._text(record)

    def _conversation(self, record: Record) -> Script:
        """Keep what others said, write every turn of the assistant anew, and answer what was left
        unanswered.

        A conversation ends early where an answer is cut off, and before the first call of a tool:
        the tool's recorded reply would not fit another call.
        """
        history: list[Message] = []
        line: dict[str, Any] = {"id": record.id, "messages": history}
        line |= {"tools": [dict(tool) for tool in record.tools]} if record.tools else {}
        for message in (*_askable(record.messages), None):
            if message is not None and message["role"] != "assistant":
                history.append(message)
            elif history and history[-1]["role"] in ("user", "tool"):
                answer = yield self._question(record, tuple(history), "", len(history))
                turn: Message = {"role": "assistant", "content": answer.text}
                history.append(turn | ({"reasoning_content": answer.reasoning} if answer.reasoning else {}))
                if answer.truncated:
                    line["truncated"] = True
                    break
        while history and history[-1]["role"] != "assistant":
            history.pop()
        if not history:
            raise DataError("no user turn that could be answered without a tool")
        return line

    def _text(self, record: Record) -> Script:
        # Special tokens put in front, which take up no text, take no part.
        ends = [end for start, end in self._offsets(record.text) if end > start]
        prompt = record.text[: ends[min(self.prompt_tokens, len(ends)) - 1]] if ends else record.text
        answer = yield self._question(record, (), prompt, 0)
        text = prompt + answer.text  # all of it prompt where the target ends it at once: nothing to learn, no failure
        offsets = self._offsets(text)
        # A token that reaches across the prompt's end belongs to the prompt.
        prompt_length = next((n for n, (start, end) in enumerate(offsets) if end > start >= len(prompt)), len(offsets))
        line: dict[str, Any] = {"id": record.id, "text": text, "prompt_tokens": prompt_length}
        return line | ({"truncated": True} if answer.truncated else {})

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        if self.tokenizer is None:
            raise DataError("a plain text needs the target's tokenizer to cut its prompt; add --target MODEL")
        if not self.tokenizer.is_fast:
            raise DataError("plain texts need a fast tokenizer, one that tells where each token stands")
        offsets: list[tuple[int, int]]
        offsets = self.tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        return offsets

    def _question(self, record: Record, messages: tuple[Message, ...], prompt: str, turn: int) -> TargetPrompt:
        params = self.params
        if params.seed is not None:
            digest = hashlib.sha256(f"{params.seed}/{record.id}/{turn}".encode()).digest()
            params = replace(params, seed=int.from_bytes(digest[:4], "big") >> 1)  # below 2**31
        return TargetPrompt(
            messages=messages, tools=record.tools, variables=self.variables, prompt=prompt, params=params
        )


def _askable(messages: Sequence[Message]) -> list[Message]:
    """Return the messages before the first that calls a tool or reports from one."""
    askable = list[Message]()
    for message in messages:
        reports = message["role"] == "tool"
        if reports or message.get("tool_calls") or message.get("function_call"):
            # Whoever spoke before a report called the tool, in a way that this format does not mark.
            while askable and reports and askable[-1]["role"] == "assistant":
                askable.pop()
            while askable and askable[-1]["role"] != "assistant":
                askable.pop()
            break
        askable.append(message)
    return askable


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPrompt:
    """One thing to generate: the next turn of a conversation, or what follows a
    text.
    """

    messages: tuple[Message, ...]  # The conversation so far; empty for plain text
    tools: tuple[Mapping[str, Any], ...]
    variables: Mapping[str, Any]  # Further variables of the chat template
    prompt: str  # The text to continue, where there is no conversation
    params: SamplingParams


class TargetAnswer(NamedTuple):
    """An answer that the target wrote."""

    text: str
    truncated: bool  # A limit on tokens ended it, not the target
    reasoning: str = ""  # Thinking of the target that an endpoint reports separately
    tokens: int = 0  # Tokens that were written; 0 where an endpoint does not say


Script = Generator[
    TargetPrompt, TargetAnswer, dict[str, Any]
]  # Asks about a record; returns the record's line of output
