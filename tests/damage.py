"""Bytes of stored files that change on the disk, one after the other."""

import random
from collections.abc import Iterator
from pathlib import Path

MOST = 150
"""Places tried in a file; in a longer one as many by chance, its ends among them."""


def flipped(folder: Path) -> Iterator[Path]:
    """The files of a folder, each as often as it has bytes, one bit of one of them changed; put right afterwards."""
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        chance = random.Random(path.name)
        places = range(len(good))
        if len(good) > MOST:
            places = sorted({0, len(good) - 1, *chance.sample(places, MOST)})
        for place in places:
            bad = bytearray(good)
            bad[place] ^= 1 << chance.randrange(8)
            path.write_bytes(bad)
            yield path
        path.write_bytes(good)
