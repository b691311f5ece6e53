"""What a rule promises besides its distribution: the next token's kind, T = 0, real vocabularies, float32, probes,
defaults."""

import pytest
import torch
from torch import Tensor

from contract.harness import kind_of
from forerun.certify.enumeration import SHAPES, Drawing, PrefixProbs, World, outcomes, toy_distributions, toy_drafter
from forerun.core.probs import HostResidual, NodeProbs
from forerun.core.rng import Rng
from forerun.core.rules import RULES, check_fits, default_rule, rule_named
from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError
from forerun.types import DraftKind, Drawn, Source, Verdict

VOCABULARY = 150_000


class FixedProbs:
    """Given distributions at the nodes of a tree, counting who asks."""

    def __init__(self, tree: TokenTree, distributions: dict[int, Tensor]) -> None:
        self.tree, self.distributions, self.asked = tree, distributions, []

    def probs(self, node: int) -> HostResidual:
        self.asked.append(node)
        return HostResidual(self.tree, node, self.distributions[node])

    def argmax(self, node: int) -> int:
        return int(self.distributions[node].argmax())


def verified(name: str, tree: TokenTree, target: dict[int, Tensor], rng: Rng | None = None) -> Verdict:
    return rule_named(name).verify(tree, FixedProbs(tree, target), rng or Rng(0, 0))


def peaked(seed: int, vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(vocabulary, generator=generator)).softmax(-1)


def sampled_tree(counts: list[int], drawn: Drawn, rng: Rng, vocabulary: int = VOCABULARY) -> TokenTree:
    """A tree that grows from the first child at every depth, drawn from `peaked` float32 distributions."""
    tree, node = TokenTree(0), 0
    for depth, count in enumerate(counts):
        distribution = peaked(100 + depth, vocabulary)
        tree.set_probs(node, distribution)
        rest, children = distribution, []
        for index in range(count):
            token = rng.drafted(rest, node, index)
            children.append(tree.add(token, node, drawn=drawn))
            if drawn is Drawn.WITHOUT_REPLACEMENT:
                rest = rest.clone()
                rest[token] = 0
        node = children[0]
    return tree


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_an_empty_tree_is_plain_decoding_and_probes_are_never_accepted(name: str, probed: bool) -> None:
    tree = TokenTree(5)
    if probed:
        tree.add(1, 0, probe=True)
    verdict = verified(name, tree, dict.fromkeys(range(tree.size + 1), torch.tensor([0.0, 1.0])))
    assert (verdict.path, verdict.next_token, verdict.kind) == ((), 1, Source.TARGET)


@pytest.mark.parametrize("name", RULES)
def test_kind_of_the_next_token(name: str) -> None:
    """BONUS exactly where the path ends at a leaf; the path is a path of the tree from the root."""
    for world in (World.RANDOM, World.GREEDY_TARGET):
        target, draft = toy_distributions(world, vocabulary=3, depth=3, seed=2)
        for shape in (SHAPES["chain of 3"], SHAPES["deep left, leaf right"]):
            for tree, _ in outcomes(toy_drafter(draft, shape, Drawing.IID)):
                for _, verdict in _every_verdict(name, tree, PrefixProbs(target, tree)):
                    last = verdict.path[-1] if verdict.path else 0
                    assert verdict.path == tree.path(last)
                    assert verdict.kind is (Source.RECOVERED if tree.children[last] else Source.BONUS)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("drawing", list(Drawing))
def test_all_rules_emit_the_argmax_text_at_temperature_0(name: str, drawing: Drawing) -> None:
    target, draft = toy_distributions(World.GREEDY_TARGET, vocabulary=3, depth=3, seed=4)
    for tree, _ in outcomes(toy_drafter(draft, SHAPES["deep left, leaf right"], drawing)):
        distributions = PrefixProbs(target, tree)
        greedy = rule_named("argmax_walk").verify(tree, distributions, Rng(0, 0))
        for _, verdict in _every_verdict(name, tree, distributions):
            texts = [[tree.tokens[node] for node in one.path] + [one.next_token] for one in (verdict, greedy)]
            assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["recursive_rejection", "traversal", "sample_walk", "typical"])
