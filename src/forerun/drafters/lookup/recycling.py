"""Token Recycling: drafts the likeliest successors that the target last predicted after each token.

arXiv 2408.08696. A matrix holds, for every token of the vocabulary, the `top_k` likeliest next tokens of the last time
that the target scored it, rejected nodes included. forerun adds a table for pairs of tokens, which is looked up first,
because its successors are right more often. A draft is the tree of the likeliest paths from the root, by how often the
successors of each rank were right. All nodes are deterministic.
"""

from __future__ import annotations

import heapq
import json
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from forerun.core.acceptance import Acceptance, Evidence, best_tree
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, Drafted, DrafterSetup, LearningDrafter, PerDomain, check_least
from forerun.errors import ArgumentError, DataError, VocabularyMismatchError
from forerun.types import Budget, Verdict
from forerun.writing import TokenizerIdentity, replace_file

if TYPE_CHECKING:
    from forerun.decode.scores import Scores

log = logging.getLogger(__name__)

FORMAT = "forerun-recycling-1"
_TENSOR = "successors"
_MOST = 80  # Nodes of the paper's tree
_SAVED = 256  # Least steps between two writes of the file, which happen when a sequence ends
_PAIRS = 2**15  # Entries of the table of pairs: 1.3 MB for 8 successors
_BYTES = 128 * 2**20  # Most bytes of the matrices of all isolation domains together, without the shared one
WEIGHT = 32.0  # Observations that the measured rate counts for as a prior
Where = tuple[bool, bool]  # Whether successors are those of a pair, and whether they are children of the root
_MEASURED: Mapping[Where, tuple[float, ...]] = {
    (False, True): (0.29, 0.12, 0.065, 0.045, 0.030, 0.022, 0.018, 0.011),
    (False, False): (0.45, 0.17, 0.080, 0.055, 0.040, 0.020, 0.018, 0.010),
    (True, True): (0.57, 0.088, 0.055, 0.027, 0.025, 0.014, 0.012, 0.008),
    (True, False): (0.67, 0.087, 0.050, 0.033, 0.025, 0.018, 0.010, 0.008),
}
"""How often the next token had each rank among the successors, if all tokens above were right. Measured with
SmolLM2-135M-Instruct at T = 0 on 60 prompts, 20 each of GSM8K's training questions, adversarial QA and Self-Instruct,
128 tokens each, replayed with matrices that had seen at most four prompts of the same kind. Rates by the target's own
probability of each successor, in 13 bins, drafted no better (1.52 and 1.53 of plain decoding's speed).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Options of `recycling`."""

    num_speculative_tokens: int = 6  # Depth of the tree, tokens
    nodes: int | None = None
    """Most nodes of the tree; None: the number that pays by the measured time of a pass, at most 80."""
    top_k: int = 8  # Successors kept for each token of the vocabulary
    adaptive_tree: bool = True  # Use learned acceptance rates of each rank; else the rates measured beforehand
    path: str | None = None
    """File that the matrix is loaded from and saved to. It is saved when a sequence ends, if 256 steps have passed
    since the last time, and when the process ends. None: the matrix is not saved. Other isolation domains (API keys)
    start from the loaded matrix, and what they learn is never saved.
    """

    def __post_init__(self) -> None:
        check_least("recycling", self, num_speculative_tokens=1, nodes=1, top_k=1)


@dataclass(kw_only=True, slots=True)
class _DomainMemory:
    """The learned state of an isolation domain."""

    matrix: SuccessorMatrix
    pairs: PairTable
    acceptance: Acceptance  # Estimates by (`Where`, rank)

    def successors(self, before: int, token: int) -> tuple[bool, list[int]]:
        """Return whether the pair of tokens is known, and the successors of the pair, or else those of `token`."""
        found = self.pairs.get(before, token)
        return (True, found) if found is not None else (False, self.matrix.successors[token].tolist())

    def nbytes(self) -> int:
        """Return the bytes of both tables."""
        return self.matrix.successors.nbytes + self.pairs.nbytes()


