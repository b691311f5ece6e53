"""A pass that the first layers have begun is completed: the logits of a whole pass, and no layer twice for a token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from forerun.core.tree import Resume, TokenTree
from forerun.errors import ArgumentError, UnsupportedModelError
from forerun.model import Buckets, LayerRange, TransformersTarget
from forerun.model.inputs import Nodes
from forerun.model.layers import base_of, layers_of
from forerun.model.memory import cache_bytes_per_token
from forerun.model.partial import prove, renumber
from forerun.types import LAST_HIDDEN, Boundary
from model.families import FAMILIES, SHARING, make, random_tokens
from model.test_families import trees
from model.tiny import build

ROWS, TREES = [0, 1, 2], trees(0)
TOLERANCE = 2e-5


def prefilled(name: str = "llama") -> TransformersTarget:
    target = TransformersTarget.load(make(name), rows=3, slots=64, self_check=False)
    target.prefill(ROWS, [random_tokens(count, count) for count in (3, 9, 17)])
    return target


def begun(
    target: TransformersTarget, boundary: int, nodes: int, counts: Sequence[int] = (99, 99, 99)
) -> list[TokenTree]:
    """`TREES`, whose first `nodes` nodes, or `counts` by row, have been run level by level, as a drafter does."""
    parts = []
    for last in range(nodes):
        so_far = [tree.only(range(1, min(last, tree.size) + 1)) for tree in TREES]
        parts.append(target.run(ROWS, Nodes.of_trees(so_far, start=last), LayerRange(stop=boundary)))
    states = torch.cat(parts, dim=1)
    return [
        resuming(tree, boundary, own[: min(count, nodes, tree.size + 1)], target.writes[row])
        for row, (tree, own, count) in enumerate(zip(TREES, states, counts, strict=True))
    ]


def resuming(tree: TokenTree, boundary: int, states: torch.Tensor, stamp: int) -> TokenTree:
    """A copy that resumes these states (R, H), or nothing where R is 0."""
    copy = tree.copy()
    copy.resume = Resume(boundary=boundary, states=states, stamp=stamp) if len(states) else None
    return copy


def worst(first: torch.Tensor, second: torch.Tensor) -> float:
    """Largest difference at nodes that are no padding."""
    real = torch.arange(first.shape[1]) <= torch.tensor([tree.size for tree in TREES]).unsqueeze(1)
    return float((first - second).abs()[real].max())


class Evaluations:
    """Counts how often each layer wrote the keys of each slot: once for every token that it evaluates."""

    def __init__(self, target: TransformersTarget, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[tuple[int, int]] = Counter()
        self.target = target
        original = target.cache.update

        def update(keys, values, layer, *args, **kwargs):
            slots = target.cache._window.flat
            real = slots[slots % (target.cache.slots + 1) != target.cache.dump]
            self.seen.update((layer, slot) for slot in real.tolist())
            return original(keys, values, layer, *args, **kwargs)

        monkeypatch.setattr(target.cache, "update", update)

    def of_a_tree(self) -> Counter[tuple[int, int]]:
        """Every layer once for every node of `TREES`."""
        stride = self.target.cache.slots + 1
        return Counter(
            (layer, row * stride + self.target.lengths[row] + node)
            for layer in range(self.target.num_layers)
            for row, tree in zip(ROWS, TREES, strict=True)
            for node in range(tree.size + 1)
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_resumed_pass_is_the_whole_and_runs_no_layer_twice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, TREES)
    evaluations = Evaluations(target, monkeypatch)
    for boundary, nodes in ((1, 1), (2, 4), (3, 8)):
        target.truncate(ROWS, target.lengths)
        evaluations.seen.clear()
        resumed = target.score(ROWS, begun(target, boundary, nodes))
        assert worst(resumed.logits, whole.logits) <= TOLERANCE
        assert evaluations.seen == evaluations.of_a_tree()
    target.commit(ROWS, [(1, 3), (), (3,)])
    assert target.lengths == [6, 10, 19]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_rows_may_have_begun_unequally_many_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, TREES)
    unequal = begun(target, 2, 5, counts=[0, 2, 5])
    evaluations = Evaluations(target, monkeypatch)
    resumed = target.score(ROWS, unequal)
    assert worst(resumed.logits, whole.logits) <= TOLERANCE
    first = Counter(slot for layer, slot in evaluations.seen.elements() if layer == 0)
    assert first.total() == 8 + 5 + 7 - 7, "of all nodes only those that had not begun"


def test_without_the_keys_of_the_first_layers_the_logits_would_differ() -> None:
    """The negative control: the states alone do not make the pass."""
    target = prefilled()
    whole = target.score(ROWS, TREES)
    resume = begun(target, 2, 4)
    with torch.inference_mode():
        for layer in (0, 1):
            keys, _ = target.cache._stores[layer]
            for row in ROWS:
                keys[row, target.lengths[row] : target.lengths[row] + 4] += 1.0
    assert worst(target.score(ROWS, resume).logits, whole.logits) > 1e-2


@pytest.mark.parametrize("size", [4, 16])
def test_padding_to_buckets(size: int) -> None:
    target = prefilled()
    whole = target.score(ROWS, TREES)
    target.buckets = Buckets(nodes=(size,))
    resumed = target.score(ROWS, begun(target, 2, 3))
    assert worst(resumed.logits, whole.logits) <= TOLERANCE


@pytest.mark.parametrize("boundary", [1, 2, 4])
def test_states_of_others_are_delivered(boundary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: set[Boundary] = {2, 3, 4, LAST_HIDDEN}
    target = prefilled("qwen3")
    whole = target.score(ROWS, TREES, boundaries=wanted)
    resume = begun(target, boundary, 8)
    evaluations = Evaluations(target, monkeypatch)
    resumed = target.score(ROWS, resume, boundaries=wanted)
    assert resumed.hidden_states.keys() == wanted
    for one in wanted:
        assert worst(resumed.hidden_states[one], whole.hidden_states[one]) <= TOLERANCE
    ran_again = any(layer == 0 for layer, _ in evaluations.seen)
    assert ran_again == (boundary > 2), "a state below the boundary is only seen in a whole pass"


def test_what_was_written_over_is_run_anew() -> None:
    target = prefilled()
    whole = target.score(ROWS, TREES)
    resume = begun(target, 2, 4)
    target.run(
        [1], [TokenTree.of(9, [token + 1 for token in TREES[1].tokens[1:]], TREES[1].parents[1:])], LayerRange(stop=3)
    )
    resumed = target.score(ROWS, resume)
    assert worst(resumed.logits, whole.logits) <= TOLERANCE


def test_nodes_may_be_left_out_and_the_others_move_up() -> None:
    """Root, nodes 1 2 (below the root) and 3 (below 2); 1 is left out."""
    target = prefilled()
    grown, kept = TokenTree.of(5, [7, 8, 9], [0, 0, 2]), TokenTree.of(5, [8, 9, 10], [0, 1, 2])
    whole = target.score([1], [kept]).logits
    states = target.run([1], [grown], LayerRange(stop=2))
    renumber(target, [1], [[2, 3]])
    resumed = resuming(kept, 2, states[0, [0, 2, 3]], target.writes[1])
    assert (target.score([1], [resumed]).logits - whole).abs().max() <= TOLERANCE


def test_some_rows_may_have_begun_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled()
    whole = target.score(ROWS, TREES).logits
    some = begun(target, 2, 4)
    some[1].resume = None
    evaluations = Evaluations(target, monkeypatch)
    assert worst(target.score(ROWS, some).logits, whole) <= TOLERANCE
    assert sum(layer == 0 for layer, _ in evaluations.seen) == 8 + 5 + 7 - 8


def test_those_at_another_boundary_than_the_first_run_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    target = prefilled()
    whole = target.score(ROWS, TREES).logits
    for boundaries, anew in (((2, 2, 2), 0), ((1, 2, 1), 5)):
        drafted = [begun(target, boundary, 4)[row] for row, boundary in enumerate(boundaries)]
        for row, tree in enumerate(drafted):
            assert tree.resume is not None
            tree.resume = replace(tree.resume, stamp=target.writes[row])
        with monkeypatch.context() as patch:
            evaluations = Evaluations(target, patch)
            assert worst(target.score(ROWS, drafted).logits, whole) <= TOLERANCE
        # The keys of the first layers are those of the last of them that ran; the states fit these all the same.
        slots = {slot for layer, slot in evaluations.seen if layer == 0}
        assert len(slots) == 20 - 12 + min(anew, 4)


def test_a_resume_that_does_not_fit_is_refused() -> None:
    target = prefilled()
    for wrong in ({"states": torch.zeros(4, 63)}, {"boundary": 5}):
        drafted = begun(target, 2, 4)
        for tree in drafted:
            assert tree.resume is not None
            tree.resume = replace(tree.resume, **wrong)
        with pytest.raises(ArgumentError, match="resume"):
            target.score(ROWS, drafted)
    with pytest.raises(ArgumentError, match="root first"):
        target.score(ROWS, Nodes.of_trees(begun(target, 2, 4), start=1))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_proof_at_load_passes_every_family(name: str) -> None:
    target = prefilled(name)
    before = list(target.lengths)
    prove(target, 2)
    assert target.lengths == before


def test_a_layer_that_remembers_is_refused() -> None:
    """A model whose layers hand something on beside the residual stream: the parts do not make the whole."""
    model = make("llama")
    handed: list[torch.Tensor] = []
    model.model.layers[1].register_forward_hook(lambda _module, _args, output: handed.append(output[:, :1]))
    model.model.layers[2].register_forward_hook(lambda _module, _args, output: output + handed[-1])
    target = TransformersTarget(model, rows=1, slots=64)
    with pytest.raises(UnsupportedModelError, match="differ from a whole pass"):
        prove(target, 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranges_are_the_whole_bit_for_bit(name: str) -> None:
    target = prefilled(name)
    whole = target.score(ROWS, TREES, boundaries=frozenset({1, 2, 3, 4, LAST_HIDDEN}))
    for exit_ in (1, 2, 3):
        target.truncate(ROWS, target.lengths)
        early = target.run(ROWS, TREES, LayerRange(stop=exit_))
        assert torch.equal(early, whole.hidden_states[exit_])
        last = target.run(ROWS, TREES, LayerRange(start=exit_, stop=4), states=early)
        assert torch.equal(last, whole.hidden_states[4])
        normed = target.final_norm(last)
        assert torch.allclose(normed, whole.hidden_states[LAST_HIDDEN], atol=1e-6)
        assert torch.allclose(target.lm_head(normed), whole.logits, atol=1e-5)
    target.commit(ROWS, [(1, 3), (), (3,)])
    assert target.lengths == [6, 10, 19]


@pytest.mark.parametrize(("kind", "changes"), [("opt", {}), ("electra", {"is_decoder": True}), ("gemma3", {})])
def test_layers_further_down_in_the_base_model(kind: str, changes: dict[str, bool]) -> None:
    target = TransformersTarget.load(build(kind, **changes), rows=3, slots=64)
    assert "." in layers_of(base_of(target.model), 4)[0]
    target.prefill(ROWS, [random_tokens(count, count) for count in (3, 9, 17)])
    prove(target, 2)
    whole = target.score(ROWS, TREES, boundaries=frozenset({2, 4, LAST_HIDDEN}))
    early = target.run(ROWS, TREES, LayerRange(stop=2))
    assert torch.equal(early, whole.hidden_states[2])
    assert torch.equal(target.run(ROWS, TREES, LayerRange(start=2, stop=4), states=early), whole.hidden_states[4])
    assert torch.equal(target.final_norm(whole.hidden_states[4]), whole.hidden_states[LAST_HIDDEN])


@pytest.mark.parametrize("name", FAMILIES)
def test_skipping_both_halves_of_a_layer_leaves_the_stream_as_it_was(name: str) -> None:
    target = prefilled(name)
    skipped = target.run(ROWS, TREES, LayerRange(stop=4, skip=frozenset({(2, "attn"), (2, "mlp")})))
    before = target.run(ROWS, TREES, LayerRange(stop=2))
    after = target.run(ROWS, TREES, LayerRange(start=3, stop=4), states=before)
    assert torch.equal(skipped, after)
    half = target.run(ROWS, TREES, LayerRange(stop=4, skip=frozenset({(2, "mlp")})))
    assert not torch.equal(half, skipped)
    whole = target.score(ROWS, TREES, boundaries=frozenset({4}))
    assert not torch.equal(whole.hidden_states[4], half), "the layers must be put back"


def test_layers_with_embeddings_of_their_own_are_not_run_in_part() -> None:
    model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHARING)).eval()
    target = TransformersTarget.load(model, rows=3, slots=64)
    target.prefill([0], [[4, 5]])
    assert target.cache.nbytes() == cache_bytes_per_token(target.config, 4) * 3 * 65
    for refused in (lambda: target.run(ROWS, TREES, LayerRange(stop=2)), lambda: prove(target, 2)):
        with pytest.raises(UnsupportedModelError, match="cannot be run in part"):
            refused()


@pytest.mark.parametrize(
    "plan",
    [
        LayerRange(start=2, stop=2),
        LayerRange(stop=5),
        LayerRange(start=-1, stop=2),
        LayerRange(stop=2, skip=frozenset({(2, "attn")})),
        LayerRange(stop=2, skip=frozenset({(1, "norm")})),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: LayerRange) -> None:
    with pytest.raises(ArgumentError):
        prefilled("llama").run(ROWS, TREES, plan)


def test_states_belong_to_a_later_start() -> None:
    target = prefilled("llama")
    with pytest.raises(ArgumentError, match="states are needed"):
        target.run(ROWS, TREES, LayerRange(start=1, stop=2))
    with pytest.raises(ArgumentError, match=r"expected \(3, 8, 64\)"):
        target.run(ROWS, TREES, LayerRange(start=1, stop=2), states=torch.zeros(3, 1, 64))
