"""A real ``forerun serve`` under requests that want to be expensive: what does another user notice?

    python benchmarks/serving/attacks.py --json attacks.json

A victim asks for one token again and again while who has another key attacks beside it. For each attack: how the
server answered, the victim's latencies, and the server's resident memory before it and five seconds after it. Exit
code 1 where an attack is answered otherwise than expected, ends the server, takes the victim's 99th percentile beyond
`--most-ms`, or leaves more memory than `--growth`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import httpx
from fleet import Server, forerun
from rich.console import Console
from rich.table import Table

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
VICTIM = {"prompt": "import os\n", "max_tokens": 1, "temperature": 0}
KEYS = {"victim": "key-of-the-victim", "attacker": "key-of-the-attacker"}
HEADERS = {who: {"authorization": f"Bearer {key}", "content-type": "application/json"} for who, key in KEYS.items()}
ATTEMPTS = 4
"""Times that each attack is sent, two at a time."""
PATIENCE_S = 60.0
"""For an answer to an attack, and for one to the victim."""
SETTLE_S = 5.0
"""Between the end of an attack and the look at memory, in which the victim goes on."""
MEGABYTES = 4
"""Of a body that only has to be large: about what a server takes by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attack:
    """Something that a stranger may send."""

    name: str
    send: Callable[[str], int]
    """Send it to a server's address, once; the status of the answer, 0 where the connection broke."""
    expected: frozenset[int]


@dataclass(kw_only=True, slots=True)
class Result:
    """What an attack did."""

    name: str
    statuses: dict[str, int]
    seconds: float
    p50_ms: float
    p99_ms: float
    max_ms: float
    asked: int
    failed: int
    """Of the victim's requests."""
    before_mb: float
    after_mb: float
    faults: list[str] = field(default_factory=list)


class Victim:
    """Asks for one token, again and again, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url, self._over = url, threading.Event()
        self.latencies: list[float] = []
        self.failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S, headers=HEADERS["victim"]) as client:
            while not self._over.is_set():
                began = time.perf_counter()
                try:
                    good = client.post(TEXT, json=VICTIM).status_code == 200
                except httpx.HTTPError:
                    good = False
                    time.sleep(0.1)
                self.latencies.append(1000 * (time.perf_counter() - began))
                self.failed += not good

    def stop(self) -> None:
        """No more requests; the one under way counts."""
        self._over.set()
        self._thread.join()


def run(server: Server, attack: Attack, most_ms: float, growth: float) -> Result:
    """One attack beside a victim."""
    before, victim, began = server.memory() / 1e6, Victim(server.url), time.perf_counter()
    statuses = Counter[str]()

    def attempt() -> None:
        for _ in range(ATTEMPTS // 2):
            statuses[str(attack.send(server.url))] += 1

    threads = [threading.Thread(target=attempt) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    time.sleep(SETTLE_S if server.alive else 0)
    victim.stop()
    after = server.memory() / 1e6 if server.alive else 0.0
    cuts = (
        quantiles(victim.latencies, n=100, method="inclusive") if len(victim.latencies) > 1 else victim.latencies * 99
    )
    result = Result(
        name=attack.name,
        statuses=dict(statuses),
        seconds=seconds,
        p50_ms=cuts[49],
        p99_ms=cuts[98],
        max_ms=max(victim.latencies),
        asked=len(victim.latencies),
        failed=victim.failed,
        before_mb=before,
        after_mb=after,
    )
    wrong = {status for status in statuses if int(status) not in attack.expected}
    faults = {
        "the process ended": not server.alive,
        f"answered with {', '.join(sorted(wrong))}": bool(wrong),
        "the victim waited": result.p99_ms > most_ms,
        "the victim failed": victim.failed > 0,
        "memory grew": after > before * (1 + growth),
    }
    result.faults = [fault for fault, found in faults.items() if found]
    return result


# --- attacks --------------------------------------------------------------------------------------------------------


def posting(path: str, make: Callable[[], dict[str, Any] | bytes]) -> Callable[[str], int]:
    """Sends what `make` gives, which is made once."""
    made: list[bytes] = []
    lock = threading.Lock()

    def send(url: str) -> int:
        with lock:
            if not made:
                body = make()
                made.append(body if isinstance(body, bytes) else json.dumps(body).encode())
        try:
            sent = httpx.post(url + path, content=made[0], headers=HEADERS["attacker"], timeout=PATIENCE_S)
            return sent.status_code
        except httpx.HTTPError:
            return 0

    return send


def half_open(count: int) -> Callable[[str], int]:
    """Opens so many connections that never send a whole request, and holds them for some seconds."""

    def send(url: str) -> int:
        host, _, port = url.removeprefix("http://").partition(":")
        opened = []
        with contextlib.suppress(OSError):
            for number in range(count):
                one = socket.create_connection((host, int(port)), timeout=5)
                opened.append(one)
                one.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" if number % 2 else b"G")
        time.sleep(3)
        for one in opened:
            one.close()
        return 200

    return send


def wish(**form: Any) -> dict[str, Any]:
    """A completion of this form."""
    return {"prompt": "x", "max_tokens": 64, "structured_outputs": form}


def chain(length: int) -> dict[str, Any]:
    """A schema of so many definitions, each of which refers to the next."""
    links: dict[str, Any] = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "string"}}}


def doubling(depth: int) -> dict[str, Any]:
    """A schema of a few lines that stands for 2 ^ depth objects."""
    links = {
        f"d{k}": {"type": "object", "properties": {x: {"$ref": f"#/$defs/d{k + 1}"} for x in "ab"}, "required": ["a"]}
        for k in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{depth}": {"type": "string"}}}


def nested(depth: int) -> Any:
    """An object in an object in an object."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def rules(length: int) -> str:
    """A grammar of so many rules, each of which names the next."""
    return "\n".join(["start: r0", *(f"r{k}: r{k + 1}" for k in range(length)), f'r{length}: "x"'])


