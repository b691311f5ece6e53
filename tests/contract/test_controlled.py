"""Under control the distribution is the target's and greedy text is the target's own, however the decisions turn
out."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from contract.harness import (
    LEVEL,
    PROMPT,
    PROMPTS,
    SAMPLED,
    VARIANTS,
    Variant,
    as_prompts,
    draws,
    eagle_head,
    expected,
    llm,
    p_value,
    relative,
    sample,
    tokens_of,
)
from contract.test_greedy import NEUTRAL, PENALISED, reference
from forerun import LLM, SamplingParams
from forerun.control.costs import DraftCost
from forerun.control.policy import policy_for
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext
from forerun.engine import drafting
from forerun.engine.drafting import DrafterPool
from forerun.types import Budget, Drawn, RequestOutput
from selection import slow


class Moody:
    """A drafter's cost that changes all the time, so that the best depth does too."""

    fixed_ms = level_ms = 0.0

    def __init__(self) -> None:
        self.calls = 0

    def ms(self, depth: int) -> float:
        self.calls += 1
        return depth * (0.0, 0.1, 0.02, 0.6, 0.0, 0.25)[self.calls // 5 % 6]


@dataclass
class Costs:
    """Of passes and drafts; the policy believes them and looks at no clock."""

    slope: float = 0.04
    draft: Any = field(default_factory=Moody)
    drafts: dict[str, Any] = field(default_factory=dict)

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        return 1.0 + self.slope * nodes


class Every(dict[str, Any]):
    """The same cost for whatever drafter."""

    def __init__(self, cost: Any) -> None:
        super().__init__()
        self.cost = cost

    def __getitem__(self, key: str) -> Any:
        return self.cost


@pytest.fixture(autouse=True)
def costs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Costs]:
    """What the policies of the test believe."""
    made = Costs()

    def controlled(*arguments: Any, **keywords: Any) -> Any:
        policy = policy_for(*arguments, **{**keywords, "costs": made})
        policy.costs._drafts = Every(made.draft)
        return policy

    monkeypatch.setattr(drafting, "policy_for", controlled)
    yield made


def adaptive(method: str, label: str) -> Variant:
    """One of the suite's variants, under control."""
    plain = next(variant for variant in VARIANTS[method] if variant.label == label)
    return Variant(method, f"{label}-adaptive", {**plain.options, "adaptive": True})


HEAD = {"method": "eagle3", "model": eagle_head(3), "num_speculative_tokens": 3}
SEVERAL = [HEAD, {"method": "draft_model", "model": relative(), "shape": (2, 1)}]
VARIED = [
    adaptive("ngram", "chain"),
    adaptive("ngram", "trie"),
    adaptive("draft_model", "chain"),
    adaptive("draft_model", "tree"),
    adaptive("draft_model", "given-tree"),
    adaptive("draft_model", "greedy-k-tree"),
    adaptive("eagle3", "dynamic"),
    Variant("auto", "model", {"model": relative(), "greedy_with_seed": False}),
    Variant("auto", "several", {"drafters": SEVERAL, "greedy_with_seed": False}),
]


@pytest.mark.parametrize(("variant", "detect"), [(VARIED[-1], 0.4), *slow(*((one, 0.2) for one in VARIED))], ids=str)
def test_the_distribution_is_kept(variant: Variant, detect: float) -> None:
    assert p_value(sample(llm(variant, rows=64, check=False), draws(detect)), expected()) > LEVEL


GREEDY = [*((one, NEUTRAL) for one in VARIED), (VARIED[3], PENALISED), (VARIED[8], PENALISED)]


@pytest.mark.parametrize(("variant", "params"), GREEDY, ids=str)
def test_greedy_output_is_the_targets(variant: Variant, params: SamplingParams) -> None:
    engine = llm(variant, rows=3)
    outputs = engine.generate(as_prompts(PROMPTS), params, trace=True)
    assert tokens_of(outputs) == reference(params)
    assert not any(output.outputs[0].speculation.drafter_errors for output in outputs)
    sizes = {len(trace.nodes) for output in outputs for trace in output.outputs[0].trace}
    assert len(sizes) > 2, "the decisions were to vary"


@pytest.mark.parametrize("variant", [VARIED[2], VARIED[7]], ids=str)
def test_a_walk_gives_the_very_text_of_plain_decoding(variant: Variant) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(2 * len(PROMPTS))]
    engine = llm(variant, rule="sample_walk")
    walked = engine.generate(as_prompts(PROMPTS * 2), params)
    assert tokens_of(walked) == tokens_of(engine.generate(as_prompts(PROMPTS * 2), params, speculative=False))


