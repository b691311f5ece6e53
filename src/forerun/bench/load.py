"""This module puts a server under load and says how it did.

It simulates users, several at a time or arriving at a rate, each of whom sends the prompts of its task
in turn; runs the loads one after the other, on the server and on its baseline, and keeps what is
done; summarises a measurement under the names of ``vllm bench serve``; and writes the result as a
picture and as one self-contained HTML file.
"""

from __future__ import annotations

import asyncio
import io
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.bench.client import (
    BenchAnswer,
    RequestOptions,
    Server,
    SpeculationCounts,
    diff_counts,
    sum_counts,
)
from forerun.bench.workloads import DEMO, Task
from forerun.endpoints import ServerError
from forerun.errors import ArgumentError, nearest, refuse
from forerun.plots import COLOURS, pyplot, save
from forerun.training.data.records import Message
from forerun.writing import write_file

Tell = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchLoad:
    """The way in which requests come: exactly one of concurrency and rate is given."""

    concurrency: int | None = None
    """Users who each send the next request as soon as they have a response."""
    rate: float | None = None
    """Users who arrive per second, whether or not others have a response."""
    burstiness: float = 1.0
    """Evenness of the arrivals: 1 is Poisson, less comes in bursts, more is evener (shape of the
    gamma distribution).
    """

    def __post_init__(self) -> None:
        refuse(
            ((self.concurrency is None) == (self.rate is None), "a load is either --concurrency or --request-rate"),
            (
                self.concurrency is not None and self.concurrency < 1,
                f"--concurrency must be at least 1, got {self.concurrency}",
            ),
            (
                self.rate is not None and not 0 < self.rate < float("inf"),
                f"--request-rate must be above 0 requests per second, got {self.rate}",
            ),
            (not 0 < self.burstiness < float("inf"), f"--burstiness must be a number above 0, got {self.burstiness}"),
            (
                self.rate is None and self.burstiness != 1,
                "--burstiness is of arrivals, which --request-rate has: leave it out, or give a rate",
            ),
        )

    @property
    def label(self) -> str:
        """Return the load's name for tables, which is unique in a run."""
        if self.rate is not None:
            evenness = "" if self.burstiness == 1 else f", burstiness {self.burstiness:g}"
            return f"{self.rate:g} requests/s{evenness}"
        return "1 user" if self.concurrency == 1 else f"{self.concurrency} users"

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Return when each of `count` users comes, in seconds; all at once where the concurrency is
        given.
        """
        if self.rate is None:
            return [0.0] * count
        chance = random.Random(seed)
        now = 0.0
        arrivals = list[float]()
        for _ in range(count):
            arrivals.append(now)
            now += chance.gammavariate(self.burstiness, 1 / (self.rate * self.burstiness))
        return arrivals


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadResult:
    """The completions of one load on one server."""

    load: BenchLoad
    answers: Sequence[BenchAnswer]
    seconds: float
    """Seconds from the first request to the last completion."""
    speculation: SpeculationCounts | None
    """Counts from the server's metrics, else from its responses; None where neither has any."""


async def measure(
    server: Server, tasks: Sequence[Task], load: BenchLoad, asking: RequestOptions, tell: Tell = lambda done: None
) -> LoadResult:
    """Ask all `tasks`; `tell` is called with the number that are done."""
    arrivals = load.arrivals(len(tasks), seed=0)
    slots = asyncio.Semaphore(load.concurrency or len(tasks) or 1)
    before = await server.metrics()
    began = time.perf_counter()
    done = 0

    async def user(task: Task, arrival: float) -> list[BenchAnswer]:
        nonlocal done
        await asyncio.sleep(max(0.0, began + arrival - time.perf_counter()))
        async with slots:
            conversation = await converse(server, task, asking, began)
        done += 1
        tell(done)
        return conversation

    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user(task, at)) for task, at in zip(tasks, arrivals, strict=True)]
    answers = [answer for each in users for answer in each.result()]
    seconds = time.perf_counter() - began
    after = await server.metrics()
    counted = None if before is None or after is None else diff_counts(before, after)
    stated = sum_counts(answer.speculation for answer in answers)
    return LoadResult(load=load, answers=answers, seconds=seconds, speculation=counted or stated)


