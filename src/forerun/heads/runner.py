"""Runs a draft head: feeds it the target's hidden states as tokens are committed, and drafts trees depth by depth.
`unroll` returns the logits after the roots, `descend` those of the next depth; all may be one recording on the device.
An `AdapterRunner` runs a head after the target's first layers: each drafted node goes through them in its own slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.devices import attention_kernels, rows_of, send
from forerun.drafters.drawing import Shape
from forerun.heads.base import (
    Above,
    AdapterHead,
    Advanced,
    Angles,
    Attend,
    AttendingHead,
    BlockHead,
    Head,
    Kept,
    ParallelHead,
    RecurrentHead,
    SequentialHead,
    SharingHead,
)
from forerun.model import TransformersTarget
from forerun.model.cache import SlotCache
from forerun.model.inputs import Nodes, Pass
from forerun.model.kernels.attention import attend
from forerun.model.kernels.packing import packed_bytes
from forerun.model.layers import LayerRange
from forerun.model.masks import FULL, SLIDING, Block, MaskStyle, build
from forerun.model.recordings import Recordings, bucket, extend_rows, first_rows, round_tokens, wide
from forerun.model.target import PREFILL_CHUNK
from forerun.types import Boundary

_COMMITTED = 64  # Most entries that a recorded pass takes: what a step commits, no prompts
Tree = TypeVar("Tree")
Passed = TypeVar("Passed")
Frontier = TypeVar("Frontier")  # The last level of the trees that are being drafted
Level = tuple[Tensor, Frontier]  # Its logits (B, F, V'), and itself
_AtDepth = tuple[Tensor, int]  # A frontier of one tensor, and its depth
HiddenStates = Mapping[Boundary, Tensor]


@dataclass(kw_only=True, slots=True)
class Committed:
    """The tokens that are appended to a runner's rows."""

    index: Tensor  # (B,) int64 of the rows
    ids: Tensor  # (B, N) int64
    last: Tensor  # (B,) int64, where their last tokens stand


class HeadRunner(ABC, Generic[Frontier]):
    """Runs a `Head` beside a target for `rows` sequences of at most `slots` entries, and trees
    behind them of which it runs at most `max_run_nodes` nodes.
    """

    head: Head
    acceptance: Tensor | None = None
    """(B, F) acceptance estimate of a token drawn from the latest level, if the head gives one."""
    _frontier: Frontier | None = None  # None outside `unroll`

    def __init__(self, head: Head, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0) -> None:
        self.head, self.target = head, target
        self.lengths = [0] * rows  # Entries with the target's own features, by row
        weight = head.weight
        self._dtype = weight.dtype
        self.device: torch.device = weight.device  # Kept, because to ask a packed weight for its device unpacks it
        self._features = torch.zeros(rows, head.feature_size, device=self.device, dtype=self._dtype)
        self._roots = torch.zeros(rows, dtype=torch.int64, device=self.device)  # Last tokens, where they are read
        self.recordings = Recordings.on(self.device) if head.recordable else Recordings(None)

    def memory_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.head.parameters()) + packed_bytes(self.head)

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first `length` entries of a row."""
        self.lengths[row] = min(self.lengths[row], length)

    @abstractmethod
    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        """Append entries: ``tokens[b][i]``, at least one a row, follows the token whose feature is
        ``hidden_states[boundary][b, i]``, (B, F, Ht), left aligned.
        """

    def unroll(
        self,
        rows: Sequence[int],
        max_run_nodes: int,
        grow: Callable[..., Tree],
        *numbers: Tensor,
        levels: int | None = None,
        key: Hashable | None = None,
    ) -> Tree:
        """Draft trees from the roots of `rows`, and return what `grow` made; a recording's result
        lives until the next call.

        Args:
            max_run_nodes: most nodes of a row that `grow` lets the head run.
            grow: makes a tree of each row's logits (B, 1, V') at the root, with `descend` for those further down; it is
                called with the logits and the `numbers`.
            numbers: what differs from call to call under one key, on the device.
            levels: of the tree, at most; None: as many as the head drafts.
            key: what `grow` does, so that it can be recorded; None where it reads values on the host.
        """
        count, recorded = len(rows), key is not None and self.recordings.active
        if recorded:  # for as many rows as a recording is: the last one again writes the same to the same slots
            more = bucket(count) - count
            rows = [*rows, *[rows[-1]] * more]
            numbers = tuple(extend_rows(part, more) for part in numbers)
        size = self._make_room(rows, max_run_nodes, levels, recorded)

        def work(index: Tensor, lengths: Tensor, *numbers: Tensor) -> Tree:
            logits, self._frontier = self._begin(rows, index, lengths, size, recorded)
            return grow(logits, *numbers)

        host = torch.tensor(rows), torch.tensor([self.lengths[row] for row in rows])
        whole = (key, len(rows), size) if recorded else None
        tree: Tree = self.recordings.run_sent(whole, work, host, self.device, *numbers)
        self._frontier = None
        return tree if len(rows) == count else first_rows(tree, count)

    @abstractmethod
    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        """Make room for the nodes of `unroll`, and return the size that its work depends on besides the rows."""

    def descend(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return logits (B, F, V') of the next depth, after `tokens` (B, F), children of the nodes
        `parents` (B, F) of the depth before; (B, 1, V') where they are alike. Only inside `unroll`.
        """
        assert self._frontier is not None, "only inside unroll"
        logits, self._frontier = self._descend(self._frontier, tokens, parents)
        return logits

    @abstractmethod
    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[Frontier]:
        """Return logits (B, 1, V') at the roots of `rows`, whose ids are `index` (B,) and entries `lengths` (B,), and
        the frontier there.
        """

    @abstractmethod
    def _descend(self, last: Frontier, tokens: Tensor, parents: Tensor) -> Level[Frontier]:
        """Return the logits of `descend`, and the frontier there, below the frontier `last`."""


