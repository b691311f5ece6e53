"""forerun against speculators 0.9, training an EAGLE-3 head for the same target in the same wall time: ``peers.py``.

Both see the same windows in the same order and pay for the target's features inside the clock; both get the same small
search of the learning rate (on windows that neither trained on) and the same variants of the head: post-norm feedback
(speculators' default: norm_before_fc, norm_before_residual, norm_output) and pre-norm feedback (all three off).
speculators stops by steps and sizes its schedule by them, so a probe says how many steps fit; forerun is treated alike.
Heads are judged by forerun's own decoding on the shipped held-out prompts. Arms take turns; finished runs are kept in
the work folder, and a stopped benchmark goes on from there. Knows neither library's inside: see the two drivers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.suite.goals import Goal, at_least
from forerun import demo, shipped
from forerun.heads.eagle import default_boundaries
from forerun.heads.files import TargetFacts, read_head
from forerun.training.recipe import EvaluationSettings
from forerun.training.run import evaluate
from forerun.training.trained import head_shapes

HERE = Path(__file__).resolve().parent
ENVIRONMENT = common.ROOT / "build" / "venv-speculators"
TORCH = ("torch==2.13.0",)
LIBRARIES = ("transformers==5.19.0",)
WITHOUT_DEPENDENCIES = ("speculators==0.9.0", "hs-connectors==0.9.0")
REST = (
    *("datasets", "openai", "httpx", "loguru==0.7.3", "pydantic-settings", "aiohttp", "protobuf"),
    *("typer", "tqdm", "rich"),
)
ARMS = ("forerun", "speculators")
VARIANTS = {"post-norm": True, "pre-norm": False}
PROMPT_TOKENS = 256
SEARCH_WINDOWS = 32
RESAMPLES = 10_000
OFF_BUDGET = 0.03
"""A run whose wall time is further off than this share is pointed out."""
Record = dict[str, Any]


def make_environment() -> Path:
    """speculators in an environment of its own; the path of its interpreter."""
    python = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / ".ready"
    if ready.exists():
        return python
    common.say(f"making {ENVIRONMENT}")
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    install = [str(python), "-m", "pip", "install", "--no-compile", "--quiet", "--disable-pip-version-check"]
    for words in (TORCH, LIBRARIES, ("--no-deps", *WITHOUT_DEPENDENCIES), REST):
        subprocess.run([*install, *words], check=True)
    ready.touch()
    return python


@dataclass(kw_only=True, slots=True)
class Race:
    """All runs of the benchmark, and what is known of the arms' speed."""

    arguments: argparse.Namespace
    target: str
    boundaries: Sequence[int]
    windows: dict[int, Path]
    """By seed, a file of (N, S) windows in training order."""
    interpreters: dict[str, Path]
    speed: dict[tuple[str, str], float] = field(default_factory=dict)
    """(arm, variant) -> seconds of a step, features included."""
    fixed: dict[tuple[str, str], float] = field(default_factory=dict)
    """(arm, variant) -> seconds that do not grow with the steps."""

    def steps(self, arm: str, variant: str, seconds: float) -> int:
        """How many fit."""
        key = (arm, variant)
        if key not in self.speed:
            self._probe(arm, variant)
        return max(1, int((seconds - self.fixed[key]) / self.speed[key]))

    def _probe(self, arm: str, variant: str) -> None:
        """Two short runs: their difference is the cost of a step."""
        few, many = self.arguments.probe_steps, 3 * self.arguments.probe_steps
        found = [self.run(arm, variant, seed=0, rate=1e-3, steps=steps, name="probe") for steps in (few, many)]
        slope = (found[1]["seconds"] - found[0]["seconds"]) / (many - few)
        self.speed[arm, variant] = slope if slope > 0 else found[1]["seconds"] / many
        self.fixed[arm, variant] = max(0.0, found[0]["seconds"] - few * self.speed[arm, variant])

    def run(self, arm: str, variant: str, *, seed: int, rate: float, steps: int, name: str) -> Record:
        """One training in a process of its own, or what it gave when it was run before."""
        folder = self.arguments.work / f"{name}-{arm}-{variant}-seed{seed}-rate{rate:g}-steps{steps}"
        result, text = folder / "result.json", folder / "job.json"
        job = self._job(folder, variant, seed=seed, rate=rate, steps=steps)
        if not result.exists() or json.loads(text.read_text()) != job:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            text.write_text(json.dumps(job))
            command = [self.interpreters[arm], HERE / f"{arm}_driver.py", text, result]
            common.say(f"{name}: {arm}, {variant}, seed {seed}, rate {rate:g}, {steps} steps")
            _call(command, folder / "log.txt", job["threads"])
            shutil.rmtree(folder / "run" / "data", ignore_errors=True)
        found: Record = json.loads(result.read_text())
        return {"arm": arm, "variant": variant, "seed": seed, "rate": rate, **found}

    def _job(self, folder: Path, variant: str, *, seed: int, rate: float, steps: int) -> dict[str, Any]:
        given = self.arguments
        return {
            "target": self.target,
            "target_hash": digest(Path(self.target) / "model.safetensors"),
            "windows": str(self.windows[seed]),
            "windows_hash": digest(self.windows[seed]),
            "boundaries": list(self.boundaries),
            "post_norm": VARIANTS[variant],
            "lm_head": given.lm_head,
            "ttt_steps": given.ttt_steps,
            "rows": given.rows,
            "length": given.length,
            "learning_rate": rate,
            "seed": seed,
            "steps": steps,
            "threads": given.threads or os.cpu_count(),
            "output": str(folder / "run"),
        }

    def timed_run(self, arm: str, variant: str, *, seed: int, rate: float, seconds: float, name: str) -> Record:
        """A run that takes `seconds`; its speed serves the next one."""
        steps = self.steps(arm, variant, seconds)
        found = self.run(arm, variant, seed=seed, rate=rate, steps=steps, name=name)
        key = (arm, variant)
        self.speed[key] = max(1e-6, (found["seconds"] - self.fixed[key]) / steps)
        return found


