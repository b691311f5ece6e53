"""Exact distributions of what the real engine emits in one step: every draw of the drafter, every draw of the rule.

A toy target in float64 over four tokens runs behind a real `LLM`. Its step is run once for every outcome of the
drafter's draws, from the policy's plan through composition, `admit` and the grammar to the rule that the engine chose;
there the rule and the cut at a stop token are run once for every outcome of theirs, and each result goes through the
engine's own `Completion`. What comes out, completed by the target where the answer goes on, must be the target's
distribution of whole answers. The reference is transformers' own: logits of a pass without a cache, temperature, top-p.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaForCausalLM, TemperatureLogitsWarper, TopPLogitsWarper

from contract.harness import Variant, remembered_distributions
from forerun import LLM, SamplingParams
from forerun.certify.enumeration import EnumeratingRng, outcomes
from forerun.control.policy import policy_for
from forerun.core.rng import Rng
from forerun.decode import step as stepping
from forerun.decode.row import Row
from forerun.decode.scores import Scores
from forerun.decode.step import Emitted, Verified
from forerun.engine import drafting
from forerun.engine.completion import Completion
from forerun.engine.grammar import GrammarProcessor, MaskBudget
from forerun.types import Source, StepTrace
from llamas import tiny_llama

VOCABULARY = 4
FIRST = 0
"""The first token of every answer: what comes after it is enumerated."""
TEMPERATURE, TOP_P = 0.8, 0.8
PROMPT = (1, 2, 0, 2, 1, 2, 0, 1, 2)
"""Its end occurred twice before, with different continuations: copying drafters draft a tree of two levels."""
GOES_ON = -1
MOST_OUTCOMES = 1500
"""Of a drafter's draws; a case that has more would take minutes."""

Answered = tuple[int, ...]


@functools.cache
def toy(seed: int = 4, noise: float = 0.0) -> LlamaForCausalLM:
    """A random Llama in float64 over four tokens; with `noise`, a relative of the one of that seed."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = tiny_llama(VOCABULARY, max_position_embeddings=64, **sizes).to(torch.float64)
    generator, other = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            shape = parameter.shape
            parameter.data = 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
            parameter.data += noise * torch.randn(shape, generator=other, dtype=torch.float64)
    return made


@functools.cache
def hybrid() -> Lfm2ForCausalLM:
    """A random LFM2 in float64 over four tokens: a short convolution, then attention."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = Lfm2Config(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes, **layers, **ends)
    made = Lfm2ForCausalLM(config).eval().to(torch.float64)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made


class ToyMatcher:
    """A grammar with llguidance's interface: the next token is never the sum of all so far, modulo the vocabulary."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def allowed(self, output: Sequence[int]) -> list[int]:
        return [token for token in range(VOCABULARY) if not output or token != sum(output) % VOCABULARY]

    def deep_copy(self) -> "ToyMatcher":
        return copy.deepcopy(self)

    def is_error(self) -> bool:
        return False

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        output = list(self.read)
        for count, token in enumerate(tokens):
            if token not in self.allowed(output):
                return count
            output.append(token)
        return len(tokens)

    def consume_token(self, token: int) -> bool:
        self.read.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self.read[len(self.read) - count :]

    def compute_bitmask(self) -> bytes:
        return bytes([sum(1 << token for token in self.allowed(self.read)), 0, 0, 0])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine, one request, and the step that is enumerated: the one after the first token."""

    variant: Variant
    prompt: tuple[int, ...] = PROMPT
    room: int = 4
    """Tokens that the answer may still get, `max_tokens` less one."""
    stop: int = 3
    """The token that ends the answer."""
    rule: str | None = None
    """Asked for by name."""
    grammar: bool = False
    controlled: bool = False
    hybrid: bool = False
    """Whether the target has a layer with recurrent state."""

    def __str__(self) -> str:
        named = {"novel": self.prompt != PROMPT, "grammar": self.grammar, "controlled": self.controlled}
        named["hybrid"] = self.hybrid
        marks = [*([self.rule] if self.rule else []), *(name for name, on in named.items() if on)]
        return "-".join([str(self.variant), f"room-{self.room}-stop-{self.stop}", *marks])

    def over(self, answer: Answered) -> bool:
        """Whether an answer, the first token left out, has to end there."""
        return len(answer) >= self.room or self.stop in answer

    def params(self) -> SamplingParams:
        grammar = (GrammarProcessor(ToyMatcher(), len(self.prompt), [self.stop], MaskBudget()),) if self.grammar else ()
        return SamplingParams(
            **{"temperature": TEMPERATURE, "top_p": TOP_P, "max_tokens": self.room + 1},
            **{"stop_token_ids": [self.stop], "logits_processors": grammar, "detokenize": False},
        )


