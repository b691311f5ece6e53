"""Logits to distribution against a plain reference, processors exact per path, and rng: fair, keyed, independent."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from scipy import stats
from torch import Tensor

from forerun.core import sampling
from forerun.core.rng import Rng, Stream, quantiles
from forerun.core.sampling import Sampler, distribution_of
from forerun.decode.scores import logprobs_of
from forerun.errors import ArgumentError, NoTokenLeftError, NumericError
from forerun.types import SamplingParams

ALPHA = 1e-6
"""Family-wise error of the statistical tests; seeds are fixed, so they pass or fail for good."""


def reference_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The documented order, one token at a time: temperature, min-p, top-k, top-p."""
    tokens = range(len(logits))
    if params.temperature == 0:
        return [float(token == max(tokens, key=lambda token: (logits[token], -token))) for token in tokens]
    temperature = 1.0 if params.temperature is None else params.temperature
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    kept = set(tokens)
    if params.min_p:
        kept = {token for token in kept if weights[token] >= params.min_p * max(weights) * (1 - 1e-9)}
    if params.top_k is not None and 0 < params.top_k < len(logits):
        border = sorted((weights[token] if token in kept else 0.0 for token in tokens), reverse=True)[params.top_k - 1]
        kept = {token for token in kept if weights[token] >= border}
    probs = [weights[token] if token in kept else 0.0 for token in tokens]
    probs = [weight / sum(probs) for weight in probs]
    if params.top_p is not None and params.top_p < 1:
        mass = 0.0
        for token in sorted(tokens, key=lambda token: (-probs[token], token)):
            before, mass = mass, mass + probs[token]
            probs[token] = probs[token] if before < params.top_p else 0.0
    return [weight / sum(probs) for weight in probs]


