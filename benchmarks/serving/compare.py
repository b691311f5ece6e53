"""forerun's server beside vLLM's, and beside its own engine: same model, same drafter, same client, taking turns.

``python benchmarks/serving/compare.py`` after ``make test-vllm`` has made vLLM's environment. The demo target is
enlarged to what a 0.4 B model costs; its text is that of the small model. While one server answers, the others are
stopped (SIGSTOP), so they take no processor time. Every request's prompt is new, so no server can reuse a prefix.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from client import Load, drive
from fleet import Server
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from forerun.bench.machine import this_machine
from forerun.bench.scale import scale_model
from forerun.bench.scale_head import scale_head
from forerun.bench.workloads import contexts
from forerun.checkpoints import TargetFacts, read_head, write_head
from forerun.demo import resolve

ROOT = Path(__file__).parents[2]
CONTEXT, TOKENS, MAX_MODEL_LEN, ROWS, FEWEST = 300, 128, 1536, 16, 4
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}
BARE = "engine alone"
NAME = "target"


@dataclass(frozen=True, kw_only=True, slots=True)
class Configs:
    """Speculative configurations of one kind of drafter."""

    ours: dict[str, Any]
    theirs: dict[str, Any]

    @property
    def same(self) -> int | None:
        """vLLM's number of drafted tokens where forerun's own is another: both are then measured."""
        key = "num_speculative_tokens"
        return int(self.theirs[key]) if self.theirs[key] != self.ours[key] else None


class Bare:
    """forerun's engine in a process of its own, without a server."""

    def __init__(self, model: Path, config: Mapping[str, Any] | None) -> None:
        script = Path(__file__).with_name("bare.py")
        command = [sys.executable, str(script), str(model), json.dumps(config), str(TOKENS), str(MAX_MODEL_LEN)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def rate(self, prompts: Sequence[str]) -> float:
        """Tokens per second, one prompt after the other; while nobody asks it waits for input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._read())
        return float(found["tokens"] / found["seconds"])

    def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def main() -> int:
    """Measure, print, keep."""
    options = _options()
    console = Console()
    models = _models(options.work)
    found: dict[str, Any] = {"machine": str(this_machine()), "tokens": TOKENS, "context": CONTEXT, "drafters": {}}
    for drafter in options.drafters:
        config = _configs(models)[drafter]
        console.print(f"[bold]{drafter}[/]: starting the servers", highlight=False)
        found["drafters"][drafter] = _measure(drafter, config, models, options, console)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        console.print(_table(drafter, found["drafters"][drafter]))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", nargs="+", default=["ngram", "draft_model", "eagle3"])
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, default=ROOT / ".venv-vllm/bin/python", help="none leaves vLLM out")
    parser.add_argument("--work", type=Path, default=ROOT / "build/serving")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serving.json")
    return parser.parse_args()


def _models(work: Path) -> dict[str, Path]:
    """The enlarged target, draft model and head on disk."""
    work.mkdir(parents=True, exist_ok=True)
    target = scale_model(resolve("demo"), billions=0.4)
    draft = scale_model(resolve("demo-draft"), billions=0.031)
    head = read_head(resolve("demo-eagle3"), num_layers=target.source_layers)
    folder = work / "head"
    write_head(scale_head(head, target), folder, "flat", TargetFacts.read(target.path))
    return {"target": target.path, "draft": draft.path, "head": folder}


def _configs(models: Mapping[str, Path]) -> dict[str, Configs]:
    """What each engine is told: vLLM the setup of its documentation, forerun the same drafter under control."""
    theirs = {
        "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        "draft_model": {"method": "draft_model", "model": str(models["draft"]), "num_speculative_tokens": 5},
        "eagle3": {"method": "eagle3", "model": str(models["head"]), "num_speculative_tokens": 5},
    }
    found = {name: Configs(ours={**config, "adaptive": True}, theirs=config) for name, config in theirs.items()}
    found["ngram"].ours["num_speculative_tokens"] = 16
    return found


def _measure(
    drafter: str, config: Configs, models: Mapping[str, Path], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Arm -> clients -> tokens per second and time to first token of every round."""
    servers = _servers(drafter, config, models, options)
    bare = None
    try:
        for server in servers.values():
            server.start()
            server.pause()
        bare = Bare(models["target"], config.ours)
        return _rounds(servers, bare, config.same, models, options, console)
    finally:
        for server in servers.values():
            server.stop()
        if bare is not None:
            bare.stop()


def _servers(
    drafter: str, config: Configs, models: Mapping[str, Path], options: argparse.Namespace
) -> dict[str, Server]:
    """By name; forerun's own plain decoding is asked of the same server, request by request."""
    target, length = str(models["target"]), ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(ROWS)]
    length += ["--served-model-name", NAME]
    ours = [str(Path(sys.executable).with_name("forerun")), "serve", target, *length, *_speculative(config.ours)]
    servers = {"forerun": Server(name="forerun", command=ours, log=options.work / f"forerun-{drafter}.log")}
    if str(options.vllm) != "none":
        # Not `vllm serve`: it asks for the metadata of a package of that name, and this one is called vllm-cpu.
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", "bfloat16"]
        theirs = [str(options.vllm), *module, *length, *_speculative(config.theirs)]
        log = options.work / f"vllm-{drafter}.log"
        servers["vllm"] = Server(name="vllm", command=theirs, log=log, environment=VLLM)
    return servers


