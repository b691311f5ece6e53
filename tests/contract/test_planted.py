"""Bugs that speculative decoders really had, planted one by one: the suite's own checks must catch each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from contract.harness import (
    LEVEL,
    NEVER,
    PROMPT,
    PROMPTS,
    SAMPLED,
    VARIANTS,
    Variant,
    as_prompts,
    expected,
    installed,
    llm,
    oracle,
    p_value,
    sample,
    tokens_of,
)
from contract.test_cache import TOLERANCE, built, run
from contract.test_greedy import NEUTRAL, PENALISED, reference
from contract.test_recorded import watch
from contract.wrong import Twins, Uniform
from forerun import LLM, SamplingParams
from forerun.core import step
from forerun.core.rules.base import rule_named
from forerun.core.sampling import Rng, Stream
from forerun.core.scores import Scores
from forerun.core.tree import TokenTree
from forerun.drafters.drawing import Children, HostDraws
from forerun.drafters.trees import Submitted
from forerun.model import Target
from forerun.model.cache import SlotCache
from forerun.types import Drawn, Source, Verdict

Patch = pytest.MonkeyPatch


def named(label: str) -> Variant:
    """One of the draft model's variants."""
    return next(variant for variant in VARIANTS["draft_model"] if variant.label == label)


def distribution_is_off(variant: Variant, rule: str | None = None, draws: int = 600) -> bool:
    return p_value(sample(llm(variant, rule=rule, rows=64, check=False), draws), expected()) < LEVEL


def greedy_is_off(engine: LLM, params: SamplingParams = NEUTRAL) -> bool:
    return tokens_of(engine.generate(as_prompts(PROMPTS), params)) != reference(params)


def test_a_residual_that_is_not_normalised(monkeypatch: Patch) -> None:
    def as_it_is(rng: Rng, probs: Tensor, depth: int = 0) -> int:
        uniform = rng._uniform(rng.position + depth, Stream.TARGET, 0)
        found = int(torch.searchsorted(probs.double().cumsum(0), uniform, right=True))
        return min(found, int(torch.nonzero(probs)[-1]))

    with installed("wrong", Uniform):
        assert not distribution_is_off(Variant("wrong"))
        monkeypatch.setattr(Rng, "draw", as_it_is)
        assert distribution_is_off(Variant("wrong"))


def test_frozen_penalties(monkeypatch: Patch) -> None:
    output = Scores.output
    monkeypatch.setattr(Scores, "output", lambda self, index, node: output(self, index, 0))
    assert distribution_is_off(named("given-tree"))
    assert greedy_is_off(llm(named("chain")), PENALISED)


class WithoutBonus:
    """A rule that forgets the token it may emit after a draft that was kept whole."""

    def __init__(self, name: str) -> None:
        self._rule = rule_named(name)

    def verify(self, tree: Any, target: Any, rng: Rng) -> Verdict:
        verdict = self._rule.verify(tree, target, rng)
        if verdict.kind is not Source.BONUS:
            return verdict
        return Verdict(path=verdict.path[:-1], next_token=tree.tokens[verdict.path[-1]], kind=Source.DRAFT)


def tokens_of_full_steps(temperature: float) -> set[int]:
    """Tokens per step of a drafter that is always right, the steps cut short by the answer's end left out."""
    params = replace(SAMPLED, temperature=temperature, max_tokens=21, seed=0)
    output = llm(oracle(3)).generate(as_prompts([PROMPT]), params, trace=True)[0].outputs[0]
    return {trace.emitted for trace in output.trace if len(trace.nodes) == 3}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_missing_bonus_token(monkeypatch: Patch, temperature: float) -> None:
    assert tokens_of_full_steps(temperature) == {4}
    monkeypatch.setattr(step, "rule_named", WithoutBonus)
    assert tokens_of_full_steps(temperature) != {4}


def test_argmax_at_a_temperature(monkeypatch: Patch) -> None:
    monkeypatch.setattr(step, "default_rule", lambda kind, greedy: "argmax_walk")
    assert distribution_is_off(named("chain"))


