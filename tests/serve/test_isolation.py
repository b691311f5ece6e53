"""A fault of one request, injected wherever something is done for one request alone: it ends that request and no other.

Over HTTP, at the server as it is run: while the others are answered, one request meets the fault. Theirs must be the
answers of a run without it.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import Tensor

from forerun.core import rules
from forerun.core.sampling import Sampler
from forerun.decode import scores, step
from forerun.decode.scores import logprobs_of
from forerun.engine import scheduling
from forerun.engine.completion import Completion, Request
from forerun.engine.core import Engine
from forerun.engine.grammar import GrammarProcessor
from forerun.serve.completing import CompletionWriter
from serve.conftest import Live, sent, serving, wait_for

MARK = 17
"""Log-probabilities that only the request with the fault asks for."""
SAMPLED, COPIED, PLAIN = {"drafter": "draft_model"}, {"drafter": "ngram"}, {"enabled": False}
FAULTY = {"prompt": "the dog and the dog", "max_tokens": 8, "ignore_eos": True, "seed": 7, "user": "faulty"}
INNOCENT: list[dict[str, Any]] = [
    {"prompt": "on the log the cat", "seed": 3, "stream": True, "speculative": SAMPLED},
    {"prompt": "the cat the cat", "temperature": 0, "presence_penalty": 0.5, "speculative": COPIED},
    {"prompt": "a mat", "seed": 4, "top_p": 0.9, "stop": ["sat on"], "logprobs": 2, "speculative": PLAIN},
]
"""What they get under a seed depends on their drafts, too: one that lost its draft would show it."""


class Panic(BaseException):
    """As the libraries written in Rust raise: no `Exception`."""


class Fault:
    """Raises at its `after`-th call and at all later ones; until then it does what it stands in for."""

    def __init__(self, error: BaseException, after: int) -> None:
        self.error, self.left = error, after

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.left <= 0:
            raise self.error
        self.left -= 1

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            self()
            return function(*args, **keywords)

        return called


def with_processor(answer: Completion, processor: Callable[[Sequence[int], Tensor], Any]) -> None:
    """The row's sampler, with one more processor."""
    old = answer.row.sampler
    params = dataclasses.replace(old.params, logits_processors=(*old.params.logits_processors, processor))
    answer.row.sampler = Sampler(params, old.prompt, banned_until_min=old.banned_until_min, bad_words=old.bad_words)


def at(place: str, name: str, *, at_once: bool = False) -> Callable[[Completion, Fault], None]:
    """In one of the methods of what an answer consists of."""

    def sabotage(answer: Completion, fault: Fault) -> None:
        part = attrgetter(place)(answer)
        fault.left = 0 if at_once else fault.left
        setattr(part, name, fault.before(getattr(part, name)))

    return sabotage


def in_a_callable(answer: Completion, fault: Fault) -> None:
    with_processor(answer, fault.before(lambda tokens, logits: logits))


def in_its_result(wrong: Callable[[Tensor], Any]) -> Callable[[Completion, Fault], None]:
    """What a callable gives back in place of logits."""

    def sabotage(answer: Completion, fault: Fault) -> None:
        def process(tokens: Sequence[int], logits: Tensor) -> Any:
            fault.left -= 1
            return logits if fault.left >= 0 else wrong(logits)

        with_processor(answer, process)

    return sabotage


NO_TENSOR = in_its_result(lambda logits: None)
TOO_WIDE = in_its_result(lambda logits: logits.new_ones(len(logits) + 64).cumsum(0))


class Matcher:
    """llguidance's, with the fault in one of its methods."""

    def __init__(self, fault: Fault, method: str, length: int) -> None:
        self._length = length
        setattr(self, method, fault.before(getattr(self, method)))

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def consume_token(self, token: int) -> None: ...

    def rollback(self, count: int) -> None: ...

    def compute_bitmask(self) -> bytes:
        return b"\xff" * self._length


