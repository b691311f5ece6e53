"""A trial lets a head draft in its engine and here, for the same prompts, and compares what both
accept.

What an engine makes of a head's files can be read (`forerun.heads`), but a head that is
loaded wrongly may draft without an error, and in vain. An engine of this machine is an
`InstalledEngine`: ``try_vllm.py``, ``try_llama_cpp.py``.

**Noise.** What is accepted at a position is k successes in the n drafts that reached so far. Both
engines' counts are compared by Fisher's exact test, which assumes that both are binomial with the
same unknown rate; steps of one text are not independent, so agreement step by step is counted too
wherever both engines draft the same length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from forerun.control.config import SpeculativeConfig
from forerun.deploy.launch import DRAFTS_TREES, EngineWriter, same_place
from forerun.engine.llm import LLM
from forerun.errors import ArgumentError
from forerun.params import SamplingParams
from forerun.plan.measured import EncodedPrompts
from forerun.plan.prompts import UserPrompt
from forerun.types import CompletionOutput

ROWS = 4
"""This many answers run at once, here and there."""
TOLERATED = 0.02
"""Smaller differences in acceptance at a position are not reported."""
SIGNIFICANCE = 0.01
"""This is the chance of a false alarm, for all positions of an arm together."""
SAME_STEPS = 0.98
"""At least this share of the comparable steps must accept as many tokens where both engines run the
same drafter.
"""


class RefusedError(Exception):
    """An engine did not load the head, or stopped; the message is the engine's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialAnswer:
    """One completion with its speculative steps, in order; steps without a draft are not among them."""

    token_ids: list[int]
    text: str
    drafted: list[int]  # Tokens of each step's chain
    accepted: list[int]  # How many of them were accepted


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Counts of what each engine accepted at one position of the chain, of the drafts that reached so far."""

    arm: str
    index: int  # 0 is the first drafted token
    accepted: tuple[int, int]  # Ours, theirs
    drafted: tuple[int, int]  # Ours, theirs

    @property
    def chance(self) -> float:
        """Return the p-value: how likely counts at least this far apart are if both rates are the
        same.
        """
        return fisher(self.accepted, self.drafted)

    @property
    def rates(self) -> tuple[float, float]:
        """Return the accepted shares, ours and theirs; 0 where nothing was drafted."""
        ours, theirs = (kept / max(1, tried) for kept, tried in zip(self.accepted, self.drafted, strict=True))
        return ours, theirs


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSteps:
    """Counts of the steps that both engines began at the same place of a text with room for a whole draft."""

    same: int  # Compared steps at which both accepted the same number of tokens
    compared: int

    @property
    def agree(self) -> bool:
        """Return whether there were any, and all but a few ties are the same."""
        return self.compared > 0 and self.same >= SAME_STEPS * self.compared


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadDrafting:
    """The drafting that is tried: greedy chains of `k` tokens, the same at every step."""

    head: str  # Its directory
    kind: str
    target: str  # Directory or hub id
    k: int

    @property
    def config(self) -> SpeculativeConfig:
        """Return the same drafter as forerun's configuration."""
        return SpeculativeConfig(method=self.kind, num_speculative_tokens=self.k, options={"model": self.head})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPrompts:
    """The prompts that an engine is to complete, greedily."""

    prompts: Sequence[list[int]]
    tokens: int  # Tokens of each completion
    dtype: str  # Dtype of the target: float32, float16 or bfloat16
    room: int  # Tokens of the longest text, with what may be drafted behind it


def refuse_apart(drafting: HeadDrafting, engine: type[EngineWriter]) -> None:
    """Raise ArgumentError for layers that lie apart from the target in whose checkpoint the engine
    reads them.
    """
    way = engine.ways.get(drafting.kind)
    if way is not None and not way.model and not same_place(drafting.head, drafting.target):
        raise ArgumentError(
            f"{engine.title} reads {drafting.kind} layers in the target's own checkpoint: forerun export "
            f"{drafting.head} --to {engine.reads} --target {drafting.target} --output DIR, then name DIR as both"
        )


class InstalledEngine(ABC):
    """An engine of this machine, which drafts with a head."""

    title: ClassVar[str]

    def __init__(self, drafting: HeadDrafting, version: str) -> None:
        self.drafting, self.version = drafting, version
        self.notes = list[str]()
        """Observations beside the completions."""

    @abstractmethod
    def answers(self, question: TrialPrompts) -> list[TrialAnswer]:
        """Answer in the order of the prompts, with the outcome of every draft.

        A completion that ends by itself may be shorter than requested.

        Raises:
            RefusedError: it does not draft with this head.
            ForerunError: it died without a word, or lacks what it needs.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTrial:
    """The result; of two numbers the first is forerun's, the second the engine's."""

    engine: str
    version: str
    refused: str = ""  # Refusal in the engine's words; empty where it drafted
    positions: Sequence[Position] = ()  # Positions of the drafted chain; empty if refused
    lengths: tuple[float, float] = (0.0, 0.0)  # Tokens of a step, the target's own included
    steps: ComparedSteps = field(default_factory=lambda: ComparedSteps(same=0, compared=0))
    parted: int = 0  # Answers of the engine that are not our plain ones
    notes: Sequence[str] = ()

    @property
    def worse(self) -> list[Position]:
        """Return the positions where the engine accepts less, by more than noise and `TOLERATED`."""
        limit = bound(self.positions)
        return [one for one in self.positions if one.rates[0] - one.rates[1] > TOLERATED and one.chance < limit]

    def as_json(self) -> dict[str, Any]:
        """Return the counts, forerun's first, and the conclusions."""
        return {**asdict(self), "worse": [one.index for one in self.worse], "good": self.good}

    @property
    def good(self) -> bool:
        """Return whether the head drafts there as it does here."""
        return not self.refused and not self.worse


