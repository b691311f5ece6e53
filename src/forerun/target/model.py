"""`Target`: a transformers causal LM seen as "score this token tree", on a row-and-slot cache.

A sequence with committed tokens ``t[0..S]`` keeps S of them in the cache; the last one, the root, is run with the
next tree. Knows no drafter and no verification rule. Not safe for use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.errors import ArgumentError
from forerun.target import masks
from forerun.target.buckets import Buckets
from forerun.target.cache import SlotCache
from forerun.target.capture import captured, check_signals
from forerun.target.load import LoadOptions, open_model, refuse_unsupported, text_config
from forerun.target.nouns import Scored
from forerun.target.parts import OutputHead, base_of, layers_of
from forerun.tree import ancestor_mask
from forerun.types import LAST_HIDDEN, Draft, Signal

PIECE = 512
"""Most prompt tokens of a row in one pass."""
DEFAULT_SLOTS = 4096
"""Cache slots of a row where nobody asked for a number and the context is longer."""


class Target:
    """A causal LM with a cache of `rows` x `slots` tokens."""

    def __init__(self, model: Any, *, rows: int = 1, slots: int | None = None, buckets: Buckets | None = None) -> None:
        """Wrap a model that is already loaded; most callers want `load`."""
        refuse_unsupported(model)
        self.model = model
        self.config = text_config(model)
        self.generation_config = model.generation_config
        self.name_or_path: str = str(model.name_or_path)
        self.vocab_size: int = self.config.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.max_length: int = self.config.max_position_embeddings
        """Most positions that the model was made for."""
        self.rows = rows
        self.slots = slots if slots is not None else min(self.max_length, DEFAULT_SLOTS)
        self.buckets = buckets if buckets is not None else Buckets()
        self.lengths: list[int] = [0] * rows
        """Committed tokens in the cache, by row."""
        self.cache = SlotCache(rows, self.slots)
        self._base = base_of(model)
        self._layers_name, self._layers = layers_of(self._base, self.num_layers)
        self._embedding: nn.Module = model.get_input_embeddings()
        self.head = OutputHead(model)
        self._style = masks.MaskStyle.of(self.config)
        self._ran: dict[int, int] = {}

    @classmethod
    def load(
        cls,
        model: Any,
        *,
        rows: int = 1,
        slots: int | None = None,
        dtype: Any = "auto",
        device: Any = None,
        device_map: Any = None,
        tp_plan: Any = None,
        adapter: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        token: str | bool | None = None,
        self_check: bool = True,
        repack: bool | None = None,
        compile: bool = False,
    ) -> Target:
        """Open a directory or hub id, or wrap a model that is already loaded (which is then left alone)."""
        if isinstance(model, (str, Path)):
            options = LoadOptions(
                dtype=dtype,
                device=device,
                device_map=device_map,
                tp_plan=tp_plan,
                adapter=adapter,
                revision=revision,
                trust_remote_code=trust_remote_code,
                token=token,
            )
            model = open_model(model, options)
        return cls(model.eval(), rows=rows, slots=slots)

    @property
    def device(self) -> torch.device:
        """Where token ids go in."""
        return next(self._embedding.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states and masks."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @torch.inference_mode()
    def prefill(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        signals: Set[Signal] = frozenset(),
        all_logits: bool = False,
    ) -> Scored:
        """Append ``tokens[i]`` to row ``rows[i]``.

        Returns:
            logits (B, 1, V) after the last token of each row, or (B, M, V) with `all_logits`; signals (B, M, H), left
            aligned, M the longest chunk.

        Raises:
            ArgumentError: a chunk is empty, or does not fit the row's slots or the context.
        """
        counts = [len(chunk) for chunk in tokens]
        self._check_rows(rows, counts)
        if min(counts) < 1:
            raise ArgumentError("every row of a prefill needs at least one token")
        check_signals(signals, self.num_layers)
        kept: dict[Signal, Tensor] = {}
        logits: Tensor | None = None
        for start in range(0, max(counts), PIECE):
            active = [index for index, count in enumerate(counts) if count > start]
            pieces = [list(tokens[index][start : start + PIECE]) for index in active]
            states, caught = self._append([rows[index] for index in active], pieces, signals)
            for signal, value in caught.items():
                _place(kept, signal, value, (active, start, len(rows), max(counts)))
            logits = self._prefill_logits(logits, states, (active, start, counts, all_logits))
        assert logits is not None
        return Scored(logits=logits, signals=kept)

    @torch.inference_mode()
    def score(
        self,
        rows: Sequence[int],
        roots: Sequence[int],
        draft: Draft,
        *,
        start: int = 0,
        signals: Set[Signal] = frozenset(),
    ) -> Scored:
        """One forward pass over the nodes ``start .. K`` of each row's tree; node 0 is the root, node k stands in slot lengths + k.

        With ``start`` > 0 the nodes before it were run earlier in this step. An empty draft is plain decoding.

        Returns:
            logits (B, N - start, V) and signals (B, N - start, H).

        Raises:
            ArgumentError: the tree does not fit the row's slots or the context.
        """
        check_signals(signals, self.num_layers)
        states, caught = self._score_states(rows, roots, draft, start, signals)
        return Scored(logits=self.head(states), signals=caught)

    @torch.inference_mode()
    def commit(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        """Keep the root and the accepted path (node ids) of each row: gathered into place, lengths grow by 1 + len(path).

        Raises:
            ArgumentError: a path names a node that was not run in this step, or does not rise.
        """
        for row, path in zip(rows, paths, strict=True):
            ran = self._ran.get(row, 0)
            if list(path) != sorted(set(path)) or (path and not 1 <= path[0] <= path[-1] < ran) or ran == 0:
                raise ArgumentError(f"row {row}: cannot commit the path {path}: {ran} nodes were run in this step")
        sources = [[self.lengths[row] + node for node in path] for row, path in zip(rows, paths, strict=True)]
        self.cache.move(rows, sources, [self.lengths[row] + 1 for row in rows])
        for row, path in zip(rows, paths, strict=True):
            self.lengths[row] += 1 + len(path)
            del self._ran[row]

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[i]`` tokens of row ``rows[i]``; 0 frees it. What stands behind stays until overwritten."""
        for row, length in zip(rows, lengths, strict=True):
            if not 0 <= length <= self.lengths[row]:
                raise ArgumentError(f"row {row} holds {self.lengths[row]} tokens and cannot be truncated to {length}")
            self.lengths[row] = length
            self._ran.pop(row, None)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make row `target` hold the first `length` tokens of row `source`."""
        if not 0 <= length <= self.lengths[source]:
            raise ArgumentError(f"row {source} holds {self.lengths[source]} tokens, {length} were asked for")
        self.cache.copy_row(source, target, length)
        self.lengths[target] = length
        self._ran.pop(target, None)

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """The embedding table's rows (.., H) of `tokens` (..)."""
        embedded: Tensor = self._embedding(tokens.to(self.device))
        return embedded

    @torch.inference_mode()
    def lm_head(self, states: Tensor) -> Tensor:
        """Raw logits (.., V) of states after the final norm (.., H), soft caps and scales included."""
        return self.head(states)

    def memory_bytes(self) -> int:
        """Bytes of weights and cache."""
        weights: int = self.model.get_memory_footprint()
        return weights + self.cache.nbytes()

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _append(
        self, rows: Sequence[int], pieces: Sequence[Sequence[int]], signals: Set[Signal]
    ) -> tuple[Tensor, dict[Signal, Tensor]]:
        """Run one prompt piece of each row and commit it; states (B, M, H) after the final norm."""
        size = max(len(piece) for piece in pieces)
        counts = torch.tensor([len(piece) for piece in pieces])
        ids = torch.tensor([[*piece, *[0] * (size - len(piece))] for piece in pieces])
        steps = torch.arange(size)
        sees = torch.ones(size, size, dtype=torch.bool).tril().expand(len(rows), -1, -1)
        nodes = _Nodes(ids, steps.expand(len(rows), -1), sees, steps < counts.unsqueeze(1), 0)
        states, caught = self._forward(rows, nodes, signals, pad=False)
        for row, piece in zip(rows, pieces, strict=True):
            self.lengths[row] += len(piece)
            self._ran.pop(row, None)
        return states, caught

    def _score_states(
        self, rows: Sequence[int], roots: Sequence[int], draft: Draft, start: int, signals: Set[Signal]
    ) -> tuple[Tensor, dict[Signal, Tensor]]:
        counts = draft.counts.cpu()
        self._check_rows(rows, [1 + count for count in counts.tolist()])
        if not 0 <= start <= draft.size:
            raise ArgumentError(f"start {start} is not among the nodes 0..{draft.size}")
        sees = ancestor_mask(draft.parents.cpu())
        ids = torch.cat([torch.tensor(roots).view(-1, 1), draft.tokens.cpu()], dim=1)
        real = torch.arange(draft.size + 1) <= counts.unsqueeze(1)
        nodes = _Nodes(ids, sees.sum(-1) - 1, sees, real, start)
        result = self._forward(rows, nodes, signals, pad=True)
        self._ran.update((row, 1 + count) for row, count in zip(rows, counts.tolist(), strict=True))
        return result

    def _forward(
        self, rows: Sequence[int], nodes: _Nodes, signals: Set[Signal], *, pad: bool
    ) -> tuple[Tensor, dict[Signal, Tensor]]:
        """One pass of the base model over the nodes from ``nodes.start`` on; states (B, N - start, H)."""
        fresh = nodes.ids.shape[1] - nodes.start
        inputs = self._inputs(rows, nodes, self.buckets.pad_nodes(fresh) if pad else fresh)
        with captured(self._layers, signals) as caught:
            states: Tensor = self._base(**inputs, past_key_values=self.cache, use_cache=True).last_hidden_state
        if LAST_HIDDEN in signals:
            caught[LAST_HIDDEN] = states
        return states[:, :fresh], {signal: value[:, :fresh] for signal, value in caught.items()}

    def _inputs(self, rows: Sequence[int], nodes: _Nodes, size: int) -> dict[str, Any]:
        """Token ids, positions and mask of a pass padded to `size` tokens; tells the cache where they go."""
        lengths = torch.tensor([self.lengths[row] for row in rows])
        used = int((lengths + nodes.real.sum(1)).max())
        width = self.buckets.pad_width(used, self.slots)
        positions = (lengths.unsqueeze(1) + nodes.depths).clamp(max=self.max_length - 1)
        slots = torch.where(nodes.real, lengths.unsqueeze(1) + torch.arange(nodes.ids.shape[1]), self.cache.dump)
        sees = nodes.sees & nodes.real.unsqueeze(2)
        query = slice(nodes.start, None)
        missing = size - (nodes.ids.shape[1] - nodes.start)
        block = masks.Block(
            lengths=lengths.to(self.device),
            sees=nn.functional.pad(sees[:, query], (0, 0, 0, missing)).to(self.device),
            query_positions=nn.functional.pad(positions[:, query], (0, missing)).to(self.device),
            node_positions=positions.to(self.device),
        )
        self.cache.begin(
            rows, nn.functional.pad(slots[:, query], (0, missing), value=self.cache.dump).to(self.device), width
        )
        mask = masks.build(block, self._style, width, self.dtype)
        return {
            "input_ids": nn.functional.pad(nodes.ids[:, query], (0, missing)).to(self.device),
            "position_ids": block.query_positions,
            "attention_mask": mask,
        }

    def _prefill_logits(
        self, logits: Tensor | None, states: Tensor, where: tuple[list[int], int, list[int], bool]
    ) -> Tensor:
        active, start, counts, all_logits = where
        size = states.shape[1]
        if all_logits:
            values = self.head(states)
            if logits is None:
                logits = values.new_zeros(len(counts), max(counts), values.shape[-1])
            logits[active, start : start + size] = values
            return logits
        ending = [index for index, row in enumerate(active) if counts[row] <= start + size]
        if ending:
            last = states[ending, [counts[active[index]] - start - 1 for index in ending]]
            values = self.head(last.unsqueeze(1))
            if logits is None:
                logits = values.new_zeros(len(counts), 1, values.shape[-1])
            logits[[active[index] for index in ending]] = values
        return logits if logits is not None else states.new_zeros(0)

    def _check_rows(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        if len(set(rows)) != len(rows) or not rows or not all(0 <= row < self.rows for row in rows):
            raise ArgumentError(f"rows must be distinct and in 0..{self.rows - 1}, got {list(rows)}")
        for row, count in zip(rows, counts, strict=True):
            if self.lengths[row] + count > self.slots:
                raise ArgumentError(
                    f"row {row} holds {self.lengths[row]} tokens, {count} more do not fit its {self.slots} cache slots; raise slots"
                )


class _Nodes:
    """The tokens of a pass on the host: committed prompt tokens are a chain."""

    def __init__(self, ids: Tensor, depths: Tensor, sees: Tensor, real: Tensor, start: int) -> None:
        self.ids = ids
        """(B, N)"""
        self.depths = depths
        """(B, N)"""
        self.sees = sees
        """(B, N, N) bool"""
        self.real = real
        """(B, N) bool; the rest is padding"""
        self.start = start


def _place(kept: dict[Signal, Tensor], signal: Signal, value: Tensor, where: tuple[list[int], int, int, int]) -> None:
    active, start, batch, size = where
    if signal not in kept:
        kept[signal] = value.new_zeros(batch, size, value.shape[-1])
    kept[signal][active, start : start + value.shape[1]] = value