def in_grammar(method: str) -> Callable[[Completion, Fault], None]:
    def sabotage(answer: Completion, fault: Fault) -> None:
        matcher = Matcher(fault, method, 64)
        with_processor(answer, GrammarProcessor(matcher, answer.row.prompt_length, [0]))

    return sabotage


class Text:
    """A `CompletionText` that fails in one place."""

    def __init__(self, whole: Any, **faults: Callable[..., Any]) -> None:
        self._whole, self._faults = whole, faults

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._whole, name)
        return self._faults[name].before(found) if name in self._faults else found


def in_text(name: str) -> Callable[[Completion, Fault], None]:
    def sabotage(answer: Completion, fault: Fault) -> None:
        answer.text = Text(answer.text, **{name: fault})

    return sabotage


class Ends(frozenset[int]):
    """Stop token ids that cannot be asked."""

    fault: Fault

    def __contains__(self, token: object) -> bool:
        self.fault()
        return super().__contains__(token)


def in_stop_tokens(answer: Completion, fault: Fault) -> None:
    answer.row.stop_ids = ends = Ends(answer.row.stop_ids)
    ends.fault = fault


def in_rule(answer: Completion, fault: Fault) -> None:
    answer.row.rule = "faulty"
    Rule.fault = fault


class Rule:
    """Walks, until it meets the fault."""

    name, lossless, summary, fault = "faulty", True, "", Fault(AssertionError(), 0)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: True

    def verify(self, *args: Any) -> Any:
        self.fault()
        return rules.rule_named("sample_walk").verify(*args)


def in_output(answer: Completion, fault: Fault) -> None:
    fault.left = 0
    answer.stats = answer.traces = None
    answer.request.output = fault


def at_submission(answer: Completion, fault: Fault) -> None:
    """Before it is queued, as a tokenizer or the compiler of a grammar may."""
    raise fault.error


def nowhere(answer: Completion, fault: Fault) -> None: ...


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the fault is, and what the request must ask for to come by."""

    sabotage: Callable[[Completion, Fault], None]
    asks: dict[str, Any] = dataclasses.field(default_factory=dict)


PLACES = {
    "distribution": Place(at("row.sampler", "probs")),
    "processing, greedy": Place(at("row.sampler", "_penalise"), {"temperature": 0, "presence_penalty": 1}),
    "processing, sampled": Place(at("row.sampler", "_penalise"), {"presence_penalty": 1}),
    "user callable": Place(in_a_callable),
    "user callable, greedy": Place(in_a_callable, {"temperature": 0}),
    "result of a user callable": Place(NO_TENSOR),
    "width of a user callable's result": Place(TOO_WIDE),
    "width of a user callable's result, greedy": Place(TOO_WIDE, {"temperature": 0}),
    "grammar, mask": Place(in_grammar("compute_bitmask")),
    "grammar, draft": Place(in_grammar("validate_tokens")),
    "grammar, reading": Place(in_grammar("consume_token")),
    "detokenizer": Place(at("detokenizer", "add")),
    "detokenizer, last character": Place(at("detokenizer", "flush", at_once=True)),
    "detokenizer, time is up": Place(at("detokenizer", "flush", at_once=True), {"timeout_s": 0.02, "max_tokens": 150}),
    "stop strings": Place(in_text("add"), {"stop": ["zz"]}),
    "text held back": Place(in_text("release"), {"stop": ["zz"]}),
    "stop tokens": Place(in_stop_tokens),
    "rule": Place(in_rule, {"speculative": SAMPLED}),
    "log-probabilities": Place(nowhere, {"logprobs": MARK}),
    "log-probabilities of several": Place(nowhere, {"logprobs": MARK, "n": 2}),
    "trace": Place(nowhere, {"return_speculation_trace": True}),
    "output": Place(in_output),
    "streaming": Place(nowhere, {"stream": True}),
    "submission": Place(at_submission),
}
ERRORS: list[Callable[[str], BaseException]] = [RuntimeError, StopIteration, Panic]


@pytest.fixture(scope="module")
def wide(checkpoint: Path, draft_checkpoint: Path) -> Iterator[Live]:
    """A server on which several drafters may be asked for."""
    drafter = {"method": "draft_model", "model": str(draft_checkpoint), "num_speculative_tokens": 4}
    with serving(
        checkpoint, speculative=drafter, client_drafters=("ngram",), max_n=3, max_tokens=150, allow_traces=True
    ) as running:
        yield running


class Injector:
    """Puts one fault at a time into the requests of the user "faulty"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self.fault, self.met = Place(nowhere), Fault(AssertionError(), 1 << 30), False
        add, events = Engine.add, CompletionWriter.events

        def sabotaging(engine: Engine, request: Request) -> None:
            for answer in request.completions if request.user == "faulty" else ():
                self.place.sabotage(answer, self.fault)
            add(engine, request)

        def marked(logits: Tensor, tokens: list[int], top: int) -> Any:
            if top == MARK:
                self.fault()
            return logprobs_of(logits, tokens, top)

        def traced(*args: Any) -> Any:
            self.fault()
            return trace(*args)

        def written(writer: CompletionWriter, tagged: Any) -> Any:
            if writer.body.user == "faulty":
                self.fault()
            return events(writer, tagged)

        trace = step._traced_nodes
        monkeypatch.setattr(Engine, "add", sabotaging)
        monkeypatch.setattr(scores, "logprobs_of", marked)
        monkeypatch.setattr(scheduling, "logprobs_of", marked)
        monkeypatch.setattr(step, "_traced_nodes", traced)
        monkeypatch.setattr(CompletionWriter, "events", written)
        monkeypatch.setitem(rules.RULES, "faulty", Rule)

    def inject(self, place: Place, error: BaseException, after: int) -> None:
        self.place, self.fault = place, Fault(error, after)


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Injector:
    return Injector(monkeypatch)


