"""The whole benchmark: makes the scale models, runs each part, gathers what was found. Knows no terminal.

Parts: ``steps`` (cost of a pass), ``speed`` (the arms against each other), ``bits`` (logits of chains and trees beside
plain ones), ``tokens`` (greedy tokens of the small model itself, speculative beside plain), ``acceptance`` (an
EAGLE-3 head beside the other drafters on the small model, by shape of the draft), ``heads`` (a folder of trained heads
beside each other), ``drafters`` (every drafter on four workloads) and ``burden`` (what speculation costs where it
brings nothing).
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.suite import goals
from benchmarks.suite.acceptance import Acceptance, AcceptancePlan, Contestants, measure_acceptance
from benchmarks.suite.arms import Arm, Run, forerun_arms, load_transformers, transformers_arms
from benchmarks.suite.bits import MOST, BitCount, BitPlan, compare
from benchmarks.suite.burden import Burden, burdens, measure_burden, scrambled
from benchmarks.suite.contest import Contest, ContestLine, compete, workloads
from benchmarks.suite.contestants import Field, contestants, library_store, peers, trained, training_free
from benchmarks.suite.goals import Goal, at_least, at_most
from benchmarks.suite.heads import HeadBoard, head_goals, held_out, measure_heads
from benchmarks.suite.planned import draft_cost
from benchmarks.suite.speed import ArmSummary, Progress, measure, summarise
from benchmarks.suite.steps import StepCosts, measure_steps
from benchmarks.suite.texts import TextComparison, TokenCount, compare_texts, count_tokens
from benchmarks.suite.workloads import settings
from forerun import LLM
from forerun.control.measuring import load_or_measure
from forerun.demo import CONTEXT, contexts
from forerun.demo.scale import ScaledModel, scale_head
from forerun.errors import ArgumentError, CheckpointError, nearest
from forerun.heads.drafting import repack
from forerun.heads.eagle import EagleHead
from forerun.heads.files import HeadCheckpoint, TargetFacts, read_head
from forerun.model.transformers_target import require_layers
from forerun.shipped import FOLDER, MODELS, resolve
from forerun.writing import cache_root

# The goals of the contest of drafters and of what speculation may cost. Knows no printing.


FREE = ("ngram", "suffix", "recycling", "lookahead", "rest")
"""Drafters that need no training and no help from the client."""
COPYING = ("ngram", "suffix")
AUTO = "forerun auto"


def contest_goals(contest: Contest) -> list[Goal]:
    """Copying on edits, the best free method, `auto` beside the best, the host's share, predictions."""
    found = []
    for workload in contest.workloads:
        lines = contest.of(workload)
        if workload.startswith("edit"):
            found += _edit_goals(lines, workload)
        if workload.startswith("complete"):
            best = _fastest(lines, [f"forerun {name}" for name in FREE])
            found.append(at_least(f"training-free / plain, {workload}", 1.5, best.speedup, best.summary.arm))
        found += _auto_goals(lines, workload)
    found += _oracle_goal(contest)
    return [*found, *_host_goals(contest), *_predicted_goals(contest)]


def burden_goals(burdens: Iterable[Burden]) -> list[Goal]:
    """Never slower than plain decoding."""
    found = []
    for one in burdens:
        note = f"mean of {len(one.ratios)} pairs {one.mean:.3f}"
        found.append(at_least(f"{one.drafter} / plain, batch {one.batch}, lower bound", 0.97, one.low, note))
    return found


def _fastest(lines: Iterable[ContestLine], names: Iterable[str]) -> ContestLine:
    chosen = set(names)
    return max((line for line in lines if line.summary.arm in chosen), key=lambda line: line.speedup)


def _edit_goals(lines: list[ContestLine], workload: str) -> list[Goal]:
    best = _fastest(lines, [f"forerun {name}" for name in COPYING])
    found = [at_least(f"copying / plain, {workload}", 3.0, best.speedup, best.summary.arm)]
    theirs = next((line for line in lines if line.summary.arm == "transformers prompt lookup"), None)
    if theirs is not None:
        quotient = best.summary.tokens_per_second / theirs.summary.tokens_per_second
        found.append(at_least(f"copying / transformers prompt lookup, {workload}", 1.3, quotient, best.summary.arm))
    return found


