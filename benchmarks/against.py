"""This checkout beside an older commit: the same arms on the same prompts, in two processes that take turns.

    python benchmarks/against.py b85d9ea --json against.json

Each process holds the same enlarged models and waits while the other one answers, so both see the same machine. The
two take turns at coming first, prompt by prompt. Greedy text is the same on both sides, so there seconds per token are
compared; sampled text may differ where the draws are spent otherwise, so there seconds per step are. For each arm: the
median, over prompts, of old seconds / new seconds; above 1 this checkout is faster. Exit code 1 where one is below
`--least`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the package `benchmarks`; the package `forerun` is the side's own
OLD, NEW = "old", "new"
ARMS: dict[str, Mapping[str, Any] | bool] = {
    "plain": False,
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "recycling": {"method": "recycling"},
    "draft_model": {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 5},
    "draft_model tree": {"method": "draft_model", "model": "DRAFT", "shape": [2, 2, 1, 1, 1]},
    "eagle3": {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 5},
    "eagle3 tree": {"method": "eagle3", "model": "HEAD", "top_k": 4, "nodes": 14},
    "auto": {"method": "auto"},
}
SHIPPED = {"TARGET": "demo", "DRAFT": "demo-draft", "HEAD": "demo-eagle3"}
TEMPERATURES = (0.0, 0.8)


class Side:
    """One commit's process."""

    def __init__(self, source: Path, options: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--work", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(source)},
        )
        assert self._read()["source"] == str(source), "another checkout was imported"

    def ask(self, arm: str, temperature: float, prompt: int, ids: Sequence[int]) -> dict[str, float]:
        """Let it answer prompt number `prompt`, and wait: seconds of decoding, tokens and steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([arm, temperature, prompt, ids]) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a side ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


def work(options: argparse.Namespace) -> None:
    """One side: answers what its standard input asks for, with the forerun that ``PYTHONPATH`` leads to."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import forerun
    from benchmarks.suite.arms import ForerunArm
    from benchmarks.suite.workloads import Setting
    from forerun import LLM

    def say(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    paths = json.loads(options.paths)
    llm = LLM(paths["TARGET"], max_num_seqs=4, max_model_len=1536, enable_prefix_caching=False)
    say({"source": str(Path(forerun.__file__).parents[1])})
    for line in sys.stdin:
        name, temperature, prompt, ids = json.loads(line)
        setting = Setting(name=name, temperature=temperature, top_p=0.95, new_tokens=options.tokens)
        told = ARMS[name]
        if isinstance(told, Mapping):
            told = {key: paths.get(value, value) if isinstance(value, str) else value for key, value in told.items()}
            told["adaptive"] = name == "auto"
        run = ForerunArm(name, llm, told).run(prompt, ids, setting, seed=prompt)
        say({"seconds": run.decode_s, "tokens": run.decode_tokens, "steps": len(run.trace)})


def models(scale: float) -> dict[str, str]:
    """Placeholder of `ARMS` -> folder; made by this checkout, for both sides."""
    from forerun.demo.scale import ScaledModel, scaled_head_folder
    from forerun.shipped import resolve

    if not scale:
        return {word: str(resolve(name)) for word, name in SHIPPED.items()}
    target = ScaledModel(resolve(SHIPPED["TARGET"]), billions=scale)
    draft = ScaledModel(resolve(SHIPPED["DRAFT"]), billions=scale / 13)
    head = scaled_head_folder(SHIPPED["HEAD"], target)
    return {"TARGET": str(target.path), "DRAFT": str(draft.path), "HEAD": str(head)}


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The source of a commit, in a folder that goes again."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder) / "src"


def compare(
    sides: Mapping[str, Side], prompts: Sequence[Sequence[int]], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Arm and temperature -> what was found; the first prompt of each warms up."""
    found: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True)
    for temperature in TEMPERATURES:
        for arm in options.arms:
            costs: dict[str, list[float]] = defaultdict(list)
            tokens, steps = defaultdict[str, float](float), defaultdict[str, float](float)
            for prompt in (0, *list(range(len(prompts))) * options.rounds):
                for name in (OLD, NEW) if prompt % 2 else (NEW, OLD):
                    seen = sides[name].ask(arm, temperature, prompt, prompts[prompt])
                    costs[name].append(seen["seconds"] / seen["steps" if temperature else "tokens"])
                    tokens[name] += seen["tokens"]
                    steps[name] += seen["steps"]
            ratios = [old / new for old, new in zip(costs[OLD], costs[NEW], strict=True)][1:]
            low, middle, high = quantiles(ratios, n=4)
            found[f"{arm}, T = {temperature:g}"] = {
                "old_over_new": middle,
                "half_of_all_prompts": [low, high],
                "ms_per_token" if not temperature else "ms_per_step": {
                    name: 1000 * median(costs[name]) for name in costs
                },
                "tokens_per_pass": {name: tokens[name] / steps[name] for name in tokens},
            }
            console.print(f"{arm}, T = {temperature:g}: {middle:.3f} ({low:.2f} to {high:.2f})")
    return found


def show(found: Mapping[str, Mapping[str, Any]], commit: str) -> None:
    """As a table."""
    table = Table(
        "arm", "old / new", "half of all prompts", "old ms", "new ms", "tokens per pass", title=f"vs {commit}"
    )
    for name, one in found.items():
        times = one.get("ms_per_token") or one["ms_per_step"]
        per_step = one["tokens_per_pass"]
        low, high = one["half_of_all_prompts"]
        numbers = [f"{times[OLD]:.2f}", f"{times[NEW]:.2f}", f"{per_step[OLD]:.2f}, {per_step[NEW]:.2f}"]
        table.add_row(name, f"{one['old_over_new']:.3f}", f"{low:.2f} to {high:.2f}", *numbers)
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD~1")
    parser.add_argument("--scale", type=float, default=0.4, help="billions of parameters; 0: the demo model as it is")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1, help="times that each prompt is asked")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--least", type=float, default=0.98)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--paths", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options)
        return 0
    from transformers import AutoTokenizer

    from forerun.demo import contexts

    paths = models(options.scale)
    prompts = contexts(AutoTokenizer.from_pretrained(paths["TARGET"]), count=options.prompts)
    words = ["--paths", json.dumps(paths), "--tokens", str(options.tokens)]
    with checkout(options.commit) as source:
        sides = {OLD: Side(source, words), NEW: Side(ROOT / "src", words)}
        try:
            found = compare(sides, prompts, options)
        finally:
            for side in sides.values():
                side.close()
    show(found, options.commit)
    if options.json:
        options.json.write_text(json.dumps({"commit": options.commit, "arms": found}, indent=1) + "\n")
    return int(any(one["old_over_new"] < options.least for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
