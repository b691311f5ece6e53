"""forerun beside transformers, vLLM and llama.cpp on the questions of Spec-Bench: one machine, one model, by category.

    python benchmarks/spec_bench.py smollm2 --questions spec_bench.jsonl --out answers.jsonl

Each engine is a process in an environment of its own (`make test-vllm` and `make test-llama` make those of vLLM and
llama.cpp; an engine that is not there is left out). They take turns on every question, in another order each time; who
is not asked waits and uses no processor time. An answer ends where the model ends it. **Its time holds the prompt.**
Every answer is a line of `--out` as soon as it is there, and what stands in that file is not asked again: stop it when
you like (or after `--minutes`), start it again, add arms, questions, rounds. The table is of all that the file holds.

forerun's process starts anew with every category, so each category begins with drafters and a policy that know nothing
(`--memory category`), and no round or batch copies what another one answered; with ``question`` drafters forget what
they learned after each one, with ``run`` nothing is ever forgotten. Only a question's first turn is asked: the second
one would depend on what an engine answered to the first.

The board of docs/benchmarks.md is this program with forerun's arms alone, at two temperatures:

    python benchmarks/spec_bench.py smollm2 --questions spec_bench.jsonl --alone --drafters ngram suffix auto \
        'eagle3={"method": "eagle3", "model": "HEAD"}' --temperature 0 1 --board
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import fmean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CONVERSATION = "conversation"
"""Spec-Bench's name for the eight kinds of questions that it took over from MT-Bench."""
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
DRAFTERS = ("ngram", "suffix", "recycling", "auto")
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": str(os.cpu_count()),  # Else "Reducing Torch threads from 2 to 1 for serving": a quarter slower
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VLLM_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""The values that vLLM's documentation uses."""
LLAMA_NGRAM = ("--spec-type", "ngram-mod")
WARM_UP = "Write two sentences about the sea. Then write them again."
PLAIN = "forerun plain"
ALL = "all"  # Of every category together

# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class Worker:
    """An engine behind `spec_workers.py`."""

    engine: str
    python: Path
    options: Mapping[str, Any]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Load it and wait. SystemExit: it ended."""
        command = [str(self.python), str(ROOT / "benchmarks/spec_workers.py"), self.engine, json.dumps(self.options)]
        with self.log.open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
            )
        self._read()

    def ask(self, arm: Any, order: Mapping[str, Any]) -> dict[str, Any]:
        """Let it answer, and wait."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps({**order, "arm": arm}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End it; the next question starts it anew."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine} ended with {self._process.wait()}; {self.log} says why")
        found: dict[str, Any] = json.loads(line)
        return found


