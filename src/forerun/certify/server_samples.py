"""The checks of ``forerun certify --server`` for sampled completions: seeds, and distributions by chi-square.

Completions are drawn at temperature 1, where the stated log-probabilities are their distribution. They are compared
with the stated log-probabilities of single tokens after every prefix, for which nothing is drafted.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from forerun.certify import CertifyPlan, Check
from forerun.certify.chi_square import EDGES, SampledTest, draws_for, fit, judged, level_of, place_cells, survival
from forerun.certify.reference import REST, Cells, Outcome, cells_of, count, first_difference
from forerun.certify.served import (
    CHOICES,
    TOGETHER,
    Prompt,
    ServedAnswer,
    ServedModel,
    ServedRequest,
    ServerExam,
    left_out,
    with_smallest,
)
from forerun.errors import ArgumentError

PARTED = 0.05  # Share of tokens at which 16-bit rounding may change sampled text for the same seed
FEW_TRIES = 4  # Most smaller requests that are tried for a wrong distribution: each takes hundreds of completions


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedTest(SampledTest):
    """Compares sampled completions with the distribution that the server states."""

    requests: Sequence[ServedRequest]  # Sent in turn
    at_a_time: int
    seeded: bool

    def drawn(self, exam: ServerExam, first: int) -> list[Outcome]:
        """Draw completions, with seeds from `first` on, and return the outcomes to count."""
        n = self.requests[0].n
        tokens = self.requests[0].max_tokens if self.each == "tokens" else 1
        number = math.ceil(self.samples / n / tokens)
        asked = [
            replace(request, seed=exam.plan.seed + first + index * n if self.seeded else None)
            for index, request in enumerate(itertools.islice(itertools.cycle(self.requests), number))
        ]
        choices = exam.served.ask(asked, self.at_a_time)
        pairs = [(request, answer) for request, answers in zip(asked, choices, strict=True) for answer in answers]
        if self.each == "completions":
            return [answer.tokens for _, answer in pairs]
        return _places(exam, pairs, random.Random(exam.plan.seed + first))


def _edges(plan: CertifyPlan) -> list[float]:
    """Return the edges of the quantiles' cells: a coarse test has few, and rare tokens share one, because only the
    likeliest tokens are stated."""
    return [edge for edge in EDGES if 1 - edge > 0.99 * plan.least]


def _places(
    exam: ServerExam, answered: Sequence[tuple[ServedRequest, ServedAnswer]], chance: random.Random
) -> list[Outcome]:
    """Return the cell of each token's quantile (`Reference.places`); tokens that are not stated share the last cell."""
    edges = _edges(exam.plan)
    outcomes = list[Outcome]()
    for (_, answer), along in zip(answered, exam.served.stated_along(answered), strict=True):
        for token, stated in zip(answer.tokens, along, strict=True):
            logprob = stated.get(token, -math.inf)
            likelier = sum(math.exp(value) for value in stated.values() if value > logprob)
            equal = sum(math.exp(value) for value in stated.values() if value == logprob) or 1 - likelier
            quantile = likelier + chance.random() * equal
            outcomes.append((min(bisect(edges, quantile), len(edges)),))
    return outcomes


def sampled_checks(exam: ServerExam) -> Iterator[Check]:
    """Check seeds, and three ways of sampling: one client with seeds, many without, and longer completions."""
    yield _seed_check(exam)
    names = {"unseeded": "no seed", "seeded": "seeded", "tokens": "each token of longer completions"}
    if not exam.served.exact:
        for key, name in names.items():
            yield left_out(f"sampled_{key}", f"sampled distribution, {name}", "; ".join(exam.served.missing.values()))
        return
    plan = exam.plan
    prompt = _uncertain(exam)
    many = 1 if "n" in exam.served.missing else CHOICES
    request = ServedRequest(prompt=prompt, max_tokens=plan.sample_tokens, temperature=1.0, n=many)
    longer = [ServedRequest(prompt=prompt, max_tokens=plan.max_tokens, temperature=1.0) for prompt in exam.prompts]
    answers = partial(
        ServedTest.over, _cells(exam, prompt, plan.sample_tokens), plan, exam.tests, batch=many, requests=[request]
    )
    places = partial(ServedTest.over, place_cells(_edges(plan)), plan, exam.tests, batch=plan.max_tokens, each="tokens")
    tests = [
        answers(key="unseeded", name=f"n = {many}, no seed, {TOGETHER} clients", at_a_time=TOGETHER, seeded=False),
        answers(key="seeded", name=f"n = {many}, seeded, 1 client", at_a_time=1, seeded=True),
        places(key="tokens", name=names["tokens"], requests=longer, at_a_time=TOGETHER, seeded=False),
    ]
    for test in tests:
        exam.progress(f"sampled distribution, {test.name}")
        yield _chi_square_check(exam, test)
    if "n" in exam.served.missing:
        yield left_out("n", "several completions to one request", exam.served.missing["n"])


