"""REST: drafts what followed the text's last tokens in a corpus.

arXiv 2311.08252: the longest end of the text that occurs in a datastore, all that followed it there, merged into a
trie, of which the most frequent nodes are the draft. All nodes are deterministic, so at a temperature the target's own
sample walks the tree, which is exact and optimal there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from forerun.core.acceptance import BINS, Acceptance, Evidence
from forerun.core.tree import TokenTree
from forerun.drafters.base import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least
from forerun.drafters.lookup.datastore import SEPARATOR, SORTED_TOKENS, Datastore
from forerun.errors import ArgumentError
from forerun.manifests import TokenizerIdentity
from forerun.types import Budget

_LOW = 2**32 - 1
_FEW = 24  # Fewer continuations than this are merged faster in plain Python than by arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class RestConfig:
    """Options of `rest`."""

    datastore: str  # Directory that `forerun datastore build` wrote for this target
    num_speculative_tokens: int = 10  # Most tokens copied from one position
    max_match: int = 16  # Longest end of the text that is looked for, tokens
    min_match: int = 2  # Shortest end of the text that counts as a match, tokens
    max_hits: int = 5000  # Most positions of one match that are read; of more, this many are taken evenly
    nodes: int = 64  # Most nodes of the draft

    def __post_init__(self) -> None:
        check_least("rest", self, num_speculative_tokens=1, min_match=1, max_hits=1, nodes=1)
        if not self.min_match <= self.max_match <= SORTED_TOKENS:
            limits = f"from min_match ({self.min_match}) to {SORTED_TOKENS}, by which datastores are sorted"
            raise ArgumentError(f"rest: max_match must be {limits}; got {self.max_match}")


class RestDrafter(Drafter):
    """Looks the text's last words up in a datastore and drafts what most often followed them."""

    name = "rest"
    Config = RestConfig

    def __init__(self, config: RestConfig, setup: DrafterSetup) -> None:
        """Open the datastore. Raises DataError if there is none, or it is damaged;
        VocabularyMismatchError if it was built with another tokenizer.
        """
        self.config = config
        self.store = Datastore.open(config.datastore)
        given = None if setup.tokenizer is None else TokenizerIdentity.of(setup.tokenizer)
        self.store.manifest.check_tokenizer(given, setup.target.vocab_size, self.store.folder)
        self._rows: dict[int, Drafted] = {}
        self._estimates = PerDomain(Acceptance)

    def extend(self, context: DraftContext) -> None:
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            drafted = self._rows.pop(row_id, None)
            if drafted is not None:
                drafted.learn(tokens[len(tokens) - fresh :])

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        trees, config = context.trees(), self.config
        limits = zip(context.rows, context.tokens, budget.nodes, budget.depth, strict=True)
        for index, (row_id, tokens, nodes, depth) in enumerate(limits):
            self._rows.pop(row_id, None)
            if nodes < 1 or depth < 1:
                continue
            match = self.store.longest(tokens, shortest=config.min_match, longest=config.max_match)
            if match is None:
                continue
            found = self.store.continuations(match, min(config.num_speculative_tokens, depth), config.max_hits)
            trie, acceptance = merge(found, min(nodes, config.nodes)), self._estimates.of(context.salt(index))
            evidence = [_evidence(trie, node, match.length, len(found)) for node in range(len(trie.tokens))]
            confidence = [acceptance.estimate(*one) for one in evidence]
            trees[index] = TokenTree.of(tokens[-1], trie.tokens, trie.parents, confidence)
            drafted = self._rows[row_id] = Drafted(trees[index], acceptance)
            drafted.evidence = dict(enumerate(evidence, start=1))
        return trees

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id in rows:
            self._rows.pop(row_id, None)


def _evidence(trie: Trie, node: int, match: int, hits: int) -> Evidence:
    """Return the evidence of entry `node` of a trie: by the length of the match, the parent's
    continuations and the node's share of them. One continuation out of one is a weaker sign than a
    hundred out of a hundred; the text teaches how much weaker.
    """
    parent = trie.parents[node]
    count, total = trie.counts[node], trie.counts[parent - 1] if parent else hits
    key = match.bit_length(), min(total.bit_length(), 8), min(BINS * count // total, BINS - 1)
    return Evidence(key, count / (total + 1))


@dataclass(slots=True)
class Trie:
    """The trie nodes of some continuations, in order of their ids: node k + 1 is entry k, 0 is the
    root.
    """

    most: int  # How many will be kept
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # Continuations that run through the node

    def floor(self) -> int:
        """Return the count that a deeper node must exceed: enough shallower ones are at least as
        frequent already.
        """
        return 0 if len(self.counts) < self.most else int(np.partition(self.counts, -self.most)[-self.most])

    def add(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Add nodes; a key is a parent's id and, in the lower 32 bits, a token."""
        self.tokens.extend([key & _LOW for key in keys])
        self.parents.extend([key >> 32 for key in keys])
        self.counts.extend(counts)

    def best(self) -> Trie:
        """Return the most frequent nodes first, under new ids, which puts parents before their
        children.
        """
        order = np.argsort(-np.array(self.counts, dtype=np.int64), kind="stable")[: self.most].tolist()
        names = {0: 0} | {node + 1: name for name, node in enumerate(order, start=1)}
        tokens, counts = [self.tokens[node] for node in order], [self.counts[node] for node in order]
        return Trie(self.most, tokens, [names[self.parents[node]] for node in order], counts)


def merge(continuations: NDArray[np.uint32], nodes: int) -> Trie:
    """Return the `nodes` most frequent nodes, at least 1, of the trie of some continuations (H, D),
    each ended early by a `SEPARATOR`. Of equals the shallower is kept, then the one of smaller
    parent, then of smaller token.
    """
    found = Trie(nodes)
    alive = continuations.astype(np.int64)
    owner = np.zeros(len(alive), np.int64)  # node that each continuation has run through last
    for depth in range(alive.shape[1]):
        if len(alive) <= _FEW:
            _merge_few(alive[:, depth:].tolist(), owner.tolist(), found)
            break
        keys = (owner << 32) | alive[:, depth]
        distinct, counts = np.unique(keys, return_counts=True)
        kept = ((distinct & _LOW) != SEPARATOR) & (counts > found.floor())
        distinct, counts = distinct[kept], counts[kept]
        if not len(distinct):
            break
        first = len(found.tokens) + 1
        found.add(distinct.tolist(), counts.tolist())
        index = np.searchsorted(distinct, keys).clip(max=len(distinct) - 1)
        lives = distinct[index] == keys
        owner, alive = first + index[lives], alive[lives]
    return found.best()


def _merge_few(rows: list[list[int]], owner: list[int], found: Trie) -> None:
    """Do the rest of `merge` without arrays; `rows` are what is left of the continuations."""
    for depth in range(len(rows[0]) if rows else 0):
        keys = [(node << 32) | row[depth] for node, row in zip(owner, rows, strict=True)]
        floor, every = found.floor(), sorted(Counter(keys).items())
        counts = {key: count for key, count in every if count > floor and key & _LOW != SEPARATOR}
        names = {key: node for node, key in enumerate(counts, start=len(found.tokens) + 1)}
        found.add(list(counts), list(counts.values()))
        rows = [row for row, key in zip(rows, keys, strict=True) if key in names]
        owner = [names[key] for key in keys if key in names]
        if not rows:
            return
