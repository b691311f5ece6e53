"""Exact distributions of what the real engine emits in one step (`forerun.certify.steps`), for the cases of the tests.

Targets in float64 over four tokens, a grammar, a target with recurrent state, and drafting under control.
"""

import copy
import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaForCausalLM

from contract.harness import Variant, remembered_distributions
from forerun import SamplingParams
from forerun.certify.steps import Answer, Found, StepCase, StepEnumeration
from forerun.control.policy import policy_for
from forerun.engine import drafting
from forerun.engine.grammar import GrammarProcessor, MaskBudget
from llamas import tiny_llama

VOCABULARY = 4
FIRST = 0
"""The first token of every answer."""
TEMPERATURE, TOP_P = 0.8, 0.8
PROMPT = (1, 2, 0, 2, 1, 2, 0, 1, 2)
"""Its end occurred twice before, with different continuations: copying drafters draft a tree of two levels."""


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

    def params(self) -> SamplingParams:
        grammar = (GrammarProcessor(ToyMatcher(), len(self.prompt), [self.stop], MaskBudget()),) if self.grammar else ()
        return SamplingParams(
            **{
                "temperature": TEMPERATURE,
                "top_p": TOP_P,
            },
            **{"stop_token_ids": [self.stop], "logits_processors": grammar, "detokenize": False},
        )

    def banned(self, answer: Answer) -> Sequence[int]:
        allowed = ToyMatcher().allowed(answer) if self.grammar else range(VOCABULARY)
        return [token for token in range(VOCABULARY) if token not in allowed]

    def step(self) -> StepCase:
        options = {"rule": self.rule, "adaptive": self.controlled, **self.variant.options}
        config = {"method": self.variant.method, **options}
        target = hybrid() if self.hybrid else toy()
        return StepCase(
            **{"target": target, "config": config, "prompt": self.prompt, "room": self.room, "first": FIRST},
            **{"params": self.params(), "banned": self.banned},
        )


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


class Controlled(StepEnumeration):
    """An enumeration in which every run of the step begins with the policy as it is after the first token."""

    def begin(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(drafting, "policy_for", _policy_for)
            super().begin()
        (active,) = self.engine.drafting._active.values()
        policy = active.policy
        assert policy is not None
        shared = {id(arm.drafter): arm.drafter for arm in policy.arms}
        shared |= {id(policy.costs): policy.costs}
        frozen, plan = copy.deepcopy(vars(policy), dict(shared)), policy.plan

        def planned(*args: Any, **more: Any) -> Any:
            vars(policy).update(copy.deepcopy(frozen, dict(shared)), plan=planned)
            return plan(*args, **more)

        vars(policy)["plan"] = planned


def enumerate_step(case: Case) -> Found:
    """The exact check of one case."""
    with remembered_distributions(rounded=False):
        return (Controlled if case.controlled else StepEnumeration)(case.step()).run()