def chat(**more: Any) -> dict[str, Any]:
    """A conversation, and more."""
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def tool(parameters: Any) -> dict[str, Any]:
    """A tool with these parameters."""
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def called(arguments: str) -> list[dict[str, Any]]:
    """A conversation in which a function has been called."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
    ]


def text(size: float) -> str:
    """A text of about so many megabytes."""
    return "def f(x):\n    return x + 1\n" * int(size * 1e6 / 28)


REFUSED = frozenset({400})
EITHER = frozenset({200, 400})
"""Where only the cost counts."""
AMBIGUOUS = "start: e\ne: e e | e e e | e e e e | /[a-z ]/"
SIZE = MEGABYTES * 1_000_000 - 200
LONG = SIZE - 20_000

ATTACKS: dict[str, tuple[str, Callable[[], dict[str, Any] | bytes], frozenset[int]]] = {
    "$ref chain of 900": (
        CHAT,
        lambda: chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": chain(900)}}),
        REFUSED,
    ),
    "$ref chain of 20,000": (TEXT, lambda: wish(json=chain(20_000)), REFUSED),
    "schema of 2^40 objects": (TEXT, lambda: wish(json=doubling(40)), EITHER),
    "schema of 900 levels": (TEXT, lambda: wish(json=json.dumps(nested(900)).replace('"a"', '"not"')), REFUSED),
    "schema in a string, 40,000 levels": (TEXT, lambda: wish(json='{"not":' * 40_000 + "{}" + "}" * 40_000), REFUSED),
    "schema with 20,000 properties": (
        TEXT,
        lambda: wish(json={"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(20_000)}}),
        EITHER,
    ),
    "schema of anyOf^4": (
        TEXT,
        lambda: wish(
            json={
                "allOf": [
                    {"anyOf": [{"properties": {f"x{j}{k}": {"maxLength": k}}} for k in range(40)]} for j in range(4)
                ]
            }
        ),
        EITHER,
    ),
    "schema: string of 10^9": (TEXT, lambda: wish(json={"type": "string", "minLength": 10**9}), EITHER),
    "5,000 chained rules": (TEXT, lambda: wish(grammar=rules(5000)), REFUSED),
    "100,000 chained rules": (TEXT, lambda: wish(grammar=rules(100_000)), REFUSED),
    "start: start": (TEXT, lambda: wish(grammar="start: start"), REFUSED),
    "grammar of 3,000 brackets": (TEXT, lambda: wish(grammar="start: " + "(" * 3000 + '"x"' + ")" * 3000), REFUSED),
    "grammar of 200,000 brackets": (TEXT, lambda: wish(grammar="start: " + "(" * 200_000), REFUSED),
    "ambiguous grammar": (TEXT, lambda: {**wish(grammar=AMBIGUOUS), "ignore_eos": True, "max_tokens": 200}, EITHER),
    "ambiguous grammar, n = 8": (
        TEXT,
        lambda: {**wish(grammar=AMBIGUOUS), "ignore_eos": True, "max_tokens": 200, "n": 8, "temperature": 1},
        EITHER,
    ),
    "regex: nested counts": (TEXT, lambda: wish(regex="((a{1,1000}){1,1000}){1,1000}"), EITHER),
    "regex: 200 brackets": (TEXT, lambda: wish(regex="(" * 100_000 + ")" * 100_000), REFUSED),
    "regex: (.*a)(.{60})": (TEXT, lambda: wish(regex="(.*a.{60})|(.*b.{61})|(.*c.{62})"), EITHER),
    "regex of 1 MB": (TEXT, lambda: wish(regex="(ab|cd)" * 150_000), EITHER),
    "prompt of objects": (TEXT, lambda: b'{"prompt": [' + b"{}," * (SIZE // 3 - 10) + b"{}]}", REFUSED),
    "messages of objects": (CHAT, lambda: b'{"messages": [' + b"{}," * (SIZE // 3 - 10) + b"{}]}", REFUSED),
    "input of numbers": (RESPONSES, lambda: b'{"input": [' + b"1," * (SIZE // 2 - 20) + b"1]}", REFUSED),
    "stop of numbers": (TEXT, lambda: b'{"prompt":"x","stop": [' + b"1," * (SIZE // 2 - 20) + b"1]}", REFUSED),
    "choice of lists": (
        TEXT,
        lambda: b'{"prompt":"x","structured_outputs":{"choice": [' + b"[]," * (SIZE // 3 - 30) + b"[]]}}",
        REFUSED,
    ),
    "a million unknown parameters": (TEXT, lambda: {f"x{k}": 1 for k in range(250_000)}, REFUSED),
    "an object of equal keys": (TEXT, lambda: b"{" + b'"a":1,' * (SIZE // 6 - 10) + b'"b":1}', REFUSED),
    "990,000 prompts": (TEXT, lambda: b'{"prompt": [' + b'"x",' * 990_000 + b'"x"]}', REFUSED),
    "20,000 bad_words, n = 16": (
        TEXT,
        lambda: {"prompt": "x", "n": 16, "max_tokens": 4, "bad_words": [f"w{k} x{k}" for k in range(20_000)]},
        EITHER,
    ),
    "300,000 choices": (TEXT, lambda: wish(choice=[f"w{k}" for k in range(300_000)]), EITHER),
    "allowed_token_ids of 1,000,000": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 4, "allowed_token_ids": [k % 300 for k in range(800_000)]},
        EITHER,
    ),
    "stop_token_ids of 1,000,000": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 4, "n": 16, "stop_token_ids": [5] * 1_000_000},
        EITHER,
    ),
    "logit_bias of 150,000": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 64, "n": 8, "logit_bias": {str(k): 1 for k in range(150_000)}},
        EITHER,
    ),
    "logit_bias: one id in 200,000 spellings": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 16, "n": 8, "logit_bias": {"0" * k + "5": 1 for k in range(2000)}},
        EITHER,
    ),
    "chat_template_kwargs, 900 levels": (CHAT, lambda: chat(chat_template_kwargs={"x": nested(900)}), REFUSED),
    "parameters, 900 levels": (CHAT, lambda: chat(tools=[tool(nested(900))]), REFUSED),
    "parameters, 300 levels": (CHAT, lambda: chat(tools=[tool(nested(300))]), REFUSED),
    "arguments, 900 levels": (CHAT, lambda: {"messages": called(json.dumps(nested(900)))}, REFUSED),
    "arguments, 100,000 levels": (CHAT, lambda: {"messages": called('{"a":' * 100_000 + "1" + "}" * 100_000)}, REFUSED),
    "metadata, 900 levels": (RESPONSES, lambda: {"input": "x", "metadata": nested(900)}, REFUSED),
    "20,000 tools": (CHAT, lambda: chat(tools=[tool({}) for _ in range(20_000)]), REFUSED),
    "64 strict tools": (
        CHAT,
        lambda: chat(
            tools=[
                {"type": "function", "function": {"name": f"f{k}", "parameters": doubling(8), "strict": True}}
                for k in range(64)
            ]
        ),
        EITHER,
    ),
    "60,000 messages": (CHAT, lambda: {"messages": [{"role": "user", "content": "x"}] * 60_000}, REFUSED),
    "prompt of 4 MB": (TEXT, lambda: {"prompt": text(3.6)}, REFUSED),
    "prompt of 4 MB without a space": (TEXT, lambda: {"prompt": "a" * LONG}, REFUSED),
    "prompt of 4 MB of accents": (TEXT, lambda: {"prompt": "\u0300" * 600_000}, REFUSED),
    "message of 4 MB": (CHAT, lambda: {"messages": [{"role": "user", "content": text(3.6)}]}, REFUSED),
    "prediction of 4 MB": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 4, "prediction": {"content": text(3.6)}},
        EITHER,
    ),
    "prompt of 4 MB of token ids": (TEXT, lambda: {"prompt": [5] * 1_000_000}, REFUSED),
    "a user's name of 4 MB": (TEXT, lambda: {"prompt": "x", "max_tokens": 4, "user": "a" * LONG}, EITHER),
    "tokenize 4 MB": ("/tokenize", lambda: {"prompt": text(3.6)}, EITHER),
    "detokenize 1,000,000": ("/detokenize", lambda: {"tokens": [5] * 1_000_000}, EITHER),
    "256 prompts of 15 kB": (TEXT, lambda: {"prompt": ["x " * 7000] * 256, "max_tokens": 1}, frozenset({400, 429})),
    "48 prompts, n = 2": (TEXT, lambda: {"prompt": ["x"] * 48, "n": 2, "max_tokens": 4}, frozenset({200, 429})),
    "a larger draft each time": (
        TEXT,
        lambda: {"prompt": "x", "max_tokens": 8, "speculative": {"num_speculative_tokens": 16}},
        EITHER,
    ),
    "log-probabilities of 64 prompts": (
        TEXT,
        lambda: {"prompt": [text(0.003)] * 64, "max_tokens": 1, "prompt_logprobs": 20},
        frozenset({200, 400, 429}),
    ),
    "Anthropic's messages of objects": (
        "/v1/messages",
        lambda: b'{"model": "demo", "max_tokens": 4, "messages": [' + b"{}," * (SIZE // 3 - 30) + b"{}]}",
        REFUSED,
    ),
    "seeds and numbers of 4,000 digits": (TEXT, lambda: b'{"prompt":"x","seed":' + b"9" * 4000 + b"}", REFUSED),
}


def lengths(url: str) -> int:
    """Every draft length, one after the other."""
    status = 200
    for length in range(1, 17):
        body = {"prompt": "x", "max_tokens": 4, "speculative": {"num_speculative_tokens": length}}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(url + TEXT, json=body, headers=HEADERS["attacker"], timeout=PATIENCE_S)
            status = max(status, answer.status_code)
    return status


def in_chunks(url: str) -> int:
    """A body of which every byte is a chunk; the server may hang up before all of it is sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    given = "".join(f"{name}: {value}\r\n" for name, value in HEADERS["attacker"].items())
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + given.encode()
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as one:
        with contextlib.suppress(OSError):
            one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 1_000_000 + b"0\r\n\r\n")
        with contextlib.suppress(OSError, IndexError):
            return int(one.recv(1000).split()[1])
    return 0


