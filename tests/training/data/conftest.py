"""A tokenizer of bytes and four special tokens, chat templates of every temper, and files of records."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.training.data.store import PreparedData, write_prepared
from forerun.writing import TokenizerIdentity

PLAIN = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A usual template without markers: the newline after </s> is the template's."""
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{{ '\n' }}{% else %}<{{ m['role'] }}>{{ m['content'] }}</s>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The same, with markers."""
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if loop.last %}{{ m['content'] }}{% else %}{{ m['content'].split('#')[-1] }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Drops what stands before a # in every turn but the last, as thinking templates do."""
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def byte_tokenizer(template: str | None = PLAIN, extra: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """One token per byte; <user>, <assistant>, <system>, <tool> and </s> are special; `extra` are merged words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    merges = []
    for word in extra:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            vocabulary.setdefault(word[:end], len(vocabulary))
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    special = ["</s>", "<user>", "<assistant>", "<system>", "<tool>"]
    model.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>", chat_template=template)


def counted(tokenizer: Any, encoded: Any) -> list[str]:
    """The runs of counted tokens, as text."""
    runs: list[list[int]] = []
    before = False
    for token, counts in zip(encoded.tokens, encoded.mask, strict=True):
        if counts and not before:
            runs.append([])
        if counts:
            runs[-1].append(token)
        before = counts
    return [tokenizer.decode(run) for run in runs]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def store(folder: Path, documents: Iterable[tuple[list[int], list[bool]]], vocab_size: int = 100) -> PreparedData:
    """Prepared data from ready documents."""
    identity = TokenizerIdentity(name="toy", vocab_size=vocab_size, vocabulary="v", template="t")
    return write_prepared(folder, documents, identity)


def random_documents(seed: int, count: int, longest: int) -> list[tuple[list[int], list[bool]]]:
    """Documents of random lengths whose first half is a prompt."""
    random = np.random.default_rng(seed)
    documents = []
    for length in random.integers(2, longest + 1, count).tolist():
        tokens = random.integers(0, 100, length).tolist()
        documents.append((tokens, [place >= length // 2 for place in range(length)]))
    return documents
