"""Did every arm of forerun give the same text as plain decoding, and did transformers? Differences must be ties.

Knows runs and the engine. Does not time anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.suite.arms import Run
from forerun import LLM, SamplingParams
from forerun.certify.reference import difference, first_difference


@dataclass(frozen=True, kw_only=True, slots=True)
class TextComparison:
    """One arm's greedy answers beside forerun's plain ones."""

    arm: str
    answers: int
    identical: int
    ties: int
    """Answers that part at a numeric tie; after it two texts may be anything."""

    @property
    def unexplained(self) -> int:
        """Answers that differ and should not."""
        return self.answers - self.identical - self.ties


def compare_texts(
    llm: LLM, prompts: Sequence[Sequence[int]], runs: Sequence[Run], plain: str = "forerun plain"
) -> list[TextComparison]:
    """Every other arm's greedy answers against those of `plain`."""
    expected = {run.prompt: run.tokens for run in runs if run.arm == plain}
    lines = []
    for arm in dict.fromkeys(run.arm for run in runs if run.arm != plain):
        answers = [run for run in runs if run.arm == arm]
        found = [difference(llm, prompts[run.prompt], expected[run.prompt], run.tokens) for run in answers]
        lines.append(
            TextComparison(
                arm=arm,
                answers=len(answers),
                identical=sum(one is None for one in found),
                ties=sum(one is not None and one.tie for one in found),
            )
        )
    return sorted(lines, key=lambda line: line.arm)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCount:
    """Many greedy tokens of the small model itself, speculative beside plain, in reproducible mode."""

    drafter: str
    tokens: int
    differing: int
    """Tokens from the first difference of each answer on."""


def count_tokens(
    llm: LLM, prompts: Sequence[Sequence[int]], drafters: dict[str, dict[str, object]], *, new_tokens: int
) -> list[TokenCount]:
    """Greedy answers of `new_tokens` to every prompt, plain and with each drafter."""
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    plain = [output.outputs[0].token_ids for output in llm.generate(requests, params, speculative=False)]
    counts = []
    for name, config in drafters.items():
        outputs = llm.generate(requests, params, speculative={**config, "adaptive": False})
        answers = [output.outputs[0].token_ids for output in outputs]
        pairs = list(zip(plain, answers, strict=True))
        first = [first_difference(one, other) for one, other in pairs]
        counts.append(
            TokenCount(
                drafter=name,
                tokens=sum(len(one) for one in plain),
                differing=sum(
                    len(one) - place for (one, _), place in zip(pairs, first, strict=True) if place is not None
                ),
            )
        )
    return counts
