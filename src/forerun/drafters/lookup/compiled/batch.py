"""What compiled code knows of a batch of rows, so that one call sees to all of them.

Each row's text, and its index, is an array of its own that grows; a table has their addresses. Who owns an array keeps
the table right and the array alive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np
from numba.core import types
from numba.core.extending import intrinsic
from numpy.typing import NDArray

from forerun.drafters.lookup.compiled.drafts import KEYS, NODE_TOKEN, Draft, Floats, Ints, compiled, learn

Longs = NDArray[np.int64]

# Columns of a batch's `rows`; a method has further ones from COLUMNS on
TEXT = 0  # Address of the row's text; 0: there is none
COUNTS = 1  # Address of what is known of the drafts of its domain, (KEYS, 2)
ROOM = 2  # Tokens that there is room for
READ = 3  # Tokens that it has
PROMPT = 4  # Tokens of its prompt, the first ones
DRAFTED = 5  # Nodes of its last draft, the root included, until the text goes on; 0: there is none
COLUMNS = 6


class Batch(NamedTuple):
    """All rows of a drafter."""

    rows: Longs  # (R, at least COLUMNS)
    nodes: Ints  # (R, N, NODE_COLUMNS), the last draft of each
    confidence: Floats  # (R, N)


class Gained(NamedTuple):
    """What the texts of some rows go on with, ``tokens[starts[i] : ends[i]]``."""

    tokens: Ints
    starts: Longs
    ends: Longs


class Asked(NamedTuple):
    """Drafts that some rows are asked for."""

    nodes: Longs  # Most of each
    depths: Longs  # Most tokens on a path of each
    chains: Ints  # (B, N) to be written: how many nodes a draft has, the root included, and the token of each other one
    vocabulary: int  # Drafts end before what is no token of it


def address(array: NDArray[Any]) -> int:
    """Where an array's content begins."""
    return int(array.__array_interface__["data"][0])


@intrinsic
def _pointer(context: Any, place: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""
    signature = types.CPointer(kind.dtype)(place, kind)  # type: ignore[attr-defined]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@compiled
def ints_at(place: int, size: int) -> Ints:
    """The int32 array at an address."""
    return numba.carray(_pointer(place, np.int32), size)  # type: ignore[no-any-return, call-arg]


@compiled
def longs_at(place: int, shape: tuple[int, ...]) -> Longs:
    """The int64 array at an address."""
    return numba.carray(_pointer(place, np.int64), shape)  # type: ignore[no-any-return, call-arg]


@compiled
def counts_at(place: int) -> Floats:
    """The (KEYS, 2) float64 array at an address."""
    return numba.carray(_pointer(place, np.float64), (KEYS, 2))  # type: ignore[no-any-return, call-arg]


@compiled
def learn_draft(batch: Batch, row: int, new: Ints) -> None:
    """Learn from the last draft of a row, of which `new` says how its text went on."""
    if batch.rows[row, DRAFTED] > 0:
        learn(batch.nodes[row, : batch.rows[row, DRAFTED]], new, counts_at(batch.rows[row, COUNTS]))
        batch.rows[row, DRAFTED] = 0


@compiled
def room_of(batch: Batch, row: int, nodes: int) -> Draft:
    """Room for a draft of so many nodes besides the root, at most those that there is room for."""
    most = 1 + max(0, min(nodes, batch.nodes.shape[1] - 1))
    return Draft(batch.nodes[row, :most], batch.confidence[row, :most])


@compiled
def fits(batch: Batch, row: int, new: Ints) -> bool:
    """Whether a row has a text, with room for so many more tokens."""
    return bool(batch.rows[row, TEXT] != 0 and batch.rows[row, READ] + len(new) <= batch.rows[row, ROOM])


@compiled
def longest(batch: Batch, row: int, asked: Asked, index: int) -> int:
    """Most tokens on a path for a row, the one at `index` of those that are asked; 0 where it has no text. Until a
    draft is put there, none is written down."""
    asked.chains[index, 0] = 1
    return 0 if batch.rows[row, TEXT] == 0 else min(asked.nodes[index], asked.depths[index])


@compiled
def put_chain(batch: Batch, row: int, size: int, asked: Asked, index: int) -> None:
    """The last draft of a row, the one at `index` of those that are asked, has so many nodes, the root included: note
    it, and write down what is asked for."""
    for node in range(1, size):
        token = batch.nodes[row, node, NODE_TOKEN]
        if not 0 <= token < asked.vocabulary:
            size = node
            break
        asked.chains[index, node] = token
    batch.rows[row, DRAFTED] = asked.chains[index, 0] = size
