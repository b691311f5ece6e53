"""Whatever a drafter does wrong, wherever it stands: no request is harmed, and what it did is counted."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from contract.harness import PROMPTS, VOCABULARY, Variant, as_prompts, llm, plain_greedy, relative
from contract.misbehaving import MISBEHAVIOURS, PROPERTIES, done
from forerun import LLM, SamplingParams
from forerun.control.policy import policy_for
from forerun.drafters import DRAFTERS, DrafterEntry
from forerun.engine import drafting
from forerun.errors import ArgumentError
from selection import slow

SAMPLED = SamplingParams(temperature=0.9, max_tokens=8, seed=3)
TOGETHER = 64
"""Misbehaviours that are tried in one engine, beside innocent requests."""


def _wrong(how: str) -> dict[str, Any]:
    return {"method": "misbehaving", "how": how}


FIXED = {"adaptive": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
SELDOM = {"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 6}
MODEL = {"method": "draft_model", "model": relative(), "num_speculative_tokens": 2}
CASCADE = {"method": "cascade", "model": relative(), "num_speculative_tokens": 3}
PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "alone": _wrong,
    "first_of-first": lambda how: {"method": "first_of", "drafters": [_wrong(how), NGRAM]},
    "first_of-last": lambda how: {"method": "first_of", "drafters": [SELDOM, _wrong(how)], "min_tokens": 2},
    "merge": lambda how: {"method": "merge", "drafters": [NGRAM, _wrong(how), MODEL], "greedy_with_seed": False},
    "cascade-tail": lambda how: {**CASCADE, "inner": _wrong(how), "tail": 2},
    "three-deep": lambda how: {
        "method": "first_of",
        "drafters": [{"method": "merge", "drafters": [{**CASCADE, "inner": _wrong(how)}, NGRAM]}, MODEL],
    },
    "adaptive": _wrong,
    "adaptive-copying": lambda how: {**_wrong(how), "method": "miscopying"},
    "auto": lambda how: {"method": "auto", "drafters": [_wrong(how)]},
}


MODELS = ("merge", "cascade-tail", "three-deep")
"""Where each drafter brings a model of its own: a fifth of the misbehaviours is tried."""
QUICK = ("alone", "three-deep", "auto")
CHOSEN = ("adaptive", "adaptive-copying", "auto")
"""Where a drafter that said something wrong of itself may never be asked for anything."""


Wished = tuple[str, Any, int, SamplingParams]
"""A request: its name, the configuration of its drafter, the index of its prompt, and its parameters."""


@dataclass
class Costs:
    """A pass over more tokens costs little more, so that a policy drafts."""

    drafts: dict[str, Any] = field(default_factory=dict)

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        return 1.0 + 0.01 * nodes


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The drafters are registered, and no policy looks at a clock."""
    path = "contract.misbehaving:Misbehaving"
    monkeypatch.setitem(DRAFTERS, "misbehaving", DrafterEntry(path=path, summary="of a test"))
    monkeypatch.setitem(DRAFTERS, "miscopying", DrafterEntry(path=path, summary="of a test", is_lookup=True))

    def controlled(*arguments: Any, **keywords: Any) -> Any:
        return policy_for(*arguments, **{**keywords, "costs": Costs()})

    monkeypatch.setattr(drafting, "policy_for", controlled)
    done.clear()
    yield


@dataclass
class Outcome:
    """What became of a number of misbehaviours in one place."""

    harmed: list[str] = field(default_factory=list)
    """Requests whose answer is not plain decoding's, or that got none."""
    uncounted: list[str] = field(default_factory=list)
    accused: list[str] = field(default_factory=list)
    """Requests of innocent drafters that counted a failure."""