def noise(seconds: float) -> Callable[[str], int]:
    """Bytes, JSON and parameters at random, as fast as they are answered."""

    def send(url: str) -> int:
        rng, end, worst = random.Random(threading.get_ident()), time.monotonic() + seconds, 200
        fields = ["n", "stop", "seed", "logit_bias", "bad_words", "structured_outputs", "temperature", "speculative"]
        values = [None, -1, 10**30, 1e308, "x", "\x00", [], [[]], {}, {"a": {}}, True, ["x"] * 50, list(range(100))]
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=HEADERS["attacker"]) as client:
            while time.monotonic() < end:
                body: Any = {"prompt": "x", "max_tokens": 2, rng.choice(fields): rng.choice(values)}
                content = os.urandom(300) if rng.random() < 0.2 else json.dumps(body).encode()
                with contextlib.suppress(httpx.HTTPError):
                    answer = client.post(TEXT, content=content)
                    worst = max(worst, answer.status_code)
        return worst

    return send


def all_attacks() -> list[Attack]:
    """Every attack, in the order in which they run."""
    found = [
        Attack(name=name, send=posting(path, make), expected=expected)
        for name, (path, make, expected) in ATTACKS.items()
    ]
    return [
        *found,
        Attack(name="every draft length", send=lengths, expected=EITHER),
        Attack(name="900 half-open connections", send=half_open(450), expected=frozenset({200})),
        Attack(name="a body in chunks of one byte", send=in_chunks, expected=frozenset({0, 400})),
        Attack(name="noise", send=noise(4), expected=EITHER),
    ]


