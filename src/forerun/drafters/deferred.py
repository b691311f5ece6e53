"""Delays a drafter's `extend` until it is asked for a draft: one that is not asked costs next to nothing.

A row that has a proposal outstanding is shown its tokens at once, as the protocol says. What other rows gained is put
aside, hidden states included, and shown in one go before the next proposal for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.core.sampling import Sampler
from forerun.core.scores import Scores
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafter, Seeds
from forerun.drafters.guarded import Guarded
from forerun.types import Boundary, Budget, DraftKind, Verdict

_MOST_STATES = 512  # Hidden states put aside for a row, in tokens; more are shown at once, so that memory stays bounded


@dataclass(slots=True)
class _Row:
    shown: int = 0  # Tokens that the drafter has been shown
    asked: bool = False  # A proposal is outstanding
    states: dict[Boundary, list[Tensor]] = field(default_factory=dict)  # Put aside: (F, H) per boundary and call

    def held(self) -> int:
        """States put aside, in tokens."""
        return max((sum(len(part) for part in parts) for parts in self.states.values()), default=0)


class Deferred(Drafter):
    """A drafter whose `extend` waits until it is asked for a proposal."""

    def __init__(self, drafter: Guarded, *, reproducible: bool = False) -> None:
        """`reproducible`: what it drafts for sampled requests that have a seed is deterministic, see `Seeds`."""
        self.drafter = drafter
        self._seeds = Seeds(hide=reproducible)
        self.idle = False  # It is not asked for the time being, and does not watch
        self._rows: dict[int, _Row] = {}

    def kind(self, sampler: Sampler) -> DraftKind:
        return self.drafter.kind(self._seeds.seen(sampler))

    @property
    def requires(self) -> frozenset[Boundary]:
        return self.drafter.requires

    @property
    def watches(self) -> bool:
        return self.drafter.watches and not self.idle

    @property
    def top_ids(self) -> int:
        return self.drafter.top_ids

    @property
    def remembers(self) -> bool:
        return self.drafter.remembers

    def extend(self, context: DraftContext) -> None:
        now = list[int]()
        for index, (row_id, tokens) in enumerate(zip(context.rows, context.tokens, strict=True)):
            row = self._rows.setdefault(row_id, _Row())
            fresh = context.fresh[index]
            at_once = row.asked or (bool(context.hidden_states) and fresh + row.held() > _MOST_STATES)
            if at_once and row.shown == len(tokens) - fresh and not row.states:
                now.append(index)
                continue
            for boundary, states in context.hidden_states.items():
                row.states.setdefault(boundary, []).append(states[index, : min(fresh, len(tokens) - 1)])
            if at_once:
                self._show([index], context)
        if now:
            self._mark_shown(context, now)
            self.drafter.extend(context.of(now))

    def unread(self, row: int, length: int) -> int:
        """Tokens of a row's `length` that the drafter must be shown before its next proposal."""
        known = self._rows.get(row)
        return length - (known.shown if known is not None else 0)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        limits = zip(context.rows, budget.nodes, budget.depth, strict=True)
        wanted = [index for index, (_, nodes, depth) in enumerate(limits) if nodes > 0 and depth > 0]
        late = [
            index
            for index in wanted
            if self._rows.setdefault(context.rows[index], _Row()).shown < len(context.tokens[index])
        ]
        if late:
            self._show(late, context)
        for index in wanted:
            self._rows[context.rows[index]].asked = True
        return self.drafter.propose(self._seeds.hidden(context), budget)

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self.drafter.observe(context, verdicts, scores)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._rows.pop(row_id, None)
            elif (row := self._rows.get(row_id)) is not None:
                keep = max(0, length - row.shown - (row.shown == 0))
                row.states = (
                    {boundary: [torch.cat(parts)[:keep]] for boundary, parts in row.states.items()} if keep else {}
                )
                row.shown, row.asked = min(row.shown, length), False
        self.drafter.truncate(rows, lengths)

    def memory_bytes(self) -> int:
        return self.drafter.memory_bytes()

    def _show(self, late: Sequence[int], context: DraftContext) -> None:
        """Everything that was put aside for these rows of the context."""
        rows = [self._rows[context.rows[index]] for index in late]
        fresh = [len(context.tokens[index]) - row.shown for index, row in zip(late, rows, strict=True)]
        hidden_states = {
            boundary: _padded([torch.cat(row.states[boundary]) for row in rows])
            for boundary in self.requires
            if all(boundary in row.states for row in rows)
        }
        for row in rows:
            row.states.clear()
        self._mark_shown(context, late)
        self.drafter.extend(replace(context.of(late), fresh=fresh, hidden_states=hidden_states))

    def _mark_shown(self, context: DraftContext, indices: Sequence[int]) -> None:
        for index in indices:
            row = self._rows[context.rows[index]]
            row.shown, row.asked = len(context.tokens[index]), False


def _padded(parts: Sequence[Tensor]) -> Tensor:
    """(B, F, H), left aligned, from one (F', H) per row."""
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
