"""What others notice of long prompts: a short request's wait, and the gaps of a stream, beside them and alone.

    python benchmarks/serving/neighbours.py MODEL --json neighbours.json

One key sends prompts of `--tokens` tokens, `--long` at a time, without a pause. Another one asks for a few tokens again
and again, and then for one long stream; each figure stands beside what it was with nobody else there. Exit code 1 where
the wait grows by more than `--most-wait`, or the stream's 99th percentile by more than `--most-gap`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from fleet import Server, forerun
from rich.console import Console
from rich.table import Table

KEYS = {"long": "key-of-the-long", "short": "key-of-the-short"}
SHORT = {"prompt": "The capital of", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
"""Three tokens, and four of an answer."""
STREAM = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}


class Client:
    """One connection of one key."""

    def __init__(self, url: str, key: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=600)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[key]}"}

    def times(self, body: dict[str, Any]) -> list[float]:
        """Send a request; seconds from sending it to each chunk of its answer that holds text or ends it."""
        began, found = time.perf_counter(), list[float]()
        self._connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), self._headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{response.status} {response.read().decode()}")
        for line in response:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise SystemExit(line.decode())
                found.append(time.perf_counter() - began)
        return found

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


def waits(url: str, seconds: float) -> dict[str, list[float]]:
    """Short requests, one after the other, at moments that have nothing to do with the server's."""
    found: dict[str, list[float]] = {"first": [], "whole": []}
    with closing(Client(url, "short")) as client:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            times = client.times(SHORT)
            found["first"].append(times[0])
            found["whole"].append(times[-1])
            time.sleep(0.03 * random.random())
    return found


def gaps(url: str, tokens: int) -> list[float]:
    """Seconds between the chunks of one stream, behind the first."""
    with closing(Client(url, "short")) as client:
        times = client.times({**STREAM, "max_tokens": tokens})
    return [late - early for early, late in pairwise(times)]


@contextmanager
def long_prompts(url: str, tokens: int, count: int, read: list[float]) -> Iterator[None]:
    """While the block runs, so many long prompts are always there; when each was answered goes to `read`."""
    ended = threading.Event()

    def send(seed: int) -> None:
        draw = random.Random(seed)
        with closing(Client(url, "long")) as client:
            while not ended.is_set():
                prompt = [draw.randrange(1000, 20_000) for _ in range(tokens)]
                client.times({"prompt": prompt, "max_tokens": 1, "temperature": 0})
                read.append(time.perf_counter())

    senders = [threading.Thread(target=send, args=(seed,), daemon=True) for seed in range(count)]
    for sender in senders:
        sender.start()
    time.sleep(0.5)
    try:
        yield
    finally:
        ended.set()  # whoever still sends is a daemon, and ends with the process


def centile(values: list[float], share: float) -> float:
    """The value that `share` of the others do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measured(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures, ms."""
    waits(server.url, 1.0)
    gaps(server.url, 20)
    alone, alone_gaps = waits(server.url, arguments.seconds / 2), gaps(server.url, arguments.stream)
    read, began = list[float](), time.perf_counter()
    with long_prompts(server.url, arguments.tokens, arguments.long, read):
        beside = waits(server.url, arguments.seconds)
        beside_gaps = gaps(server.url, arguments.stream)
        took = time.perf_counter() - began
    figures: dict[str, Any] = {"long_prompts_per_minute": 60 * len(read) / took, "figures_ms": {}}
    pairs = [(f"short: {name} token", alone[key], beside[key]) for key, name in (("first", "first"), ("whole", "last"))]
    for name, before, after in [*pairs, ("stream: gap", alone_gaps, beside_gaps)]:
        stats: list[tuple[str, Callable[[list[float]], float]]] = [("median", median), ("max", max)]
        stats.insert(1, ("p99", lambda values: centile(values, 0.99)))
        for stat, of in stats:
            figures["figures_ms"][f"{name}, {stat}"] = [1e3 * of(before), 1e3 * of(after)]
        figures["figures_ms"][f"{name}, {stats[0][0]}"].append(len(after))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000, help="of a long prompt")
    parser.add_argument("--long", type=int, default=2, help="long prompts at a time")
    parser.add_argument("--seconds", type=float, default=15.0, help="of short requests beside them")
    parser.add_argument("--stream", type=int, default=150, help="tokens of the stream")
    parser.add_argument("--serve", nargs="*", default=[], help="more options of forerun serve, without their dashes")
    parser.add_argument("--most-wait", type=float, default=4.0, help="times alone, median")
    parser.add_argument("--most-gap", type=float, default=3.0, help="times alone, 99th percentile")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    keys = [word for key in KEYS.values() for word in ("--api-key", key)]
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{option}" if index % 2 == 0 else option for index, option in enumerate(arguments.serve)]
        server = forerun(arguments.model, "--drain-s", "0", *keys, *options, log=Path(folder) / "server.log")
        server.start()
        try:
            found = measured(server, arguments)
        finally:
            server.stop()
    table = Table("", "alone, ms", f"beside {arguments.long} prompts of {arguments.tokens} tokens, ms", "times")
    for name, (alone, beside, *_) in found["figures_ms"].items():
        table.add_row(name, f"{alone:.1f}", f"{beside:.1f}", f"{beside / alone:.1f}")
    Console().print(table, f"{found['long_prompts_per_minute']:.1f} long prompts answered per minute")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ratios = {name: beside / alone for name, (alone, beside, *_) in found["figures_ms"].items()}
    good = ratios["short: first token, median"] <= arguments.most_wait
    return int(not (good and ratios["stream: gap, p99"] <= arguments.most_gap))


if __name__ == "__main__":
    sys.exit(main())
