"""String-level exact match: a causal LM with any tokenizer drafts text, which is tokenized again for the target.

arXiv 2502.05202 (transformers' universal assisted generation). The draft model continues the text greedily in its own
tokens; the target's tokenizer reads the end of the committed text together with the drafted one, and what follows the
border is proposed: a deterministic chain. If a token of the target would lie across the border, the target has already
decided against it and the row drafts nothing in that step. The other way round, the draft model reads the committed
text, tokenised again near its end; what of that is in its cache is not run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from forerun.core.acceptance import Acceptance, by_draft_prob
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, check_least
from forerun.drafters.domains import PerDomain
from forerun.drafters.draft_models.draft_model import run_missing
from forerun.drafters.draft_models.token_bytes import (
    Encoder,
    Span,
    TokenBytes,
    opening_of,
    rendering,
    starts_character,
    whole_characters,
)
from forerun.drafters.vocabulary import draft_tokenizer, resolved, target_tokenizer
from forerun.model import Target
from forerun.types import Budget, DraftKind, Drawn

_WORDS = 4  # So many times the look-behind a word is searched for; a text without spaces is taken up at any token
_ROOM = 2
"""The draft model's cache holds this many times the target's tokens; a row whose text needs more drafts nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlemConfig:
    """Options of `slem`."""

    model: Any
    """Directory, hub id, or a loaded transformers model."""
    tokenizer: Any = None
    """The draft model's: directory, hub id or object; None takes the one beside the model."""
    target_tokenizer: Any = None
    """The target's; None takes the engine's."""
    num_speculative_tokens: int = 8
    """Tokens that the draft model writes in a step, and most tokens of the target that are made of them."""
    look_behind: int = 10
    """Tokens before the border that are tokenised again with the text behind it, on both sides."""
    dtype: str = "auto"
    """Of the weights: ``auto`` is what the checkpoint says."""

    def __post_init__(self) -> None:
        check_least("slem", self, num_speculative_tokens=1, look_behind=1)


