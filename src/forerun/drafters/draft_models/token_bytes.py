"""The bytes that each token of a tokenizer stands for, and the encoding of bytes as tokens.

Byte-level BPE writes bytes as letters, sentencepiece writes a space as "▁" and a single byte as ``<0xE2>``, WordPiece
marks tokens that continue a word. Here all are bytes, so that tokens of different tokenizers can be compared.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = ({"type": "Metaspace", "replacement": "\u2581"}, {"type": "ByteFallback"})
"""The notation of tokenizers that are not `tokenizers` objects; transformers' own ones all use sentencepiece's."""
_ANCHORS = ("\n", "a", ".")  # Texts that are put before a piece, so that it is not at the beginning


class TokenBytes:
    """The bytes of every token of a tokenizer, and its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # These are matched verbatim in texts
        added: dict[int, Any] = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        ids: Sequence[int] = tokenizer.all_special_ids
        self.specials = {token: str(one) for token, one in added.items() if getattr(one, "special", False)}
        self.specials |= {token: str(tokenizer.convert_ids_to_tokens(token)) for token in ids}  # Id -> name in texts
        self.fallbacks: set[int] = set()  # Token ids that are written as ``<0xNN>``
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.table: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        """(V,) bytes of each token id; for a special token those of its name; empty if no token has that id."""
        bytes_of = _notation(tokenizer)
        literal = {token: str(one) for token, one in added.items()} | self.specials
        for text, token in vocabulary.items():
            if _BYTE.fullmatch(text) and token not in literal:
                self.fallbacks.add(token)
            self.table[token] = literal[token].encode() if token in literal else bytes_of(text)

    def __repr__(self) -> str:
        name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        return f"{name} ({len(self.table)} tokens)"

    def __len__(self) -> int:
        return len(self.table)

    def of(self, token: int) -> bytes:
        """Return the bytes of one token; empty for ids beyond the vocabulary (padding of an embedding)."""
        return self.table[token] if 0 <= token < len(self.table) else b""

    def join(self, tokens: Iterable[int]) -> bytes:
        """Return the bytes of a text."""
        return b"".join(self.of(token) for token in tokens)

    @cached_property
    def ordinary(self) -> dict[bytes, int]:
        """The token of each byte string; of several the one that is not ``<0xNN>``, then the lowest id."""
        ids = (token for token, piece in enumerate(self.table) if piece and token not in self.specials)
        by_bytes: dict[bytes, int] = {}
        for token in sorted(ids, key=lambda token: (token in self.fallbacks, token)):
            by_bytes.setdefault(self.table[token], token)
        return by_bytes

    def counterparts(self, other: TokenBytes) -> dict[int, int]:
        """Map special tokens of this tokenizer to those of the other: by name, or else as end or beginning of text.
        Padding and unknown tokens have no counterpart.
        """
        named = {text: token for token, text in other.specials.items()}
        pairs = {token: named[text] for token, text in self.specials.items() if text in named}
        for role in ("eos_token_id", "bos_token_id"):
            ours, theirs = getattr(self.tokenizer, role, None), getattr(other.tokenizer, role, None)
            if ours is not None and theirs is not None:
                pairs.setdefault(ours, theirs)
        useless, beyond = _useless(self.tokenizer), _useless(other.tokenizer)
        return {ours: theirs for ours, theirs in pairs.items() if ours not in useless and theirs not in beyond}


def token_to_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function like `TokenBytes.of` that does not compute the bytes of all tokens."""
    added, bytes_of = tokenizer.added_tokens_decoder, _notation(tokenizer)

    def of(token: int) -> bytes:
        if token in added:
            return str(added[token]).encode()
        text: str | None = tokenizer.convert_ids_to_tokens(token)
        return b"" if text is None else bytes_of(text)

    return of


def _useless(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the special tokens without a meaning, such as padding, unless they also end a text."""
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    return {tokenizer.pad_token_id, tokenizer.unk_token_id} - ends


