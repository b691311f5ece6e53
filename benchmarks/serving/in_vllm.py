"""forerun's drafters inside vLLM, beside vLLM's own `ngram`: edits, really answered, by vLLM's server on a CPU.

``python benchmarks/serving/in_vllm.py`` after ``make test-vllm`` has made vLLM's environment. The demo target is
enlarged to what a 0.4 B model costs; each arm is a vLLM server (model runner V1) that drafts as many tokens as the
others. While one answers, the others are stopped (SIGSTOP). Nothing is asked twice: drafters remember answers. The one
without drafts answers the first round alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import scene
from compare import VLLM, answered, vllm_command
from fleet import Server
from transformers import AutoTokenizer

from benchmarks.suite.suite import this_machine
from forerun.demo import edits
from forerun.demo.scale import ScaledModel
from forerun.deploy.engines.vllm import PLUG_IN, VARIABLE
from forerun.shipped import resolve

OWN, PLAIN = "vLLM's ngram", "vLLM, plain"
FIGURES = {"tokens_per_second": ("tokens/s", 1), "tpot_ms": ("ms TPOT", -1)}
"""Of a round: unit, and 1 where more is better; the first has reading the prompts in it, the second (time per output
token after the first) not."""
Loads = list[dict[str, float]]
_WARMING = 4  # Texts at most, the shortest


def main() -> int:
    """Measure, and print a table, or one JSON line with ``--json``."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--texts", type=int, default=6, help="of a round; the longest of the shipped edits first")
    options.add_argument("--tokens", type=int, nargs="+", default=[5, 16], help="of a draft")
    options.add_argument("--methods", nargs="+", default=["suffix", "ngram"], help="of forerun, or configurations")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--billions", type=float, default=0.4)
    options.add_argument("--dtype", default="bfloat16", help="float32 where the processor computes no bfloat16")
    options.add_argument("--vllm", type=Path, default=scene.ROOT / ".venv-vllm/bin/python")
    options.add_argument("--work", type=Path, default=scene.ROOT / "build/serving")
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    asked.work.mkdir(parents=True, exist_ok=True)
    found = {tokens: _measured(tokens, asked) for tokens in asked.tokens}
    if asked.json:
        print(json.dumps({"machine": str(this_machine()), "drafted": found}))  # noqa: T201
        return 0
    for tokens, arms in found.items():
        for name, loads in arms.items():
            line = f"K = {tokens:2}  {name:16}"
            for figure, (unit, _) in FIGURES.items():
                found = [load[figure] for load in loads]
                line += f"  {median(found):6.1f} {unit}, {_ratio(figure, loads, arms[PLAIN]):.2f} x plain"
                if name.startswith("forerun"):
                    line += f", {_ratio(figure, loads, arms[OWN]):.2f} x vLLM's ngram"
            print(line)  # noqa: T201
    return 0


def _measured(tokens: int, asked: argparse.Namespace) -> dict[str, Loads]:
    """By arm: the figures of each round."""
    target = ScaledModel(resolve("demo"), billions=asked.billions).path
    servers = _servers(target, tokens, asked)
    warming, *rounds = _bodies(target, asked.texts, asked.rounds)
    try:
        for server in servers.values():
            server.start()
            server.pause()
        found: dict[str, Loads] = {name: [] for name in servers}
        names = list(servers)
        for name in names:
            answered(servers[name], warming, 1)
        for turn, bodies in enumerate(rounds):
            for name in names if turn % 2 else reversed(names):
                if turn and name == PLAIN:
                    continue
                load = answered(servers[name], bodies, 1)
                found[name].append({figure: getattr(load, figure) for figure in FIGURES})
                figures = "  ".join(f"{value:.1f}" for value in found[name][-1].values())
                sys.stderr.write(f"K = {tokens}, {turn + 1}/{asked.rounds} {name:16} {figures}\n")
        return found
    finally:
        for server in servers.values():
            server.stop()


def _servers(target: Path, tokens: int, asked: argparse.Namespace) -> dict[str, Server]:
    base = vllm_command(asked.vllm, str(target), asked.dtype)
    base += ["--max-model-len", str(scene.MAX_MODEL_LEN), "--max-num-seqs", "1", "--served-model-name", scene.NAME]
    base += ["--no-enable-prefix-caching"]
    length = {"num_speculative_tokens": tokens}
    lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, **length}
    arms: dict[str, list[str]] = {PLAIN: [], OWN: ["--speculative-config", json.dumps(lookup)]}
    plugged = {"method": "custom_class", "model": PLUG_IN, **length}
    for method in asked.methods:
        arms[f"forerun {method}"] = ["--no-async-scheduling", "--speculative-config", json.dumps(plugged)]
    made = {}
    for place, (name, more) in enumerate(arms.items()):
        method = name.removeprefix("forerun ")
        config = method if method.startswith("{") else json.dumps({"method": method})
        own = {VARIABLE: config, "PYTHONPATH": str(scene.ROOT / "src")}
        environment = {**VLLM, "VLLM_USE_V2_MODEL_RUNNER": "0", **(own if name.startswith("forerun") else {})}
        log = asked.work / f"in-vllm-{place}.log"
        made[name] = Server(name=name, command=[*base, *more], log=log, environment=environment)
    return made


def _bodies(target: Path, count: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Greedy requests to warm up with, for the edits with the shortest answers, and those of each round."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    bodies = []
    for edit in sorted(edits(), key=lambda edit: -len(edit.answer)):
        ids = tokenizer.apply_chat_template(edit.messages, add_generation_prompt=True, return_dict=False)
        bodies.append({"model": scene.NAME, "prompt": list(ids), "max_tokens": 600, "temperature": 0})
    measured = bodies[:-1][: count * rounds]
    return [bodies[len(measured) :][-_WARMING:], *(measured[turn::rounds] for turn in range(rounds))]


def _ratio(figure: str, ours: Loads, theirs: Loads) -> float:
    """Median over the rounds that both answered of the ratio within a round, above 1 where ours is better."""
    pairs = zip(ours, theirs, strict=False)
    return median((own[figure] / other[figure]) ** FIGURES[figure][1] for own, other in pairs)


if __name__ == "__main__":
    sys.exit(main())