def _auto_goals(lines: list[ContestLine], workload: str) -> list[Goal]:
    """Beside the best single drafter."""
    single = [
        line.summary.arm for line in lines if line.summary.arm.startswith("forerun ") and line.summary.arm != AUTO
    ]
    auto = next((line for line in lines if line.summary.arm == AUTO), None)
    if auto is None or not single:
        return []
    best = _fastest(lines, single)
    note = f"{auto.speedup:.2f} x, best single: {best.summary.arm}, {best.speedup:.2f} x"
    return [at_least(f"auto / best single drafter, {workload}", 0.95, auto.speedup / best.speedup, note)]


def _oracle_goal(contest: Contest) -> list[Goal]:
    """Over all workloads, against whoever took the best drafter of each beforehand."""
    mine, theirs = 0.0, 0.0
    for workload in contest.workloads:
        lines = {line.summary.arm: line for line in contest.of(workload)}
        auto = lines.pop(AUTO, None)
        if auto is None:
            return []
        best = _fastest(lines.values(), [name for name in lines if name.startswith("forerun ")])
        mine += auto.seconds
        theirs += auto.seconds * auto.speedup / best.speedup
    return [at_least("auto / best drafter of each workload, over the mix", 0.97, theirs / mine)] if mine else []


def _host_goals(contest: Contest) -> list[Goal]:
    """Drafting by copy, verification and commit of greedy steps."""
    found = []
    for line in contest.lines:
        greedy = line.workload in ("complete, T = 0", "edit, T = 0")
        if greedy and line.host_share is not None and line.summary.arm in [f"forerun {name}" for name in COPYING]:
            found.append(at_most(f"time outside the model, {line.summary.arm}, {line.workload}", 0.03, line.host_share))
    return found


def _predicted_goals(contest: Contest) -> list[Goal]:
    """The planner's figure beside the clock's."""
    errors = [abs(line.predicted / line.speedup - 1) for line in contest.lines if line.predicted is not None]
    if not errors:
        return []
    return [
        at_most("plan's speed-up beside the measured one, median error", 0.10, median(errors), f"{len(errors)} rows")
    ]


# What a figure was measured on. Knows no figure.


_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Processor, software, and how busy it was at the beginning."""

    processor: str
    cores: int
    threads: int
    flags: tuple[str, ...]
    """What matters for bf16, of what the processor has."""
    versions: str
    load: float
    """Processes that wanted to run, averaged over the last minute, when the benchmark began."""

    @property
    def busy(self) -> bool:
        """True if something else ran: then figures are comparable with each other only."""
        return self.load > 0.5

    def __str__(self) -> str:
        features = ", ".join(self.flags) or "no vector extensions known"
        return f"{self.processor}, {self.cores} cores, {self.threads} threads ({features}); {self.versions}"


def this_machine() -> Machine:
    """The machine that this runs on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    flags = fields.get("flags", "").split()
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return Machine(
        processor=fields.get("model name", platform.processor() or platform.machine()),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        flags=tuple(flag for flag in _FLAGS if flag in flags),
        versions=f"Python {platform.python_version()}, {libraries}",
        load=os.getloadavg()[0],
    )


log = logging.getLogger(__name__)
PARTS = ("steps", "speed", "bits", "tokens", "acceptance", "heads", "drafters", "burden")
HEAD = "demo-eagle3"
"""The shipped head; may be missing, one that was named may not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to measure, and how thoroughly."""

    target: str = "demo"
    """A small Llama: ``demo`` or a folder."""
    draft: str = "demo-draft"
    """A draft model of the same vocabulary; left out with a note where it is missing."""
    head: str = HEAD
    """A folder with an EAGLE-3 head of the target; the shipped one is left out with a note where it is missing."""
    heads: Path | None = None
    """A folder of trained heads, each as `forerun train` leaves it, for the part of that name."""
    scale: float = 0.4
    """Billions of parameters that the target is enlarged to; 0 takes it as it is."""
    draft_scale: float = 0.031
    """The same for the draft model."""
    chain: int = 5
    """Tokens that a draft model proposes, here and in transformers."""
    lookup: int = 8
    """Tokens that prompt lookup proposes, here and in transformers."""
    tokens: int = 10_000
    """Greedy tokens of the part of that name."""
    quick: bool = False
    """Fewer prompts, seeds, positions and tokens: a look, not a measurement."""
    parts: tuple[str, ...] = PARTS
    """Of `PARTS`."""

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ArgumentError(f"unknown part {part!r}; there are {', '.join(PARTS)}.{nearest(part, PARTS)}")