def digest(path: Path) -> str:
    """sha256 of a file: a run of another target or other windows is not this run."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _call(command: Sequence[Any], log: Path, threads: int) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        done = subprocess.run(list(map(str, command)), stdout=file, stderr=file, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} failed, see {log}:\n{log.read_text()[-2_000:]}")


def write_windows(arguments: argparse.Namespace, tokenizer: Any) -> tuple[dict[int, Path], list[list[int]]]:
    """A file of windows for every seed, and prompts for the search from windows that are in none of them."""
    arguments.work.mkdir(parents=True, exist_ok=True)
    windows = common.text_windows(tokenizer, arguments.windows + SEARCH_WINDOWS, arguments.length)
    held, rest = windows[:SEARCH_WINDOWS], windows[SEARCH_WINDOWS:]
    rest = rest[: len(rest) // arguments.rows * arguments.rows]  # both arms begin again at the same step
    files = {}
    for seed in range(arguments.seeds):
        order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
        files[seed] = arguments.work / f"windows-{seed}.safetensors"
        save_file({"windows": rest[order].contiguous()}, files[seed])
    return files, held[:, : min(PROMPT_TOKENS, arguments.length)].tolist()


def held_out_prompts(tokenizer: Any, per_file: int) -> list[list[list[int]]]:
    """For every shipped held-out file, `per_file` prompts from evenly spaced places."""
    groups = []
    for prompt in demo.prompts():
        ids = tokenizer(prompt.text, add_special_tokens=False, verbose=False)["input_ids"]
        last = max(0, len(ids) - PROMPT_TOKENS)
        starts = [last * (2 * place + 1) // (2 * per_file) for place in range(per_file)]
        groups.append([ids[start : start + PROMPT_TOKENS] for start in starts])
    return groups


class Judge:
    """forerun's own decoding with a head: mean acceptance lengths, bonus included, group by group of prompts."""

    def __init__(self, model: Any, groups: Sequence[Sequence[Sequence[int]]], arguments: argparse.Namespace) -> None:
        self.settings = EvaluationSettings(max_tokens=arguments.max_tokens)
        self.name = f"judged-{len(groups)}-{sum(map(len, groups))}-{arguments.max_tokens}.json"
        self.model, self.groups = model, groups
        self.layers = TargetFacts.of(model.config, "").num_layers

    def __call__(self, record: Record) -> list[dict[str, float]]:
        """For each group, ``chain_t0``, ``tree_t0``, ..., and ``acceptance_<d>``."""
        kept = Path(record["head"]).parent / self.name
        if kept.exists():
            found: list[dict[str, float]] = json.loads(kept.read_text())
            return found
        head = read_head(record["head"], num_layers=self.layers).build(torch.float32)
        shapes = head_shapes(head, self.model, self.settings)
        found = [evaluate(shapes, self.model, group, self.settings) for group in self.groups]
        kept.write_text(json.dumps(found))
        return found


