"""From files to prepared data: read, encode, cut, store, count. What `forerun data prepare` does. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ArgumentError, DataError
from forerun.manifests import digest_of
from forerun.training.data.identity import TokenizerIdentity
from forerun.training.data.mask import Encoded, Encoder
from forerun.training.data.read import BadRecords, Record, read_records
from forerun.training.data.store import PreparedData, PreparedWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """How records become documents."""

    max_length: int = 2048
    """Tokens of the longest document; what is beyond is cut off."""
    split_long: bool = False
    """Keep what is beyond as further documents instead."""
    skip_bad: bool = False
    """Leave unusable records out instead of stopping at the first."""
    last_turn_only: bool = False
    """Count the last answer of each conversation only."""

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise ArgumentError(f"max_length must be at least 2 tokens, got {self.max_length}")


@dataclass(kw_only=True, slots=True)
class _Counts:
    """What happened to the records."""

    records: int = 0
    """Read and understood."""
    conversations: int = 0
    """Of these, rendered with the chat template or as prompt and completion."""
    skipped: int = 0
    """Left out as bad."""
    dropped: int = 0
    """Documents without a token that could be learned, after cutting."""
    cut: int = 0
    """Records longer than `max_length`: cut off, or split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The outcome."""

    data: PreparedData
    """What was written, opened."""
    complaints: list[str] = field(default_factory=list)
    """The first few reasons why records were left out."""

    def summary(self) -> dict[str, Any]:
        """Counts and provenance for people and for JSON."""
        manifest = self.data.manifest
        return {
            "output": str(self.data.folder),
            **manifest["counts"],
            "max_length": manifest["max_length"],
            "tokenizer": manifest["tokenizer"]["name"],
            "hash": self.data.hash,
        }


def prepare(
    paths: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    output: str | Path,
    *,
    options: PrepareOptions | None = None,
    name: str | None = None,
    on_record: Callable[[int], None] | None = None,
) -> Prepared:
    """Turn data files into a prepared directory.

    Args:
        paths: JSONL, JSON, parquet or plain text files, in the order in which they shall stand.
        tokenizer: the target's.
        output: the directory to write; must not hold anything yet.
        options: lengths and what to do with bad records.
        name: the target's name for the manifest; the tokenizer's own if None.
        on_record: told the number of records read so far, after each.

    Raises:
        DataError: a file or record that cannot be used, or nothing left to learn from.
    """
    options = options or PrepareOptions()
    files = _distinct([Path(path) for path in paths])
    encoder = Encoder(tokenizer, last_turn_only=options.last_turn_only)
    bad, counts = BadRecords(skip=options.skip_bad), _Counts()
    sources = []
    with PreparedWriter(Path(output)) as writer:
        for path in files:
            before = counts.records
            for record, encoded in _encoded(path, encoder, bad):
                counts.records += 1
                counts.conversations += bool(record.messages)
                _store(encoded, options, writer, counts)
                if on_record is not None:
                    on_record(counts.records)
            sources.append({"path": path.name, "sha256": digest_of(path), "records": counts.records - before})
        counts.skipped = bad.count
        if not writer.documents:
            raise DataError(_nothing(files, bad, counts))
        about = {
            "max_length": options.max_length,
            "options": asdict(options),
            "sources": sources,
            "counts": asdict(counts),
        }
        data = writer.finish(TokenizerIdentity.of(tokenizer, name), about)
    return Prepared(data=data, complaints=bad.examples)


def _encoded(path: Path, encoder: Encoder, bad: BadRecords) -> Iterator[tuple[Record, Encoded]]:
    for record in read_records(path, bad):
        try:
            encoded = encoder.encode(record)
        except DataError as error:
            bad.report(f"{record.where}: {error}")
            continue
        yield record, encoded


def _store(encoded: Encoded, options: PrepareOptions, writer: PreparedWriter, counts: _Counts) -> None:
    length = options.max_length
    counts.cut += len(encoded.tokens) > length
    ends = len(encoded.tokens) if options.split_long else min(length, len(encoded.tokens))
    for start in range(0, ends, length):
        tokens, mask = encoded.tokens[start : start + length], encoded.mask[start : start + length]
        # The first token of a document follows nothing, so it cannot be learned.
        if any(mask[1:]):
            writer.add(tokens, mask)
        else:
            counts.dropped += 1


def _distinct(paths: list[Path]) -> list[Path]:
    if not paths:
        raise DataError("no data file was named")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise DataError(f"data file {path} is named twice")
        seen.add(path.resolve())
    return paths


def _nothing(files: Sequence[Path], bad: BadRecords, counts: _Counts) -> str:
    reasons = f"{bad.count} records were skipped as bad, {counts.dropped} documents had no token that counts"
    first = f"; the first: {bad.examples[0]}" if bad.examples else ""
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    return f"nothing to learn from in {where}: {reasons}{first}"