class LastStateRunner(HeadRunner[Frontier]):
    """Runs a head that reads one state of a row, that of the token before the root; nothing else is kept of a row."""

    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        counts = [len(row_tokens) for row_tokens in tokens]
        index, last = send((torch.tensor(rows), torch.tensor(counts) - 1), self.device)
        each = torch.arange(len(rows), device=self.device)
        states = [hidden_states[b].to(self.device, self._dtype)[each, last] for b in self.head.config.boundaries]
        self._features[index] = self.head.fuse(states)
        for row, count in zip(rows, counts, strict=True):
            self.lengths[row] += count


class ParallelRunner(LastStateRunner[_AtDepth]):
    """Runs a head that computes all depths of a row from one state; a frontier is the logits (B, depths, V') of all
    levels, and the last level's depth.
    """

    head: ParallelHead

    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        depths = self.head.config.max_depth if levels is None else levels
        assert depths is not None, "a parallel head has so many output heads"
        return depths

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[_AtDepth]:
        logits = self.head.logits(self.head.states(self._features[index], size))
        return logits[:, :1], (logits, 0)

    def _descend(self, last: tuple[Tensor, int], tokens: Tensor, parents: Tensor) -> Level[_AtDepth]:
        logits, depth = last
        return logits[:, depth + 1 : depth + 2], (logits, depth + 1)