class RecyclingDrafter(LearningDrafter[Drafted]):
    """Drafts a tree of the likeliest successors that the target last predicted after each token."""

    name = "recycling"
    Config = RecyclingConfig

    def __init__(self, config: RecyclingConfig, setup: DrafterSetup) -> None:
        """Make an empty matrix, or load the saved one. Raises as `SuccessorMatrix.open` does."""
        super().__init__()
        self.config = config
        size = setup.target.vocab_size
        if config.top_k > size:
            raise ArgumentError(f"recycling: top_k is {config.top_k}, the target has {size} tokens")
        identity = None if setup.tokenizer is None else TokenizerIdentity.of(setup.tokenizer)
        # The path is made absolute, because the working directory may change before the file is saved.
        path = None if config.path is None else Path(config.path).expanduser().absolute()
        self.matrix = SuccessorMatrix.open(path, size, config.top_k, identity)  # Matrix of requests without a salt
        self._first = None if path is None else self.matrix.successors.copy()
        self._nodes = config.nodes or _MOST
        if config.nodes is None and setup.pass_ms is not None:
            self._nodes = count_paying(
                measured_rates(config.num_speculative_tokens, config.top_k), setup.pass_ms, _MOST
            )
        self._evidence = {
            where: [Evidence((where, rank), rate) for rank, rate in enumerate(rates_of(where, config.top_k))]
            for where in _MEASURED
        }
        self._shared = self._memory_of(self.matrix)
        self._memories = PerDomain(self._memory_of, size=_DomainMemory.nbytes, most_size=_BYTES)
        self._steps = self._saved = 0
        self._covered: dict[int, int] = {}
        # The matrix is saved when the process ends; the callback must not keep the drafter alive.
        self._finalizer = weakref.finalize(self, self.matrix.save)

    @property
    def watches(self) -> bool:
        """Always true: the target's likeliest tokens are useful, whichever drafter drafted."""
        return True

    @property
    def top_ids(self) -> int:
        return self.config.top_k

    def extend(self, context: DraftContext) -> None:
        super().extend(context)
        for index, (row_id, tokens, fresh) in enumerate(zip(context.rows, context.tokens, context.fresh, strict=True)):
            # If the target has scored a token for this drafter, its successors are already known.
            start = max(self._covered.get(row_id, 0), len(tokens) - fresh - 1, 0)
            if len(tokens) - start > 1:
                self._memory(context, index).matrix.read(np.asarray(tokens[start:], dtype=np.int64))
            self._covered[row_id] = len(tokens) - 1

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        """Draft the tree of the likeliest paths of known successors."""
        limits = zip(context.rows, context.tokens, budget.nodes, budget.depth, strict=True)
        for index, (row_id, tokens, most, deepest) in enumerate(limits):
            memory, nodes = self._memory(context, index), min(most, self._nodes)
            depth = min(deepest, self.config.num_speculative_tokens)
            self._drafted[row_id] = self._grow(memory, _before(tokens, len(tokens) - 1), tokens[-1], nodes, depth)
        return [self._drafted[row_id].tree for row_id in context.rows]

    def _grow(self, memory: _DomainMemory, before: int, root: int, nodes: int, deepest: int) -> Drafted:
        """Grow the tree of the likeliest nodes, one by one. A path survives with the product of its ranks' rates. So
        the next node is the first successor of a node in the tree, or the next successor of a parent that has a child
        in it.
        """
        tokens, parents, depths, rates = [root], [-1], [0], [1.0]
        evidence, ranked = dict[int, Evidence](), self._rank(memory)
        # (-survival, order of entry, parent, index among the ranks, survival of the parent, where, its successors)
        heap = list[tuple[float, int, int, int, float, Where, list[int]]]()
        if nodes > 0 and deepest > 0:
            pair, successors = memory.successors(before, root)
            heap.append((-ranked[pair, True][0][0], 0, 0, 0, 1.0, (pair, True), successors))
        while heap and len(tokens) <= nodes:
            negative, order, parent, index, above, where, successors = heapq.heappop(heap)
            ranks = ranked[where]
            if index + 1 < len(ranks):
                entry = -above * ranks[index + 1][0], order + 1, parent, index + 1, above, where, successors
                heapq.heappush(heap, entry)
            _, rank, rate = ranks[index]
            if (token := successors[rank]) < 0:
                continue
            node = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            rates.append(rate)
            evidence[node] = self._evidence[where][rank]
            if depths[node] < deepest:
                pair, below = memory.successors(tokens[parent], token)
                likely = negative * ranked[pair, False][0][0]
                heapq.heappush(heap, (likely, self.config.top_k * node, node, 0, -negative, (pair, False), below))
        drafted = Drafted(TokenTree.of(root, tokens[1:], parents[1:], rates[1:]), memory.acceptance)
        drafted.evidence = evidence
        return drafted

    def _rank(self, memory: _DomainMemory) -> dict[Where, list[tuple[float, int, float]]]:
        """Return the ranks in the order of their assumed rates, as (assumed rate, rank, learned rate)."""
        estimate = memory.acceptance.estimate
        learned = self.config.adaptive_tree
        ranked = {}
        for where, ranks in self._evidence.items():
            right = [estimate(*one) for one in ranks]
            taken = right if learned else [one.prior for one in ranks]
            entries = zip(taken, range(len(ranks)), right, strict=True)
            ranked[where] = sorted(entries, key=lambda entry: -entry[0])
        return ranked

    def observe(self, context: DraftContext, verdicts: Sequence[Verdict], scores: Scores) -> None:
        self._steps += 1
        for index, (tree, ids) in enumerate(zip(scores.trees, scores.top_ids(self.config.top_k), strict=True)):
            memory, text = self._memory(context, index), context.tokens[index]
            root = _before(text, len(text) - context.fresh[index] - 1)
            before = [root, *(tree.tokens[parent] for parent in tree.parents[1:])]
            successors = ids[: len(tree.tokens)]
            memory.matrix.put(tree.tokens, successors)
            memory.pairs.put(before, tree.tokens, successors)
        for row_id, tokens in zip(context.rows, context.tokens, strict=True):
            self._covered[row_id] = len(tokens) - 1

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)
        for row_id, length in zip(rows, lengths, strict=True):
            if length == 0:
                self._covered.pop(row_id, None)
            elif row_id in self._covered:
                self._covered[row_id] = min(self._covered[row_id], length - 1)
        if 0 in lengths and self._steps - self._saved >= _SAVED:
            self.matrix.save()
            self._saved = self._steps

    def memory_bytes(self) -> int:
        return self._shared.nbytes() + sum(memory.nbytes() for memory in self._memories.all())

    def _memory(self, context: DraftContext, index: int) -> _DomainMemory:
        salt = context.salt(index)
        return self._shared if salt is None else self._memories.of(salt)

    def _memory_of(self, matrix: SuccessorMatrix | None = None) -> _DomainMemory:
        """Make the memory of a domain; without a matrix it starts from a copy of the loaded one."""
        if matrix is None:
            first = np.full_like(self.matrix.successors, -1) if self._first is None else self._first.copy()
            matrix = SuccessorMatrix(first, None, None)
        return _DomainMemory(matrix=matrix, pairs=PairTable(self.config.top_k), acceptance=Acceptance(weight=WEIGHT))


