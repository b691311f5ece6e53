"""Drafts with a draft model that is itself sped up by a cheaper drafter; cascades may be nested.

This is staged speculative decoding (Spector & Re, arXiv 2308.04623), and the vertical cascade of cascade speculative
drafting (Chen et al., 2312.11462). The draft model is the target of an inner drafter, and generates its chain with the
engine's own `step`. The inner step follows the draft model's own draws, so the chain is the one that the draft model
would have drafted alone, with the recorded distributions; only its cost falls. Option `tail` is the horizontal cascade:
the inner drafter continues where the chain ends.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from forerun.core.acceptance import Acceptance, by_draft_prob
from forerun.core.rng import Rng
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, graft
from forerun.decode.drafter import (
    DraftContext,
    Drafted,
    DrafterSetup,
    LearningDrafter,
    PerDomain,
    check_least,
    with_params,
)
from forerun.decode.row import Row
from forerun.decode.step import Group, context_for, step
from forerun.drafters.combined.composed import Spec, options_of
from forerun.drafters.draft_models.draft_model import CHUNK, fit_vocabulary, load_draft
from forerun.drafters.guarded import Guarded
from forerun.drafters.vocabulary import check_vocabulary
from forerun.errors import NumericError, UnsupportedModelError
from forerun.model import Scored, TransformersTarget
from forerun.model.inputs import Nodes
from forerun.types import Boundary, Budget, DraftKind, Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeConfig:
    """Options of `cascade`."""

    model: Any  # The draft model: directory, hub id, ``demo-draft``, or a loaded transformers model
    inner: Spec = "ngram"  # The draft model's own drafter: a name or ``{"method": name, ...}``; it may be a `cascade`
    num_speculative_tokens: int = 8  # Length of the draft model's chain, without `tail`
    tail: int = 0  # Most nodes that the inner drafter adds after the chain; the draft model does not score them
    inner_nodes: int = 16  # Most nodes that the inner drafter may draft for one pass of the draft model
    dtype: str = "auto"  # Dtype of the draft model's weights: ``auto`` is what the checkpoint says

    def __post_init__(self) -> None:
        options_of("cascade", self.inner)
        check_least("cascade", self, num_speculative_tokens=1, tail=0, inner_nodes=1)


class CascadeDrafter(LearningDrafter[Drafted]):
    """Drafts a chain with a smaller model, which itself decodes speculatively."""

    name = "cascade"
    Config = CascadeConfig

    def __init__(self, config: CascadeConfig, setup: DrafterSetup) -> None:
        super().__init__()
        self.config = config
        self._behind = config.num_speculative_tokens + config.inner_nodes + config.tail
        slots = setup.slots + self._behind
        self.model = load_draft(DraftTarget.load, config, setup, slots)
        check_vocabulary(setup, config.model, self.model.vocab_size)
        self.model.speak(setup.target.vocab_size)
        inner = replace(setup, target=self.model, slots=slots)
        self._inner = Guarded.build(*options_of("member", config.inner), inner)
        if self._inner.requires and self.model.states is not None:
            raise UnsupportedModelError(
                f"cascade: {self._inner.method} reads hidden states of the draft model, but the recurrent states of "
                "that model cannot be rolled back to every token, so tokens would be read twice. Take an inner drafter "
                "without a head, such as ngram"
            )
        self._estimates = PerDomain(Acceptance)
        self._rows = defaultdict[int, _CascadeRow](_CascadeRow)

    def kind(self, sampler: Sampler) -> DraftKind:
        return DraftKind(sampled=not sampler.greedy, chain=self.config.tail == 0)

    @property
    def depth(self) -> int:
        return self.config.num_speculative_tokens + self.config.tail

    def grow(self, rows: int, slots: int) -> None:
        self.model.grow(rows, slots + self._behind)
        self._inner.grow(rows, slots + self._behind)

    def memory_bytes(self) -> int:
        return self.model.memory_bytes() + self._inner.memory_bytes()

    def extend(self, context: DraftContext) -> None:
        """Keep the accepted part of the last chain in the caches. New tokens are run with the next proposal."""
        super().extend(context)
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            self._agree(row_id, min(self._rows[row_id].text, len(tokens) - fresh), tokens)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        super().truncate(rows, lengths)
        for row_id, length in zip(rows, lengths, strict=True):
            self._shrink(row_id, min(self._rows[row_id].text, length), length)
            self.model.clear(row_id)
            if length == 0:
                del self._rows[row_id]

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        limits = zip(budget.nodes, budget.depth, context.tokens, strict=True)
        longest, room = self.config.num_speculative_tokens, self.model.max_length
        within = [min(longest, nodes, depth, room - len(tokens)) for nodes, depth, tokens in limits]
        trees = context.trees()
        rows = {index: self._enter(context, index, count) for index, count in enumerate(within) if count > 0}
        if not rows:
            return trees
        self._catch_up(list(rows.values()))
        self._write(list(rows.values()))
        for index, row in rows.items():
            self._submit(trees[index], row)
            if row.error is not None:  # The draft model's logits, or a processor, which fails for the target, too
                if isinstance(row.error, NumericError) and not row.chain:
                    context.fail(index, row.error)
                self._shrink(row.cache_row, row.begun, row.begun)
        going = {index: row for index, row in rows.items() if row.error is None}
        if self.config.tail and going:
            self._append(going, trees, budget)
        return trees

    # --- state of a row ----------------------------------------------------------------------------------------------

    def _agree(self, row_id: int, base: int, tokens: Sequence[int]) -> None:
        """Cut a row's state to the prefix that agrees with `tokens`, of which the first `base` are known to agree."""
        state = self._rows[row_id]
        chain, agreed = state.chain if base == state.text else [], base
        for guess, token in zip(chain, self.model.readable(tokens[base : base + len(chain)]), strict=False):
            if guess != token:
                break
            agreed += 1
        self._shrink(row_id, agreed, len(tokens))

    def _shrink(self, row_id: int, agreed: int, length: int) -> None:
        """Forget all but `agreed` tokens of a text of `length` tokens, the last of which is run in the next step. An
        inner drafter that reads hidden states needs the one before the first new token, so that token is run again.
        """
        state = self._rows[row_id]
        kept = agreed - 1 if self._inner.requires else agreed
        most = max(0, min(self.model.lengths[row_id], kept, length - 1))
        self.model.truncate([row_id], [self.model.reusable(row_id, most)])
        if agreed < state.text + len(state.chain) or length == 0:
            self._inner.truncate([row_id], [agreed])
        state.text, state.chain = agreed, []

    def _enter(self, context: DraftContext, index: int, room: int) -> InnerRow:
        """Return one of the context's rows as a row of the inner step."""
        row_id, tokens, sampler = context.rows[index], context.tokens[index], context.samplers[index]
        self._agree(row_id, min(self._rows[row_id].text, len(tokens)), tokens)
        greedy = sampler.greedy
        return InnerRow(
            cache_row=row_id,
            tokens=self.model.readable(tokens),
            prompt_length=context.prompt_lengths[index],
            # At temperature 0 the log-probabilities give the draft model's confidence in each token.
            sampler=with_params(sampler, logprobs=0, logprobs_mode="raw_logprobs") if greedy else sampler,
            seed=context.rng[index].seed,
            stop_ids=frozenset(),
            tokens_left=room,
            rule=None if greedy else "sample_walk",
            outer=context.rng[index],
            begun=len(tokens),
            cache_salt=context.salt(index),
        )

    def _catch_up(self, rows: Sequence[InnerRow]) -> None:
        """Prefill the draft model with the tokens that it lacks, except the root, and let the inner drafter read
        them.
        """
        lacking = [len(row.tokens) - 1 - self.model.lengths[row.cache_row] for row in rows]
        alone = [[row] for row, count in zip(rows, lacking, strict=True) if count > CHUNK]
        short = [row for row, count in zip(rows, lacking, strict=True) if 0 < count <= CHUNK]
        for together in [*alone, short] if short else alone:
            pieces = [row.tokens[self.model.lengths[row.cache_row] : -1] for row in together]
            scored = self.model.prefill([row.cache_row for row in together], pieces, boundaries=self._inner.requires)
            self._show(together, scored.hidden_states)
        self._show([row for row in rows if self._rows[row.cache_row].text < len(row.tokens)], {})

    def _show(self, rows: Sequence[InnerRow], hidden_states: Mapping[Boundary, Tensor]) -> None:
        fresh = [len(row.tokens) - self._rows[row.cache_row].text for row in rows]
        if any(fresh):
            self._inner.extend(context_for(rows, range(len(rows)), fresh, hidden_states))
        for row in rows:
            self._rows[row.cache_row].text = len(row.tokens)

    # --- the chain --------------------------------------------------------------------------------------------------

    def _write(self, rows: Sequence[InnerRow]) -> None:
        """Run inner steps until every row's chain has its length, which does not depend on drawn tokens."""
        running = list(rows)
        while running:
            members = range(len(running))
            depths = [row.tokens_left for row in running]
            most = self.config.inner_nodes
            group = Group(name=self._inner.method, drafter=self._inner, members=members, depths=depths, nodes=most)
            for row, emitted in zip(running, step(self.model, running, [group], isolate=True), strict=True):
                row.tokens_left -= len(emitted.tokens)
                if row.error is not None:
                    row.end()
                elif row.sampler.greedy:
                    row.certainty += [math.exp(chosen.logprob) for chosen, _ in emitted.logprobs or ()]
            running = [row for row in running if row.tokens_left > 0 and row.error is None]

    def _submit(self, tree: TokenTree, row: InnerRow) -> None:
        """Add the chain to the tree, each sampled token with the distribution that it was drawn from."""
        self._rows[row.cache_row].chain = row.chain
        submitted = self._drafted[row.cache_row] = Drafted(tree, self._estimates.of(row.cache_salt))
        for position, token in enumerate(row.chain):
            probs = row.probs.get(position)
            if probs is None:
                drawn, prob = Drawn.DETERMINISTIC, row.certainty[position]
            else:
                drawn, prob = Drawn.IID, float(probs.max())
                tree.set_probs(position, probs)
            submitted.add(token, position, by_draft_prob(drawn, 0, prob), drawn)

    def _append(self, going: Mapping[int, InnerRow], trees: Sequence[TokenTree], budget: Budget) -> None:
        """Append the inner drafter's proposal after each chain, within the rest of the budget."""
        rows, nodes, depth = list(going.values()), list[int](), list[int]()
        for index, row in going.items():
            size, room = trees[index].size, self.model.max_length - len(row.tokens)
            depth.append(max(0, min(self.config.tail, budget.depth[index] - size, room)))
            nodes.append(max(0, min(self.config.tail, budget.nodes[index] - size)) if depth[-1] else 0)
        context = context_for(rows, range(len(rows)), [0] * len(rows), {})
        tails = self._inner.propose(context, Budget(nodes=nodes, depth=depth))
        for tail, (index, row) in zip(tails, going.items(), strict=True):
            tree, submitted = trees[index], self._drafted[row.cache_row]
            end = tree.size
            graft(tree, tail, end, since=end)
            for node in range(end + 1, tree.size + 1):
                # These have rank 1, so they are counted separately from the chain's nodes, which have rank 0: only the
                # inner drafter stands behind them.
                evidence = submitted.evidence[node] = by_draft_prob(Drawn.DETERMINISTIC, 1, tree.confidence[node])
                tree.confidence[node] = submitted.acceptance.estimate(*evidence)