class CachedAttention:
    """Appends a layer's keys and values to a cache and attends over it, under the mask of that layer: an `Attend`."""

    def __init__(self, cache: SlotCache, masks: Sequence[Tensor]) -> None:
        self.cache, self.masks, self._pass = cache, masks, Pass()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sinks: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Attend, to the keys `chosen` (B, N, k) alone where a layer has an index, beside `sinks` (heads,): the score
        of a key with value zero.
        """
        keys, values = self.cache.update(key, value, layer)
        mask, scaling = self.masks[layer], None
        if chosen is not None:
            left = torch.ones_like(mask, dtype=torch.bool).scatter(-1, chosen.unsqueeze(1).long(), False)
            mask = mask.masked_fill(left, torch.finfo(mask.dtype).min)
        if sinks is not None:
            scaling = query.shape[-1] ** -0.5
            query, keys, values, mask = _with_sinks(query, keys, values, mask, sinks)
        return attend(query, keys, values, mask, self._pass, scaling=scaling)[..., : value.shape[-1]]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of an attention that has one key more, whose score is that of the head's sink: queries have
    a further dimension in which other keys are zero. Its value is zero, too.
    """
    score = (sinks * query.shape[-1] ** 0.5).to(query.dtype).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    return (
        torch.cat([query, pad(score, (0, 7))], -1),  # a multiple of 8, as kernels want it
        torch.cat([pad(key, (0, 8)), pad(torch.ones_like(key[..., :1, :1]), (key.shape[-1], 7))], 2),
        pad(value, (0, 8, 0, 1)),
        pad(mask, (0, 1)),
    )


class SharingRunner(LastStateRunner["_Shared"]):
    """Runs a head depth by depth over the target's keys and values of the committed tokens."""

    head: SharingHead

    def __init__(
        self, head: SharingHead, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0
    ) -> None:
        super().__init__(head, target, rows, slots, max_run_nodes)
        self._layers = {kind: target.layer_that_keeps(kind) for kind in head.windows}

    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        super().ingest(rows, tokens, hidden_states)
        index, roots = send((torch.tensor(rows), torch.tensor([row[-1] for row in tokens])), self.device)
        self._roots[index] = roots

    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        return max(self.lengths[row] for row in rows)

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[_Shared]:
        cache = self.target.cache
        cache.begin(rows, index.new_zeros(len(rows), 0), size, index=index)
        kept, masks = dict[str, tuple[Tensor, Tensor]](), dict[str, Tensor]()
        behind = lengths.unsqueeze(1) - 1 - torch.arange(size, device=self.device)
        for kind, window in self.head.windows.items():
            keys, values = cache.seen(self._layers[kind])
            kept[kind] = keys.to(self.device, self._dtype), values.to(self.device, self._dtype)
            hidden = (behind < 0) | (behind > (size if window is None else window))
            lowest = torch.finfo(self._dtype).min
            masks[kind] = self._features.new_zeros(hidden.shape).masked_fill(hidden, lowest)[:, None, None]
        memory = self._features[index].unsqueeze(1)
        shared = _Shared(kept=kept, masks=masks, positions=lengths.unsqueeze(1), memory=memory)
        return self._step(shared, self._roots[index].unsqueeze(1))

    def _descend(self, last: _Shared, tokens: Tensor, parents: Tensor) -> Level[_Shared]:
        memory = last.memory.gather(1, parents.unsqueeze(-1).expand(-1, -1, last.memory.shape[-1]))
        return self._step(replace(last, memory=memory), tokens)

    def _step(self, shared: _Shared, tokens: Tensor) -> Level[_Shared]:
        embeds, width = self.target.embed(tokens).to(self.device, self._dtype), tokens.shape[1]
        masks = {kind: mask.expand(-1, -1, width, -1) for kind, mask in shared.masks.items()}
        stepped = self.head.step(embeds, shared.memory, shared.positions.expand(-1, width), shared.kept, masks)
        return self.head.logits(stepped.output), replace(shared, memory=stepped.memory)


@dataclass(kw_only=True, slots=True)
class _Shared:
    """The target's keys and values of the rows that trees are drafted for, and the trees' last depth."""

    kept: Kept
    masks: Mapping[str, Tensor]  # (B, 1, 1, W) by the kind of layer
    positions: Tensor  # (B, 1) int64 of the roots
    memory: Tensor  # (B, F, H) of the last level's nodes


class _Appended(NamedTuple):
    """The numbers of the appended tokens that go to the device: B rows of N entries, padded to the longest."""

    rows: Tensor  # (B,) int64
    lengths: Tensor  # (B,) entries before
    counts: Tensor  # (B,) new entries
    real: Tensor  # (B, N) bool: no padding
    depths: Tensor  # (B, N) int64, behind the entries before
    sees: Tensor  # (B, N, N) bool
    ids: Tensor  # (B, N) int64