def ask(client: httpx.Client, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and what was said: the choices, numbers to three digits, or the error; of a stream the text or error."""
    answer = client.post("/v1/completions", json={"max_tokens": 8, "ignore_eos": True, **body})
    if not body.get("stream"):
        found = json.loads(answer.text, parse_float=lambda number: f"{float(number):.3f}")
        return answer.status_code, found.get("choices") or found["error"]
    events = sent(answer.text)
    if any("error" in event for event in events):
        return 500, events[-1]["error"]
    return answer.status_code, "".join(choice["text"] for event in events for choice in event["choices"])


@pytest.mark.parametrize("speculative", [SAMPLED, COPIED, PLAIN], ids=str)
def test_a_fault_ends_its_own_request(wide: Live, injector: Injector, speculative: dict[str, Any]) -> None:
    harmed, missed = [], []
    with httpx.Client(base_url=wide.url, timeout=30) as client, ThreadPoolExecutor(4) as threads:

        def together(bodies: Sequence[dict[str, Any]]) -> list[tuple[int, Any]]:
            return list(threads.map(partial(ask, client), bodies))

        undisturbed = together(INNOCENT)
        assert [status for status, _ in undisturbed] == [200] * len(INNOCENT)
        for number, (name, place) in enumerate(PLACES.items()):
            injector.inject(place, ERRORS[number % len(ERRORS)]("boom"), after=number % 4)
            [own, *others] = together([{**FAULTY, "speculative": speculative, **place.asks}, *INNOCENT])
            if own[0] not in (400, 500) or "boom" in str(own[1]):
                missed.append((name, own))
            if others != undisturbed:
                harmed.append((name, others))
        assert not missed, "the fault was not met, or the client was told of its inside"
        assert not harmed
        wait_for(lambda: wide.session.in_flight == 0 and not wide.llm.engine.busy)
        assert together(INNOCENT) == undisturbed
