"""Drafts from the answer that the client predicted (Predicted Outputs), found again after every edit. It comes with the
prompt (``{"prompt": ..., "prediction": ...}``) or with the drafter's options. All nodes are deterministic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import Acceptance, by_match
from forerun.core.sampling import Sampler, check_token_ids
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_LONGEST = 4  # Longest string searched for, tokens
_REACH = 16  # A string of n tokens is believed at most ``_REACH ** n`` tokens ahead: common words are everywhere
_TRUST = 2  # After an edit, tokens drafted for each token that has agreed since


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionConfig:
    """Options of `prediction`."""

    num_speculative_tokens: int = 16  # Most tokens copied from the prediction in a step
    text: str | Sequence[int] | None = None  # Prediction for requests that bring none: text, or token ids

    def __post_init__(self) -> None:
        check_least("prediction", self, num_speculative_tokens=1)


@dataclass(kw_only=True, slots=True)
class _Row:
    alignment: Alignment
    read: int  # How many of the row's tokens the alignment knows
    acceptance: Acceptance
    drafted: Drafted | None = None


class PredictionDrafter(Drafter):
    """Drafts the predicted tokens from where the answer stands among them; nothing where it stands nowhere. Until the
    answer first leaves the prediction, and after an edit from eight agreeing tokens on, a draft has
    `num_speculative_tokens`; nearer to an edit it is shorter, so that a prediction which was wrong costs little.
    ArgumentError: `text` is a string and there is no tokenizer, or holds ids outside the vocabulary."""

    name = "prediction"
    Config = PredictionConfig

    def __init__(self, config: PredictionConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._default = _token_ids(config.text, setup)
        self._rows: dict[int, _Row] = {}
        self._estimates = PerDomain(Acceptance)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def extend(self, context: DraftContext) -> None:
        for index, row_id in enumerate(context.rows):
            tokens = context.tokens[index]
            known = max(len(tokens) - context.fresh[index], context.prompt_lengths[index])
            if row_id in self._rows and self._rows[row_id].read > known:
                del self._rows[row_id]
            row = self._row(context, index)
            if row.drafted is not None:
                row.drafted.learn(tokens[row.read :])
            self._read(row, tokens)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = context.trees()
        for index, tokens in enumerate(context.tokens):
            row, parent = self._row(context, index), 0
            self._read(row, tokens)
            row.drafted, alignment = None, row.alignment
            if alignment.position is None:
                continue
            length = min(budget.nodes[index], budget.depth[index], self.config.num_speculative_tokens)
            if alignment.edited:
                length = min(length, _TRUST * alignment.matched)
            row.drafted, source = Drafted(trees[index], row.acceptance), "edited" if alignment.edited else "prediction"
            for offset, token in enumerate(alignment.predicted[alignment.position : alignment.position + length]):
                parent = row.drafted.add(token, parent, by_match(source, alignment.matched + offset))
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """As `Drafter.truncate`; a row that shrinks, or serves another prompt, is aligned anew when it is next seen."""
        for row_id, length in zip(rows, lengths, strict=True):
            if row_id in self._rows and length <= self._rows[row_id].read:
                del self._rows[row_id]

    def _row(self, context: DraftContext, index: int) -> _Row:
        row_id = context.rows[index]
        if row_id not in self._rows:
            predicted = context.predictions[index] if context.predictions else ()
            alignment, acceptance = Alignment(predicted or self._default), self._estimates.of(context.salt(index))
            self._rows[row_id] = _Row(alignment=alignment, read=context.prompt_lengths[index], acceptance=acceptance)
        return self._rows[row_id]

    def _read(self, row: _Row, tokens: Sequence[int]) -> None:
        if row.read < len(tokens):
            row.drafted = None
        for token in tokens[row.read :]:
            row.alignment.advance(token)
        row.read = max(row.read, len(tokens))


def _token_ids(text: str | Sequence[int] | None, setup: DrafterSetup) -> Sequence[int]:
    if text is None:
        return ()
    if not isinstance(text, str):
        check_token_ids("prediction: text", text, setup.target.vocab_size)
        return tuple(text)
    if setup.tokenizer is None:
        raise ArgumentError("prediction: text is a string, but the model has no tokenizer; give token ids instead")
    return tuple(setup.tokenizer.encode(text, add_special_tokens=False))


class Alignment:
    """The position in `predicted` at which the answer goes on, if it goes on as predicted. In step, a token that agrees
    moves it by one. After an edit the last tokens of the answer are searched for: the longest string first, the nearest
    position ahead of where the two texts parted, and only strings of `_LONGEST` tokens also behind it. The places of
    each token are found by one sort, so that a long prediction holds nobody up."""

    def __init__(self, predicted: Sequence[int]) -> None:
        self.predicted = predicted
        self.position: int | None = 0  # Index of the token that comes next; None where the answer stands nowhere
        self.matched = 0  # How many tokens before the position are the same in both texts
        self.edited = False  # Whether the texts have parted before
        self._parted = 0  # Index of the first predicted token that has not come
        self._recent: list[int] = []
        self._text = np.array(predicted, np.int64)
        self._order = self._text.argsort(kind="stable")  # Places of the smallest token, then of the next

    def advance(self, token: int) -> None:
        """The answer gained a token."""
        self._recent = [*self._recent[1 - _LONGEST :], token]
        position = self.position
        if position is not None and position < len(self.predicted) and self.predicted[position] == token:
            self.position, self.matched = position + 1, self.matched + 1
        else:
            self.edited = True
            self.position, self.matched = self._search()
        if self.position is not None and (self.matched >= _LONGEST or not self.edited):
            self._parted = self.position

    def _search(self) -> tuple[int | None, int]:
        found = list(self._ends())
        for size, ends in zip(range(len(found), 0, -1), reversed(found), strict=True):
            ahead = int(np.searchsorted(ends, self._parted))
            if ahead < len(ends) and ends[ahead] - self._parted <= _REACH**size:
                return int(ends[ahead]), size
            if len(ends) and size == _LONGEST:
                return int(ends[ahead - 1] if ahead else ends[0]), size
        return None, 0

    def _ends(self) -> Iterator[NDArray[np.int64]]:
        """Where the answer's last token, its last two, ... end in the prediction, ascending."""
        text, order, token = self._text, self._order, self._recent[-1]
        first, last = (np.searchsorted(text, token, side, sorter=order) for side in ("left", "right"))
        ends = order[first:last] + 1
        size = 1
        while len(ends) and size < len(self._recent):
            yield ends
            size += 1
            ends = ends[ends >= size]
            ends = ends[text[ends - size] == self._recent[-size]]
        yield ends
