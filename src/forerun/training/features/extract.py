"""Runs a source over prepared data and stores what it gives. The same loop for every source.

Documents go whole, sorted by length within stretches of the data so that little of a pass is padding. Knows neither
models nor terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from forerun.errors import ArgumentError, DataError
from forerun.training.data.store import TokenizerIdentity
from forerun.training.features.manifest import FeatureManifest, checkpoint_directory, dtype_named, target_hash
from forerun.training.features.store import FeatureWriter
from forerun.types import LAST_HIDDEN, Signal

STRETCH = 512
"""Documents that are sorted by length together."""


class Documents(Protocol):
    """Prepared data, as far as features need it; `forerun.training.data.PreparedData` is one."""

    @property
    def hash(self) -> str:
        """Changes when any document does."""
        ...

    def __len__(self) -> int: ...

    def document(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Token ids (L,) and loss mask (L,)."""
        ...

    def check_tokenizer(self, given: TokenizerIdentity) -> None:
        """Refuse a tokenizer that did not make the data."""
        ...


class Source(Protocol):
    """Something that runs the target: `OnlineFeatures` or `VllmFeatures`."""

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What it captures, `LAST_HIDDEN` last."""
        ...

    def documents(self, documents: Sequence[Sequence[int]]) -> Sequence[Mapping[Signal, Tensor]]:
        """The states (L, Ht) of whole documents."""
        ...


def describe(
    directory: Path,
    name: str,
    tokenizer: Any,
    data: Documents,
    boundaries: Sequence[Signal],
    *,
    hidden_size: int,
    dtype: str = "bfloat16",
    source: str = "transformers",
) -> FeatureManifest:
    """The manifest of the features of `data` by the checkpoint in `directory`, for writing or for comparing.

    Args:
        name: of the target, for people.
        tokenizer: the target's, as transformers loads it.
        hidden_size: of the target.
        dtype: one of `manifest.DTYPES`, or a short name.
        source: transformers or vllm.

    Raises:
        VocabularyMismatchError: another tokenizer made the data.
        DataError: there are no documents.
        CheckpointError: no target there.
    """
    identity = TokenizerIdentity.of(tokenizer, name)
    data.check_tokenizer(identity)
    if len(data) == 0:
        raise DataError("the prepared data holds no documents")
    return FeatureManifest(
        target=identity.name,
        target_hash=target_hash(directory),
        boundaries=tuple(boundary for boundary in boundaries if boundary != LAST_HIDDEN),
        dtype=dtype_named(dtype),
        hidden_size=hidden_size,
        tokenizer_hash=identity.vocabulary,
        template_hash=identity.template,
        data_hash=data.hash,
        documents=len(data),
        tokens=sum(document_lengths(data)),
        source=source,
    )


def wanted_manifest(
    target: str | Path, tokenizer: Any, data: Documents, boundaries: Sequence[Signal], hidden_size: int
) -> FeatureManifest:
    """What ``FeatureStore.open(directory, wanted)`` compares a store with before a head is trained from it.

    Args:
        target: directory, hub id or the name of a shipped model.
        boundaries: those that the head reads, in its order; `LAST_HIDDEN` may be among them.

    Raises:
        As `describe`.
    """
    directory = checkpoint_directory(target)
    return describe(directory, str(target), tokenizer, data, boundaries, hidden_size=hidden_size)


def document_lengths(data: Documents) -> list[int]:
    """Tokens of each document."""
    return [len(data.document(index)[0]) for index in range(len(data))]


def check_lengths(lengths: Sequence[int], limit: int) -> None:
    """Refuse data that does not fit before anything is run.

    Raises:
        DataError: a document is empty or longer than `limit` tokens; names the first.
    """
    for index, length in enumerate(lengths):
        if not 1 <= length <= limit:
            raise DataError(
                f"document {index} has {length} tokens, but the target takes 1..{limit}: prepare the data with a "
                "smaller maximum length"
            )


def passes(lengths: Sequence[int], done: Set[int], batch_tokens: int) -> Iterator[list[int]]:
    """The documents of each pass: at most `batch_tokens` tokens with padding, or one longer document.

    The same for the same arguments; documents in `done` are left out.

    Raises:
        ArgumentError: batch_tokens is below 1.
    """
    if batch_tokens < 1:
        raise ArgumentError(f"a pass needs at least one token, got {batch_tokens}")
    for start in range(0, len(lengths), STRETCH):
        stretch = [index for index in range(start, min(start + STRETCH, len(lengths))) if index not in done]
        group: list[int] = []
        for index in sorted(stretch, key=lambda index: (lengths[index], index)):
            # Ascending lengths: the newcomer is the longest.
            if group and (len(group) + 1) * lengths[index] > batch_tokens:
                yield group
                group = []
            group.append(index)
        if group:
            yield group


def extract(
    source: Source,
    data: Documents,
    writer: FeatureWriter,
    *,
    batch_tokens: int = 8192,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Store the features of every document that the writer does not have yet.

    Args:
        batch_tokens: most tokens of a pass, padding included.
        progress: called with the number of tokens stored since the last call.

    Raises:
        DataError: the disk is full, or the source gives other shapes than the manifest says.
        NumericError: NaN or infinite states; everything before is stored.
    """
    lengths = document_lengths(data)
    for group in passes(lengths, writer.done, batch_tokens):
        tokens = [data.document(index)[0].tolist() for index in group]
        for index, states in zip(group, source.documents(tokens), strict=True):
            writer.append(index, states)
            progress(lengths[index])


def sample(data: Documents, tokens: int = 64) -> list[int]:
    """The beginning of the longest of the first documents, for the probe."""
    first = [data.document(index)[0] for index in range(min(len(data), 16))]
    longest: list[int] = max(first, key=len)[:tokens].tolist()
    return longest