class AttendingRunner(HeadRunner[Frontier]):
    """Runs a head over a row-and-slot cache of its own: entry i of a row is in slot i, drafted nodes behind them."""

    head: AttendingHead

    def __init__(
        self, head: AttendingHead, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0
    ) -> None:
        super().__init__(head, target, rows, slots, max_run_nodes)
        self._cache = SlotCache(rows, slots + self._slots_for_tree(max_run_nodes))
        self._kinds = [FULL if window is None else SLIDING for window in head.windows]
        self._reach = next((window for window in head.windows if window is not None), None)
        self._kinds_unseen = list(zip(self._kinds, head.unseen, strict=True))

    def _slots_for_tree(self, max_run_nodes: int) -> int:
        """Return the slots after a row's entries that a tree needs, of which at most `max_run_nodes` are run."""
        return max_run_nodes

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._cache.nbytes()

    def truncate(self, row: int, length: int) -> None:
        super().truncate(row, length)
        self._cache.clear(row, self.lengths[row])

    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        counts = [len(row_tokens) for row_tokens in tokens]
        for start in range(0, max(counts), PREFILL_CHUNK):
            active = [index for index, count in enumerate(counts) if count > start]
            pieces = [list(tokens[index][start : start + PREFILL_CHUNK]) for index in active]
            states = [rows_of(hidden_states[b], active)[:, start:] for b in self.head.config.boundaries]
            self._append([rows[index] for index in active], pieces, states)

    def _append(self, rows: list[int], pieces: list[list[int]], states: Sequence[Tensor]) -> None:
        longest = max(map(len, pieces))
        recorded = self.recordings.active and longest <= _COMMITTED
        exact = self.device.type == "cpu" and not recorded  # elsewhere few sizes are better
        repeats = bucket(len(rows)) - len(rows) if recorded else 0  # of the last row, as in `unroll`
        recorded_rows, pieces = [*rows, *[rows[-1]] * repeats], [*pieces, *[pieces[-1]] * repeats]
        nodes = Nodes.of_prompt(pieces, least=longest if exact else round_tokens(longest, len(recorded_rows)))
        lengths = torch.tensor([self.lengths[row] for row in recorded_rows])
        numbers = nodes.real.sum(1), nodes.real, nodes.depths, nodes.sees, nodes.ids
        host = _Appended(torch.tensor(recorded_rows), lengths, *numbers)
        end = int(lengths.max()) + nodes.fresh
        width = end if exact else wide(end, self._cache.slots)
        self._cache.touch(rows, [self.lengths[row] + nodes.fresh for row in rows])
        padded = list[Tensor]()
        for state in states:
            fresh = state[:, : nodes.fresh].to(self.device, self._dtype)
            missing = nodes.fresh - fresh.shape[1]
            padded.append(extend_rows(pad(fresh, (0, 0, 0, missing)) if missing else fresh, repeats))

        def work(*sent: Tensor) -> None:
            new, features = _Appended(*sent[: len(host)]), sent[len(host) :]
            positions = new.lengths.unsqueeze(1) + new.depths
            places = torch.where(new.real, positions, self._cache.dump)
            self._cache.begin(recorded_rows, places, width, index=new.rows, anywhere=recorded)
            sees = new.sees & new.real.unsqueeze(2)
            block = Block(lengths=new.lengths, sees=sees, query_positions=positions, node_positions=positions)
            committed = Committed(index=new.rows, ids=new.ids, last=new.counts - 1)
            self._read(committed, self.head.fuse(features), block, width)

        key = ("committed", len(recorded_rows), nodes.fresh, width) if recorded else None
        self.recordings.run_sent(key, work, host, self.device, *padded)
        for row, piece in zip(rows, pieces, strict=False):
            self.lengths[row] += len(piece)

    @abstractmethod
    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        """Read what was committed, in rows of a cache of `width` slots, with the features (B, N, H)
        that stand before its tokens. Doing it twice has the effect of doing it once, so it can be
        recorded.
        """

    def _write_context(self, head: BlockHead | AdapterHead, fused: Tensor, block: Block) -> None:
        """Write the keys and values that a head makes of features for each of its layers."""
        angles = head.angles(block.query_positions, fused)
        for layer, (keys, values) in enumerate(head.context(fused, angles)):
            self._cache.write(keys, values, layer)

    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        ends = [self.lengths[row] + self._slots_for_tree(max_run_nodes) for row in rows]
        self._cache.touch(rows, ends)
        return wide(max(ends), self._cache.slots) if recorded else max(ends)

    def _mask(self, kind: str, block: Block, width: int, unseen: int = 0) -> Tensor:
        """Build the mask of layers of a kind that do not see the first `unseen` entries."""
        mask = build(block, MaskStyle(types=(kind,), window=self._reach), width, self._dtype)
        assert isinstance(mask, Tensor), "of one kind there is one mask"
        if unseen:
            mask[..., :unseen] = torch.finfo(mask.dtype).min
        return mask

    def _advance(
        self, tokens: Tensor, block: Block, width: int, step: Callable[[Tensor, Angles, Attend], Passed]
    ) -> Passed:
        """Run one pass of all layers over `tokens` (B, N), which a cache of `width` slots holds."""
        embeds, attend_cached = self.embed(tokens), self._attend(block, width)
        with attention_kernels(self.device):
            return step(embeds, self.head.angles(block.query_positions, embeds), attend_cached)

    def _attend(self, block: Block, width: int) -> Attend:
        """Return an attention function for a pass whose entries see what is before them."""
        kinds = self._kinds_unseen
        masks = {(kind, unseen): self._mask(kind, block, width, unseen) for kind, unseen in dict.fromkeys(kinds)}
        return CachedAttention(self._cache, [masks[kind] for kind in kinds])

    def embed(self, tokens: Tensor, depth: int = 0) -> Tensor:
        """Embed (..) -> (.., H) with the head's own table or the target's."""
        own = self.head.embed(tokens, depth)
        return self.target.embed(tokens).to(self.device, self._dtype) if own is None else own

    def logits(self, output: Tensor, depth: int = 0) -> Tensor:
        """Map (B, N, H) -> raw logits (B, N, V') over the draft vocabulary."""
        own = self.head.logits(output, depth)
        return self.target.lm_head(output.to(self.target.dtype)) if own is None else own