def _uncertain(exam: ServerExam) -> Prompt:
    """Return the prompt whose completions are the least certain after the first token, which is never drafted: a text's
    beginning, and the first half of it again, so that lookup drafters find a match."""
    length = exam.plan.sample_prompt_tokens
    prompts = [(*prompt[:length], *prompt[: length // 2]) for prompt in exam.prompts if not isinstance(prompt, str)]
    cells = {prompt: _cells(exam, prompt, exam.plan.sample_tokens) for prompt in prompts}
    best = max(prompts, key=lambda prompt: (sum(len(cell) > 1 for cell in cells[prompt]), len(cells[prompt])))
    if len(cells[best]) < 2:
        raise ArgumentError(
            f"there is nothing to sample: the completions to each of the {len(prompts)} prompts are certain, or none "
            f"has a probability of {exam.plan.least:g}; give more prompts (--prompts, --prompt-file)"
        )
    return best


def _cells(exam: ServerExam, prompt: Prompt, tokens: int) -> Cells:
    def likely(beginning: Outcome) -> dict[int, float]:
        return {token: math.exp(value) for token, value in exam.served.stated(prompt, beginning).items()}

    return cells_of(likely, replace(exam.plan, sample_tokens=tokens))


def _chi_square_check(exam: ServerExam, test: ServedTest) -> Check:
    """Compare sampled completions with the stated distribution; the check fails if two samples are unlikely."""
    check, drawn = test.check(
        exam.plan, lambda turn: count(test.cells, test.drawn(exam, turn * test.samples)), "T = 1: "
    )
    if check.passed:
        return check
    if test.each == "tokens":
        summary = f"{check.summary}; of the places of tokens {_worst_cell(test.cells, drawn, str)}"
        return replace(check, summary=summary, shown_by=exam.served.commands(test.requests[0]))
    return with_smallest(exam, check, test.requests, partial(_sampled_fault, exam, test), FEW_TRIES)


def _worst_cell(cells: Cells, counts: Counter[Outcome], show: Callable[[int], str]) -> str:
    """Return which outcome's count is furthest from the expected one; `show` words its tokens."""
    total = counts.total()
    worst = max(cells, key=lambda cell: (counts[cell] - total * cells[cell]) ** 2 / max(total * cells[cell], 1e-9))
    words = "any other completion" if worst == REST else f"completions with {' '.join(map(show, worst))}"
    return f"{words} came {counts[worst]} times in {total}, where {total * cells[worst]:.1f} are expected"


def _sampled_fault(exam: ServerExam, test: ServedTest, request: ServedRequest) -> str | None:
    """Return which completions of a request come too often or too seldom; None if none do, or if all are certain."""
    cells = _cells(exam, request.prompt, request.max_tokens)
    if len(cells) < 2:
        return None
    narrowed = replace(test, requests=[request], cells=cells)
    drawn = count(cells, narrowed.drawn(exam, 3 * test.samples))
    _, _, chance = fit(cells, drawn)
    return (
        None
        if chance >= test.level
        else f"asked again and again, {_worst_cell(cells, drawn, exam.served.show_token)} (p = {chance:.1g})"
    )


def _seed_check(exam: ServerExam) -> Check:
    """Request sampled completions with seeds twice. Rounding in 16 bits may change a few; ignored seeds change all."""
    name = "same seed, same text"
    plan = exam.plan
    exam.progress(name)
    asked = [
        ServedRequest(prompt=prompt, max_tokens=min(plan.max_tokens, 32), temperature=1.0, seed=plan.seed + index)
        for index, prompt in enumerate(exam.prompts)
    ]
    first, again = exam.served.ask(asked), exam.served.ask(asked)
    parted, compared = list[ServedRequest](), 0
    for request, [first_answer], [second_answer] in zip(asked, first, again, strict=True):
        position = first_parting(first_answer, second_answer)
        compared += len(first_answer.tokens or first_answer.text) if position is None else position + 1
        parted += [] if position is None else [request]
    allowed = PARTED if exam.epsilon else 0.0
    passed = len(parted) <= allowed * compared
    summary = (
        f"{len(asked) - len(parted)} of {len(asked)} sampled completions are the same when asked again with their seed"
    )
    if parted:
        summary += (
            f"; the others part at one of {compared / len(parted):.0f} tokens (up to {allowed:.0%} may be rounding)"
        )
    figures = {"equal": len(asked) - len(parted), "prompts": len(asked), "tokens": compared}
    check = Check(id="seed", name=name, passed=passed, summary=summary, figures=figures)
    return check if passed else with_smallest(exam, check, parted[:1], partial(_seed_fault, exam))


def first_parting(one: ServedAnswer, other: ServedAnswer) -> int | None:
    """Return the index of the first token that differs, or of the first letter if the server names no tokens."""
    if one.tokens and other.tokens:
        return first_difference(one.tokens, other.tokens)
    return first_difference([ord(letter) for letter in one.text], [ord(letter) for letter in other.text])


def _seed_fault(exam: ServerExam, request: ServedRequest) -> str | None:
    """Return how a seeded request is answered differently when it is sent twice; None if it is not."""
    [[first]], [[again]] = exam.served.ask([request]), exam.served.ask([request])
    return None if first.text == again.text else f"it is answered {first.text!r} and then {again.text!r}"


def sampled_beside(exam: ServerExam, other: ServedModel) -> Check:
    """Compare sampled completions of both servers by a chi-square test of two samples."""
    name = f"sampled completions beside {other.url}"
    plan = exam.plan
    exam.progress(name)
    level = level_of(plan, exam.tests)
    # Two samples have half the power of one
    number = 2 * draws_for(plan.cells - 1, level, plan.detect, math.sqrt(plan.power))
    length = plan.sample_prompt_tokens * (4 if isinstance(exam.prompts[0], str) else 1)
    prompt = _uncertain(exam) if exam.served.exact else exam.prompts[0][:length]
    cells = 0

    def draw(turn: int) -> tuple[float, int, float]:
        nonlocal cells
        asked = [
            ServedRequest(prompt=prompt, max_tokens=plan.sample_tokens, temperature=1.0, seed=plan.seed + index)
            for index in range(turn * number, (turn + 1) * number)
        ]
        # With different seeds: equal seeds may give equal text, which would not be an independent sample
        others = [replace(request, seed=(request.seed or 0) + 10 * number) for request in asked]
        here = [_drafted(answer) for [answer] in exam.served.ask(asked, TOGETHER)]
        there = [_drafted(answer) for [answer] in other.ask(others, TOGETHER)]
        statistic, freedom, cells = two_samples(here, there, plan)
        return statistic, freedom, survival(statistic, freedom)

    fits, words, figures = judged(draw, level, " of two samples")
    summary = (
        f"T = 1: {words}; {number} completions of each detect a total variation "
        f"of {plan.detect:.2g} over {cells} cells with {plan.power:.0%}"
    )
    figures["samples"] = number
    return Check(id="sampled_beside", name=name, passed=fits, summary=summary, figures=figures)


def _drafted(answer: ServedAnswer) -> Outcome:
    """Return the outcome to count: the tokens after the first, which is never drafted, or the last letters."""
    return answer.tokens[1:] or tuple(ord(letter) for letter in answer.text[len(answer.text) // 2 :])


def two_samples(one: Sequence[Outcome], other: Sequence[Outcome], plan: CertifyPlan) -> tuple[float, int, int]:
    """Return chi-square of two samples of one size, its degrees of freedom, and the number of cells.

    The cells are the likeliest beginnings of both samples together.
    """
    pooled = [*one, *other]

    def likely(beginning: Outcome) -> dict[int, float]:
        length = len(beginning)
        within = [outcome for outcome in pooled if outcome[:length] == beginning]
        following = Counter(outcome[length] for outcome in within if len(outcome) > length)
        return {token: times / len(within) for token, times in following.items()}

    cells = cells_of(likely, plan)
    here, there = count(cells, one), count(cells, other)
    used = [cell for cell in cells if here[cell] + there[cell]]
    statistic = sum((here[cell] - there[cell]) ** 2 / (here[cell] + there[cell]) for cell in used)
    return statistic, max(len(used) - 1, 1), len(used)
