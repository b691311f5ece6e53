"""What the demo models read: the training files and fresh edits of their functions, packed into rows by worker
processes while the model trains on the rows before.

Knows how much of what is in a portion. Does not know how a model is trained.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import corpus
import numpy as np
from edits import dialogue, edits
from tokenizer import plain_words
from torch import Tensor, from_numpy
from transformers import PreTrainedTokenizerFast

PORTIONS = 16
"""So many portions hold each training file once."""
OPEN_ROWS = 32
"""Rows that a document may join while they are packed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """What is read, and in rows of how many tokens."""

    tokenizer: Path
    context: int
    library: Path | None = None
    """Where the standard library is; None: that of this interpreter."""
    texts: float = 1.0
    """Share of the files whose text is in their portion, with the conversations cut out of it."""
    edits: float = 1.0
    """Share of the edits that can be made of a portion; each time a file comes round, others are made of it."""
    dialogues: float = 0.5
    """Share of the edits that are followed by edits of the answer."""
    seed: int = 0

    def portion(self, number: int) -> np.ndarray:
        """(rows, context) int16 token ids, in any order; the same for the same `number`."""
        chance = random.Random(f"{self.seed} {number}")
        tokenizer, files = _tokenizer(self.tokenizer), _training_files(self.library)[number % PORTIONS :: PORTIONS]
        read = [file for file in files if chance.random() < self.texts]
        chats = [chat for file in read for chat in corpus.conversations(file)]
        words = plain_words(tokenizer)
        for edit in edits(files, words, seed=chance.getrandbits(32)) if self.edits else ():
            if chance.random() < self.edits:
                chats.append(edit.conversation)
                if chance.random() < self.dialogues:
                    for further in dialogue(edit, words, chance)[1:]:
                        chats[-1] += [{"role": "user", "content": further.request}, further.conversation[1]]
        texts = [file.text for file in read]
        texts += [str(tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
        chance.shuffle(texts)
        documents = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        rows = packed(documents, self.context, mark=tokenizer.eos_token_id)
        chance.shuffle(rows)
        return np.array(rows, dtype=np.int16)


class TokenStream:
    """The batches of a training: portion after portion, made by processes of their own, one for each core but one."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def batches(self, tokens: int, portion: int, first: int) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Endless batches (B, context) int64 of about so many tokens, from row `first` of a portion on, each with where
        the next one begins. The rest of a portion that fills no batch is left out."""
        size, ahead = max(1, tokens // self.reading.context), max(1, (os.cpu_count() or 2) - 1)
        pool = ProcessPoolExecutor(ahead, mp_context=get_context("spawn"))
        coming: list[Future[np.ndarray]] = []
        try:
            while True:
                while len(coming) < 2 * ahead:
                    coming.append(pool.submit(self.reading.portion, portion + len(coming)))
                rows = from_numpy(coming.pop(0).result().astype(np.int64))
                while first + size <= len(rows):
                    begun, first = first, first + size
                    yield rows[begun:first], (portion, first)
                portion, first = portion + 1, 0
        finally:
            pool.shutdown(cancel_futures=True)


def packed(documents: list[list[int]], context: int, mark: int) -> list[list[int]]:
    """All documents in rows of `context` tokens, each opened by the text `mark`: best fit out of the rows at hand. Only
    a document longer than a row is cut; what is left of a row is filled with marks."""
    rows: list[list[int]] = []
    room: list[list[int]] = []  # Rows that may still be joined
    for ids in documents:
        for start in range(0, len(ids), context - 1):
            piece = [mark, *ids[start : start + context - 1]]
            fitting = [row for row in room if len(row) + len(piece) <= context]
            if fitting:
                max(fitting, key=len).extend(piece)
                continue
            rows.append(piece)
            room.append(piece)
            if len(room) > OPEN_ROWS:
                room.remove(max(room, key=len))
    return [row + [mark] * (context - len(row)) for row in rows]


@cache
def _tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return PreTrainedTokenizerFast.from_pretrained(folder)


@cache
def _training_files(library: Path | None) -> list[corpus.SourceFile]:
    return corpus.split(corpus.read_standard_library(library))[0]
