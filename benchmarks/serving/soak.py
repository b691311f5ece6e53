"""A real ``forerun serve`` under random requests for minutes: does it leak, stick, miscount or change its answers?

    python benchmarks/serving/soak.py --minutes 20 --json soak.json

Good, bad and interrupted requests of all kinds come at random from several clients. Warm-up is the first quarter of
the time, in which caches fill and allocators grow; memory is the median of the server's resident set over the tenth of
the run that follows it, against the median over the last tenth. Exit code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
from fleet import Server, forerun
from rich.console import Console
from rich.table import Table

KEY = "soak-key"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WARM_UP = 0.25
"""Share of the time in which memory may grow."""
DRAFTERS = ("ngram", "suffix", "lookahead", "recycling")
PROMPTS = ("def add(a, b):\n    return", "the cat sat on the mat and the", "import os\nimport sys\n\n\ndef main(")
LIMITS = {
    "--max-queue": 12,
    "--max-n": 3,
    "--max-tokens": 64,
    "--max-body-bytes": 20_000,
    "--receive-timeout-s": 10,
    "--send-timeout-s": 2,
    "--stream-buffer": 32,
    "--max-connections": 200,
}
WRONG: list[tuple[int, bytes, dict[str, str]]] = [
    (400, b"{", {}),
    (400, b"\xff\xfe", {}),
    (400, b'{"prompt": "x", "n": 99}', {}),
    (400, b'{"prompt": "x", "frobnicate": 1}', {}),
    (400, b'{"prompt": "x", "temperature": -1}', {}),
    (400, b'{"prompt": "x", "structured_outputs": {"regex": "("}}', {}),
    (400, b'{"prompt": "x", "speculative": {"drafter": "nonsense"}}', {}),
    (400, b'{"prompt": [999999999]}', {}),
    (400, b'{"prompt": "x", "max_tokens": 1000000}', {}),
    (404, b'{"prompt": "x", "model": "gpt-9"}', {}),
    (401, b'{"prompt": "x"}', {"authorization": "Bearer wrong"}),
    (401, b'{"prompt": "x"}', {"authorization": ""}),
    (413, b'{"prompt": "' + b"x" * 30_000 + b'"}', {}),
    (415, b"\x1f\x8b", {"content-encoding": "gzip"}),
]


@dataclass
class Seen:
    """What the clients saw."""

    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    answers: int = 0
    tokens: int = 0
    drafted: int = 0
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    greedy: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def serving(arguments: argparse.Namespace, log: Path) -> Server:
    """The server that is asked, with limits that the requests reach."""
    words = ["--api-key", KEY, "--log-format", "json", "--dtype", "float32", "--max-num-seqs", arguments.rows]
    words += ["--drafter", arguments.drafter, *(word for name in DRAFTERS for word in ("--client-drafters", name))]
    words += [word for pair in LIMITS.items() for word in pair]
    return forerun(arguments.model, *map(str, words), log=log)


def counters(server: Server) -> dict[str, float]:
    """Metric, with its labels but the model's, to value."""
    found = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if match := re.fullmatch(r"(\w+:\w+)\{(.*?)\} (\S+)", line):
            labels = [label for label in match[2].split(",") if not label.startswith("model_name")]
            found[f"{match[1]}{{{','.join(labels)}}}"] = float(match[3])
    return found


async def watch(server: Server, memory: list[int]) -> None:
    """Resident memory, twice a second."""
    while True:
        memory.append(server.memory())
        await asyncio.sleep(0.5)