@dataclass
class Found:
    """What one enumeration found."""

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


class _Draft:
    """The cost of a draft: next to nothing."""

    fixed_ms = level_ms = 0.0

    def ms(self, depth: int) -> float:
        return 0.0


@dataclass
class Free:
    """Costs by which drafting always pays, so that there is something to enumerate."""

    drafts: dict[str, Any] = field(default_factory=dict)

    def pass_ms(self, nodes: int, rows: int = 1, context: int = 0) -> float:
        return 1.0


def _policy_for(*args: Any, **options: Any) -> Any:
    policy = policy_for(*args, **{**options, "costs": Free()})
    policy.costs._drafts = defaultdict(_Draft)
    return policy


class _First(Rng):
    """Begins every answer with the same token."""

    def draw(self, probs: Tensor, depth: int = 0) -> int:
        return FIRST


class _Enumerated(Exception):
    """Ends a step when its verdicts have been enumerated."""


class Enumeration:
    """Runs a case's step for every outcome."""

    def __init__(self, case: Case, patch: pytest.MonkeyPatch) -> None:
        self.case = case
        self.found = Found()
        self.emitted: dict[Answered, float] = defaultdict(float)
        """Probability of what the answer holds after the step, the first token left out; ended ones marked by None."""
        self._rng: Rng = _First(0, 0)
        self._verify = stepping.verify
        options = {"adaptive": case.controlled, **case.variant.options}
        if case.controlled:
            patch.setattr(drafting, "policy_for", _policy_for)
        self.llm = LLM(
            hybrid() if case.hybrid else toy(),
            tokenizer=False,
            speculative_config={"method": case.variant.method, "rule": case.rule, **options},
            **{"max_num_seqs": 1, "max_model_len": 32, "self_check": False},
        )
        self.engine = self.llm.engine
        patch.setattr(Row, "rng", lambda row: self._rng)
        self._begin()
        self._freeze(patch)
        patch.setattr(stepping, "verify", self._every_verdict)

    def _begin(self) -> None:
        """Queue the request and run it to its first token."""
        self.llm.submit({"prompt_token_ids": list(self.case.prompt)}, self.case.params())
        request = next(iter(self.engine._requests.values()))
        (self.answer,) = request.completions
        while not self.answer.tokens:
            assert self.answer.row.error is None, self.answer.row.error
            self.engine.step()

    def _freeze(self, patch: pytest.MonkeyPatch) -> None:
        """Let every run of the step begin with the policys as they are now."""
        (active,) = self.engine.drafting._active.values()
        policy = active.policy
        if policy is None:
            return
        shared = {id(arm.drafter): arm.drafter for arm in policy.arms}
        shared |= {id(policy.costs): policy.costs}
        frozen, plan = copy.deepcopy(vars(policy), dict(shared)), policy.plan

        def planned(*args: Any, **more: Any) -> Any:
            vars(policy).update(copy.deepcopy(frozen, dict(shared)), plan=planned)
            return plan(*args, **more)

        patch.setattr(policy, "plan", planned)

    def run(self) -> Found:
        for _ in outcomes(self._step):
            self.found.drafts += 1
            assert self.found.drafts <= MOST_OUTCOMES, "too many outcomes: draft less"
        expected = answers_of(self.case)
        got: dict[Answered, float] = defaultdict(float)
        for tokens, chance in self._completed():
            got[tokens] += chance
        apart = [abs(got.get(one, 0.0) - expected.get(one, 0.0)) for one in got.keys() | expected.keys()]
        self.found.error, self.found.distance = max(apart), sum(apart) / 2
        return self.found

    def _step(self, rng: EnumeratingRng) -> None:
        """One run of the engine's step: all of it up to the verdicts."""
        self._rng = rng
        length = len(self.answer.row.tokens)
        with pytest.raises(_Enumerated):
            self.engine.step()
        assert len(self.answer.row.tokens) == length, "nothing was committed"

    def _every_verdict(self, row: Row, scores: Scores, index: int, *how: Any, **more: Any) -> Verified:
        if row is not self.answer.row:
            return self._verify(row, scores, index, *how, **more)  # an inner level, whose draws are draft draws
        drafting, tree = self._rng, scores.trees[index]
        assert isinstance(drafting, EnumeratingRng)
        self.found.shapes.add(tuple(tree.parents[1:]))
        self.found.depth = max(self.found.depth, *tree.depths)

        def verified(rng: EnumeratingRng) -> Verified:
            self._rng = rng
            return self._verify(row, scores, index, *how, **more)

        for one, chance in outcomes(verified):
            assert row.error is None
            self.found.rules.add(one.rule)
            self.found.cases += 1
            verdict = one.verdict
            self.found.accepted += drafting.probability * chance * len(verdict.path)
            tokens = (*(tree.tokens[node] for node in verdict.path), verdict.next_token)
            self.emitted[tokens] += drafting.probability * chance
        raise _Enumerated

    def _completed(self) -> Iterator[tuple[Answered, float]]:
        """What the engine makes of every block of tokens, and the target of the rest; `GOES_ON` where it should end."""
        for tokens, chance in self.emitted.items():
            answer, ended = self._taken_in(tokens)
            if ended or self.case.over(answer):
                yield answer if ended else (*answer, GOES_ON), chance
                continue
            for rest, further in answers_of(self.case, answer).items():
                yield rest, chance * further

    def _taken_in(self, tokens: Answered) -> tuple[Answered, bool]:
        """The tokens as the engine's own `Completion` takes them in: (what it then holds, whether it ended)."""
        answer = copy.copy(self.answer)
        answer.row, answer.tokens = copy.copy(answer.row), list(answer.tokens)
        answer.row.tokens = [*answer.row.tokens, *tokens]
        answer.text, answer.stats = copy.deepcopy(answer.text), copy.deepcopy(answer.stats)
        trace = StepTrace(
            **{"step": 0, "position": 0, "drafter": None, "rule": "", "nodes": (), "path": ()},
            **{"next_token": tokens[-1], "kind": Source.TARGET, "draft_ms": 0.0, "verify_ms": 0.0, "commit_ms": 0.0},
        )
        emitted = Emitted(
            **{"tokens": list(tokens), "sources": [Source.DRAFT] * len(tokens), "drafted": len(tokens)},
            **{"depth": len(tokens), "logprobs": None, "trace": trace},
        )
        Completion.append(answer, emitted)
        return tuple(token.id for token in answer.tokens[1:]), answer.finish_reason is not None