def run_trial(engine: InstalledEngine, *, prompts: Sequence[UserPrompt], tokens: int, dtype: str) -> EngineTrial:
    """Draft with a head here, then in its engine, and compare.

    Args:
        prompts: texts, or conversations.
        tokens: of each completion.
        dtype: of the target in both.

    Raises:
        ForerunError: the engine died without a word, or lacks what it needs.
    """
    drafting = engine.drafting
    kind, k = drafting.kind, drafting.k
    chain = {"shape": [1] * k} if kind in DRAFTS_TREES else {}
    llm = LLM(drafting.target, dtype=dtype, max_num_seqs=ROWS)
    asked = EncodedPrompts.of(llm, prompts, temperature=0.0, max_tokens=tokens, limit=len(prompts))
    encoded = [list(prompt) for prompt in asked.prompts]
    plain = answer_prompts(llm, encoded, tokens, False)
    ours = answer_prompts(
        llm, encoded, tokens, {**drafting.config.drafter_options, **chain, "method": kind, "adaptive": False}
    )
    shown = llm.target.dtype_name
    del llm  # before the engine wants the same memory
    _free_memory()
    room = max(map(len, encoded)) + tokens + k + 1
    try:
        theirs = engine.answers(TrialPrompts(prompts=encoded, tokens=tokens, dtype=shown, room=room))
    except RefusedError as error:
        return EngineTrial(engine=engine.title, version=engine.version, refused=str(error), notes=engine.notes)
    return EngineTrial(
        engine=engine.title,
        version=engine.version,
        positions=count_positions(kind, ours, theirs, k),
        lengths=(mean_length(ours), mean_length(theirs)),
        steps=compare_steps(ours, theirs, k),
        parted=sum(not _begins(text, other) for text, other in zip(plain, theirs, strict=True)),
        notes=engine.notes,
    )


def fisher(right: tuple[int, int], tried: tuple[int, int]) -> float:
    """Return the p-value of Fisher's exact test, two-sided, for so many successes out of those
    tried in two samples.
    """
    (one, other), both = tried, sum(right)
    weights = {
        k: math.comb(one, k) * math.comb(other, both - k) for k in range(max(0, both - other), min(one, both) + 1)
    }
    return sum(weight for weight in weights.values() if weight <= weights[right[0]]) / sum(weights.values())


def count_positions(
    arm: str, ours: Sequence[TrialAnswer], theirs: Sequence[TrialAnswer], length: int
) -> list[Position]:
    """Count both engines' drafts at each of the `length` positions of a chain."""
    return [
        Position(
            arm=arm,
            index=index,
            accepted=(_count(ours, index, "accepted"), _count(theirs, index, "accepted")),
            drafted=(_count(ours, index, "drafted"), _count(theirs, index, "drafted")),
        )
        for index in range(length)
    ]


def compare_steps(ours: Sequence[TrialAnswer], theirs: Sequence[TrialAnswer], length: int) -> ComparedSteps:
    """Count the steps at which both engines accept the same number of tokens.

    It is only for drafters that always draft `length` tokens: then the place of a step follows from
    the steps before. A completion is followed up to the first step where the two differ, or where the
    end of the completion shortens our draft.
    """
    same = compared = 0
    for mine, other_step in zip(ours, theirs, strict=True):
        whole = len(list(takewhile(lambda drafted: drafted == length, mine.drafted)))
        pairs = list(zip(mine.accepted[:whole], other_step.accepted, strict=False))
        equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        same += equal
        compared += min(equal + 1, len(pairs))
    return ComparedSteps(same=same, compared=compared)


def mean_length(answers: Sequence[TrialAnswer]) -> float:
    """Return the mean tokens of a step that drafted, the target's own included."""
    steps = [kept for answer in answers for kept in answer.accepted]
    return 1 + sum(steps) / max(1, len(steps))


def bound(lines: Sequence[Position]) -> float:
    """Return the p-value below which a position's difference is no noise: `SIGNIFICANCE`, shared
    out among all lines.
    """
    return SIGNIFICANCE / max(1, len(lines))


def _count(answers: Sequence[TrialAnswer], index: int, name: str) -> int:
    return sum(length > index for answer in answers for length in getattr(answer, name))


def answer_prompts(
    llm: LLM, prompts: Sequence[Sequence[int]], tokens: int, speculative: Any, salt: str | None = None
) -> list[TrialAnswer]:
    """Return forerun's greedy completions of `tokens` tokens, with the outcome of every draft.

    Nothing learned under another `salt` is used.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, params, speculative=speculative, trace=True, cache_salt=salt)
    return [_answer(one.outputs[0]) for one in outputs]


def last_lines(logs: Iterable[Path], count: int = 12) -> str:
    """Return the last lines of a process's logs."""
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-count:])


def _begins(plain: TrialAnswer, other: TrialAnswer) -> bool:
    """Return whether `other`, which may have ended by itself, is the plain completion as far as it
    goes.
    """
    return bool(other.token_ids) and plain.token_ids[: len(other.token_ids)] == other.token_ids


def _answer(output: CompletionOutput) -> TrialAnswer:
    steps = [step for step in output.trace if step.nodes]
    return TrialAnswer(
        token_ids=list(output.token_ids),
        text=output.text,
        drafted=[len(step.nodes) for step in steps],
        accepted=[len(step.path) for step in steps],
    )


def _free_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