class Client:
    """Asks at random until the time is up.

    Args:
        random_: decides everything.
        seen: shared by all clients.
    """

    def __init__(self, http: httpx.AsyncClient, random_: random.Random, seen: Seen) -> None:
        self.http, self.random, self.seen = http, random_, seen

    async def run(self, end: float) -> None:
        """Until `end`, on the monotonic clock."""
        kinds = {
            self.whole: 5,
            self.streamed: 5,
            self.leave_stream: 3,
            self.leave_whole: 2,
            self.wrong: 4,
            self.other: 1,
        }
        while time.monotonic() < end:
            [kind] = self.random.choices(list(kinds), list(kinds.values()))
            self.seen.sent += 1
            began = time.monotonic()
            try:
                await kind()
            except httpx.HTTPError as error:
                self.seen.faults.append(f"{kind.__name__}: {error!r}")
            self.seen.latencies[kind.__name__].append(time.monotonic() - began)
            if self.random.random() < 0.1:
                await asyncio.sleep(self.random.random() * 0.3)

    def question(self) -> tuple[str, dict[str, Any]]:
        """A request that can be answered."""
        choose = self.random
        path = choose.choice((CHAT, TEXT))
        prompt = choose.choice(PROMPTS)
        body: dict[str, Any] = {"max_tokens": choose.choice((1, 7, 24, 48)), "ignore_eos": True}
        body |= {"prompt": prompt} if path == TEXT else {"messages": [{"role": "user", "content": prompt}]}
        body |= choose.choice(
            ({"temperature": 0}, {"temperature": 0}, {"temperature": 0.9, "seed": choose.randint(0, 9)})
        )
        if choose.random() < 0.3:
            body["n"] = choose.randint(2, 3)
        if choose.random() < 0.2:
            body["stop"] = ["e", "\n\n"]
        if choose.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
        if choose.random() < 0.1:
            body["structured_outputs"] = {"choice": ["yes", "no", "perhaps"]}
        wish = choose.choice((None, None, {"enabled": False}, *({"drafter": name} for name in DRAFTERS)))
        if wish is not None:
            body["speculative"] = wish
        return path, body

    async def whole(self) -> None:
        """Ask and read."""
        path, body = self.question()
        answer = await self.http.post(path, json=body)
        self.seen.statuses[answer.status_code] += 1
        if answer.status_code == 200:
            found = answer.json()
            texts = [choice["text"] if path == TEXT else choice["message"]["content"] for choice in found["choices"]]
            self.answered(path, body, texts, found)
        elif answer.status_code not in (429, 503):
            self.seen.faults.append(f"{answer.status_code} for {json.dumps(body)}: {answer.text[:200]}")

    async def streamed(self) -> None:
        """Ask for a stream and read it to its end."""
        path, body = self.question()
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        texts, last = defaultdict[int, str](str), dict[str, Any]()
        async with self.http.stream("POST", path, json=asked) as answer:
            self.seen.statuses[answer.status_code] += 1
            async for event in _events(answer):
                last = event
                for choice in event.get("choices", []):
                    text = choice["text"] if path == TEXT else choice["delta"].get("content")
                    texts[choice["index"]] += text or ""
        if answer.status_code == 200:
            if "usage" not in last:
                self.seen.faults.append(f"a stream ended with {last}")
                return
            self.answered(path, body, [texts[index] for index in sorted(texts)], last)

    def answered(self, path: str, body: dict[str, Any], texts: list[str], found: dict[str, Any]) -> None:
        """Count it, and compare a greedy text with what it was before: nothing that others do may change it."""
        self.seen.answers += len(texts)
        self.seen.tokens += found["usage"]["completion_tokens"]
        self.seen.drafted += found["metrics"]["speculative_decoding"]["num_draft_tokens"]
        if body["temperature"] == 0:
            same = {
                key: value for key, value in body.items() if key not in ("speculative", "n", "logprobs", "top_logprobs")
            }
            before = self.seen.greedy.setdefault(f"{path} {json.dumps(same, sort_keys=True)}", texts[0])
            if set(texts) != {before}:
                self.seen.faults.append(f"{body}: {texts}, before {before!r}")

    async def leave_stream(self) -> None:
        """Go after a few chunks."""
        path, body = self.question()
        chunks = self.random.randint(0, 6)
        async with self.http.stream("POST", path, json={**body, "max_tokens": 64, "stream": True}) as answer:
            async for _ in answer.aiter_raw():
                chunks -= 1
                if chunks < 0:
                    break
        self.seen.left += 1

    async def leave_whole(self) -> None:
        """Go before the answer is there."""
        path, body = self.question()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.http.post(path, json={**body, "max_tokens": 64}), self.random.random() * 0.2)
        self.seen.left += 1

    async def wrong(self) -> None:
        """What must be refused, and how."""
        expected, content, headers = self.random.choice(WRONG)
        headers = {"content-type": "application/json", **headers}
        answer = await self.http.post(TEXT, content=content, headers=headers)
        self.seen.statuses[answer.status_code] += 1
        if answer.status_code not in (expected, 429) or "error" not in answer.json():
            self.seen.faults.append(f"{answer.status_code} for {content[:60]!r}, expected {expected}")

    async def other(self) -> None:
        """The rest of the API."""
        answer = await self.http.post("/tokenize", json={"prompt": self.random.choice(PROMPTS)})
        self.seen.statuses[answer.status_code] += 1


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def checks(seen: Seen, server: Server, growth: float, limit: float) -> dict[str, tuple[bool, str]]:
    """What must hold after the run, when all clients have gone: name -> (holds, what was found)."""
    found = counters(server)

    def total(name: str, part: str = "") -> float:
        return sum(value for key, value in found.items() if key.startswith(f"{name}{{") and part in key)

    requests = total("forerun:http_requests_total", 'route="/v1/') + total("forerun:http_requests_total", '"/tokenize"')
    requests += total("forerun:http_requests_total", '"unmatched"')
    answered = sum(seen.statuses.values()) + len(seen.latencies["leave_stream"])
    statuses = {status: total("forerun:http_requests_total", f'status="{status}"') for status in seen.statuses}
    short = {status: (count, statuses[status]) for status, count in seen.statuses.items() if statuses[status] < count}
    ended = total("vllm:request_success_total")
    admitted, refused = total("forerun:answers_admitted_total"), total("forerun:answers_refused_total")
    finished = ended - total("vllm:request_success_total", '"abort"')
    errors = total("vllm:request_success_total", '"error"') + total("forerun:http_requests_total", 'status="500"')
    rows = total("vllm:num_requests_running") + total("vllm:num_requests_waiting")
    drafted, kept = (
        total("vllm:spec_decode_num_draft_tokens_total"),
        total("vllm:spec_decode_num_accepted_tokens_total"),
    )
    places = {
        int(key.split('position="')[1].split('"')[0]): value
        for key, value in found.items()
        if key.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    }
    by_place = [places[place] for place in sorted(places)]
    falling = by_place == sorted(by_place, reverse=True)
    tokens = total("vllm:generation_tokens_total")
    return {
        "nothing unexpected": (not seen.faults, f"{len(seen.faults)} faults {seen.faults[:3]}"),
        "no 500": (not errors, f"{errors:.0f}"),
        "no row in use": (not rows, f"{rows:.0f} running or waiting"),
        "every request counted": (
            answered <= requests <= seen.sent,
            f"{requests:.0f} counted, {seen.sent} sent, {answered} of them answered",
        ),
        "every status counted": (not short, f"{dict(seen.statuses)}, {seen.left} left"),
        "taken on = ended": (admitted == ended + refused, f"{admitted:.0f} = {ended:.0f} + {refused:.0f} refused"),
        "answers counted": (
            seen.answers <= finished <= seen.answers + 3 * seen.left,
            f"{finished:.0f}, {seen.answers} read",
        ),
        "tokens counted": (seen.tokens <= tokens, f"{tokens:.0f}, {seen.tokens} read"),
        "drafts counted": (
            seen.drafted <= drafted and kept <= drafted and sum(by_place) == kept and falling,
            f"{drafted:.0f} drafted, {kept:.0f} kept, by place {[int(count) for count in by_place]}",
        ),
        "memory": (growth <= limit, f"{growth:+.1%} after warm-up, limit {limit:.0%}"),
    }


