"""Exact distributions of what the real engine emits in one step: every draw of the drafter, every draw of the rule.

A toy target over a few tokens runs behind a real `LLM`. The step after the first token is run once for every outcome of
the drafter's draws, from the policy's plan through composition, `admit` and the grammar to the rule that the engine
chose; there the rule and the cut at a stop token are run once for every outcome of theirs, and each result goes through
the engine's own `Completion`. What comes out, completed by the target where the answer goes on, must be the target's
distribution of whole answers. The reference is transformers' own: logits of a pass without a cache, temperature, top-p.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from forerun.certify.enumeration import EnumeratingRng, outcomes
from forerun.core.rng import Rng
from forerun.decode import step as stepping
from forerun.decode.row import Row
from forerun.decode.step import Emitted, Verified
from forerun.engine.completion import Completion
from forerun.types import SamplingParams, Source, StepTrace

if TYPE_CHECKING:
    from forerun.decode.scores import Scores

MOST_OUTCOMES = 1500  # Of a drafter's draws; a case that has more would take minutes
_GOES_ON = -1  # Stands behind an answer that should have ended

Answer = tuple[int, ...]


class TooManyOutcomes(Exception):
    """A drafter draws so much that enumerating it would take minutes."""


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """One engine and one request, whose step after the first token is enumerated."""

    target: Any
    """A model of transformers' with a vocabulary of a few tokens."""
    config: Mapping[str, Any]
    """The drafter as `LLM` takes it."""
    prompt: tuple[int, ...]
    params: SamplingParams
    """Temperature, top-p and stop tokens are used, and processors that `banned` knows of."""
    room: int
    """Tokens that the answer may get behind the first one."""
    first: int = 0
    """The first token of every answer: what comes after it is enumerated."""
    banned: Callable[[Answer], Sequence[int]] = lambda _: ()
    """Returns the tokens that the processors ban behind an answer."""

    def over(self, answer: Answer) -> bool:
        """Return whether an answer, the first token left out, has to end there."""
        stops = self.params.stop_token_ids or ()
        return len(answer) >= self.room or any(stop in answer for stop in stops)


@dataclass
class Found:
    """The findings of one enumeration."""

    error: float = 0.0
    """Largest difference of an answer's probability from the target's."""
    distance: float = 0.0
    """Total variation between what came out and the target's distribution."""
    drafts: int = 0
    """Outcomes of the drafter's draws."""
    cases: int = 0
    """Outcomes of drafter and rule together."""
    rules: set[str] = field(default_factory=set)
    shapes: set[tuple[int, ...]] = field(default_factory=set)
    """Parents of the trees that were verified."""
    depth: int = 0
    accepted: float = 0.0
    """Expected accepted nodes."""


class _First(Rng):
    """Begins every answer with the same token."""

    def __init__(self, token: int) -> None:
        super().__init__(seed=0, position=0)
        self._token = token

    def draw(self, probs: Tensor, depth: int = 0) -> int:
        return self._token


class _Enumerated(Exception):
    """Ends a step when its verdicts have been enumerated."""


