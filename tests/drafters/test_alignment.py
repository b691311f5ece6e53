"""Between two tokenizers: token bytes, shared tokens, aligned texts. Checked against the tokenizers' own decoding."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from contract.tongues import OTHERS, WORDS, tongue
from drafters.tongues import CORPUS, TEXT, byte_level, sentencepiece, unigram, wordpiece, words
from forerun.drafters.draft_models.slem import SlemConfig, TextAlignment
from forerun.drafters.draft_models.tli import Dictionary, TliConfig, TokenAlignment, intersection, require
from forerun.drafters.draft_models.token_bytes import (
    SpanEncoder,
    TokenBytes,
    opening_of,
    render_for,
    token_to_bytes,
    whole_characters,
)
from forerun.drafters.vocabulary import tokenizers
from forerun.errors import ArgumentError, VocabularyMismatchError

LOSSLESS = {"byte-level": byte_level, "sentencepiece": sentencepiece, "unigram": unigram}


def pieces_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[bytes]:
    token_bytes = TokenBytes(tokenizer)
    return [token_bytes.of(tokenizer.convert_tokens_to_ids(token)) for token in tokens]


def test_every_notation_is_bytes() -> None:
    assert pieces_of(byte_level(eos_token="<end>"), "Ġthe", "<end>") == [b" the", b"<end>"]
    assert pieces_of(sentencepiece(), "▁the", "<0xE2>", "at") == [b" the", b"\xe2", b"at"]
    assert pieces_of(wordpiece(), "the", "##s") == [b" the", b"s"]
    assert pieces_of(words(), "the") == [b" the"]
    assert TokenBytes(words()).of(99) == b""


@pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram, wordpiece, words])
def test_one_token_is_spelled_as_all_are(make: Any) -> None:
    tokenizer = make(eos_token="<end>") if make is byte_level else make()
    spelled, table = token_to_bytes(tokenizer), TokenBytes(tokenizer)
    assert all(spelled(token) == table.of(token) for token in range(len(table) + 3))


@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_what_tokens_spell_is_what_the_tokenizer_decodes(make: Any) -> None:
    tokenizer = make()
    token_bytes, ids = TokenBytes(tokenizer), tokenizer(TEXT)["input_ids"]
    assert token_bytes.join(ids).decode().removeprefix(" ") == tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_the_places_of_tokens_lie_side_by_side(make: Any) -> None:
    encoder, data = SpanEncoder(TokenBytes(make())), TEXT.encode()
    spans = encoder.encode(data)
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(data)
    for span in spans[1:]:
        assert encoder.token_bytes.of(span.id) == data[span.start : span.end]


def test_a_tokenizer_that_changes_the_text_tells_the_places_itself() -> None:
    spans = SpanEncoder(TokenBytes(wordpiece())).encode("Thé  cats.".encode())
    assert [(span.start, span.end) for span in spans] == [(0, 4), (6, 9), (9, 10), (10, 11)]
    after = SpanEncoder(TokenBytes(wordpiece())).after("thé".encode(), b" cats")
    assert after is not None and [span.start for span in after] == [1, 4]
    assert SpanEncoder(TokenBytes(wordpiece())).after(b"the ca", b"ts") is None


def test_bytes_that_are_no_text_become_single_bytes_or_nothing() -> None:
    data = b"the\xff cat\xe6\xbc"
    for make, spelled in ((byte_level, data), (sentencepiece, b" " + data)):
        encoder = SpanEncoder(TokenBytes(make()))
        assert encoder.token_bytes.join(span.id for span in encoder.encode(data)) == spelled
        assert encoder.encode(data)[-1].end == len(data)
    spans = SpanEncoder(TokenBytes(unigram())).encode(data)
    assert spans[-1].end == len(data) - 2


def test_whole_characters() -> None:
    data = "aé漢😀b".encode()
    for length in range(len(data) + 1):
        assert whole_characters(data[:length]) == len(data[:length].decode(errors="ignore").encode())
    assert whole_characters(b"a\xff") == 2
    assert whole_characters(b"\x80\x80\x80") == 3


def test_a_token_across_the_border_is_no_continuation() -> None:
    encoder = SpanEncoder(TokenBytes(tongue(WORDS)))
    assert encoder.after(b"fa", b"bc") is None
    found = encoder.after(b"fa", b"ab")
    assert found == [(WORDS.index("ab"), 0, 2)]


@pytest.mark.parametrize("piece", [b"cat", b" the", b"\n", b"th"])
@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_a_piece_inside_a_text_gets_no_space(make: Any, piece: bytes) -> None:
    encoder = SpanEncoder(TokenBytes(make()))
    assert encoder.token_bytes.join(span.id for span in encoder.encode(piece, opening=False)) == piece


def test_shared_tokens_spell_the_same_come_once_and_lie_within_both_embeddings() -> None:
    target, draft = TokenBytes(byte_level()), TokenBytes(sentencepiece())
    shared = intersection(target, draft, len(target), len(draft))
    ours, theirs = shared.T.tolist()
    assert [target.of(token) for token in ours] == [draft.of(token) for token in theirs]
    assert len(set(ours)) == len(set(theirs)) == len(ours) and ours == sorted(ours)
    common = {piece for piece in target.table if piece} & {piece for piece in draft.table if piece}
    assert len(shared) == len(common) and b" the" in common
    letter = theirs[ours.index(target.ordinary[b"a"])]
    assert draft.tokenizer.convert_ids_to_tokens(letter) == "a", "not <0x61>"
    target, draft = TokenBytes(byte_level()), TokenBytes(byte_level())
    shared = intersection(target, draft, 200, 150)
    assert len(shared) == 150 and int(shared[:, 0].max()) == 149


def test_special_tokens_are_shared_by_name_and_by_role_and_are_no_letters() -> None:
    target = TokenBytes(byte_level(eos_token="<end>", pad_token="<pad>", bos_token="<turn>"))
    draft = TokenBytes(byte_level("code", eos_token="</s>", pad_token="<pad>", bos_token="<s>", sep_token="<turn>"))
    names = {token: target.tokenizer.convert_ids_to_tokens(token) for token in target.specials}
    pairs = {names[o]: draft.tokenizer.convert_ids_to_tokens(t) for o, t in target.counterparts(draft).items()}
    assert pairs == {"<end>": "</s>", "<turn>": "<turn>"}
    shown = render_for(target, draft)
    assert [shown[token] for token in sorted(names)] == [
        {"<end>": b"</s>", "<turn>": b"<turn>", "<pad>": b""}[names[token]] for token in sorted(names)
    ]
    target = TokenBytes(byte_level(eos_token="a b"))
    assert target.tokenizer.eos_token_id not in target.ordinary.values()


def test_too_few_common_tokens_are_refused_by_both_names() -> None:
    target, draft = TokenBytes(tongue(WORDS)), TokenBytes(tongue(tuple("mnopqrstuvw")))
    none = intersection(target, draft, 12, 11)
    with pytest.raises(VocabularyMismatchError, match=r"\(12 tokens\).*\(11 tokens\).*no common tokens.*slem"):
        require(none, 0.0, target, draft)
    nine = intersection(target, TokenBytes(tongue(OTHERS)), 12, 12)
    require(nine, 9, target, target)
    require(nine, 0.75, target, target)
    for least in (10, 0.9):
        with pytest.raises(VocabularyMismatchError, match=r"9 common tokens, fewer than 1[01].*lower min_shared"):
            require(nine, least, target, target)


def test_the_dictionary_writes_what_the_draft_lacks_in_its_own_tokens() -> None:
    target, draft = TokenBytes(tongue(WORDS)), TokenBytes(tongue(OTHERS))
    dictionary = Dictionary(target, SpanEncoder(draft), 12)
    for token, piece in enumerate(WORDS):
        assert dictionary[token] == [OTHERS.index(letter) for letter in piece]
    assert Dictionary(target, SpanEncoder(draft), 5)[WORDS.index("ab")] == [OTHERS.index("a")], "b is beyond it"


@pytest.mark.parametrize("bos", [None, "<s>"])
def test_token_alignments_grow_and_shrink(bos: str | None) -> None:
    draft = byte_level("code", **({"bos_token": bos} if bos else {}))
    if bos:
        draft.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", draft.bos_token_id)]
        )
    target = TokenBytes(byte_level(bos_token="<begin>"))
    dictionary = Dictionary(target, SpanEncoder(TokenBytes(draft)), 400)
    assert opening_of(TokenBytes(draft)) == ([draft.bos_token_id] if bos else [])
    rng, text, alignment = random.Random(3), list[int](), TokenAlignment(dictionary)
    for _ in range(80):
        if rng.random() < 0.4:
            del text[rng.randrange(len(text) + 1) :]
            alignment.shrink(len(text))
        text += [rng.randrange(len(target)) for _ in range(rng.randrange(4))]
        fresh = TokenAlignment(dictionary)
        assert alignment.follow(text) == fresh.follow(text)
        assert [alignment.span(n) for n in range(1, len(text) + 1)] == [
            len(TokenAlignment(dictionary).follow(text[:n])) for n in range(1, len(text) + 1)
        ]
    first = [target.tokenizer.bos_token_id, target.ordinary[b"a"]]
    assert TokenAlignment(dictionary).follow(first)[-1] == draft.convert_tokens_to_ids("a")
    assert len(TokenAlignment(dictionary).follow(first)) == (2 if bos else 1), "one beginning, not two"


def text_alignment(target: TokenBytes, draft: TokenBytes, look_behind: int) -> TextAlignment:
    return TextAlignment(encoder=SpanEncoder(draft), shown=render_for(target, draft), look_behind=look_behind)


@pytest.mark.parametrize("look_behind", [4, 10])
@pytest.mark.parametrize("make", LOSSLESS.values(), ids=LOSSLESS)
def test_a_text_that_grows_reads_as_if_it_came_at_once(make: Any, look_behind: int) -> None:
    target, draft = TokenBytes(byte_level("code")), TokenBytes(make())
    tokens = target.tokenizer(" ".join([*CORPUS["code"], TEXT, *CORPUS["cat"]]))["input_ids"]
    alignment = text_alignment(target, draft, look_behind)
    for length in range(1, len(tokens) + 1, 3):
        alignment.follow(tokens[:length])
    data = target.join(tokens)
    assert bytes(alignment.data) == data
    assert alignment.follow(tokens) == [span.id for span in SpanEncoder(draft).encode(data)]


@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_growing_and_shrinking_loses_nothing(seed: int) -> None:
    target, draft = TokenBytes(byte_level()), TokenBytes(byte_level("code"))
    rng, text, alignment, known = random.Random(seed), list[int](), text_alignment(target, draft, 3), list[int]()
    for _ in range(60):
        if rng.random() < 0.3:
            del text[rng.randrange(len(text) + 1) :]
            alignment.shrink(len(text))
        text += [rng.randrange(len(target)) for _ in range(rng.randrange(1, 5))]
        ids = alignment.follow(text)
        assert draft.join(ids) == target.join(text) and alignment.covered == len(alignment.data)
        assert ids[: alignment.agreed] == known[: alignment.agreed]
        known, alignment.agreed = list(ids), len(ids)


def test_what_the_draft_cannot_write_is_left_uncovered() -> None:
    target, draft = TokenBytes(byte_level()), TokenBytes(unigram())
    tokens: Sequence[int] = [*target.tokenizer("the é")["input_ids"]]
    alignment = text_alignment(target, draft, 4)
    alignment.follow(tokens[:-1])
    assert alignment.data[alignment.covered :] == "é".encode()[:1]
    alignment.follow(tokens)
    assert alignment.covered == len(alignment.data)


def test_missing_tokenizers_are_asked_for() -> None:
    setup: Any = SimpleNamespace(tokenizer=None)
    with pytest.raises(ArgumentError, match=r"slem needs the target's tokenizer.*target_tokenizer="):
        tokenizers("slem", SlemConfig(model="nowhere"), setup)
    given = words()
    with pytest.raises(ArgumentError, match=r"tli: no tokenizer was found.*tokenizer=DIRECTORY"):
        tokenizers("tli", TliConfig(model=SimpleNamespace(name_or_path=""), target_tokenizer=given), setup)
    both = TliConfig(model="nowhere", tokenizer=given, target_tokenizer=given)
    assert all(one is given for one in tokenizers("tli", both, setup))
