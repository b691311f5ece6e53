"""How long drafts are accepted, by drafter and by the shape of the draft, on held-out prompts.

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
from torch import Tensor

from benchmarks.suite.speed import Progress
from benchmarks.suite.workloads import loops
from forerun import LLM, SamplingParams
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.decode.step import Group, context_for, first_tokens, step
from forerun.drafters import build
from forerun.drafters.drawing import Draw
from forerun.errors import ArgumentError
from forerun.model import TransformersTarget
from forerun.model.transformers_target import require_layers
from forerun.types import Boundary, Budget, DraftKind, SpeculationStats, Verdict

# Target and draft distributions at the roots that decoding meets, and what each way of drawing children could keep
# there.
#
# One text is decoded by a tree without replacement at temperature 1; at its roots every other way of drawing is
# computed instead of tried, so that all of them are compared at the same places. Knows heads and the step, no report.


# How often the token after a node can be one of its drafted children: the optimal-transport bound, and reality.
#
# If the siblings are drawn from a distribution over token sets, no rule whose emitted token has the target's
# distribution p can make that token one of them more often than ``1 + min_H [p(H) - P(all siblings in H)]``, over every
# set H of tokens. The minimum is attained by a prefix of the tokens sorted by p/q (Hu et al., arXiv 2502.18779), so a
# sort and prefix sums do. Siblings without replacement are the first arrivals of independent exponential clocks with
# rates q, which turns the probability into one smooth integral over time instead of a sum over ordered tuples.
#
# Knows distributions and nothing of drafters, targets or trees. Speaks of one level: what rules gain by looking at the
# levels below is not in it.


_STEP = 0.5
"""Of the logarithm of time; the trapezoid rule converges exponentially, this leaves an error below 1e-7."""
_FIRST, _LAST = -24.0, 23.0
"""Logarithms of the earliest and the latest time; clocks of rate 1e-10 still count."""
_CHUNK = 4
"""Nodes whose integrals are in memory at once: times x tokens each, float64."""


def transport_bound(target: Tensor, draft: Tensor, count: int, draw: Draw) -> Tensor:
    """The highest chance that the token after each node is among its `count` children (arXiv 2502.18779).

    Args:
        target: (N, V) distributions of the target.
        draft: (N, V) distributions that the children are drawn from; where fewer than `count` tokens are possible,
            there are
            fewer children without replacement.
        count: children of each node, at least 1.
        draw: how they are drawn; never AUTO.

    Returns:
        (N,) float64 in [0, 1]. For given and greedy-k children their rules reach it.

    Raises:
        ArgumentError: shapes differ, no child, or AUTO.
    """
    target, draft = _probs(target, draft, count, draw)
    if draw is Draw.DETERMINISTIC:
        return target.gather(1, _likeliest(draft, count)).sum(1).clamp(max=1)
    if draw is Draw.GREEDY_K:
        return _greedy_k(target, draft, count)
    ratio = torch.where(draft > 0, target / draft, torch.inf)
    order = ratio.argsort(dim=1)
    target, draft = target.gather(1, order), draft.gather(1, order)
    inside = _all_inside_iid(draft, count) if draw is Draw.IID else _all_inside_distinct(draft, count)
    gap = (target.cumsum(1) - inside).min(1).values
    return (1 + gap.clamp(max=0)).clamp(min=0)  # the empty set gives 0


def rejection_reach(target: Tensor, draft: Tensor, count: int, draw: Draw, *, samples: int = 64) -> Tensor:
    """The chance that token-by-token rejection keeps one of `count` siblings, all of them leaves.

    That is recursive rejection (SpecInfer, arXiv 2305.09781), and traversal (2505.12398) too: on one level they are the
    same rule. Arguments as `transport_bound`, `draw` IID or WITHOUT_REPLACEMENT.

    Args:
        samples: paths of rejected siblings, over which the chance is averaged without replacement; one sibling, and
            any number of iid ones, are exact without them.

    Returns:
        (N,) float64; the same for the same arguments.
    """
    if draw not in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
        raise ArgumentError(f"rejection judges siblings drawn iid or without replacement, not {draw.value}")
    target, draft = _probs(target, draft, count, draw)
    paths = samples if draw is Draw.WITHOUT_REPLACEMENT and count > 1 else 1
    generator = torch.Generator().manual_seed(0)
    rows = zip(target, draft, strict=True)
    return torch.stack([_reach(p.expand(paths, -1), q.expand(paths, -1), count, draw, generator) for p, q in rows])


def _reach(target: Tensor, draft: Tensor, count: int, draw: Draw, generator: torch.Generator) -> Tensor:
    """Of one node: distributions (S, V) of each path."""
    missed = target.new_ones(len(target))
    for index in range(count):
        left = (target - draft).clamp(min=0)
        missed = missed * left.sum(1)
        if index == count - 1:
            break
        if draw is Draw.WITHOUT_REPLACEMENT:
            draft = _without_rejected(target, draft, generator)
        target = _normalised(left, target)
    return 1 - missed.mean()


def _without_rejected(target: Tensor, draft: Tensor, generator: torch.Generator) -> Tensor:
    """The draft distribution after a sibling was drawn and rejected: it lay where the draft exceeds the target."""
    excess = (draft - target).clamp(min=0)
    # Without excess a rejection has probability zero, or nothing is left to draw: any token will do.
    token = torch.multinomial(excess + (excess.sum(1, keepdim=True) <= 0), 1, generator=generator)
    rest = draft.scatter(1, token, 0.0)
    return rest / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _normalised(values: Tensor, instead: Tensor) -> Tensor:
    """Rows of sum one; `instead` where there is nothing to normalise."""
    mass = values.sum(1, keepdim=True)
    return torch.where(mass > 0, values / mass.clamp_min(torch.finfo(values.dtype).tiny), instead)


def _probs(target: Tensor, draft: Tensor, count: int, draw: Draw) -> tuple[Tensor, Tensor]:
    if target.dim() != 2 or target.shape != draft.shape:
        raise ArgumentError(
            f"target and draft distributions are (nodes, tokens) both, got {target.shape} and {draft.shape}"
        )
    if count < 1:
        raise ArgumentError(f"a node needs at least one child, got {count}")
    if draw is Draw.AUTO:
        raise ArgumentError("how the children are drawn depends on the request: say given, iid, ... instead of auto")
    target, draft = target.double(), draft.double()
    return target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)


def _likeliest(draft: Tensor, count: int) -> Tensor:
    return draft.topk(min(count, draft.shape[1]), dim=1).indices


def _greedy_k(target: Tensor, draft: Tensor, count: int) -> Tensor:
    """sum over given of p + sum over the rest of min(p, q'), q' the draft distribution restricted to the rest."""
    rest, given = draft, target.new_zeros(len(target))
    if count > 1:
        best = _likeliest(draft, count - 1)
        given, rest = target.gather(1, best).sum(1), draft.scatter(1, best, 0.0)
    rest = rest / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
    return (given + torch.minimum(target, rest).sum(1)).clamp(max=1)


def _all_inside_iid(draft: Tensor, count: int) -> Tensor:
    """(N, V): the chance that all siblings lie in each prefix."""
    return draft.cumsum(1).clamp(max=1) ** count


def _all_inside_distinct(draft: Tensor, count: int) -> Tensor:
    """(N, V): the same for siblings that are drawn one after the other without replacement."""
    possible = (draft > 0).sum(1).clamp(max=count)
    inside = torch.empty_like(draft)
    for siblings in sorted(set(possible.tolist())):
        rows = torch.nonzero(possible == siblings).flatten()
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            inside[part] = 1 - _outsider_among_first(draft[part], siblings)
    return inside


def _outsider_among_first(draft: Tensor, count: int) -> Tensor:
    """(n, V): the chance that the first `count` arrivals are not all in a prefix H.

    An outsider rings at time t at the rate (1 - Q) exp(-(1 - Q) t), Q = q(H); by then fewer than `count` of H have
    arrived with probability exp(-Q t) (e_0 + ... + e_(count - 1)), where e_j is the elementary symmetric polynomial of
    exp(q(x) t) - 1 over H. The e_j of all prefixes are cumulated sums, here of logarithms.
    """
    logs = torch.arange(_FIRST, _LAST, _STEP, dtype=draft.dtype)
    times = logs.exp().view(1, -1, 1)
    rates = draft.unsqueeze(1) * times
    arrivals = rates + torch.log(-torch.expm1(-rates))
    before, total = torch.zeros_like(arrivals), torch.exp(-times).expand_as(arrivals)
    for _ in range(1, count):
        # e_j of the first n tokens = sum over i <= n of (weight of token i) e_(j-1) of the tokens before i.
        few = torch.logcumsumexp(arrivals + before, dim=-1)
        total = total + torch.exp(few - times)
        before = torch.cat([torch.full_like(few[..., :1], -torch.inf), few[..., :-1]], dim=-1)
    outside = draft.flip(1).cumsum(1).flip(1)  # summed from the end: exact where little is left
    outside = torch.cat([outside[:, 1:], torch.zeros_like(outside[:, :1])], dim=1)
    return (outside * (total * times).sum(1) * _STEP).clamp(max=1)


_NODES = 128
"""More than any tree here has."""
_ROOM = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RootReach:
    """Mean chance, over the roots, that the next token is among `children` drafted ones."""

    children: int
    deterministic: float
    """The likeliest tokens: sample-and-walk, which reaches its bound."""
    greedy_k: float
    """All but one deterministic, one drawn from the rest: the greedy-k rule, which reaches its bound."""
    distinct: float
    """Without replacement, judged one after the other (recursive rejection; traversal where they are leaves)."""
    distinct_bound: float
    """Without replacement, any rule."""
    iid: float
    """Drawn independently, judged one after the other."""
    iid_bound: float
    """Drawn independently, any rule."""


def compare_roots(target: Tensor, draft: Tensor, counts: Sequence[int]) -> list[RootReach]:
    """From distributions (N, V) of both models at the roots, for each number of children."""
    lines = []
    for count in counts:
        found = {
            "deterministic": transport_bound(target, draft, count, Draw.DETERMINISTIC),
            "greedy_k": transport_bound(target, draft, count, Draw.GREEDY_K),
            "distinct": rejection_reach(target, draft, count, Draw.WITHOUT_REPLACEMENT),
            "distinct_bound": transport_bound(target, draft, count, Draw.WITHOUT_REPLACEMENT),
            "iid": rejection_reach(target, draft, count, Draw.IID),
            "iid_bound": transport_bound(target, draft, count, Draw.IID),
        }
        lines.append(RootReach(children=count, **{name: float(chances.mean()) for name, chances in found.items()}))
    return lines


@torch.inference_mode()
def root_distributions(
    target: TransformersTarget, config: Mapping[str, Any], prompts: Sequence[Sequence[int]], *, steps: int, most: int
) -> tuple[Tensor, Tensor]:
    """Decode `prompts` for some steps at temperature 1 and keep both distributions at the roots.

    Args:
        target: with as many free rows as prompts; they are free again afterwards.
        config: ``method`` and its options; children must be sampled, so that their distributions are recorded.
        steps: of every row, each of at least one token.
        most: roots kept, evenly spread over those that were met.

    Returns:
        distributions of target and drafter after the roots, (N, V) float32 each, N at most `most`.
    """
    options = dict(config)
    setup = DrafterSetup(target=target, tokenizer=None, rows=len(prompts), slots=target.slots)
    watch = _Watch(build(options.pop("method"), options, setup))
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    rows = [
        Row(
            cache_row=index,
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampler=Sampler(params, prompt),
            seed=index,
            stop_ids=frozenset(),
            tokens_left=_ROOM,
        )
        for index, prompt in enumerate(prompts)
    ]
    ids = [row.cache_row for row in rows]
    scored = target.prefill(ids, [row.tokens for row in rows], boundaries=watch.requires)
    first_tokens(rows, scored.logits)
    watch.extend(context_for(rows, range(len(rows)), [len(row.tokens) for row in rows], scored.hidden_states))
    group = Group(name="watched", drafter=watch, members=ids, depths=[_NODES] * len(rows), nodes=_NODES)
    for _ in range(steps):
        step(target, rows, [group])
    target.truncate(ids, [0] * len(ids))
    chosen = torch.linspace(0, len(watch.probs) - 1, min(most, len(watch.probs))).round().long().tolist()
    return torch.stack([watch.probs[i][0] for i in chosen]), torch.stack([watch.probs[i][1] for i in chosen])


class _Watch(Drafter):
    """Leaves everything to another drafter and notes the distributions at the roots of its trees."""

    name = "watched"

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.probs: list[tuple[Tensor, Tensor]] = []
        """(V,) of the target and (V,) of the drafter, root by root."""

    def kind(self, sampler: Sampler) -> DraftKind:
        return self.inner.kind(sampler)

    @property
    def requires(self) -> frozenset[Boundary]:
        return self.inner.requires

    def extend(self, context: DraftContext) -> None:
        self.inner.extend(context)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        return self.inner.propose(context, budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.inner.observe(context, verdicts, scores)
        for index, tree in enumerate(scores.trees):
            if 0 in tree.draft_probs:
                probs = scores.sampler(index).probs(scores.logits[index, 0], scores.output(index, 0))
                self.probs.append((probs.cpu(), tree.draft_probs[0].float().cpu()))


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
    """Mean acceptance length."""
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
    progress("distributions at the roots beside the transport bound")
    rows = prompts[: len(llm.target.lengths)]
    config = {"method": "eagle3", "model": who.head, "shape": SHAPES[1], "draw": "without_replacement"}
    probs = root_distributions(require_layers(llm.target, "the benchmark"), config, rows, steps=24, most=plan.roots)
    found.roots, found.root_count = compare_roots(*probs, plan.children), len(probs[0])
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
    tree = {**dynamic, "nodes": EQUAL_NODES, "draw": "deterministic", "rule": "sample_walk"}
    ways.append(_sampled(f"eagle3 chain of {EQUAL_NODES}", "long chain", long))
    label = f"eagle3 dynamic tree, top {dynamic['top_k']}, depth {dynamic['num_speculative_tokens']}"
    ways.append(_sampled(label, "dynamic", tree))
    for shape in SHAPES:
        name = "-".join(map(str, shape))
        for draw, rule in (
            ("deterministic", "sample_walk"),
            ("without_replacement", "traversal"),
            ("greedy_k", "greedy_k"),
        ):
            form = draw.replace("_", " ") if draw != "greedy_k" else "greedy-k"
            config = _head(who, shape=shape, num_speculative_tokens=len(shape), draw=draw, rule=rule)
            ways.append(_sampled(f"eagle3 tree {name}, {form}", form, config))
    return ways


def _chains(who: Contestants, temperature: float) -> list[Way]:
    rule = {"rule": "block"} if temperature > 0 else {}
    configs: dict[str, Mapping[str, Any]] = {
        f"ngram chain of {who.lookup}": {"method": "ngram", "num_speculative_tokens": who.lookup, "adaptive": False}
    }
    if who.draft is not None:
        drafted = {"method": "draft_model", "model": who.draft, "num_speculative_tokens": CHAIN, "adaptive": False}
        configs[f"draft_model chain of {CHAIN}"] = drafted | rule
    configs[f"eagle3 chain of {CHAIN}"] = _head(who, num_speculative_tokens=CHAIN, **rule)
    return [
        Way(label=label, method=config["method"], form="chain", temperature=temperature, config=config)
        for label, config in configs.items()
    ]


def _head(who: Contestants, **options: Any) -> dict[str, Any]:
    return {"method": "eagle3", "model": who.head, "adaptive": False, **options}


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
    passes = [total.num_spec_steps for total in totals]
    emitted = [total.num_accepted_draft_tokens + count for total, count in zip(totals, passes, strict=True)]
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