def growth_of(memory: list[int]) -> float:
    """Of the resident set from the end of the warm-up to the end of the run."""
    tenth = max(1, len(memory) // 10)
    start = int(len(memory) * WARM_UP)
    return median(memory[-tenth:]) / median(memory[start : start + tenth]) - 1


async def soak(arguments: argparse.Namespace, log: Path) -> dict[str, Any]:
    """One run; everything that is reported."""
    server, seen, memory = serving(arguments, log), Seen(), list[int]()
    server.start()
    try:
        began = time.monotonic()
        end = began + 60 * arguments.minutes
        watching = asyncio.create_task(watch(server, memory))
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=arguments.clients)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120, limits=limits) as http:
            clients = [Client(http, random.Random(arguments.seed + index), seen) for index in range(arguments.clients)]
            await asyncio.gather(*(client.run(end) for client in clients))
        watching.cancel()
        for _ in range(100):
            if not sum(counters(server)[f"vllm:num_requests_{what}{{}}"] for what in ("running", "waiting")):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.5)
        growth = growth_of(memory)
        results = checks(seen, server, growth, arguments.growth)
        code = server.stop()
        results["SIGTERM ends with 0"] = (code == 0, str(code))
    finally:
        server.stop()
    megabytes = [round(value / 2**20, 1) for value in memory]
    tenth = max(1, len(memory) // 10)
    return {
        "minutes": (time.monotonic() - began) / 60,
        "requests": seen.sent,
        "answers": seen.answers,
        "tokens": seen.tokens,
        "greedy_texts": len(seen.greedy),
        "statuses": {str(status): count for status, count in sorted(seen.statuses.items())},
        "left": seen.left,
        "latency_s": {kind: _spread(values) for kind, values in sorted(seen.latencies.items())},
        "memory_mb": {
            "first": megabytes[0],
            "last": megabytes[-1],
            "most": max(megabytes),
            "growth": round(growth, 4),
            "tenths": [median(megabytes[start : start + tenth]) for start in range(0, len(memory) - tenth + 1, tenth)],
        },
        "checks": {name: {"holds": holds, "found": what} for name, (holds, what) in results.items()},
    }


def _spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"count": len(values), "p50": round(cuts[49], 4), "p99": round(cuts[98], 4), "most": round(max(values), 4)}


def show(report: dict[str, Any]) -> None:
    """Tables for people, on stderr."""
    console = Console(stderr=True)
    console.print(
        f"{report['requests']} requests in {report['minutes']:.1f} minutes, {report['answers']} answers read, "
        f"{report['left']} left early; memory {report['memory_mb']}"
    )
    times = Table("request", "count", "p50 s", "p99 s", "most s")
    for kind, spread in report["latency_s"].items():
        times.add_row(kind, *map(str, spread.values()))
    console.print(times)
    table = Table("check", "holds", "found")
    for name, one in report["checks"].items():
        table.add_row(name, "yes" if one["holds"] else "[bold red]NO", one["found"])
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4, help="answers that run at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=0.05, help="of memory after the warm-up, at most")
    parser.add_argument("--json", type=Path, help="where the report goes")
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(soak(arguments, arguments.log or Path(folder) / "server.log"))
    show(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(one["holds"] for one in report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