@pytest.mark.parametrize("temperature", [None, 0.0, 0.01, 0.7, 1.0, 3.0])
def test_distribution_against_the_reference(temperature: float | None) -> None:
    logits = 2 * torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cases = product([None, -1, 0, 1, 3, 50], [None, 1.0, 0.9, 0.3, 1e-6], [None, 0.0, 0.1, 1.0])
    for top_k, top_p, min_p in cases:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for some in logits:
            expected = reference_distribution(some.tolist(), params)
            assert distribution_of(some, params).tolist() == pytest.approx(expected, abs=1e-12), params


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"top_k": 2}, [0, 1, 2]),
        ({"top_k": 1}, [0]),
        ({"min_p": math.exp(-1.0)}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),
        ({"temperature": 0.0}, [0]),
    ],
)
def test_ties_at_the_border(changes: dict, kept: list[int]) -> None:
    """Top-k and min-p keep all that are tied; top-p keeps the lower token ids; greedy takes the first."""
    assert int(distribution_of(torch.tensor([0.0, 3.0, 3.0, 1.0]), SamplingParams(temperature=0.0)).argmax()) == 1
    probs = distribution_of(torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64), SamplingParams(**changes))
    assert torch.nonzero(probs).flatten().tolist() == kept
    assert float(probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_distribution_keeps_the_logits_precision(dtype: torch.dtype) -> None:
    assert distribution_of(torch.randn(5, dtype=dtype), SamplingParams(top_p=0.5, top_k=3)).dtype == dtype


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_gives_no_distribution_is_refused(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    for value, said in ((math.nan, "NaN"), (math.inf, "inf")):
        with pytest.raises(NumericError, match=said):
            Sampler(params, [1]).probs(torch.tensor([0.0, value]), [])
    banning = Sampler(params, [1], bad_words=[[0], [1]])
    for make in (banning.probs, banning.process):
        with pytest.raises(NoTokenLeftError, match="every token is banned"):
            make(torch.zeros(2), [])
    to_nan = SamplingParams(temperature=temperature, logits_processors=[lambda _tokens, logits: logits * math.nan])
    with pytest.raises(NumericError, match="nan"):
        Sampler(to_nan, [1]).probs(torch.zeros(2), [])
    with pytest.raises(NumericError, match="node 3 would be accepted with probability NaN"):
        Rng(1, 1).flip(math.nan, 3)


WRONG_LAWS = {
    "NaN": [0.5, math.nan, 0.5, 0.0],
    "all NaN": [math.nan] * 4,
    "infinite": [math.inf, 0.0, 0.0, 0.0],
    "negative": [0.75, -0.25, 0.5, 0.0],
    "too much": [1.0, 0.5, 0.5, 0.0],
    "too little": [0.5, 0.2, 0.1, 0.0],
    "nothing": [0.0, 0.0, 0.0, 0.0],
    "on a banned token": [0.5, 0.2, 0.2, 0.1],
}
"""Over four tokens, of which the last one is banned."""


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", WRONG_LAWS)
def test_no_other_distribution_comes_out(wrong: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever step of its making is wrong."""
    sampler = Sampler(SamplingParams(temperature=temperature, allowed_token_ids=[0, 1, 2]), [1])
    assert float(sampler.probs(torch.zeros(4), []).sum()) == pytest.approx(1)
    monkeypatch.setattr(sampling, "distribution_of", lambda *_: torch.tensor(WRONG_LAWS[wrong]))
    with pytest.raises(NumericError, match="the probabilities are no distribution: they add up to"):
        sampler.probs(torch.zeros(4), [])


@pytest.mark.parametrize("wrong", [name for name in WRONG_LAWS if name not in ("too little", "on a banned token")])
@pytest.mark.parametrize("place", [0, 500])
def test_nothing_else_is_drawn_from(wrong: str, place: int) -> None:
    """A residual, which adds up to less than 1, is. Wherever in a large vocabulary it stands."""
    probs = torch.zeros(1000)
    probs[place : place + 4] = torch.tensor(WRONG_LAWS[wrong])
    for seed in range(20):
        with pytest.raises(NumericError, match=r"what is drawn from|a token of probability"):
            Rng(seed, 1).draw(probs)
    probs[place : place + 4] = torch.tensor([0.0, 1e-30, 0.0, 0.0])
    assert Rng(1, 1).draw(probs) == place + 1


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (None, "NoneType"),
        ([0.0] * 4, "list"),
        (torch.zeros(5), r"torch.float32 \(5,\)"),
        (torch.zeros(1, 4), r"torch.float32 \(1, 4\)"),
        (torch.zeros(4, dtype=torch.int64), r"torch.int64 \(4,\)"),
    ],
)
def test_a_processor_that_returns_no_logits(result: object, named: str) -> None:
    def processor(tokens: Sequence[int], logits: Tensor) -> object:
        return result

    with pytest.raises(ArgumentError, match=f"processor processor returned {named}; expected a tensor"):
        Sampler(SamplingParams(logits_processors=[processor]), [1]).probs(torch.zeros(4), [])


def reference_process(logits: Tensor, sampler: Sampler, output: list[int]) -> list[float]:
    """Allowed tokens, bad words, min tokens, bias, penalties: one token at a time, from the documentation."""
    params, text = sampler.params, [*sampler.prompt, *output]
    result = []
    for token, raw in enumerate(logits.tolist()):
        value = raw
        forbidden = params.allowed_token_ids and token not in params.allowed_token_ids
        for *before, last in sampler.bad_words:
            begun = len(text) >= len(before) and text[len(text) - len(before) :] == before
            forbidden = forbidden or (last == token and begun)
        if forbidden or (token in sampler.banned_until_min and len(output) < params.min_tokens):
            value = -math.inf
        value += (params.logit_bias or {}).get(token, 0.0)
        if token in text and params.repetition_penalty is not None:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        result.append(value)
    return result


@pytest.mark.parametrize("seed", range(40))
def test_processors_against_the_reference(seed: int) -> None:
    chance = random.Random(seed)
    vocabulary = 8
    params = SamplingParams(
        repetition_penalty=chance.choice([None, 1.0, 1.3, 0.8]),
        **{"presence_penalty": chance.choice([0.0, 0.7, -0.5]), "frequency_penalty": chance.choice([0.0, 0.4, -0.3])},
        logit_bias=chance.choice([None, {1: 2.5, 6: -1.0}]),
        **{"allowed_token_ids": chance.choice([None, [0, 1, 2, 6, 7]]), "min_tokens": chance.choice([0, 3])},
        max_tokens=10,
    )
    prompt = [chance.randrange(vocabulary) for _ in range(chance.randint(1, 4))]
    words = [[chance.randrange(vocabulary) for _ in range(chance.randint(1, 3))] for _ in range(4)]
    sampler = Sampler(params, prompt, banned_until_min=[7], bad_words=words)
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))
    for length in range(6):
        output = [chance.randrange(vocabulary) for _ in range(length)]
        processed = sampler.process(logits, output)
        assert processed.tolist() == pytest.approx(reference_process(logits, sampler, output), abs=1e-5)
        if sampler.neutral:
            assert torch.equal(processed, logits)


def test_two_paths_with_two_histories_have_two_distributions() -> None:
    """Penalties look at a node's own path, not at a sibling's."""
    sampler = Sampler(SamplingParams(frequency_penalty=1.0), [5])
    logits = torch.zeros(6)
    left, right = sampler.process(logits, [1, 1, 2]), sampler.process(logits, [3, 3, 3])
    assert left.tolist() == [0, -2, -1, 0, 0, 0] and right.tolist() == [0, 0, 0, -3, 0, 0]
    assert logits.tolist() == [0] * 6, "raw logits are left alone"


@pytest.mark.parametrize(
    ("prompt", "output", "banned"),
    [
        ([1], [], [3]),
        ([1], [2], [0, 3]),
        ([1, 2], [], [0, 3]),
        ([1], [1, 2], [0, 3]),
        ([9, 1], [2], [0, 3]),
        ([2], [1], [3]),
        ([], [1, 2], [0, 3]),
        ([], [], [3]),
    ],
)
def test_bad_words_across_the_end_of_the_prompt(prompt: list[int], output: list[int], banned: list[int]) -> None:
    sampler = Sampler(SamplingParams(), prompt, bad_words=[[1, 2, 0], [3]])
    assert torch.nonzero(sampler.process(torch.zeros(5), output).isinf()).flatten().tolist() == banned


def test_user_processors_see_prompt_and_path_in_order() -> None:
    seen = []

    def first(tokens: Sequence[int], logits: Tensor) -> Tensor:
        seen.append(list(tokens))
        return logits + 1

    params = SamplingParams(logits_processors=[first, lambda _tokens, logits: logits * 10])
    assert Sampler(params, [7, 8]).process(torch.zeros(2), [9]).tolist() == [10.0, 10.0]
    assert seen == [[7, 8, 9]]


@pytest.mark.parametrize(
    "changes", [{"allowed_token_ids": [1, 9]}, {"logit_bias": {9: 1.0}}, {"allowed_token_ids": [-1]}]
)
def test_token_ids_outside_the_vocabulary_are_refused(changes: dict) -> None:
    sampler = Sampler(SamplingParams(**changes), [0])
    with pytest.raises(ArgumentError, match="the vocabulary has ids 0 to 8"):
        sampler.process(torch.zeros(9), [])
    sampler = Sampler(SamplingParams(logit_bias={8: 1.0}), [0])
    assert sampler.process(torch.zeros(9), [])[8] == 1.0


@pytest.mark.parametrize(
    ("changes", "neutral"),
    [
        ({}, True),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.0}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"min_tokens": 1}, False),
        ({"logits_processors": [lambda _tokens, logits: logits]}, False),
    ],
)
def test_neutral_means_that_the_raw_argmax_will_do(changes: dict, neutral: bool) -> None:
    assert Sampler(SamplingParams(**changes), [0]).neutral is neutral
    assert not Sampler(SamplingParams(**changes), [0], bad_words=[[1]]).neutral


LAW = torch.tensor([0.5, 0.0, 0.2, 0.3])


def test_same_key_same_draw_and_no_other_state() -> None:
    one, other = Rng(7, 3), Rng(7, 3)
    flips = [one.flip(0.5, node) for node in range(64)]
    assert all(one.flip(1.0, node) and not one.flip(0.0, node) for node in range(64))
    assert [other.draw(LAW, depth) for depth in range(64)] == [one.draw(LAW, depth) for depth in range(64)]
    assert [other.flip(0.5, node) for node in reversed(range(64))] == flips[::-1], "order does not matter"


def token_at(probs: torch.Tensor, uniform: float) -> int:
    return int(quantiles(probs, torch.tensor([uniform], dtype=torch.float64)))


def test_target_draws_are_keyed_by_absolute_position() -> None:
    for position in range(20):
        assert Rng(5, position).draw(LAW, 3) == Rng(5, position + 3).draw(LAW)


def test_rounding_in_the_distribution_does_not_change_the_draw() -> None:
    """Drawn from the cumulated distribution, some would differ: a small change anywhere moves every border behind
    it."""
    logits = 2.5 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    noise = 1e-5 * torch.randn(4096, generator=torch.Generator().manual_seed(1))
    probs, rounded = logits.softmax(0), (logits + noise).softmax(0)
    assert [Rng(3, p).draw(probs) for p in range(3000)] == [Rng(3, p).draw(rounded) for p in range(3000)]
    uniforms = [Rng(3, p)._uniform(p, Stream.TARGET, 0) for p in range(3000)]
    assert [token_at(probs, u) for u in uniforms] != [token_at(rounded, u) for u in uniforms]


def test_draws_follow_the_distribution_across_blocks() -> None:
    probs = torch.tensor([0.0, 3.0, 1.0]).repeat(100) * torch.linspace(0, 1, 300)
    probs /= probs.sum()
    counts = torch.bincount(torch.tensor([Rng(1, p).draw(probs) for p in range(20_000)]), minlength=300)
    expected = 20_000 * probs.double() / probs.double().sum()
    assert not counts[probs == 0].any()
    likely = expected > 5
    statistic = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert stats.chi2.sf(statistic, int(likely.sum()) - 1) > 1e-6


def uniforms(rng: Sequence[Rng], stream: int, indices: Sequence[int]) -> list[float]:
    return [each._uniform(each.position, stream, index) for each in rng for index in indices]


def test_uniformity_along_every_part_of_the_key() -> None:
    """Kolmogorov-Smirnov for seeds, positions, nodes and streams, each alone."""
    families = {
        "seeds": uniforms([Rng(seed, 0) for seed in range(2000)], Stream.TARGET, [0]),
        "large seeds": uniforms([Rng(2**63 + seed, 0) for seed in range(2000)], Stream.ACCEPT, [3]),
        "positions": uniforms([Rng(1, position) for position in range(2000)], Stream.TARGET, [0]),
        "nodes": uniforms([Rng(1, 0)], Stream.ACCEPT, range(2000)),
        "children": uniforms(
            [Rng(1, 0)], Stream.DRAFT, [(node << 16) | index for node in range(200) for index in range(10)]
        ),
        "streams": [Rng(1, 0)._uniform(0, stream, 0) for stream in range(2000)],
    }
    for name, values in families.items():
        assert len(set(values)) == len(values), name
        assert stats.kstest(values, "uniform").pvalue > ALPHA / len(families), name


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((0, 0, Stream.TARGET, 0), (0, 0, Stream.ACCEPT, 0)),
        ((0, 0, Stream.TARGET, 0), (0, 0, Stream.DRAFT, 0)),
        ((0, 0, Stream.ACCEPT, 0), (0, 0, Stream.DRAFT, 0)),
        ((0, 0, Stream.DRAFT, 0), (0, 0, Stream.DRAFT + 1, 0)),
        ((0, 0, Stream.ACCEPT, 0), (0, 0, Stream.ACCEPT, 1)),
        ((0, 0, Stream.TARGET, 0), (0, 1, Stream.TARGET, 0)),
        ((0, 0, Stream.TARGET, 0), (1, 0, Stream.TARGET, 0)),
        ((0, 0, Stream.ACCEPT, 1), (0, 1, Stream.ACCEPT, 0)),
    ],
)
def test_neighbouring_keys_are_independent(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Chi-square on a 5 x 5 table over 4,000 base keys: streams, nodes, positions, seeds."""
    table = torch.zeros(5, 5)
    for base in range(4000):
        cell = []
        for seed, position, stream, index in (left, right):
            value = Rng(10 * base + seed, position)._uniform(position, stream, index)
            cell.append(int(5 * value))
        table[cell[0], cell[1]] += 1
    assert stats.chi2_contingency(table.numpy()).pvalue > ALPHA / 8


def test_draws_follow_the_distribution_and_never_take_the_impossible() -> None:
    for draw in (
        lambda seed: Rng(seed, 2).draw(LAW, 1),
        lambda seed: Rng(seed, 2).drafted(LAW, 3, 1),
        lambda seed: Rng(1, seed).draw(0.03 * LAW),
    ):
        counts = Counter(draw(seed) for seed in range(3000))
        assert counts[1] == 0
        expected = [3000 * float(LAW[token]) for token in (0, 2, 3)]
        assert stats.chisquare([counts[token] for token in (0, 2, 3)], expected).pvalue > ALPHA


@pytest.mark.parametrize(
    "probs", [[0.0, 0.0, 1.0, 0.0], [0.0, 0.3, 0.0, 0.7, 0.0], [1e-30, 0.0, 1.0], [0.0, 1e-40, 0.0]]
)
@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.3, 0.5, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(probs: list[float], uniform: float) -> None:
    values = torch.tensor(probs, dtype=torch.float64)
    assert values[token_at(values, uniform)] > 0


def test_inverse_is_the_quantile() -> None:
    for step in range(1000):
        uniform = (step + 0.5) / 1000
        assert token_at(LAW, uniform) == (0 if uniform < 0.5 else 2 if uniform < 0.7 else 3)


def test_a_cascades_inner_level_draws_from_its_own_stream() -> None:
    outer = [Rng(seed, 0).drafted(LAW, 0) for seed in range(200)]
    inner = [Rng(seed, 0, draft_stream=Stream.DRAFT + 1).drafted(LAW, 0) for seed in range(200)]
    assert outer != inner
    assert [Rng(seed, 0, 9).draw(LAW) for seed in range(200)] == [Rng(seed, 0).draw(LAW) for seed in range(200)]


def test_logprobs_and_ranks() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 0.0, 1.0, 2.0]])
    (chosen, best), (other, single) = logprobs_of(logits, [2, 3], 2)
    values = logits.log_softmax(-1)
    assert chosen.logprob == pytest.approx(float(values[0, 2])) and chosen.rank == 3
    assert set(best) == {1, 3} and [entry.rank for entry in best.values()] == [1, 2]
    assert other.logprob == pytest.approx(float(values[1, 3])) and other.rank == 2 and list(single) == [0, 3]
    assert [found for _, found in logprobs_of(logits, [1, 1], 0)] == [{}, {}]
    assert len(logprobs_of(logits[:1], [1], 10)[0][1]) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "few", "point"])
def test_the_nucleus_by_classes_is_the_sorted_one(kind: str, dtype: torch.dtype) -> None:
    """On a CPU only the class of probabilities at the border is sorted."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=generator)
    logits = {
        "peaked": 6 * logits,
        "flat": 0.01 * logits,
        "ties": (2 * logits).round(),
        "few": logits.masked_fill(torch.arange(3000) % 7 > 0, -torch.inf),
        "point": logits.masked_fill(torch.arange(3000) != 17, -torch.inf),
    }[kind]
    for probs in logits.to(dtype).softmax(-1):
        for top_p in (1e-6, 0.3, 0.95, 0.9999999):
            found, expected = (make(probs, top_p) for make in (sampling._classed_nucleus, sampling._sorted_nucleus))
            assert torch.equal(found & (probs > 0), expected & (probs > 0))
