"""A `ServedModel` requests tokens and their log-probabilities from an OpenAI-compatible server.

Servers differ: vLLM, SGLang and forerun return ids with ``return_token_ids``, llama.cpp puts an ``id`` beside each
token. The features that a server lacks are found once, when it is opened, and kept with the reason. A `ServerExam` is
one run of ``forerun certify --server``; it reports a fault with the smallest request that shows it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.client import Server, SpeculationCounts, diff_counts, read_counts, sum_counts
from forerun.certify import CertifyPlan, Check
from forerun.certify.reference import TIE_EPSILON, Difference
from forerun.endpoints import ServerError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIKELIEST = 20  # Requested log-probabilities per position: the most that vLLM returns by default
TOGETHER = 16  # Concurrent requests, where concurrency is tested
CHOICES = 4  # Completions of one request, where `n` is tested
TRIES = 32  # Most smaller requests that are tried to show a fault

Prompt = tuple[int, ...] | str
Stated = Mapping[int, float]
"""Log-probabilities of the likeliest tokens at a position, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRequest:
    """One request for a completion, or several concurrent copies of it."""

    prompt: Prompt
    max_tokens: int
    temperature: float = 0.0
    n: int = 1
    seed: int | None = None
    copies: int = 1  # Sent at the same time
    before: Prompt | None = None  # A prompt that is completed first, so that it is in the server's cache
    salt: str | None = None  # Requests share cached prefixes only with those of the same salt


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedAnswer:
    """One choice of a completion. Tokens are ids; an id below 0 stands for a token of which only the text is known."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]  # Of each token, as stated in the completion
    likeliest: tuple[Stated, ...]
    finish_reason: str | None


class ServedModel:
    """A model behind a server; requests go through `ask` and `stated`. Open it with `serving_model`."""

    def __init__(self, server: Server, runner: asyncio.Runner) -> None:
        self._server, self._runner = server, runner
        self.url, self.model, self.engine = server.url, server.model or "", server.engine
        self.missing: dict[str, str] = {}
        """The features that the server lacks (extras, logprobs, ids, n), each with the reason; filled by `probe`."""
        self.cached_tokens: int | None = None
        """Tokens of all completions that came from the prefix cache, as the server states it; None: it does not."""
        self._likeliest = LIKELIEST
        self._texts: dict[str, int] = {}  # Token's text -> number below 0, if the server gives no id
        self._ids: dict[int, int] = {}  # Number below 0 -> id, once a completion shows it
        self._stated: dict[tuple[int, ...], Stated] = {}  # Text -> stated next tokens
        self._salt = secrets.token_hex(16)  # Separates the prefixes that are cached for `stated`
        self._counts: list[SpeculationCounts] = []
        self._before = self._runner.run(server.metrics())

    @property
    def exact(self) -> bool:
        """Return whether the server states the log-probabilities that completions can be compared with."""
        return not {"logprobs", "ids"} & self.missing.keys()

    def probe(self) -> None:
        """Find the features of the server. Raises ServerError if it has no completions endpoint."""
        asked = ServedRequest(prompt="The", max_tokens=1)
        tries = ((True, LIKELIEST), (True, 5), (False, 5), (False, 0))
        complaint: ServerError | None = None
        for extras, likeliest in tries:
            self._likeliest = likeliest
            if not extras:
                self.missing["extras"] = f"it refuses what is not OpenAI's: {complaint}"
            try:
                [[answer]] = self.ask([asked])
            except ServerError as error:
                complaint = error
                continue
            break
        else:
            raise ServerError(f"certify asks for completions, which this server does not give: {complaint}")
        if not any(answer.likeliest):
            self.missing["logprobs"] = f"its completions have no log-probabilities ({complaint or 'it gives none'})"
        self._try_ids(answer)
        self._try_n()

    def _try_ids(self, answer: ServedAnswer) -> None:
        if not answer.tokens:
            self.missing["ids"] = "it names no tokens"
            return
        prompt = self.encode("The quick brown")
        if isinstance(prompt, str):
            return
        try:
            [[first]] = self.ask([ServedRequest(prompt=prompt, max_tokens=1)])
        except ServerError as error:
            self.missing["ids"] = f"it takes no prompt of token ids: {error}"
            return
        if any(self._id_of(token) is None for token in first.tokens):
            self.missing["ids"] = "it names tokens by their text alone"

    def _try_n(self) -> None:
        try:
            [choices] = self.ask([ServedRequest(prompt="The", max_tokens=1, temperature=1.0, n=CHOICES)])
        except ServerError as error:
            self.missing["n"] = f"it refuses n = {CHOICES}: {error}"
            return
        if len(choices) != CHOICES:
            self.missing["n"] = f"it gives {len(choices)} completions for n = {CHOICES}"

    def encode(self, text: str) -> Prompt:
        """Return the ids of a text; the text itself if the server gives no ids."""
        if "ids" in self.missing:
            return text
        body: dict[str, Any] = {"model": self.model, "prompt": text}
        if self.engine == "llamacpp":
            body = {"content": text, "add_special": True}
        try:
            [answer] = self.post("/tokenize", [body])
            return tuple(int(token) for token in answer["tokens"])
        except (ServerError, KeyError, TypeError, ValueError) as error:
            self.missing["ids"] = f"its /tokenize gives no ids: {error}"
            return text

    def body(self, request: ServedRequest) -> dict[str, Any]:
        """Return the request as JSON, with temperature and seed, and all other sampling parameters switched off."""
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt if isinstance(request.prompt, str) else list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": 1.0,
        }
        if request.n > 1:
            body["n"] = request.n
        if request.seed is not None:
            body["seed"] = request.seed
        if self._likeliest:
            body["logprobs"] = self._likeliest
        if "extras" in self.missing:
            return body
        if self.engine == "llamacpp":
            neutral = {"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}
            return body | neutral | ({} if request.salt is None else {"cache_prompt": False})
        neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        named = {"return_token_ids": True, "return_tokens_as_token_ids": True}
        return body | neutral | named | ({} if request.salt is None else {"cache_salt": request.salt})

    def command(self, path: str, body: Mapping[str, Any]) -> str:
        """Return the shell command that sends a request."""
        words = json.dumps(body, ensure_ascii=False)
        return f"curl -s {self.url}{path} -H 'content-type: application/json' -d {shlex.quote(words)}"

    def commands(self, request: ServedRequest) -> tuple[str, ...]:
        """Return the shell commands that send a request, and the one before it."""
        own = (self.command(COMPLETIONS, self.body(request)),)
        if request.before is None:
            return own
        return (self.command(COMPLETIONS, self.body(replace(request, prompt=request.before))), *own)

    def post(self, path: str, bodies: Sequence[Mapping[str, Any]], at_a_time: int = 1) -> list[dict[str, Any]]:
        """Send requests, `at_a_time` concurrently, and return the responses. Raises ServerError if one is refused."""

        async def every() -> list[dict[str, Any]]:
            slots = asyncio.Semaphore(at_a_time)

            async def one(body: Mapping[str, Any]) -> dict[str, Any]:
                async with slots:
                    return await self._server.post(path, body)

            return await asyncio.gather(*(one(body) for body in bodies))

        return self._runner.run(every())

    def ask(self, requests: Sequence[ServedRequest], at_a_time: int = 1) -> list[list[ServedAnswer]]:
        """Return the choices of each request and of its copies, which are sent concurrently. Requests with a `before`
        are sent one after the other, each after its own.
        """
        answers = []
        if any(request.before is not None or request.copies > 1 for request in requests):
            for request in requests:
                if request.before is not None:
                    self.post(COMPLETIONS, [self.body(replace(request, prompt=request.before))])
                payloads = self.post(COMPLETIONS, [self.body(request)] * request.copies, request.copies)
                answers.append([choice for payload in payloads for choice in self.read(payload)])
            return answers
        payloads = self.post(COMPLETIONS, [self.body(request) for request in requests], at_a_time)
        return [self.read(payload) for payload in payloads]

    def stated_along(self, answered: Sequence[tuple[ServedRequest, ServedAnswer]]) -> list[list[Stated]]:
        """Return `stated` for the beginnings before each token of each completion, which are requested concurrently."""
        beginnings = [
            [(request.prompt, answer.tokens[:position]) for position in range(len(answer.tokens))]
            for request, answer in answered
        ]
        self._request_next([self.continued(*beginning) for along in beginnings for beginning in along])
        return [[self.stated(*beginning) for beginning in along] for along in beginnings]

    def stated(self, prompt: Prompt, beginning: Sequence[int]) -> Stated:
        """Return the likeliest next tokens after a partial completion; empty if they cannot be requested.

        The server states them with a completion of one token. That token comes from the prefill pass, without a draft,
        and its salt excludes what other requests left in the prefix cache.
        """
        text = self.continued(prompt, beginning)
        self._request_next([text])
        return {} if text is None else self._stated[text]

    def _request_next(self, texts: Sequence[tuple[int, ...] | None]) -> None:
        unknown = [text for text in dict.fromkeys(texts) if text is not None and text not in self._stated]
        asked = [ServedRequest(prompt=text, max_tokens=1, temperature=1.0, seed=0, salt=self._salt) for text in unknown]
        for text, [answer] in zip(unknown, self.ask(asked, TOGETHER), strict=True):
            self._stated[text] = answer.likeliest[0] if answer.likeliest else {}

    def continued(self, prompt: Prompt, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """Return a prompt extended by the first tokens of a completion; None if an id is not known."""
        ids = [self._id_of(token) for token in tokens]
        known = [token for token in ids if token is not None]
        return None if isinstance(prompt, str) or len(known) < len(ids) else (*prompt, *known)

    def speculation(self) -> SpeculationCounts | None:
        """Return the server's counts of drafted and accepted tokens since it was opened; None if it has none."""
        after = self._runner.run(self._server.metrics())
        if self._before is not None and after is not None:
            counted = diff_counts(self._before, after)
            if counted is not None:
                return counted
        return sum_counts(self._counts)

    def read(self, payload: Mapping[str, Any]) -> list[ServedAnswer]:
        """Return the choices of a response. Raises ServerError if it is not a completion."""
        try:
            usage = payload.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if cached is not None:
                self.cached_tokens = (self.cached_tokens or 0) + int(cached)
            counts = read_counts(payload, int(usage.get("completion_tokens") or 0))
            if counts is not None:
                self._counts.append(counts)
            choices = sorted(payload["choices"], key=lambda choice: int(choice.get("index", 0)))
            return [self._read_choice(choice) for choice in choices]
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            what = json.dumps(payload)[:200]
            raise ServerError(f"{self.url}{COMPLETIONS} answered what is no completion: {what}") from error

    def _read_choice(self, choice: Mapping[str, Any]) -> ServedAnswer:
        stated = choice.get("logprobs") or {}
        ids = choice.get("token_ids")
        if stated.get("content") is not None:  # The format of chat completions, which llama.cpp's completions have, too
            places = [(self._token(entry["token"], entry.get("id")), entry) for entry in stated["content"]]
            tokens = [token for token, _ in places]
            logprobs = [entry.get("logprob") for _, entry in places]
            pairs = [
                [(other["token"], other.get("id"), other["logprob"]) for other in entry.get("top_logprobs") or ()]
                for _, entry in places
            ]
        else:
            names = stated.get("tokens") or []
            tokens = [self._token(name, None) for name in names]
            logprobs = list(stated.get("token_logprobs") or [])
            tops = stated.get("top_logprobs") or [None] * len(names)
            pairs = [[(name, None, value) for name, value in (top or {}).items()] for top in tops]
        if ids is not None and len(ids) == len(tokens):
            self._ids.update((token, int(number)) for token, number in zip(tokens, ids, strict=True) if token < 0)
        elif ids is not None and not tokens:
            tokens, logprobs = [int(token) for token in ids], [None] * len(ids)
        likeliest = [
            {self._token(name, token): float(value) for name, token, value in place if value is not None}
            for place in pairs
        ]
        return ServedAnswer(
            text=str(choice.get("text") or ""),
            tokens=tuple(tokens),
            logprobs=tuple(None if value is None else float(value) for value in logprobs),
            likeliest=tuple(likeliest),
            finish_reason=choice.get("finish_reason"),
        )

    def _token(self, name: str, number: int | None) -> int:
        """Return the id of a token, or a number below 0 for its text if the server gives no id."""
        if number is not None:
            return int(number)
        if name.startswith("token_id:"):
            return int(name.removeprefix("token_id:"))
        return self._texts.setdefault(name, -1 - len(self._texts))

    def show_token(self, token: int | None) -> str:
        """Return a token's text in quotes, or its id if the server does not tell it; None is a completion's end."""
        if token is None:
            return "the end"
        if token < 0:
            return repr(next(text for text, number in self._texts.items() if number == token))
        try:
            [answer] = self.post("/detokenize", [{"model": self.model, "tokens": [token]}])
        except ServerError:
            answer = {}
        text = answer.get("prompt", answer.get("content"))  # vLLM's and llama.cpp's names
        return repr(text) if isinstance(text, str) else str(token)

    def _id_of(self, token: int) -> int | None:
        return token if token >= 0 else self._ids.get(token)


