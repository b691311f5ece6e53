"""Turns data files into a datastore: tokenize, sort, write under a temporary name,
rename.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup import rest as layout
from forerun.errors import ArgumentError, DataError
from forerun.training.data.prepare import NO_TEMPLATE, apply_template
from forerun.training.data.records import BadRecords, Record, own_tokens, usable_records
from forerun.training.data.store import check_new
from forerun.writing import TokenizerIdentity, hash_file, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tell = Callable[[str], None]
SORTING_BYTES = 48  # Memory that sorting takes per token: text, ranks, keys and the order that is being made


def build(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    *,
    name: str | None = None,
    bad: BadRecords | None = None,
    tell: Tell = lambda words: None,
) -> layout.Manifest:
    """Build a datastore directory from data files, as `prepare.read_records` takes them, with the
    target's `tokenizer`.

    The manifest calls it `name`. `bad` None stops at the first record that cannot be used; `tell`
    is called with what is being done. DataError for unusable input or nothing to draft from;
    ArgumentError if `output` holds something, or for too much.
    """
    files = [Path(path) for path in paths]
    if not files:
        raise DataError("no data file was named")
    refused = bad or BadRecords(skip=False)
    identity = TokenizerIdentity.of(tokenizer, name)

    def encode(record: Record) -> Sequence[int]:
        return own_tokens(record, identity.vocabulary) if record.tokens else _ids(record, tokenizer)

    documents = (ids for path in files for _, ids in usable_records(path, refused, encode))
    return write(
        documents,
        identity,
        output,
        sources=[{"path": path.name, "sha256": hash_file(path)} for path in files if path.is_file()],
        tell=tell,
    )


def write(
    documents: Iterable[Sequence[int]],
    identity: TokenizerIdentity,
    output: str | Path,
    *,
    sources: Sequence[Mapping[str, Any]] = (),
    tell: Tell = lambda words: None,
) -> layout.Manifest:
    """Write a datastore directory from token ids; errors as in `build`.

    It appears when it is complete, or not at all. Sorting takes `SORTING_BYTES` bytes of memory per
    token; `tell` is called with the sum before it begins.
    """
    final = Path(output).expanduser().absolute()
    check_new(final)
    with replace_folder(final) as folder:
        count = _write_tokens(documents, folder / layout.TOKENS, tell)
        text = np.fromfile(folder / layout.TOKENS, dtype=layout.ITEM)
        tell(f"sorting {len(text):,} tokens in about {len(text) * SORTING_BYTES / 2**20:,.0f} MiB of memory")
        places = sort_places(text, tell)
        if not len(places):
            raise DataError("nothing to draft from: no document has two tokens")
        places.tofile(folder / layout.SUFFIXES)
        manifest = layout.Manifest(
            tokenizer=identity,
            documents=count,
            tokens=len(text) - count - 1,
            places=len(places),
            largest_token=int(text[text != layout.SEPARATOR].max()),
            sorted_tokens=layout.SORTED_TOKENS,
            files={name: layout.StoredFile.of(folder / name) for name in (layout.TOKENS, layout.SUFFIXES)},
            sources=tuple(sources),
        )
        layout.KIND.write(folder, asdict(manifest))
    return manifest


def sort_places(text: NDArray[np.uint32], tell: Tell = lambda words: None) -> NDArray[np.uint32]:
    """Return the contents of ``suffixes.bin``, (places,) uint32, for the contents (N,) of
    ``tokens.bin``.
    """
    order = suffix_order(text[::-1], layout.SORTED_TOKENS, tell)
    # Suffix s of the reversed text begins with the token before place N - s.
    places = len(text) - order[order > 0]
    places = places[(text[places - 1] != layout.SEPARATOR) & (text[places] != layout.SEPARATOR)]
    return places.astype(layout.ITEM)


def suffix_order(text: NDArray[np.uint32], depth: int, tell: Tell = lambda words: None) -> NDArray[np.int64]:
    """Return the beginnings of the text's suffixes, (N,) int64, sorted by at least their first
    `depth` tokens, ties by place.

    Prefix doubling (Manber and Myers 1993): ranks by w tokens, paired, give ranks by 2 w. Stopping
    at `depth` bounds the rounds, however long the text repeats itself.
    """
    rank, width = text.astype(np.uint64), 1
    order = np.arange(len(text))
    while width < depth:
        tell(f"sorting by {2 * width} of {depth} tokens")
        key = rank << np.uint64(32)
        key[:-width] |= rank[width:]
        order = np.argsort(key, kind="stable")
        key = key[order]
        rank[order[:1]] = 0
        rank[order[1:]] = np.cumsum(key[1:] != key[:-1])
        width *= 2
        if len(order) and rank[order[-1]] == len(order) - 1:
            break
    return order


def _write_tokens(documents: Iterable[Sequence[int]], path: Path, tell: Tell) -> int:
    end = np.array([layout.SEPARATOR], dtype=layout.ITEM)
    count, items = 0, 1
    with path.open("wb") as file:
        end.tofile(file)
        for document in documents:
            if not len(document):
                continue
            count, items = count + 1, items + len(document) + 1
            if items > layout.MOST_ITEMS:
                raise ArgumentError(f"more than {layout.MOST_ITEMS:,} tokens fit into no datastore; leave files out")
            np.asarray(document, dtype=layout.ITEM).tofile(file)
            end.tofile(file)
            if count % 100 == 0:
                tell(f"{count:,} documents, {items:,} tokens")
    return count


def _ids(record: Record, tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    """Return the record's token ids as the target would see it: conversations in its chat template."""
    text = record.text
    if record.messages and tokenizer.chat_template:
        text = str(apply_template(tokenizer, record.messages, record.tools, tokenize=False))
    elif record.messages:
        if record.pair is None:
            raise DataError(NO_TEMPLATE)
        text = "".join(record.pair)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
