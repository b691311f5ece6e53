"""The state of a batch of rows for compiled code, so that a single call handles all rows.

The text of each row, with its index, is a growing array of its own; a table has the addresses of these arrays. The
owner of an array keeps the array alive and updates the table when the array moves.
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
COUNTS = 1  # Address of the acceptance counts of its isolation domain, (KEYS, 2)
ROOM = 2  # Capacity of its text, in tokens
READ = 3  # Tokens in its text
PROMPT = 4  # Tokens of its prompt
DRAFTED = 5  # Nodes of its last draft, root included, until the text grows; 0: there is none
COLUMNS = 6


# Rows of an array (WORK, B), the work for B rows of a batch: each reads tokens, then drafts
ROW = 0  # Its index in the batch
START, END = 1, 2  # Span of the given tokens that are appended to its text
NODES, DEPTH = 3, 4  # Most nodes of its draft, and most tokens on a path; 0: nothing is drafted
WORK = 5


class Batch(NamedTuple):
    """All rows of a drafter."""

    rows: Longs  # (R, at least COLUMNS)
    nodes: Ints  # (R, N, NODE_COLUMNS), the last draft of each row
    confidence: Floats  # (R, N)
    followers: Followers  # Each row's position in the text that it follows over edits
    spare: Draft  # Memory for an alternative draft
    vocabulary: int  # Drafts end before an id outside of it


@compiled
def address(array: NDArray[Any]) -> int:
    """Return the address of an array's data."""
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
    """Return the addresses of a batch's arrays, for `batch_at`: passing one array to compiled code is faster than
    passing nine. A query of `ngram` for one row takes 6.1 us so and 8.6 with the arrays, for 16 rows 17.5 and 20.6; of
    `suffix` 9.9 and 12.4, 75 and 79.
    """
    arrays: list[NDArray[Any]] = [batch.rows, batch.nodes, batch.confidence, *batch.followers, *batch.spare]
    sizes = [*batch.rows.shape, batch.nodes.shape[1], batch.vocabulary]
    return np.array([*sizes, *(address(array) for array in arrays)], np.int64)


@compiled
def batch_at(where: Longs) -> Batch:
    """Return the batch whose arrays have the addresses that `whereabouts` returned."""
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
    """Return a row's text."""
    return ints_at(batch.rows[row, TEXT], batch.rows[row, READ])


@compiled
def counts_of(batch: Batch, row: int) -> Floats:
    """Return the acceptance counts of a row's domain, (KEYS, 2)."""
    return floats_at(batch.rows[row, COUNTS], (KEYS, 2))


@compiled
def learn_draft(batch: Batch, row: int, new: Ints) -> None:
    """Learn from the acceptance of a row's last draft; `new` are the tokens that followed."""
    if batch.rows[row, DRAFTED] > 0:
        learn(batch.nodes[row, : batch.rows[row, DRAFTED]], new, counts_of(batch, row))
        batch.rows[row, DRAFTED] = 0


@compiled
def room_of(batch: Batch, row: int, nodes: int) -> Draft:
    """Return memory for a row's draft of up to `nodes` nodes besides the root, limited to what was allocated."""
    most = 1 + max(0, min(nodes, batch.nodes.shape[1] - 1))
    return Draft(batch.nodes[row, :most], batch.confidence[row, :most])


@compiled
def spare_of(batch: Batch, nodes: int) -> Draft:
    """Return memory for an alternative draft of up to `nodes` nodes besides the root."""
    return Draft(batch.spare.nodes[: 1 + nodes], batch.spare.confidence)


@compiled
def keep(made: Draft, spare: Draft, size: int) -> None:
    """Replace a draft by the alternative one, which has `size` nodes, root included."""
    for node in range(1, size):
        made.nodes[node] = spare.nodes[node]
        made.confidence[node] = spare.confidence[node]


@compiled
def without_room(batch: Batch, work: Longs) -> int:
    """Return the index of the first of B rows that has no text or no capacity for its new tokens; B if there is
    none.
    """
    for index in range(work.shape[1]):
        columns, new = batch.rows[work[ROW, index]], work[END, index] - work[START, index]
        if columns[TEXT] == 0 or columns[READ] + new > columns[ROOM]:
            return index
    return int(work.shape[1])


@compiled
def put_chain(batch: Batch, row: int, size: int, chain: Ints) -> None:
    """Record the size of a row's draft, root included, and write it and the drafted tokens to `chain`."""
    for node in range(1, size):
        token = batch.nodes[row, node, NODE_TOKEN]
        if not 0 <= token < batch.vocabulary:
            size = node
            break
        chain[node] = token
    batch.rows[row, DRAFTED] = chain[0] = size