@contextmanager
def serving_model(url: str, *, model: str | None = None, api_key: str | None = None) -> Iterator[ServedModel]:
    """Open a server and find its features. Raises ServerError if it does not respond as OpenAI's API does;
    ArgumentError if it does not have the model, or has several and none is named.
    """
    with asyncio.Runner() as runner:
        server = Server(url, model=model, api_key=api_key)
        runner.run(server.__aenter__())
        try:
            served = ServedModel(server, runner)
            served.probe()
            yield served
        finally:
            runner.run(server.__aexit__())


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerExam:
    """One run: the plan, the examined server, and the one that it is compared with."""

    served: ServedModel
    against: ServedModel | None
    prompts: list[Prompt]
    plan: CertifyPlan
    dtype: str
    progress: Callable[[str], None]

    @property
    def epsilon(self) -> float:
        """Return the largest gap that counts as a tie, nats."""
        return TIE_EPSILON.get(self.dtype, 0.0)

    @property
    def tests(self) -> int:
        """Return the number of chi-square tests."""
        return 3 + (self.against is not None)

    def difference(self, place: tuple[int, int], tokens: tuple[int | None, int | None], gap: float) -> Difference:
        """Return the difference between a completion and plain decoding at `place` (prompt, position)."""
        (prompt, position), (plain, other) = place, tokens
        return Difference(
            prompt=prompt, position=position, plain=plain, speculative=other, gap=gap, epsilon=self.epsilon
        )


