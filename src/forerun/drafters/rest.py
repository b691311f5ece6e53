"""Retrieval: what a corpus went on with after the same words is drafted.

The method of REST (arXiv 2311.08252): the longest end of the text that occurs in a datastore, all that followed it
there, merged into a trie, of which the most frequent nodes are the draft. Deterministic: all nodes are given, so at a
temperature the target's own sample walks the tree, which is exact and optimal there. Knows no model and no law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.acceptance import Acceptance, Evidence, Proposal
from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.datastore import Datastore
from forerun.drafters.datastore.format import SORTED_TOKENS
from forerun.drafters.datastore.trie import Trie, merge
from forerun.drafters.domains import PerDomain
from forerun.errors import ArgumentError
from forerun.training.data.identity import TokenizerIdentity
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, Drawn

_SHARES = 10
"""Bins of a node's share of its parent's continuations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestConfig:
    """Options of `rest`."""

    datastore: str
    """Directory that `forerun datastore build` wrote for this target."""
    num_speculative_tokens: int = 10
    """Most tokens copied from one place."""
    max_match: int = 16
    """Longest end of the text that is looked for, tokens."""
    min_match: int = 2
    """Shortest end of the text that counts as a match, tokens."""
    max_hits: int = 5000
    """Most places of one match that are read; of more, this many are taken evenly."""
    nodes: int = 64
    """Most nodes of the draft."""

    def __post_init__(self) -> None:
        for name in ("num_speculative_tokens", "min_match", "max_hits", "nodes"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"rest: {name} must be at least 1, got {getattr(self, name)}")
        if not self.min_match <= self.max_match <= SORTED_TOKENS:
            raise ArgumentError(
                f"rest: max_match must be from min_match ({self.min_match}) to {SORTED_TOKENS}, by which datastores "
                f"are sorted; got {self.max_match}"
            )


@dataclass(kw_only=True, slots=True)
class _Drafted(Proposal):
    """A row's last draft, to be compared with what the text goes on with."""

    end: int
    """Committed tokens when it was made."""


class RestDrafter(Drafter):
    """Looks the text's last words up in a datastore and drafts what most often followed them."""

    name = "rest"
    Config = RestConfig

    def __init__(self, config: RestConfig, setup: DrafterSetup) -> None:
        """Open the datastore.

        Raises:
            DataError: no datastore there, or a damaged one.
            VocabularyMismatchError: built with another tokenizer than the target's.
        """
        self.config = config
        self.store = Datastore.open(config.datastore)
        given = None if setup.tokenizer is None else TokenizerIdentity.of(setup.tokenizer)
        self.store.manifest.check_tokenizer(given, setup.target.vocab_size, self.store.folder)
        self._rows: dict[int, _Drafted] = {}
        self._estimates = PerDomain(Acceptance)

    def extend(self, context: DraftContext) -> None:
        for row_id, tokens in zip(context.rows, context.tokens, strict=True):
            drafted = self._rows.pop(row_id, None)
            if drafted is not None:
                drafted.learn(tokens[drafted.end :])

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        builders = []
        limits = zip(context.rows, context.tokens, budget.nodes, budget.depth, strict=True)
        for index, (row_id, tokens, nodes, depth) in enumerate(limits):
            acceptance = self._estimates.of(context.salt(index))
            drafted = self._look_up(tokens, min(nodes, self.config.nodes), depth, acceptance)
            if drafted is None:
                self._rows.pop(row_id, None)
                builders.append(TreeBuilder())
            else:
                self._rows[row_id] = drafted
                builders.append(_tree(drafted))
        return stack(builders)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id in rows:
            self._rows.pop(row_id, None)

    def _look_up(self, tokens: Sequence[int], nodes: int, depth: int, acceptance: Acceptance) -> _Drafted | None:
        length = min(self.config.num_speculative_tokens, depth)
        if nodes < 1 or length < 1:
            return None
        match = self.store.longest(tokens, shortest=self.config.min_match, longest=self.config.max_match)
        if match is None:
            return None
        found = self.store.continuations(match, length, self.config.max_hits)
        trie = merge(found, nodes)
        evidence = {node + 1: _evidence(trie, node, match.length, len(found)) for node in range(len(trie.tokens))}
        return _Drafted(
            acceptance=acceptance, tokens=trie.tokens, parents=trie.parents, evidence=evidence, end=len(tokens)
        )


def _evidence(trie: Trie, node: int, match: int, hits: int) -> Evidence:
    """Of entry `node` of a trie: by the length of the match, the parent's continuations and the node's share of them.

    One continuation out of one is a weaker sign than a hundred out of a hundred; how much weaker, the text says.

    Args:
        match: tokens that matched.
        hits: continuations that were read.
    """
    parent = trie.parents[node]
    count, total = trie.counts[node], trie.counts[parent - 1] if parent else hits
    key = match.bit_length(), min(total.bit_length(), 8), min(_SHARES * count // total, _SHARES - 1)
    return Evidence(key, count / (total + 1))


def _tree(drafted: _Drafted) -> TreeBuilder:
    builder, size = TreeBuilder(), len(drafted.tokens)
    builder.tokens, builder.parents = drafted.tokens, list(drafted.parents)
    builder.drawn, builder.scouts = [Drawn.GIVEN] * size, [False] * size
    builder.confidence = [drafted.acceptance.estimate(*drafted.evidence[node]) for node in range(1, size + 1)]
    builder.index_given()
    return builder
