"""How many tokens a pass of the target gives, by drafter and by the shape of the draft, on held-out prompts.

The small models are decoded for real; time plays no part. Lengths are pooled over all steps of all prompts and seeds
and include the bonus token; intervals come from resampling the prompts. At temperature 1 the trees have the same number
of nodes. Knows the engine; knows no goals and no report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch

from forerun import LLM, SamplingParams
from forerun.bench.roots import RootReach, compare_roots, root_laws
from forerun.bench.speed import Progress
from forerun.bench.workloads import loops
from forerun.types import SpeculationStats

CHAIN = 5
"""Tokens of the chains whose lengths the goals compare."""
NODES = 32
"""Of a dynamic tree at temperature 0, root not counted."""
EQUAL_NODES = 30
"""Of every tree that is compared at temperature 1."""
SHAPES = ((2, 2, 2, 1, 1), (3, 3, 1, 1))
"""Fixed shapes of that many nodes: a deep one and a wide one."""
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptancePlan:
    """How thoroughly."""

    new_tokens: int = 96
    """Of each answer."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """At temperature 1."""
    top_k: tuple[int, ...] = (4, 6, 8, 10)
    """Of the dynamic trees at temperature 0."""
    depths: tuple[int, ...] = (5, 6, 7)
    """The same."""
    roots: int = 64
    """Places at which the ways of drawing are compared with the transport bound."""
    children: tuple[int, ...] = (1, 2, 3, 4)
    """There."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way of drafting at one temperature."""

    label: str
    method: str
    form: str
    """``chain``, ``long chain``, ``dynamic``, ``given``, ``without replacement`` or ``greedy-k``."""
    temperature: float
    config: Mapping[str, Any]
    """For the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AcceptanceLine:
    """What one way of drafting gave."""

    label: str
    method: str
    form: str
    temperature: float
    length: float
    """Mean tokens per pass in which something was drafted, bonus included."""
    low: float
    """Of the 95 % interval of `length`, prompts resampled."""
    high: float
    nodes: float
    """Mean drafted nodes per pass."""
    depths: list[float]
    """Share of the passes that drafted at depth 1, 2, ... and kept a node there."""
    looping: float
    """Share of the answers whose end repeats itself."""
    emitted: list[int]
    """Tokens of each prompt's counted passes, all seeds together."""
    passes: list[int]
    """Those passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """One mean acceptance length over another, on the same prompts."""

    value: float
    low: float
    """Of the 95 % interval; prompts resampled, the same for both."""
    high: float


@dataclass(kw_only=True, slots=True)
class Acceptance:
    """Everything that was found of one head."""

    head: str
    """Where it came from."""
    lines: list[AcceptanceLine] = field(default_factory=list)
    roots: list[RootReach] = field(default_factory=list)
    root_count: int = 0

    def best(self, method: str, form: str, temperature: float) -> AcceptanceLine | None:
        """The longest line of that kind; None where none was measured."""
        found = [
            line for line in self.lines if (line.method, line.form, line.temperature) == (method, form, temperature)
        ]
        return max(found, key=lambda line: line.length, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestants:
    """Who drafts for the target."""

    head: Any
    """An `EagleHead` in the target's dtype."""
    head_name: str
    draft: str | None
    """Directory of a draft model; None leaves it out."""
    lookup: int
    """Tokens that ngram proposes."""


def measure_acceptance(
    llm: LLM, who: Contestants, prompts: Sequence[Sequence[int]], plan: AcceptancePlan, progress: Progress
) -> Acceptance:
    """Every way of drafting over all prompts, temperature 0 first; the dynamic shape that is best there goes on."""
    found = Acceptance(head=who.head_name)
    for way in greedy_ways(who, plan):
        found.lines.append(measure_way(llm, way, prompts, plan, progress))
    best = found.best("eagle3", "dynamic", 0.0)
    dynamic = next(way.config for way in greedy_ways(who, plan) if best is not None and way.label == best.label)
    for way in sampled_ways(who, dynamic):
        found.lines.append(measure_way(llm, way, prompts, plan, progress))
    progress("laws at the roots beside the transport bound")
    rows = prompts[: len(llm.target.lengths)]
    config = {"method": "eagle3", "model": who.head, "shape": SHAPES[1], "draw": "without_replacement"}
    laws = root_laws(llm.target, config, rows, steps=24, most=plan.roots)
    found.roots, found.root_count = compare_roots(*laws, plan.children), len(laws[0])
    return found


def greedy_ways(who: Contestants, plan: AcceptancePlan) -> list[Way]:
    """Temperature 0: chains of every drafter, and the head's dynamic trees of `NODES` nodes."""
    ways = _chains(who, 0.0)
    for depth in plan.depths:
        for top_k in plan.top_k:
            config = _head(who, num_speculative_tokens=depth, top_k=top_k, nodes=NODES)
            label = f"eagle3 dynamic tree, {NODES} nodes, top {top_k}, depth {depth}"
            ways.append(Way(label=label, method="eagle3", form="dynamic", temperature=0.0, config=config))
    return ways


