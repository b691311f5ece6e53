"""A session is the engine behind the routes: loading, admission, limits, draining, metrics.

Metrics have vLLM's names, so that its dashboards, ``vllm bench`` and AIPerf read this server; what vLLM has no name for
begins with ``forerun:``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from transformers import PreTrainedTokenizerBase

from forerun import AsyncLLM, errors
from forerun.control.config import SpeculativeConfig, arms_of, list_members
from forerun.drafters import default_length
from forerun.engine.prompts import Speculative
from forerun.serve import logs
from forerun.serve.guards import CLIENT
from forerun.serve.protocol.errors import ApiError, bad_request, refusal
from forerun.serve.protocol.requests import Speculation
from forerun.serve.settings import ServeSettings
from forerun.serve.traffic import Traffic
from forerun.types import RequestOutput, SamplingParams, StreamChunk
from forerun.writing import TokenizerIdentity

log = logging.getLogger(__name__)
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # A gauge beside each counter that no dashboard reads

CLOSING_S = 0.2  # How long the engine's thread may take to end once the drain time is over
PREDICTION = "prediction"  # The drafter of Predicted Outputs
GREETING = ({"role": "user", "content": "Hello"},)  # The conversation that a chat template is tried with


class Session:
    """Serves one model; `load` makes the engine, which takes long, so it runs beside the event loop. Requests may call
    the model by its `aliases`, too, which are not listed.
    """

    def __init__(self, settings: ServeSettings, load: Callable[[], AsyncLLM], aliases: Sequence[str] = ()) -> None:
        self.settings, self._load = settings, load
        self.names = tuple(dict.fromkeys((*settings.model_names, *aliases)))  # All that requests may call the model by
        self.url = ""  # Where the server listens, for the log
        self.state = State.LOADING
        self.failure: BaseException | None = None  # Why the model could not be loaded
        self._held = Counter[str]()  # Completions of each client that wait or run
        self.cut_off = 0  # Completions that were still running when the drain time was over
        self.metrics = Metrics(settings.model_name, {"vllm:": (ENGINE, self._engine_figures)})
        self._engine: AsyncLLM | None = None
        self._traffic: Traffic | None = None
        self._drained_by = 0.0
        self._closing: asyncio.Future[None] | None = None

    @property
    def engine(self) -> AsyncLLM:
        """Return the engine; an ApiError (503) while it is not there, or no longer."""
        health = self.health
        if self._engine is None or health not in (State.READY, State.SLEEPING):
            raise ApiError(503, f"the server is {health.value}", code=health.value, retry_after_s=1)
        return self._engine

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        tokenizer = self.engine.llm.tokenizer
        assert tokenizer is not None, "the server loads a model with its tokenizer"
        return tokenizer

    @property
    def in_flight(self) -> int:
        """Return the number of completions that wait or run."""
        return self._held.total()

    @property
    def health(self) -> State:
        """Return `state`, or FROZEN where the engine has been at one step for longer than the
        operator allows, or SLEEPING.
        """
        if self._engine is None or self.state is not State.READY:
            return self.state
        if self._engine.busy_s > self.settings.step_timeout_s:
            return State.FROZEN
        return State.SLEEPING if self._engine.llm.is_sleeping else State.READY

    @property
    def drain_left_s(self) -> float:
        """Return what is left of the drain time, seconds."""
        return max(0.0, self._drained_by - time.monotonic())

    @property
    def stuck(self) -> bool:
        """Return whether a thread still loads or computes after `drain`; only the end of the
        process can end it.
        """
        if self._engine is None:
            return self.state is not State.FAILED
        return self._closing is None or not self._closing.done()

    async def start(self) -> None:
        """Load the model; `state` and `failure` tell how it ended."""
        began = time.perf_counter()
        try:
            self._engine = await asyncio.to_thread(self._open)
        except BaseException as error:
            if errors.of_the_process(error) or isinstance(error, asyncio.CancelledError):
                raise
            self.state, self.failure = State.FAILED, error
            if isinstance(error, errors.ForerunError | OSError):
                log.error("%s", error)
            else:
                log.error("the model could not be loaded, for a reason that nobody expected", exc_info=error)
            return
        if self.state is State.LOADING:
            self.state = State.READY
            llm = self._engine.llm
            log.info(
                "serving %s (%s), drafter %s, %d tokens of context, %d rows, at %s, after %.1f s",
                self.settings.model_name,
                llm.target.runs_as,
                "none" if llm.speculative is None else llm.speculative.method,
                llm.max_model_len,
                llm.target.rows,
                self.url,
                time.perf_counter() - began,
            )

    def _open(self) -> AsyncLLM:
        """Return the engine, and try here what would fail at the first request."""
        engine = self._load()
        if engine.llm.tokenizer is not None and engine.llm.tokenizer.chat_template:
            try:
                engine.llm.chat_prompt(GREETING)
            except errors.ArgumentError as error:
                raise errors.CheckpointError(f"the model's chat template cannot be used: {error}") from error
        if self.settings.record_traffic is not None and engine.llm.tokenizer is not None:
            folder, vocabulary = self.settings.record_traffic, TokenizerIdentity.of(engine.llm.tokenizer).vocabulary
            self._traffic = Traffic(folder, most_bytes=self.settings.record_traffic_bytes, vocabulary=vocabulary)
            log.info("traffic is recorded in %s", folder)
        # Every drafter that a request may choose is built once, for the longest drafts that a request may have.
        configured = engine.llm.speculative
        for name in (*self.settings.client_drafters, PREDICTION):
            if configured is None or name != configured.method:
                length = default_length(name)
                most = None if length is None else max(length, self.settings.max_speculative_tokens)
                engine.offer({"method": name} | ({} if most is None else {"num_speculative_tokens": most}))
        return engine

    def begin_drain(self) -> None:
        """Take no more requests from now on, and begin the drain time. A signal handler may call
        it.
        """
        if self.state not in (State.DRAINING, State.FAILED):
            self.state = State.DRAINING
            self._drained_by = time.monotonic() + self.settings.drain_s

    async def drain(self) -> None:
        """Wait for running completions until the drain time is over, cut off the others and close the engine, once."""
        self.begin_drain()
        if self.in_flight:
            log.info("draining: %d completions run or wait, for %.0f s at most", self.in_flight, self.drain_left_s)
        while self.in_flight and self.drain_left_s:
            await asyncio.sleep(0.02)
        if self._engine is None or self._closing is not None:
            return
        if self.in_flight:
            self.cut_off = self.in_flight
            log.warning("%d completions were cut off at the end of the drain time", self.cut_off)
        if self._traffic is not None:
            self._traffic.close()
        self._closing = asyncio.ensure_future(self._engine.close())
        await asyncio.wait([self._closing], timeout=self.drain_left_s + CLOSING_S)

    @contextmanager
    def admitted(self, completions: int) -> Iterator[None]:
        """Hold room for so many completions while the block runs; an ApiError (429) where the queue is
        full, or (503) where the server sleeps.

        Where there are several API keys, one may hold no more completions than stay free: whoever comes
        next finds room.
        """
        if self.health is State.SLEEPING:
            raise ApiError(503, "the server sleeps until POST /wake_up", code=State.SLEEPING.value, retry_after_s=1)
        client = CLIENT.get().name
        most = self.settings.queue_for(completions)
        held = self._held[client]
        free = most - self.in_flight - completions
        if free < 0 or (len(self.settings.api_keys) > 1 and held + completions > max(free, 1)):
            of_this_key = f", {held} of them this key's, which may hold as many as stay free" if free >= 0 else ""
            raise ApiError(
                429,
                f"{self.in_flight} completions wait or run{of_this_key}; the server takes {most}; try again later",
                code="queue_full",
                retry_after_s=1,
            )
        self._held[client] += completions
        try:
            yield
        finally:
            self._held -= Counter({client: completions})  # which leaves out who holds none

    async def answer(self, job: Job) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one request; leaving early frees its rows."""
        stream = self.engine.stream(job.prompt, job.params, max_unread=self.settings.stream_buffer, **job.options)
        record = self._count_admission(job)
        begun, written, read = False, 0, 0
        reason: str | None = "abort"  # unless it comes to an end of its own, fails or is refused
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    written, read = written + len(chunk.tokens), read or len(chunk.prompt_token_ids or ())
                    if chunk.output is not None:
                        reason = None
                        self._finish(job, chunk.output)
                    if chunk.since_last_s is not None:
                        self.metrics.observe("vllm:inter_token_latency_seconds", chunk.since_last_s)
                    begun = True
                    yield self._hide(chunk)
        except (errors.NumericError, errors.RequestError, errors.EngineError) as error:
            reason = "error"
            if isinstance(error, errors.EngineError) and self.state is State.DRAINING:
                raise ApiError(503, "the server was stopped", code=self.state.value) from error
            raise
        except (errors.ForerunError, ValueError) as error:
            if begun:
                reason = "abort" if isinstance(error, errors.SlowReaderError) else "error"
            else:
                reason = None
                self.metrics.count("forerun:answers_refused", job.params.n)
            raise refusal(error, job.names) from error
        except Exception:
            reason = "error"
            raise
        finally:
            if reason is not None:
                self.metrics.count("vllm:request_success", job.params.n, reason)
                if record is not None:
                    record.count(read, written, [reason] * job.params.n)

    async def load_drafter(self, model: str) -> None:
        """Have new requests drafted for by another head or draft model; an ApiError (400) where it cannot be."""
        try:
            await self.engine.load_drafter(model)
        except errors.EngineError:
            raise
        except errors.ForerunError as error:
            raise ApiError(400, str(error), param="model", to_operator=True) from error

    def _count_admission(self, job: Job) -> logs.RequestRecord | None:
        """Count the job's completions, and note in the request's record, which is returned, what drafts
        for them.
        """
        self.metrics.count("forerun:answers_admitted", job.params.n)
        requested = job.options["speculative"]
        configured = self.engine.llm.speculative
        record = logs.RECORD.get()
        if record is not None:
            chosen = requested["method"] if isinstance(requested, dict) else None
            record.drafter = chosen or (configured.method if requested is None and configured is not None else "none")
            record.prompts += [job.prompt] if self.settings.log_prompts else []
        return record

    def _finish(self, job: Job, output: RequestOutput) -> None:
        """Count the completions of a job that came to an end of their own, and record them where that is wanted."""
        left = self.engine.llm.max_model_len - len(output.prompt_token_ids)
        most = left if job.params.max_tokens is None else min(job.params.max_tokens, left)
        self.metrics.finished(output, max_tokens=most)
        if (record := logs.RECORD.get()) is not None:
            record.finished(output)
        if self._traffic is not None and job.recorded:
            self._traffic.record(CLIENT.get().traffic, output)

    def _hide(self, chunk: StreamChunk) -> StreamChunk:
        """Return the chunk without anything that the operator keeps private."""
        if chunk.output is None or self.settings.enable_prompt_tokens_details:
            return chunk
        return replace(chunk, output=replace(chunk.output, num_cached_tokens=None))

    def speculation(self, request: Speculation | None, *, predicted: bool) -> Speculative:
        """Return what drafts for a request: the server's drafter unless the client names another
        one that it may have.

        `predicted` says that it brings a prediction, which `prediction` copies unless the server's
        own drafter can.
        """
        if request is None and not predicted:
            return None
        request = request or Speculation()
        if not request.enabled:
            return False
        configured = self.engine.llm.speculative
        name = request.drafter or (configured.method if configured is not None else None)
        if predicted and request.drafter is None and (configured is None or not _copies_prediction(configured)):
            name = PREDICTION
        self._check_drafter(name, predicted=predicted)
        assert name is not None, "else it was refused"
        base: dict[str, Any] = {}
        if configured is not None and name == configured.method:
            base = {**configured.drafter_options, "adaptive": configured.adaptive, "rule": configured.rule}
        length = request.num_speculative_tokens
        most = self.longest(name)
        if length is not None and length > most:
            raise bad_request(
                f"num_speculative_tokens is at most {most} for {name!r} here, got {length}",
                "speculative.num_speculative_tokens",
            )
        if not base:
            length = length or default_length(name)
        requested = {"num_speculative_tokens": length, "rule": request.rule}
        return {"method": name, **base, **{key: value for key, value in requested.items() if value is not None}}

    def _check_drafter(self, name: str | None, *, predicted: bool) -> None:
        configured = self.engine.llm.speculative
        offered = ", ".join(self.drafters()) or "none"
        if name is None:
            raise bad_request(f"the server has no drafter of its own; name one: {offered}", "speculative.drafter")
        if predicted and name == PREDICTION:
            return
        if name not in self.drafters():
            raise bad_request(f"drafter {name!r} is not offered; offered: {offered}", "speculative.drafter")
        config = configured if configured is not None and name == configured.method else SpeculativeConfig(method=name)
        if predicted and not _copies_prediction(config):
            raise bad_request(
                f"drafter {name!r} cannot use a prediction; leave out speculative.drafter to have it copied, or "
                "leave out the prediction",
                "speculative.drafter",
            )

    def longest(self, name: str) -> int:
        """Return the tokens that a request may have a drafter draft in a step: never more than it
        was built for.
        """
        most, own = self.settings.max_speculative_tokens, self.engine.llm.speculative
        if own is None or name != own.method:
            return most
        return min(most, own.num_speculative_tokens or default_length(name) or most)

    def drafters(self) -> list[str]:
        """Return the drafters that a request may choose from, the server's own first."""
        own = self._engine.llm.speculative if self._engine is not None else None
        mine = [own.method] if own is not None else []
        return list(dict.fromkeys([*mine, *self.settings.client_drafters]))

    def _engine_figures(self) -> dict[str, float]:
        if self._engine is None:
            return {name: 0.0 for texts in ENGINE.values() for name in texts}
        engine, target = self._engine.llm.engine, self._engine.llm.target
        return {
            "num_requests_running": engine.running,
            "num_requests_waiting": engine.waiting,
            "kv_cache_usage_perc": sum(target.lengths) / (target.rows * target.slots),
            "num_preemptions": engine.preemptions,
            "prefix_cache_queries": engine.prefix_queries,
            "prefix_cache_hits": engine.prefix_hits,
        }


