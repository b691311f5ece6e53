"""Between two tokenizers: spellings, places, shared tokens, readings. Checked against the tokenizers' own decoding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from contract.tongues import OTHERS, WORDS, tongue
from drafters.tongues import CORPUS, TEXT, byte_level, sentencepiece, unigram, wordpiece, words
from forerun.drafters.draft_models.translation import (
    Dictionary,
    Encoder,
    Intersection,
    Spelling,
    TextReading,
    TokenReading,
    draft_tokenizer,
    opening_of,
    rendering,
    require,
    target_tokenizer,
    whole_characters,
)
from forerun.drafters.draft_models.translation.spelling import byte_letters
from forerun.errors import ArgumentError, VocabularyMismatchError

LOSSLESS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram}


def pieces_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[bytes]:
    spelling = Spelling(tokenizer)
    return [spelling.piece(tokenizer.convert_tokens_to_ids(token)) for token in tokens]


def test_the_alphabet_of_bytes_is_the_tokenizers() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_letters().values()) == list(range(256))


def test_every_notation_is_bytes() -> None:
    assert pieces_of(byte_level(eos_token="<end>"), "Ġthe", "<end>") == [b" the", b"<end>"]
    assert pieces_of(sentencepiece(), "▁the", "<0xE2>", "at") == [b" the", b"\xe2", b"at"]
    assert pieces_of(wordpiece(), "the", "##s") == [b" the", b"s"]
    assert pieces_of(words(), "the") == [b" the"]
    assert Spelling(words()).piece(99) == b""


@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_what_tokens_spell_is_what_the_tokenizer_decodes(make: Any) -> None:
    tokenizer = make()
    spelling, ids = Spelling(tokenizer), tokenizer(TEXT)["input_ids"]
    assert spelling.spell(ids).decode().removeprefix(" ") == tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_the_places_of_tokens_lie_side_by_side(make: Any) -> None:
    encoder, data = Encoder(Spelling(make())), TEXT.encode()
    spans = encoder.encode(data)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(data)
    for span in spans[1:]:
        assert encoder.spelling.piece(span.id) == data[span.start : span.end]


def test_a_tokenizer_that_changes_the_text_tells_the_places_itself() -> None:
    spans = Encoder(Spelling(wordpiece())).encode("Thé  cats.".encode())
    assert [(span.start, span.end) for span in spans] == [(0, 4), (6, 9), (9, 10), (10, 11)]
    after = Encoder(Spelling(wordpiece())).after("thé".encode(), b" cats")
    assert after is not None and [span.start for span in after] == [1, 4]
    assert Encoder(Spelling(wordpiece())).after(b"the ca", b"ts") is None


def test_bytes_that_are_no_text_become_single_bytes_or_nothing() -> None:
    data = b"the\xff cat\xe6\xbc"
    for make, spelled in ((byte_level, data), (sentencepiece, b" " + data)):
        encoder = Encoder(Spelling(make()))
        assert encoder.spelling.spell(span.id for span in encoder.encode(data)) == spelled
        assert encoder.encode(data)[-1].end == len(data)
    spans = Encoder(Spelling(unigram())).encode(data)
    assert spans[-1].end == len(data) - 2


def test_whole_characters() -> None:
    data = "aé漢😀b".encode()
    for length in range(len(data) + 1):
        assert whole_characters(data[:length]) == len(data[:length].decode(errors="ignore").encode())
    assert whole_characters(b"a\xff") == 2
    assert whole_characters(b"\x80\x80\x80") == 3


def test_a_token_across_the_border_is_no_continuation() -> None:
    encoder = Encoder(Spelling(tongue(WORDS)))
    assert encoder.after(b"fa", b"bc") is None
    found = encoder.after(b"fa", b"ab")
    assert found == [(WORDS.index("ab"), 0, 2)]


@pytest.mark.parametrize("piece", [b"cat", b" the", b"\n", b"th"])
@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_a_piece_inside_a_text_gets_no_space(make: Any, piece: bytes) -> None:
    encoder = Encoder(Spelling(make()))
    assert encoder.spelling.spell(span.id for span in encoder.encode(piece, opening=False)) == piece


def test_shared_tokens_spell_the_same_and_come_once() -> None:
    target, draft = Spelling(byte_level()), Spelling(sentencepiece())
    shared = Intersection.of(target, draft, len(target), len(draft))
    ours, theirs = shared.target_ids.tolist(), shared.draft_ids.tolist()
    assert [target.piece(token) for token in ours] == [draft.piece(token) for token in theirs]
    assert len(set(ours)) == len(set(theirs)) == len(ours) and ours == sorted(ours)
    common = {piece for piece in target.pieces if piece} & {piece for piece in draft.pieces if piece}
    assert len(shared) == len(common) and b" the" in common
    letter = theirs[ours.index(target.ordinary[b"a"])]
    assert draft.tokenizer.convert_ids_to_tokens(letter) == "a", "not <0x61>"


def test_ids_beyond_an_embedding_are_not_shared() -> None:
    target, draft = Spelling(byte_level()), Spelling(byte_level())
    shared = Intersection.of(target, draft, 200, 150)
    assert len(shared) == 150 and int(shared.target_ids.max()) == 149


def test_special_tokens_are_shared_by_name_and_by_role() -> None:
    target = Spelling(byte_level(eos_token="<end>", pad_token="<pad>", bos_token="<turn>"))
    draft = Spelling(byte_level("code", eos_token="</s>", pad_token="<pad>", bos_token="<s>", sep_token="<turn>"))
    names = {token: target.tokenizer.convert_ids_to_tokens(token) for token in target.specials}
    pairs = {names[o]: draft.tokenizer.convert_ids_to_tokens(t) for o, t in target.counterparts(draft).items()}
    assert pairs == {"<end>": "</s>", "<turn>": "<turn>"}
    shown = rendering(target, draft)
    assert [shown[token] for token in sorted(names)] == [
        {"<end>": b"</s>", "<turn>": b"<turn>", "<pad>": b""}[names[token]] for token in sorted(names)
    ]


def test_a_letter_is_no_special_token_of_the_same_spelling() -> None:
    target = Spelling(byte_level(eos_token="a b"))
    assert target.tokenizer.eos_token_id not in target.ordinary.values()


def test_too_few_common_tokens_are_refused_by_both_names() -> None:
    target, draft = Spelling(tongue(WORDS)), Spelling(tongue(tuple("mnopqrstuvw")))
    none = Intersection.of(target, draft, 12, 11)
    with pytest.raises(VocabularyMismatchError, match=r"\(12 tokens\).*\(11 tokens\).*no common tokens.*slem"):
        require(none, 0.0, target, draft)
    nine = Intersection.of(target, Spelling(tongue(OTHERS)), 12, 12)
    require(nine, 9, target, target)
    require(nine, 0.75, target, target)
    for least in (10, 0.9):
        with pytest.raises(VocabularyMismatchError, match=r"9 common tokens, fewer than 1[01].*lower min_shared"):
            require(nine, least, target, target)


def test_the_dictionary_writes_what_the_draft_lacks_in_its_own_tokens() -> None:
    target, draft = Spelling(tongue(WORDS)), Spelling(tongue(OTHERS))
    dictionary = Dictionary(target, Encoder(draft), 12)
    for token, piece in enumerate(WORDS):
        assert dictionary[token] == [OTHERS.index(letter) for letter in piece]
    assert Dictionary(target, Encoder(draft), 5)[WORDS.index("ab")] == [OTHERS.index("a")], "b is beyond the embedding"


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_token_readings_grow_and_shrink(bos: str | None) -> None:
    draft = byte_level("code", **({"bos_token": bos} if bos else {}))
    if bos:
        draft.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", draft.bos_token_id)]
        )
    target = Spelling(byte_level(bos_token="<begin>"))
    dictionary = Dictionary(target, Encoder(Spelling(draft)), 400)
    assert opening_of(Spelling(draft)) == ([draft.bos_token_id] if bos else [])
    rng, text, reading = random.Random(3), list[int](), TokenReading(dictionary)
    for _ in range(80):
        if rng.random() < 0.4:
            del text[rng.randrange(len(text) + 1) :]
            reading.shrink(len(text))
        text += [rng.randrange(len(target)) for _ in range(rng.randrange(4))]
        fresh = TokenReading(dictionary)
        assert reading.follow(text) == fresh.follow(text)
        assert [reading.span(n) for n in range(1, len(text) + 1)] == [
            len(TokenReading(dictionary).follow(text[:n])) for n in range(1, len(text) + 1)
        ]
    first = [target.tokenizer.bos_token_id, target.ordinary[b"a"]]
    assert TokenReading(dictionary).follow(first)[-1] == draft.convert_tokens_to_ids("a")
    assert len(TokenReading(dictionary).follow(first)) == (2 if bos else 1), "one beginning, not two"


def text_reading(target: Spelling, draft: Spelling, look_behind: int) -> TextReading:
    return TextReading(encoder=Encoder(draft), shown=rendering(target, draft), look_behind=look_behind)


@pytest.mark.parametrize("look_behind", [4, 10])
@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_a_text_that_grows_reads_as_if_it_came_at_once(make: Any, look_behind: int) -> None:
    target, draft = Spelling(byte_level("code")), Spelling(make())
    tokens = target.tokenizer(" ".join([*CORPUS["code"], TEXT, *CORPUS["cat"]]))["input_ids"]
    reading = text_reading(target, draft, look_behind)
    for length in range(1, len(tokens) + 1, 3):
        reading.follow(tokens[:length])
    data = target.spell(tokens)
    assert bytes(reading.data) == data
    assert reading.follow(tokens) == [span.id for span in Encoder(draft).encode(data)]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_growing_and_shrinking_loses_nothing(seed: int) -> None:
    target, draft = Spelling(byte_level()), Spelling(byte_level("code"))
    rng, text, reading, known = random.Random(seed), list[int](), text_reading(target, draft, 3), list[int]()
    for _ in range(60):
        if rng.random() < 0.3:
            del text[rng.randrange(len(text) + 1) :]
            reading.shrink(len(text))
        text += [rng.randrange(len(target)) for _ in range(rng.randrange(1, 5))]
        ids = reading.follow(text)
        assert draft.spell(ids) == target.spell(text) and reading.covered == len(reading.data)
        assert ids[: reading.agreed] == known[: reading.agreed]
        known, reading.agreed = list(ids), len(ids)


def test_what_the_draft_cannot_write_is_left_uncovered() -> None:
    target, draft = Spelling(byte_level()), Spelling(unigram())
    tokens: Sequence[int] = [*target.tokenizer("the é")["input_ids"]]
    reading = text_reading(target, draft, 4)
    reading.follow(tokens[:-1])
    assert reading.data[reading.covered :] == "é".encode()[:1]
    reading.follow(tokens)
    assert reading.covered == len(reading.data)


def test_missing_tokenizers_are_asked_for() -> None:
    setup: Any = SimpleNamespace(tokenizer=None)
    with pytest.raises(ArgumentError, match=r"slem needs the target's tokenizer.*target_tokenizer="):
        target_tokenizer("slem", None, setup)
    with pytest.raises(ArgumentError, match=r"tli: no tokenizer was found.*tokenizer=DIRECTORY"):
        draft_tokenizer("tli", None, SimpleNamespace(name_or_path=""))
    given = words()
    assert target_tokenizer("tli", given, setup) is given is draft_tokenizer("tli", given, "nowhere")
