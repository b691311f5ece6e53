"""Token Recycling: the successors that the target last thought likely after each token are drafted again.

arXiv 2408.08696. A matrix holds, for every token of the vocabulary, the `top_k` likeliest tokens the last time the
target scored it, rejected nodes included: what a pass computed and threw away. A draft is a walk through the matrix
from the root, breadth first, along a tree of (rank at depth 1, rank at depth 2, ...). Deterministic: all nodes are
given. Knows no model, and of the laws only which raw logits were largest.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.acceptance import Acceptance, Evidence, Proposal
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.domains import PerDomain
from forerun.drafters.ranks import WEIGHT, RankedNode, best_tree, measured, paying
from forerun.drafters.successors import SuccessorMatrix, save_quietly
from forerun.errors import ArgumentError
from forerun.training.data.identity import TokenizerIdentity
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, Verdict

if TYPE_CHECKING:
    from forerun.step import Scores

_MOST = 80
"""Nodes of the paper's tree."""
_BLOCK = 64
"""Logits of which the largest is taken before any are sorted."""
_REGROWN = 64
"""Steps between two looks at what an adaptive tree should be."""
_SAVED = 256
"""Steps between two writes of the file, which happen where a sequence ends."""
_MOST_BYTES = 128 * 2**20
"""Of the matrices of all isolation domains together; the shared one comes on top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Options of `recycling`."""

    num_speculative_tokens: int = 6
    """Depth of the tree, tokens."""
    nodes: int | None = None
    """Most nodes of the tree; None takes as many as yield most tokens for the measured time of a pass, up to the 80 of
    the paper. The engine's own limit holds, too."""
    top_k: int = 8
    """Successors kept for each token of the vocabulary."""
    adaptive_tree: bool = False
    """Let the tree follow how often each (depth, rank) was right; else it is the best one by rates measured before."""
    path: str | None = None
    """File that the matrix is read from and kept in: written when a sequence ends, if 256 steps have passed since the
    last time, and when the process ends. None forgets it. Requests of an isolation domain (API key) begin with what it
    held at the start, and what they teach is never written."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "nodes", "top_k"):
            if (given := getattr(self, name)) is not None and given < 1:
                raise ArgumentError(f"recycling: {name} must be at least 1, got {given}")


@dataclass(kw_only=True, slots=True)
class _Memory:
    """What is known of an isolation domain."""

    matrix: SuccessorMatrix
    acceptance: Acceptance
    """By (depth of the parent, rank)."""
    shape: list[RankedNode]
    steps: int = 0
    """That the matrix learned from."""


@dataclass(kw_only=True, slots=True)
class _Drafted(Proposal):
    """A row's last draft, to be compared with what the text goes on with."""

    end: int
    """Committed tokens when it was made."""
    tree: TreeBuilder


