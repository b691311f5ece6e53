"""Online adaptation in Prometheus: ``forerun:adaptation_*``, read when asked for. Nothing where nothing adapts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forerun.engine.adapting import AdaptationStats

_COUNTERS: dict[str, str] = {
    "examples": "Positions collected.",
    "rejected_examples": "Collected positions where a draft was rejected.",
    "updates": "Steps of the optimizer.",
    "swaps": "Candidates that came to serve.",
    "discarded": "Candidates that were not better than the weights that serve.",
    "rollbacks": "Swaps undone because acceptance fell.",
}
_GAUGES: dict[str, str] = {
    "stored_bytes": "Collected positions in memory, bytes.",
    "version": "Of the weights that serve; 0 are those of the given checkpoint.",
    "expected_acceptance": "Of the weights that served when the last candidate was judged, on held back positions.",
    "candidate_acceptance": "Of the last candidate, on the same positions.",
    "acceptance": "Share of judged drafted tokens that were kept since the last swap, over the last 2000.",
    "share": "Seconds of work per second of wall time.",
    "running": "1 while it collects and trains, 0 once an error has ended it.",
}


class AdaptationMetrics(Collector):
    """The figures of one server's drafter."""

    def __init__(self, model_name: str, read: Callable[[], AdaptationStats | None]) -> None:
        self._model, self._read = model_name, read

    def describe(self) -> Iterator[Metric]:
        """Names without figures: the registry asks before there is an engine."""
        return self._families(None)

    def collect(self) -> Iterator[Metric]:
        """The figures as they are now."""
        stats = self._read()
        return iter(()) if stats is None else self._families(stats)

    def _families(self, stats: AdaptationStats | None) -> Iterator[Metric]:
        for kind, texts in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items():
                family = kind(f"forerun:adaptation_{name}", text, labels=["model_name"])
                if stats is not None:
                    family.add_metric([self._model], float(getattr(stats, name)))
                yield family