@dataclass(kw_only=True, slots=True)
class Results:
    """Everything that was found."""

    machine: Machine
    options: Options
    notes: list[str] = field(default_factory=list)
    steps: StepCosts | None = None
    speed: dict[str, list[ArmSummary]] = field(default_factory=dict)
    """Label of the setting -> one line per arm."""
    texts: list[TextComparison] = field(default_factory=list)
    bits: list[BitCount] = field(default_factory=list)
    free_bits: list[BitCount] = field(default_factory=list)
    """Without padding: every pass has its own number of nodes."""
    tokens: list[TokenCount] = field(default_factory=list)
    acceptance: Acceptance | None = None
    """None without a head."""
    heads: HeadBoard | None = None
    """None without a folder of heads."""
    contest: Contest | None = None
    burdens: list[Burden] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """What each part took."""

    @property
    def goals(self) -> list[Goal]:
        """The goals that this run says something about."""
        found: list[Goal] = []
        if self.steps is not None:
            found += goals.step_goals(self.steps)
        for label, lines in self.speed.items():
            found += goals.speed_goals(lines, label)
        found += goals.bit_goals(self.bits)
        found += goals.text_goals(self.texts, self.tokens)
        if self.acceptance is not None:
            found += goals.acceptance_goals(self.acceptance)
        if self.heads is not None:
            found += head_goals(self.heads)
        if self.contest is not None:
            found += contest_goals(self.contest)
        return found + burden_goals(self.burdens)


def run(options: Options, progress: Progress, save: Callable[[Results], None]) -> Results:
    """Measure what `options` ask for.

    Args:
        progress: is told what is being done.
        save: is given the results after every part, so that an interruption loses little.

    Raises:
        ForerunError: a model is missing or cannot be enlarged.
    """
    results = Results(machine=this_machine(), options=options)
    if results.machine.busy:
        results.notes.append(
            f"{results.machine.load:.1f} other processes wanted to run: compare the figures with each other only"
        )
    models = _Models(options, results, progress)
    for part in options.parts:
        began = time.perf_counter()
        _PART[part](models)
        results.seconds[part] = time.perf_counter() - began
        save(results)
    return results


class _Models:
    """The checkpoints and the engine, made when first asked for."""

    def __init__(self, options: Options, results: Results, progress: Progress) -> None:
        self.options, self.results, self.progress = options, results, progress

    @cached_property
    def scaled(self) -> ScaledModel | None:
        """The enlarged target; None if it is measured as it is."""
        return self._scaled(self.options.target, self.options.scale) if self.options.scale else None

    @property
    def target(self) -> Path:
        """What is measured."""
        return Path(resolve(self.options.target)) if self.scaled is None else self.scaled.path

    @cached_property
    def small_draft(self) -> Path | None:
        """The draft model as it is; None where there is none."""
        try:
            return Path(resolve(self.options.draft))
        except CheckpointError as error:
            self.results.notes.append(f"without draft model: {error}")
            return None

    @cached_property
    def draft(self) -> Path | None:
        """The draft model, enlarged if the target is; None where there is none."""
        if self.small_draft is None or self.scaled is None:
            return self.small_draft
        try:
            return self._scaled(self.options.draft, self.options.draft_scale).path
        except CheckpointError as error:
            self.results.notes.append(f"without draft model: {error}")
            return None

    @cached_property
    def head(self) -> HeadCheckpoint | None:
        """The EAGLE-3 head of the small target; None where nothing is shipped and none was named."""
        name = self.options.head
        folder = FOLDER / MODELS[HEAD] if name == HEAD else resolve(name)
        if name == HEAD and not (Path(folder) / "config.json").is_file():
            self.results.notes.append(f"without EAGLE-3 head: none is shipped in {folder}; name one with --head")
            return None
        return read_head(folder, num_layers=TargetFacts.read(self.options.target).num_layers)

    @cached_property
    def llm(self) -> LLM:
        """The target in the engine, one row."""
        target = str(self.target)
        self.progress("loading the target")
        return LLM(target, max_num_seqs=1, max_model_len=1024, enable_prefix_caching=False)

    def drafting_head(self, llm: LLM, scaled: ScaledModel | None) -> EagleHead | None:
        """The head as a module that drafts for `llm`, enlarged if the target is."""
        if self.head is None:
            return None
        head = self.head if scaled is None else scale_head(self.head, scaled)
        built: EagleHead = head.build(llm.target.dtype).to(llm.target.device).eval()
        repack(built)
        return built

    def _scaled(self, name: str, billions: float) -> ScaledModel:
        self.progress(f"enlarging {name} to {billions:g} B parameters")
        scaled = ScaledModel(Path(resolve(name)), billions=billions)
        self.results.notes.append(scaled.note)
        return scaled

    def prompts(self, count: int, length: int = CONTEXT) -> list[list[int]]:
        """Held-out contexts."""
        return contexts(self.llm.tokenizer, count=count, length=length)