def test_an_accepted_path_that_is_not_moved_into_place(monkeypatch: Patch) -> None:
    engine, drafter = built(named("given-tree"))
    other = llm(named("given-tree"))
    monkeypatch.setattr(SlotCache, "move", lambda *_: None)
    with torch.inference_mode():
        assert run(engine, drafter, NEUTRAL) > TOLERANCE
    assert greedy_is_off(other)


def test_a_target_that_does_not_roll_back(monkeypatch: Patch) -> None:
    commit = Target.commit

    def keep_one_too_many(self: Target, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        longer = []
        for row, path in zip(rows, paths, strict=True):
            following = (path[-1] if path else 0) + 1
            longer.append((*path, following) if following < self._ran[row] else path)
        commit(self, rows, longer)

    engine, drafter = built(named("chain"))
    other = llm(named("chain"))
    monkeypatch.setattr(Target, "commit", keep_one_too_many)
    with torch.inference_mode(), pytest.raises(AssertionError):
        run(engine, drafter, NEUTRAL)
    assert greedy_is_off(other)


def test_a_drafter_that_does_not_roll_back(monkeypatch: Patch) -> None:
    engine, drafter = built(named("chain"))
    monkeypatch.setattr(
        Submitted, "accepted", lambda self, committed: tuple(range(1, min(len(committed) + 1, self.run) + 1))
    )
    with torch.inference_mode():
        assert run(engine, drafter, NEUTRAL) > TOLERANCE


def test_positions_that_are_off_by_one(monkeypatch: Patch) -> None:
    place = Target._nodes

    def shifted(self: Target, *args: Any) -> Any:
        nodes = place(self, *args)
        return replace(nodes, depths=nodes.depths + 1)

    engines = [llm(None), llm(named("chain")), llm(named("given-tree"))]
    monkeypatch.setattr(Target, "_nodes", shifted)
    for engine in engines:
        assert greedy_is_off(engine)


def test_a_distribution_recorded_before_processing(monkeypatch: Patch) -> None:
    children = HostDraws._of_node

    def raw(draws: HostDraws, logits: Tensor, *others: Any) -> Children:
        return replace(children(draws, logits, *others), probs=logits.float().softmax(-1).view(1, 1, -1))

    monkeypatch.setattr(HostDraws, "_of_node", raw)
    for label in ("chain", "tree"):
        assert watch(named(label), PROMPTS).problems
        assert distribution_is_off(named(label))


def merging(self: TokenTree, token: int, parent: int, **how: Any) -> int:
    """`TokenTree.add` that takes a sampled duplicate for a given one."""
    for node, known in enumerate(zip(self.tokens, self.parents, strict=True)):
        if known == (token, parent):
            return node
    kind = how.pop("drawn", Drawn.DETERMINISTIC)
    node = _add(self, token, parent, **how)
    self.drawn[node] = kind
    return node


_add = TokenTree.add


def test_merged_sampled_duplicates(monkeypatch: Patch) -> None:
    monkeypatch.setattr(TokenTree, "add", merging)
    assert watch(named("iid-tree"), PROMPTS[:1], alterations=8).problems
    with installed("wrong", Twins):
        assert distribution_is_off(Variant("wrong"), draws=900)


def test_one_random_generator_for_all(monkeypatch: Patch) -> None:
    params = [replace(SAMPLED, max_tokens=14, seed=seed) for seed in range(len(PROMPTS))]

    def depends_on_company() -> bool:
        engine = llm(named("chain"))
        together = tokens_of(engine.generate(as_prompts(PROMPTS), params))
        single: Callable[[int], list[int]] = lambda row: tokens_of(  # noqa: E731
            engine.generate(as_prompts([PROMPTS[row]]), params[row])
        )[0]
        return together != [single(row) for row in range(len(PROMPTS))]

    assert not depends_on_company()
    shared = np.random.default_rng(0)
    monkeypatch.setattr(Rng, "_uniform", lambda *_: float(shared.random()))
    assert depends_on_company()


def test_a_forbidden_token_is_noticed() -> None:
    assert p_value({(NEVER,) * 5: 1}, expected()) == 0
