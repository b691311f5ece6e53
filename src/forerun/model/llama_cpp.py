"""`LlamaCppTarget`: a GGUF file on llama.cpp's kernels, seen as "score this token tree, keep this path".

It stands on the low-level interface of llama-cpp-python (``llama.h``). Rows are sequences of one unified cache. A token
of a batch may belong to several sequences, and looks at everything before it that belongs to its first one: so the
nodes of a tree belong to the sequences of all leaves below them. The first branch lies on the row's own sequence, each
other one on a sequence that shares the row's committed tokens (``llama_memory_seq_cp`` copies no keys and values). The
accepted path is copied to the row's sequence, and the rest is removed.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forerun.core.tree import TokenTree
from forerun.devices import device_name
from forerun.errors import ArgumentError, CheckpointError, ForerunError, UnsupportedModelError, refuse
from forerun.model.gguf_files import GgufHeader, read_model_header
from forerun.model.gguf_weights import find_not_finite
from forerun.model.identity import keep_verdict, read_verdict
from forerun.model.inputs import Buckets, Flat, Nodes, Scored
from forerun.model.llama_context import MOST_SEQUENCES, Context, LlamaBatch, load_api, offloads
from forerun.model.load import LoadOptions
from forerun.model.memory import HEADROOM, LEAST_SLOTS, MemoryPlan, available_bytes, default_slots
from forerun.model.recordings import Recordings
from forerun.model.sample import TEXT
from forerun.model.self_check import FACTOR, divergence
from forerun.model.target import Target
from forerun.types import Boundary

_log = logging.getLogger(__name__)

MOST_ROWS = 128  # Rows of a target; the other sequences are for branches of trees
TOKENS = 16384  # Tokens that all rows hold together where nobody asked for a number and one row is shorter
_DEFAULTS = LoadOptions()
_FOREIGN = ("device_map", "tp_plan", "adapter", "revision")  # Options of a load by transformers
_ORDER, _NOISE = 5e-4, 0.05
"""Mean divergence, nats: what the order of a sum may change, for nodes of a tree lie in another order than those of a
chain (SmolLM2 in Q4_1: 1.6e-4; a sibling seen: 5e-2); and the most that a chain may differ from single tokens.
"""
_PROMPT, _PARENTS = 24, (0, 0, 1, 2, 3, 4)  # Of the self-check: tokens of the prompt, and two chains, interleaved


@dataclass(slots=True)
class _Row:
    """A `_Row` tells where a row's nodes and its shared committed tokens lie in the cache."""

    held: int = 0  # Positions of its own sequence that hold anything
    branches: list[int] = field(default_factory=list)  # Sequences that hold its first `covered` tokens, too
    covered: list[int] = field(default_factory=list)  # By branch
    used: int = 0  # Branches that hold nodes of this step
    tokens: Sequence[int] = ()  # By node that was run in this step
    positions: list[int] = field(default_factory=list)  # By node
    lies: list[int | None] = field(default_factory=list)  # By node: a sequence that holds its path; None: no longer
    ends: dict[int, int] = field(default_factory=dict)  # By sequence: the last node on it

    def forget_nodes(self) -> None:
        """Forget which nodes this step has run."""
        self.tokens, self.positions, self.lies, self.ends = (), [], [], {}


