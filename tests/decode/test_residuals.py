"""Residuals computed beforehand: rules that read them emit the target's distribution, and do what they do on a CPU."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from forerun.certify.enumeration import (
    SHAPES,
    TOLERANCE,
    Distributions,
    Drawing,
    EnumeratingRng,
    PrefixProbs,
    World,
    joint_distribution,
    outcomes,
    shape_depth,
    toy_distributions,
    toy_drafter,
)
from forerun.core.probs import HostResidual
from forerun.core.rng import Rng, first_of
from forerun.core.rules import RULES, Reads, rule_named
from forerun.core.sampling import Sampler, process_rows
from forerun.core.tree import TokenTree
from forerun.decode import residuals as device
from forerun.decode.residuals import DeviceRow, Residuals, ResidualsInput
from forerun.errors import ArgumentError, NoTokenLeftError, NumericError
from forerun.types import Drawn, SamplingParams
from selection import one_in

WORLDS = [world for world in World if world is not World.GREEDY_TARGET]
LOSSLESS = [name for name in RULES if rule_named(name).lossless and name != "argmax_walk"]

EACH = one_in(5, itertools.product(LOSSLESS, WORLDS))


def residuals_of(
    trees: Sequence[TokenTree], target: Distributions, rngs: Sequence[Rng], names: Sequence[str]
) -> Residuals:
    """Over a batch of trees, padded to the largest; logits are the logarithms of what the target says."""
    size, vocabulary = max(tree.size for tree in trees) + 1, len(target[()])
    logits = torch.zeros(len(trees), size, vocabulary, dtype=torch.float64)
    for row, tree in enumerate(trees):
        for node in range(tree.size + 1):
            logits[row, node] = target[tuple(tree.tokens[step] for step in tree.path(node))].log()
    sampler = Sampler(SamplingParams(temperature=1.0), [1])
    inputs = [
        ResidualsInput(tree=tree, sampler=sampler, rng=rng, reads=rule_named(name).reads, edits=None)
        for tree, rng, name in zip(trees, rngs, names, strict=True)
    ]
    return Residuals(logits, inputs)


def verdicts(name: str, tree: TokenTree, target: DeviceRow | PrefixProbs) -> dict[tuple[object, ...], float]:
    """What the rule may decide, and how probably."""
    found: dict[tuple[object, ...], float] = {}
    for verdict, chance in outcomes(lambda rng: rule_named(name).verify(tree, target, rng)):
        key = (verdict.path, verdict.next_token, verdict.kind)
        found[key] = found.get(key, 0.0) + chance
    return found


@pytest.mark.parametrize(("name", "world"), EACH)
def test_the_emitted_distribution_is_the_targets(name: str, world: World) -> None:
    """Every tree that may be drawn of a case is a row of one batch, the enumeration's rng keeps the vectors."""
    for shape, drawing in itertools.product(SHAPES.values(), Drawing):
        horizon = shape_depth(shape) + 1
        target, draft = toy_distributions(world, vocabulary=3, depth=shape_depth(shape), seed=0)
        drafted = list(outcomes(toy_drafter(draft, shape, drawing)))
        trees = [tree for tree, _ in drafted]
        residuals = residuals_of(trees, target, [EnumeratingRng() for _ in trees], [name] * len(trees))
        joint = torch.zeros([3] * horizon, dtype=torch.float64)
        for row, (tree, chance) in enumerate(drafted):
            for (path, token, _), probability in verdicts(name, tree, residuals.row(row)).items():
                emitted = (*(tree.tokens[node] for node in path), token)
                joint[emitted] += chance * probability * joint_distribution(target, emitted, horizon - len(emitted))
        assert float((joint - joint_distribution(target, (), horizon)).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("shape", ["chain of 3", "three siblings", "tree 2 x 2"])
def test_rows_of_different_rules_do_not_touch_each_other(shape: str) -> None:
    """One batch with all rules in it, weighted and not, gives each row what the host gives it."""
    for drawing, world in itertools.product(Drawing, (World.RANDOM, World.TARGET_ZEROS, World.DRAFT_ZEROS)):
        target, draft = toy_distributions(world, vocabulary=3, depth=shape_depth(SHAPES[shape]), seed=1)
        drafted = [tree for tree, _ in outcomes(toy_drafter(draft, SHAPES[shape], drawing))][:12]
        cases = [(name, tree) for tree in drafted for name in LOSSLESS]
        rngs: list[Rng] = [EnumeratingRng() for _ in cases]
        residuals = residuals_of([tree for _, tree in cases], target, rngs, [name for name, _ in cases])
        for row, (name, tree) in enumerate(cases):
            expected = verdicts(name, tree, PrefixProbs(target, tree))
            assert verdicts(name, tree, residuals.row(row)) == pytest.approx(expected, abs=1e-12)


def a_tree(vocabulary: int, seed: int, kinds: Sequence[Drawn]) -> TokenTree:
    """A tree two levels deep whose children came about in these ways, sampled ones from the recorded distribution."""
    generator, tree = torch.Generator().manual_seed(seed), TokenTree(0)
    for parent in range(3):
        distribution = (2 * torch.randn(vocabulary, generator=generator)).softmax(-1)
        if any(kind is not Drawn.DETERMINISTIC for kind in kinds):
            tree.set_probs(parent, distribution)
        rest = distribution.clone()
        for kind in kinds:
            token = int(rest.multinomial(1, generator=generator))
            tree.add(token, parent, drawn=kind)
            if kind is Drawn.WITHOUT_REPLACEMENT:
                rest[token] = 0
    return tree


PARAMS = {
    "neutral": SamplingParams(temperature=0.8, seed=1),
    "filters": SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, seed=1),
    "greedy": SamplingParams(temperature=0.0),
    "processors": SamplingParams(
        **{"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
        **{"logit_bias": {3: 2.0, 5: -1.0}, "min_tokens": 8},
        logits_processors=[lambda tokens, logits: logits - 0.5 * (torch.arange(len(logits)) == tokens[-1])],
        seed=1,
    ),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=list(range(0, 300, 2)), seed=1),
}