class SequentialRunner(AttendingRunner["_Frontier"]):
    """Runs a head depth by depth: drafted nodes read the head's own features, until the target's take their place."""

    head: SequentialHead

    def __init__(
        self, head: SequentialHead, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0
    ) -> None:
        super().__init__(head, target, rows, slots, max_run_nodes)
        self._outputs = self._features.new_zeros(rows, head.output_size)
        # Features of every entry, if a layer reads what another made of the entry before; the last slot is for padding.
        room = slots + 1 if any(head.unseen) else 0
        self._chain = self._features.new_zeros(rows, room, head.feature_size)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._chain.nbytes

    def _begin(
        self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool
    ) -> Level[_Frontier]:
        none = index.new_zeros(len(rows), 0)
        self._cache.begin(rows, none, size, index=index, anywhere=recorded)
        frontier = _Frontier(
            lengths=lengths,
            sees=none.bool().unsqueeze(1),
            positions=none,
            features=self._features[index].unsqueeze(1),
            depth=0,
            width=size,
        )
        return self.logits(self._outputs[index].unsqueeze(1)), frontier

    def _descend(self, last: _Frontier, tokens: Tensor, parents: Tensor) -> Level[_Frontier]:
        batch, width = tokens.shape
        nodes_run = last.sees.shape[2]
        inherited = last.sees.gather(1, parents.unsqueeze(-1).expand(-1, -1, nodes_run))
        own = torch.eye(width, dtype=torch.bool, device=self.device).expand(batch, -1, -1)
        sees = torch.cat([inherited, own], dim=-1)
        features = last.features.gather(1, parents.unsqueeze(-1).expand(-1, -1, last.features.shape[-1]))
        positions = (last.lengths + last.depth).unsqueeze(1).expand(-1, width)
        slots = last.lengths.unsqueeze(1) + nodes_run + torch.arange(width, device=self.device)
        self._cache.go_on(slots)
        reached = torch.cat([last.positions, positions], dim=1)
        block = Block(lengths=last.lengths, sees=sees, query_positions=positions, node_positions=reached)
        depth = last.depth + 1

        def step(embeds: Tensor, angles: Angles, attend: Attend) -> Advanced:
            return self.head.advance(embeds, features, angles, attend, depth)

        advanced = self._advance(tokens, block, last.width, step)
        below = replace(last, sees=sees, positions=reached, features=advanced.feature, depth=depth)
        return self.logits(advanced.output, depth), below

    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        index, before = new.index, fused[:, :1]  # which nobody reads but who has a chain
        if self._chain.shape[1]:
            lengths = block.lengths.view(-1, 1)
            before = torch.where((lengths > 0).unsqueeze(-1), self._chain[index.unsqueeze(1), lengths - 1], 0.0)

        def step(embeds: Tensor, angles: Angles, attend: Attend) -> Advanced:
            return self.head.read(embeds, fused, before, angles, attend)

        advanced = self._advance(new.ids, block, width, step)
        if self._chain.shape[1]:
            self._chain[index.unsqueeze(1), block.query_positions.clamp(max=self._chain.shape[1] - 1)] = (
                advanced.feature
            )
        each = torch.arange(len(index), device=self.device)
        self._features[index] = advanced.feature[each, new.last]
        self._outputs[index] = advanced.output[each, new.last]