class StepEnumeration:
    """Runs a case's step for every outcome."""

    def __init__(self, case: StepCase, *, fresh: bool = False) -> None:
        """Prepare a case. `fresh`: every outcome gets an engine and a drafter of its own, so that a drafter may also
        change its state in `propose`.
        """
        self.case, self.found, self._fresh = case, Found(), fresh
        self.emitted: dict[Answer, float] = defaultdict(float)
        """Probability of what the answer holds after the step, the first token left out."""
        self._rng: Rng = _First(case.first)
        self._verify = stepping.verify
        self._probs = dict[Answer, Tensor]()

    def run(self, most: int = MOST_OUTCOMES) -> Found:
        """Enumerate the step. Raises TooManyOutcomes if the drafter's draws have more than `most` outcomes."""
        with (
            patch.object(Row, "rng", lambda _: self._rng),
            patch.object(stepping, "verify", self._every_verdict),
        ):
            if not self._fresh:
                self.begin()
            for _ in outcomes(self._step):
                self.found.drafts += 1
                if self.found.drafts > most:
                    raise TooManyOutcomes(f"more than {most} outcomes: draft less")
        expected = self.answers()
        got: dict[Answer, float] = defaultdict(float)
        for tokens, chance in self._completed():
            got[tokens] += chance
        apart = [abs(got.get(one, 0.0) - expected.get(one, 0.0)) for one in got.keys() | expected.keys()]
        self.found.error, self.found.distance = max(apart), sum(apart) / 2
        return self.found

    def begin(self) -> None:
        """Make an engine, queue the request and run it to its first token."""
        from forerun import LLM

        self._rng = _First(self.case.first)
        self.llm = LLM(
            self.case.target,
            tokenizer=False,
            speculative_config={"adaptive": False, **self.case.config},
            max_num_seqs=1,
            max_model_len=32,
            self_check=False,
        )
        self.engine = self.llm.engine
        params = replace(self.case.params, max_tokens=self.case.room + 1)
        self.llm.submit({"prompt_token_ids": list(self.case.prompt)}, params)
        request = next(iter(self.engine._requests.values()))
        (self.answer,) = request.completions
        while not self.answer.tokens:
            if self.answer.row.error is not None:
                raise self.answer.row.error
            self.engine.step()

    def _step(self, rng: EnumeratingRng) -> None:
        """One run of the engine's step: all of it up to the verdicts."""
        if self._fresh:
            self.begin()
        self._rng = rng
        length = len(self.answer.row.tokens)
        with suppress(_Enumerated):
            self.engine.step()
        assert len(self.answer.row.tokens) == length, "nothing was committed"

    def _every_verdict(self, row: Row, scores: Scores, index: int, *how: Any, **more: Any) -> Verified:
        drafting = self._rng
        if not isinstance(drafting, EnumeratingRng) or row is not self.answer.row:
            return self._verify(row, scores, index, *how, **more)  # an inner level, whose draws are draft draws
        tree = scores.trees[index]
        self.found.shapes.add(tuple(tree.parents[1:]))
        self.found.depth = max(self.found.depth, *tree.depths)

        def verified(rng: EnumeratingRng) -> Verified:
            self._rng = rng
            return self._verify(row, scores, index, *how, **more)

        for one, chance in outcomes(verified):
            if row.error is not None:
                raise row.error
            self.found.rules.add(one.rule)
            self.found.cases += 1
            verdict = one.verdict
            self.found.accepted += drafting.probability * chance * len(verdict.path)
            tokens = (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
            self.emitted[tokens] += drafting.probability * chance
        raise _Enumerated

    def _completed(self) -> Iterator[tuple[Answer, float]]:
        """Yield what the engine makes of every block of tokens, and the target of the rest; with `_GOES_ON` where the
        answer should have ended.
        """
        for tokens, chance in self.emitted.items():
            answer, ended = self._taken_in(tokens)
            if ended or self.case.over(answer):
                yield answer if ended else (*answer, _GOES_ON), chance
                continue
            for rest, further in self.answers(answer).items():
                yield rest, chance * further

    def _taken_in(self, tokens: Answer) -> tuple[Answer, bool]:
        """The tokens as the engine's own `Completion` takes them in: (what it then holds, whether it ended)."""
        answer = copy.copy(self.answer)
        answer.row, answer.tokens = copy.copy(answer.row), list(answer.tokens)
        answer.row.tokens = [*answer.row.tokens, *tokens]
        answer.text, answer.stats = copy.deepcopy(answer.text), copy.deepcopy(answer.stats)
        trace = StepTrace(
            step=0,
            position=0,
            drafter=None,
            rule="",
            nodes=(),
            path=(),
            next_token=tokens[-1],
            kind=Source.TARGET,
            draft_ms=0.0,
            verify_ms=0.0,
            commit_ms=0.0,
        )
        emitted = Emitted(
            tokens=list(tokens),
            sources=[Source.DRAFT] * len(tokens),
            drafted=len(tokens),
            depth=len(tokens),
            logprobs=None,
            trace=trace,
        )
        Completion.append(answer, emitted)
        return tuple(token.id for token in answer.tokens[1:]), answer.finish_reason is not None

    # --- the reference ------------------------------------------------------------------------------------------------

    def answers(self, begun: Answer = ()) -> dict[Answer, float]:
        """The target's distribution of whole answers behind the first token, given that they begin like `begun`."""
        found, growing = dict[Answer, float](), {begun: 1.0}
        while growing:
            going = dict[Answer, float]()
            for tokens, chance in growing.items():
                if self.case.over(tokens):
                    found[tokens] = chance
                    continue
                probs = self._next_token(tokens)
                likely = probs.nonzero().flatten().tolist()
                going |= {(*tokens, token): chance * float(probs[token]) for token in likely}
            growing = going
        return found

    def _next_token(self, answer: Answer) -> Tensor:
        """(V,) after prompt and answer, by transformers alone."""
        if answer not in self._probs:
            from transformers import TemperatureLogitsWarper, TopPLogitsWarper

            params, prefix = self.case.params, (self.case.first, *answer)
            with torch.inference_mode():
                logits = self.case.target(torch.tensor([[*self.case.prompt, *prefix]])).logits[:, -1].double()
            banned = torch.tensor(list(self.case.banned(prefix)), dtype=torch.int64)
            logits, ids = logits.index_fill(1, banned, -torch.inf), torch.zeros(1, 0, dtype=torch.int64)
            warped = TopPLogitsWarper(params.top_p)(ids, TemperatureLogitsWarper(params.temperature)(ids, logits))
            self._probs[answer] = warped.softmax(-1)[0]
        return self._probs[answer]