def sampled_ways(who: Contestants, dynamic: Mapping[str, Any]) -> list[Way]:
    """Temperature 1: chains by block verification, then trees of `EQUAL_NODES` nodes, each by its own rule."""
    ways = _chains(who, 1.0)
    long = _head(who, num_speculative_tokens=EQUAL_NODES, rule="block")
    tree = {**dynamic, "nodes": EQUAL_NODES, "draw": "given", "rule": "sample_walk"}
    ways.append(_sampled(f"eagle3 chain of {EQUAL_NODES}", "long chain", long))
    label = f"eagle3 dynamic tree, top {dynamic['top_k']}, depth {dynamic['num_speculative_tokens']}"
    ways.append(_sampled(label, "dynamic", tree))
    for shape in SHAPES:
        name = "-".join(map(str, shape))
        for draw, rule in (("given", "sample_walk"), ("without_replacement", "traversal"), ("greedy_k", "greedy_k")):
            form = draw.replace("_", " ") if draw != "greedy_k" else "greedy-k"
            config = _head(who, shape=shape, num_speculative_tokens=len(shape), draw=draw, rule=rule)
            ways.append(_sampled(f"eagle3 tree {name}, {form}", form, config))
    return ways


def _chains(who: Contestants, temperature: float) -> list[Way]:
    rule = {"rule": "block"} if temperature > 0 else {}
    configs: dict[str, Mapping[str, Any]] = {
        f"ngram chain of {who.lookup}": {"method": "ngram", "num_speculative_tokens": who.lookup}
    }
    if who.draft is not None:
        drafted = {"method": "draft_model", "model": who.draft, "num_speculative_tokens": CHAIN, **rule}
        configs[f"draft_model chain of {CHAIN}"] = drafted
    configs[f"eagle3 chain of {CHAIN}"] = _head(who, num_speculative_tokens=CHAIN, **rule)
    return [
        Way(label=label, method=config["method"], form="chain", temperature=temperature, config=config)
        for label, config in configs.items()
    ]


def _head(who: Contestants, **options: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": who.head, **options}


def _sampled(label: str, form: str, config: Mapping[str, Any]) -> Way:
    return Way(label=label, method="eagle3", form=form, temperature=1.0, config=config)


def measure_way(
    llm: LLM, way: Way, prompts: Sequence[Sequence[int]], plan: AcceptancePlan, progress: Progress
) -> AcceptanceLine:
    """Answer every prompt, at temperature 1 under every seed."""
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    totals = [SpeculationStats() for _ in prompts]
    looping = []
    for seed in plan.seeds if way.temperature > 0 else plan.seeds[:1]:
        progress(f"acceptance, T = {way.temperature:g}, seed {seed}: {way.label}")
        params = SamplingParams(
            temperature=way.temperature,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_tokens=plan.new_tokens,
            ignore_eos=True,
            seed=seed,
            detokenize=False,
        )
        for total, output in zip(totals, llm.generate(requests, params, speculative=way.config), strict=True):
            total.add(output.outputs[0].speculation)
            looping.append(loops(output.outputs[0].token_ids))
    return _line(way, totals, mean(looping))


def _line(way: Way, totals: Sequence[SpeculationStats], looping: float) -> AcceptanceLine:
    pooled = SpeculationStats()
    for total in totals:
        pooled.add(total)
    emitted, passes = [total.num_emitted_tokens for total in totals], [total.num_spec_steps for total in totals]
    low, high = _interval(_resampled(emitted, passes))
    return AcceptanceLine(
        label=way.label,
        method=way.method,
        form=way.form,
        temperature=way.temperature,
        length=pooled.mean_acceptance_length,
        low=low,
        high=high,
        nodes=pooled.num_draft_tokens / max(1, pooled.num_spec_steps),
        depths=pooled.acceptance_per_depth,
        looping=looping,
        emitted=emitted,
        passes=passes,
    )


def ratio(one: AcceptanceLine, other: AcceptanceLine) -> Ratio:
    """`one` over `other`; both answered the same prompts."""
    low, high = _interval(_resampled(one.emitted, one.passes) / _resampled(other.emitted, other.passes))
    return Ratio(value=one.length / other.length, low=low, high=high)


def _resampled(emitted: Sequence[int], passes: Sequence[int]) -> torch.Tensor:
    """Pooled lengths of resampled prompts; the same resamples for every line of as many prompts. 1 without passes."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(passes), (_RESAMPLES, len(passes)), generator=generator)
    tokens, steps = (torch.tensor(counts, dtype=torch.float64)[chosen].sum(1) for counts in (emitted, passes))
    return torch.where(steps > 0, tokens / steps.clamp(min=1), 1.0)


def _interval(values: torch.Tensor) -> tuple[float, float]:
    low, high = values.quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high
