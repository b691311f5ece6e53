"""Prepared data are token ids and masks of documents in a directory, from which draft vocabulary
and windows are made, and
what is said of answers that flatter or waste a training.

``tokens.bin`` (int32), ``mask.bin`` (uint8), ``offsets.bin`` (int64, one more than documents), and
``manifest.json`` with the sha256 of each, compared whenever the directory is opened: five bytes a
token, at more than 1 GB a second.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import ArgumentError, DataError, VocabularyMismatchError, refuse
from forerun.losses.objective import TokenBatch
from forerun.writing import ManifestKind, TokenizerIdentity, hash_file, hash_json, replace_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KIND = ManifestKind(
    format="forerun-prepared-data", version=2, what="prepared data", remedy="make some with: forerun data prepare"
)
PARTS: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "mask": np.dtype("u1"), "offsets": np.dtype("<i8")}
UNWRITTEN = -1  # Stands for each token of an answer that has not been generated yet


class PreparedData:
    """A prepared directory: documents are views into memory-mapped files;
    ``len(data)`` is their number.
    """

    def __init__(self, folder: str | Path, *, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        """Open a directory that `forerun data prepare` wrote, and read all of it once to compare
        the checksums.

        DataError for no prepared data, another version, or a file that was cut short or changed;
        VocabularyMismatchError if another `tokenizer` made it, or conversations were written with
        another template.
        """
        self.folder = Path(folder)
        self.manifest = KIND.read(self.folder)
        documents, tokens = self.manifest["counts"]["documents"], self.manifest["counts"]["tokens"]
        self.tokens: NDArray[np.int32] = self._map("tokens", tokens)  # (num_tokens,): all documents, concatenated
        self.mask: NDArray[np.uint8] = self._map("mask", tokens)  # (num_tokens,): 1 where the assistant wrote it
        self.offsets: NDArray[np.int64] = self._map("offsets", documents + 1)  # i is tokens[offsets[i]:offsets[i + 1]]
        if tokenizer is not None:
            self.check_tokenizer(TokenizerIdentity.of(tokenizer))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def hash(self) -> str:
        """Return the sha256 of what was written; it is the data's name in every record of
        provenance.
        """
        return str(self.manifest["hash"])

    @property
    def unwritten(self) -> int:
        """Return the number of documents that are a prompt and room for an answer, `UNWRITTEN` in
        the place of each token.
        """
        return int(self.manifest["counts"].get("unwritten", 0))

    def check_written(self, what: str) -> None:
        """Raise DataError if some answers, which `what` needs, have not been generated yet."""
        if self.unwritten:
            raise DataError(
                f"{self.folder}: {self.unwritten:,} documents are prompts whose answers are yet to be written "
                f"(prepared with --answer-tokens), and {what} needs them: train with objective.writer=target, or let "
                "the target answer before: forerun data regenerate"
            )

    def check_ids(self, vocab_size: int, what: str) -> None:
        """Raise ArgumentError where `what`, which knows so many tokens, has no embedding for one of
        these.
        """
        largest = int(self.tokens.max(initial=0))
        if largest >= vocab_size:
            raise ArgumentError(
                f"{self.folder} holds token id {largest}, and {what} has {vocab_size}: the data's tokenizer "
                f"({self.tokenizer.name!r}) is not its own, or its embedding lacks the tokens that were added to it"
            )

    @property
    def tokenizer(self) -> TokenizerIdentity:
        return TokenizerIdentity(**self.manifest["tokenizer"])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the tokens of each document, (documents,) int64."""
        return np.diff(self.offsets)

    def document(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Return tokens (length,) int32 and mask (length,) uint8 of one document, read-only views;
        or IndexError.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        return self.tokens[start:end], self.mask[start:end]

    def check_tokenizer(self, given: TokenizerIdentity) -> None:
        """Raise VocabularyMismatchError for another vocabulary; for another template where there
        are conversations.
        """
        recorded, again = self.tokenizer, "prepare the data with the target's own tokenizer"
        refuse(
            (
                recorded.vocabulary != given.vocabulary,
                f"{self.folder} was prepared with the tokenizer of {recorded.name!r} ({recorded.vocab_size} tokens), "
                f"which is not that of {given.name!r} ({given.vocab_size} tokens); {again}",
            ),
            (
                recorded.template != given.template and self.manifest["counts"].get("conversations", 0),
                f"{self.folder} holds conversations written with the chat template of {recorded.name!r}, "
                f"which is not that of {given.name!r}; {again}",
            ),
            error=VocabularyMismatchError,
        )

    def _map(self, name: str, length: int) -> NDArray[Any]:
        path, kind = self.folder / f"{name}.bin", PARTS[name]
        expected = length * kind.itemsize
        actual = path.stat().st_size if path.is_file() else None
        if actual != expected:
            state = "is missing" if actual is None else f"has {actual:,} bytes"
            raise DataError(f"{path} {state}, the manifest says {expected:,}; prepare the data again")
        if hash_file(path) != self.manifest["content"][name]:
            raise DataError(f"{path} has changed since it was written: its checksum does not fit; prepare it again")
        # A plain array on the same pages: slicing one is several times faster than slicing a memmap.
        return np.asarray(np.memmap(path, kind, mode="r", shape=(length,)))


def write_prepared(
    folder: Path,
    documents: Iterable[tuple[Sequence[int], Sequence[bool]]],
    tokenizer: TokenizerIdentity,
    about: Mapping[str, Any] | None = None,
) -> PreparedData:
    """Write documents (token ids and mask) as a prepared directory, which appears whole or not at
    all, and open it.

    `about` has further entries of the manifest, read when all documents were; ``counts`` are
    completed here. ArgumentError if there is something in `folder` already.
    """
    check_new(folder)
    about = about or {}
    counts = {"documents": 0, "tokens": 0, "counted_tokens": 0}
    with replace_folder(folder.absolute()) as fresh:
        with ExitStack() as stack:
            files = {name: stack.enter_context((fresh / f"{name}.bin").open("wb")) for name in PARTS}
            files["offsets"].write(np.zeros(1, PARTS["offsets"]).tobytes())
            for tokens, mask in documents:
                assert len(tokens) == len(mask) > 0
                counts["documents"] += 1
                counts["tokens"] += len(tokens)
                counts["counted_tokens"] += int(np.count_nonzero(mask))
                for name, numbers in (("tokens", tokens), ("mask", mask), ("offsets", [counts["tokens"]])):
                    files[name].write(np.asarray(numbers, PARTS[name]).tobytes())
        content = {name: hash_file(fresh / f"{name}.bin") for name in PARTS}
        manifest = {
            "hash": hash_json(content),
            "tokenizer": asdict(tokenizer),
            **about,
            "counts": {**counts, **about.get("counts", {})},
            "content": content,
        }
        KIND.write(fresh, manifest)
    return PreparedData(folder)


def check_new(folder: Path) -> None:
    """Raise ArgumentError if there is something where an output folder shall be."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ArgumentError(f"{folder} exists and is not empty; choose another --output or remove it first")


_BLOCK = 1 << 22


def token_counts(data: PreparedData, vocab_size: int) -> Tensor:
    """Return how often each token counts, (V,) int64, prompts and templates left out; V,
    `vocab_size`, is the target's.

    ArgumentError if the data holds a token id of V or more.
    """
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, data.num_tokens, _BLOCK):
        tokens = data.tokens[start : start + _BLOCK]
        counted = tokens[(data.mask[start : start + _BLOCK] != 0) & (tokens != UNWRITTEN)]
        if counted.size and int(counted.max()) >= vocab_size:
            raise ArgumentError(
                f"{data.folder} holds token id {int(counted.max())}, outside the target's vocabulary of {vocab_size}; "
                f"it was prepared with the tokenizer of {data.tokenizer.name!r}"
            )
        counts += np.bincount(counted, minlength=vocab_size)
    return torch.from_numpy(counts)


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """Return the ids of the most frequent tokens by `counts` (V,), (size,) int64, ascending.

    `counts` are those of `token_counts`. Of equally frequent tokens the lower id comes first.
    ArgumentError if `size` is below 1 or above V.
    """
    if not 1 <= size <= len(counts):
        raise ArgumentError(f"the draft vocabulary must have 1 to {len(counts)} tokens (the target's), got {size}")
    # A stable sort keeps equals in ascending order of id, and tokens that never occur are equals, too.
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Return the share of counted tokens, in [0, 1], that a draft vocabulary can say; 1 where
    nothing was counted.
    """
    total = int(counts.sum())
    return int(counts[ids].sum()) / total if total else 1.0


FIFTH = 5  # One of this many documents is held out when a vocabulary is chosen, to measure its coverage of other text


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftCoverage:
    """How much a draft vocabulary can say, as shares in [0, 1] of the tokens that count."""

    size: int  # Tokens
    coverage: float  # Of the documents that it was chosen from
    held_out_coverage: float | None  # Of every fifth document, if it is chosen from the others; None: there is but one


def draft_coverage(data: PreparedData, vocab_size: int, sizes: Sequence[int]) -> list[DraftCoverage]:
    """Return what draft vocabularies of these sizes cover; errors as in `token_counts` and `draft_vocabulary`."""
    counts, held_out = token_counts(data, vocab_size), np.zeros(vocab_size, np.int64)
    for index in range(min(FIFTH, len(data)) - 1, len(data), FIFTH):
        tokens, mask = data.document(index)
        held_out += np.bincount(tokens[(mask != 0) & (tokens != UNWRITTEN)], minlength=vocab_size)
    unseen, coverages = torch.from_numpy(held_out), list[DraftCoverage]()
    for size in sizes:
        whole = coverage(counts, draft_vocabulary(counts, size))
        other = coverage(unseen, draft_vocabulary(counts - unseen, size)) if len(data) > 1 else None
        coverages.append(DraftCoverage(size=size, coverage=whole, held_out_coverage=other))
    return coverages


BUCKET = 2048  # Segments that are sorted and packed together: large enough to fill windows, small enough to stay random


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """The place of a stretch of a document: in the batch, and in the document."""

    row: int
    column: int
    document: int
    offset: int  # Above 0 where a document longer than the window was split
    length: int


class PackedWindows:
    """Batches of B = `rows` packed windows of S = `length` tokens, a function
    of arguments and step alone.

    Rank r takes rows ``r * rows`` to ``(r + 1) * rows`` of ``rows * world``: 1 process with 8 rows
    and 4 with 2 rows see the same windows in the same order. Segments with fewer than `min_tokens`
    tokens to learn are left out; DataError if none has enough.
    """

    def __init__(self, data: PreparedData, *, length: int, rows: int, seed: int, min_tokens: int = 1) -> None:
        if length < 2 or rows < 1 or min_tokens < 1 or seed < 0:
            raise ArgumentError(
                "windows need length >= 2, rows >= 1, min_tokens >= 1 and seed >= 0, "
                f"got {length}, {rows}, {min_tokens}, {seed}"
            )
        self.data, self.length, self.rows, self.seed = data, length, rows, seed
        self._segments = _cut(data, length, min_tokens)
        if not len(self._segments):
            raise DataError(
                f"no document of {data.folder} has {min_tokens} tokens to learn within a window of {length}; "
                "use longer windows or a smaller min_tokens"
            )
        self._windows = _pack(self._segments[:, 2], length, np.random.default_rng([seed, 0]))
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.empty(0, np.int64))

    def __len__(self) -> int:
        """Return the number of different windows."""
        return len(self._windows)

    def steps_per_epoch(self, world: int = 1) -> int:
        """Return the steps in which every window is seen at least once; the last is filled up with
        the epoch's first windows.
        """
        return -(-len(self) // (self.rows * world))

    def segments(self, step: int, rank: int = 0, world: int = 1) -> list[Segment]:
        """Return the segments in the rows of ``batch(step, rank, world)``, row by row, left to
        right; errors as there.
        """
        if step < 0 or not 0 <= rank < world:
            raise ArgumentError(f"step must be at least 0 and rank below world, got {step}, {rank} of {world}")
        segments = []
        epoch, step = divmod(step, self.steps_per_epoch(world))
        if self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, 1, epoch]).permutation(len(self)))
        first = (step * world + rank) * self.rows
        for row in range(self.rows):
            column = 0
            for number in self._windows[self._order[1][(first + row) % len(self)]]:
                document, offset, length = self._segments[number].tolist()
                segments.append(Segment(row=row, column=column, document=document, offset=offset, length=length))
                column += length
        return segments

    def batch(self, step: int, rank: int = 0, world: int = 1) -> TokenBatch:
        """Return one process's rows of a step, B = `rows`, S = `length`; ArgumentError for a
        negative step, or no such rank.

        A segment's first token never counts: nothing before it may predict it.
        """
        shape = (self.rows, self.length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        mask, documents = np.zeros(shape, bool), np.full(shape, -1, np.int64)
        numbers = [0] * self.rows
        for segment in self.segments(step, rank, world):
            ids, counted = self.data.document(segment.document)
            source = slice(segment.offset, segment.offset + segment.length)
            where = (segment.row, slice(segment.column, segment.column + segment.length))
            tokens[where] = ids[source]
            mask[where] = counted[source]
            mask[segment.row, segment.column] = False
            documents[where] = numbers[segment.row]
            positions[where] = np.arange(segment.length)
            numbers[segment.row] += 1
        arrays = {"tokens": tokens, "loss_mask": mask, "documents": documents, "positions": positions}
        return TokenBatch(**{name: torch.from_numpy(values) for name, values in arrays.items()})


def _cut(data: PreparedData, length: int, min_tokens: int) -> NDArray[np.int64]:
    """Return document, offset and length of each segment, (segments, 3) int64; only what is longer
    than the window is split.
    """
    segments = []
    for document, tokens in enumerate(data.lengths.tolist()):
        whole = data.tokens[data.offsets[document + 1] - 1] != UNWRITTEN  # else no prompt stands before a further piece
        for offset in range(0, tokens if whole else 1, length):
            size = min(length, tokens - offset)
            first = int(data.offsets[document]) + offset
            if np.count_nonzero(data.mask[first + 1 : first + size]) >= min_tokens:
                segments.append((document, offset, size))
    return np.array(segments, np.int64).reshape(-1, 3)


def _pack(lengths: NDArray[np.int64], capacity: int, random: np.random.Generator) -> list[list[int]]:
    """Pack windows as lists of segment numbers: in shuffled buckets the longest first, each where
    least room is left.
    """
    windows: list[list[int]] = []
    order = random.permutation(len(lengths))
    for start in range(0, len(order), BUCKET):
        bucket = order[start : start + BUCKET]
        rooms: list[tuple[int, int]] = []  # (room left, window), ascending
        for segment in bucket[np.argsort(-lengths[bucket], kind="stable")].tolist():
            length = int(lengths[segment])
            index = bisect.bisect_left(rooms, (length, 0))
            if index == len(rooms):
                windows.append([])
                rooms.append((capacity, len(windows) - 1))
            room, window = rooms.pop(index)
            windows[window].append(segment)
            bisect.insort(rooms, (room - length, window))
    return windows


SAMPLED = 2000  # Documents that are looked at
LONGEST_CIRCLE = 32  # Tokens
MANY = 0.05  # Share of them above which something is said


def about_answers(data: PreparedData) -> Iterator[str]:
    """Yield a sentence where many answers of the data run in circles or say nothing."""
    looked = range(0, len(data), max(1, len(data) // SAMPLED))
    circles = silent = 0
    for index in looked:
        tokens, mask = data.document(index)
        written = tokens[(mask != 0) & (tokens != UNWRITTEN)]
        circles += runs_in_circles(written)
        silent += 0 < len(written) <= 2
    if circles > MANY * len(looked):
        yield (
            f"{circles / len(looked):.0%} of the answers run in circles. These are easy to foresee, so figures look "
            "better than they are where the target answers well: let it answer at a temperature above 0, or with fewer "
            "tokens (forerun data regenerate)."
        )
    if silent > MANY * len(looked):
        yield (
            f"{silent / len(looked):.0%} of the answers have two tokens at most, of which there is little to learn: "
            "look at the chat template and at the prompts."
        )


def runs_in_circles(tokens: NDArray[np.int32]) -> bool:
    """Return whether the last tokens repeat the same few, at most `LONGEST_CIRCLE`, three times and 48 tokens long."""
    for period in range(1, LONGEST_CIRCLE + 1):
        span = max(48, 3 * period)
        if len(tokens) >= span and np.array_equal(tokens[-span + period :], tokens[-span:-period]):
            return True
    return False
