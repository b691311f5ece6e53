"""`Target`: a causal LM as "score this token tree, keep this path", whatever runs it.

This is the interface of a back end. `TransformersTarget` runs models of transformers, `LlamaCppTarget` GGUF files on
llama.cpp's kernels. Another one implements the methods that raise NotImplementedError here, and passes
``tests/model/test_back_ends.py``.

A sequence with committed tokens ``t[0..S]`` keeps S of them in the cache; the last one, the root, is run with the next
tree. Not safe for use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch

from forerun.core.tree import TokenTree
from forerun.errors import ArgumentError
from forerun.model.inputs import Buckets, Nodes, Scored
from forerun.model.recordings import Recordings
from forerun.types import Boundary

PREFILL_CHUNK = 512  # Most prompt tokens of a row in one pass


class Target:
    """A causal LM with a cache of `rows` sequences of at most `slots` tokens each."""

    name_or_path: str  # Directory, file or hub id that it was loaded from; empty if unknown
    generation_config: Any = None  # transformers' `GenerationConfig` with the model's defaults, or None
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_length: int  # Most positions of a sequence
    device: torch.device  # Device that token ids go to and logits come from
    dtype: torch.dtype  # Dtype of logits and hidden states
    buckets: Buckets  # Sizes that passes are padded to; may be replaced where `check_reproducible` allows it
    verifying: Recordings  # For rules' questions about its logits
    chains_only = False  # True if a tree may have no branches
    cached_tokens_limit: int | None = None  # Most tokens that all rows together hold; None: all slots of all rows

    def __init__(self, *, rows: int, slots: int) -> None:
        if rows < 1 or slots < 1:
            raise ArgumentError(f"rows and slots must be at least 1, got {rows} and {slots}")
        self.rows = rows
        self.slots = slots
        self.lengths: list[int] = [0] * rows  # Committed tokens in the cache, by row
        self.writes: list[int] = [0] * rows  # Rises whenever what stands in a row's slots changes
        self._ran: dict[int, int] = {}  # Nodes that were run in this step, root included, by row

    @property
    def dtype_name(self) -> str:
        """The number format of the weights by name, for example ``"bfloat16"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def keeps_states(self) -> bool:
        """True if there are recurrent states: a token that has run cannot be taken back then."""
        return False

    @property
    def runs_as(self) -> str:
        """The number format and what computes, in words for people."""
        return f"{self.dtype_name} on {str(self.device).replace('cpu', 'CPU')}"

    @property
    def records(self) -> bool:
        """True if passes are recorded and replayed."""
        return False

    @property
    def computes_padding(self) -> bool:
        """True if every row of a scoring pass costs what its widest row costs; False if only real tokens run."""
        return False

    @property
    def pads_prompts(self) -> bool:
        """True if every row of a prefill costs what its longest chunk costs."""
        return False

    def prefill(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        boundaries: Set[Boundary] = frozenset(),
        all_logits: bool = False,
    ) -> Scored:
        """Append ``tokens[i]`` to row ``rows[i]``. Returns logits (B, 1, V) after the last token of
        each row, or (B, M, V) with `all_logits`, and hidden states (B, M, H), left aligned, M the
        longest chunk. Raises ArgumentError if a chunk is empty, or does not fit the row's slots or
        the context.
        """
        raise NotImplementedError

    def score(
        self,
        rows: Sequence[int],
        trees: Sequence[TokenTree] | Nodes,
        *,
        boundaries: Set[Boundary] = frozenset(),
        padded: bool = True,
    ) -> Scored:
        """Run one forward pass over each row's tree: logits (B, N - start, V) and hidden states (B,
        N - start, H). Raises ArgumentError if a tree does not fit the row's slots or the context,
        or its `resume` does not fit it. With ``padded=False`` logits may be those of the real nodes alone
        (`Scored.flat`): over a large vocabulary padding takes as long as several nodes.

        Node 0 is the root. A tree of its root alone is plain decoding. What the tree's `resume` has begun is
        completed: the logits are those of a whole pass. Of `Nodes`, packed already, those from `Nodes.start` on are
        run; the others were run by the calls before, in this step.
        """
        raise NotImplementedError

    def commit(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the root and the accepted path (node ids) of each row: lengths grow by 1 + len(path). Raises
        ArgumentError if a path names a node that was not run in this step, or does not rise.
        """
        for row, path in zip(rows, paths, strict=True):
            ran = self._ran.get(row, 0)
            if list(path) != sorted(set(path)) or (path and not 1 <= path[0] <= path[-1] < ran) or ran == 0:
                raise ArgumentError(f"row {row}: cannot commit the path {path}: {ran} nodes were run in this step")
        self._keep(rows, paths)
        for row, path in zip(rows, paths, strict=True):
            self.hold(row, self.lengths[row] + 1 + len(path))

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[i]`` tokens of row ``rows[i]``; 0 frees it. `clear` zeroes the others."""
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= self.lengths[row]:
                raise ArgumentError(f"row {row} holds {self.lengths[row]} tokens and cannot be truncated to {length}")
            self._cut(row, length)
            self.hold(row, length)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`."""
        if not 0 <= length <= self.lengths[source]:
            raise ArgumentError(f"row {source} holds {self.lengths[source]} tokens, {length} were asked for")
        self._copy(source, target, length)
        self.hold(target, length)

    def hold(self, row: int, length: int, nodes: int = 0) -> None:
        """Note that a row holds `length` committed tokens, behind which this step has run `nodes`, root included."""
        self.lengths[row] = length
        self._ran[row] = nodes

    def grow(self, rows: int, slots: int) -> None:
        """Give a cache that holds no tokens so many rows, of so many slots each. Raises ArgumentError if a row holds
        tokens, or the back end's cache keeps its size.
        """
        self.check_growth()
        raise NotImplementedError

    def check_growth(self) -> None:
        """Raise ArgumentError if the back end's cache keeps its size."""
        raise ArgumentError(f"the back end that runs {self.name_or_path} gives its cache one size when it is loaded")

    def open_weights(self, folder: Path, tokenizer: Any) -> Any:
        """Return the weights of the checkpoint in a directory in the form that `write_weights` takes; nothing changes.
        Raises a ForerunError if they do not fit, or the back end keeps the weights that it has loaded.
        """
        raise ArgumentError(f"the back end that runs {self.name_or_path} keeps the weights that it has loaded")

    def write_weights(self, weights: Any, folder: Path) -> None:
        """Take `weights`, which were opened in `folder`, in the place of those that passes are run with."""
        raise NotImplementedError

    def reusable(self, row: int, length: int) -> int:
        """Return how many of the first `length` tokens in a row's slots a sequence may begin with: all of them, or up
        to where the row's recurrent states were kept.
        """
        return length

    def restore(self, row: int, length: int) -> None:
        """Let a freed row hold again the first `length` tokens in its slots, which must be `reusable`; its `writes`
        have not changed since it held them.
        """
        self._cut(row, length)
        self.lengths[row] = length

    def clear(self, row: int) -> int:
        """Make sure that nothing behind a row's committed tokens reaches others, were it NaN, and return how many
        slots were cleared.
        """
        raise NotImplementedError

    def announce(self, rows: Sequence[int], length: int) -> None:
        """Let free rows hold `length` tokens, whichever, for passes that are only timed."""
        raise NotImplementedError

    def memory_bytes(self) -> int:
        """Return the bytes of weights and cache."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Return everything that a pass's cost depends on. The values of the weights do not matter, their number and
        type do.
        """
        raise NotImplementedError

    def check_reproducible(self) -> None:
        """Raise ArgumentError if plain and speculative passes cannot compute the same bits."""
        raise NotImplementedError

    def _keep(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        """Do what `commit` does, except for counting."""
        raise NotImplementedError

    def _cut(self, row: int, length: int) -> None:
        """Prepare a row that held ``self.lengths[row]`` tokens to hold the first `length` in its slots."""
        raise NotImplementedError

    def _copy(self, source: int, target: int, length: int) -> None:
        """Do what `copy_row` does, except for counting."""
        raise NotImplementedError

    def check_room(self, rows: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Raise ArgumentError unless so many slots and positions (B,) more fit the rows."""
        if len(set(rows)) != len(rows) or not rows or not all(0 <= row < self.rows for row in rows):
            raise ArgumentError(f"rows must be distinct and in 0..{self.rows - 1}, got {list(rows)}")
        for row, count, reach in zip(rows, slots, positions, strict=True):
            held = self.lengths[row]
            if held + count > self.slots:
                raise ArgumentError(
                    f"row {row} holds {held} tokens; {count} more do not fit its {self.slots} cache slots: raise slots"
                )
            if held + reach > self.max_length:
                raise ArgumentError(
                    f"row {row} holds {held} tokens; {reach} more exceed the context of {self.max_length}"
                )

    def _nodes(self, rows: Sequence[int], trees: Sequence[TokenTree] | Nodes) -> Nodes:
        """Return the trees packed, once they are known to fit."""
        nodes = trees if isinstance(trees, Nodes) else Nodes.of_trees(trees)
        if not 0 <= nodes.start < nodes.ids.shape[1]:
            raise ArgumentError(f"start {nodes.start} is not among the nodes 0..{nodes.ids.shape[1] - 1}")
        self.check_room(rows, nodes.counts, nodes.reach)
        return nodes

    def _note_run(self, rows: Sequence[int], nodes: Nodes) -> None:
        self._ran.update(zip(rows, nodes.counts, strict=True))
