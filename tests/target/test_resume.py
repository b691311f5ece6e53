"""A pass that the first layers have begun is completed: the logits of a whole pass, and no layer twice for a token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.target import Buckets, Plan, Resume, Target
from forerun.target.resuming import prove, renumber
from forerun.tree import TreeBuilder, gather, stack
from forerun.types import LAST_HIDDEN, Draft, Signal
from target.families import FAMILIES, SHARING, make, random_tokens
from target.test_families import trees

ROWS, ROOTS = [0, 1, 2], [4, 5, 6]
DRAFT = trees(0)
TOLERANCE = 2e-5


def prefilled(name: str = "llama") -> Target:
    target = Target.load(make(name), rows=3, slots=64, self_check=False)
    target.prefill(ROWS, [random_tokens(count, count) for count in (3, 9, 17)])
    return target


def begun(target: Target, boundary: int, nodes: int, counts: list[int] | None = None) -> Resume:
    """The first `nodes` nodes of `DRAFT`, run level by level as a drafter does."""
    whole = DRAFT.size
    parts = []
    for last in range(nodes):
        shown = {name: getattr(DRAFT, name)[:, :last] for name in ("tokens", "parents", "drawn")}
        so_far = Draft(counts=DRAFT.counts.clamp(max=last), **shown)
        parts.append(target.run(ROWS, ROOTS, so_far, Plan(stop=boundary), start=last))
    assert nodes <= whole + 1
    stamps = [target.writes[row] for row in ROWS]
    return Resume(boundary=boundary, states=torch.cat(parts, dim=1), counts=counts or [nodes] * 3, stamps=stamps)


def worst(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference at nodes that are no padding."""
    real = torch.arange(first.shape[1]) <= DRAFT.counts.unsqueeze(1)
    return float((first - second).abs()[real].max())


