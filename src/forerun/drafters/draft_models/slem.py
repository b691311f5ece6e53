"""String-level exact match: a causal LM with any tokenizer drafts text, which is tokenized again for the target.

arXiv 2502.05202 (transformers' universal assisted generation). The draft model continues the text greedily in its own
tokens. The target's tokenizer encodes the end of the committed text together with the drafted text; the tokens after
the border are proposed as a deterministic chain. If one of these tokens crosses the border, the target has already
decided against it, and the row drafts nothing in that step. In the other direction, the draft model reads the committed
text, tokenized again near its end; tokens that are in its cache are not run again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forerun.core.acceptance import Acceptance, by_draft_prob
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafted, DrafterSetup, LearningDrafter, PerDomain, check_least
from forerun.drafters.draft_models.draft_model import load_draft, run_missing
from forerun.drafters.draft_models.token_bytes import (
    SpanEncoder,
    TokenBytes,
    opening_of,
    render_for,
    starts_character,
    whole_characters,
)
from forerun.drafters.vocabulary import tokenizers
from forerun.model.back_ends import load_target
from forerun.types import Budget, DraftKind, Drawn

_WORDS = 4
"""A word's beginning is searched for within this multiple of the look-behind; in text without spaces any token."""
_ROOM = 2  # Tokens of the draft model's cache, in multiples of the target's; a row that needs more drafts nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class SlemConfig:
    """Options of `slem`."""

    model: Any  # Directory, hub id, or a loaded transformers model
    tokenizer: Any = None  # The draft model's: directory, hub id or object; None takes the one beside the model
    target_tokenizer: Any = None  # The target's; None takes the engine's
    num_speculative_tokens: int = 8  # Most tokens that are drafted in a step, counted in either vocabulary
    look_behind: int = 10
    """Tokens before the border that are tokenized again with the text after it, in both directions."""
    dtype: str = "auto"  # Dtype of the weights: ``auto`` is what the checkpoint says

    def __post_init__(self) -> None:
        check_least("slem", self, num_speculative_tokens=1, look_behind=1)