def show(results: list[Result]) -> None:
    """As a table."""
    table = Table("attack", "answers", "s", "p50", "p99", "max, ms", "asked", "failed", "MB", "after", "faults")
    for one in results:
        answers = " ".join(f"{count} x {status}" for status, count in one.statuses.items())
        numbers = [f"{value:.0f}" for value in (one.p50_ms, one.p99_ms, one.max_ms, one.asked, one.failed)]
        memory = [f"{one.before_mb:.0f}", f"{one.after_mb:.0f}"]
        table.add_row(one.name, answers, f"{one.seconds:.1f}", *numbers, *memory, "; ".join(one.faults))
    Console(width=200).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--most-ms", type=float, default=1000.0, help="the victim's 99th percentile")
    parser.add_argument("--growth", type=float, default=0.10, help="share of memory that may stay taken")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, help="what the server writes")
    parser.add_argument("serving", nargs="*", help="options of forerun serve, behind --")
    arguments = parser.parse_args()
    results, progress = list[Result](), Console(stderr=True)
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder) / "server.log"
        keys = [word for key in KEYS.values() for word in ("--api-key", key)]
        server = forerun(arguments.model, *keys, *arguments.serving, log=log)
        server.start()
        try:
            for attack in all_attacks():
                if not re.search(arguments.only, attack.name):
                    continue
                one = run(server, attack, arguments.most_ms, arguments.growth)
                results.append(one)
                progress.print(f"{one.name}: {one.statuses} p99 {one.p99_ms:.0f} ms {'; '.join(one.faults)}")
                if not server.alive or one.failed:
                    server.stop()
                    server.start()
        finally:
            server.stop()
    show(results)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in results], indent=1) + "\n")
    return int(any(one.faults for one in results))


if __name__ == "__main__":
    sys.exit(main())
