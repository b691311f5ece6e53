"""An open datastore: where the text's last words occur, and what followed them. Knows no drafter and no tree."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.drafters.lookup.datastore import format as files
from forerun.drafters.lookup.datastore.format import SUFFIXES, TOKENS, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The places that follow the longest stretch of the text's end that occurs in the datastore."""

    length: int
    """Tokens that match."""
    start: int
    """The first of the places, as an index into the sorted ones."""
    stop: int
    """One beyond the last."""

    @property
    def hits(self) -> int:
        """How many places there are."""
        return self.stop - self.start


class Datastore:
    """A datastore directory, memory-mapped: of files of any size only what is looked at is read. Use `open`."""

    def __init__(
        self, folder: Path, manifest: Manifest, tokens: NDArray[np.uint32], places: NDArray[np.uint32]
    ) -> None:
        self.folder, self.manifest = folder, manifest
        self.tokens = tokens
        """(N,) uint32, see `format`."""
        self.places = places
        """(places,) uint32, see `format`."""

    @classmethod
    def open(cls, folder: str | Path) -> Datastore:
        """Open a directory that `forerun datastore build` wrote.

        Raises:
            DataError: no datastore, another version, an empty one, or files cut short.
        """
        folder = Path(folder).expanduser()
        manifest = files.read_manifest(folder)
        return cls(folder, manifest, files.mapped(folder, TOKENS), files.mapped(folder, SUFFIXES))

    def verify(self) -> None:
        """Compare every byte with the manifest's hashes; DataError if one has changed."""
        files.verify(self.folder, self.manifest)

    def longest(self, text: Sequence[int], *, shortest: int, longest: int) -> Match | None:
        """Where the longest end of `text`, of `shortest` to `longest` tokens, occurs; None if none does.

        Places are sorted by the tokens before them read backwards, so those that match one token more are a part of
        those that match so far: one interval, narrowed token by token, O(log(places)) for each.
        """
        start, stop, length = 0, len(self.places), 0
        for back, token in enumerate(reversed(text[-longest:]), start=1):
            narrower = self._narrowed(start, stop, back, token)
            if narrower[0] == narrower[1]:
                break
            (start, stop), length = narrower, back
        return Match(length=length, start=start, stop=stop) if length >= shortest else None

    def _narrowed(self, start: int, stop: int, back: int, token: int) -> tuple[int, int]:
        """Those of the places ``start:stop`` that have `token` `back` tokens before them.

        All of them match ``back - 1`` tokens, none a separator, so the index stays within the file.
        """
        tokens, places = self.tokens, self.places

        def before(place: int) -> int:
            return int(tokens[place - back])

        left = bisect_left(places, token, start, stop, key=before)
        if left == stop or before(int(places[left])) != token:
            return left, left
        return left, bisect_right(places, token, left, stop, key=before)

    def continuations(self, match: Match, length: int, most: int) -> NDArray[np.uint32]:
        """What followed: (H, length) uint32, ended early by a separator where a document ends.

        Args:
            match: of this datastore.
            length: tokens of each continuation.
            most: largest H; of more places every so manieth is taken, spread evenly over all.
        """
        if match.hits > most:
            chosen = self.places[match.start + np.arange(most) * match.hits // most]
        else:
            chosen = self.places[match.start : match.stop]
        grid = chosen.astype(np.int64)[:, None] + np.arange(length)
        found: NDArray[np.uint32] = self.tokens[np.minimum(grid, len(self.tokens) - 1)]
        return found
