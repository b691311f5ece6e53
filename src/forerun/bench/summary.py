"""This module summarises a measurement under the names of ``vllm bench serve``, and finds what is
worse than before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from forerun.bench.client import BenchAnswer
from forerun.bench.counters import sum_counts
from forerun.bench.load import LoadResult
from forerun.errors import ArgumentError, nearest

PERCENTILES = (90, 99)
HIGHER, LOWER = 1, -1


class Figure(NamedTuple):
    """A `Figure` is one figure of a load, with its names on the page and in the terminal."""

    key: str  # In the load's record
    words: str
    column: str = ""  # Column of the terminal's table, times in ms and as medians; empty: none
    of_parts: bool = False  # True where the page shows it for each category
    better: int = 0  # `HIGHER` or `LOWER`, where `worse` compares it


FIGURES = (
    Figure("completed", "requests answered", "done", of_parts=True),
    Figure("failed", "requests failed", "failed", better=LOWER),
    Figure("output_throughput", "tokens per second, all users together", "tok/s", better=HIGHER),
    Figure("speedup", "times the baseline's tokens per second", "x"),
    Figure("identical_answers", "answers that are the baseline's, too"),
    Figure("request_throughput", "requests per second"),
    Figure("request_goodput", "good requests per second", "good/s"),
    Figure("median_ttft_ms", "time to first token, median (ms)", "TTFT", of_parts=True, better=LOWER),
    Figure("p99_ttft_ms", "time to first token, 99 % (ms)", "p99"),
    Figure("median_tpot_ms", "time per output token, median (ms)", "TPOT", of_parts=True, better=LOWER),
    Figure("p99_tpot_ms", "time per output token, 99 % (ms)", "p99"),
    Figure("median_itl_ms", "gap between chunks, median (ms)"),
    Figure("median_e2el_ms", "latency, median (ms)"),
    Figure("tokens_per_pass", "tokens per pass", "tok/pass", of_parts=True, better=HIGHER),
    Figure("spec_decode_acceptance_length", "mean acceptance length", "acc len", of_parts=True, better=HIGHER),
    Figure("spec_decode_acceptance_rate", "accepted share of drafted tokens (%)", "acc%", of_parts=True),
)


def select_figures(records: Collection[Mapping[str, Any]]) -> list[Figure]:
    """Return the figures that at least one of the records has."""
    return [figure for figure in FIGURES if any(record.get(figure.key) is not None for record in records)]


def parse_objectives(words: Sequence[str]) -> dict[str, float]:
    """Parse ``ttft:200`` and the like into the milliseconds that a good request stays within;
    ArgumentError if malformed.
    """
    found = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in Latency._fields:
            raise ArgumentError(
                f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {word!r}{nearest(name, Latency._fields)}"
            )
        try:
            found[name] = float(limit)
        except ValueError:
            found[name] = math.nan
        if not 0 < found[name] < math.inf:
            raise ArgumentError(f"--goodput {word!r}: expected milliseconds above 0 behind the colon")
    return found


class Latency(NamedTuple):
    """A `Latency` holds one request's times in ms: to its first token, for each token behind it, to
    its end.
    """

    ttft: float
    tpot: float | None
    e2el: float

    @classmethod
    def of(cls, answer: BenchAnswer) -> Latency:
        """Return the latency of an answer; one without text counts as begun when it ended."""
        tpot = answer.tpot_s
        return cls(1e3 * (answer.ttft_s or answer.seconds), None if tpot is None else 1e3 * tpot, 1e3 * answer.seconds)

    def within(self, limits: Mapping[str, float]) -> bool:
        return all((getattr(self, name) or 0.0) <= limit for name, limit in limits.items())


def summarise(found: LoadResult, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Summarise one load as a record of plain values.

    The record has counts, requests and tokens per second, times in ms, speculation, the same for
    each category where there are several, and why requests failed. `limits` are those of the
    goodput, in ms.
    """
    good = [answer for answer in found.answers if answer.error is None]
    failures: dict[str, int] = {}
    for answer in found.answers:
        if answer.error is not None:
            failures[answer.error] = failures.get(answer.error, 0) + 1
    load = found.load
    record: dict[str, Any] = {
        "load": load.label,
        "max_concurrency": load.concurrency,
        "request_rate": load.rate,
        "duration": found.seconds,
        "completed": len(good),
        "failed": len(found.answers) - len(good),
        "failures": failures,
        "tokens_counted_by_server": all(answer.counted for answer in good),
        **_part(good, found.seconds),
    }
    if limits:
        within = sum(Latency.of(answer).within(limits) for answer in good)
        record |= {"request_goodput": within / found.seconds, "goodput_ms": dict(limits)}
    if found.speculation is not None:
        record |= found.speculation.record()
    categories = sorted({answer.category for answer in good})
    if len(categories) > 1:
        record["categories"] = {name: _category([a for a in good if a.category == name]) for name in categories}
    return record