class RecyclingDrafter(Drafter):
    """Drafts a tree of the successors that the target last thought likely after each token."""

    name = "recycling"
    Config = RecyclingConfig

    def __init__(self, config: RecyclingConfig, setup: DrafterSetup) -> None:
        """Make an empty matrix, or read the one that was kept.

        Raises:
            ArgumentError: `top_k` beyond the vocabulary, another one than the file's, or no place for the file.
            DataError: a file that is no matrix.
            VocabularyMismatchError: a file of another tokenizer.
        """
        self.config = config
        size = setup.target.vocab_size
        if config.top_k > size:
            raise ArgumentError(f"recycling: top_k is {config.top_k}, the target has {size} tokens")
        identity = None if setup.tokenizer is None else TokenizerIdentity.of(setup.tokenizer)
        path = None if config.path is None else Path(config.path).expanduser()
        self.matrix = SuccessorMatrix.open(path, size, config.top_k, identity)
        """Of the domain that requests without a salt share."""
        self._first = None if path is None else self.matrix.successors.copy()
        self._nodes = config.nodes or _MOST
        self._prior = measured(config.num_speculative_tokens, config.top_k)
        if config.nodes is None and setup.pass_ms is not None:
            self._nodes = paying(self._prior, setup.pass_ms, _MOST)
        self._shared = self._memory_of(self.matrix)
        self._memories = PerDomain(
            self._new_memory, size=lambda memory: memory.matrix.successors.nbytes, most_size=_MOST_BYTES
        )
        self._steps = self._saved = 0
        self._rows: dict[int, _Drafted] = {}
        self._covered: dict[int, int] = {}
        # Text is learned from until the process ends; the callback must not keep the drafter alive.
        self._finalizer = weakref.finalize(self, save_quietly, self.matrix)

    @property
    def watches(self) -> bool:
        """What the target thought likely is worth knowing whoever drafted."""
        return True

    def save(self) -> None:
        """Write the matrix to `path`, atomically; nothing to do without one. OSError if that fails."""
        self.matrix.save()
        self._saved = self._steps

    def extend(self, context: DraftContext) -> None:
        entries = zip(context.rows, context.tokens, context.fresh, strict=True)
        for index, (row_id, tokens, fresh) in enumerate(entries):
            memory, drafted = self._memory(context, index), self._rows.pop(row_id, None)
            if drafted is not None:
                drafted.learn(tokens[drafted.end :])
            # Where the target scored a token for this drafter, its own successors are known already.
            start = max(self._covered.get(row_id, 0), len(tokens) - fresh - 1, 0)
            if len(tokens) - start > 1:
                memory.matrix.read(np.asarray(tokens[start:], dtype=np.int64))
            self._covered[row_id] = len(tokens) - 1

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        limits = zip(context.rows, context.tokens, budget.nodes, budget.depth, strict=True)
        for index, (row_id, tokens, nodes, depth) in enumerate(limits):
            self._rows[row_id] = self._grown(self._memory(context, index), tokens, nodes, depth)
        return stack([self._rows[row_id].tree for row_id in context.rows])

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self._steps += 1
        scored = [tree.tokens for tree in scores.trees]
        ids = top_ids(scores.logits[:, : max(map(len, scored))], self.config.top_k)
        for index, (nodes, row) in enumerate(zip(scored, ids, strict=True)):
            memory = self._memory(context, index)
            memory.matrix.put(nodes, row[: len(nodes)])
            memory.steps += 1
            if self.config.adaptive_tree and memory.steps % _REGROWN == 0:
                memory.shape = best_tree(self._rates(memory.acceptance), self._nodes)
        for row_id, tokens in zip(context.rows, context.tokens, strict=True):
            self._covered[row_id] = len(tokens) - 1

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            self._rows.pop(row_id, None)
            if length == 0:
                self._covered.pop(row_id, None)
            elif row_id in self._covered:
                self._covered[row_id] = min(self._covered[row_id], length - 1)
        if 0 in lengths and self._steps - self._saved >= _SAVED:
            save_quietly(self.matrix)
            self._saved = self._steps

    def memory_bytes(self) -> int:
        own = sum(memory.matrix.successors.nbytes for memory in self._memories.all())
        return self.matrix.successors.nbytes + own

    def _memory(self, context: DraftContext, index: int) -> _Memory:
        salt = context.salt(index)
        return self._shared if salt is None else self._memories.of(salt)

    def _new_memory(self) -> _Memory:
        """Of a domain that is new: what the file held."""
        first = np.full_like(self.matrix.successors, -1) if self._first is None else self._first.copy()
        return self._memory_of(SuccessorMatrix(first, None, None))

    def _memory_of(self, matrix: SuccessorMatrix) -> _Memory:
        return _Memory(matrix=matrix, acceptance=Acceptance(weight=WEIGHT), shape=best_tree(self._prior, self._nodes))

    def _rates(self, acceptance: Acceptance) -> NDArray[np.float64]:
        """(depth, ranks) as far as the text has shown."""
        found = [acceptance.estimate(place, float(prior)) for place, prior in np.ndenumerate(self._prior)]
        return np.array(found).reshape(self._prior.shape)

    def _grown(self, memory: _Memory, tokens: Sequence[int], nodes: int, depth: int) -> _Drafted:
        """The shape's first `nodes` nodes, where the matrix knows a token for them and for what is above them."""
        successors, acceptance, tree = memory.matrix.successors, memory.acceptance, TreeBuilder()
        drafted = _Drafted(acceptance=acceptance, tokens=tree.tokens, parents=tree.parents, end=len(tokens), tree=tree)
        placed = {-1: (0, tokens[-1])}
        for entry, (rank, parent, level) in enumerate(memory.shape[:nodes]):
            if level > depth or parent not in placed:
                continue
            above, last = placed[parent]
            token = int(successors[last, rank])
            if token >= 0:
                evidence = Evidence((level - 1, rank), float(self._prior[level - 1, rank]))
                node = tree.add(token, above, confidence=acceptance.estimate(*evidence))
                drafted.evidence[node], placed[entry] = evidence, (node, token)
        return drafted


def top_ids(logits: Tensor, k: int) -> NDArray[np.int64]:
    """(B, N, k) ids of the largest logits (B, N, V), the largest first.

    The k largest lie in the k blocks of largest maximum, so only these are sorted: for V = 150,000 that is seven times
    as fast as sorting all. Between equal logits the choice is arbitrary.
    """
    size = logits.shape[-1]
    whole = size // _BLOCK * _BLOCK
    if whole < 4 * k * _BLOCK:
        return _on_host(logits.topk(k).indices)
    maxima = logits[..., :whole].view(*logits.shape[:-1], whole // _BLOCK, _BLOCK).amax(-1)
    blocks = maxima.topk(k, sorted=False).indices
    ids = (blocks.unsqueeze(-1) * _BLOCK + torch.arange(_BLOCK, device=logits.device)).flatten(-2)
    if whole < size:
        rest = torch.arange(whole, size, device=logits.device)
        ids = torch.cat([ids, rest.expand(*ids.shape[:-1], -1)], -1)
    best = logits.gather(-1, ids).topk(k).indices
    return _on_host(ids.gather(-1, best))


def _on_host(ids: Tensor) -> NDArray[np.int64]:
    found: NDArray[np.int64] = ids.cpu().numpy()
    return found