@pytest.mark.parametrize("drawn", [Drawn.IID, Drawn.WITHOUT_REPLACEMENT])
def test_trees_at_a_real_vocabulary(name: str, drawn: Drawn) -> None:
    """A rule reads distributions, and does not write."""
    tree = sampled_tree([4, 3, 2], drawn, Rng(3, 7))
    target = {node: peaked(node) for node in range(tree.size + 1)}
    before = [{node: probs.clone() for node, probs in own.items()} for own in (target, tree.draft_probs)]
    for seed in range(3):
        verdict = verified(name, tree, target, Rng(seed, 7))
        assert target[verdict.path[-1] if verdict.path else 0][verdict.next_token] > 0
    for own, same in zip((target, tree.draft_probs), before, strict=True):
        assert all(torch.equal(probs, same[node]) for node, probs in own.items())


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection", "greedy_k"])
def test_chains_at_a_real_vocabulary(name: str) -> None:
    """Where the draft is the target's own distribution it is kept whole."""
    tree = sampled_tree([1] * 7, Drawn.IID, Rng(3, 7))
    target = {node: peaked(100 + node) for node in range(8)}
    for seed in range(3):
        verdict = verified(name, tree, target, Rng(seed, 7))
        assert len(verdict.path) == 7 and verdict.kind is Source.BONUS


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection"])
def test_nearly_equal_float32_distributions_never_emit_an_impossible_token(name: str) -> None:
    """Residuals of rounding size: whatever is left must lie inside the target's support."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        target = torch.rand(50, generator=generator)
        target[torch.randperm(50, generator=generator)[:45]] = 0
        target = target / target.sum()
        draft = (target * (1 + 1e-6 * torch.randn(50, generator=generator))).clamp_(min=0)
        tree = TokenTree(0)
        for node in range(3):
            tree.add(int(target.argmax()), node, drawn=Drawn.WITHOUT_REPLACEMENT)
            tree.set_probs(node, draft / draft.sum())
        distributions = FixedProbs(tree, dict.fromkeys(range(4), target))
        for _, verdict in _every_verdict(name, tree, distributions):
            assert target[verdict.next_token] > 0


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection"])
def test_vanishing_ratios_are_survived(name: str) -> None:
    """Weights far below what float32 can divide by."""
    target, draft = torch.tensor([1.0, 1e-30, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    tree = TokenTree(0)
    for node in range(4):
        tree.add(1, node, drawn=Drawn.IID)
        tree.set_probs(node, draft)
    for chance, verdict in _every_verdict(name, tree, FixedProbs(tree, dict.fromkeys(range(5), target))):
        assert chance < 1e-12 or (verdict.path, verdict.next_token) == ((), 0)


def _every_verdict(name: str, tree: TokenTree, distributions: NodeProbs) -> list[tuple[float, Verdict]]:
    """With its chance; of a rule that does not verify such trees there is none."""
    rule = rule_named(name)
    found = outcomes(lambda rng: rule.verify(tree, distributions, rng)) if rule.verifies(kind_of(tree)) else ()
    return [(chance, verdict) for verdict, chance in found]


@pytest.mark.parametrize("name", ["token_rejection", "block", "traversal", "recursive_rejection", "greedy_k"])
def test_exhausted_and_contradicting_distributions_are_survived(name: str) -> None:
    """More siblings than the distribution has tokens, and a token to which its distribution gives nothing: never kept,
    never a crash."""
    tree = TokenTree(0)
    siblings = 1 if name in ("token_rejection", "block", "greedy_k") else 3
    for _ in range(siblings):
        tree.add(1, 0, drawn=Drawn.WITHOUT_REPLACEMENT)
    tree.set_probs(0, torch.tensor([1.0, 0.0, 0.0]))
    distributions = FixedProbs(tree, dict.fromkeys(range(siblings + 1), torch.tensor([0.5, 0.25, 0.25])))
    distribution = [0.0, 0.0, 0.0]
    for chance, verdict in _every_verdict(name, tree, distributions):
        assert verdict.path == ()
        distribution[verdict.next_token] += chance
    assert distribution == pytest.approx([0.5, 0.25, 0.25], abs=1e-12)


def test_the_walk_asks_only_for_the_distributions_it_needs() -> None:
    tree = TokenTree(0)
    tree.add_path([1, 0, 1])
    tree.add_path([0, 0, 0])
    distributions = FixedProbs(tree, dict.fromkeys(range(7), torch.tensor([0.0, 1.0])))
    verdict = rule_named("sample_walk").verify(tree, distributions, Rng(0, 0))
    assert (distributions.asked, verdict.path, verdict.kind) == ([0, 1], (1,), Source.RECOVERED)


@pytest.mark.parametrize("name", ["sample_walk", "argmax_walk"])
def test_walks_follow_all_nodes_that_hold_the_same_tokens(name: str) -> None:
    """The first of two duplicates is a leaf; the walk goes on below the second."""
    tree = TokenTree(0)
    tree.set_probs(0, torch.tensor([0.0, 1.0]))
    tree.add(1, 0, drawn=Drawn.IID)
    second = tree.add(1, 0, drawn=Drawn.IID)
    last = tree.add(1, second)
    verdict = verified(name, tree, dict.fromkeys(range(4), torch.tensor([0.0, 1.0])))
    assert (verdict.path, verdict.kind) == ((second, last), Source.BONUS)


def test_the_walk_reproduces_plain_decoding_for_a_seed() -> None:
    """Whatever is drafted, the text is the one that draws by absolute position give."""
    target, _ = toy_distributions(World.RANDOM, vocabulary=3, depth=6, seed=9)
    for seed in range(8):
        plain = _walk_text(target, seed, lambda _text: ())
        assert _walk_text(target, seed, lambda text: [(text[-1] + 1) % 3 if text else 0] * 2) == plain
        assert _walk_text(target, seed, lambda _text: (1, 1, 2)) == plain


def _walk_text(target, seed: int, drafter) -> list[int]:
    text: list[int] = []
    while len(text) < 6:
        tree = TokenTree(0)
        tree.add_path(list(drafter(text))[: 5 - len(text)])
        paths = {node: tuple(tree.tokens[step] for step in tree.path(node)) for node in range(tree.size + 1)}
        distributions = FixedProbs(tree, {node: target[(*text, *path)] for node, path in paths.items()})
        verdict = rule_named("sample_walk").verify(tree, distributions, Rng(seed, 10 + len(text)))
        text += [*(tree.tokens[node] for node in verdict.path), verdict.next_token]
    return text


def tree_with(*siblings: Drawn, below: Drawn | None = None, recorded: bool = True) -> TokenTree:
    tree = TokenTree(0)
    for token, kind in enumerate(siblings):
        tree.add(token, 0, drawn=kind)
    if recorded and set(siblings) - {Drawn.DETERMINISTIC}:
        tree.set_probs(0, torch.full((4,), 0.25))
    if below is not None:
        tree.add(0, 1, drawn=below)
        tree.set_probs(1, torch.full((4,), 0.25))
    return tree


DETERMINISTIC, IID, WITHOUT = Drawn.DETERMINISTIC, Drawn.IID, Drawn.WITHOUT_REPLACEMENT


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (DraftKind(), "sample_walk"),
        (DraftKind(chain=True), "sample_walk"),
        (DraftKind(sampled=True, chain=True), "block"),
        (DraftKind(sampled=True, chain=True, multipath=True), "block"),
        (DraftKind(sampled=True), "traversal"),
        (DraftKind(sampled=True, multipath=True), "greedy_k"),
    ],
)
def test_default_rule(kind: DraftKind, rule: str) -> None:
    assert default_rule(kind, greedy=False) == rule
    assert rule_named(rule).verifies(kind)
    assert rule_named(rule).lossless
    assert default_rule(kind, greedy=True) == "argmax_walk"


@pytest.mark.parametrize(
    ("tree", "kind"),
    [
        (tree_with(), DraftKind(chain=True, multipath=True)),
        (tree_with(DETERMINISTIC, DETERMINISTIC), DraftKind(multipath=True)),
        (tree_with(IID, below=IID), DraftKind(sampled=True, chain=True, multipath=True)),
        (tree_with(DETERMINISTIC, DETERMINISTIC, WITHOUT, below=WITHOUT), DraftKind(sampled=True, multipath=True)),
        (tree_with(DETERMINISTIC, WITHOUT, WITHOUT), DraftKind(sampled=True)),
    ],
)
def test_kind_of(tree: TokenTree, kind: DraftKind) -> None:
    assert kind_of(tree) == kind


def test_a_rule_that_does_not_fit_is_refused_by_name() -> None:
    check_fits("block", DraftKind(sampled=True, chain=True), "draft_model")
    check_fits("greedy_k", DraftKind(sampled=True, multipath=True), "draft_model")
    with pytest.raises(ArgumentError, match=r"'block' verifies chains, drafter 'merge' .* takes 'traversal'"):
        check_fits("block", DraftKind(sampled=True), "merge")
    with pytest.raises(ArgumentError, match="at most one sampled child per node"):
        check_fits("greedy_k", DraftKind(sampled=True), "merge")


def test_every_rule_says_what_it_is() -> None:
    for name in RULES:
        rule = rule_named(name)
        assert rule.name == name and rule.lossless == (name != "typical")
        assert rule.lossless or "LOSSY" in str(type(rule).__doc__)
    with pytest.raises(ArgumentError, match="Did you mean 'traversal'"):
        rule_named("traversl")


@pytest.mark.parametrize(("probs", "path"), [(torch.full((100,), 0.01), (1,)), (torch.tensor([0.95, 0.05]), ())])
def test_typical_acceptance_thresholds(probs: Tensor, path: tuple[int, ...]) -> None:
    """A flat distribution lowers the bar, 0.01 > 0.3 * exp(-ln 100); a peaked one is held to it, 0.05 < 0.09."""
    tree = TokenTree(0)
    tree.add(1, 0)
    assert verified("typical", tree, {0: probs, 1: probs}).path == path
