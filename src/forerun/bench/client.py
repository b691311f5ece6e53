"""This module sends one streamed request to an OpenAI-compatible server, times every chunk, and reads what its drafts
brought from its metrics and responses.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from forerun.bench.workloads import Task
from forerun.endpoints import ApiClient, ServerError, check_address, read_complaint
from forerun.errors import ArgumentError
from forerun.training.data.records import Message
from forerun.types import mean_acceptance_length, tokens_per_pass

Samples = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
"""The samples of a metrics page: name -> labels -> value."""
COUNTERS = {"vllm:spec_decode_num_": "vllm:generation_tokens", "llamacpp:spec_decode_num_": "llamacpp:tokens_predicted"}
"""Prefixes of vLLM's and llama.cpp's counter names, which count the same, and the counter of the
completions' tokens.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationCounts:
    """The counts of an engine over some time; None where it does not tell."""

    drafts: int | None = None
    """Passes of the target that verified a draft."""
    tokens: int | None = None
    """Tokens of the completions, each one's first included."""
    passes: int | None = None
    """Passes of the target that gave these tokens, with a draft or without; None where it is to be inferred."""
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    accepted_per_position: tuple[int, ...] = ()
    source: str = ""
    """The source of the counts, and what was converted."""

    @property
    def tokens_per_pass(self) -> float | None:
        """Return all tokens over all passes.

        For an engine that does not count passes, each pass gives one token of the target's own and
        what it accepts.
        """
        if not self.tokens or self.accepted_tokens is None:
            return None
        return tokens_per_pass(self.tokens, self.passes or self.tokens - self.accepted_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """Return vLLM's mean acceptance length."""
        if not self.drafts or self.accepted_tokens is None:
            return None
        return mean_acceptance_length(self.accepted_tokens, self.drafts)

    @property
    def acceptance_rate(self) -> float | None:
        """Return the accepted share of the drafted tokens."""
        if not self.draft_tokens or self.accepted_tokens is None:
            return None
        return self.accepted_tokens / self.draft_tokens

    def record(self) -> dict[str, Any]:
        """Return the counts under the keys of ``vllm bench serve``, and tokens per pass; rates are
        in percent there, so here too.
        """
        rate, drafts = self.acceptance_rate, self.drafts or 0
        positions = [round(count / drafts, 4) for count in self.accepted_per_position] if drafts else []
        found = {
            "tokens_per_pass": self.tokens_per_pass,
            "spec_decode_acceptance_rate": None if rate is None else 100 * rate,
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted_tokens,
            "spec_decode_per_position_acceptance_rates": positions or None,
            "spec_decode_source": self.source,
        }
        return {name: value for name, value in found.items() if value is not None}


def parse(text: str) -> Samples:
    """Return the samples of a Prometheus page; ValueError if it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in (each for each in family.samples if math.isfinite(each.value)):
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


def diff_counts(before: Samples, after: Samples) -> SpeculationCounts | None:
    """Return what was counted between two pages of an engine's metrics; None where they have no
    speculation counters.
    """

    def grown(name: str) -> int | None:
        if name not in after:
            return None
        return round(sum(after[name].values()) - sum(before.get(name, {}).values()))

    for names, tokens in COUNTERS.items():
        if (drafts := grown(f"{names}drafts_total")) is None:
            continue
        return SpeculationCounts(
            drafts=drafts,
            tokens=grown(f"{tokens}_total"),
            passes=grown("forerun:passes_total"),
            draft_tokens=grown(f"{names}draft_tokens_total"),
            accepted_tokens=grown(f"{names}accepted_tokens_total"),
            accepted_per_position=_positions(before, after, f"{names}accepted_tokens_per_pos_total"),
            source=f"the server's {names.removesuffix('_num_')} counters",
        )
    if (calls := grown("sglang:spec_verify_calls_total")) is not None:
        written, requests = grown("sglang:generation_tokens_total"), grown("sglang:num_requests_total")
        if written is None or requests is None:
            return None
        return SpeculationCounts(
            drafts=calls,
            tokens=written,
            accepted_tokens=written - requests - calls,
            source="sglang:spec_verify_calls and generation_tokens; the first token of each request is no pass's, "
            "while SGLang's own accept length counts it",
        )
    return None


def _positions(before: Samples, after: Samples, name: str) -> tuple[int, ...]:
    """Return the tokens accepted at the first, second, ... drafted position."""
    totals: dict[int, float] = {}
    for page, sign in ((after, 1), (before, -1)):
        for labels, value in page.get(name, {}).items():
            name_of = dict(labels).get("position", "")
            if not name_of.isdecimal():
                continue
            position = int(name_of)
            totals[position] = totals.get(position, 0.0) + sign * value
    return tuple(round(totals[position]) for position in sorted(totals))


def read_counts(answer: Mapping[str, Any], tokens: int) -> SpeculationCounts | None:
    """Return the counts that a response, or the last chunk of a stream, gives for its own request.

    These are vLLM's (and forerun's) ``metrics`` or llama.cpp's ``timings``; `tokens` is the number
    of tokens of the completion.
    """
    counts = (answer.get("metrics") or {}).get("speculative_decoding")
    if isinstance(counts, Mapping) and counts.get("num_spec_steps") is not None:
        reached = list(counts.get("acceptance_histogram") or ())
        return SpeculationCounts(
            drafts=int(counts["num_spec_steps"]),
            tokens=tokens,
            passes=counts.get("num_passes"),
            draft_tokens=int(counts["num_draft_tokens"]),
            accepted_tokens=int(counts["num_accepted_draft_tokens"]),
            accepted_per_position=tuple(sum(reached[position:]) for position in range(1, len(reached))),
            source="the responses' metrics.speculative_decoding",
        )
    timings = answer.get("timings")
    if isinstance(timings, Mapping) and timings.get("draft_n") is not None:
        accepted = int(timings.get("draft_n_accepted") or 0)
        return SpeculationCounts(
            drafts=max(0, int(timings.get("predicted_n", tokens)) - 1 - accepted),
            tokens=int(timings.get("predicted_n", tokens)),
            draft_tokens=int(timings["draft_n"]),
            accepted_tokens=accepted,
            source="the responses' timings; llama.cpp does not tell passes without a draft apart: all are counted",
        )
    return None


def sum_counts(parts: Iterable[SpeculationCounts | None]) -> SpeculationCounts | None:
    """Return the sum of several requests' counts; None where no request has any."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    longest = max(len(part.accepted_per_position) for part in known)
    padded = [[*part.accepted_per_position, *[0] * (longest - len(part.accepted_per_position))] for part in known]
    counted = all(part.passes is not None for part in known)
    return SpeculationCounts(
        drafts=sum(part.drafts or 0 for part in known),
        tokens=sum(part.tokens or 0 for part in known),
        passes=sum(part.passes or 0 for part in known) if counted else None,
        draft_tokens=sum(part.draft_tokens or 0 for part in known),
        accepted_tokens=sum(part.accepted_tokens or 0 for part in known),
        accepted_per_position=tuple(map(sum, zip(*padded, strict=True))),
        source=known[0].source,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchAnswer:
    """Records the completion of one prompt, its times and its error."""

    task: str
    category: str
    sent_s: float
    """Seconds from the beginning of the measurement until the question was sent."""
    ttft_s: float | None = None
    """Seconds until the first text; None where there was none."""
    gaps_s: tuple[float, ...] = ()
    """Seconds between successive chunks of text; a chunk may hold several tokens."""
    seconds: float = 0.0
    """Seconds until the end of the completion."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens as the server counted them; the number of chunks where it does not say."""
    counted: bool = True
    """True where the server said how many tokens it generated."""
    text: str = ""
    speculation: SpeculationCounts | None = None
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Return the seconds per token behind the first; None for less than two tokens."""
        if self.ttft_s is None or self.tokens < 2:
            return None
        return (self.seconds - self.ttft_s) / (self.tokens - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The options that say how every request is made."""

    endpoint: str = "auto"
    """``chat``, ``completions``, or ``auto`` for what a task calls for."""
    max_tokens: int = 256
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the request body: temperature, top_p, seed, ..."""
    timeout_s: float = 600.0


class Server(ApiClient):
    """A server that is measured: its model, its metrics, and its completions."""

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, metrics_url: str | None = None
    ) -> None:
        super().__init__(url, api_key=api_key)
        try:
            import prometheus_client.parser  # noqa: F401 - `metrics` reads with it
        except ImportError as error:
            raise ArgumentError(f"forerun bench needs {error.name}: pip install 'forerun[bench]'") from error
        self.model = model
        self.metrics_named = metrics_url is not None
        self.metrics_url = f"{self.url}/metrics" if metrics_url is None else check_address(metrics_url, "--metrics-url")
        self.without_metrics = ""
        """The reason why `metrics_url` gave no metrics when it was last queried; empty where it did.
        """
        self.engine = ""
        """The owner of the model list: vllm, sglang, llamacpp, forerun, ...; empty before the
        server was opened.
        """

    async def __aenter__(self) -> Self:
        """Ask which models there are.

        ServerError: no server responds, or not as OpenAI's does, or ``--metrics-url`` gives no metrics.
        ArgumentError: the requested model is not there, or there are several and none was
        requested.
        """
        try:
            models = await self._models()
            if self.model is None and len({root for _, root in models.values()}) > 1:
                raise ArgumentError(f"{self.url} serves {', '.join(models)}; say which with --model")
            self.model = self.model or next(iter(models), None)
            if self.model not in models:
                raise ArgumentError(f"{self.url} serves {', '.join(models) or 'no model'}, not {self.model}")
            self.engine, _ = models[self.model]
            if not await self.metrics() and self.metrics_named:
                raise ServerError(
                    f"no metrics at {self.metrics_url} ({self.without_metrics}); expected a page of Prometheus: mend "
                    "--metrics-url, or leave it out"
                )
        except BaseException:
            await self.http.aclose()
            raise
        return self

    async def _models(self) -> dict[str, tuple[str, str]]:
        """Return the models, each with its owner and its root: names of one model have the same."""
        import httpx

        try:
            response = await self.http.get(f"{self.url}/v1/models")
        except httpx.HTTPError as error:
            raise ServerError(
                f"no server answers at {self.url} ({str(error) or type(error).__name__}); is it up?"
            ) from error
        if response.status_code != 200:
            key = "; name its key with --api-key or OPENAI_API_KEY" if response.status_code in (401, 403) else ""
            complaint = read_complaint(response.text)
            raise ServerError(f"{self.url}/v1/models answered {response.status_code}: {complaint}{key}")
        try:
            listed = [(str(model["id"]), model) for model in response.json()["data"]]
            return {name: (str(model.get("owned_by", "")), str(model.get("root") or name)) for name, model in listed}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ServerError(f"{self.url}/v1/models answered what is no model list: {response.text[:200]}") from error

    async def metrics(self) -> Samples | None:
        """Return the server's counters; None where it has none, with the reason in
        `without_metrics`.
        """
        import httpx

        self.without_metrics = ""
        try:
            response = await self.http.get(self.metrics_url, follow_redirects=True)
            if response.status_code != 200:
                self.without_metrics = f"status {response.status_code}"
            elif not (samples := parse(response.text)):
                self.without_metrics = "an empty page"
            else:
                return samples
        except httpx.HTTPError as error:
            self.without_metrics = str(error) or type(error).__name__
        except ValueError:
            self.without_metrics = "a page that is not of Prometheus"
        return None

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """Return the JSON object that a request without a stream gets.

        ServerError: the connection broke, or the response is a refusal or no JSON object.
        """
        import httpx

        where = f"{self.url}{path}"
        try:
            waiting = self.http.post(where, json=dict(body), timeout=httpx.Timeout(timeout_s, connect=30.0))
            response = await waiting
        except httpx.TimeoutException as error:
            raise ServerError(f"{where} did not answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerError(f"{where}: the connection broke: {str(error) or type(error).__name__}") from error
        if response.status_code != 200:
            raise ServerError(f"{where} answered {response.status_code}: {read_complaint(response.text)}")
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{where} answered what is no JSON: {response.text[:200]}") from error
        if not isinstance(answer, dict):
            raise ServerError(f"{where} answered what is no JSON object: {response.text[:200]}")
        return answer

    async def ask(
        self,
        task: Task,
        asking: RequestOptions,
        began: float,
        before: Sequence[Message] = (),
        question: Sequence[Message] = (),
    ) -> BenchAnswer:
        """Send one question behind the conversation `before`; any failure is recorded in the
        answer.

        `began` is the clock's time at the start of the measurement. A task without questions is a
        text to be continued.
        """
        import httpx

        chat = asking.endpoint == "chat" or (asking.endpoint == "auto" and bool(question))
        if chat:
            content: dict[str, Any] = {"messages": [*before, *question] or [{"role": "user", "content": task.text}]}
        else:
            content = {"prompt": task.prompt()}
        body = {
            "model": self.model,
            **content,
            "max_tokens": asking.max_tokens,
            **asking.sampling,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        path = f"{self.url}/v1/{'chat/completions' if chat else 'completions'}"
        started = time.perf_counter()
        heard = _Heard(started)
        try:
            waiting = self.http.stream("POST", path, json=body, timeout=httpx.Timeout(None, connect=30.0))
            async with asyncio.timeout(asking.timeout_s), waiting as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode("utf-8", "replace")
                    heard.error = f"status {response.status_code}: {read_complaint(text)}"
                else:
                    await heard.listen(response.aiter_bytes())
        except (httpx.TimeoutException, TimeoutError):
            heard.error = f"not answered within {asking.timeout_s:g} s"
        except httpx.HTTPError as error:
            heard.error = f"the connection broke: {str(error) or type(error).__name__}"
        return heard.answer(task, started - began)


class _Heard:
    """Collects what a stream said so far."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.error: str | None = None
        self.times: list[float] = []
        self.texts: list[str] = []
        self.prompt_tokens = 0
        self.tokens: int | None = None
        self.speculation: SpeculationCounts | None = None
        self.ended = False

    async def listen(self, stream: AsyncIterator[bytes]) -> None:
        async for line in _lines(stream):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").decode("utf-8", "replace").strip()
            if data == "[DONE]":
                self.ended = True
                return
            try:
                chunk = json.loads(data)
            except (ValueError, RecursionError):
                self.error = f"a chunk is no JSON: {data[:100]}"
                return
            if isinstance(chunk, dict) and chunk.get("error") is not None:
                self.error = read_complaint(data)
                return
            try:
                self.hear(chunk)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                self.error = f"a chunk is not as OpenAI writes it: {data[:100]}"
                return

    def hear(self, chunk: Any) -> None:
        """Record a chunk's text, time and counts; any error means that its values are of other
        types than OpenAI's.
        """
        if usage := chunk.get("usage"):
            tokens = usage.get("completion_tokens")
            self.tokens = None if tokens is None else int(tokens)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        self.speculation = read_counts(chunk, self.found) or self.speculation
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            text = (
                delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or choice.get("text")
            )
            if text:
                self.texts.append("" + text)  # A TypeError where it is no text
                self.times.append(time.perf_counter() - self.started)

    @property
    def found(self) -> int:
        """Return the tokens as the server counted them, else the chunks."""
        return len(self.times) if self.tokens is None else self.tokens

    def answer(self, task: Task, sent: float) -> BenchAnswer:
        seconds = time.perf_counter() - self.started
        if self.error is None and not self.ended:
            self.error = "the stream ended before [DONE]"
        return BenchAnswer(
            task=task.id,
            category=task.category,
            sent_s=sent,
            ttft_s=self.times[0] if self.times else None,
            gaps_s=tuple(later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)),
            seconds=seconds,
            prompt_tokens=self.prompt_tokens,
            tokens=self.found,
            counted=self.tokens is not None,
            text="".join(self.texts),
            speculation=self.speculation,
            error=self.error,
        )


async def _lines(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines that end with a line feed. Nothing else ends one: a completion may hold U+2028."""
    begun = b""
    async for part in stream:
        *whole, begun = (begun + part).split(b"\n")
        for line in whole:
            yield line
    yield begun
