"""Drafters made of drafters: who is asked, how trees are joined, and that a cascade drafts what its model would."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.harness import PROMPTS, SAMPLED, Variant, as_prompts, llm, model, relative
from drafters.asking import contexts, setup_for
from forerun import LLM, SamplingParams
from forerun.control.config import SpeculativeConfig
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup
from forerun.drafters import DRAFTERS, DrafterEntry, build
from forerun.drafters.combined.cascade import DraftTarget
from forerun.errors import ArgumentError
from forerun.model import TransformersTarget
from forerun.types import LAST_HIDDEN, Budget, Drawn

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
SEEDED = replace(SAMPLED, max_tokens=20)


@dataclass(frozen=True, kw_only=True, slots=True)
class StubConfig:
    """What a `Stub` drafts: for a row's last token, paths."""

    paths: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    confidence: float = 0.5
    sampled: bool = False
    probes: int = 0
    fails: bool = False


class Stub(Drafter):
    """A member that does as it is told, and remembers for which rows it was asked."""

    name = "stub"
    Config = StubConfig

    def __init__(self, config: StubConfig, setup: DrafterSetup) -> None:
        self.config, self.asked = config, list[list[int]]()
        self.greedy: list[bool] = []

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        self.asked.append(list(context.rows))
        self.greedy = [sampler.greedy for sampler in context.samplers]
        if self.config.fails:
            raise RuntimeError("as planned")
        limits = zip(context.tokens, budget.nodes, budget.depth, strict=True)
        return [self._tree(tokens[-1], min(limit)) for tokens, *limit in limits]

    def _tree(self, root: int, limit: int) -> TokenTree:
        tree = TokenTree(root)
        for path in self.config.paths.get(root, ()):
            parent = 0
            for token in path[:limit]:
                if self.config.sampled:
                    tree.set_probs(parent, torch.full((12,), 1 / 12))
                kind = Drawn.IID if self.config.sampled else Drawn.DETERMINISTIC
                parent = tree.add(token, parent, drawn=kind, confidence=self.config.confidence)
        for token in range(self.config.probes):
            tree.add(token, 0, probe=True)
        return tree


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`stub` and `reader` are registered drafters."""
    for name, cls in {"stub": "Stub", "reader": "Reader"}.items():
        monkeypatch.setitem(DRAFTERS, name, DrafterEntry(path=f"{__name__}:{cls}", summary="of a test"))


def stub(**options: Any) -> dict[str, Any]:
    return {"method": "stub", **options}


def composed(method: str, *members: dict[str, Any], **options: Any) -> Any:
    """A composition over a target of twelve tokens that is never run."""
    setup = DrafterSetup(target=SimpleNamespace(vocab_size=12), tokenizer=None, rows=4, slots=64)
    return build(method, {"drafters": list(members), **options}, setup)


def roomy(rows: int, nodes: int = 32) -> Budget:
    return Budget(nodes=[nodes] * rows, depth=[32] * rows)


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    """The tokens that lead to each node that may be accepted."""
    nodes = (node for node in range(1, tree.size + 1) if node not in tree.probes)
    return {tuple(tree.tokens[step] for step in tree.path(node)) for node in nodes}


# --- first_of -------------------------------------------------------------------------------------------------------


def test_a_row_is_drafted_for_by_the_first_that_promises_enough() -> None:
    made = composed(
        "first_of",
        stub(paths={1: [[4, 4]], 2: [[4]]}, confidence=0.9),
        stub(paths={root: [[7, 7, 7]] for root in range(5)}, confidence=0.1),
        min_tokens=1.0,
    )
    trees = made.propose(contexts([[1], [2], [3], [1]]), roomy(4))
    first, second = {(4,), (4, 4)}, {(7,), (7, 7), (7, 7, 7)}
    assert [paths(tree) for tree in trees] == [first, second, second, first]
    assert [member.drafter.asked for member in made.members] == [[[0, 1, 2, 3]], [[1, 2]]]


def test_nobody_is_asked_where_nothing_may_be_drafted() -> None:
    made = composed("first_of", stub(), stub())
    trees = made.propose(contexts([[1], [1]]), Budget(nodes=[0, 3], depth=[3, 0]))
    assert [tree.size for tree in trees] == [0, 0]
    assert all(not member.drafter.asked for member in made.members)


def test_a_sampled_draft_is_taken_whatever_it_promises() -> None:
    low = stub(paths={1: [[4]]}, confidence=0.01, sampled=True)
    made = composed("first_of", low, stub(paths={1: [[7]]}), min_tokens=5.0)
    assert paths(*made.propose(contexts([[1]]), roomy(1))) == {(4,)}


def test_a_member_that_raises_loses_its_own_drafts_only() -> None:
    for method in ("first_of", "merge"):
        made = composed(method, stub(fails=True), stub(paths={1: [[7]]}))
        assert paths(*made.propose(contexts([[1]]), roomy(1))) == {(7,)}


def test_with_a_seed_members_draft_deterministically_unless_told_otherwise() -> None:
    seeded = replace(SAMPLED, seed=3)
    for params, greedy_with_seed, greedy in ((seeded, True, True), (seeded, False, False), (SAMPLED, True, False)):
        for method in ("first_of", "merge"):
            made = composed(method, stub(), stub(), greedy_with_seed=greedy_with_seed)
            made.propose(contexts([[1]], params=params), roomy(1))
            assert made.members[0].drafter.greedy == [greedy]


# --- merge ----------------------------------------------------------------------------------------------------------


def test_equal_paths_become_one_and_the_likeliest_nodes_are_kept() -> None:
    made = composed(
        "merge", stub(paths={1: [[4, 5, 6]]}, confidence=0.5), stub(paths={1: [[4, 5], [8]]}, confidence=0.7), nodes=3
    )
    (tree,) = made.propose(contexts([[1]]), roomy(1))
    assert paths(tree) == {(4,), (4, 5), (8,)}
    assert tree.confidence == pytest.approx([1, 0.7, 0.7, 0.7])


def test_given_nodes_stand_below_the_sampled_node_that_holds_their_token() -> None:
    made = composed(
        "merge", stub(paths={1: [[4, 5], [9]]}), stub(paths={1: [[4]]}, sampled=True), greedy_with_seed=False
    )
    (tree,) = made.propose(contexts([[1]], params=SAMPLED), roomy(1))
    assert tree.tokens == [1, 4, 5, 9]
    assert tree.parents == [-1, 0, 1, 0]
    assert tree.drawn[1] is Drawn.IID and 0 in tree.draft_probs


def test_sampled_nodes_come_from_one_member_and_are_never_pruned() -> None:
    sampled = stub(paths={1: [[4], [4], [5]]}, sampled=True, confidence=0.01)
    for nodes, rest in [(4, (9,)), (8, (9, 9))]:
        other = stub(paths={1: [[6]]}, sampled=True)
        made = composed("merge", stub(paths={1: [[9, 9]]}), sampled, other, nodes=nodes)
        (tree,) = made.propose(contexts([[1]], params=SAMPLED), roomy(1))
        assert tree.tokens == [1, 4, 4, 5, *rest]


def test_scouts_take_what_room_is_left() -> None:
    made = composed("merge", stub(paths={1: [[4, 5]]}, probes=3), stub(paths={1: [[6]]}))
    (tree,) = made.propose(contexts([[1]]), roomy(1, nodes=5))
    assert paths(tree) == {(4,), (4, 5), (6,)}
    assert tree.probes == {4, 5}


def test_expected_tokens_are_summed_over_paths() -> None:
    tree = TokenTree(0)
    tree.add_path([1, 2], confidence=0.5)
    tree.add(3, 0, confidence=0.25)
    tree.add(4, 0, probe=True)
    assert tree.survival() == pytest.approx([1, 0.5, 0.25, 0.25, 0])
    for least, taken in ((0.99, {(1,), (1, 2), (3,)}), (1.01, {(7,)})):  # one token in all
        made = composed("first_of", stub(), stub(paths={0: [[7]]}), min_tokens=least)
        made.members[0].drafter._tree = lambda root, limit: tree
        assert paths(*made.propose(contexts([[0]]), roomy(1))) == taken


# --- cascade --------------------------------------------------------------------------------------------------------


def cascade(inner: Mapping[str, Any] | None = None, **options: Any) -> Variant:
    chosen = {"method": "ngram"} if inner is None else inner
    return Variant("cascade", "test", {"model": relative(), "num_speculative_tokens": 4, "inner": chosen} | options)


@pytest.mark.parametrize(
    ("inner", "params"),
    [("ngram", GREEDY), ("lookahead", SEEDED), ("draft_model", SEEDED)],
    ids=["ngram-greedy", "lookahead-sampled", "draft_model-sampled"],
)
def test_a_cascade_drafts_the_very_chain_of_its_draft_model(inner: str, params: SamplingParams) -> None:
    spec = {"method": inner, **({"model": model()} if inner == "draft_model" else {})}
    alone = Variant("draft_model", "test", {"model": relative(), "num_speculative_tokens": 4})
    own = [replace(params, seed=seed) for seed in range(len(PROMPTS))]

    def drafts(variant: Variant) -> list[list[tuple[int, ...]]]:
        outputs = llm(variant, rows=3).generate(as_prompts(PROMPTS), own, trace=True)
        return [[tuple(n.token for n in step.nodes) for step in output.outputs[0].trace] for output in outputs]

    assert drafts(cascade(spec)) == drafts(alone)


def test_the_draft_model_runs_less_often_than_it_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = 0
    score = DraftTarget.score

    def counted(self: DraftTarget, *args: Any, **options: Any) -> Any:
        nonlocal passes
        passes += 1
        return score(self, *args, **options)

    monkeypatch.setattr(DraftTarget, "score", counted)
    engine = llm(cascade({"method": "draft_model", "model": relative()}))
    answer = engine.generate(as_prompts(PROMPTS[:1]), GREEDY)[0].outputs[0]
    assert 0 < passes < 0.35 * answer.speculation.num_draft_tokens, "the inner drafter is always right"


class Reader(Stub):
    """An inner drafter that reads hidden states and compares them with a plain forward of the draft model."""

    checked = 0

    @property
    def requires(self) -> frozenset[int]:
        return frozenset({LAST_HIDDEN})

    def extend(self, context: DraftContext) -> None:
        for index, (tokens, fresh) in enumerate(zip(context.tokens, context.fresh, strict=True)):
            count = min(fresh, len(tokens) - 1)
            states = context.hidden_states[LAST_HIDDEN][index, :count]
            wanted = relative().model(torch.tensor([list(tokens)])).last_hidden_state[0]
            assert torch.allclose(states, wanted[len(tokens) - 1 - count : len(tokens) - 1], atol=1e-4)
            Reader.checked += 1


def test_an_inner_drafter_sees_the_draft_models_hidden_states(caplog: pytest.LogCaptureFixture) -> None:
    everywhere = {root: [[root, root]] for root in range(12)}
    Reader.checked = 0
    engine = llm(cascade({"method": "reader", "paths": everywhere}), rows=2)
    engine.generate(as_prompts(PROMPTS), replace(SEEDED, seed=1))
    assert Reader.checked > 50
    assert not [record for record in caplog.records if "reader" in record.message]


def test_the_tail_goes_on_where_the_chain_ends() -> None:
    loop = {root: [[root, root, root]] for root in range(12)}
    options = cascade(stub(paths=loop), tail=3, num_speculative_tokens=2).options
    made = build("cascade", options, setup_for(model(), slots=64))
    for nodes, size in [(9, 5), (4, 4), (2, 2), (1, 1)]:
        (tree,) = made.propose(contexts([PROMPTS[0]]), Budget(nodes=[nodes], depth=[9]))
        assert tree.parents == list(range(-1, size))
    (tree,) = made.propose(contexts([PROMPTS[0]]), Budget(nodes=[9], depth=[3]))
    assert tree.parents == list(range(-1, 3))


def test_a_draft_model_with_other_padding_speaks_the_targets_ids() -> None:
    speaker = DraftTarget(relative(), rows=1, slots=16)
    plain = TransformersTarget(relative(), rows=1, slots=16)
    for wide in (10, 12, 15):
        speaker.vocab_size = 12
        speaker.speak(wide)
        for made in (speaker, plain):
            made.truncate([0], [0])
            made.prefill([0], [[1, 5]])
        found = speaker.score([0], [TokenTree(3)]).logits[0, 0]
        wanted = plain.score([0], [TokenTree(3)]).logits[0, 0]
        assert len(found) == wide
        assert torch.equal(found[:10], wanted[:10]) and bool((found[12:] == -torch.inf).all())
        assert speaker.readable([3, 11, 14]) == [3, 11, 0]


@pytest.fixture(scope="module")
def shipped() -> LLM:
    """The model that comes with forerun."""
    return LLM("demo", dtype="float32")


@pytest.mark.parametrize("method", ["merge", "first_of", "cascade"])
def test_members_have_defaults_and_may_be_names(shipped: LLM, method: str) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    fixed = {"method": method, "adaptive": False, **({"model": "demo-draft"} if method == "cascade" else {})}
    named = {"inner": "suffix"} if method == "cascade" else {"drafters": ["ngram", {"method": "suffix"}]}
    texts = [
        shipped.generate("import os\nimport", greedy, speculative=config)
        for config in (False, fixed, {**fixed, **named})
    ]
    plain, *others = [output[0].outputs[0] for output in texts]
    for answer in others:
        assert answer.token_ids == plain.token_ids and answer.speculation.drafter_errors == 0
        assert answer.speculation.num_draft_tokens > 0


def test_equal_members_share_one_drafter_and_unknown_options_of_theirs_are_refused() -> None:
    config = {"method": "merge", "drafters": [{"method": "ngram"}, {"method": "suffix"}]}
    one, other = (SpeculativeConfig.parse(copy.deepcopy(config)) for _ in range(2))
    assert one.key == other.key
    with pytest.raises(ArgumentError, match="no option 'wings'"):
        composed("merge", {"method": "ngram", "wings": 2}, {"method": "ngram"})