def every_sampler() -> list[Sampler]:
    words = [[7, 8], [5]]
    return [Sampler(params, [1, 2, 3], banned_until_min=[11], bad_words=words) for params in PARAMS.values()]


D, IID, WITHOUT = Drawn.DETERMINISTIC, Drawn.IID, Drawn.WITHOUT_REPLACEMENT


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "kinds", [(D,), (IID,), (IID, IID), (WITHOUT, WITHOUT, WITHOUT), (D, D, WITHOUT), (WITHOUT, D)]
)
def test_the_verdicts_are_those_of_the_host(name: str, kinds: tuple[Drawn, ...]) -> None:
    """Real random numbers, float32, one batch of rows with different parameters."""
    vocabulary, output = 300, [7, 3, 3, 9]
    for seed in range(4):
        trees = [a_tree(vocabulary, seed + row, kinds) for row in range(len(PARAMS))]
        logits = 3 * torch.randn(
            len(trees), trees[0].size + 1, vocabulary, generator=torch.Generator().manual_seed(seed)
        )
        samplers = every_sampler()
        rngs = [Rng(seed, 20 + row) for row in range(len(trees))]
        paths = [[[tree.tokens[step] for step in tree.path(n)] for n in range(tree.size + 1)] for tree in trees]
        edits = [sampler.edits(vocabulary, output, path) for sampler, path in zip(samplers, paths, strict=True)]
        inputs = [
            ResidualsInput(tree=tree, sampler=sampler, rng=rng, reads=rule_named(name).reads, edits=edit)
            for tree, sampler, rng, edit in zip(trees, samplers, rngs, edits, strict=True)
        ]
        residuals = Residuals(logits, inputs)
        for row, tree in enumerate(trees):
            host = Host(tree, logits[row], samplers[row], [[*output, *path] for path in paths[row]])
            expected = rule_named(name).verify(tree, host, rngs[row])
            assert rule_named(name).verify(tree, residuals.row(row), rngs[row]) == expected


class Host:
    """`NodeProbs` of one row, as `forerun.decode.scores.HostRow`."""

    def __init__(self, tree: TokenTree, logits: torch.Tensor, sampler: Sampler, outputs: Sequence[list[int]]) -> None:
        self.tree, self.logits, self.sampler, self.outputs = tree, logits, sampler, outputs

    def probs(self, node: int) -> HostResidual:
        return HostResidual(self.tree, node, self.sampler.probs(self.logits[node], self.outputs[node]))

    def argmax(self, node: int) -> int:
        return int(self.sampler.process(self.logits[node], self.outputs[node]).argmax())