class RecurrentRunner(AttendingRunner[_AtDepth]):
    """Runs a head depth by depth from the state of the token before the root; the cache holds only what was committed.
    A frontier is the memory (B, F, M) of the last level's nodes, and its depth.
    """

    head: RecurrentHead

    def _slots_for_tree(self, max_run_nodes: int) -> int:
        return 0

    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        with attention_kernels(self.device):
            states = self.head.prefix(fused, block.query_positions, self._attend(block, width))
        each = torch.arange(len(new.index), device=self.device)
        self._features[new.index] = states[each, new.last]
        self._roots[new.index] = new.ids[each, new.last]

    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        return 0  # nothing that is drafted is kept

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[_AtDepth]:
        return self._step(0, self._roots[index].unsqueeze(1), self._features[index].unsqueeze(1))

    def _descend(self, last: tuple[Tensor, int], tokens: Tensor, parents: Tensor) -> Level[_AtDepth]:
        memory, depth = last
        memory = memory.gather(1, parents.unsqueeze(-1).expand(-1, -1, memory.shape[-1]))
        return self._step(depth + 1, tokens, memory)

    def _step(self, depth: int, tokens: Tensor, memory: Tensor) -> Level[_AtDepth]:
        stepped = self.head.step(depth, self.embed(tokens, depth), memory)
        return self.logits(stepped.output, depth), (stepped.memory, depth)