def submitted(engine: LLM, wished: Sequence[Wished]) -> tuple[dict[str, Wished], Counter[str]]:
    """The requests by id, and how often each misbehaviour was refused: where a property of the drafter is invalid."""
    ids, refused = dict[str, Wished](), Counter[str]()
    for name, config, prompt, params in wished:
        try:
            request_id = engine.submit({"prompt_token_ids": PROMPTS[prompt]}, params, speculative=config)
        except ArgumentError as error:
            assert f"its property {name.split('-')[0]}: " in str(error)
            refused[name] += 1
        else:
            ids[request_id] = name, config, prompt, params
    return ids, refused


def tried(place: str, hows: Sequence[str]) -> Outcome:
    """Two requests of each misbehaviour, and innocent ones between them, in one engine."""
    engine, outcome = (
        llm(Variant("misbehaving", options={"how": "extend-raises-always"}), rows=TOGETHER, check=False),
        Outcome(),
    )
    bias, allowed = {3: 1.0}, list(range(VOCABULARY))
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logit_bias=bias, allowed_token_ids=allowed, logprobs=1)
    innocent: list[tuple[str, Any, SamplingParams]] = [
        ("ngram", FIXED | NGRAM, greedy),
        ("plain", False, greedy),
        ("model", FIXED | MODEL, greedy),
        ("seeded", FIXED | NGRAM, SAMPLED),
    ]
    expected = {"seeded": engine.generate(as_prompts(PROMPTS[2:3]), SAMPLED, speculative=False)[0].outputs[0].token_ids}
    wished: list[Wished] = []
    for how in hows:
        config = PLACES[place](how) | ({} if place in CHOSEN else FIXED)
        wished += [(how, config, 0, greedy), (how, config, 1, replace(greedy, max_tokens=5))]
        name, own, params = innocent[len(wished) // 2 % len(innocent)]
        wished.append((name, own, 2, params))
    ids, errors = submitted(engine, wished)
    for active in engine.engine.drafting._active.values():
        assert all(drafter.memory_bytes() >= 0 for _, drafter in [*active.drafters] * 3)
    for request_id, (name, _, prompt, params) in ids.items():
        answer = engine._wait(request_id).outputs[0]
        if answer.token_ids != expected.get(name, plain_greedy(PROMPTS[prompt], replace(params, logprobs=None))):
            outcome.harmed.append(name)
        if name in hows:
            errors[name] += answer.speculation.drafter_errors
        elif answer.speculation.drafter_errors:
            outcome.accused.append(name)
    for key, active in engine.engine.drafting._active.items():  # what failed when a row became free
        for how in hows:
            if f'"{how}"' in key:
                errors[how] += active.stats.drafter_errors
    wrong = [how for how in hows if how in done and not MISBEHAVIOURS[how].harmless]
    if place in CHOSEN:
        wrong = [how for how in wrong if not how.startswith(PROPERTIES)]
    outcome.uncounted = [how for how in wrong if not errors[how]]
    return outcome


def trial(place: str, hows: Sequence[str]) -> Outcome:
    """`tried`; where the engine itself failed, those that did it are found by halves."""
    try:
        return tried(place, hows)
    except Exception:
        if len(hows) == 1:
            return Outcome(harmed=[*hows, "everybody"])
    halves = [trial(place, half) for half in (hows[: len(hows) // 2], hows[len(hows) // 2 :])]
    return Outcome(
        harmed=[name for half in halves for name in half.harmed],
        uncounted=[name for half in halves for name in half.uncounted],
        accused=[name for half in halves for name in half.accused],
    )


@pytest.mark.parametrize("place", [*QUICK, *slow(*(place for place in PLACES if place not in QUICK))])
def test_nobody_is_harmed(place: str) -> None:
    names = list(MISBEHAVIOURS)[:: 5 if place in MODELS else 1]
    parts = [trial(place, names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER)]
    assert sorted({name for part in parts for name in part.harmed}) == []
    assert sorted({name for part in parts for name in part.accused}) == []
    assert sorted({name for part in parts for name in part.uncounted}) == []
    if place == "alone":
        assert sorted(set(names) - done) == sorted(f"{name}-raises-later" for name in PROPERTIES[:3]), "asked only once"