def pooled(groups: Sequence[Mapping[str, float]], name: str = "chain_t0") -> float:
    """Over all groups: each has about the same number of tokens, so passes add up (harmonic mean)."""
    return len(groups) / sum(1 / group[name] for group in groups)


def search(race: Race, judge: Judge, variant: str) -> dict[str, dict[str, Any]]:
    """For each arm the rate with the longest acceptance after a short run; the same rates and time for both."""
    seconds = race.arguments.search_minutes * 60
    found: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        lengths = {}
        for rate in race.arguments.rates:
            record = race.timed_run(arm, variant, seed=0, rate=rate, seconds=seconds, name="search")
            lengths[rate] = pooled(judge(record))
        found[arm] = {"rate": max(lengths, key=lambda rate: lengths[rate]), "lengths": lengths}
    return found


def compete(race: Race, judge: Judge, rates: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[Record]:
    """All full runs, the arms taking turns, judged when all are done."""
    records = []
    for variant in race.arguments.variants:
        for seed in range(race.arguments.seeds):
            for arm in ARMS if seed % 2 else reversed(ARMS):
                rate = rates[variant][arm]["rate"]
                seconds = race.arguments.minutes * 60
                records.append(race.timed_run(arm, variant, seed=seed, rate=rate, seconds=seconds, name="full"))
    for record in records:
        common.say(f"judging {record['head']}")
        record["groups"] = judge(record)
        record["tokens_per_second"] = record["tokens"] / record["seconds"]
        record["acceptance_length"] = pooled(record["groups"])
    return records


def interval(ours: Sequence[Record], theirs: Sequence[Record], name: str) -> dict[str, float]:
    """Ratio of pooled acceptance lengths with a 95 % interval: seeds and prompt files drawn anew, the same for both."""
    passes = [np.array([[1 / g[name] for g in record["groups"]] for record in arm]) for arm in (ours, theirs)]
    chance = np.random.default_rng(0)
    seeds, files = passes[0].shape
    drawn = []
    for _ in range(RESAMPLES):
        places = np.ix_(chance.integers(seeds, size=seeds), chance.integers(files, size=files))
        drawn.append(float(passes[1][places].mean() / passes[0][places].mean()))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return {"ratio": float(passes[1].mean() / passes[0].mean()), "low": float(low), "high": float(high)}


def compare(records: Sequence[Record], variant: str) -> dict[str, Any]:
    """One variant of the head: acceptance lengths and speeds of both arms, and their ratios."""
    ours, theirs = (
        sorted((r for r in records if (r["arm"], r["variant"]) == (arm, variant)), key=lambda r: r["seed"])
        for arm in ARMS
    )
    speeds = [statistics.median(r["tokens_per_second"] for r in arm) for arm in (ours, theirs)]
    found: dict[str, Any] = {"variant": variant, "tokens_per_second": speeds, "speed_ratio": speeds[0] / speeds[1]}
    for name in ("chain_t0", "tree_t0", "chain_t1", "tree_t1"):
        lengths = [statistics.mean(pooled(r["groups"], name) for r in arm) for arm in (ours, theirs)]
        found[name] = {"lengths": lengths, **interval(ours, theirs, name)}
    return found


def goals_of(comparisons: Sequence[Mapping[str, Any]]) -> list[Goal]:
    """Acceptance at equal wall time, and tokens per second."""
    goals = []
    for found in comparisons:
        chain, variant = found["chain_t0"], found["variant"]
        lengths = "{:.2f} against {:.2f}".format(*chain["lengths"])
        spread = f"{lengths}, 95 % of the ratio in {chain['low']:.3f} to {chain['high']:.3f}"
        goals.append(
            at_least(f"acceptance length / speculators, chain of 5, T = 0, {variant}", 1, chain["ratio"], spread)
        )
        speeds = "{:.0f} against {:.0f}".format(*found["tokens_per_second"])
        goals.append(at_least(f"tokens/s with features / speculators, {variant}", 1.5, found["speed_ratio"], speeds))
    return goals


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = common.parser(__doc__)
    parser.add_argument("--target", default="demo", help="directory or shipped model")
    parser.add_argument("--minutes", type=float, default=8, help="wall time of a full run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3], help="learning rates to try")
    parser.add_argument("--search-minutes", type=float, default=2, help="wall time of each try")
    parser.add_argument(
        "--lm-head", choices=("own", "shared"), default="shared", help="forerun's; speculators' is frozen"
    )
    parser.add_argument("--ttt-steps", type=int, default=3, help="T of both; speculators' default")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--rows", type=int, default=2, help="windows of a step")
    parser.add_argument(
        "--windows", type=int, default=8_000, help="training windows at most; used again when all are seen"
    )
    parser.add_argument("--probe-steps", type=int, default=20)
    parser.add_argument("--prompts-per-file", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--work", type=Path, default=common.BUILD / "peers")
    parser.add_argument("--install-only", action="store_true", help="make speculators' environment and stop")
    return parser.parse_args(words)


def main() -> None:
    """Search, run, judge, and write the entry ``peers`` of training.json."""
    arguments = arguments_of()
    machine = common.start(arguments)
    interpreters = {"forerun": Path(sys.executable), "speculators": make_environment()}
    if arguments.install_only:
        return
    model, tokenizer = common.load_target(arguments.target, "cpu", "bfloat16")
    windows, search_prompts = write_windows(arguments, tokenizer)
    target = str(Path(shipped.resolve(arguments.target)).resolve())
    boundaries = default_boundaries(model.config.num_hidden_layers)
    race = Race(arguments=arguments, target=target, boundaries=boundaries, windows=windows, interpreters=interpreters)
    scout = Judge(model, [search_prompts], arguments)
    rates = {variant: search(race, scout, variant) for variant in arguments.variants}
    judge = Judge(model, held_out_prompts(tokenizer, arguments.prompts_per_file), arguments)
    records = compete(race, judge, rates)
    comparisons = [compare(records, variant) for variant in arguments.variants]
    budget = arguments.minutes * 60
    off = [r["head"] for r in records if not math.isclose(r["seconds"], budget, rel_tol=OFF_BUDGET)]
    goals = goals_of(comparisons)
    report = {
        "machine": machine,
        "settings": vars(arguments),
        "search": rates,
        "runs": records,
        "off_budget": off,
        "comparisons": comparisons,
        "goals": goals,
    }
    common.finish("peers", arguments, report, _tables(records, goals))
    for head in off:
        common.say(f"{head}: more than {OFF_BUDGET:.0%} off its {budget:.0f} s")


def _tables(records: Sequence[Record], goals: Sequence[Goal]) -> list[Any]:
    names = ("variant", "arm", "seed", "rate", "steps", "seconds", "feature_seconds", "tokens_per_second")
    rows = [
        {name: record[name] for name in (*names, "trainable_parameters", "acceptance_length")} for record in records
    ]
    note = "seconds: target, features, training, weights on disk; acceptance: chain of 5, T = 0, bonus included"
    return [common.rows_table("Runs", rows, note), common.goals_table(goals)]


if __name__ == "__main__":
    main()