@dataclass(kw_only=True, slots=True)
class _CascadeRow:
    """The state of draft model and inner drafter for one row: `text` committed tokens, and the last chain."""

    text: int = 0
    chain: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class InnerRow(Row):
    """A row of the inner step."""

    outer: Rng  # Random numbers of the outer step
    begun: int  # Committed tokens when the draft began
    probs: dict[int, Tensor] = field(default_factory=dict)  # Index in the chain -> distribution (V,) of the token
    drawn: dict[int, int] = field(default_factory=dict)  # Index in the chain -> token drawn from it
    certainty: list[float] = field(default_factory=list)
    """At temperature 0: the draft model's probability of each token."""

    def rng(self) -> Rng:
        return InnerRng(self)

    def end(self) -> None:
        """End the chain after a failed step. The tokens that the step had drawn stay in it, because whether they are
        submitted must not depend on what followed.
        """
        self.shorten(1)
        while (token := self.drawn.get(len(self.chain))) is not None:
            self.commit([token])

    @property
    def chain(self) -> list[int]:
        return self.tokens[self.begun :]


class InnerRng(Rng):
    """The random numbers of an inner step. The token for a position is drawn with the outer step's draft numbers, so
    the chain is the one that the draft model would sample alone, whatever the inner drafter proposes. The inner drafter
    draws from the next stream.
    """

    def __init__(self, row: InnerRow) -> None:
        self._row, self._offset = row, len(row.tokens) - row.begun
        super().__init__(row.outer.seed, row.outer.position + self._offset, row.outer.draft_stream + 1)

    def draw(self, probs: Tensor, depth: int = 0) -> int:
        """Draw a token from `probs` (V,), and record the distribution for its position."""
        position = self._offset + depth
        self._row.probs[position] = probs
        token = self._row.drawn[position] = self._row.outer.drafted(probs, position)
        return token


class DraftTarget(TransformersTarget):
    """A draft model whose logits are over the token ids of another model."""

    def speak(self, vocabulary: int) -> None:
        """Return logits over `vocabulary` ids from now on: padding is dropped; ids that this model lacks get minus
        infinity.
        """
        self.known, self.vocab_size = self.vocab_size, vocabulary

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens, with 0 instead of ids that this model lacks."""
        return [token if token < self.known else 0 for token in tokens]

    def score(
        self,
        rows: Sequence[int],
        trees: Sequence[TokenTree] | Nodes,
        *,
        boundaries: Set[Boundary] = frozenset(),
        padded: bool = True,
    ) -> Scored:
        scored = super().score(rows, trees, boundaries=boundaries, padded=padded)
        return replace(scored, logits=fit_vocabulary(scored.logits, self.vocab_size))