class BlockRunner(AttendingRunner["_Depths"]):
    """Runs a head that computes all depths in one pass over a block after the committed entries,
    which are keys and values of features or of all that the layers read.
    """

    head: BlockHead

    def __init__(
        self, head: BlockHead, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0
    ) -> None:
        super().__init__(head, target, rows, slots, max_run_nodes)
        self._outputs = self._features.new_zeros(rows, head.feature_size)  # Roots' outputs, if they are read
        self._places = 0  # Tokens of the current block

    def _slots_for_tree(self, max_run_nodes: int) -> int:
        return self.head.places or max(1, max_run_nodes)

    def _make_room(self, rows: Sequence[int], max_run_nodes: int, levels: int | None, recorded: bool) -> int:
        self._places = self.head.places or max(1, max_run_nodes if levels is None else levels - 1)
        return super()._make_room(rows, self._places, levels, recorded)

    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        if self.head.places is None:

            def step(embeds: Tensor, angles: Angles, attend: Attend) -> Tensor:
                return self.head.read(embeds, fused, angles, attend)

            each = torch.arange(len(new.index), device=self.device)
            self._outputs[new.index] = self._advance(new.ids, block, width, step)[each, new.last]
            return
        self._write_context(self.head, fused, block)
        self._roots[new.index] = new.ids.gather(1, new.last.unsqueeze(1)).squeeze(1)

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[_Depths]:
        places, first = self._places, self.head.first
        roots = self._roots[index].unsqueeze(1)
        before = [] if self.head.places is None else [roots]
        masks_behind = torch.full_like(roots, self.head.mask_token).expand(-1, places - len(before))
        tokens = torch.cat([*before, masks_behind], dim=1)
        positions = lengths.unsqueeze(1) + torch.arange(places, device=self.device)
        self._cache.begin(rows, positions, size, index=index, anywhere=recorded)
        masks = dict[tuple[str, bool], Tensor]()
        sees = torch.ones(len(rows), places, places, dtype=torch.bool, device=self.device)
        kinds = [(kind, self.head.causal(layer)) for layer, kind in enumerate(self._kinds)]
        for kind, causal in dict.fromkeys(kinds):
            seen = sees.tril() if causal else sees
            block = Block(lengths=lengths, sees=seen, query_positions=positions, node_positions=positions)
            masks[kind, causal] = self._mask(kind, block, size)

        attend_cached = CachedAttention(self._cache, [masks[kind] for kind in kinds])
        embeds = self.embed(tokens)
        with attention_kernels(self.device):
            output = self.head.block(embeds, self.head.angles(positions, embeds), attend_cached)[:, first:]
        if self.head.places is None:
            output = torch.cat([self._outputs[index].unsqueeze(1), output], dim=1)
        return self._follow(roots, _Depths(logits=self.logits(output), states=output))

    def _descend(self, last: _Depths, tokens: Tensor, parents: Tensor) -> Level[_Depths]:
        memory = last.memory
        if memory is not None:
            memory = memory.gather(1, parents.unsqueeze(-1).expand(-1, -1, memory.shape[-1]))
        return self._follow(tokens, replace(last, memory=memory, depth=last.depth + 1))

    def _follow(self, tokens: Tensor, depths: _Depths) -> Level[_Depths]:
        here = slice(depths.depth, depths.depth + 1)
        above = Above(tokens, depths.depth, depths.memory, self.embed)
        followed = self.head.follow(depths.logits[:, here], depths.states[:, here], above)
        self.acceptance = followed.acceptance
        return followed.logits, replace(depths, memory=followed.memory)


@dataclass(kw_only=True, slots=True)
class _Frontier:
    """The last depth of the trees that are being drafted."""

    lengths: Tensor  # (B,) committed entries
    sees: Tensor  # (B, F, M) bool: which of the M nodes run so far each node descends from, itself included
    positions: Tensor  # (B, M) int64 of these nodes
    features: Tensor  # (B, F, H)
    depth: int
    width: int  # Slots of the cache that hold all that any node will ever see


@dataclass(kw_only=True, slots=True)
class _Depths:
    """All depths of a block, and the depth that the trees being drafted have reached."""

    logits: Tensor  # (B, depths, V')
    states: Tensor  # (B, depths, H)
    depth: int = 0
    memory: Tensor | None = None  # (B, F, M) of the last level's nodes