def test_auto_keeps_a_seeds_text_and_draws_where_there_is_no_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who drafts depends on other requests and on costs that change all the time; the text for a seed does not."""
    admit, drawn = DrafterPool.admit, set[Drawn]()

    def noted(self: DrafterPool, trees: list[TokenTree]) -> list[TokenTree]:
        drawn.update(kind for tree in trees for kind in tree.drawn[1:])
        return admit(self, trees)

    monkeypatch.setattr(DrafterPool, "admit", noted)
    engine = llm(Variant("auto", "seeded", {"drafters": SEVERAL}), rows=3)
    prompts = as_prompts(PROMPTS * 2)
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(len(prompts))]
    outputs = engine.generate(prompts, params, trace=True)
    assert tokens_of(outputs) == tokens_of(engine.generate(prompts, params, speculative=False))
    asked = {trace.drafter for output in outputs for trace in output.outputs[0].trace}
    assert asked & {"eagle3", "draft_model"} and drawn == {Drawn.DETERMINISTIC}
    engine.generate(prompts, [replace(one, seed=None) for one in params])
    assert drawn > {Drawn.DETERMINISTIC}


def test_the_reproducible_mode_keeps_its_width() -> None:
    variant = adaptive("ngram", "trie")
    engine = LLM(
        llm(None).target.model,
        **{"tokenizer": False, "speculative_config": variant.config(), "reproducible": True, "max_model_len": 64},
        self_check=False,
    )
    outputs = engine.generate(as_prompts([PROMPT]), NEUTRAL, trace=True)
    assert tokens_of(outputs) == reference(NEUTRAL)[:1]
    assert max(len(trace.nodes) for trace in outputs[0].outputs[0].trace) <= 15


def test_costs_decide(costs: Costs) -> None:
    """Where a node costs nearly as much as a pass nothing is drafted for long; where it is free, much is."""
    taken = []
    for slope in (0.001, 0.9):
        costs.slope = slope
        output = llm(adaptive("ngram", "chain")).generate(as_prompts([PROMPTS[3]]), NEUTRAL)[0].outputs[0]
        taken.append(output.speculation.num_draft_tokens)
    assert taken[0] > 2 * taken[1]


def test_a_known_cost_is_looked_up_by_the_drafters_key() -> None:
    engine = llm(None)
    config = {"method": "ngram", "adaptive": True, "num_speculative_tokens": 3}
    engine.generate(as_prompts([PROMPT]), replace(NEUTRAL, max_tokens=2), speculative=config)
    (active,) = engine.engine.drafting._active.values()
    known = {active.config.key: DraftCost(fixed_ms=0.5, level_ms=0.25)}
    made = policy_for([active.config], engine.engine.drafting._setup, nodes=8, costs=Costs(drafts=known))
    assert made.costs.draft_ms(made.arms[0].key, 2, 1) == 1.0


@pytest.mark.parametrize(("method", "label"), [("draft_model", "tree"), ("eagle3", "chain")])
def test_a_seed_repeats_its_text_whatever_was_learned(method: str, label: str) -> None:
    """Beside rows without a seed, for which the policy drafts now this much, now that: one proposal a step for all."""
    seeded, free = replace(SAMPLED, max_tokens=24, seed=5), replace(SAMPLED, max_tokens=36, seed=None)
    [wanted] = llm(None).generate(as_prompts([PROMPT]), seeded)
    engine, proposals = llm(adaptive(method, label)), list[tuple[int, ...]]()
    (active,) = engine.engine.drafting._active.values()
    [(_, guarded)] = active.drafters
    propose = guarded.propose

    def counted(context: DraftContext, budget: Budget) -> list[TokenTree]:
        proposals.append(tuple(budget.depth))
        return propose(context, budget)

    guarded.propose = counted
    depths = set[tuple[int, ...]]()
    for _ in range(4):
        mine = engine.submit(as_prompts([PROMPT])[0], seeded)
        others = [engine.submit(prompt, free) for prompt in as_prompts(PROMPTS[1:3])]
        outputs = dict[str, RequestOutput]()
        while engine.engine.busy:
            proposals.clear()
            outputs |= {chunk.request_id: chunk.output for chunk in engine.engine.step() if chunk.output is not None}
            assert len(proposals) <= 1
            depths.update(proposals)
        found = outputs[mine].outputs[0]
        assert found.token_ids == wanted.outputs[0].token_ids
        assert all(outputs[other].outputs[0].speculation.num_draft_tokens for other in others)
    assert len(depths) > 1, "now this much, now that"


def test_a_useless_drafter_is_switched_off_by_default(costs: Costs) -> None:
    """It costs half a pass a token, and a random head is right once in twelve times."""
    costs.draft = DraftCost(fixed_ms=0.0, level_ms=0.5)
    config = {"method": "eagle3", "model": eagle_head(3), "num_speculative_tokens": 3}
    engine, prompts = llm(None, rows=1), as_prompts(PROMPTS)
    params = replace(NEUTRAL, max_tokens=40)
    plain = tokens_of(engine.generate(prompts, params, speculative=False))
    drafted = list[int]()
    for own in (config, {**config, "adaptive": False}):
        outputs = engine.generate(prompts, params, speculative=own)
        assert tokens_of(outputs) == plain
        stats = [output.outputs[0].speculation for output in outputs]
        assert sum(one.num_spec_steps + one.num_plain_steps for one in stats) > 120
        drafted.append(sum(one.num_draft_tokens for one in stats))
    assert drafted[0] < 0.1 * drafted[1]


def test_what_is_not_asked_remembers_the_answers_all_the_same() -> None:
    engine, config = llm(None, rows=2), {"method": "suffix"}
    engine.generate(as_prompts(PROMPTS[:1]), replace(NEUTRAL, max_tokens=1), speculative=config)
    [active] = engine.engine.drafting._active.values()
    [arm] = active.policy.arms
    arm.lookup_trials.off, arm.lookup_trials._due = True, 10**9
    outputs = engine.generate(as_prompts(PROMPTS[:2]), replace(NEUTRAL, max_tokens=20), speculative=config)
    assert not any(output.outputs[0].speculation.num_draft_tokens for output in outputs)
    store = arm.drafter.drafter._domains.of(None).store
    assert store.held >= sum(len(output.outputs[0].token_ids) for output in outputs)
