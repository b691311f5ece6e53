"""Drafts from the output that the client predicted (Predicted Outputs), across edits. The prediction comes with the
prompt (``{"prompt": ..., "prediction": ...}``) or with the drafter's options. All nodes are deterministic.

Prompt lookup and suffix automata find the source by the tokens before the end of the text, which are exactly those that
an edit has changed. A follower (`following`) keeps its position in the prediction instead, and finds it again after
replaced, inserted or deleted tokens. It repeats replacements that it has seen. Cursor's "speculative edits" (2024),
whose method is not published, serve the same purpose; this method is forerun's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.core.sampling import Sampler, check_token_ids
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafter, DrafterSetup, PerDomain, check_least
from forerun.drafters.lookup import following
from forerun.drafters.lookup.drafts import NONE, Draft, Floats, Ints, compiled, learn, zero_counts
from forerun.drafters.lookup.following import CHANGED, FOUND, PARTED, Following
from forerun.errors import ArgumentError
from forerun.types import Budget, DraftKind

_LONGEST = 4  # Longest string searched for, tokens
_REACH = 16  # A match of n tokens counts at most ``_REACH ** n`` tokens ahead, because common words are everywhere
_FACTOR = 2  # After an edit, tokens drafted for each token that agreed since


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictionConfig:
    """Options of `prediction`."""

    num_speculative_tokens: int = 16  # Most tokens drafted from the prediction in a step
    text: str | Sequence[int] | None = None  # Prediction for requests without one: text, or token ids

    def __post_init__(self) -> None:
        check_least("prediction", self, num_speculative_tokens=1)


@dataclass(kw_only=True, slots=True)
class _PredictionRow:
    follower: Following  # The text's position in the prediction
    source: Ints  # The predicted tokens
    text: Ints  # The row's tokens read so far
    counts: Floats  # Accepted and tried nodes by evidence
    drafted: Ints | None = None  # The nodes of the last draft


class PredictionDrafter(Drafter):
    """Drafts the predicted tokens from the output's position in the prediction, and nothing if there is none. Drafts
    have `num_speculative_tokens` until the output first differs from the prediction. From then on a draft is the
    shorter, the fewer tokens agreed, so that a wrong prediction costs little. Raises ArgumentError if `text` is a
    string and there is no tokenizer, or if it has ids outside the vocabulary.
    """

    name = "prediction"
    Config = PredictionConfig

    def __init__(self, config: PredictionConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._default = _token_ids(config.text, setup)
        self._rows: dict[int, _PredictionRow] = {}
        self._counts = PerDomain(zero_counts)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def extend(self, context: DraftContext) -> None:
        for index, row_id in enumerate(context.rows):
            tokens = context.tokens[index]
            if row_id in self._rows and len(self._rows[row_id].text) > len(tokens) - context.fresh[index]:
                del self._rows[row_id]
            row = self._row(context, index)
            if row.drafted is not None:
                learn(row.drafted, np.asarray(tokens[len(row.text) :], np.int32), row.counts)
            self._read(row, tokens, context.prompt_lengths[index])

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees = []
        for index, tokens in enumerate(context.tokens):
            row = self._row(context, index)
            self._read(row, tokens, context.prompt_lengths[index])
            length = min(budget.nodes[index], budget.depth[index], self.config.num_speculative_tokens)
            if row.follower.place[CHANGED]:
                length = min(length, _FACTOR * following.count_agreed(row.follower.place))
            memory = Draft.of(max(0, length))
            # All expected tokens, even improbable ones
            size, _ = following.draft(row.follower, row.source, row.counts, memory, 0.0, False)
            drafted = memory.first(size)
            row.drafted = drafted.nodes
            trees.append(drafted.tree(tokens[-1]))
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Truncate rows, see `Drafter.truncate`. A row that shrinks or gets another prompt is aligned again with the
        next call.
        """
        for row_id, length in zip(rows, lengths, strict=True):
            if row_id in self._rows and length <= len(self._rows[row_id].text):
                del self._rows[row_id]

    def _row(self, context: DraftContext, index: int) -> _PredictionRow:
        row_id = context.rows[index]
        if row_id not in self._rows:
            predicted = (context.predictions[index] if context.predictions else ()) or self._default
            follower = following.new_follower()
            following.start(follower.place, 0, 0)
            self._rows[row_id] = _PredictionRow(
                follower=follower,
                source=np.array(predicted, np.int32),
                text=np.asarray(context.tokens[index][: context.prompt_lengths[index]], np.int32),
                counts=self._counts.of(context.salt(index)),
            )
        return self._rows[row_id]

    def _read(self, row: _PredictionRow, tokens: Sequence[int], prompt: int) -> None:
        length = len(row.text)
        if length < len(tokens):
            row.drafted = None
            row.text = np.append(row.text, np.asarray(tokens[length:], np.int32))
        for at in range(max(length, prompt), len(tokens)):
            state = row.follower.place
            following.read(row.follower, row.source, row.text, at, at + 1, False)
            if not state[FOUND]:
                end = row.text[max(prompt, at + 1 - _LONGEST) : at + 1]
                resumed, matched = _resume(row.source, end, state[PARTED])
                if resumed != NONE:
                    following.start(state, resumed, matched)


def _token_ids(text: str | Sequence[int] | None, setup: DrafterSetup) -> Sequence[int]:
    if text is None:
        return ()
    if not isinstance(text, str):
        check_token_ids("prediction: text", text, setup.target.vocab_size)
        return tuple(text)
    if setup.tokenizer is None:
        raise ArgumentError("prediction: text is a string, but the model has no tokenizer; give token ids instead")
    return tuple(setup.tokenizer.encode(text, add_special_tokens=False))


@compiled
def _resume(source: Ints, end: Ints, first: int) -> tuple[int, int]:
    """Return the index after the longest suffix of `end` that occurs in the source, and the suffix's length; NONE if
    none occurs. Of several occurrences it is the nearest one from `first` on; the shorter the suffix, the nearer it
    must be, but one of `_LONGEST` tokens may be anywhere.
    """
    nearest = np.full(len(end) + 1, NONE)  # By the length of the suffix
    before = NONE  # The last occurrence of `_LONGEST` tokens before `first`
    for at in range(1, len(source) + 1):
        size = 0
        while size < min(len(end), at) and source[at - 1 - size] == end[len(end) - 1 - size]:
            size += 1
        if at < first:
            before = at if size == _LONGEST else before
            continue
        for matched in range(1, size + 1):
            if nearest[matched] == NONE:
                nearest[matched] = at
    for matched in range(len(end), 0, -1):
        at = nearest[matched]
        if at != NONE and at - first <= _REACH**matched:
            return at, matched
        if matched == _LONGEST and max(at, before) != NONE:
            return before if before != NONE else at, matched
    return NONE, 0
