"""The seed of an engine and of a request: a run repeats, its answers differ, and a request's own seed is its own."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import LLM, AsyncLLM, SamplingParams
from forerun.core.rng import Rng, completion_seed, request_seed

PROMPT = "the cat sat"
PARAMS = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)


def engine(checkpoint: Path, **keywords: Any) -> LLM:
    return LLM(str(checkpoint), dtype="float32", max_num_seqs=4, max_model_len=64, **keywords)


def answers(llm: LLM, copies: int, params: SamplingParams = PARAMS) -> list[tuple[int, ...]]:
    outputs = llm.generate([PROMPT] * copies, params)
    return [tuple(answer.token_ids) for output in outputs for answer in output.outputs]


@pytest.mark.parametrize(("drafter", "seed"), [(None, 0), ({"method": "ngram"}, 7), ("draft_model", None)])
def test_copies_of_a_prompt_have_own_answers(
    checkpoint: Path, draft_checkpoint: Path, drafter: Any, seed: int | None
) -> None:
    config = {"method": drafter, "model": str(draft_checkpoint)} if isinstance(drafter, str) else drafter
    llm = engine(checkpoint, seed=seed, speculative_config=config)
    found = answers(llm, 20)
    assert len(set(found)) == 20
    again = answers(engine(checkpoint, seed=seed, speculative_config=config), 20)
    assert (found == again) == (seed is not None)
    assert not set(answers(llm, 5)) & set(found), "what comes later has numbers of its own"


def test_another_seed_and_another_answer_of_a_request_are_others(checkpoint: Path) -> None:
    runs = [answers(engine(checkpoint, seed=seed), 5) for seed in (0, 1, -1, 2**63, 2**64 - 2)]
    assert len({one for run in runs for one in run}) == 25
    assert len(set(answers(engine(checkpoint, seed=0), 3, replace(PARAMS, n=4)))) == 12


def test_engines_do_not_share_a_counter(checkpoint: Path) -> None:
    alone = answers(engine(checkpoint, seed=0), 6)
    one, other = engine(checkpoint, seed=0), engine(checkpoint, seed=0)
    pairs = [(answers(one, 1), answers(other, 1)) for _ in range(6)]
    assert [found for found, _ in pairs] == [found for _, found in pairs] == [[answer] for answer in alone]


def test_a_seed_of_its_own_is_the_first_answers(checkpoint: Path) -> None:
    """Whatever the engine's is, however many came before, and however many answers are asked for."""
    own, seeded, other = replace(PARAMS, seed=5), engine(checkpoint, seed=0), engine(checkpoint)
    assert len({*answers(seeded, 2, own), *answers(other, 2, own)}) == 1
    assert answers(other, 1, replace(own, n=2))[0] == answers(seeded, 1, own)[0]


@pytest.mark.parametrize("drafter", [None, {"method": "ngram"}], ids=["plain", "ngram"])
def test_answers_to_neighbouring_seeds_are_others(checkpoint: Path, drafter: Any) -> None:
    """Also where a loop counts its seeds up by one, and each asks for several answers."""
    llm = engine(checkpoint, speculative_config=drafter)
    asked = [SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True, seed=seed, n=4) for seed in range(-1, 4)]
    found = [one for params in asked for one in answers(llm, 1, params)]
    assert len(set(found)) == 20
    assert found == [one for params in asked for one in answers(llm, 1, params)]


def test_no_two_pairs_of_seed_and_index_have_the_same_numbers() -> None:
    seeds, indices = [-(2**63), -3, 0, 1, 2, 2**63 - 1, 2**64 - 2], [0, 1, 2, 2**20]
    rngs = [Rng(completion_seed(seed, index), 3) for seed in seeds for index in indices]
    assert len({rng.seed for rng in rngs}) == 28
    assert len({float(rng.exponentials(0, 8)[0]) for rng in rngs}) == 28


async def test_asyncio_counts_alike(checkpoint: Path) -> None:
    async with AsyncLLM(str(checkpoint), dtype="float32", max_num_seqs=4, max_model_len=64, seed=0) as llm:
        outputs = await llm.generate([PROMPT] * 8, PARAMS)
    found = [tuple(output.outputs[0].token_ids) for output in outputs]
    assert found == answers(engine(checkpoint, seed=0), 8)


def test_derived_seeds_do_not_meet() -> None:
    """Nor do those of the several answers of a request, which follow each other."""
    seeds = sorted(request_seed(seed, number) for seed in range(20) for number in range(500))
    assert min(high - low for low, high in itertools.pairwise(seeds)) > 1000


@pytest.mark.parametrize(
    ("options", "same"),
    [({}, True), ({"adaptive": False, "draw": "deterministic"}, True), ({"adaptive": False}, False)],
)
def test_the_text_of_a_seed_beside_a_draft_model(
    checkpoint: Path, draft_checkpoint: Path, options: dict[str, Any], same: bool
) -> None:
    """It is plain decoding's unless the draft model samples, which is asked for by name."""
    config = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4, **options}
    llm = engine(checkpoint, speculative_config=config)
    params = [SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True, seed=seed) for seed in range(4)]
    drafted, plain = (llm.generate([PROMPT] * 4, params, speculative=speculative) for speculative in (None, False))
    texts = [[output.outputs[0].token_ids for output in outputs] for outputs in (drafted, plain)]
    assert (texts[0] == texts[1]) is same