class LlamaCppTarget(Target):
    """A GGUF file with a cache of `rows` sequences of at most `slots` tokens, and of `tokens` in all."""

    def __init__(self, context: Context, header: GgufHeader, *, rows: int, slots: int, tokens: int) -> None:
        super().__init__(rows=rows, slots=slots)
        from transformers import GenerationConfig

        self._context, self._header, self._tokens = context, header, tokens
        self.name_or_path = str(header.path)
        self.generation_config = GenerationConfig(eos_token_id=header.ends or None)
        self.vocab_size, self.hidden_size = context.vocab_size, context.hidden_size
        self.num_layers, self.max_length = context.num_layers, context.max_length
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.buckets, self.verifying = Buckets(), Recordings(None)
        self.cached_tokens_limit = max(1, tokens - rows * HEADROOM)
        self._rows = [_Row() for _ in range(rows)]
        self._spare = list(range(rows, context.sequences))  # Sequences that nobody has

    @staticmethod
    def load(
        model: Any,
        *,
        rows: int = 1,
        slots: int | None = None,
        tokens: int | None = None,
        reserve_bytes: int = 0,
        reserve_bytes_per_slot: int = 0,
        **loading: Any,
    ) -> LlamaCppTarget:
        """Open a GGUF file, or the first of the files that it is split into.

        Args:
            model: path of the file, or a directory with one.
            rows: sequences that the cache holds, at most 128.
            slots: tokens of a row, drafted ones included; default: the context, at most 8192, or what memory holds.
            tokens: that all rows hold together, drafted ones included. The cache is allocated at once; default: as many
                as the rows can hold, at most 16384 or what one row can.
            reserve_bytes: memory to leave for a drafter in the plan that is checked before loading.
            reserve_bytes_per_slot: the same for its own cache, for each slot of each row.
            loading: fields of `LoadOptions`; ``device="cpu"`` keeps layers off an accelerator.

        Raises:
            CheckpointError: missing, cut short, or no language model; llama.cpp cannot load it.
            UnsupportedModelError: llama-cpp-python is missing or too old, or the self-check failed.
            OutOfMemoryError: weights and cache do not fit.
            ArgumentError: an option is out of range or makes no sense for a GGUF file.
        """
        options = LoadOptions(**loading)
        foreign = [name for name in _FOREIGN if getattr(options, name) != getattr(_DEFAULTS, name)]
        refuse(
            (not 1 <= rows <= MOST_ROWS, f"rows must be in 1..{MOST_ROWS} on llama.cpp, got {rows}"),
            (slots is not None and slots < 1, f"slots must be at least 1, got {slots}"),
            (
                bool(foreign),
                f"{', '.join(foreign)}: no option of llama.cpp; backend='transformers' dequantises the file",
            ),
            (
                options.dtype not in ("auto", None),
                "llama.cpp runs the file's own quantisation: leave dtype away, or take "
                "backend='transformers', which dequantises it",
            ),
        )
        api = load_api()
        header = read_model_header(Path(model))
        header.check_generates()
        asked = slots
        context_length = header.context_length
        slots = default_slots(context_length) if slots is None else slots
        most = tokens or max(slots, min(rows * slots, TOKENS))
        needed = header.cache_bytes_per_token + reserve_bytes_per_slot
        plan = MemoryPlan(
            rows=1, slots=most, weights=header.weights_bytes, token=needed, probs=0, reserve=reserve_bytes
        )
        available = available_bytes(torch.device("cpu"))
        if not offloads(api, options.device) and plan.total > available:
            fitting = plan.fitting_slots(available)
            if asked is not None or tokens is not None or fitting < LEAST_SLOTS:
                plan.check(available, "cpu")
            _log.warning("a cache of %d tokens instead of %d: the memory ends there", fitting, most)
            slots, most = min(slots, fitting), fitting
        context = Context(api, header, rows=rows, tokens=most, layers=-1 if offloads(api, options.device) else 0)
        kind = LlamaCppStatesTarget if context.keeps_states else LlamaCppTarget
        target = kind(context, header, rows=rows, slots=slots, tokens=most)
        if options.self_check:
            target.check(options.tokenizer() if options.tokenizer is not None else None)
        return target

    @property
    def dtype_name(self) -> str:
        """The quantisation of most weights, for example ``"Q4_K"``."""
        return self._header.quantisation

    @property
    def runs_as(self) -> str:
        return f"{self.dtype_name} on llama.cpp, {'GPU' if self._context.layers_offloaded else 'CPU'}"

    @torch.inference_mode()
    def prefill(
        self,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        *,
        boundaries: Set[Boundary] = frozenset(),
        all_logits: bool = False,
    ) -> Scored:
        self._check_boundaries(boundaries)
        counts = [len(chunk) for chunk in tokens]
        self.check_room(rows, counts, counts)
        if min(counts) < 1:
            raise ArgumentError("every row of a prefill needs at least one token")
        batch = LlamaBatch()
        for row, chunk in zip(rows, tokens, strict=True):
            self._begin(row)
            for index, token in enumerate(chunk):
                wants_logits = all_logits or index == len(chunk) - 1
                batch.add(token, self.lengths[row] + index, [row], wanted=wants_logits)
        logits = self._run(rows, batch)
        for row, count in zip(rows, counts, strict=True):
            self.hold(row, self.lengths[row] + count)
            self._rows[row].held = self.lengths[row]
        if not all_logits:
            return Scored(logits=logits.unsqueeze(1))
        return Scored(logits=_by_row(logits, counts))

    @torch.inference_mode()
    def score(
        self,
        rows: Sequence[int],
        trees: Sequence[TokenTree] | Nodes,
        *,
        boundaries: Set[Boundary] = frozenset(),
        padded: bool = True,
    ) -> Scored:
        self._check_boundaries(boundaries)
        start = trees.start if isinstance(trees, Nodes) else 0
        row_trees = _trees_of(self._nodes(rows, trees)) if isinstance(trees, Nodes) else trees
        counts = [1 + tree.size for tree in row_trees]
        self.check_room(rows, counts, [1 + max(tree.depths) for tree in row_trees])
        groups = self._groups(row_trees, start)
        parts = [self._score([rows[index] for index in group], row_trees, group, start) for group in groups]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._ran.update(zip(rows, counts, strict=True))
        if len(set(counts)) == 1:
            return Scored(logits=logits.view(len(rows), counts[0] - start, -1))
        fresh = [max(0, count - start) for count in counts]
        if padded:
            return Scored(logits=_by_row(logits, fresh))
        flat = Flat.of(torch.arange(max(fresh)) < torch.tensor(fresh).unsqueeze(1))
        return Scored(logits=logits.unsqueeze(0), flat=flat)

    def _groups(self, trees: Sequence[TokenTree], start: int) -> list[range]:
        """Return which of the rows are run together: all, as long as there is a sequence for every branch."""
        groups, left = list[range](), 0
        for index, tree in enumerate(trees):
            branches = 1 + tree.size - start - len(set(tree.parents[start:]))  # Children beside a first one
            if groups and branches <= left:
                groups[-1] = range(groups[-1].start, index + 1)
            else:
                left = MOST_SEQUENCES - self.rows
                groups.append(range(index, index + 1))
            left -= branches
        if len(groups) > 1 and start:
            raise ArgumentError(
                f"trees of {len(trees)} rows have more branches than llama.cpp has sequences ({MOST_SEQUENCES}): "
                "draft narrower trees, or for fewer rows"
            )
        return groups

    def _score(self, rows: Sequence[int], trees: Sequence[TokenTree], group: range, start: int) -> Tensor:
        """Run the trees of the `group` of rows from node `start` on, and return the logits (M, V) of their nodes."""
        batch = LlamaBatch()
        for row, index in zip(rows, group, strict=True):
            if start == 0:
                self._begin(row)
            self._place(row, trees[index], start, batch)
        logits = self._run(rows, batch)
        for row in rows:
            state = self._rows[row]
            positions = [position for position, lies in zip(state.positions, state.lies, strict=True) if lies == row]
            state.held = 1 + max(positions)
            if len(group) < len(trees):  # Others need the sequences of its branches
                self._leave_branches(row)
                state.lies = [lies if lies == row else None for lies in state.lies]
        return logits

    def _place(self, row: int, tree: TokenTree, start: int, batch: LlamaBatch) -> None:
        """Add a row's nodes from `start` on to the batch, each with the sequences of all leaves below it."""
        state, length, parents = self._rows[row], self.lengths[row], tree.parents
        if start and not state.lies:  # The root was appended, and taken back to become node 0
            state.lies, state.positions, state.ends = [row], [length], {row: 0}
        state.tokens, first = tree.tokens, len(batch)
        for node in range(start, 1 + tree.size):
            parent, position = parents[node], length + tree.depths[node]
            beside = state.lies[parent] if node else row
            assert beside is not None, "levels of a tree are run while their branches are there"
            lies = beside if node == 0 or state.ends[beside] == parent else self._branch(row)
            state.lies.append(lies)
            state.positions.append(position)
            state.ends[lies] = node
            batch.add(tree.tokens[node], position, [lies], wanted=True)
            if lies == beside:
                continue
            above = parent
            while above >= start:  # In this batch
                batch.sequences[first + above - start].append(lies)
                above = parents[above]
            branch = state.branches.index(lies)
            source, end = (row, length) if above < 0 else (state.lies[above], state.positions[above] + 1)
            self._context.copy(source, lies, state.covered[branch], end)
            state.covered[branch] = length

    def _branch(self, row: int) -> int:
        """Return a sequence for another branch of a row."""
        state = self._rows[row]
        if state.used == len(state.branches):
            if not self._spare:
                for other in self._rows:  # What they keep of committed tokens is only there to save time
                    while len(other.branches) > other.used:
                        self._context.remove(other.branches[-1])
                        other.covered.pop()
                        self._spare.append(other.branches.pop())
            state.branches.append(self._spare.pop())
            state.covered.append(0)
        state.used += 1
        return state.branches[state.used - 1]

    def _begin(self, row: int) -> None:
        """Remove whatever stands behind a row's committed tokens."""
        state, length = self._rows[row], self.lengths[row]
        self._leave_branches(row)
        if state.held > length:
            self._context.remove(row, length)
            state.held = length
        state.forget_nodes()
        self.writes[row] += 1

    def _leave_branches(self, row: int) -> None:
        """Remove the nodes of this step from a row's branches, which keep its committed tokens."""
        state, length = self._rows[row], self.lengths[row]
        for index, branch in enumerate(state.branches):
            if index < state.used or state.covered[index] > length:
                state.covered[index] = min(state.covered[index], length)
                self._context.remove(branch, state.covered[index])
        state.used = 0

    def _keep(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        again = LlamaBatch()
        for row, path in zip(rows, paths, strict=True):
            state, length = self._rows[row], self.lengths[row]
            there = [node for node in path if state.lies[node] is not None]
            lies = state.lies[there[-1]] if there else row
            end = length + 1 + len(there)
            if lies is not None and lies != row:
                self._context.remove(row, length + 1)
                self._context.copy(lies, row, length + 1, end)
            elif state.held > end:
                self._context.remove(row, end)
            self._leave_branches(row)
            state.held = length + 1 + len(path)
            for node in path[len(there) :]:
                again.add(state.tokens[node], state.positions[node], [row], wanted=False)
        if len(again):
            self._context.run(again)

    def _cut(self, row: int, length: int) -> None:
        """Do nothing: what stands behind is removed when the row is run next, and may be wanted again until then."""

    def _copy(self, source: int, target: int, length: int) -> None:
        self._empty(target)
        self._context.copy(source, target, 0, length)
        self._rows[target].held = length

    def clear(self, row: int) -> int:
        state = self._rows[row]
        count = max(0, state.held - self.lengths[row], len(state.tokens) if state.used else 0)
        self._begin(row)
        self._ran.pop(row, None)
        return count

    def announce(self, rows: Sequence[int], length: int) -> None:
        """Let free rows hold `length` tokens, which are run once and shared."""
        first, *others = rows
        held = self._rows[first].held
        if held < length:
            self.lengths[first] = held
            self.prefill([first], [[index % self.vocab_size for index in range(held, length)]])
        self.lengths[first] = length
        for row in others:
            if self._rows[row].held < length:
                self.copy_row(first, row, length)
            self.lengths[row] = length

    def memory_bytes(self) -> int:
        return self._header.weights_bytes + self._tokens * self._header.cache_bytes_per_token

    def identity(self) -> dict[str, Any]:
        return {
            "file": self._header.identity(),
            "device": device_name(self.device),
            "layers_offloaded": self._context.layers_offloaded,
            "threads": self._context.threads,
            "llama.cpp": self._context.build,
        }

    def check_reproducible(self) -> None:
        raise ArgumentError(
            "reproducible=True cannot hold on llama.cpp, whose kernels round one token otherwise than several: leave "
            "it away, or open the file with backend='transformers'"
        )

    def check(self, tokenizer: Any) -> None:
        """Compare trees, kept paths and copied rows with passes over one token each, on text; raise
        UnsupportedModelError if they differ by more than three times what a pass over a chain differs by. A result is
        kept on disk, by the file and the machine.
        """
        key = hashlib.sha256(repr(("llama.cpp", self.identity(), self.rows > 1)).encode()).hexdigest()[:32]
        if read_verdict(key) is not None:
            return
        text = [] if tokenizer is None else list(tokenizer(TEXT).input_ids)
        if len(text) < _PROMPT + 32 or max(text) >= self.vocab_size:
            text = [(7919 * index + 13) % self.vocab_size for index in range(_PROMPT + 32)]
        noise, ours = _Check(self, text).run()
        if not math.isfinite(noise) and (damaged := find_not_finite(self._header)) is not None:
            raise CheckpointError(f"{self.name_or_path}: {damaged} is not finite: download or copy the file again")
        if not (noise <= _NOISE and ours <= FACTOR * max(noise, _ORDER)):
            raise UnsupportedModelError(
                f"{self.name_or_path}: on llama.cpp a pass over a chain differs from single tokens by {noise:.2g} nats "
                f"({_NOISE} is allowed), trees, kept paths and copied rows by {ours:.2g}: its "
                f"{self._header.architecture} layers may go by positions where they should by sequences. Open the file "
                "with backend='transformers'"
            )
        keep_verdict(key, self.name_or_path, [])

    def _run(self, rows: Sequence[int], batch: LlamaBatch) -> Tensor:
        """Run a batch for these rows; free rows lose what they keep for prefixes where the cache is full."""
        while True:
            held = sum(state.held for state in self._rows) + len(batch)
            free = [row for row, state in enumerate(self._rows) if not self.lengths[row] and state.held]
            victims = [row for row in free if row not in rows]
            if held <= self._tokens or not victims:
                break
            self._empty(victims[0])
        return self._context.run(batch)

    def _empty(self, row: int) -> None:
        """Remove all that a row holds."""
        state = self._rows[row]
        for sequence in (row, *state.branches):
            self._context.remove(sequence)
        self._spare += state.branches
        self._rows[row] = _Row()
        self.writes[row] += 1

    def _check_boundaries(self, boundaries: Set[Boundary]) -> None:
        if boundaries:
            raise ArgumentError("llama.cpp hands out no hidden states; draft without a head, or take another back end")


class LlamaCppStatesTarget(LlamaCppTarget):
    """A GGUF file of a model with recurrent states, which runs chains.

    A state cannot go back by a token. So each row has a second sequence with its states from before the pass, and where
    a part of a draft is rejected, the accepted part runs again from there.
    """

    chains_only = True

    def __init__(self, context: Context, header: GgufHeader, *, rows: int, slots: int, tokens: int) -> None:
        super().__init__(context, header, rows=rows, slots=slots, tokens=tokens)
        self._spare, self._before = [], list(range(rows, 2 * rows))
        self._saved = [0] * rows  # Tokens that the second sequence holds

    @property
    def keeps_states(self) -> bool:
        return True

    def reusable(self, row: int, length: int) -> int:
        return length if length in (self._rows[row].held, self._saved[row]) else 0

    def _begin(self, row: int) -> None:
        state, length = self._rows[row], self.lengths[row]
        if state.held != length:
            self._go_back(row, length)
        elif length != self._saved[row]:
            self._context.remove(self._before[row])
            self._context.copy(row, self._before[row], 0, length)
            self._saved[row] = length
        state.forget_nodes()
        self.writes[row] += 1

    def _go_back(self, row: int, length: int) -> None:
        """Take a row back to the states that were saved behind `length` tokens, or to none."""
        if length not in (0, self._saved[row]):
            raise ForerunError(f"row {row} cannot go back to {length} tokens: its states were not kept there")
        self._context.remove(row)
        if length:
            self._context.copy(self._before[row], row, 0, length)
        else:
            self._context.remove(self._before[row])
            self._saved[row] = 0
        self._rows[row].held = length

    def announce(self, rows: Sequence[int], length: int) -> None:
        for row in rows:
            self._empty(row)
        super().announce(rows, length)

    def _branch(self, row: int) -> int:
        raise ArgumentError(f"{self.name_or_path} runs chains only: llama.cpp keeps one recurrent state a row")

    def _keep(self, rows: Sequence[int], paths: Sequence[tuple[int, ...]]) -> None:
        again = LlamaBatch()
        for row, path in zip(rows, paths, strict=True):
            state, length = self._rows[row], self.lengths[row]
            if state.held == length + 1 + len(path):
                continue
            self._go_back(row, length)
            for node in (0, *path):
                again.add(state.tokens[node], state.positions[node], [row], wanted=False)
            state.held = length + 1 + len(path)
        if len(again):
            self._context.run(again)

    def _copy(self, source: int, target: int, length: int) -> None:
        kept = {self._saved[source]: self._before[source], self._rows[source].held: source, 0: None}
        if length not in kept:
            raise ArgumentError(f"row {source} keeps its states behind {self._rows[source].held} tokens, not {length}")
        self._empty(target)
        self._context.copy(kept[length], target, 0, length)
        self._rows[target].held = length

    def _empty(self, row: int) -> None:
        super()._empty(row)
        self._context.remove(self._before[row])
        self._saved[row] = 0


class _Check:
    """Compares what a target computes of trees with what it computes of one token at a time."""

    def __init__(self, target: LlamaCppTarget, text: Sequence[int]) -> None:
        self.target, self.prompt, self.text = target, list(text[:_PROMPT]), list(text[_PROMPT:])

    def run(self) -> tuple[float, float]:
        """Return the mean divergence (nats) of a chain, and of everything else, from passes over one token each."""
        target = self.target
        size = len(_PARENTS)
        root, *ids = self.text[: size + 1]
        paths = [[node for node in range(1, size + 1) if node % 2 == odd] for odd in (1, 0)]
        target.prefill([0], [self.prompt])
        chain = TokenTree(root)
        chain.add_path(ids)
        noise = divergence(target.score([0], [chain]).logits[0], self._alone([root, *ids])).mean()
        divergences = list[Tensor]()
        tree, nodes = chain, [tuple(range(1, size + 1))] * 2
        if not target.chains_only:
            tree, nodes = TokenTree(root), [tuple(path) for path in paths]
            for token, parent in zip(ids, _PARENTS, strict=True):
                tree.add(token, parent)
        scored = target.score([0], [tree]).logits[0]
        for path in nodes:
            divergences.append(
                divergence(scored[[0, *path]], self._alone([root, *(tree.tokens[node] for node in path)]))
            )
        target.score([0], [tree])
        target.commit([0], [nodes[1][:2]])
        committed = [*self.prompt, root, *(tree.tokens[node] for node in nodes[1][:2])]
        row = 0
        if target.rows > 1:
            target.copy_row(0, 1, len(committed))
            target.truncate([0], [0])
            row = 1
        after = target.score([row], [TokenTree(self.text[size + 1])]).logits[0]
        target.truncate([row], [0])
        target.prefill([0], [committed])
        divergences.append(divergence(after, target.score([0], [TokenTree(self.text[size + 1])]).logits[0]))
        target.truncate([0], [0])
        return float(noise), float(torch.cat(divergences).mean())

    def _alone(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits (N, V) after each of these tokens behind the prompt, each in a pass of its own."""
        steps = list[Tensor]()
        for token in tokens:
            steps.append(self.target.score([0], [TokenTree(token)]).logits[0])
            self.target.commit([0], [()])
        self.target.truncate([0], [0])
        self.target.prefill([0], [self.prompt])
        return torch.cat(steps)


def _trees_of(nodes: Nodes) -> list[TokenTree]:
    """Return packed trees by row. A node's parent is the last one before it that it looks at."""
    before = nodes.sees.numpy() & np.tri(nodes.sees.shape[1], k=-1, dtype=bool)
    parents = np.where(before, np.arange(before.shape[1]), -1).max(-1).tolist()
    found = zip(nodes.ids.tolist(), parents, nodes.counts, strict=True)
    return [TokenTree.of(ids[0], ids[1:count], above[1:count]) for ids, above, count in found]


def _by_row(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Pad the logits (M, V) of rows of so many tokens -> (B, N, V), zeros behind a row's last."""
    return pad_sequence(list(torch.split(logits, list(counts))), batch_first=True)