def _copies_prediction(config: SpeculativeConfig) -> bool:
    """Return whether the drafter `prediction` is the configured one, or among its members."""
    return any(member.get("method") == PREDICTION for arm in arms_of(config) for member in list_members(arm.named))


class State(StrEnum):
    """The state of a server."""

    LOADING = "loading"
    READY = "ready"
    FROZEN = "frozen"
    SLEEPING = "sleeping"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One prompt to answer."""

    prompt: dict[str, Any]
    params: SamplingParams
    options: dict[str, Any]  # Options of `AsyncLLM.stream`: drafter, client, salt, time limit
    names: Mapping[str, str] = field(default_factory=dict)  # The request's names for the engine's parameters
    recorded: bool = True  # Where traffic is recorded, it may be

    @property
    def copies_prediction(self) -> bool:
        """Return whether everything drafted for it is the client's prediction."""
        wanted = self.options["speculative"]
        return wanted is False or (isinstance(wanted, dict) and wanted["method"] == PREDICTION)


_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_COUNTERS: dict[str, tuple[str, ...]] = {
    "vllm:prompt_tokens": ("Prompt tokens of finished requests.",),
    "vllm:prompt_tokens_cached": ("Prompt tokens of finished requests that were cached.",),
    "vllm:generation_tokens": ("Tokens of finished requests.",),
    "vllm:request_success": ("Completions that ended, by reason.", "finished_reason"),
    "forerun:answers_admitted": ("Completions that were admitted; each ends in a reason, or is refused.",),
    "forerun:answers_refused": ("Completions that the engine refused after they were admitted.",),
    "forerun:connections_refused": ("Connections cut, by reason.", "code"),
    "forerun:http_requests": ("Requests by path and status.", "route", "status"),
    "forerun:passes": (
        "Target passes that gave tokens, by completion: generation tokens over these are tokens per pass.",
    ),
    "vllm:spec_decode_num_drafts": ("Target passes in which something was drafted.",),
    "vllm:spec_decode_num_draft_tokens": ("Drafted tokens.",),
    "vllm:spec_decode_num_accepted_tokens": ("Drafted tokens that were accepted.",),
    "forerun:drafter_errors": ("Times that a drafter failed; decoding went on without it.",),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("Accepted tokens by position in the draft.", "position"),
}
"""Each counter's name maps to its text and its labels besides the model's."""
_TOKENS = tuple(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5))
_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From queueing to the first token.", _SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two passes that gave a completion tokens.", _SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean time per later token.", _SECONDS),
    "vllm:e2e_request_latency_seconds": ("From queueing to the last token.", _SECONDS),
    "vllm:request_queue_time_seconds": ("From queueing to the first row of the cache.", _SECONDS),
    "vllm:request_prefill_time_seconds": ("From the first row to the first token.", _SECONDS),
    "vllm:request_decode_time_seconds": ("From the first to the last token.", _SECONDS),
    "vllm:request_inference_time_seconds": ("From the first row to the last token.", _SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens of a request that were not cached.", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens of a completion.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("Tokens of a request's longest completion.", _TOKENS),
    "vllm:request_params_max_tokens": ("max_tokens of a request, at most what its context holds.", _TOKENS),
    "vllm:request_params_n": ("n of a request.", (1, 2, 5, 10, 20)),
}
"""Each histogram's name maps to its text and the upper bounds of its buckets."""
Texts = Mapping[type[CounterMetricFamily | GaugeMetricFamily], Mapping[str, str]]
ENGINE: Texts = {
    GaugeMetricFamily: {
        "num_requests_running": "Completions that hold a row.",
        "num_requests_waiting": "Completions that wait.",
        "kv_cache_usage_perc": "Share of the cache's slots in use.",
    },
    CounterMetricFamily: {
        "num_preemptions": "Times a completion was preempted.",
        "prefix_cache_queries": "Prompt tokens looked up.",
        "prefix_cache_hits": "Prompt tokens found in the cache.",
    },
}


