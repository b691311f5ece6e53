"""What bytes of text each token of a tokenizer stands for, whatever notation its vocabulary uses.

Byte-level BPE writes bytes as letters, sentencepiece writes a space as "▁" and a lone byte as ``<0xE2>``, WordPiece
marks what continues a word instead of what begins one. Here all of them are bytes, so that tokens can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = ({"type": "Metaspace", "replacement": "\u2581"}, {"type": "ByteFallback"})
"""How tokenizers that are no `tokenizers` object are written; all of transformers' own are sentencepiece's."""
_PRINTABLE = frozenset((*range(33, 127), *range(161, 173), *range(174, 256)))


def byte_letters() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes are themselves, the others letters from 256 upwards."""
    hidden = [byte for byte in range(256) if byte not in _PRINTABLE]
    letters = {chr(byte): byte for byte in _PRINTABLE}
    return letters | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class Spelling:
    """The bytes of every token of a tokenizer, and its special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.specials: dict[int, str] = _specials(tokenizer)
        """Token id -> how the tokenizer writes it in a text."""
        self.fallbacks: set[int] = set()
        """Token ids that are written as ``<0xNN>``."""
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self.pieces: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        """(V,) bytes of each token id; none where no token has that id. A special token spells what it is called."""
        self._fill(vocabulary)

    def __repr__(self) -> str:
        name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        return f"{name} ({len(self.pieces)} tokens)"

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token: int) -> bytes:
        """The bytes of one token; none for ids beyond the vocabulary, which the padding of an embedding may have."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else b""

    def spell(self, tokens: Iterable[int]) -> bytes:
        """The bytes of a text."""
        return b"".join(self.piece(token) for token in tokens)

    @cached_property
    def ordinary(self) -> dict[bytes, int]:
        """Bytes -> the token that stands for them; of several the one that is no ``<0xNN>``, then the lowest id."""
        ids = (token for token, piece in enumerate(self.pieces) if piece and token not in self.specials)
        found: dict[bytes, int] = {}
        for token in sorted(ids, key=lambda token: (token in self.fallbacks, token)):
            found.setdefault(self.pieces[token], token)
        return found

    def counterparts(self, other: Spelling) -> dict[int, int]:
        """Special tokens of this tokenizer -> those of the other: of the same name, else end and beginning of text.

        Padding and unknown tokens have none: they mean nothing that could be carried over.
        """
        named = {text: token for token, text in other.specials.items()}
        pairs = {token: named[text] for token, text in self.specials.items() if text in named}
        for role in ("eos_token_id", "bos_token_id"):
            ours, theirs = getattr(self.tokenizer, role, None), getattr(other.tokenizer, role, None)
            if ours is not None and theirs is not None:
                pairs.setdefault(ours, theirs)
        useless = _useless(self.tokenizer)
        beyond = _useless(other.tokenizer)
        return {ours: theirs for ours, theirs in pairs.items() if ours not in useless and theirs not in beyond}

    def _fill(self, vocabulary: dict[str, int]) -> None:
        bytes_of = _notation(self.tokenizer)
        literal = {token: str(added) for token, added in _added(self.tokenizer).items()} | self.specials
        for text, token in vocabulary.items():
            if _BYTE.fullmatch(text) and token not in literal:
                self.fallbacks.add(token)
            self.pieces[token] = literal[token].encode() if token in literal else bytes_of(text)


def rendering(source: Spelling, reader: Spelling) -> list[bytes]:
    """How the texts of `source` are shown to `reader`, token id by token id: special tokens by the reader's own name.

    Special tokens that the reader has no counterpart for are left out.
    """
    pairs = source.counterparts(reader)
    shown = list(source.pieces)
    for token in source.specials:
        shown[token] = reader.piece(pairs[token]) if token in pairs else b""
    return shown


def _added(tokenizer: PreTrainedTokenizerBase) -> dict[int, Any]:
    """Tokens that are written in texts as they stand."""
    return dict(getattr(tokenizer, "added_tokens_decoder", {}))


def _specials(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    found = {token: str(added) for token, added in _added(tokenizer).items() if getattr(added, "special", False)}
    ids: Sequence[int] = tokenizer.all_special_ids
    found.update((token, str(tokenizer.convert_ids_to_tokens(token))) for token in ids)
    return found


def _useless(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Special tokens without a meaning of their own; padding that doubles as the end of text has one."""
    ends = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    return {tokenizer.pad_token_id, tokenizer.unk_token_id} - ends


def _notation(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """The function from a token as the vocabulary writes it to its bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: _apply(_SENTENCEPIECE, text)
    if backend.decoder is None:  # decoding joins such tokens with spaces
        return lambda text: b" " + text.encode()
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if any(step["type"] == "ByteLevel" for step in steps):
        letters = byte_letters()
        return lambda text: _from_letters(text, letters)
    return lambda text: _apply(steps, text)


def _from_letters(text: str, letters: dict[str, int]) -> bytes:
    """A token outside the alphabet stands as it is: byte-level vocabularies hold such, though no text becomes one."""
    if all(letter in letters for letter in text):
        return bytes(letters[letter] for letter in text)
    return text.encode()


def _apply(steps: Iterable[dict[str, Any]], text: str) -> bytes:
    """What the steps of a decoder make of one token in the middle of a text."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteFallback" and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        if kind == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
        elif kind == "Metaspace":
            text = text.replace(step["replacement"], " ")
        elif kind == "WordPiece":
            text = text.removeprefix(step["prefix"]) if text.startswith(step["prefix"]) else f" {text}"
        elif kind == "BPEDecoder" and text.endswith(step["suffix"]):
            text = f"{text.removesuffix(step['suffix'])} "
    return text.encode()