async def converse(server: Server, task: Task, asking: RequestOptions, began: float) -> list[BenchAnswer]:
    """Send one user's prompts, each behind the server's own completions; the first that fails is the
    last.
    """
    if not task.questions or asking.endpoint == "completions":
        return [await server.ask(task, asking, began)]
    history: list[Message] = []
    answers: list[BenchAnswer] = []
    for question in task.questions:
        answer = await server.ask(task, asking, began, history, question)
        answers.append(answer)
        if answer.error is not None:
            break
        history += [*question, dict[str, Any](role="assistant", content=answer.text)]
    return answers


PERCENTILES = (90, 99)
HIGHER, LOWER = 1, -1


class Figure(NamedTuple):
    """One figure of a load, with its names on the page and in the terminal."""

    key: str  # In the load's record
    words: str
    column: str = ""  # Column of the terminal's table, times in ms and as medians; empty: none
    of_parts: bool = False  # True where the page shows it for each category
    better: int = 0  # `HIGHER` or `LOWER`, where `worse` compares it


FIGURES = (
    Figure("completed", "requests completed", "done", of_parts=True),
    Figure("failed", "requests failed", "failed", better=LOWER),
    Figure("output_throughput", "tokens per second, all users together", "tok/s", better=HIGHER),
    Figure("speedup", "times the baseline's tokens per second", "x"),
    Figure("identical_answers", "completions that equal the baseline's"),
    Figure("request_throughput", "requests per second"),
    Figure("request_goodput", "good requests per second", "good/s"),
    Figure("median_ttft_ms", "time to first token, median (ms)", "TTFT ms", of_parts=True, better=LOWER),
    Figure("p99_ttft_ms", "time to first token, 99 % (ms)", "p99 ms"),
    Figure("median_tpot_ms", "time per output token, median (ms)", "TPOT ms", of_parts=True, better=LOWER),
    Figure("p99_tpot_ms", "time per output token, 99 % (ms)", "p99 ms"),
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
    limits = {}
    for word in words:
        name, _, limit = word.partition(":")
        if name not in Latency._fields:
            raise ArgumentError(
                f"--goodput takes ttft:MS, tpot:MS or e2el:MS, got {word!r}{nearest(name, Latency._fields)}"
            )
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < math.inf:
            raise ArgumentError(f"--goodput {word!r}: expected milliseconds above 0 behind the colon")
    return limits


class Latency(NamedTuple):
    """One request's times in ms: to its first token, for each token behind it, to its end."""

    ttft: float
    tpot: float | None
    e2el: float

    @classmethod
    def of(cls, answer: BenchAnswer) -> Latency:
        """Return the latency of a completion; one without text counts as begun when it ended."""
        tpot = answer.tpot_s
        return cls(1e3 * (answer.ttft_s or answer.seconds), None if tpot is None else 1e3 * tpot, 1e3 * answer.seconds)

    def within(self, limits: Mapping[str, float]) -> bool:
        return all((getattr(self, name) or 0.0) <= limit for name, limit in limits.items())


def summarise(result: LoadResult, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Summarise one load as a record of plain values.

    The record has counts, requests and tokens per second, times in ms, speculation, the same for
    each category where there are several, and why requests failed. `limits` are those of the
    goodput, in ms.
    """
    good = [answer for answer in result.answers if answer.error is None]
    failures: dict[str, int] = {}
    for answer in result.answers:
        if answer.error is not None:
            failures[answer.error] = failures.get(answer.error, 0) + 1
    load = result.load
    record: dict[str, Any] = {
        "load": load.label,
        "max_concurrency": load.concurrency,
        "request_rate": load.rate,
        "duration": result.seconds,
        "completed": len(good),
        "failed": len(result.answers) - len(good),
        "failures": failures,
        "tokens_counted_by_server": all(answer.counted for answer in good),
        **_part(good, result.seconds),
    }
    if limits:
        within = sum(Latency.of(answer).within(limits) for answer in good)
        record |= {"request_goodput": within / result.seconds, "goodput_ms": dict(limits)}
    if result.speculation is not None:
        record |= result.speculation.record()
    categories = sorted({answer.category for answer in good})
    if len(categories) > 1:
        record["categories"] = {name: _category([a for a in good if a.category == name]) for name in categories}
    return record


def _category(answers: Sequence[BenchAnswer]) -> dict[str, Any]:
    counted = sum_counts(answer.speculation for answer in answers)
    record = {"completed": len(answers), **_part(answers, None)}
    return record | ({} if counted is None else counted.record())


def _part(answers: Sequence[BenchAnswer], seconds: float | None) -> dict[str, Any]:
    tokens = {
        "total_input_tokens": sum(a.prompt_tokens for a in answers),
        "total_output_tokens": sum(a.tokens for a in answers),
    }
    record: dict[str, Any] = dict(tokens)
    if seconds is not None and seconds > 0:
        record["request_throughput"] = len(answers) / seconds
        record["output_throughput"] = tokens["total_output_tokens"] / seconds
        record["total_token_throughput"] = sum(tokens.values()) / seconds
    latencies = [Latency.of(answer) for answer in answers if answer.tokens]
    values = {
        "ttft": [latency.ttft for latency in latencies],
        "tpot": [latency.tpot for latency in latencies if latency.tpot is not None],
        # Several tokens come in one chunk where drafts are accepted: of a speculative server this says little.
        "itl": [1e3 * gap for answer in answers for gap in answer.gaps_s],
        "e2el": [latency.e2el for latency in latencies],
    }
    for name, times in values.items():
        if times:
            record |= {f"mean_{name}_ms": float(np.mean(times)), f"median_{name}_ms": float(np.median(times))}
            record |= {f"std_{name}_ms": float(np.std(times))}
            record |= {f"p{part}_{name}_ms": float(np.percentile(times, part)) for part in PERCENTILES}
    return record


def find_older_loads(before: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the loads of an older record that have one of the `labels`; ArgumentError if none has."""
    older = {load["load"]: load for load in before.get("loads", ())}
    common = {label: older[label] for label in labels if label in older}
    if not common:
        raise ArgumentError(
            f"the older result has nothing to compare with: it holds {', '.join(older) or 'no load'}, requested is "
            f"{', '.join(labels)}"
        )
    return common


def find_worse(now: Mapping[str, Any], before: Mapping[str, Any], tolerance: float) -> list[str]:
    """Return a sentence for each figure that is worse than in an older record of the same loads by
    more than `tolerance`.

    `tolerance` is a share. A missing figure and each additional failed request count as worse, too.
    ArgumentError: the two records have no load in common.
    """
    loads = {load["load"]: load for load in now["loads"]}
    complaints = []
    for label, old in find_older_loads(before, [*loads]).items():
        load = loads[label]
        for figure in FIGURES:
            new, was = load.get(figure.key), old.get(figure.key)
            if not figure.better or was is None:
                continue
            if new is None:
                complaints.append(f"{label}: {figure.key} {was:.4g} -> none")
            elif figure.better * (new - was) < -was * (0 if figure.key == "failed" else tolerance):
                share = f" ({(new - was) / was:+.1%})" if was else ""
                complaints.append(f"{label}: {figure.key} {was:.4g} -> {new:.4g}{share}")
    return complaints


PAGE = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>forerun bench: {{ server }}</title><style>
:root{color-scheme:light dark;--line:#d0d7de}@media(prefers-color-scheme:dark){:root{--line:#3d444d}}
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}.wide{overflow-x:auto}
table{border-collapse:collapse}td,th{padding:.25rem .75rem;border-bottom:1px solid var(--line);text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}.dark{display:none}
@media(prefers-color-scheme:dark){.dark{display:block}.light{display:none}}
</style><h1>{{ server }}</h1>
<p>{{ served_model }} ({{ engine or "engine unknown" }}), {{ sent }}, {{ date }}</p>
<div class="light">{{ light | safe }}</div><div class="dark">{{ dark | safe }}</div>
<div class="wide"><table><tr><th></th>{% for load in loads %}<th>{{ load.load }}</th>{% endfor %}</tr>
{% for row in figures(loads) %}<tr><td>{{ row.words }}</td>
{% for load in loads %}<td>{{ shown(load.get(row.key)) }}</td>{% endfor %}</tr>{% endfor %}</table></div>
{% for load in loads if load.categories %}
{% set columns = figures(load.categories.values()) | selectattr("of_parts") | list %}
<h2>{{ load.load }}, by category</h2>
<div class="wide"><table><tr><th></th>{% for one in columns %}<th>{{ one.words }}</th>{% endfor %}</tr>
{% for name, part in load.categories.items() %}<tr><td>{{ name }}</td>
{% for one in columns %}<td>{{ shown(part.get(one.key)) }}</td>{% endfor %}</tr>{% endfor %}</table></div>{% endfor %}
{% for load in loads if load.failures %}<h2>{{ load.load }}, failures</h2>
<ul>{% for said, count in load.failures.items() %}<li>{{ count }} x {{ said }}</li>{% endfor %}</ul>{% endfor %}
<p>{{ source }}</p></html>
"""


def format_figure(value: float | None) -> str:
    """Format a figure: whole numbers as they are, others with three digits, None as an empty
    string.
    """
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def describe_workload(record: Mapping[str, Any]) -> str:
    """Return what each load sends, and whether loads send the same, in words."""
    about = record["about"]
    sent = f"{about['tasks']} tasks of {', '.join(about['workload'])}"
    if about["workload"] == [DEMO]:
        sent = f"{about['tasks']} edits of code that ship with forerun (drafting's best case; --workload takes yours)"
    if record.get("tasks_of_its_own") and len(record["loads"]) > 1:
        sent += ", other ones for each load, which no cache knows: loads differ by them, too"
    return sent


def describe_source(record: Mapping[str, Any]) -> str:
    """Return a sentence that says where the acceptance figures are from; empty where no engine
    reported any.
    """
    loads = [load for load in record["loads"] if "spec_decode_source" in load]
    if not loads:
        return ""
    if not any(load.get("spec_decode_num_drafts") for load in loads):
        return "The server drafted nothing."
    return f"Acceptance: {loads[0]['spec_decode_source']}."


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Draw speed and time per token by load, and acceptance by drafted position where it is known."""
    save(_figure(record), path)


def write_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the tables and both pictures, light and dark, as one HTML file."""
    from jinja2 import Environment

    pictures = {"light": _svg(record, "default"), "dark": _svg(record, "dark_background")}
    page = Environment(autoescape=True).from_string(PAGE)
    text = page.render(
        {**record["about"], **record, **pictures},
        figures=select_figures,
        shown=format_figure,
        source=describe_source(record),
        sent=describe_workload(record),
    )
    write_file(path, text)


def _svg(record: Mapping[str, Any], style: str) -> str:
    buffer = io.StringIO()
    with pyplot().style.context(style):
        figure = _figure(record)
        figure.tight_layout()
        figure.savefig(buffer, format="svg", bbox_inches="tight", transparent=True)
        pyplot().close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _figure(record: Mapping[str, Any]) -> Any:
    loads = record["loads"]
    accepted = [load for load in loads if load.get("spec_decode_per_position_acceptance_rates")]
    figure, panels = pyplot().subplots(1, 3 if accepted else 2, figsize=(12 if accepted else 8.5, 3.4))
    labels = [load["load"] for load in loads]
    places = range(len(loads))
    titles = {"output_throughput": "tokens per second", "median_tpot_ms": "ms per output token, median"}
    for axes, (key, title) in zip(panels, titles.items(), strict=False):
        axes.plot(places, [load.get(key) for load in loads], "o-", color=COLOURS[0], label="server")
        if all("baseline" in load for load in loads):
            axes.plot(places, [load["baseline"].get(key) for load in loads], "s--", color=COLOURS[2], label="baseline")
            axes.legend(frameon=False)
        axes.set_xticks(places, labels)
        axes.margins(y=0.15)
        axes.set(title=title)
        axes.set_ylim(bottom=0)
    for index, load in enumerate(accepted):
        rates = load["spec_decode_per_position_acceptance_rates"]
        colour = COLOURS[index % len(COLOURS)]
        panels[2].plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=load["load"])
        panels[2].set(ylim=(0, 1.02), title="accepted at a drafted position", xticks=range(1, len(rates) + 1))
        panels[2].legend(frameon=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    return figure


TellArm = Callable[[str, int], None]
"""A `TellArm` is called with what is being measured, and how many tasks are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """A benchmark: which servers are measured, under which loads."""

    server: Server
    baseline: Server | None
    loads: Sequence[tuple[BenchLoad, Sequence[Task]]]
    """The loads, each with the tasks that it sends."""
    asking: RequestOptions
    limits: Mapping[str, float]
    """Limits of a good request, in ms."""
    warmup: Sequence[Task]

    def __post_init__(self) -> None:
        """Check that the endpoint takes every task; DataError if not."""
        if self.asking.endpoint == "completions":
            for task in (task for _, tasks in self.loads for task in tasks):
                task.prompt()

    async def run(self, record: dict[str, Any], save: Callable[[], None], tell: TellArm) -> int:
        """Measure the loads that `record` does not hold yet, call `save` after each, and return how
        many there were.

        ServerError: no server responds, or every request of a load failed.
        """
        loads: list[dict[str, Any]] = record.setdefault("loads", [])
        done = {load["load"] for load in loads}
        left = [(load, tasks) for load, tasks in self.loads if load.label not in done]
        if not left:
            return 0
        async with AsyncExitStack() as opened:
            for server in (self.baseline, self.server):
                if server is not None:
                    await opened.enter_async_context(server)
                    for task in self.warmup:
                        await converse(server, task, self.asking, 0.0)
            record |= {"engine": self.server.engine, "served_model": self.server.model}
            for load, tasks in left:
                loads.append(await self._measure_load(load, tasks, tell))
                save()
        return len(left)

    async def _measure_load(self, load: BenchLoad, tasks: Sequence[Task], tell: TellArm) -> dict[str, Any]:
        """Return the server's figures; with a baseline also its figures, the speed-up, and the
        number of identical completions.
        """
        base = None
        if self.baseline is not None:
            base = await self._on(self.baseline, load, tasks, lambda done: tell(f"baseline, {load.label}", done))
        result = await self._on(self.server, load, tasks, lambda done: tell(load.label, done))
        record = summarise(result, self.limits)
        if base is not None:
            record["baseline"] = summarise(base, self.limits)
            before = record["baseline"]["output_throughput"]
            record["speedup"] = record["output_throughput"] / before if before else None
            expected = _texts(base)
            record["identical_answers"] = sum(expected.get(turn) == text for turn, text in _texts(result).items())
        return record

    async def _on(
        self, server: Server, load: BenchLoad, tasks: Sequence[Task], tell: Callable[[int], None]
    ) -> LoadResult:
        found = await measure(server, tasks, load, self.asking, tell)
        errors = [answer.error for answer in found.answers]
        if all(errors):
            raise ServerError(f"all {len(errors)} requests to {server.url} failed; the first: {errors[0]}")
        return found


def _texts(result: LoadResult) -> dict[tuple[str, int], str]:
    """Return the completions without an error, by task and index of the prompt."""
    seen = Counter[str]()
    texts = {}
    for answer in result.answers:
        if answer.error is None:
            texts[answer.task, seen[answer.task]] = answer.text
        seen[answer.task] += 1
    return texts