class SlemDrafter(LearningDrafter[Drafted]):
    """Drafts text with a causal LM of any tokenizer."""

    name = "slem"
    Config = SlemConfig

    def __init__(self, config: SlemConfig, setup: DrafterSetup) -> None:
        super().__init__()
        self.config = config
        self._target, self._draft = map(TokenBytes, tokenizers(self.name, config, setup))
        self.model = load_draft(load_target, config, setup, _ROOM * setup.slots + config.num_speculative_tokens)
        self._vocabulary = setup.target.vocab_size
        self._to_target = SpanEncoder(self._target)
        self._written = render_for(self._draft, self._target)
        self._estimates = PerDomain(Acceptance)
        encoder, shown, back = SpanEncoder(self._draft), render_for(self._target, self._draft), config.look_behind
        opening = opening_of(self._draft)
        silent = self._target.tokenizer.bos_token_id if opening else None

        def row() -> _SlemRow:
            alignment = TextAlignment(encoder=encoder, shown=shown, look_behind=back, opening=opening, silent=silent)
            return _SlemRow(alignment=alignment)

        self._rows = defaultdict[int, _SlemRow](row)

    def grow(self, rows: int, slots: int) -> None:
        self.model.grow(rows, _ROOM * slots + self.config.num_speculative_tokens)

    def memory_bytes(self) -> int:
        return self.model.memory_bytes()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def extend(self, context: DraftContext) -> None:
        """Learn from the last draft's acceptance. The text is read with the next proposal."""
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            self._rows[row_id].alignment.shrink(len(tokens) - fresh)
        super().extend(context)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            self._rows[row_id].alignment.shrink(length)
            if length == 0:
                self.model.truncate([row_id], [0])
                self.model.clear(row_id)
                del self._rows[row_id]
        super().truncate(rows, lengths)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        most = self.config.num_speculative_tokens
        limits = [min(nodes, depth, most) for nodes, depth in zip(budget.nodes, budget.depth, strict=True)]
        texts = {index: self._open(context, index) for index, limit in enumerate(limits) if limit > 0}
        active = {index: text for index, text in texts.items() if text is not None}
        trees = context.trees()
        if active:
            self._write(list(active.values()))
        for index, text in active.items():
            self._chain(trees[index], text, limits[index])
        return trees

    def _open(self, context: DraftContext, index: int) -> _Written | None:
        """Read a row's text; None if it is empty or leaves the draft model no room."""
        cache_row, tokens = context.rows[index], context.tokens[index]
        row = self._rows[cache_row]
        ids = [token if token < self.model.vocab_size else 0 for token in row.alignment.follow(tokens)]
        room = min(self.model.max_length, self.model.slots) - self.config.num_speculative_tokens
        if not 0 < len(ids) <= room:
            return None
        return _Written(
            cache_row=cache_row, row=row, tokens=tokens, ids=ids, acceptance=self._estimates.of(context.salt(index))
        )

    def _write(self, texts: Sequence[_Written]) -> None:
        """Draft `num_speculative_tokens` tokens greedily for each row, with one pass per token for all rows."""
        kept = [self.model.reusable(text.cache_row, text.row.common(text.ids)) for text in texts]
        missing = [text.ids[count:] for text, count in zip(texts, kept, strict=True)]
        logits = run_missing(self.model, [text.cache_row for text in texts], kept, missing)
        for text in texts:
            text.row.held, text.row.alignment.agreed = list(text.ids), len(text.ids)
        going = list(texts)
        for left in range(self.config.num_speculative_tokens - 1, -1, -1):
            logits_of_ids = logits[:, 0, : len(self._draft)]  # Padding of the embedding is excluded
            values, ids = logits_of_ids.max(-1)
            probs = (values.float() - logits_of_ids.float().logsumexp(-1)).exp()
            for text, token, prob in zip(going, ids.tolist(), probs.tolist(), strict=True):
                # A special token ends the draft, and is part of it only if the target has the same one.
                text.last, piece = token, self._written[token]
                text.ended = token in self._draft.specials or not piece
                if piece:
                    text.pieces.append(piece)
                    text.probs.append(prob)
            going = [text for text in going if left and not text.ended]
            if not going:
                return
            logits = self.model.prefill([text.cache_row for text in going], [[text.last] for text in going]).logits
            for text in going:
                text.row.held.append(text.last)

    def _chain(self, tree: TokenTree, text: _Written, most: int) -> None:
        """Add the drafted text to the tree as a chain of the target's tokens."""
        self._drafted.pop(text.cache_row, None)
        alignment = text.row.alignment
        tail = bytes(alignment.data[alignment.covered :])
        written = b"".join(text.pieces)
        if not written.startswith(tail):
            return  # The draft model could not encode the last bytes, and did not write them again
        before = self._before(text.tokens)
        length = whole_characters(before + written[len(tail) :]) - len(before)
        spans = self._to_target.after(before, written[len(tail) : len(tail) + max(0, length)])
        if not spans:
            return
        own = self._drafted[text.cache_row] = Drafted(tree, text.acceptance)
        unknown = self._target.tokenizer.unk_token_id
        starts = list(itertools.accumulate(map(len, text.pieces), initial=-len(tail)))
        drafted = 0
        for node, span in enumerate(spans[:most]):
            if span.id >= self._vocabulary or span.id == unknown:
                return
            prob = 1.0  # Joint probability of the draft tokens that begin in it
            while drafted < len(text.probs) and starts[drafted] < span.end:
                prob *= text.probs[drafted]
                drafted += 1
            # The last token is less certain: with more text the target's tokenizer might form a longer one there.
            last = span.end == length and not text.ended
            own.add(span.id, node, by_draft_prob(Drawn.DETERMINISTIC, int(last), prob))

    def _before(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of the last committed tokens, from the beginning of a character on."""
        start = max(0, len(tokens) - self.config.look_behind)
        data = self._target.join(tokens[start:])
        while start and not starts_character(data, 0):
            start -= 1
            data = self._target.of(tokens[start]) + data
        return data


@dataclass(kw_only=True, slots=True)
class _SlemRow:
    """The draft model's state of one row."""

    alignment: TextAlignment
    held: list[int] = field(default_factory=list)  # Draft tokens in the cache: committed text, then the last draft

    def common(self, ids: Sequence[int]) -> int:
        """Return how many tokens of the current text are in the cache; the text's last token is always run again."""
        count, most = min(self.alignment.agreed, len(self.held)), min(len(self.held), len(ids) - 1)
        while count < most and self.held[count] == ids[count]:
            count += 1
        return min(count, most)


@dataclass(kw_only=True, slots=True)
class _Written:
    """The text that the draft model has written for one row."""

    cache_row: int
    row: _SlemRow
    tokens: Sequence[int]  # The target's, committed
    ids: list[int]  # The draft model's, committed text first
    acceptance: Acceptance  # Estimates of the row's domain
    pieces: list[bytes] = field(default_factory=list)  # Text of each drafted token, as bytes of the target's text
    probs: list[float] = field(default_factory=list)  # Probability of each drafted token
    last: int = 0  # The latest drafted token
    ended: bool = False  # A special token was drafted, or the draft model's context is full


@dataclass(kw_only=True, slots=True)
class TextAlignment:
    """One row's text in draft tokens, tokenized again near its end whenever it has grown."""

    encoder: SpanEncoder  # The draft model's
    shown: Sequence[bytes]  # Bytes that the draft model reads for each target token id (`render_for`)
    look_behind: int  # Tokens before the new text that are tokenized again with it
    opening: Sequence[int] = ()
    silent: int | None = None  # A target token that is left out at the very beginning
    data: bytearray = field(default_factory=bytearray)  # The text
    ids: list[int] = field(default_factory=list)  # Draft tokens of the text, the opening not counted
    agreed: int = 0  # Draft tokens that have not changed since the reader last set this
    _ends: list[int] = field(default_factory=list)  # End of each draft token, in bytes
    _marks: list[int] = field(default_factory=list)  # End of each target token, in bytes

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Return the draft tokens of a text, opening token included. The text must begin with the one of the last
        call.
        """
        for index in range(len(self._marks), len(tokens)):
            token = tokens[index]
            if token < len(self.shown) and (index or token != self.silent):
                self.data += self.shown[token]
            self._marks.append(len(self.data))
        # Tokenize from a little before the new text on, and from farther back until old and new tokens coincide.
        back = self.look_behind
        while self.covered < len(self.data):
            start = max(0, len(self.ids) - back)
            while start and not starts_character(self.data, self._ends[start - 1]):
                start -= 1
            if self._splice(start, words=back <= _WORDS * self.look_behind):
                break
            back *= 2
        return [*self.opening, *self.ids]

    def shrink(self, length: int) -> None:
        """Forget all but the first `length` target tokens; a draft token that is cut is tokenized again."""
        if length < len(self._marks):
            del self._marks[length:]
            del self.data[self._marks[-1] if self._marks else 0 :]
            self._keep(sum(end <= len(self.data) for end in self._ends))

    @property
    def covered(self) -> int:
        """Bytes up to the end of the last draft token; the rest could not be encoded in draft tokens."""
        return self._ends[-1] if self._ends else 0

    def _keep(self, count: int) -> None:
        del self._ends[count:]
        del self.ids[count:]
        self.agreed = min(self.agreed, count)

    def _splice(self, start: int, *, words: bool) -> bool:
        """Tokenize from draft token `start` on. Return False if the new tokens do not coincide with the old ones
        anywhere; with `words` they must coincide at the beginning of a word, since tokenizers rarely depend on earlier
        text.
        """
        base = self._ends[start - 1] if start else 0
        spans = [(span.id, base + span.end) for span in self.encoder.encode(bytes(self.data[base:]), opening=not start)]
        old = list(zip(self.ids[start:], self._ends[start:], strict=True))
        if start:  # The window begins inside the text, and perhaps inside a word
            known = {span: index for index, span in enumerate(old)}
            met = (index for index, span in enumerate(spans) if index and span in known)
            meeting = next((index for index in met if not words or self._word_begins(spans[index][1])), None)
            if meeting is None:
                return False
            shared = known[spans[meeting]] + 1
            start, old, spans = start + shared, old[shared:], spans[meeting + 1 :]
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(spans, old, strict=False)))
        self._keep(start + same)
        for token, end in spans[same:]:
            self.ids.append(token)
            self._ends.append(end)
        return True

    def _word_begins(self, index: int) -> bool:
        return self.data[index : index + 1].isspace() and not self.data[index - 1 : index].isspace()
