"""The checks of ``forerun certify --server``: whether speculation changes a server's completions, seen from outside.

The reference is the server itself: for every prefix of a completion one token is requested, which comes from the
prefill pass without a draft. Greedy completions are compared with it token by token. Completions at temperature 1,
whose distribution the stated log-probabilities are, are compared by chi-square tests. With a second server, for example
one without speculation, the completions of both are compared, too.
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from forerun.certify import CertifyPlan, Check, Report, Stage, run_stages
from forerun.certify.reference import LOGPROB_TOLERANCE, Difference
from forerun.certify.served import (
    CHAT,
    TOGETHER,
    Prompt,
    ServedAnswer,
    ServedModel,
    ServedRequest,
    ServerExam,
    Stated,
    left_out,
    with_smallest,
)
from forerun.certify.server_samples import first_parting, sampled_beside, sampled_checks
from forerun.endpoints import ServerError
from forerun.errors import ArgumentError

ASSUMED = "bfloat16"  # Servers do not state their number format
FORMATS = {
    "colour": {"type": "string", "enum": ["red", "green", "blue"]},
    "sure": {"type": "boolean"},
    "size": {"type": "string", "enum": ["small", "large"]},
}
"""The properties that a JSON completion must have; each ends by itself."""
QUESTION = "Describe the sky in JSON."


def certify_server(
    served: ServedModel,
    texts: Sequence[str],
    plan: CertifyPlan | None = None,
    *,
    against: ServedModel | None = None,
    dtype: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
    news: Callable[[str], None] = lambda _: None,
) -> Report:
    """Examine a server, and compare it with another one. Raises ArgumentError if there are no prompts, or if none has
    an uncertain completion.

    Args:
        served: the examined server.
        texts: the prompts are the beginnings of the first few texts.
        plan: how much to check.
        against: a server of the same model, whose completions must be the same.
        dtype: the server's number format, which decides what counts as a tie; ``auto`` assumes bfloat16.
        progress: called with a line about the current work.
        news: called with lines to keep: each stage, and each check's verdict.
    """
    plan = plan or CertifyPlan()
    assumed = ASSUMED if dtype == "auto" else dtype
    prompts = _prompts(served, texts, plan)
    exam = ServerExam(served=served, against=against, prompts=prompts, plan=plan, dtype=assumed, progress=progress)
    stages: list[Stage] = [
        ("greedy text, for one client and for many", lambda: greedy_checks(exam)),
        ("sampled text, its seeds and its distribution", lambda: sampled_checks(exam)),
        ("structured outputs", lambda: [structured_check(exam)]),
    ]
    if against is not None:
        other = against
        beside = (f"greedy and sampled text, compared with {other.url}", lambda: _checks_beside(exam, other))
        stages.append(beside)
    stages.append(("whether the server drafted", lambda: [_speculation_check(exam)]))
    checks = list(itertools.chain(*run_stages(stages, progress, news)))
    words = assumed if dtype != "auto" else f"{assumed} assumed"
    what = f"what {served.engine or 'the server'} does"
    where = f"{words} on {served.url}"
    return Report(model=served.model, drafter=what, dtype=words, device=served.url, runs_as=where, checks=checks)


def _prompts(served: ServedModel, texts: Sequence[str], plan: CertifyPlan) -> list[Prompt]:
    encoded = [served.encode(text) for text in texts[: plan.prompts]]
    found = [prompt[: plan.prompt_tokens * (4 if isinstance(prompt, str) else 1)] for prompt in encoded if prompt]
    if not found:
        raise ArgumentError("certify needs at least one prompt that is not empty")
    return found


# --- greedy text ---


def greedy_checks(exam: ServerExam) -> Iterator[Check]:
    """Check greedy completions of one client and of many, cold and cached, and their log-probabilities."""
    plan = exam.plan
    requests = [ServedRequest(prompt=prompt, max_tokens=plan.max_tokens) for prompt in exam.prompts]
    many = list(itertools.islice(itertools.cycle(requests), max(TOGETHER, len(requests))))
    cached = _cache_requests(exam)
    sampled = [replace(request, temperature=1.0, seed=plan.seed + index) for index, request in enumerate(many)]
    mixed = [request for pair in zip(many, sampled, strict=True) for request in pair][:TOGETHER]
    sets = [
        ("greedy_alone", "greedy equality, 1 client", requests, 1),
        ("greedy_together", f"greedy equality, {TOGETHER} clients", many, TOGETHER),
        ("greedy_mixed", "greedy equality, among sampled completions", mixed, TOGETHER),
        ("prefix_cache", "prefix cache, cold and warm", cached, 1),
    ]
    if not exam.served.exact:
        yield from _repeats(exam, [each for each in sets if each[2] is not mixed])
        return
    answers = list[tuple[ServedRequest, ServedAnswer]]()
    for key, name, asked, at_a_time in sets:
        exam.progress(name)
        yield _greedy_check(exam, (key, name), asked, at_a_time, answers)
    yield _logprob_check(exam, answers)


def _cache_requests(exam: ServerExam) -> list[ServedRequest]:
    """Return requests for new prompts: cold, warm, after another prompt with the same prefix, and warm again."""
    tokens = min(exam.plan.max_tokens, 32)
    unseen = exam.served.encode(f"{secrets.token_hex(4)}\n")
    requests = []
    for prompt, other in zip(exam.prompts, [*exam.prompts[1:], exam.prompts[0]], strict=True):
        if isinstance(unseen, str) or isinstance(prompt, str) or isinstance(other, str):
            joined: Prompt = f"{unseen}{prompt}"
            sibling: Prompt = f"{unseen}{prompt[: len(prompt) // 2]}{other[: len(other) // 4]}"
        else:
            joined = (*unseen, *prompt)
            sibling = (*unseen, *prompt[: len(prompt) // 2], *other[: len(other) // 4])
        cold = ServedRequest(prompt=joined, max_tokens=tokens)
        requests += [cold, replace(cold, before=joined), replace(cold, prompt=sibling, before=joined)]
    return requests[: 3 * max(1, len(requests) // 6)]  # Half of the prompts say enough


def _greedy_check(
    exam: ServerExam,
    title: tuple[str, str],
    asked: Sequence[ServedRequest],
    at_a_time: int,
    answers: list[tuple[ServedRequest, ServedAnswer]],
) -> Check:
    """Compare greedy completions with the server's own next tokens; they are appended to `answers`. `title` is the
    check's id and name.
    """
    key, name = title
    cached_before = exam.served.cached_tokens or 0
    pairs = zip(asked, exam.served.ask(asked, at_a_time), strict=True)
    greedy = [(request, choices[0]) for request, choices in pairs if request.temperature == 0]
    answers += greedy
    requests = [request for request, _ in greedy]
    completions = [answer for _, answer in greedy]
    differences = list[Difference]()
    bug: tuple[ServedRequest, Difference] | None = None
    for request, parted in zip(requests, _parted(exam, requests, completions), strict=True):
        differences += parted
        wrong = next((difference for difference in parted if not difference.tie), None)
        if wrong is not None and bug is None:
            bug = request, wrong
    bugs = sum(not difference.tie for difference in differences)
    tokens = sum(len(answer.tokens) for answer in completions)
    right = tokens - len(differences)
    summary = f"{right} of {tokens} tokens of {len(completions)} completions are the server's own next tokens"
    if differences:
        worst = max(differences, key=lambda difference: difference.gap)
        summary += f"; {len(differences) - bugs} numeric ties and {bugs} others, the worst by {worst.gap:.3g} nats"
        summary += f" (a tie is less than {exam.epsilon:g})"
    if key == "prefix_cache":
        cached = exam.served.cached_tokens
        unstated = "the server does not say what came from its cache"
        summary += f"; {unstated if cached is None else f'{cached - cached_before} tokens came from its cache'}"
    figures: dict[str, Any] = {
        "answers": len(completions),
        "tokens": tokens,
        "ties": len(differences) - bugs,
        "bugs": bugs,
    }
    figures["differences"] = [
        asdict(difference) | {"tie": difference.tie} for difference in differences if not difference.tie or bugs == 0
    ]
    check = Check(id=key, name=name, passed=tokens > 0 and bug is None, summary=summary, figures=figures)
    if bug is None:
        return check
    request, wrong = bug
    neighbour = next((each for each in asked if each.temperature > 0), None)
    if neighbour is not None:
        shown = (*exam.served.commands(request), *exam.served.commands(neighbour))
        summary += f"; token {wrong.position} of a completion is wrong while others are sampled: send both at a time"
        return replace(check, summary=summary, shown_by=shown)
    whole = replace(request, copies=at_a_time)
    return with_smallest(
        exam, check, [replace(whole, max_tokens=wrong.position + 1), whole], partial(_greedy_fault, exam)
    )


def _parted(
    exam: ServerExam, requests: Sequence[ServedRequest], answers: Sequence[ServedAnswer]
) -> Iterator[list[Difference]]:
    """Yield, for each greedy completion, the tokens that are not the likeliest ones after those before them."""
    stated_along = exam.served.stated_along(list(zip(requests, answers, strict=True)))
    for index, (answer, along) in enumerate(zip(answers, stated_along, strict=True)):
        differences = []
        for position, (token, stated) in enumerate(zip(answer.tokens, along, strict=True)):
            best = max(stated, key=stated.__getitem__, default=token)
            if token != best:
                gap = stated[best] - stated.get(token, -math.inf)
                differences.append(exam.difference((index % len(exam.prompts), position), (best, token), gap))
        yield differences


def _greedy_fault(exam: ServerExam, request: ServedRequest) -> str | None:
    """Return what is wrong with a greedy completion; None if nothing is."""
    [answers] = exam.served.ask([request])
    for parted in _parted(exam, [request] * len(answers), answers):
        wrong = next((difference for difference in parted if not difference.tie), None)
        if wrong is not None:
            given, right = map(exam.served.show_token, (wrong.speculative, wrong.plain))
            return (
                f"token {wrong.position} of its completion is {given}; asked for that token alone the server says "
                f"{right}, which is {wrong.gap:.3g} nats likelier"
            )
    return None


def _repeats(exam: ServerExam, sets: Sequence[tuple[str, str, Sequence[ServedRequest], int]]) -> Iterator[Check]:
    """Compare greedy completions with their own repetition, for servers without log-probabilities."""
    lacks = "; ".join(exam.served.missing.values())
    for key, name, requests, at_a_time in sets:
        exam.progress(name)
        first = exam.served.ask([replace(request, before=None) for request in requests])
        again = exam.served.ask(requests, at_a_time)
        same = sum(one[0].text == other[0].text for one, other in zip(first, again, strict=True))
        summary = f"{same} of {len(requests)} completions are the same when asked again; more cannot be said: {lacks}"
        if same < len(requests):
            summary += "; whether the others are numeric ties cannot be told"
        yield Check(id=key, name=name, passed=same == len(requests), summary=summary, figures={"equal": same})
    yield left_out("logprobs", "log-probabilities", lacks)


def _logprob_check(exam: ServerExam, answered: Sequence[tuple[ServedRequest, ServedAnswer]]) -> Check:
    """Compare the log-probabilities in a completion with those of the same tokens requested one by one."""
    tolerance = LOGPROB_TOLERANCE.get(exam.dtype, 5e-4)
    apart = [pair for request, answer in answered for pair in _stated_pairs(exam, request, answer)]
    wrong = [pair for pair in apart if pair[1] > tolerance]
    worst = max((gap for _, gap, _ in apart), default=0.0)
    without = sum(logprob is None for _, answer in answered for logprob in answer.logprobs)
    summary = f"at most {worst:.2g} nats from those of a token alone over {len(apart)} tokens (tolerance {tolerance:g})"
    summary += f"; {len(wrong)} are further" if wrong else ""
    summary += f"; {without} tokens are given none" if without else ""
    figures = {"largest_difference": worst, "tokens": len(apart), "wrong": len(wrong), "tolerance": tolerance}
    passed = not wrong and not without and bool(apart)
    check = Check(id="logprobs", name="log-probabilities", passed=passed, summary=summary, figures=figures)

    def shows(request: ServedRequest) -> str | None:
        [[answer]] = exam.served.ask([request])
        faults = [words for _, gap, words in _stated_pairs(exam, request, answer) if gap > tolerance]
        return faults[0] if faults else None

    return with_smallest(exam, check, [wrong[0][0]], shows) if wrong else check


def _stated_pairs(
    exam: ServerExam, request: ServedRequest, answer: ServedAnswer
) -> Iterator[tuple[ServedRequest, float, str]]:
    """Yield, for each token, the request that ends with it, the distance from the reference, and a description."""
    for position, (token, logprob) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        expected = exam.served.stated(request.prompt, answer.tokens[:position]).get(token)
        if logprob is not None and expected is not None:
            words = f"token {position} of its completion is stated with {logprob:.4g} and alone with {expected:.4g}"
            yield replace(request, max_tokens=position + 1), abs(logprob - expected), words


# --- structured outputs ---


def structured_check(exam: ServerExam) -> Check:
    """Request JSON of a schema in chats, greedy and sampled, and check the results."""
    key, name = "structured", "structured outputs"
    exam.progress(name)
    bodies = [_structured_body(exam, FORMATS, temperature=0.0, seed=0)]
    seeds = range(exam.plan.seed, exam.plan.seed + TOGETHER)
    bodies += [_structured_body(exam, FORMATS, temperature=1.0, seed=seed) for seed in seeds]
    try:
        answers = [*exam.served.post(CHAT, bodies[:1]), *exam.served.post(CHAT, bodies[1:], TOGETHER)]
    except ServerError as error:
        return left_out(key, name, str(error))
    read = [(body, _misfit(answer, FORMATS)) for body, answer in zip(bodies, answers, strict=True)]
    faults = [(body, fault) for body, fault in read if fault]
    cut = sum(_content(answer) is None for answer in answers)
    if cut == len(answers):
        return left_out(key, name, f"none of {cut} completions ended within {bodies[0]['max_tokens']} tokens")
    valid = len(answers) - cut - len(faults)
    summary = f"{valid} of {len(answers)} completions are JSON of the schema that was asked for"
    summary += f"; {cut} were cut off before they ended" if cut else ""
    figures = {"answers": len(answers), "valid": valid, "cut": cut}
    check = Check(id=key, name=name, passed=not faults, summary=summary, figures=figures)
    if not faults:
        return check
    body, fault = faults[0]
    for size in range(1, len(FORMATS)):  # A smaller schema may show the fault, too
        some = dict(itertools.islice(FORMATS.items(), size))
        smaller = _structured_body(exam, some, temperature=body["temperature"], seed=body["seed"])
        smaller_fault = _misfit(exam.served.post(CHAT, [smaller])[0], some)
        if smaller_fault:
            body, fault = smaller, smaller_fault
            break
    return replace(check, summary=f"{summary}; {fault}", shown_by=(exam.served.command(CHAT, body),))


def _structured_body(
    exam: ServerExam, properties: Mapping[str, Any], *, temperature: float, seed: int
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": [*properties],
        "additionalProperties": False,
    }
    return {
        "model": exam.served.model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max(96, exam.plan.max_tokens),
        "temperature": temperature,
        "seed": seed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    }


def _content(answer: Mapping[str, Any]) -> str | None:
    """Return the content of a chat completion; None if it was cut off. Raises ServerError if it is none."""
    try:
        choice = answer["choices"][0]
        return None if choice["finish_reason"] == "length" else str(choice["message"].get("content") or "")
    except (AttributeError, LookupError, TypeError) as error:
        raise ServerError(f"{CHAT} answered what is no chat's answer: {json.dumps(answer)[:200]}") from error


def _misfit(answer: Mapping[str, Any], properties: Mapping[str, Any]) -> str:
    """Return what is wrong with a JSON completion; None if it fits the schema or was cut off."""
    text = _content(answer)
    if text is None:
        return ""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"a completion is no JSON ({error}): {text[:200]!r}"
    if not isinstance(value, dict) or value.keys() != properties.keys():
        return f"a completion has not the properties of the schema: {text[:200]!r}"
    for name, allowed in properties.items():
        choices = allowed.get("enum", [True, False])
        if not any(value[name] is choice or value[name] == choice for choice in choices):
            return f"a completion has another {name} than the schema allows: {text[:200]!r}"
    return ""


# --- two servers ---


def _checks_beside(exam: ServerExam, other: ServedModel) -> Iterator[Check]:
    """Compare greedy and sampled completions of both servers."""
    yield _greedy_beside(exam, other)
    yield sampled_beside(exam, other)


def _greedy_beside(exam: ServerExam, other: ServedModel) -> Check:
    """Compare greedy completions of both servers; at a difference, both state the probabilities of the two tokens."""
    name = f"greedy equality with {other.url}"
    exam.progress(name)
    requests = [ServedRequest(prompt=prompt, max_tokens=exam.plan.max_tokens) for prompt in exam.prompts]
    here, there = exam.served.ask(requests), other.ask(requests)
    differences, words = list[Difference](), list[str]()
    for index, (request, [one], [two]) in enumerate(zip(requests, here, there, strict=True)):
        position = first_parting(one, two)
        if position is None:
            continue
        mine, theirs = _at(one, position), _at(two, position)
        here_gap = _gap(exam.served.stated(request.prompt, one.tokens[:position]), mine, theirs)
        there_gap = _gap(other.stated(request.prompt, two.tokens[:position]), theirs, mine)
        gaps = [gap for gap in (here_gap, there_gap) if gap is not None]
        parted = exam.difference((index, position), (theirs, mine), max(map(abs, gaps), default=math.inf))
        differences.append(parted)
        own, others = exam.served.show_token(mine), other.show_token(theirs)
        words.append(
            f"prompt {index} parts at token {position}: {own} here, {_nats(here_gap)} likelier, or {others} there, "
            f"{_nats(there_gap)} likelier, {'a numeric tie' if parted.tie else 'NOT a tie'}"
        )
    bugs = [parted for parted in differences if not parted.tie]
    same = len(requests) - len(differences)
    return Check(
        id="greedy_beside",
        name=name,
        passed=not bugs,
        summary="; ".join([f"{same} of {len(requests)} completions are the same", *words]),
        figures={
            "equal": same,
            "bugs": len(bugs),
            "differences": [asdict(one) | {"tie": one.tie} for one in differences],
        },
        shown_by=_two_commands(exam, other, requests, bugs),
    )


def _two_commands(
    exam: ServerExam, other: ServedModel, requests: Sequence[ServedRequest], bugs: Sequence[Difference]
) -> tuple[str, ...]:
    """Return the commands of the request whose completions differ earliest."""
    if not bugs:
        return ()
    soonest = min(bugs, key=lambda difference: difference.position)
    request = replace(requests[soonest.prompt], max_tokens=soonest.position + 1)
    return (*exam.served.commands(request), *other.commands(request))


def _at(answer: ServedAnswer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None


def _gap(stated: Stated, one: int | None, other: int | None) -> float | None:
    """Return how much likelier one token is than another, nats; infinite if one is not among the likeliest, None if
    nothing is stated."""
    if not stated:
        return None
    values = [-math.inf if token is None else stated.get(token, -math.inf) for token in (one, other)]
    return math.inf if -math.inf in values else values[0] - values[1]


def _nats(gap: float | None) -> str:
    return "an unknown amount" if gap is None else f"{gap:.3g} nats"


# --- what else a report says ---


def _speculation_check(exam: ServerExam) -> Check:
    """Check that the server drafted at all: without drafts speculation was not tested."""
    counts = exam.served.speculation()
    key = name = "speculation"
    if counts is None:
        return left_out(key, name, "neither the server's metrics nor its answers say whether it drafts")
    if not counts.draft_tokens and not counts.drafts:
        return left_out(key, name, "the server drafted nothing, so this run says nothing of speculation")
    drafted = counts.draft_tokens if counts.draft_tokens is not None else counts.drafts
    summary = f"{counts.accepted_tokens} of {drafted} drafted tokens were accepted meanwhile ({counts.source})"
    return Check(id=key, name=name, passed=True, summary=summary, figures={"drafted": drafted, **counts.record()})
