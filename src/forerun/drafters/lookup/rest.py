"""REST: drafts what followed the text's last tokens in a corpus.

arXiv 2311.08252: the longest suffix of the text that occurs in a datastore is looked up, its continuations there are
merged into a trie, and the most frequent nodes are the draft. All nodes are deterministic, so above temperature 0 the
target's own sample walks the tree, which is exact and optimal for such trees.

A datastore is a memory-mapped corpus of token ids with a sorted index of positions. Its directory, which
`training.data.datastore` writes, holds

* ``tokens.bin``, uint32 little endian: `SEPARATOR`, then every document followed by `SEPARATOR`.
* ``suffixes.bin``, uint32 little endian: positions in ``tokens.bin`` that have and follow a token of their document,
  sorted by the `SORTED_TOKENS` tokens *before* the position, read backwards: the suffix array of the reversed text. All
  positions that follow the same words are adjacent, for any number of words.
* ``manifest.json``: version, tokenizer, counts, and the bytes and sha256 of both files.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import BINS, Acceptance, Evidence
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafted, DrafterSetup, LearningDrafter, PerDomain, check_least
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.types import Budget
from forerun.writing import ManifestKind, TokenizerIdentity, hash_file

KIND = ManifestKind(
    format="forerun-datastore", version=2, what="a datastore", remedy="make one with: forerun datastore build"
)
TOKENS, SUFFIXES = "tokens.bin", "suffixes.bin"
ITEM: np.dtype[np.uint32] = np.dtype("<u4")
SEPARATOR = 2**32 - 1  # Separates documents; larger than any token id
SORTED_TOKENS = 64  # Number of tokens before a position that decide its order, and so the longest match
MOST_ITEMS = 2**32 - 2  # Most numbers in ``tokens.bin``, because positions have 32 bits


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Datastore:
    """A memory-mapped datastore directory: only the parts that are looked up are read. Use `open`."""

    folder: Path
    manifest: Manifest
    tokens: NDArray[np.uint32]  # (N,) see the top of this file
    places: NDArray[np.uint32]  # (places,) see the top of this file

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Open a directory that `forerun datastore build` wrote. Raises DataError if it does not exist, has another
        version, or is damaged.
        """
        folder = Path(folder).expanduser()
        value = KIND.read(folder)
        files = {name: StoredFile(**stored) for name, stored in value["files"].items()}
        tokenizer = TokenizerIdentity(**value["tokenizer"])
        manifest = Manifest(**{**value, "files": files, "tokenizer": tokenizer, "sources": tuple(value["sources"])})
        items = {TOKENS: manifest.tokens + manifest.documents + 1, SUFFIXES: manifest.places}
        for name, count in items.items():
            path = folder / name
            if not path.is_file():
                raise DataError(f"{path} is missing; {KIND.remedy}")
            found, expected = path.stat().st_size, count * ITEM.itemsize
            if found != expected or manifest.files[name].bytes != expected:
                raise DataError(f"{path} holds {found:,} bytes where {expected:,} were written; {KIND.remedy}")
        if manifest.places == 0:
            raise DataError(f"the datastore in {folder} is empty; {KIND.remedy}")
        # Plain arrays are used: indexing a `np.memmap` costs several times more.
        tokens, places = (np.asarray(np.memmap(folder / name, dtype=ITEM, mode="r")) for name in (TOKENS, SUFFIXES))
        return cls(folder=folder, manifest=manifest, tokens=tokens, places=places)

    def verify(self) -> None:
        """Compare the files with the manifest's hashes, which is slow. Raises DataError if one has changed."""
        for name, stored in self.manifest.files.items():
            if StoredFile.of(self.folder / name) != stored:
                raise DataError(f"{self.folder / name} has changed since it was written; {KIND.remedy}")

    def longest(self, text: Sequence[int], *, shortest: int, longest: int) -> DatastoreMatch | None:
        """Find the longest suffix of `text`, of `shortest` to `longest` tokens, that occurs; None if there is none.
        Positions are sorted by the tokens before them, read backwards, so the matches of a longer suffix are a part of
        the interval of the shorter one: it is narrowed token by token, in O(log(places)) each.
        """
        start, stop, length = 0, len(self.places), 0
        for back, token in enumerate(reversed(text[-longest:]), start=1):
            narrower = self._narrow(start, stop, back, token)
            if narrower[0] == narrower[1]:
                break
            (start, stop), length = narrower, back
        return DatastoreMatch(length, range(start, stop)) if length >= shortest else None

    def _narrow(self, start: int, stop: int, back: int, token: int) -> tuple[int, int]:
        """Return the part of the sorted positions ``start:stop`` that have `token` `back` tokens before them. All of
        them match ``back - 1`` tokens without a separator, so the index stays within the file.
        """
        tokens, places = self.tokens, self.places

        def before(place: int) -> int:
            return int(tokens[place - back])

        left = bisect_left(places, token, start, stop, key=before)
        if left == stop or before(int(places[left])) != token:
            return left, left
        return left, bisect_right(places, token, left, stop, key=before)

    def continuations(self, match: DatastoreMatch, length: int, most: int) -> NDArray[np.uint32]:
        """Return the continuations of a match, (H, length) uint32, which a separator ends early where a document ends.
        Of more than `most` positions an evenly spaced sample is taken.
        """
        chosen = self.places[match.places.start : match.places.stop]
        if len(chosen) > most:
            chosen = chosen[np.arange(most) * len(chosen) // most]
        grid = chosen.astype(np.int64)[:, None] + np.arange(length)
        found: NDArray[np.uint32] = self.tokens[np.minimum(grid, len(self.tokens) - 1)]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFile:
    """Size and hash of one ``.bin`` file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> StoredFile:
        """Describe an existing file; reads all of it."""
        return cls(bytes=path.stat().st_size, sha256=hash_file(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents of ``manifest.json``."""

    tokenizer: TokenizerIdentity  # Tokenizer of these token ids
    documents: int
    tokens: int  # Tokens of all documents, separators not counted
    places: int  # Entries of ``suffixes.bin``
    largest_token: int  # The largest token id that occurs
    sorted_tokens: int  # Longest match that the order allows, tokens
    files: Mapping[str, StoredFile]  # Files by name
    sources: tuple[Mapping[str, Any], ...] = ()  # Name and sha256 of each data file

    def check_tokenizer(self, given: TokenizerIdentity | None, vocabulary: int, where: Path) -> None:
        """Raise VocabularyMismatchError if the target's token ids, which are below `vocabulary`, stand for other
        tokens. `given` is the target's tokenizer; None: only the sizes are compared.
        """
        recorded = self.tokenizer
        if given is not None and given.vocabulary != recorded.vocabulary:
            raise VocabularyMismatchError(
                f"{where} was built with the tokenizer of {recorded.name!r} ({recorded.vocab_size} tokens, sha256 "
                f"{recorded.vocabulary[:12]}), which is not that of {given.name!r} ({given.vocab_size} tokens, sha256 "
                f"{given.vocabulary[:12]}); build a datastore for this target: forerun datastore build --target"
            )
        if max(self.largest_token + 1, recorded.vocab_size if given is None else 0) > vocabulary:
            raise VocabularyMismatchError(
                f"{where} was built with the tokenizer of {recorded.name!r} ({recorded.vocab_size} tokens, the largest "
                f"in use {self.largest_token}), the target has {vocabulary} token ids; build a datastore for "
                "this target"
            )


class DatastoreMatch(NamedTuple):
    """The positions in the datastore that follow the longest suffix of the text."""

    length: int  # Tokens that match
    places: range  # Indices into the sorted places


_LOW = 2**32 - 1
_FEW = 24  # Fewer continuations than this are merged faster in plain Python than by arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class RestConfig:
    """Options of `rest`."""

    datastore: str  # Directory that `forerun datastore build` wrote for this target
    num_speculative_tokens: int = 10  # Most tokens drafted from one position
    max_match: int = 16  # Longest suffix of the text that is looked up, tokens
    min_match: int = 2  # Shortest suffix of the text that counts as a match, tokens
    max_hits: int = 5000  # Most positions of one match that are read; of more, an evenly spaced sample
    nodes: int = 64  # Most nodes of the draft

    def __post_init__(self) -> None:
        check_least("rest", self, num_speculative_tokens=1, min_match=1, max_hits=1, nodes=1)
        if not self.min_match <= self.max_match <= SORTED_TOKENS:
            limits = f"from min_match ({self.min_match}) to {SORTED_TOKENS}, by which datastores are sorted"
            raise ArgumentError(f"rest: max_match must be {limits}; got {self.max_match}")


class RestDrafter(LearningDrafter[Drafted]):
    """Looks up the text's last tokens in a datastore and drafts their most frequent continuations."""

    name = "rest"
    Config = RestConfig

    def __init__(self, config: RestConfig, setup: DrafterSetup) -> None:
        """Open the datastore. Raises DataError if it is missing or damaged; VocabularyMismatchError if it was built
        with another tokenizer.
        """
        super().__init__()
        self.config = config
        self.store = Datastore.open(config.datastore)
        identity = None if setup.tokenizer is None else TokenizerIdentity.of(setup.tokenizer)
        self.store.manifest.check_tokenizer(identity, setup.target.vocab_size, self.store.folder)
        self._estimates = PerDomain(Acceptance)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees, config = context.trees(), self.config
        limits = zip(context.rows, context.tokens, budget.nodes, budget.depth, strict=True)
        for index, (row_id, tokens, nodes, depth) in enumerate(limits):
            self._drafted.pop(row_id, None)
            if nodes < 1 or depth < 1:
                continue
            match = self.store.longest(tokens, shortest=config.min_match, longest=config.max_match)
            if match is None:
                continue
            continuations = self.store.continuations(match, min(config.num_speculative_tokens, depth), config.max_hits)
            trie = merge(continuations, min(nodes, config.nodes))
            acceptance = self._estimates.of(context.salt(index))
            evidence = [_evidence(trie, node, match.length, len(continuations)) for node in range(len(trie.tokens))]
            confidence = [acceptance.estimate(*one) for one in evidence]
            trees[index] = TokenTree.of(tokens[-1], trie.tokens, trie.parents, confidence)
            drafted = self._drafted[row_id] = Drafted(trees[index], acceptance)
            drafted.evidence = dict(enumerate(evidence, start=1))
        return trees


def _evidence(trie: Trie, node: int, match: int, hits: int) -> Evidence:
    """Return the evidence of entry `node` of a trie: by the length of the match, the number of the parent's
    continuations and the node's share of them. One continuation out of one is weaker evidence than a hundred out of a
    hundred; how much weaker is learned.
    """
    parent = trie.parents[node]
    count, total = trie.counts[node], trie.counts[parent - 1] if parent else hits
    key = match.bit_length(), min(total.bit_length(), 8), min(BINS * count // total, BINS - 1)
    return Evidence(key, count / (total + 1))


@dataclass(slots=True)
class Trie:
    """The trie nodes of some continuations by id: node k + 1 is entry k, and 0 is the root."""

    most: int  # Number of nodes to keep
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # Number of continuations through the node

    def floor(self) -> int:
        """Return the count that a deeper node must exceed, because enough shallower nodes have at least that count."""
        return 0 if len(self.counts) < self.most else int(np.partition(self.counts, -self.most)[-self.most])

    def add(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Add nodes; a key has the parent's id in the upper and the token in the lower 32 bits."""
        self.tokens.extend([key & _LOW for key in keys])
        self.parents.extend([key >> 32 for key in keys])
        self.counts.extend(counts)

    def best(self) -> Trie:
        """Return the most frequent nodes, the most frequent first and renumbered; parents precede their children."""
        order = np.argsort(-np.array(self.counts, dtype=np.int64), kind="stable")[: self.most].tolist()
        names = {0: 0} | {node + 1: name for name, node in enumerate(order, start=1)}
        tokens, counts = [self.tokens[node] for node in order], [self.counts[node] for node in order]
        return Trie(self.most, tokens, [names[self.parents[node]] for node in order], counts)


def merge(continuations: NDArray[np.uint32], nodes: int) -> Trie:
    """Return the `nodes` most frequent nodes, at least 1, of the trie of continuations (H, D), which a `SEPARATOR` may
    end early. Of equally frequent nodes the shallower is kept, then the one with the smaller parent, then with the
    smaller token.
    """
    trie = Trie(nodes)
    alive = continuations.astype(np.int64)
    owner = np.zeros(len(alive), np.int64)  # Last node of each continuation so far
    for depth in range(alive.shape[1]):
        if len(alive) <= _FEW:
            _merge_few(alive[:, depth:].tolist(), owner.tolist(), trie)
            break
        keys = (owner << 32) | alive[:, depth]
        distinct, counts = np.unique(keys, return_counts=True)
        kept = ((distinct & _LOW) != SEPARATOR) & (counts > trie.floor())
        distinct, counts = distinct[kept], counts[kept]
        if not len(distinct):
            break
        first = len(trie.tokens) + 1
        trie.add(distinct.tolist(), counts.tolist())
        index = np.searchsorted(distinct, keys).clip(max=len(distinct) - 1)
        lives = distinct[index] == keys
        owner, alive = first + index[lives], alive[lives]
    return trie.best()


def _merge_few(rows: list[list[int]], owner: list[int], found: Trie) -> None:
    """Finish `merge` in plain Python; `rows` are the remaining parts of the continuations."""
    for depth in range(len(rows[0]) if rows else 0):
        keys = [(node << 32) | row[depth] for node, row in zip(owner, rows, strict=True)]
        floor, every = found.floor(), sorted(Counter(keys).items())
        counts = {key: count for key, count in every if count > floor and key & _LOW != SEPARATOR}
        names = {key: node for node, key in enumerate(counts, start=len(found.tokens) + 1)}
        found.add(list(counts), list(counts.values()))
        rows = [row for row, key in zip(rows, keys, strict=True) if key in names]
        owner = [names[key] for key in keys if key in names]
        if not rows:
            return
