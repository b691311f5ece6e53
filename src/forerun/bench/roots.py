"""Target and draft laws at the roots that decoding meets, and what each way of drawing children could keep there.

One text is decoded by a tree without replacement at temperature 1; at its roots every other way of drawing is computed
instead of tried, so that all of them are compared at the same places. Knows heads and the step, no report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.bench.transport import rejection_reach, transport_bound
from forerun.drafters import build
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.growth import Draw
from forerun.sampling import Sampler
from forerun.step import Group, Row, Scores, context_for, first_tokens, step
from forerun.target import Target
from forerun.types import Budget, Draft, DraftKind, SamplingParams, Signal, Verdict

_NODES = 128
"""More than any tree here has."""
_ROOM = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RootReach:
    """Mean chance, over the roots, that the next token is among `children` drafted ones."""

    children: int
    given: float
    """The likeliest tokens: sample-and-walk, which reaches its bound."""
    greedy_k: float
    """All but one given, one drawn from the rest: the greedy-k rule, which reaches its bound."""
    distinct: float
    """Without replacement, judged one after the other (recursive rejection; traversal where they are leaves)."""
    distinct_bound: float
    """Without replacement, any rule."""
    iid: float
    """Drawn independently, judged one after the other."""
    iid_bound: float
    """Drawn independently, any rule."""


def compare_roots(target: Tensor, draft: Tensor, counts: Sequence[int]) -> list[RootReach]:
    """From laws (N, V) of both models at the roots, for each number of children."""
    lines = []
    for count in counts:
        found = {
            "given": transport_bound(target, draft, count, Draw.GIVEN),
            "greedy_k": transport_bound(target, draft, count, Draw.GREEDY_K),
            "distinct": rejection_reach(target, draft, count, Draw.WITHOUT_REPLACEMENT),
            "distinct_bound": transport_bound(target, draft, count, Draw.WITHOUT_REPLACEMENT),
            "iid": rejection_reach(target, draft, count, Draw.IID),
            "iid_bound": transport_bound(target, draft, count, Draw.IID),
        }
        lines.append(RootReach(children=count, **{name: float(chances.mean()) for name, chances in found.items()}))
    return lines


@torch.inference_mode()
def root_laws(
    target: Target, config: Mapping[str, Any], prompts: Sequence[Sequence[int]], *, steps: int, most: int
) -> tuple[Tensor, Tensor]:
    """Decode `prompts` for some steps at temperature 1 and keep both laws at the roots.

    Args:
        target: with as many free rows as prompts; they are free again afterwards.
        config: ``method`` and its options; children must be sampled, so that their laws are recorded.
        steps: of every row, each of at least one token.
        most: roots kept, evenly spread over those that were met.

    Returns:
        laws of target and drafter after the roots, (N, V) float32 each, N at most `most`.
    """
    options = dict(config)
    setup = DrafterSetup(target=target, tokenizer=None, rows=len(prompts), slots=target.slots)
    watch = _Watch(build(options.pop("method"), options, setup))
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    rows = [
        Row(
            row=index,
            tokens=list(prompt),
            prompt_length=len(prompt),
            sampler=Sampler(params, prompt),
            seed=index,
            stop_ids=frozenset(),
            room=_ROOM,
        )
        for index, prompt in enumerate(prompts)
    ]
    ids = [row.row for row in rows]
    scored = target.prefill(ids, [row.tokens for row in rows], signals=watch.requires)
    first_tokens(rows, scored.logits)
    watch.extend(context_for(rows, range(len(rows)), [len(row.tokens) for row in rows], scored.signals))
    group = Group(name="watched", drafter=watch, members=ids, depths=[_NODES] * len(rows), nodes=_NODES)
    for _ in range(steps):
        step(target, rows, [group])
    target.truncate(ids, [0] * len(ids))
    chosen = torch.linspace(0, len(watch.laws) - 1, min(most, len(watch.laws))).round().long().tolist()
    return torch.stack([watch.laws[i][0] for i in chosen]), torch.stack([watch.laws[i][1] for i in chosen])


class _Watch(Drafter):
    """Leaves everything to another drafter and notes the laws at the roots of its trees."""

    name = "watched"

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.laws: list[tuple[Tensor, Tensor]] = []
        """(V,) of the target and (V,) of the drafter, root by root."""

    def kind(self, sampler: Sampler) -> DraftKind:
        return self.inner.kind(sampler)

    @property
    def requires(self) -> frozenset[Signal]:
        return self.inner.requires

    def extend(self, context: DraftContext) -> None:
        self.inner.extend(context)

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        return self.inner.propose(context, budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.inner.observe(context, verdicts, scores)
        for index, tree in enumerate(scores.trees):
            if 0 in tree.laws:
                self.laws.append((scores.row(index).law(0).cpu(), tree.laws[0].float().cpu()))
