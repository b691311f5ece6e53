"""forerun's server beside vLLM's: same model, same drafter, same client, taking turns.

``python benchmarks/serving/compare.py`` after ``make test-vllm`` has made vLLM's environment. The demo target is
enlarged to what a 0.4 B model costs; its text is that of the small model. While one server answers, the others are
stopped (SIGSTOP), so they take no processor time. All get the same prompts, and none keeps a prefix.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import scene
from client import Load, drive
from fleet import Server
from rich.console import Console
from rich.table import Table

from benchmarks.suite.suite import this_machine

VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


def main() -> int:
    """Measure, print, keep."""
    options = _options()
    console = Console()
    options.work.mkdir(parents=True, exist_ok=True)
    models = scene.models()
    found: dict[str, Any] = {
        "machine": str(this_machine()),
        "tokens": scene.TOKENS,
        "context": scene.CONTEXT,
        "drafters": {},
    }
    for drafter in options.drafters:
        config = scene.configs(models)[drafter]
        console.print(f"[bold]{drafter}[/]: starting the servers", highlight=False)
        found["drafters"][drafter] = _measure(drafter, config, models, options, console)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        console.print(_table(drafter, found["drafters"][drafter]))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", nargs="+", default=list(scene.DRAFTERS), choices=scene.DRAFTERS)
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, default=scene.ROOT / ".venv-vllm/bin/python", help="none leaves vLLM out")
    parser.add_argument("--work", type=Path, default=scene.ROOT / "build/serving")
    parser.add_argument("--out", type=Path, default=scene.ROOT / "benchmarks/results/serving.json")
    return parser.parse_args()


def _measure(
    drafter: str, config: scene.Configs, models: Mapping[str, Path], options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Arm -> clients -> tokens per second and time to first token of every round."""
    servers = _servers(drafter, config, models, options)
    try:
        for server in servers.values():
            server.start()
            server.pause()
        return _rounds(servers, config.same, models, options, console)
    finally:
        for server in servers.values():
            server.stop()


def _servers(
    drafter: str, config: scene.Configs, models: Mapping[str, Path], options: argparse.Namespace
) -> dict[str, Server]:
    """By name; forerun's own plain decoding is asked of the same server, request by request."""
    target = str(models["target"])
    length = ["--max-model-len", str(scene.MAX_MODEL_LEN), "--max-num-seqs", str(scene.ROWS)]
    length += ["--served-model-name", scene.NAME, "--no-enable-prefix-caching"]
    # vLLM shares among all requests, too.
    sharing = [*length, "--share-unnamed"]
    ours = [str(Path(sys.executable).with_name("forerun")), "serve", target, *sharing, *_speculative(config.ours)]
    servers = {"forerun": Server(name="forerun", command=ours, log=options.work / f"forerun-{drafter}.log")}
    if str(options.vllm) != "none":
        theirs = [*vllm_command(options.vllm, target), *length, *_speculative(config.theirs)]
        log = options.work / f"vllm-{drafter}.log"
        servers["vllm"] = Server(name="vllm", command=theirs, log=log, environment=VLLM)
    return servers


def vllm_command(python: Path, target: str, dtype: str = "bfloat16") -> list[str]:
    """Starts vLLM's server. Not `vllm serve`: it asks for the metadata of a package of that name, but this one's is
    vllm-cpu."""
    return [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--dtype", dtype]


def _speculative(config: Mapping[str, Any]) -> list[str]:
    return ["--speculative-config", json.dumps(config)]


def _rounds(
    servers: Mapping[str, Server],
    same: int | None,
    models: Mapping[str, Path],
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Any]:
    texts = scene.texts(models["target"])
    arms = {name: (server, {}) for name, server in servers.items()}
    if same is not None:
        arms[f"forerun, K={same}"] = (servers["forerun"], {"speculative": {"num_speculative_tokens": same}})
    arms["forerun plain"] = (servers["forerun"], {"speculative": {"enabled": False}})
    rates: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    names = list(arms)
    for turn in range(-1, options.rounds):
        for clients in options.clients if turn >= 0 else (2,):
            prompts = scene.fresh(texts, max(scene.FEWEST, clients) if turn >= 0 else 2, f"round {turn} {clients}")
            for name in names if turn % 2 else reversed(names):
                server, extra = arms[name]
                bodies = [scene.body(prompt, extra) for prompt in prompts]
                load = answered(server, bodies, clients)
                rate = load.tokens_per_second
                console.print(f"  {turn + 1}/{options.rounds} {name:14} {clients:3} clients {rate:7.1f} tokens/s")
                if turn >= 0:
                    rates[name][str(clients)].append([load.tokens_per_second, load.first_ms])
    return {name: dict(by_clients) for name, by_clients in rates.items()}


def answered(server: Server, bodies: Sequence[Mapping[str, Any]], clients: int) -> Load:
    """What the clients get of a server that is stopped before and afterwards."""
    server.resume()
    try:
        return drive(server.url, bodies, clients)
    finally:
        server.pause()


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