def _steps(models: _Models) -> None:
    models.progress("cost of a pass")
    repeats = 7 if models.options.quick else 25
    models.results.steps = measure_steps(
        require_layers(models.llm.target, "the benchmark"), models.prompts(1)[0], repeats=repeats
    )


def _speed(models: _Models) -> None:
    options = models.options
    sizes: dict[str, Any] = {"chain": options.chain, "lookup": options.lookup}
    arms = [
        *transformers_arms(models.target, models.draft, **sizes),
        *forerun_arms(models.llm, models.draft, head=models.drafting_head(models.llm, models.scaled), **sizes),
    ]
    prompts = models.prompts(2 if options.quick else 6)
    for setting in settings(quick=options.quick):
        runs: Sequence[Run] = measure(arms, prompts, setting, models.progress)
        models.results.speed[setting.label] = summarise(runs, [arm.name for arm in arms])
        if setting.temperature == 0:
            models.progress("comparing texts")
            models.results.texts = compare_texts(models.llm, prompts, runs)


def _bits(models: _Models) -> None:
    positions = 200 if models.options.quick else 2000
    for batch in (1, 8):
        models.progress(f"bits of chains and trees, batch {batch}")
        # One row of 2,000 positions would leave the context that the model was trained on: several short ones.
        rounds = max(1, positions // 500) if batch == 1 else 1
        share = positions // rounds
        length = CONTEXT + share // batch + 2 * MOST
        texts = models.prompts(batch * rounds, length)
        for start in range(0, len(texts), batch):
            plan = BitPlan(context=CONTEXT, positions=share)
            _merge(
                models.results.bits,
                compare(require_layers(models.llm.target, "the benchmark").model, texts[start : start + batch], plan),
            )
    models.progress("bits without padding")
    plan = BitPlan(context=CONTEXT, positions=min(positions, 400), nodes=())
    texts = models.prompts(1, CONTEXT + 400 + 2 * MOST)
    models.results.free_bits = compare(require_layers(models.llm.target, "the benchmark").model, texts, plan)


def _merge(total: list[BitCount], fresh: Sequence[BitCount]) -> None:
    """Add counts of the same kind and batch."""
    for count in fresh:
        same = next((old for old in total if (old.name, old.batch) == (count.name, count.batch)), None)
        if same is None:
            total.append(count)
            continue
        for name in ("positions", "differing", "other_argmax"):
            setattr(same, name, getattr(same, name) + getattr(count, name))
        same.largest = max(same.largest, count.largest)
        same.gaps += count.gaps


def _tokens(models: _Models) -> None:
    options = models.options
    models.progress("greedy tokens of the small model")
    small = LLM(str(resolve(options.target)), max_num_seqs=8, max_model_len=1024, reproducible=True)
    drafters: dict[str, dict[str, object]] = {"ngram": {"method": "ngram", "num_speculative_tokens": options.lookup}}
    if models.small_draft is not None:
        drafters["draft_model"] = {
            "method": "draft_model",
            "model": str(models.small_draft),
            "num_speculative_tokens": options.chain,
        }
    each = 500
    goal = 1_000 if options.quick else options.tokens
    prompts = contexts(small.tokenizer, count=max(1, goal // each), length=100)
    models.results.tokens = count_tokens(small, prompts, drafters, new_tokens=each)


def _acceptance(models: _Models) -> None:
    if models.head is None:
        return
    options = models.options
    models.progress("loading the small target")
    small = LLM(str(resolve(options.target)), max_num_seqs=8, max_model_len=CONTEXT + 212, enable_prefix_caching=False)
    draft = None if models.small_draft is None else str(models.small_draft)
    head = models.drafting_head(small, None)
    plan = AcceptancePlan()
    if options.quick:
        plan = AcceptancePlan(new_tokens=64, seeds=(1,), top_k=(4, 10), depths=(6,), roots=8)
    who = Contestants(head=head, head_name=options.head, draft=draft, lookup=options.lookup)
    prompts = contexts(small.tokenizer, count=4 if options.quick else 16)
    models.results.acceptance = measure_acceptance(small, who, prompts, plan, models.progress)


def _heads(models: _Models) -> None:
    options = models.options
    if options.heads is None:
        models.results.notes.append("without trained heads: name their folder with --heads")
        return
    models.progress("loading the small target")
    alike: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 1024, "enable_prefix_caching": False}
    small = LLM(str(resolve(options.target)), **alike)
    plan, counts = (AcceptancePlan(new_tokens=48, seeds=(1,)), (3, 1)) if options.quick else (AcceptancePlan(), (12, 4))
    prompts = held_out(small, *counts)

    def engine() -> LLM:
        return LLM(require_layers(small.target, "the benchmark").model, tokenizer=small.tokenizer, **alike)

    board = models.results.heads = measure_heads(engine, options.heads, prompts, plan, models.progress)
    models.results.notes += [board.note] if board.note else []


def _drafters(models: _Models) -> None:
    options, llm = models.options, models.llm
    there = Field(
        draft=models.draft,
        head=models.drafting_head(llm, models.scaled),
        store=library_store(llm.tokenizer, cache_root() / "library-datastore", models.progress),
        chain=options.chain,
        lookup=options.lookup,
    )
    models.progress("what passes and drafters cost")
    cost = load_or_measure(llm.target)
    text = models.prompts(1)[0]
    costs = {name: draft_cost(llm, config, text) for name, config in {**training_free(there), **trained(there)}.items()}
    stock = load_transformers(models.target)
    contest = models.results.contest = Contest()
    for work in workloads(llm.tokenizer, quick=options.quick):
        arms: list[Arm] = [*peers(stock, work, options.lookup), *contestants(llm, work, there, costs)]
        compete(arms, work, contest, models.progress, cost)


def _burden(models: _Models) -> None:
    """A draft model whose weights are chance: costly and useless; and a copying drafter on text without repeats."""
    quick = models.options.quick
    lengths = {1: 32, 4: 32} if quick else {1: 64, 4: 96, 16: 48, 64: 24}
    alike: dict[str, Any] = {
        "max_num_seqs": max(lengths),
        "max_model_len": CONTEXT + 500,
        "enable_prefix_caching": False,
    }
    llm = LLM(str(models.target), **alike)
    twin = LLM(require_layers(llm.target, "the benchmark").model, tokenizer=llm.tokenizer, **alike)
    prompts = contexts(llm.tokenizer, count=max(lengths), length=64)
    useless = scrambled(models.draft, llm.target.dtype) if models.draft is not None else None
    for batch, new_tokens in lengths.items():
        for name, config in burdens(useless).items():
            found = measure_burden(
                (llm, twin),
                name,
                config,
                prompts[:batch],
                pairs=4 if quick else 20,
                new_tokens=new_tokens,
                progress=models.progress,
            )
            models.results.burdens.append(found)


_PART = {
    "steps": _steps,
    "speed": _speed,
    "bits": _bits,
    "tokens": _tokens,
    "acceptance": _acceptance,
    "heads": _heads,
    "drafters": _drafters,
    "burden": _burden,
}


def as_json(results: Results) -> dict[str, Any]:
    """Everything as plain values, for ``--json`` and for later comparison."""
    import dataclasses

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, Path):
            return str(value)
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    found: dict[str, Any] = plain(results)
    found["goals"] = plain(results.goals)
    return found
