"""``forerun bench --server URL`` measures any OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import json as as_json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from forerun.bench.load import (
    FIGURES,
    Bench,
    BenchLoad,
    describe_source,
    describe_workload,
    draw,
    find_older_loads,
    find_worse,
    format_figure,
    parse_objectives,
    select_figures,
    write_page,
)
from forerun.bench.workloads import DEMO
from forerun.cli import CHECK_FAILED, OK, console
from forerun.cli.options import SAMPLING, Json, SamplingOptions, json_object
from forerun.errors import ArgumentError, DataError
from forerun.plots import check_plot
from forerun.writing import read_object, write_file

if TYPE_CHECKING:
    from forerun.bench.client import RequestOptions, Server
    from forerun.bench.workloads import DrawnTasks


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadOptions:
    """The options that say which prompts are sent."""

    workload: tuple[str, ...] = ("demo",)
    """Files (MT-Bench, Spec-Bench, SPEED-Bench, HumanEval, GSM8K, ShareGPT, messages, prompts, text), hub data sets
    (org/name), or demo: the edits that ship."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str = "test"
    """Split of a hub data set."""
    num_prompts: int | None = None
    """Tasks to draw for each load, others for each where there are enough; by default all, and of one load all that
    the warm-up does not send."""
    endpoint: Literal["auto", "chat", "completions"] = "auto"
    """Which API: chat for conversations and completions for plain text, unless one is named."""
    extra_body: str | None = None
    """JSON object that is added to the body of every request."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class ArrivalOptions:
    """The options that say when requests are sent; several numbers are measured one after the other."""

    concurrency: tuple[int, ...] = ()
    """Users at a time; 1 where neither this nor a rate is given."""
    request_rate: tuple[float, ...] = ()
    """Users who arrive per second."""
    burstiness: float = 1.0
    """Evenness of the arrivals: 1 is Poisson, less comes in bursts, more is evener."""
    warmup: int = 2
    """Tasks that are sent before and not counted; others than those that count where some are left over."""
    timeout: float = 600.0
    """Seconds that a request may take."""


WORKLOAD, LOAD = WorkloadOptions(), ArrivalOptions()
LEAST_WANTED = ("p99_tpot_ms", "p99_ttft_ms", "spec_decode_acceptance_rate", "spec_decode_acceptance_length")
"""A narrow terminal drops these columns, the first one first.