Shows = Callable[[ServedRequest], str | None]
"""A function that sends a request and returns what is wrong with its completion, or None."""


def left_out(key: str, name: str, why: str) -> Check:
    """Return a check that was left out, with the reason."""
    return Check(id=key, name=name, passed=True, left_out=True, summary=f"left out: {why}")


def with_smallest(
    exam: ServerExam, check: Check, requests: Sequence[ServedRequest], shows: Shows, tries: int = TRIES
) -> Check:
    """Return a failed check with the smallest request that shows its fault, made from the first of `requests` that
    does.
    """
    exam.progress(f"{check.name}: looking for a smaller request")
    for request in requests:
        smallest, fault = smallest_request(request, shows, tries)
        if fault is not None:
            break
    words = fault or "asked again, the request did not show it"
    if smallest.copies > 1:
        words = f"{words}, with {smallest.copies} of it at a time"
    figures = {**check.figures, "fault": words, "prompt_tokens": len(smallest.prompt), "copies": smallest.copies}
    commands = exam.served.commands(smallest)
    return replace(check, summary=f"{check.summary}; {words}", figures=figures, shown_by=commands)


def smallest_request(request: ServedRequest, shows: Shows, tries: int = TRIES) -> tuple[ServedRequest, str | None]:
    """Return the smallest request found that shows a fault, and what it shows; None if not even the first one does.

    Smaller means fewer concurrent copies, a shorter prompt, or a shorter completion. The prompt before it is kept,
    because the server may have it cached from an earlier try.
    """
    fault = shows(request)
    if fault is None:
        return request, None
    going = True
    while going:
        going = False
        for candidate in _smaller(request):
            if tries == 0:
                return request, fault
            tries -= 1
            smaller = shows(candidate)
            if smaller is not None:
                request = candidate
                fault = smaller
                going = True
                break
    return request, fault


def _smaller(request: ServedRequest) -> Iterator[ServedRequest]:
    if request.copies > 1:
        yield replace(request, copies=1)
        yield replace(request, copies=request.copies // 2)
    length = len(request.prompt)
    for cut in sorted({length // 2, length // 4, 1}, reverse=True):
        # From the front: the prompt before it loses the same tokens, so that they keep a common prefix
        if 0 < cut < length:
            before = None if request.before is None else request.before[cut:] or request.before[-1:]
            yield replace(request, prompt=request.prompt[cut:], before=before)
    for tokens in (request.max_tokens // 2, request.max_tokens * 3 // 4, request.max_tokens - 1):
        if 0 < tokens < request.max_tokens:
            yield replace(request, max_tokens=tokens)