@dataclass(kw_only=True, slots=True)
class TextAlignment:
    """One row's text, tokenised again near its end whenever it has grown."""

    encoder: Encoder  # The draft model's
    shown: Sequence[bytes]  # Of each target token id what the draft model is shown (`rendering`)
    look_behind: int  # Tokens before the new text that are tokenised again with it
    opening: Sequence[int] = ()
    silent: int | None = None  # A target token that is not shown at the very beginning
    data: bytearray = field(default_factory=bytearray)  # The text
    ids: list[int] = field(default_factory=list)  # Draft tokens of the text, the opening not counted
    agreed: int = 0  # Draft tokens that have not changed since the reader last set this
    _ends: list[int] = field(default_factory=list)  # Byte behind each draft token
    _marks: list[int] = field(default_factory=list)  # Byte behind each target token

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft tokens, opening included, of a text that begins with what was followed before."""
        for place in range(len(self._marks), len(tokens)):
            token = tokens[place]
            if token < len(self.shown) and (place or token != self.silent):
                self.data += self.shown[token]
            self._marks.append(len(self.data))
        if self.covered < len(self.data):
            self._tokenise()
        return [*self.opening, *self.ids]

    def shrink(self, length: int) -> None:
        """Forget all but the first `length` target tokens; of a draft token that is cut, the rest is read anew."""
        if length >= len(self._marks):
            return
        del self._marks[length:]
        del self.data[self._marks[-1] if self._marks else 0 :]
        self._keep(sum(end <= len(self.data) for end in self._ends))

    @property
    def covered(self) -> int:
        """Bytes up to the end of the last draft token: the rest could not be written in draft tokens alone."""
        return self._ends[-1] if self._ends else 0

    def _word_begins(self, place: int) -> bool:
        return self.data[place : place + 1].isspace() and not self.data[place - 1 : place].isspace()

    def _keep(self, count: int) -> None:
        del self._ends[count:]
        del self.ids[count:]
        self.agreed = min(self.agreed, count)

    def _tokenise(self) -> None:
        """Tokens from a little before the new text on; farther back until old and new tokens meet."""
        back = self.look_behind
        while True:
            start = max(0, len(self.ids) - back)
            while start and not starts_character(self.data, self._ends[start - 1]):
                start -= 1
            if self._splice(start, words=back <= _WORDS * self.look_behind):
                return
            back *= 2

    def _splice(self, start: int, *, words: bool) -> bool:
        """Tokenise from draft token `start` on. False where no token of the old ones came out again in its place: with
        `words`, where a word begins, since tokenizers hardly look farther back than that."""
        base = self._ends[start - 1] if start else 0
        spans = self.encoder.encode(bytes(self.data[base:]), opening=not start)
        meeting = 0
        if start:  # the window begins inside a text, and its first token perhaps inside a word
            old = {(self.ids[place], self._ends[place]): place for place in range(start, len(self.ids))}
            keys = [(span.id, base + span.end) for span in spans]
            met = [place for place, key in enumerate(keys) if place and key in old]
            meeting = next((place + 1 for place in met if not words or self._word_begins(keys[place][1])), 0)
            if not meeting:
                return False
            start = old[keys[meeting - 1]] + 1
        same = 0
        for span, token, end in zip(spans[meeting:], self.ids[start:], self._ends[start:], strict=False):
            if (span.id, base + span.end) != (token, end):
                break
            same += 1
        self._keep(start + same)
        for span in spans[meeting + same :]:
            self.ids.append(span.id)
            self._ends.append(base + span.end)
        return True


@dataclass(kw_only=True, slots=True)
class _Row:
    """One row as the draft model knows it."""

    alignment: TextAlignment
    held: list[int] = field(default_factory=list)
    """Draft tokens in the cache: committed text, and behind it what was drafted last."""
    submitted: Drafted | None = None

    def common(self, ids: Sequence[int]) -> int:
        """How many tokens of the text as it is now stand in the cache; its last one is always run again."""
        count, most = min(self.alignment.agreed, len(self.held)), min(len(self.held), len(ids) - 1)
        while count < most and self.held[count] == ids[count]:
            count += 1
        return min(count, most)


@dataclass(kw_only=True, slots=True)
class _Written:
    """What the draft model wrote for one row."""

    row: _Row
    tokens: Sequence[int]  # The target's, committed
    ids: list[int]  # The draft model's, committed text first
    acceptance: Acceptance  # Of the row's domain
    pieces: list[bytes] = field(default_factory=list)  # Drafted, as the target's text
    probs: list[float] = field(default_factory=list)  # Of each drafted token
    ended: bool = False  # Nothing can follow: a special token came, or the draft model's context is full


class SlemDrafter(Drafter):
    """Drafts text with a causal LM of any tokenizer."""

    name = "slem"
    Config = SlemConfig

    def __init__(self, config: SlemConfig, setup: DrafterSetup) -> None:
        self.config = config
        self._target = TokenBytes(target_tokenizer(self.name, config.target_tokenizer, setup))
        self._draft = TokenBytes(draft_tokenizer(self.name, config.tokenizer, config.model))
        model = resolved(config.model)
        slots = _ROOM * setup.slots + config.num_speculative_tokens
        self.model = Target.load(
            model, rows=setup.rows, slots=slots, dtype=config.dtype, device=setup.device_for(model)
        )
        self._vocabulary = setup.target.vocab_size
        self._to_target, self._to_draft = Encoder(self._target), Encoder(self._draft)
        self._shown = rendering(self._target, self._draft)
        self._written = rendering(self._draft, self._target)
        self._opening = opening_of(self._draft)
        self._estimates = PerDomain(Acceptance)
        self._rows: dict[int, _Row] = {}

    def memory_bytes(self) -> int:
        return self.model.memory_bytes()

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(chain=True)

    def extend(self, context: DraftContext) -> None:
        """Learn how the last draft fared. The text is read when a draft is wanted, not before."""
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            row, known = self._row(row_id), len(tokens) - fresh
            row.alignment.shrink(known)
            if row.submitted is not None:
                row.submitted.learn(tokens[known:])
            row.submitted = None

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            row = self._row(row_id)
            row.alignment.shrink(length)
            row.submitted = None
            if length == 0:
                self.model.truncate([row_id], [0])
                self.model.clear(row_id)
                del self._rows[row_id]

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        limits = [min(nodes, depth) for nodes, depth in zip(budget.nodes, budget.depth, strict=True)]
        texts = {index: self._open(context, index) for index, limit in enumerate(limits) if limit > 0}
        active = {index: text for index, text in texts.items() if text is not None}
        trees = context.trees()
        if not active:
            return trees
        self._write([context.rows[index] for index in active], list(active.values()))
        for index, text in active.items():
            self._chain(trees[index], text, min(limits[index], self.config.num_speculative_tokens))
        return trees

    def _row(self, row_id: int) -> _Row:
        if row_id not in self._rows:
            alignment = TextAlignment(
                encoder=self._to_draft,
                shown=self._shown,
                look_behind=self.config.look_behind,
                opening=self._opening,
                silent=self._target.tokenizer.bos_token_id if self._opening else None,
            )
            self._rows[row_id] = _Row(alignment=alignment)
        return self._rows[row_id]

    def _open(self, context: DraftContext, index: int) -> _Written | None:
        """A row's text, read; None where it is empty, or leaves the draft model no room to write."""
        row = self._row(context.rows[index])
        ids = row.alignment.follow(context.tokens[index])
        ids = [token if token < self.model.vocab_size else 0 for token in ids]
        room = min(self.model.max_length, self.model.slots) - self.config.num_speculative_tokens
        if not 0 < len(ids) <= room:
            return None
        acceptance = self._estimates.of(context.salt(index))
        return _Written(row=row, tokens=context.tokens[index], ids=ids, acceptance=acceptance)

    def _write(self, rows: Sequence[int], texts: Sequence[_Written]) -> None:
        """Greedily `num_speculative_tokens` tokens for each row, one pass for all rows a token."""
        kept = [text.row.common(text.ids) for text in texts]
        for text, count in zip(texts, kept, strict=True):
            del text.row.held[count:]
            text.row.alignment.agreed = min(text.row.alignment.agreed, count)
        missing = [text.ids[count:] for text, count in zip(texts, kept, strict=True)]
        logits = run_missing(self.model, rows, kept, missing)
        for text in texts:
            text.row.held = list(text.ids)
            text.row.alignment.agreed = len(text.ids)
        going = list(zip(rows, texts, strict=True))
        for left in range(self.config.num_speculative_tokens - 1, -1, -1):
            chosen = self._choose(logits)
            for (_, text), (token, prob) in zip(going, chosen, strict=True):
                self._take(text, token, prob)
            found = [(place, token) for place, (token, _) in enumerate(chosen) if left and not going[place][1].ended]
            if not found:
                return
            going = [going[place] for place, _ in found]
            logits = self.model.prefill([row for row, _ in going], [[token] for _, token in found]).logits
            for (_, text), (_, token) in zip(going, found, strict=True):
                text.row.held.append(token)

    def _choose(self, logits: Tensor) -> list[tuple[int, float]]:
        """(B, 1, V) -> the likeliest token of each row and its probability; an embedding's padding is no token."""
        known = logits[:, 0, : len(self._draft)]
        values, ids = known.max(-1)
        probs = (values.float() - known.float().logsumexp(-1)).exp()
        return list(zip(ids.tolist(), probs.tolist(), strict=True))

    def _take(self, text: _Written, token: int, prob: float) -> None:
        """Append a drafted token; a special one ends the draft, and is part of it only if the target has it too."""
        piece = self._written[token]
        text.ended = token in self._draft.specials or not piece
        if piece:
            text.pieces.append(piece)
            text.probs.append(prob)

    def _chain(self, tree: TokenTree, text: _Written, most: int) -> None:
        """The drafted text as a chain of the target's tokens."""
        text.row.submitted, found = None, self._translate(text)
        if found is None:
            return
        spans, confidences, length = found
        text.row.submitted = Drafted.below(tree, len(text.tokens), text.acceptance)
        for node, (span, raw) in enumerate(zip(spans[:most], confidences, strict=False)):
            # The last token may go on: with the text that follows the target might read a longer one there.
            last = span.end == length and not text.ended
            text.row.submitted.add(span.id, node, by_draft_prob(Drawn.DETERMINISTIC, int(last), raw))

    def _translate(self, text: _Written) -> tuple[list[Span], list[float], int] | None:
        """The target's tokens of what was written, a raw confidence for each, and the length of the text in bytes."""
        tail = bytes(text.row.alignment.data[text.row.alignment.covered :])
        written = b"".join(text.pieces)
        if not written.startswith(tail):
            return None  # the draft model could not read the last bytes, and did not write them again either
        before = self._before(text.tokens)
        length = whole_characters(before + written[len(tail) :]) - len(before)
        spans = self._to_target.after(before, written[len(tail) : len(tail) + max(0, length)])
        if not spans:
            return None
        unknown = self._target.tokenizer.unk_token_id
        good = list(itertools.takewhile(lambda span: span.id < self._vocabulary and span.id != unknown, spans))
        starts = [0, *itertools.accumulate(len(piece) for piece in text.pieces)]
        return good, _attributed(good, [start - len(tail) for start in starts], text.probs), length

    def _before(self, tokens: Sequence[int]) -> bytes:
        """The end of the committed text as the target's tokens write it, from the beginning of a character on."""
        start = max(0, len(tokens) - self.config.look_behind)
        data = self._target.join(tokens[start:])
        while start and not starts_character(data, 0):
            start -= 1
            data = self._target.of(tokens[start]) + data
        return data


def _attributed(spans: Sequence[Span], starts: Sequence[int], probs: Sequence[float]) -> list[float]:
    """Of each of the target's tokens the probability of the drafted tokens that begin in it, together."""
    found, place = list[float](), 0
    for span in spans:
        together = 1.0
        while place < len(probs) and starts[place] < span.end:
            together *= probs[place]
            place += 1
        found.append(together)
    return found
