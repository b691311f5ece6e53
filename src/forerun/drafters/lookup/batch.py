"""The state of a batch of rows for compiled code, so that one call serves all of them.

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

from forerun.drafters.lookup.drafts import KEYS, NODE_COLUMNS, NODE_TOKEN, Draft, Floats, Ints, compiled, learn
from forerun.drafters.lookup.following import FOLLOWER, REPLACEMENT_COLUMNS, REPLACEMENTS, Followers

Longs = NDArray[np.int64]

# Columns of a batch's `rows`; a method has further ones from COLUMNS on
TEXT = 0  # Address of the row's text; 0: there is none
COUNTS = 1  # Address of what is known of the drafts of its domain, (KEYS, 2)
ROOM = 2  # Tokens that there is room for
READ = 3  # Tokens that it has
PROMPT = 4  # Tokens of its prompt, the first ones
DRAFTED = 5  # Nodes of its last draft, the root included, until the text goes on; 0: there is none
COLUMNS = 6


# Rows of an array (WORK, B), the work for B rows of a batch: each reads on, then drafts
ROW = 0  # Which it is
START, END = 1, 2  # Span of the given tokens by which its text grows
NODES, DEPTH = 3, 4  # Most nodes of a draft, and tokens on a path of it; 0: none is made
WORK = 5


class Batch(NamedTuple):
    """All rows of a drafter."""

    rows: Longs  # (R, at least COLUMNS)
    nodes: Ints  # (R, N, NODE_COLUMNS), the last draft of each
    confidence: Floats  # (R, N)
    followers: Followers  # The place of each row in the text that it copies with changes
    spare: Draft  # Room for a draft that is compared with a better one
    vocabulary: int  # Drafts end before what is no token of it


@compiled
def address(array: NDArray[Any]) -> int:
    """Return the address at which an array's content begins."""
    return int(array.ctypes.data)


@intrinsic
def _pointer(context: Any, place: Any, kind: Any) -> Any:
    """Cast an address to a pointer to numbers of a type."""
    signature = types.CPointer(kind.dtype)(place, kind)  # type: ignore[attr-defined]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@compiled
def ints_at(place: int, shape: Any) -> Ints:
    """Return the int32 array at an address."""
    return numba.carray(_pointer(place, np.int32), shape)  # type: ignore[call-arg]


@compiled
def longs_at(place: int, shape: Any) -> Longs:
    """Return the int64 array at an address."""
    return numba.carray(_pointer(place, np.int64), shape)  # type: ignore[call-arg]


@compiled
def floats_at(place: int, shape: Any) -> Floats:
    """Return the float64 array at an address."""
    return numba.carray(_pointer(place, np.float64), shape)  # type: ignore[call-arg]


def whereabouts(batch: Batch) -> Longs:
    """Return the addresses of a batch's arrays, for `batch_at`: passing one array to compiled code
    costs less than passing ten.
    """
    arrays: list[NDArray[Any]] = [batch.rows, batch.nodes, batch.confidence, *batch.followers, *batch.spare]
    sizes = [*batch.rows.shape, batch.nodes.shape[1], batch.vocabulary]
    return np.array([*sizes, *(address(array) for array in arrays)], np.int64)


@compiled
def batch_at(where: Longs) -> Batch:
    """Return the batch with these `whereabouts`."""
    rows, columns, nodes, vocabulary = where[:4]
    return Batch(
        longs_at(where[4], (rows, columns)),
        ints_at(where[5], (rows, nodes, NODE_COLUMNS)),
        floats_at(where[6], (rows, nodes)),
        Followers(ints_at(where[7], (rows, FOLLOWER)), ints_at(where[8], (rows, REPLACEMENTS, REPLACEMENT_COLUMNS))),
        Draft(ints_at(where[9], (nodes, NODE_COLUMNS)), floats_at(where[10], (nodes,))),
        vocabulary,
    )


@compiled
def text_of(batch: Batch, row: int) -> Ints:
    """Return what was read of a row's text."""
    return ints_at(batch.rows[row, TEXT], batch.rows[row, READ])


@compiled
def counts_of(batch: Batch, row: int) -> Floats:
    """Return the acceptance counts of a row's domain, (KEYS, 2)."""
    return floats_at(batch.rows[row, COUNTS], (KEYS, 2))


@compiled
def learn_draft(batch: Batch, row: int, new: Ints) -> None:
    """Learn from the last draft of a row; `new` is how its text went on."""
    if batch.rows[row, DRAFTED] > 0:
        learn(batch.nodes[row, : batch.rows[row, DRAFTED]], new, counts_of(batch, row))
        batch.rows[row, DRAFTED] = 0


@compiled
def room_of(batch: Batch, row: int, nodes: int) -> Draft:
    """Return room for a draft of so many nodes besides the root, at most those that there is room
    for.
    """
    most = 1 + max(0, min(nodes, batch.nodes.shape[1] - 1))
    return Draft(batch.nodes[row, :most], batch.confidence[row, :most])


@compiled
def spare_of(batch: Batch, nodes: int) -> Draft:
    """Return room for another draft of so many nodes besides the root."""
    return Draft(batch.spare.nodes[: 1 + nodes], batch.spare.confidence)


@compiled
def keep(made: Draft, spare: Draft, size: int) -> None:
    """Copy the nodes of the better draft from the spare room, `size` with the root."""
    for node in range(1, size):
        made.nodes[node] = spare.nodes[node]
        made.confidence[node] = spare.confidence[node]


@compiled
def without_room(batch: Batch, work: Longs) -> int:
    """Return the index of the first of B rows that has no text, or no room for what it reads; B if
    all have both.
    """
    for index in range(work.shape[1]):
        columns, new = batch.rows[work[ROW, index]], work[END, index] - work[START, index]
        if columns[TEXT] == 0 or columns[READ] + new > columns[ROOM]:
            return index
    return int(work.shape[1])


@compiled
def put_chain(batch: Batch, row: int, size: int, chain: Ints) -> None:
    """Record the size of a row's last draft, root included, and write it and the other nodes'
    tokens to `chain`.
    """
    for node in range(1, size):
        token = batch.nodes[row, node, NODE_TOKEN]
        if not 0 <= token < batch.vocabulary:
            size = node
            break
        chain[node] = token
    batch.rows[row, DRAFTED] = chain[0] = size