class PairTable:
    """The latest likely successors of pairs of tokens, the likeliest first. It is a hash table with `_PAIRS` entries,
    in which a new pair overwrites the old one.
    """

    def __init__(self, top_k: int) -> None:
        self._pairs = np.full(_PAIRS, -1, np.int64)
        self._successors = np.full((_PAIRS, top_k), -1, np.int32)

    def get(self, before: int, token: int) -> list[int] | None:
        """Return the successors of `token` after `before`, or None if the pair is not known."""
        place = _place(before, token)
        known = self._pairs[place] == (before << 32 | token)
        return self._successors[place].tolist() if known else None

    def put(self, before: Sequence[int], tokens: Sequence[int], successors: NDArray[np.int64]) -> None:
        """Store the target's likeliest tokens (N, k) after `tokens` (N,), each of which follows one of `before`."""
        first, second = np.asarray(before, np.int64), np.asarray(tokens, np.int64)
        places = _place(first, second)
        self._pairs[places], self._successors[places] = first << 32 | second, successors

    def nbytes(self) -> int:
        """Return the bytes of the whole table, used or not."""
        return self._pairs.nbytes + self._successors.nbytes


def _place(before: Any, token: Any) -> Any:
    """Return the index of a pair, of numbers or of arrays; no product of token ids leaves 64 bits."""
    return (before * 40_503 + token * 2_654_435_761 >> 8) % _PAIRS


def _before(tokens: Sequence[int], index: int) -> int:
    """Return the token before index `index` of a text; 0 for the first one."""
    return tokens[index - 1] if index > 0 else 0