A figure that is cut off would be read as another.
"""


def bench(
    *,
    server: str,
    model: str | None = None,
    api_key: str | None = None,
    metrics_url: str | None = None,
    baseline_server: str | None = None,
    workload: WorkloadOptions = WORKLOAD,
    load: ArrivalOptions = LOAD,
    sampling: SamplingOptions = SAMPLING,
    goodput: tuple[str, ...] = (),
    out: Path | None = None,
    plot: Path | None = None,
    report: Path | None = None,
    compare: Path | None = None,
    tolerance: float = 0.05,
    json: Json = False,
) -> int:
    """Measure an OpenAI-compatible server under load: latencies, tokens per second, and what its drafts bring.

    Parameters
    ----------
    server
        Address of the server: forerun's, vLLM's, SGLang's, llama.cpp's, Dynamo's, ...: http://localhost:8000.
    model
        Name of the model there; needed where it serves several.
    api_key
        Bearer token; OPENAI_API_KEY if not given.
    metrics_url
        Where its Prometheus metrics are, if not at /metrics.
    baseline_server
        A server to compare with, same model: each load is measured there first, and its completions are compared.
    goodput
        What a request must keep to be a good one, in ms: ttft:200 tpot:30 e2el:5000.
    out
        File for the result as JSON, written after each load; run again, it continues after the loads that are done.
    plot
        Picture of speed and latency by load (png, svg or pdf).
    report
        The same as one HTML file.
    compare
        Result of an earlier run: exit code 1 where this one is worse.
    tolerance
        Share by which a figure may be worse.
    """
    from forerun.bench.client import Server
    from forerun.bench.workloads import draw_tasks, read_workload

    loads = _loads(load)
    limits = parse_objectives(goodput)
    asking = _asking(workload, load, sampling)
    _check_files(out=out, plot=plot, report=report)
    older = _older(compare, tolerance, loads)
    tasks = read_workload(workload.workload, subset=workload.subset, split=workload.split)
    count = workload.num_prompts
    drawn = draw_tasks(tasks, loads=len(loads), warmup=load.warmup, count=count, seed=sampling.seed or 0)
    servers = {"server": server, "baseline_server": baseline_server, "model": model}
    record = _begin_record(out, servers | _describe(workload, asking, limits, len(drawn.loads[0])))
    for difference in _differences(older or {}, record["about"]):
        console.warn(f"{compare} was measured with another {difference}")
    repeated, warning = _find_repeated(drawn, most=(len(tasks) - load.warmup) // len(loads))
    record |= {"repeated_prompts": repeated, "tasks_of_its_own": drawn.apart}
    key = {"model": model, "api_key": api_key}
    benchmark = Bench(
        server=Server(server, metrics_url=metrics_url, **key),
        baseline=None if baseline_server is None else Server(baseline_server, **key),
        loads=list(zip(loads, drawn.loads, strict=True)),
        asking=asking,
        limits=limits,
        warmup=drawn.warmup,
    )
    if warning is not None:
        asyncio.run(_probe(Server(server, metrics_url=metrics_url, **key)))
        console.warn(warning)
    asyncio.run(_measure(benchmark, record, out))
    if plot is not None:
        draw(record, plot)
    if report is not None:
        write_page(record, report)
    complaints = [] if older is None else find_worse(record, older, tolerance)
    if json:
        console.write_json({**record, "worse": complaints})
    else:
        _show(record, complaints, older is not None)
    return CHECK_FAILED if complaints else OK


def _describe(
    workload: WorkloadOptions, asking: RequestOptions, limits: Mapping[str, float], tasks: int
) -> dict[str, Any]:
    """Describe what a server is sent, in the form that a file gives back: lists, no tuples."""
    about = {
        "workload": list(workload.workload),
        "subset": workload.subset,
        "split": workload.split,
        "tasks": tasks,
        "endpoint": asking.endpoint,
        "max_tokens": asking.max_tokens,
        "sampling": dict(asking.sampling),
        "goodput": dict(limits),
    }
    found: dict[str, Any] = as_json.loads(as_json.dumps(about))
    return found


async def _measure(benchmark: Bench, record: dict[str, Any], out: Path | None) -> None:
    """Measure the loads that the record lacks, and write it after each."""

    def save() -> None:
        if out is not None:
            write_file(out, console.pretty(record) + "\n")

    load, tasks = benchmark.loads[0]
    with console.progress_bar(load.label, total=len(tasks)) as bar:
        done = await benchmark.run(record, save, lambda words, done: bar(description=words, completed=done))
    server = benchmark.server
    if server.without_metrics:
        console.warn(
            f"{server.url} has no metrics at {server.metrics_url} ({server.without_metrics}): what "
            "drafts bring is known only as far as its responses say; if they are elsewhere, name it with --metrics-url"
        )
    if not done:
        console.warn(f"{out} holds these loads already: nothing was measured; name another file to measure again")


def _loads(arrivals: ArrivalOptions) -> list[BenchLoad]:
    if arrivals.concurrency and arrivals.request_rate:
        raise ArgumentError("give --concurrency or --request-rate, not both: users at a time, or users per second")
    if arrivals.request_rate:
        return [BenchLoad(rate=rate, burstiness=arrivals.burstiness) for rate in arrivals.request_rate]
    return [BenchLoad(concurrency=count, burstiness=arrivals.burstiness) for count in arrivals.concurrency or (1,)]


def _asking(workload: WorkloadOptions, load: ArrivalOptions, sampling: SamplingOptions) -> RequestOptions:
    from forerun.bench.client import RequestOptions

    given = {name: value for name, value in asdict(sampling).items() if value not in (None, ())}
    if not load.timeout > 0 or load.warmup < 0:
        raise ArgumentError("--timeout must be above 0 and --warmup at least 0")
    return RequestOptions(
        endpoint=workload.endpoint,
        max_tokens=given.pop("max_tokens"),
        sampling=given | json_object(workload.extra_body or "{}", "--extra-body"),
        timeout_s=load.timeout,
    )


async def _probe(server: Server) -> None:
    """Raise what `Server` raises where no server responds, before anything is said of what would be sent."""
    async with server:
        pass


def _find_repeated(drawn: DrawnTasks, most: int) -> tuple[int, str | None]:
    """Return how many prompts are sent more than once, and a warning of what that means and what to do.

    `most` tasks leave each load, and the warm-up, its own.
    """
    from forerun.bench.workloads import count_repeated

    again = count_repeated(drawn)
    total = sum(map(len, drawn.loads))
    if not again:
        return 0, None
    what = f"{again} of {total} prompts {'repeats' if again == 1 else 'repeat'} (warm-up, another load, earlier prompt)"
    meaning = "prefix caches, and drafters that remember completions, may inflate the results"
    if drawn.apart:
        advice = "the workload itself repeats them"
    elif most > 0:
        advice = f"--num-prompts {most} draws others each time"
    elif len(drawn.loads) == 1:
        advice = "--warmup 0 leaves the warm-up out"
    else:
        advice = "a larger workload would do without"
    return again, f"{what}; {meaning}; {advice}"


def _read(path: Path) -> dict[str, Any]:
    """Read a result that an earlier run wrote; DataError if it is none."""
    record = read_object(path, "expected a result of forerun bench")
    loads = record.get("loads")
    wrong = f"{path} is no result of forerun bench"
    if not isinstance(loads, list) or not all(isinstance(load, dict) and "load" in load for load in loads):
        raise DataError(f"{wrong}: it has no 'loads', or one of them has no 'load'")
    for figure in (load.get(figure_kind.key) for load in loads for figure_kind in FIGURES):
        if not isinstance(figure, int | float | None):
            raise DataError(f"{wrong}: {figure!r} stands where a figure should")
    if not isinstance(record.get("about", {}), dict):
        raise DataError(f"{wrong}: 'about' is no object")
    return record


def _check_files(**files: Path | None) -> None:
    """Raise ArgumentError where a result could not be written."""
    for name, file in files.items():
        if file is not None and (file.is_dir() or not file.name):
            raise ArgumentError(f"--{name} {file} is a directory; name a file")
    report = files["report"]
    check_plot(files["plot"])
    check_plot(None if report is None else report.with_suffix(".svg"))


_SAME = ("workload", "subset", "split", "tasks", "endpoint", "max_tokens", "sampling")
"""Two results that differ in these say little about each other."""


def _differences(older: Mapping[str, Any], about: Mapping[str, Any]) -> Iterator[str]:
    before = {**about, **older.get("about", {})}
    for name in _SAME:
        if before[name] != about[name]:
            yield f"{name}: {before[name]}, now {about[name]}"


def _older(compare: Path | None, tolerance: float, loads: Sequence[BenchLoad]) -> dict[str, Any] | None:
    """Return the result to compare with; ArgumentError if it has none of the loads, or the
    tolerance is no share.
    """
    if not 0 <= tolerance <= 1:
        raise ArgumentError(f"--tolerance is a share from 0 to 1, 0.05 for 5 %; got {tolerance:g}")
    if compare is None:
        return None
    older = _read(compare)
    find_older_loads(older, [load.label for load in loads])
    return older


def _begin_record(out: Path | None, about: dict[str, Any]) -> dict[str, Any]:
    """Return what `out` holds of the same measurement, else an empty record; ArgumentError if it
    holds another one.
    """
    if out is not None and out.exists():
        older = _read(out)
        if older.get("about") != about:
            raise ArgumentError(f"{out} holds another measurement, which would be lost; name another file with --out")
        return older
    return {"about": about, "date": datetime.now(UTC).isoformat(timespec="seconds"), "loads": []}


def _show(record: Mapping[str, Any], complaints: Sequence[str], compared: bool) -> None:
    about = record["about"]
    screen = console.out()
    title = f"{record['served_model']} at {about['server']}, {about['max_tokens']} tokens at most"
    screen.print(Text(f"Each load sends {describe_workload(record)}."))
    rows = [row for load in record["loads"] for row in _rows(load)]
    _table(title, "load", rows)
    for load in record["loads"]:
        if load.get("categories"):
            kind = "kind of edit" if about["workload"] == [DEMO] else "category"
            _table(f"{load['load']}, by category", kind, list(load["categories"].items()), of_parts=True)
        if "identical_answers" in load:
            screen.print(
                f"{load['load']}: {load['identical_answers']} of {load['completed']} completions equal the baseline's"
            )
        for reason, count in load["failures"].items():
            console.warn(f"{load['load']}: {count} failed: {reason}")
        if not load["tokens_counted_by_server"]:
            console.warn(f"{load['load']}: the server does not count tokens in a stream; chunks are counted")
    if source := describe_source(record):
        screen.print(Text(source, style="dim"))
    for complaint in complaints:
        console.warn(f"worse than before: {complaint}", style="red")
    if compared and not complaints:
        screen.print("nothing is worse than before")


def _rows(load: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    base = [("  baseline", load["baseline"])] if "baseline" in load else []
    return [(load["load"], load), *base]


def _table(title: str, first: str, rows: Sequence[tuple[str, Mapping[str, Any]]], *, of_parts: bool = False) -> None:
    """Print a table of figures. `of_parts`: of parts of a load, whose few requests have no 99th percentile."""
    failed = any(row.get("failed") for _, row in rows)
    columns = [
        column
        for column in select_figures([row for _, row in rows])
        if column.column and (column.of_parts or not of_parts) and (failed or column.key != "failed")
    ]
    out = console.out()
    spare = list(LEAST_WANTED)
    while True:
        table = console.table(first, *(column.column for column in columns), title=title, numbers_from=1)
        for name, row in rows:
            table.add_row(name, *(format_figure(row.get(column.key)) for column in columns))
        width = out.measure(table, options=out.options.update(max_width=1000)).maximum
        if not spare or width <= out.width:
            break
        left_out = spare.pop(0)
        columns = [column for column in columns if column.key != left_out]
    out.print(table)
