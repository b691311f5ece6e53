"""What a draft model reads of a text that the target wrote in other tokens; one reading for each row.

Either token by token, where most tokens are shared (`TokenReading`), or as text (`TextReading`). Both follow a text
that grows and shrinks, at a cost that depends on what is new. Know tokenizers, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.drafters.draft_models.translation.encoding import Encoder, starts_character
from forerun.drafters.draft_models.translation.spelling import Spelling

_WORDS = 4
"""So many times the look-behind a word is searched for; a text without spaces is taken up at any token."""


def opening_of(draft: Spelling) -> list[int]:
    """The token that the draft model's tokenizer puts before every text, if it does."""
    first = draft.tokenizer.bos_token_id
    added: list[int] = list(draft.tokenizer("")["input_ids"])
    return [first] if first is not None and added[:1] == [first] else []


class Dictionary:
    """Target token -> draft tokens: the shared one, else the draft tokenizer's encoding of what the token spells."""

    def __init__(self, target: Spelling, encoder: Encoder, draft_size: int) -> None:
        """`draft_size`: token ids that the draft model can embed."""
        self._target, self._encoder, self._size = target, encoder, draft_size
        self.opening = opening_of(encoder.spelling)
        self.silent = {target.tokenizer.bos_token_id} if self.opening else set()
        """Tokens that say at the beginning of a text what the opening says already."""
        shared = target.counterparts(encoder.spelling)
        self._known = {token: [shared[token]] if token in shared else [] for token in target.specials}

    def __getitem__(self, token: int) -> list[int]:
        """The draft tokens; none for a special token without counterpart, or bytes that the draft cannot write."""
        if token not in self._known:
            piece = self._target.piece(token)
            same = self._encoder.spelling.ordinary.get(piece)
            found = [span.id for span in self._encoder.encode(piece, opening=False)] if same is None else [same]
            self._known[token] = [known for known in found if known < self._size]
        return self._known[token]


class TokenReading:
    """One row's text, token by token."""

    def __init__(self, dictionary: Dictionary) -> None:
        self._dictionary = dictionary
        self.ids: list[int] = list(dictionary.opening)
        """Draft tokens."""
        self._ends: list[int] = []

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The draft tokens of a text that begins with what was followed before."""
        for place in range(len(self._ends), len(tokens)):
            if place or tokens[place] not in self._dictionary.silent:
                self.ids.extend(self._dictionary[tokens[place]])
            self._ends.append(len(self.ids))
        return self.ids

    def span(self, length: int) -> int:
        """Draft tokens that the first `length` target tokens take, of those that were followed."""
        if length <= 0:
            return 0
        return self._ends[min(length, len(self._ends)) - 1] if self._ends else 0

    def shrink(self, length: int) -> None:
        """Forget all but the first `length` target tokens."""
        if length < len(self._ends):
            del self._ends[length:]
            del self.ids[self._ends[-1] if self._ends else len(self._dictionary.opening) :]


@dataclass(kw_only=True, slots=True)
class TextReading:
    """One row's text, tokenised again near its end whenever it has grown."""

    encoder: Encoder
    """The draft model's."""
    shown: Sequence[bytes]
    """Of each target token id what the draft model is shown (`rendering`)."""
    look_behind: int
    """Tokens before the new text that are tokenised again with it."""
    opening: Sequence[int] = ()
    silent: int | None = None
    """A target token that is not shown at the very beginning."""
    data: bytearray = field(default_factory=bytearray)
    """The text."""
    ids: list[int] = field(default_factory=list)
    """Draft tokens of the text, the opening not counted."""
    agreed: int = 0
    """Draft tokens that have not changed since the reader last set this."""
    _ends: list[int] = field(default_factory=list)
    """Byte behind each draft token."""
    _marks: list[int] = field(default_factory=list)
    """Byte behind each target token."""

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
        """Tokenise from draft token `start` on. False where no token of the old ones came out again in its place.

        Args:
            words: old and new tokens must meet where a word begins: tokenizers hardly look farther back than that.
        """
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