class SuccessorMatrix:
    """The latest likely successors of each token, the likeliest first: (V, k) int32, filled with -1. Entries of a row
    are distinct. It is saved at `path`; None: not saved. Use `open`.
    """

    def __init__(self, successors: NDArray[np.int32], path: Path | None, identity: TokenizerIdentity | None) -> None:
        self.successors, self.path = successors, path
        self.changed = False  # Whether anything was learned since the last `save`
        self._tokenizer = "" if identity is None else identity.vocabulary

    @classmethod
    def open(cls, path: Path | None, vocabulary: int, top_k: int, identity: TokenizerIdentity | None) -> Self:
        """Load the matrix from `path`, or return an empty one if there is no file yet. Raises ArgumentError if the file
        has another number of successors, or its directory does not exist; DataError if it is not a matrix, or damaged;
        VocabularyMismatchError if it belongs to another tokenizer.
        """
        if path is not None and not path.absolute().parent.is_dir():
            raise ArgumentError(f"recycling: {path.parent} does not exist, so nothing can be kept in {path.name}")
        matrix = cls(np.full((vocabulary, top_k), -1, np.int32), path, identity)
        if path is None or not path.exists():
            return matrix
        matrix.successors, stored = _read(path)
        tokens, ranks = matrix.successors.shape
        if tokens != vocabulary or (matrix._tokenizer and stored and matrix._tokenizer != stored):
            raise VocabularyMismatchError(
                f"{path} holds successors of {tokens} tokens of tokenizer {stored[:12] or 'unknown'}, the target has "
                f"{vocabulary} of {matrix._tokenizer[:12] or 'unknown'}; name another file for this target"
            )
        if ranks != top_k:
            raise ArgumentError(f"{path} holds {ranks} successors a token; set top_k to that, or name another file")
        return matrix

    def put(self, tokens: Sequence[int], successors: NDArray[np.int64]) -> None:
        """Store the target's likeliest tokens (N, k) after `tokens` (N,); of equal tokens the last one counts."""
        # numpy assigns in order: the last of equal indices stays.
        self.successors[np.asarray(tokens, dtype=np.int64)] = successors
        self.changed = True

    def read(self, text: NDArray[np.int64]) -> None:
        """Learn from text without the target: the latest distinct successors of each token come first, then those known
        before.
        """
        ranks = self.successors.shape[1]
        tokens, nexts = _latest_pairs(text, ranks)
        owners, first, counts = np.unique(tokens, return_index=True, return_counts=True)
        merged = np.full((len(owners), 2 * ranks), -1, np.int64)
        row = np.repeat(np.arange(len(owners)), counts)
        merged[row, np.arange(len(tokens)) - first[row]] = nexts
        merged[:, ranks:] = self.successors[owners]
        self.successors[owners] = _distinct(merged, ranks)
        self.changed = True

    def save(self) -> None:
        """Save the matrix atomically, if it has a path. An error is logged, so that no request fails."""
        if self.path is None or not self.changed:
            return
        try:
            with replace_file(self.path) as fresh:
                fresh.write_bytes(save({_TENSOR: self.successors}, {"format": FORMAT, "tokenizer": self._tokenizer}))
            self.changed = False
        except OSError as error:
            log.warning("recycling: what was learned could not be kept in %s: %s", self.path, error)


def _read(path: Path) -> tuple[NDArray[np.int32], str]:
    """Load the stored matrix into memory, and the hash of its tokenizer."""
    remedy = "delete it, or name another file"
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or list(file.keys()) != [_TENSOR]:
                raise DataError(f"{path} holds no matrix of successors ({json.dumps(metadata)}); {remedy}")
            successors: NDArray[np.int32] = file.get_tensor(_TENSOR)
    except SafetensorError as error:
        raise DataError(f"{path} is damaged ({error}); {remedy}") from error
    inside = successors.ndim == 2 and successors.size and -1 <= successors.min() <= successors.max() < len(successors)
    if not inside or successors.dtype != np.int32:
        raise DataError(f"{path} holds tokens outside its own vocabulary; {remedy}")
    return successors, str(metadata.get("tokenizer", ""))


def _latest_pairs(text: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return pairs of neighbours in the text, (tokens, successors), sorted by token, the latest first, at most `most`
    of each token.
    """
    pairs = (text[:-1] << 32) | text[1:]
    distinct, last = np.unique(pairs[::-1], return_index=True)  # Indices from the end: 0 is the latest pair
    order = np.lexsort((last, distinct >> 32))
    tokens, nexts = distinct[order] >> 32, distinct[order] & np.int64(2**32 - 1)
    _, first, counts = np.unique(tokens, return_index=True, return_counts=True)
    rank = np.arange(len(tokens)) - np.repeat(first, counts)
    return tokens[rank < most], nexts[rank < most]


def _distinct(rows: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return (M, width), the first distinct entries of each row (M, W), left aligned; -1 means no entry."""
    equal = rows[:, :, None] == rows[:, None, :]
    again = np.tril(equal, -1).any(2) | (rows < 0)
    order = np.argsort(again, axis=1, kind="stable")
    kept: NDArray[np.int64] = np.where(again, -1, rows)[np.arange(len(rows))[:, None], order][:, :width]
    return kept


def rates_of(where: Where, ranks: int) -> list[float]:
    """Return the measured rates at which a successor of each rank is right; beyond the table they halve with each
    rank.
    """
    measured = _MEASURED[where]
    return [measured[min(rank, len(measured) - 1)] * 0.5 ** max(0, rank - len(measured) + 1) for rank in range(ranks)]


def measured_rates(depth: int, ranks: int) -> list[list[float]]:
    """Return, by depth and rank, the measured probability that a successor of a known pair is right if its parent
    is.
    """
    return [rates_of((True, level == 0), ranks) for level in range(depth)]


def count_paying(rates: Sequence[Sequence[float]], pass_ms: Callable[[int], float], most: int) -> int:
    """Return the number of nodes, at most `most`, with the most expected tokens per time of the pass, `pass_ms`."""
    tokens, best = 1.0, (1.0 / pass_ms(0), 0)
    for count, node in enumerate(best_tree(rates, nodes=most, depth=len(rates)), start=1):
        tokens += node.survival
        best = max(best, (tokens / pass_ms(count), count))
    return max(1, best[1])