class Evaluations:
    """Counts how often each layer wrote the keys of each slot: once for every token that it evaluates."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()
        self.target = target
        original = target.cache.update

        def update(keys, values, layer, *args, **kwargs):  # type: ignore[no-untyped-def]
            slots = target.cache._window.flat
            real = slots[slots % (target.cache.slots + 1) != target.cache.dump]
            self.seen.update((layer, slot) for slot in real.tolist())
            return original(keys, values, layer, *args, **kwargs)

        monkeypatch.setattr(target.cache, "update", update)

    def of_a_tree(self) -> Counter[tuple[int, int]]:
        """Every layer once for every node of `DRAFT`."""
        stride = self.target.cache.slots + 1
        return Counter(
            (layer, row * stride + self.target.lengths[row] + node)
            for layer in range(self.target.num_layers)
            for row, count in zip(ROWS, DRAFT.counts.tolist(), strict=True)
            for node in range(count + 1)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_resumed_pass_is_the_whole_and_runs_no_layer_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, ROOTS, DRAFT)
    evaluations = Evaluations(target, monkeypatch)
    for boundary, nodes in ((1, 1), (2, 4), (3, 8)):
        target.truncate(ROWS, target.lengths)
        evaluations.seen.clear()
        resumed = target.score(ROWS, ROOTS, DRAFT, resume=begun(target, boundary, nodes))
        assert worst(resumed.logits, whole.logits) <= TOLERANCE
        assert evaluations.seen == evaluations.of_a_tree()
    target.commit(ROWS, [(1, 3), (), (3,)])
    assert target.lengths == [6, 10, 19]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_rows_may_have_begun_unequally_many_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, ROOTS, DRAFT)
    unequal = begun(target, 2, 5, counts=[0, 2, 5])
    spoilt = unequal.states.clone()
    spoilt[0], spoilt[1, 2:] = 7.0, 7.0
    evaluations = Evaluations(target, monkeypatch)
    resumed = target.score(ROWS, ROOTS, DRAFT, resume=replace(unequal, states=spoilt))
    assert worst(resumed.logits, whole.logits) <= TOLERANCE
    first = Counter(slot for layer, slot in evaluations.seen.elements() if layer == 0)
    assert first.total() == 8 + 5 + 7 - 7, "of all nodes only those that had not begun"


def test_without_the_keys_of_the_first_layers_the_logits_would_differ() -> None:
    """The negative control: the states alone do not make the pass."""
    target = prefilled()
    whole = target.score(ROWS, ROOTS, DRAFT)
    resume = begun(target, 2, 4)
    with torch.inference_mode():
        for layer in (0, 1):
            keys, _ = target.cache._stores[layer]
            for row in ROWS:
                keys[row, target.lengths[row] : target.lengths[row] + 4] += 1.0
    assert worst(target.score(ROWS, ROOTS, DRAFT, resume=resume).logits, whole.logits) > 1e-2


@pytest.mark.parametrize("size", [4, 16])
def test_padding_to_buckets(size: int) -> None:
    target = prefilled()
    whole = target.score(ROWS, ROOTS, DRAFT)
    target.buckets = Buckets(nodes=(size,))
    resumed = target.score(ROWS, ROOTS, DRAFT, resume=begun(target, 2, 3))
    assert worst(resumed.logits, whole.logits) <= TOLERANCE


@pytest.mark.parametrize("boundary", [1, 2, 4])
def test_signals_of_others_are_delivered(boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: set[Signal] = {2, 3, 4, LAST_HIDDEN}
    target = prefilled("qwen3")
    whole = target.score(ROWS, ROOTS, DRAFT, signals=wanted)
    resume = begun(target, boundary, 8)
    evaluations = Evaluations(target, monkeypatch)
    resumed = target.score(ROWS, ROOTS, DRAFT, signals=wanted, resume=resume)
    assert resumed.signals.keys() == wanted
    for signal in wanted:
        assert worst(resumed.signals[signal], whole.signals[signal]) <= TOLERANCE
    ran_again = any(layer == 0 for layer, _ in evaluations.seen)
    assert ran_again == (boundary > 2), "a state below the boundary is only seen in a whole pass"


def test_what_was_written_over_is_run_anew() -> None:
    target = prefilled()
    whole = target.score(ROWS, ROOTS, DRAFT)
    resume = begun(target, 2, 4)
    other = Draft(tokens=DRAFT.tokens + 1, parents=DRAFT.parents, counts=DRAFT.counts, drawn=DRAFT.drawn)
    target.run([1], [9], _row(other, 1), Plan(stop=3))
    resumed = target.score(ROWS, ROOTS, DRAFT, resume=resume)
    assert worst(resumed.logits, whole.logits) <= TOLERANCE


def _row(draft: Draft, row: int) -> Draft:
    return Draft(**{name: getattr(draft, name)[row : row + 1] for name in ("tokens", "parents", "counts", "drawn")})


def test_nodes_may_be_left_out_and_the_others_move_up() -> None:
    """Root, nodes 1 2 (below the root) and 3 (below 2); 1 is left out."""
    target = prefilled()
    grown, kept = TreeBuilder(), TreeBuilder()
    for token, parent in ((7, 0), (8, 0), (9, 2)):
        grown.add(token, parent)
    for token, parent in ((8, 0), (9, 1), (10, 2)):
        kept.add(token, parent)
    whole = target.score([1], [5], stack([kept])).logits
    states = target.run([1], [5], stack([grown]), Plan(stop=2))
    renumber(target, [1], [[2, 3]])
    resume = Resume(boundary=2, states=states[:, [0, 2, 3]], counts=[3], stamps=[target.writes[1]])
    assert (target.score([1], [5], stack([kept]), resume=resume).logits - whole).abs().max() <= TOLERANCE


def test_a_draft_for_some_rows_keeps_what_it_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled()
    whole = target.score(ROWS, ROOTS, DRAFT).logits
    resume = begun(target, 2, 4)
    resume = replace(resume, states=resume.states[[0, 2]], counts=[4, 4], stamps=resume.stamps[::2])
    joined = gather([([1], _with_laws([1])), ([0, 2], replace(_with_laws([0, 2]), resume=resume))], 3)
    assert joined.resume is not None and joined.resume.counts == [4, 0, 4]
    evaluations = Evaluations(target, monkeypatch)
    assert worst(target.score(ROWS, ROOTS, joined, resume=joined.resume).logits, whole) <= TOLERANCE
    assert sum(layer == 0 for layer, _ in evaluations.seen) == 8 + 5 + 7 - 8


def test_two_drafts_that_have_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled()
    whole = target.score(ROWS, ROOTS, DRAFT).logits
    for boundaries, expected in (((2, 2), [2, 4, 2]), ((2, 1), [0, 4, 0])):
        resumes = [begun(target, boundary, 4) for boundary in boundaries]
        stamps = [target.writes[row] for row in ROWS]
        drafts = [
            replace(
                _with_laws(rows),
                resume=replace(
                    resume, states=resume.states[rows, :count], counts=[count] * len(rows), stamps=stamps[: len(rows)]
                ),
            )
            for rows, resume, count in (([1], resumes[0], 4), ([0, 2], resumes[1], 2))
        ]
        joined = gather([([1], drafts[0]), ([0, 2], drafts[1])], 3)
        assert joined.resume is not None and list(joined.resume.counts) == expected
        assert worst(target.score(ROWS, ROOTS, joined, resume=joined.resume).logits, whole) <= TOLERANCE


def _with_laws(rows: list[int]) -> Draft:
    return Draft(**{name: getattr(DRAFT, name)[rows] for name in ("tokens", "parents", "counts", "drawn", "laws")})


def test_a_resume_that_does_not_fit_is_refused() -> None:
    target = prefilled()
    good = begun(target, 2, 4)
    for wrong in (replace(good, states=torch.zeros(3, 4, 63)), replace(good, boundary=5)):
        with pytest.raises(ArgumentError, match="resume"):
            target.score(ROWS, ROOTS, DRAFT, resume=wrong)
    with pytest.raises(ArgumentError, match="root first"):
        target.score(ROWS, ROOTS, DRAFT, start=1, resume=good)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_proof_at_load_passes_every_family(name: str) -> None:
    target = prefilled(name)
    before = list(target.lengths)
    prove(target, 2)
    assert target.lengths == before


def test_layers_that_cannot_be_run_in_part_are_refused() -> None:
    target = Target.load(AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHARING)).eval(), rows=1, slots=64)
    with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
        prove(target, 2)


def test_a_layer_that_remembers_is_refused() -> None:
    """A model whose layers hand something on beside the residual stream: the parts do not make the whole."""
    model = make("llama")
    handed: list[torch.Tensor] = []
    model.model.layers[1].register_forward_hook(lambda _module, _args, output: handed.append(output[:, :1]))
    model.model.layers[2].register_forward_hook(lambda _module, _args, output: output + handed[-1])
    target = Target(model, rows=1, slots=64)
    with pytest.raises(UnsupportedModelError, match="differ from a whole pass"):
        prove(target, 2)