class Metrics(Collector):
    """The metrics of one server: its own counters, and by prefix figures that are read from elsewhere when scraped."""

    def __init__(self, model_name: str, read: Mapping[str, tuple[Texts, Callable[[], Mapping[str, float]]]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)  # CPU seconds, resident bytes, open files; Linux alone
        self._model, self._read = model_name, read
        self._counters = dict[str, prometheus_client.Counter]()
        for name, (text, *labels) in _COUNTERS.items():
            counter = prometheus_client.Counter(name, text, ["model_name", *labels], registry=self.registry)
            self._counters[name] = counter
            if not labels:
                counter.labels(model_name)  # there from the start, at 0
        self._histograms = {
            name: Histogram(name, text, ["model_name"], registry=self.registry, buckets=bounds).labels(model_name)
            for name, (text, bounds) in _HISTOGRAMS.items()
        }

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to one of the counters."""
        self._counters[name].labels(self._model, *labels).inc(amount)

    def finished(self, output: RequestOutput, *, max_tokens: int) -> None:
        """Count a request that ended, whose completions might have had so many tokens each."""
        prompt, cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        lengths = [len(answer.token_ids) for answer in output.outputs]
        self.count("vllm:prompt_tokens", prompt)
        self.count("vllm:prompt_tokens_cached", cached)
        self.observe("vllm:request_prompt_tokens", prompt)
        self.observe("vllm:request_prefill_kv_computed_tokens", prompt - cached)
        self.observe("vllm:request_max_num_generation_tokens", max(lengths))
        self.observe("vllm:request_params_max_tokens", max_tokens)
        self.observe("vllm:request_params_n", len(lengths))
        for answer in output.outputs:
            self.count("vllm:generation_tokens", len(answer.token_ids))
            self.observe("vllm:request_generation_tokens", len(answer.token_ids))
            self.count("vllm:request_success", 1, answer.finish_reason or "abort")
            stats = answer.speculation
            self.count("forerun:passes", stats.num_passes)
            self.count("vllm:spec_decode_num_drafts", stats.num_spec_steps)
            self.count("vllm:spec_decode_num_draft_tokens", stats.num_draft_tokens)
            self.count("vllm:spec_decode_num_accepted_tokens", stats.num_accepted_draft_tokens)
            self.count("forerun:drafter_errors", stats.drafter_errors)
            for position, count in enumerate(stats.accepted_per_depth):
                self.count("vllm:spec_decode_num_accepted_tokens_per_pos", count, str(position))
        queue, first, decode = output.queue_s, output.time_to_first_token_s, output.decode_s
        if queue is None or first is None or decode is None:
            return
        self.observe("vllm:time_to_first_token_seconds", first)
        self.observe("vllm:e2e_request_latency_seconds", first + decode)
        self.observe("vllm:request_queue_time_seconds", queue)
        self.observe("vllm:request_prefill_time_seconds", first - queue)
        self.observe("vllm:request_decode_time_seconds", decode)
        self.observe("vllm:request_inference_time_seconds", first - queue + decode)
        if max(lengths) > 1:
            self.observe("vllm:request_time_per_output_token_seconds", decode / (max(lengths) - 1))

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of the histograms."""
        self._histograms[name].observe(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the figures that are kept elsewhere, as they are now."""
        for prefix, (texts, read) in self._read.items():
            figures = read()
            for kind, named in texts.items() if figures else ():
                for name, text in named.items():
                    family = kind(f"{prefix}{name}", text, labels=["model_name"])
                    family.add_metric([self._model], float(figures[name]))
                    yield family

    def text(self) -> bytes:
        """Return the metrics in the exposition format."""
        return prometheus_client.generate_latest(self.registry)