def _category(answers: Sequence[BenchAnswer]) -> dict[str, Any]:
    counted = sum_counts(answer.speculation for answer in answers)
    record = {"completed": len(answers), **_part(answers, None)}
    return record | ({} if counted is None else counted.record())


def _part(answers: Sequence[BenchAnswer], seconds: float | None) -> dict[str, Any]:
    tokens = {"total_input_tokens": sum(a.prompt_tokens for a in answers)}
    tokens["total_output_tokens"] = sum(a.tokens for a in answers)
    found: dict[str, Any] = dict(tokens)
    if seconds is not None and seconds > 0:
        found["request_throughput"] = len(answers) / seconds
        found["output_throughput"] = tokens["total_output_tokens"] / seconds
        found["total_token_throughput"] = sum(tokens.values()) / seconds
    latencies = [Latency.of(answer) for answer in answers if answer.tokens]
    values = {
        "ttft": [one.ttft for one in latencies],
        "tpot": [one.tpot for one in latencies if one.tpot is not None],
        # Several tokens come in one chunk where drafts are accepted: of a speculative server this says little.
        "itl": [1e3 * gap for answer in answers for gap in answer.gaps_s],
        "e2el": [one.e2el for one in latencies],
    }
    for name, times in values.items():
        if times:
            found |= {f"mean_{name}_ms": float(np.mean(times)), f"median_{name}_ms": float(np.median(times))}
            found |= {f"std_{name}_ms": float(np.std(times))}
            found |= {f"p{part}_{name}_ms": float(np.percentile(times, part)) for part in PERCENTILES}
    return found


def find_older_loads(before: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the loads of an older record that have one of the `labels`; ArgumentError if none has."""
    known = {load["load"]: load for load in before.get("loads", ())}
    found = {label: known[label] for label in labels if label in known}
    if not found:
        raise ArgumentError(
            f"the older result has nothing to compare with: it holds {', '.join(known) or 'no load'}, asked for is "
            f"{', '.join(labels)}"
        )
    return found


def find_worse(now: Mapping[str, Any], before: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return a sentence for each figure that is worse than in an older record of the same loads by
    more than `tolerance`.

    `tolerance` is a share. A missing figure and each additional failed request count as worse, too.
    ArgumentError: the two records have no load in common.
    """
    loads, found = {load["load"]: load for load in now["loads"]}, []
    for label, old in find_older_loads(before, [*loads]).items():
        load = loads[label]
        for figure in FIGURES:
            new, was = load.get(figure.key), old.get(figure.key)
            if not figure.better or was is None:
                continue
            if new is None:
                found.append(f"{label}: {figure.key} {was:.4g} -> none")
            elif figure.better * (new - was) < -was * (0 if figure.key == "failed" else tolerance):
                share = f" ({(new - was) / was:+.1%})" if was else ""
                found.append(f"{label}: {figure.key} {was:.4g} -> {new:.4g}{share}")
    return found