def test_processors_of_all_rows_at_once_are_those_of_each_node() -> None:
    vocabulary, output = 300, [7, 3, 3, 9]
    samplers = every_sampler()
    paths = [[], [4], [4, 7], [3]]
    logits = 3 * torch.randn(len(samplers), len(paths), vocabulary, generator=torch.Generator().manual_seed(2))
    found, failed = process_rows(logits, [sampler.edits(vocabulary, output, paths) for sampler in samplers])
    assert not failed
    for row, sampler in enumerate(samplers):
        for node, path in enumerate(paths):
            assert torch.equal(found[row, node], sampler.process(logits[row, node], [*output, *path]))


def test_a_draw_beforehand_is_the_draw_of_the_rule() -> None:
    for vocabulary in (3, 128, 1000):
        probs = (4 * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(vocabulary))).softmax(-1)
        rngs = [Rng(seed, seed + 3) for seed in range(20)]
        times = torch.stack([torch.from_numpy(rng.exponentials(2, vocabulary)) for rng in rngs])
        expected = [rng.draw(values, 2) for rng, values in zip(rngs, probs, strict=True)]
        assert first_of(probs, times).tolist() == expected


def one_row(logits: torch.Tensor, params: SamplingParams, reads: Reads) -> DeviceRow:
    sampler, tree = Sampler(params, [1]), TokenTree(0)
    edits = sampler.edits(logits.shape[-1], [], [[]])
    return Residuals(logits, [ResidualsInput(tree=tree, sampler=sampler, rng=Rng(0, 1), reads=reads, edits=edits)]).row(
        0
    )


@pytest.mark.parametrize("reads", [Reads(argmax=True), Reads()])
def test_a_node_without_numbers_is_an_error_where_it_is_asked_for(reads: Reads) -> None:
    broken = one_row(torch.full((1, 1, 4), torch.nan), SamplingParams(temperature=0.5), reads)
    nothing = one_row(torch.full((1, 1, 4), -torch.inf), SamplingParams(temperature=0.5), reads)

    def refuses(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError(f"behind {list(tokens)}")

    failing = one_row(torch.zeros(1, 1, 4), SamplingParams(temperature=0.5, logits_processors=[refuses]), reads)
    for row, error, match in (
        (broken, NumericError, "NaN"),
        (nothing, NoTokenLeftError, "banned"),
        (failing, ZeroDivisionError, r"behind \[1\]"),
    ):
        with pytest.raises(error, match=match):
            row.argmax(0) if reads.argmax else row.probs(0)


def test_a_rule_gets_what_it_said_that_it_reads_and_nothing_else() -> None:
    target, draft = toy_distributions(World.RANDOM, vocabulary=3, depth=1, seed=0)
    tree = next(tree for tree, _ in outcomes(toy_drafter(draft, SHAPES["two siblings"], Drawing.IID)))
    probs = residuals_of([tree, tree], target, [Rng(0, 1), Rng(0, 1)], ["traversal", "sample_walk"]).row(1).probs(0)
    with pytest.raises(ArgumentError, match="rejects more children than its `reads`"):
        _ = probs.child
    with pytest.raises(ArgumentError, match="entropy"):
        _ = probs.entropy


def test_a_wrong_residual_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a residual that is not subtracted, and the weight of block verification left out."""
    honest = device._StepResidual.reject

    def without_weight(self, tokens, given, removed, weighted):
        return honest(self, tokens, given, removed, torch.zeros_like(weighted))

    def not_subtracted(self, *arguments):
        numbers, below, rest = honest(self, *arguments)
        return (
            numbers,
            below,
            device._StepResidual(**{name: getattr(rest, name) for name in rest.__slots__} | {"left": self.left}),
        )

    for name, plant in (("block", without_weight), ("recursive_rejection", not_subtracted)):
        monkeypatch.setattr(device._StepResidual, "reject", plant)
        with pytest.raises(AssertionError):
            test_the_emitted_distribution_is_the_targets(name, World.RANDOM)