def _speculative(config: Mapping[str, Any]) -> list[str]:
    return ["--speculative-config", json.dumps(config)]


def _rounds(
    servers: Mapping[str, Server],
    bare: Bare,
    same: int | None,
    models: Mapping[str, Path],
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    texts = _texts(models["target"])
    arms = {name: (server, {}) for name, server in servers.items()}
    if same is not None:
        arms[f"forerun, K={same}"] = (servers["forerun"], {"speculative": {"num_speculative_tokens": same}})
    arms["forerun plain"] = (servers["forerun"], {"speculative": {"enabled": False}})
    rates: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    names = list(arms)
    for turn in range(-1, options.rounds):
        for clients in options.clients if turn >= 0 else (2,):
            count = max(FEWEST, clients) if turn >= 0 else 2
            for name in names if turn % 2 else reversed(names):
                server, extra = arms[name]
                bodies = [_body(text, extra) for text in _fresh(texts, count, f"{name} {turn} {clients}")]
                load = _load(server, bodies, clients)
                rate = load.tokens_per_second
                console.print(f"  {turn + 1}/{options.rounds} {name:14} {clients:3} clients {rate:7.1f} tokens/s")
                if turn >= 0:
                    rates[name][str(clients)].append([load.tokens_per_second, load.first_ms])
        if turn >= 0:
            rates[BARE]["1"].append([bare.rate(_fresh(texts, FEWEST, f"{BARE} {turn}")), 0.0])
        else:
            bare.rate(_fresh(texts, 1, "warm"))
    return {name: dict(by_clients) for name, by_clients in rates.items()}


def _load(server: Server, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    server.resume()
    try:
        return drive(server.url, bodies, clients)
    finally:
        server.pause()


def _texts(target: Path) -> list[str]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    return [tokenizer.decode(ids) for ids in contexts(tokenizer, count=ROWS, length=CONTEXT)]


def _fresh(texts: Sequence[str], count: int, mark: str) -> list[str]:
    """Prompts that nobody has seen: each begins with a comment of its own."""
    return [f"# {mark} {index}\n{texts[index % len(texts)]}" for index in range(count)]


def _body(prompt: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    asked = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**asked, **extra}


def _table(drafter: str, found: Mapping[str, Any]) -> Table:
    table = Table(title=f"{drafter}: tokens/s of all clients together (median), time to first token")
    table.add_column("arm")
    clients = list(found["forerun"])
    for number in clients:
        table.add_column(f"{number} clients", justify="right")
    for name, by_clients in found.items():
        cells = [_cell(by_clients.get(number)) for number in clients]
        table.add_row(name, *cells)
    for other in [name for name in found if name != "forerun"]:
        ratios = [_ratio(found["forerun"].get(number), found[other].get(number)) for number in clients]
        table.add_row(f"forerun / {other}", *ratios, style="bold")
    return table


def _cell(runs: Sequence[Sequence[float]] | None) -> str:
    if not runs:
        return ""
    rate, first = median(run[0] for run in runs), median(run[1] for run in runs)
    return f"{rate:.1f}" + (f" ({first:.0f} ms)" if first else "")


def _ratio(ours: Sequence[Sequence[float]] | None, theirs: Sequence[Sequence[float]] | None) -> str:
    """Median over the rounds of the ratio within a round."""
    if not ours or not theirs:
        return ""
    return f"{median(own[0] / other[0] for own, other in zip(ours, theirs, strict=True)):.2f} x"


if __name__ == "__main__":
    sys.exit(main())