@functools.cache
def _next_token(prompt: tuple[int, ...], prefix: Answered, grammar: bool, mixed: bool) -> Tensor:
    """(V,) float64 after prompt and answer, by transformers alone."""
    with torch.inference_mode():
        logits = (hybrid() if mixed else toy())(torch.tensor([[*prompt, *prefix]])).logits[:, -1]
    if grammar:
        banned = [token for token in range(VOCABULARY) if token not in ToyMatcher().allowed(prefix)]
        logits = logits.index_fill(1, torch.tensor(banned, dtype=torch.int64), -torch.inf)
    ids = torch.zeros(1, 0, dtype=torch.int64)
    logits = TopPLogitsWarper(TOP_P)(ids, TemperatureLogitsWarper(TEMPERATURE)(ids, logits))
    return logits.softmax(-1)[0]


def answers_of(case: Case, begun: Answered = ()) -> dict[Answered, float]:
    """The target's distribution of whole answers behind the first token, given that they begin like `begun`."""
    found, growing = dict[Answered, float](), {begun: 1.0}
    while growing:
        going = dict[Answered, float]()
        for tokens, chance in growing.items():
            if case.over(tokens):
                found[tokens] = chance
                continue
            probs = _next_token(case.prompt, (FIRST, *tokens), case.grammar, case.hybrid)
            going |= {(*tokens, token): chance * float(probs[token]) for token in probs.nonzero().flatten().tolist()}
        growing = going
    return found


def enumerate_step(case: Case) -> Found:
    """The exact check of one case."""
    with remembered_distributions(rounded=False), pytest.MonkeyPatch.context() as patch:
        return Enumeration(case, patch).run()