@dataclass(kw_only=True, slots=True)
class LlamaServer:
    """`llama-server`, which is asked by token ids and keeps no prompt."""

    command: Sequence[str]
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _port: int = 0

    def start(self) -> None:
        """Start it and wait until it is healthy. SystemExit: it ended."""
        sys.path.insert(0, str(ROOT / "benchmarks/serving"))
        from fleet import free_port

        self._port = free_port()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([*self.command, "--port", str(self._port)], stdout=log, stderr=log)
        while self._process.poll() is None:
            with contextlib.suppress(OSError):
                if self._call("GET", "/health", None)[0] == 200:
                    return
            time.sleep(0.1)
        raise SystemExit(f"llama-server ended with {self._process.wait()}; {self.log} says why")

    def ask(self, arm: Any, order: Mapping[str, Any]) -> dict[str, Any]:
        """Let it answer, and wait."""
        if self._process is None:
            self.start()
        bodies = [
            {
                "prompt": prompt,
                "n_predict": order["tokens"],
                "temperature": order["temperature"],
                "seed": order["seed"] + index,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "cache_prompt": False,
                **arm,
            }
            for index, prompt in enumerate(order["prompts"])
        ]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(lambda body: self._call("POST", "/completion", body), bodies))
        seconds = time.perf_counter() - began
        for status, answer in answers:
            if status != 200:
                raise SystemExit(f"llama-server: {status} {answer}")
        return {"seconds": seconds, "tokens": sum(answer["tokens_predicted"] for _, answer in answers)}

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()
            self._process = None

    def _call(self, verb: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, Any]:
        with contextlib.closing(HTTPConnection("127.0.0.1", self._port, timeout=600)) as connection:
            words = None if body is None else json.dumps(body)
            connection.request(verb, path, words, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One way to decode."""

    engine: Worker | LlamaServer
    how: Any  # What the engine is told with every question
    batches: bool = True  # Whether it answers several questions at once


def arms_of(options: argparse.Namespace) -> dict[str, Arm]:
    """By name, the peers first; those whose environment is not there are left out, which is said."""
    shape = {"model": str(options.model), "dtype": options.dtype, "context": options.context}
    shape |= {"rows": max([1, *options.rows])}
    ours = Path(sys.executable)

    def worker(engine: str, name: str, python: Path, more: Mapping[str, Any], **environment: str) -> Worker:
        log = options.work / f"{re.sub('[^a-z]+', '-', name)}.log"
        return Worker(engine=engine, python=python, options={**shape, **more}, log=log, environment=environment)

    transformers = worker("transformers", "transformers", ours, {})
    arms = {
        "transformers plain": Arm(engine=transformers, how={}),
        "transformers prompt lookup": Arm(engine=transformers, how={"prompt_lookup_num_tokens": 10}, batches=False),
    }
    if options.vllm.is_file():
        for name, config in (("vllm plain", None), ("vllm ngram", VLLM_NGRAM)):
            engine = worker("vllm", name, options.vllm, {"speculative": config}, **VLLM)
            arms[name] = Arm(engine=engine, how=None)
    else:
        say(f"vLLM is left out: there is no {options.vllm}; make test-vllm makes it, --vllm says where it is")
    if options.llama_server.is_file() and options.gguf is not None:
        rows = shape["rows"]
        command = [str(options.llama_server), "-m", str(options.gguf), "-c", str(options.context * rows)]
        command += ["-np", str(rows)]
        command += ["-t", str(os.cpu_count()), "-tb", str(os.cpu_count()), "--host", "127.0.0.1"]
        for name, more in (("llama.cpp plain", ()), ("llama.cpp ngram-mod", LLAMA_NGRAM)):
            server = LlamaServer(command=[*command, *more], log=options.work / f"{name.replace(' ', '-')}.log")
            arms[name] = Arm(engine=server, how={})
    else:
        say(f"llama.cpp is left out: it needs --gguf and {options.llama_server}, which make test-llama builds")
    for backend in options.backends:
        more = {"loading": {**json.loads(options.loading), "backend": backend}, "model": str(options.named)}
        suffix = "" if backend == options.backends[0] else f" on {backend}"
        forerun = worker("forerun", f"forerun{suffix}", ours, more, PYTHONPATH=str(ROOT / "src"))
        arms[PLAIN + suffix] = Arm(engine=forerun, how=False)
        for drafter in options.drafters:
            name, _, config = drafter.partition("=")
            how = json.loads(config) if config else json.loads(name) if name.startswith("{") else {"method": name}
            arms[f"forerun {name}{suffix}"] = Arm(engine=forerun, how=how)
    chosen = options.arms or [name for name in arms if not options.alone or name.startswith("forerun ")]
    unknown = [name for name in chosen if name not in arms]
    if unknown:
        raise SystemExit(f"no arm {unknown[0]!r}; there are {', '.join(arms)}")
    return {name: arm for name, arm in arms.items() if name in chosen}


def find(options: argparse.Namespace) -> None:
    """Replace the model's name by its directory, and `--gguf` by its file where it is one."""
    from forerun import shipped
    from forerun.model.gguf import with_weights
    from forerun.model.names import resolve

    file = Path(shipped.resolve(options.model))
    options.gguf = options.gguf or (file if file.suffix == ".gguf" else None)
    options.named = file  # What forerun opens; others need a directory
    options.model = with_weights(resolve(options.model))


# --- questions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked at once: a question, or a batch of a category's questions."""

    category: str
    name: str
    prompts: Sequence[Sequence[int]]


def questions_of(options: argparse.Namespace) -> list[Question]:
    """The questions one by one, spread over each category's, then its first ones as batches of each size."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    by_category = defaultdict[str, list[tuple[str, list[int]]]](list)
    for line in options.questions.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        category = CONVERSATION if row["category"] in MT_BENCH else row["category"]
        messages = [{"role": "user", "content": row["turns"][0]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        if len(ids) + options.tokens <= options.context:
            by_category[category].append((str(row["question_id"]), list(ids)))
    found = []
    for category, every in by_category.items():
        if options.categories and category not in options.categories:
            continue
        count = min(options.limit, len(every))
        single = [every[index * len(every) // count] for index in range(count)]
        for rows in options.rows or [1]:
            groups = [[one] for one in single] if rows == 1 else [_spread(every, rows)]
            for group in groups:
                name = group[0][0] if rows == 1 else f"{rows} rows"
                found.append(Question(category=category, name=name, prompts=[ids for _, ids in group]))
    return found


def _spread(every: Sequence[Any], count: int) -> list[Any]:
    return [every[index * len(every) // count] for index in range(count)]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, arms: Mapping[str, Arm]) -> None:
    """Ask what `--out` does not hold yet, and add it there."""
    questions = questions_of(options)
    known = {_key(line) for line in lines_of(options.out)}
    until = time.monotonic() + 60 * options.minutes
    engines = {id(arm.engine): arm.engine for arm in arms.values()}
    category, warm = None, set[str]()
    try:
        turns = itertools.product(questions, options.temperature, range(options.rounds))
        for turn, (question, temperature, number) in enumerate(turns):
            rows = len(question.prompts)
            order = [name for name, arm in arms.items() if rows == 1 or arm.batches]
            order = order[turn % len(order) :] + order[: turn % len(order)]
            stamp = {"category": question.category, "question": question.name, "rows": rows, "round": number}
            stamp |= {"temperature": temperature, "tokens_asked": options.tokens, "memory": options.memory}
            lacking = [name for name in order if _key({**stamp, "arm": name}) not in known]
            if lacking and options.memory != "run" and category != question.category:
                for name in [name for name in warm if name.startswith("forerun")]:
                    arms[name].engine.stop()
                    warm.discard(name)
            category = question.category if lacking else category
            for name in lacking:
                if time.monotonic() > until:
                    return
                if name not in warm:
                    arms[name].engine.ask(arms[name].how, _warm_up(options))
                    warm.add(name)
                memory = f"{question.category} {rows} {number} {temperature:g}"
                memory = "run" if options.memory == "run" else memory
                asked = {
                    "prompts": question.prompts,
                    "tokens": options.tokens,
                    "temperature": temperature,
                    "seed": 1000 * number + turn,
                    "memory": f"{question.name} {memory}" if options.memory == "question" else memory,
                }
                found = arms[name].engine.ask(arms[name].how, asked)
                line = {**stamp, "arm": name, "prompt_tokens": sum(map(len, question.prompts)), **found}
                with options.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(line) + "\n")
                say(f"{question.category} {question.name} {name}: {found['tokens'] / found['seconds']:.1f} tokens/s")
    finally:
        for engine in engines.values():
            engine.stop()


def _warm_up(options: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": WARM_UP}]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return {"prompts": [list(ids)], "tokens": 8, "temperature": 0.0, "seed": 0, "memory": "warm-up"}


def _key(line: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("arm", "category", "question", "rows", "round", "temperature", "tokens_asked")
    return *(line[name] for name in names), line["memory"] if line["arm"].startswith("forerun") else None


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """What was measured so far; a last line that was cut short does not count."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)


# --- the table --------------------------------------------------------------------------------------------------------

Rates = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Arm -> category -> question -> tokens/s, the median of the rounds."""


def rates_of(lines: Sequence[Mapping[str, Any]]) -> Rates:
    """What lines of one number of rows and one temperature say."""
    every: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for line in lines:
        if line["tokens"]:
            every[line["arm"]][line["category"]][line["question"]].append(line["tokens"] / line["seconds"])
    return {
        arm: {kind: {name: median(rates) for name, rates in own.items()} for kind, own in kinds.items()}
        for arm, kinds in every.items()
    }


def ratios(rates: Rates, arm: str, other: str) -> dict[str, list[float]]:
    """Category -> of each question that both answered, `arm`'s rate over the other's."""
    ours, theirs = rates.get(arm, {}), rates.get(other, {})
    found = {
        kind: [ours[kind][name] / theirs[kind][name] for name in ours[kind] if name in theirs[kind]]
        for kind in ours
        if kind in theirs
    }
    return {kind: own for kind, own in found.items() if own}


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tokens/s by arm and category (median over the questions), and `auto` beside every other arm."""
    rates = rates_of(lines)
    passes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for line in lines:
        for kind in (ALL, line["category"]):
            passes[line["arm"]][kind][0] += line["tokens"]
            passes[line["arm"]][kind][1] += line.get("passes", 0)
    per_pass = {
        arm: {kind: round(tokens / count, 2) for kind, (tokens, count) in own.items() if count}
        for arm, own in passes.items()
    }
    best = "forerun auto" if "forerun auto" in rates else PLAIN
    beside = dict[str, Any]()
    for other in [name for name in rates if name != best]:
        by_category = ratios(rates, best, other)
        middle = {kind: round(median(own), 3) for kind, own in by_category.items()}
        if middle:
            worst = min(min(own) for own in by_category.values())
            beside[other] = {**middle, "mean": round(fmean(middle.values()), 3), "worst question": round(worst, 3)}
    return {
        "questions": {kind: len(own) for kind, own in rates.get(best, {}).items()},
        "tokens_per_second": {
            arm: {kind: round(median(own.values()), 1) for kind, own in kinds.items()} for arm, kinds in rates.items()
        },
        "tokens_per_pass": {arm: own for arm, own in per_pass.items() if own},
        "speedup": {
            arm: {kind: round(median(own), 2) for kind, own in ratios(rates, arm, PLAIN).items()} for arm in rates
        },
        f"{best} over": beside,
    }


def show(found: Mapping[str, Any], title: str) -> None:
    """As a table."""
    from rich.console import Console
    from rich.table import Table

    speeds = found["tokens_per_second"]
    kinds = list(dict.fromkeys(kind for own in speeds.values() for kind in own))
    table = Table("", *kinds, "mean", "tokens per pass", "worst question", title=title, title_justify="left")
    for arm, own in speeds.items():
        cells = [f"{own[kind]:.1f}" if kind in own else "" for kind in kinds]
        mean = f"{fmean(own.values()):.1f}" if len(own) == len(kinds) else ""
        table.add_row(arm, *cells, mean, str(found["tokens_per_pass"].get(arm, {}).get(ALL, "")), "")
    table.add_section()
    [(over, beside)] = [(key, value) for key, value in found.items() if key.endswith(" over")]
    for other, own in beside.items():
        cells = [f"{own[kind]:.2f}" if kind in own else "" for kind in kinds]
        table.add_row(f"{over} {other}", *cells, f"{own['mean']:.2f}", "", f"{own['worst question']:.2f}")
    Console(width=190).print(table)


def write_board(found: Mapping[str, Any]) -> None:
    """Print the board as Markdown: of each drafter tokens per pass and speed over plain decoding's, by category."""
    kinds = list(found["questions"])
    rows = [["", *kinds, "mean"], ["---"] * (len(kinds) + 2)]
    speeds = {arm: own for arm, own in found["speedup"].items() if arm.startswith("forerun ") and arm != PLAIN}
    for arm in sorted(speeds, key=lambda name: -fmean(speeds[name].values())):
        own, passes = speeds[arm], found["tokens_per_pass"][arm]
        cells = [f"{passes[kind]:.2f}, {own[kind]:.2f} x" if kind in own else "" for kind in kinds]
        rows.append([f"`{arm.removeprefix('forerun ')}`", *cells, f"{passes[ALL]:.2f}, {fmean(own.values()):.2f} x"])
    sys.stdout.write("\n".join(f"| {' | '.join(cells)} |" for cells in rows) + "\n")


def say(text: str) -> None:
    """A line on standard error."""
    sys.stderr.write(text + "\n")


def main() -> None:
    """Measure, and print a table, or one JSON line with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="as forerun takes it; what others need of it is a directory, which it becomes")
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl, or lines like its")
    parser.add_argument("--out", type=Path, default=ROOT / "build/spec_bench.jsonl", help="one line for each answer")
    parser.add_argument("--limit", type=int, default=5, help="questions of each category")
    parser.add_argument("--categories", nargs="+", help="only these")
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rounds", type=int, default=1, help="times that each question is asked; the median counts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="questions that are asked at once")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS), help="of forerun: NAME, JSON or NAME=JSON")
    parser.add_argument("--alone", action="store_true", help="forerun's arms alone")
    parser.add_argument("--arms", nargs="+", help="only these, by the names that the table shows")
    parser.add_argument("--memory", choices=["category", "question", "run"], default="category")
    parser.add_argument("--dtype", default="auto", help="of all but llama.cpp, whose file says its own")
    parser.add_argument("--context", type=int, default=4096, help="most tokens of question and answer")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp; the model itself if it is such a file")
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python")
    built = ROOT / "build/llama-cpp-python/vendor/llama.cpp/build/bin/llama-server"
    parser.add_argument("--llama-server", type=Path, default=built)
    parser.add_argument(
        "--backends", nargs="+", default=["auto"], help="of forerun's arms: auto, llama.cpp, transformers"
    )
    parser.add_argument("--loading", default="{}", help="further keywords of forerun's LLM, JSON")
    parser.add_argument("--minutes", type=float, default=1e6, help="no question is begun after so long")
    parser.add_argument("--work", type=Path, default=ROOT / "build/spec_bench", help="for the engines' logs")
    parser.add_argument("--table", action="store_true", help="ask nothing: show what the file holds")
    parser.add_argument("--board", action="store_true", help="Markdown: tokens per pass and speed-up by category")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not options.table:
        find(options)
        measure(options, arms_of(options))
    lines, found = list(lines_of(options.out)), dict[str, Any]()
    for rows, temperature, tokens in sorted({(one["rows"], one["temperature"], one["tokens_asked"]) for one in lines}):
        same = (rows, temperature, tokens)
        chosen = [one for one in lines if (one["rows"], one["temperature"], one["tokens_asked"]) == same]
        title = f"{rows} at once, T = {temperature:g}, at most {tokens} tokens"
        found[title] = summary(chosen)
        if options.board:
            sys.stdout.write(f"\n{title}:\n\n")
            write_board(found[title])
        elif not options.json:
            show(found[title], f"{title}: tokens/s, prompts included")
    if options.json:
        from benchmarks.suite.suite import this_machine

        sys.stdout.write(
            json.dumps({"machine": str(this_machine()), "model": Path(options.model).name, **found}) + "\n"
        )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
