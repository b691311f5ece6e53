"""Prometheus metrics under vLLM's names, so that its dashboards, ``vllm bench`` and AIPerf read this server.

What vLLM has no name for begins with ``forerun:``.

Mean acceptance length in PromQL: ``1 + rate(vllm:spec_decode_num_accepted_tokens_total[1m]) /
rate(vllm:spec_decode_num_drafts_total[1m])``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from forerun.types import RequestOutput, SpeculationStats

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)


class _Watched(Collector):
    """A counter whose value somebody else counts; `Counter` itself can only be told what is added."""

    def __init__(self, name: str, help_text: str, model: str, value: Callable[[], float]) -> None:
        self._name, self._help, self._model, self._value = name, help_text, model, value

    def collect(self) -> Iterable[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._help, labels=["model_name"])
        family.add_metric([self._model], self._value())
        return [family]


class Metrics:
    """The metrics of one server."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generated = self._counter("generation_tokens", "Tokens of finished requests.")
        self._finished = self._counter("request_success", "Answers that ended, by reason.", "finished_reason")
        self._admitted = self._counter("answers_admitted", "Answers that were taken on.", prefix="forerun")
        self._refused = self._counter(
            "answers_refused", "Answers that the engine refused after they were taken on.", prefix="forerun"
        )
        self._hung_up = self._counter("connections_refused", "Connections cut, by reason.", "code", prefix="forerun")
        self._answered = self._counter(
            "http_requests", "Requests by path and status.", "route", "status", prefix="forerun"
        )
        self._drafts = self._counter("spec_decode_num_drafts", "Target passes in which something was drafted.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._failures = self._counter(
            "drafter_errors", "Times that a drafter failed; the answer went on without it.", prefix="forerun"
        )
        self._per_position = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by place in the draft.", "position"
        )
        self._first = self._histogram("time_to_first_token_seconds", "From queueing to the first token.")
        self._per_token = self._histogram("request_time_per_output_token_seconds", "Mean time per later token.")
        self._whole = self._histogram("e2e_request_latency_seconds", "From queueing to the last token.")

    def watch(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A gauge that is read when asked for."""
        gauge = Gauge(f"vllm:{name}", help_text, ["model_name"], registry=self.registry)
        gauge.labels(self._model).set_function(value)

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP request that ended."""
        self._answered.labels(self._model, route, str(status)).inc()

    def hung_up(self, code: str) -> None:
        """Count a connection that ended without the application: too many, too slow, unread, or no HTTP."""
        self._hung_up.labels(self._model, code).inc()

    def admitted(self, answers: int) -> None:
        """Count answers that were taken on. Each of them ends in `finished`, `dropped` or `refused`."""
        self._admitted.labels(self._model).inc(answers)

    def dropped(self, answers: int, reason: str) -> None:
        """Count answers that came to no end of their own: ``abort`` or ``error``."""
        self._finished.labels(self._model, reason).inc(answers)

    def refused(self, answers: int) -> None:
        """Count answers that the engine refused before they began."""
        self._refused.labels(self._model).inc(answers)

    def watch_counter(self, name: str, help_text: str, value: Callable[[], float]) -> None:
        """A counter that is kept elsewhere and read when asked for."""
        self.registry.register(_Watched(f"vllm:{name}", help_text, self._model, value))

    def finished(self, output: RequestOutput) -> None:
        """Count a request that ended."""
        self._prompt.labels(self._model).inc(len(output.prompt_token_ids))
        for answer in output.outputs:
            self._generated.labels(self._model).inc(len(answer.token_ids))
            self._finished.labels(self._model, answer.finish_reason or "abort").inc()
            self._speculation(answer.speculation)
        first, decode = output.time_to_first_token_s, output.decode_s
        if first is None or decode is None:
            return
        longest = max(len(answer.token_ids) for answer in output.outputs)
        self._first.labels(self._model).observe(first)
        self._whole.labels(self._model).observe(first + decode)
        if longest > 1:
            self._per_token.labels(self._model).observe(decode / (longest - 1))

    def text(self) -> bytes:
        """In the exposition format."""
        return generate_latest(self.registry)

    def _speculation(self, stats: SpeculationStats) -> None:
        self._drafts.labels(self._model).inc(stats.num_spec_steps)
        self._drafted.labels(self._model).inc(stats.num_draft_tokens)
        self._accepted.labels(self._model).inc(stats.num_accepted_draft_tokens)
        self._failures.labels(self._model).inc(stats.drafter_errors)
        for position, count in enumerate(stats.accepted_per_depth):
            self._per_position.labels(self._model, str(position)).inc(count)

    def _counter(self, name: str, help_text: str, *labels: str, prefix: str = "vllm") -> Counter:
        counter = Counter(f"{prefix}:{name}", help_text, ["model_name", *labels], registry=self.registry)
        if not labels:
            counter.labels(self._model)  # there from the start, at 0
        return counter

    def _histogram(self, name: str, help_text: str) -> Histogram:
        return Histogram(f"vllm:{name}", help_text, ["model_name"], registry=self.registry, buckets=_SECONDS)
