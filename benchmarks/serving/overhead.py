"""What the server costs: one engine in one process, asked over HTTP by one client, and directly, taking turns.

``python benchmarks/serving/overhead.py``. Two processes would differ in more than the server: where the weights lie in
memory alone moves decoding by up to a tenth. Both ways get every prompt, one straight after the other, for the pace of
the machine moves as much within a minute; and no prefix is kept, for another comment at the head of a prompt moves the
tokens of a step by a twentieth. The client is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import scene
from fleet import free_port
from rich.console import Console
from rich.table import Table

from benchmarks.suite.suite import this_machine
from forerun import AsyncLLM, SamplingParams
from forerun.serve.server import server
from forerun.serve.session import Session, State
from forerun.serve.settings import ServeSettings

GOAL = 0.97
SERVER, ENGINE = "server", "engine alone"
Rates = dict[str, list[float]]
"""Way of asking -> tokens per second of every prompt."""


def main() -> None:
    """Measure, show, and keep the figures."""
    options, console = _options(), Console(width=100, stderr=True)
    paths = scene.models()
    pieces = scene.texts(paths["target"])
    found: dict[str, Rates] = {}
    for name in options.drafters:
        config = scene.configs(paths)[name].ours
        found[name] = asyncio.run(_measure(name, paths["target"], config, pieces, options.prompts, console))
    console.print(_table(found))
    report = {"machine": str(this_machine()), "tokens": scene.TOKENS, "context": scene.CONTEXT, "drafters": found}
    options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


async def _measure(
    name: str, target: Path, config: Mapping[str, Any], pieces: Sequence[str], count: int, console: Console
) -> Rates:
    """The two ways take turns at coming first; the first prompts warm up."""
    session = Session(ServeSettings(model_names=(scene.NAME,)), lambda: _load(target, config))
    port = free_port()
    running = server(session, host="127.0.0.1", port=port)
    serving = asyncio.create_task(running.serve())
    while session.state is State.LOADING:
        await asyncio.sleep(0.1)
    script = Path(__file__).with_name("client.py")
    client = await asyncio.create_subprocess_exec(
        sys.executable, str(script), f"http://127.0.0.1:{port}", "1", stdin=PIPE, stdout=PIPE
    )
    rates: Rates = {SERVER: [], ENGINE: []}
    prompts = scene.fresh(pieces, count + scene.FEWEST, "prompt")
    for turn, prompt in enumerate(prompts, start=1 - scene.FEWEST):
        for way in sorted(rates, reverse=bool(turn % 2)):
            rate = await (_over_http(client, prompt) if way == SERVER else _directly(session.engine, prompt))
            console.print(f"  {name} {turn}/{count} {way:12} {rate:7.1f} tokens/s")
            if turn > 0:
                rates[way].append(rate)
    assert client.stdin is not None
    client.stdin.close()
    await client.wait()
    running.should_exit = True
    await serving
    return rates


def _load(target: Path, config: Mapping[str, Any]) -> AsyncLLM:
    return AsyncLLM(
        str(target),
        speculative_config=config,
        max_num_seqs=scene.ROWS,
        max_model_len=scene.MAX_MODEL_LEN,
        enable_prefix_caching=False,
    )


async def _over_http(client: Process, prompt: str) -> float:
    assert client.stdin is not None and client.stdout is not None
    client.stdin.write((json.dumps([scene.body(prompt, {})]) + "\n").encode())
    await client.stdin.drain()
    return float(json.loads(await client.stdout.readline())["tokens_per_second"])


async def _directly(engine: AsyncLLM, prompt: str) -> float:
    """In the engine's own thread: a second one that computes would slow both down."""
    params = SamplingParams(temperature=0.0, max_tokens=scene.TOKENS, ignore_eos=True)

    def rate() -> float:
        began = time.perf_counter()
        answer = engine.llm.generate(prompt, params)[0].outputs[0]
        return len(answer.token_ids) / (time.perf_counter() - began)

    return await asyncio.get_running_loop().run_in_executor(engine._worker, rate)


def _table(found: Mapping[str, Rates]) -> Table:
    table = Table(title=f"tokens/s of one client (median), goal {GOAL}")
    for column in ("drafter", SERVER, ENGINE, f"{SERVER} / {ENGINE}", "half of all prompts"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for name, rates in found.items():
        ratios = [ours / bare for ours, bare in zip(rates[SERVER], rates[ENGINE], strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        speeds = [f"{median(rates[way]):.1f}" for way in (SERVER, ENGINE)]
        table.add_row(name, *speeds, f"{middle:.3f}", f"{low:.2f} to {high:.2f}")
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafters", nargs="+", default=list(scene.DRAFTERS), choices=scene.DRAFTERS)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--out", type=Path, default=scene.ROOT / "benchmarks/results/overhead.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