class AdapterRunner(AttendingRunner["_Exited"]):
    """Runs a head depth by depth: nodes run through the target's layers up to the head's boundary,
    in the slots in which they are scored, then through the head. Entries are the target's states of
    what is committed before the root.
    """

    head: AdapterHead
    shape: Shape | None = None  # Shape of the trees to come; None: it differs by row, and parents are read on the host

    def __init__(
        self, head: AdapterHead, target: TransformersTarget, rows: int, slots: int, max_run_nodes: int = 0
    ) -> None:
        super().__init__(head, target, rows, slots, max_run_nodes)
        self._plan = LayerRange(stop=head.config.boundaries[0])
        self._root_tokens = [0] * rows
        self.rows: Sequence[int] = ()  # Rows of the latest trees
        self.ran: list[Tensor] = []  # Their states (B, F, H) at the boundary, level by level, the root first

    def ingest(self, rows: Sequence[int], tokens: Sequence[Sequence[int]], hidden_states: HiddenStates) -> None:
        super().ingest(rows, tokens, hidden_states)
        for row, row_tokens in zip(rows, tokens, strict=True):
            self._root_tokens[row] = row_tokens[-1]

    def _slots_for_tree(self, max_run_nodes: int) -> int:
        return 1 + max_run_nodes

    def _read(self, new: Committed, fused: Tensor, block: Block, width: int) -> None:
        self._write_context(self.head, fused, block)

    def _begin(self, rows: Sequence[int], index: Tensor, lengths: Tensor, size: int, recorded: bool) -> Level[_Exited]:
        none = index.new_zeros(len(rows), 0)
        self._cache.begin(rows, none, size, index=index)
        self.rows, self.ran = rows, []
        roots, fits = [[-1]] * len(rows), [0] * len(rows)
        trees = _Exited(lengths=lengths, ids=none, parents=roots, fits=fits, depth=0, width=size)
        return self._level(trees, 0), trees

    def _descend(self, last: _Exited, tokens: Tensor, parents: Tensor) -> Level[_Exited]:
        start, depth = 1 + last.ids.shape[1], last.depth + 1
        ids, target, fits = torch.cat([last.ids, tokens], dim=1), self.target, list[int]()
        for row, count in zip(self.rows, last.fits, strict=True):
            # A node behind the row's slots or the context is never submitted, and not run.
            held = target.lengths[row] + 1
            room = min(ids.shape[1], target.slots - held)
            fits.append(room if count == start - 1 and held + depth <= target.max_length else count)
        if self.shape is None:
            above = (parents + (start - last.size)).tolist()
            new: list[Sequence[int]] = [[*old, *row] for old, row in zip(last.parents, above, strict=True)]
        else:
            new = [self.shape.parents for _ in last.parents]
        trees = replace(last, ids=ids, parents=new, fits=fits, depth=depth, size=tokens.shape[1])
        return self._level(trees, start), trees

    def _level(self, trees: _Exited, start: int) -> Tensor:
        """Return logits (B, F, V) after the nodes from `start` on."""
        roots = [self._root_tokens[row] for row in self.rows]
        nodes = Nodes.of_levels(roots, trees.ids, trees.parents, counts=trees.fits, start=start)
        states = self.target.run(self.rows, nodes, self._plan)
        self.ran.append(states)
        sees, depths = send((nodes.sees[:, start:], nodes.depths), self.device)
        lengths = trees.lengths.unsqueeze(1)
        self._cache.go_on(lengths + torch.arange(start, nodes.ids.shape[1], device=self.device))
        positions = lengths + depths
        here = positions[:, start:]
        block = Block(lengths=trees.lengths, sees=sees, query_positions=here, node_positions=positions)
        fused = self.head.fuse([states.to(self.device, self._dtype)])
        with attention_kernels(self.device):
            output = self.head.adapt(fused, self.head.angles(here, fused), self._attend(block, trees.width))
        return self.logits(output)


@dataclass(kw_only=True, slots=True)
class _Exited:
    """The trees that are being drafted by an adapter."""

    lengths: Tensor  # (B,) committed entries
    ids: Tensor  # (B, K) drafted tokens
    parents: Sequence[Sequence[int]]  # (B, K + 1) or more, of each node, the root's first
    fits: Sequence[int]  # (B,) drafted nodes, from the first, that each row has room for
    depth: int
    width: int  # Slots of the cache that hold all that any node will ever see
    size: int = 1  # Nodes of the last level