def _notation(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """Return the function from a token in the vocabulary's notation to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: _apply(_SENTENCEPIECE, text)
    if backend.decoder is None:  # Decoding joins tokens with spaces
        return lambda text: b" " + text.encode()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if not any(step["type"] == "ByteLevel" for step in steps):
        return lambda text: _apply(steps, text)
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    # A token outside the alphabet stands as it is: byte-level vocabularies hold such, though no text becomes one.
    return lambda text: bytes(map(letters.__getitem__, text)) if letters.keys() >= set(text) else text.encode()


def _apply(steps: Iterable[dict[str, Any]], text: str) -> bytes:
    """Apply a decoder's steps to one token in the middle of a text."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteFallback" and (match := _BYTE.fullmatch(text)):
            return bytes([int(match[1], 16)])
        if kind == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif kind == "WordPiece":
            text = text.removeprefix(step["prefix"]) if text.startswith(step["prefix"]) else f" {text}"
        elif kind == "BPEDecoder" and text.endswith(step["suffix"]):
            text = f"{text.removesuffix(step['suffix'])} "
    return text.encode()


def render_for(source: TokenBytes, reader: TokenBytes) -> list[bytes]:
    """Return, by token id of `source`, the bytes that `reader` reads: for special tokens the reader's own name, or
    nothing.
    """
    pairs, shown = source.counterparts(reader), list(source.table)
    for token in source.specials:
        shown[token] = reader.of(pairs[token]) if token in pairs else b""
    return shown


def opening_of(draft: TokenBytes) -> list[int]:
    """Return the token that the draft model's tokenizer puts before every text, if there is one."""
    first = draft.tokenizer.bos_token_id
    added: list[int] = list(draft.tokenizer("")["input_ids"])
    return [first] if first is not None and added[:1] == [first] else []


def whole_characters(data: bytes | bytearray) -> int:
    """Return the length in bytes of the data without an incomplete UTF-8 character at the end."""
    return codecs.utf_8_decode(data, "replace", False)[1]


def starts_character(data: bytes | bytearray, index: int) -> bool:
    """Return whether `index` is at the border between two characters of the UTF-8 text."""
    return index >= len(data) or data[index] & 0xC0 != 0x80


class Span(NamedTuple):
    """One token and the bytes of the text that it covers."""

    id: int
    start: int
    end: int


class SpanEncoder:
    """A tokenizer as a function from bytes to spans. Tokenizers take text instead of bytes, may put a space before it,
    and may normalise it (case, accents, spaces). So the bytes of the tokens are compared with the given ones; if they
    differ, the offsets that the tokenizer reports are used.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self.token_bytes = token_bytes
        self._bytes = {piece[0]: token for piece, token in token_bytes.ordinary.items() if len(piece) == 1}

    def encode(self, data: bytes, *, opening: bool = True) -> list[Span]:
        """Return the tokens of a text, without special tokens. Bytes that are not UTF-8 become byte tokens, or nothing
        if the vocabulary has none. Only with `opening` may the tokenizer put a space before the text.
        """
        found, end = list[Span](), 0
        for part in _parts(data):
            if isinstance(part, str):
                spans = self._text(part) if opening and not end else self._inside(part)
                found += [Span(s.id, end + s.start, end + s.end) for s in spans]
                end += len(part.encode())
                continue
            for byte in part:
                if byte in self._bytes:
                    found.append(Span(self._bytes[byte], end, end + 1))
                end += 1
        return found

    def after(self, before: bytes, data: bytes) -> list[Span] | None:
        """Return the tokens of `data` after the text `before`, with offsets from the border on; None if a token crosses
        it.
        """
        return _behind(self.encode(before + data), len(before))

    def _inside(self, text: str) -> list[Span]:
        """Return the tokens of a text that is not at the beginning, without an added space if possible."""
        plain, data = self._text(text), text.encode()
        if self._spells(plain, data):
            return plain
        for anchor in _ANCHORS:
            spans = _behind(self._text(anchor + text), len(anchor.encode()))
            if spans is not None and self._spells(spans, data):
                return spans
        return plain

    def _spells(self, spans: list[Span], data: bytes) -> bool:
        return self.token_bytes.join(span.id for span in spans) == data

    def _text(self, text: str) -> list[Span]:
        """Return the tokens of valid text, with offsets in bytes."""
        tokenizer = self.token_bytes.tokenizer
        fast = bool(getattr(tokenizer, "is_fast", False))
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        ids: list[int] = list(encoding["input_ids"])
        data, spelled = text.encode(), self.token_bytes.join(ids)
        if spelled in (data, b" " + data):
            shift = len(spelled) - len(data)
            ends = [max(0, end - shift) for end in accumulate(len(self.token_bytes.of(token)) for token in ids)]
            return [Span(*span) for span in zip(ids, [0, *ends], ends, strict=False)]
        if not fast:
            # The tokenizer has no offsets: one span covers all, so every border is inside it.
            return [Span(token, 0, len(data)) for token in ids]
        bytes_before = [0, *accumulate(len(character.encode()) for character in text)]
        spans = zip(ids, encoding["offset_mapping"], strict=True)
        return [Span(token, bytes_before[start], bytes_before[end]) for token, (start, end) in spans]


def _behind(spans: list[Span], border: int) -> list[Span] | None:
    """Return the spans after `border`, with offsets from there; None if a token crosses it."""
    rest = [Span(s.id, s.start - border, s.end - border) for s in spans if s.end > border]
    return None if rest and rest[0].start < 0 else rest


def _parts(data: bytes) -> Iterator[str | bytes]:
    """Yield the valid UTF-8 parts as text, and the bytes in between."""
    while data:
        try:
            yield data.decode()
            return
        except UnicodeDecodeError as error:
            if error.start:
                yield data[: error.start].decode()
            yield data[error.start : error.end]
            data = data[error.end :]
