"""Small tokenizers of every kind: byte-level BPE, sentencepiece's BPE and Unigram, WordPiece, whole words."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = {
    "cat": ["the cat sat on the mat and the dog sat on the log, naïvely: 12345 — 漢字"] * 3,
    "code": ["def the_cat(x):\n    return x + 1  # the log\n", "for item in items:\n    yield item\n"] * 3,
}
TEXT = "the cat yields item 12 + é漢😀 on\n    the mat: naïve"


def byte_level(corpus: str = "cat", **special: str) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        **{"vocab_size": 320, "special_tokens": list(special.values())},
        **{"initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet()), "show_progress": False},
    )
    made.train_from_iterator(CORPUS[corpus], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def sentencepiece(**special: str) -> PreTrainedTokenizerFast:
    """As Llama 2 has it: "▁" for a space, one put first, bytes where a character is unknown."""
    pieces = [*special.values(), "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehilmnost"]
    pieces += ["th", "▁th", "at", "▁the", "▁cat"]
    merges = [("t", "h"), ("▁", "th"), ("a", "t"), ("▁th", "e"), ("▁", "cat")]
    vocabulary = {piece: token for token, piece in enumerate([*pieces, "cat"])}
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[*merges[:4], ("c", "at"), merges[4]], unk_token="<unk>", byte_fallback=True
        )
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **special)


def unigram() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False, initial_alphabet=list("xyz+")
    )
    made.train_from_iterator([*CORPUS["cat"], *CORPUS["code"], TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def wordpiece() -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "the", "cat", "##s", "sat", ".", "##at", "c", "e"]
    made = Tokenizer(models.WordPiece({piece: token for token, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(strip_accents=True)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def words() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"the": 0, "cat": 1}, unk_token="the"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)
