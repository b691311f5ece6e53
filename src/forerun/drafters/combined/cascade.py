"""Drafts with a draft model that is itself sped up by a cheaper drafter, to any depth.

Staged speculative decoding (Spector & Re, arXiv 2308.04623) and the vertical cascade of cascade speculative drafting
(Chen et al., 2312.11462): the draft model is the target of an inner drafter and writes its chain with the engine's own
`step`. The inner level walks the draft model's own draws, so the chain is the one that the draft model would have
drafted by itself, each token drawn from the recorded distribution; only its cost falls. `tail` is the horizontal
cascade: the inner drafter goes on where the chain ends.
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
from forerun.decode.drafter import DraftContext, Drafted, Drafter, DrafterSetup, PerDomain, check_least, with_params
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
    inner: Spec = "ngram"  # Drafter of the draft model: a name or ``{"method": name, ...}``; also a `cascade`
    num_speculative_tokens: int = 8  # Tokens that the draft model writes; what `tail` appends is not counted
    tail: int = 0  # Most nodes that the inner drafter adds behind the chain; the draft model does not see them
    inner_nodes: int = 16  # Most nodes that the inner drafter may draft for one pass of the draft model
    dtype: str = "auto"  # Dtype of the draft model's weights: ``auto`` is what the checkpoint says

    def __post_init__(self) -> None:
        options_of("cascade", self.inner)
        check_least("cascade", self, num_speculative_tokens=1, tail=0, inner_nodes=1)


class CascadeDrafter(Drafter):
    """Drafts a chain with a smaller model, several of its tokens in one of its passes."""

    name = "cascade"
    Config = CascadeConfig

    def __init__(self, config: CascadeConfig, setup: DrafterSetup) -> None:
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
                f"cascade: {self._inner.method} reads hidden states of the draft model, whose recurrent states go back "
                "further than to the last accepted token: it would read tokens twice. Take an inner drafter without a "
                "head, ngram say"
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
        """Keep what the text confirmed of the last chain. New tokens are run when a draft is
        wanted, not before.
        """
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            state, known = self._rows[row_id], len(tokens) - fresh
            submitted, state.submitted = state.submitted, None
            if submitted is not None and state.text == known:
                submitted.learn(tokens[known:])
            self._agree(row_id, min(state.text, known), tokens)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
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
            if row.error is not None:  # the draft model's numbers, or the row's own processors, which the target meets
                if isinstance(row.error, NumericError) and not row.chain:
                    context.fail(index, row.error)
                self._shrink(row.cache_row, row.begun, row.begun)
        going = {index: row for index, row in rows.items() if row.error is None}
        if self.config.tail and going:
            self._append(going, trees, budget)
        return trees

    # --- what is known ----------------------------------------------------------------------------------------------

    def _agree(self, row_id: int, base: int, tokens: Sequence[int]) -> None:
        """Shrink to what agrees with `tokens`, of which the first `base` are known to agree."""
        state = self._rows[row_id]
        chain, agreed = state.chain if base == state.text else [], base
        for guess, token in zip(chain, self.model.readable(tokens[base : base + len(chain)]), strict=False):
            if guess != token:
                break
            agreed += 1
        self._shrink(row_id, agreed, len(tokens))

    def _shrink(self, row_id: int, agreed: int, length: int) -> None:
        """Forget all but `agreed` tokens of a text of `length`, whose last one is not run before a
        step. An inner drafter that reads hidden states wants that of the token before the first new
        one, so this one runs again.
        """
        state = self._rows[row_id]
        kept = agreed - 1 if self._inner.requires else agreed
        most = max(0, min(self.model.lengths[row_id], kept, length - 1))
        self.model.truncate([row_id], [self.model.reusable(row_id, most)])
        if agreed < state.text + len(state.chain) or length == 0:
            self._inner.truncate([row_id], [agreed])
        state.text, state.chain = agreed, []

    def _enter(self, context: DraftContext, index: int, room: int) -> InnerRow:
        """Return the context's row as the inner level's."""
        row_id, tokens, sampler = context.rows[index], context.tokens[index], context.samplers[index]
        self._agree(row_id, min(self._rows[row_id].text, len(tokens)), tokens)
        greedy = sampler.greedy
        return InnerRow(
            cache_row=row_id,
            tokens=self.model.readable(tokens),
            prompt_length=context.prompt_lengths[index],
            # At temperature 0 the sampler also tells how probable each token was.
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
        """Run what the draft model lacks but the root, and show the inner drafter what is new."""
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
        """Step until every row's chain is as long as it should be: a length that no drawn token
        decides.
        """
        running = list(rows)
        while running:
            members, depths, most = range(len(running)), [row.tokens_left for row in running], self.config.inner_nodes
            group = Group(name=self._inner.method, drafter=self._inner, members=members, depths=depths, nodes=most)
            for row, emitted in zip(running, step(self.model, running, [group], isolate=True), strict=True):
                row.tokens_left -= len(emitted.tokens)
                if row.error is not None:
                    row.end()
                elif row.sampler.greedy:
                    row.certainty += [math.exp(chosen.logprob) for chosen, _ in emitted.logprobs or ()]
            running = [row for row in running if row.tokens_left > 0 and row.error is None]

    def _submit(self, tree: TokenTree, row: InnerRow) -> None:
        """Add the chain to the tree, each sampled token with the distribution that it was drawn
        from.
        """
        state = self._rows[row.cache_row]
        state.chain = row.chain
        state.submitted = submitted = Drafted(tree, self._estimates.of(row.cache_salt))
        for position, token in enumerate(row.chain):
            probs = row.probs.get(position)
            if probs is None:
                drawn, prob = Drawn.DETERMINISTIC, row.certainty[position]
            else:
                drawn, prob = Drawn.IID, float(probs.max())
                tree.set_probs(position, probs)
            submitted.add(token, position, by_draft_prob(drawn, 0, prob), drawn)

    def _append(self, going: Mapping[int, InnerRow], trees: Sequence[TokenTree], budget: Budget) -> None:
        """Hang what the inner drafter expects behind each chain below its end, within what is left
        of the budget.
        """
        rows, nodes, depth = list(going.values()), list[int](), list[int]()
        for index, row in going.items():
            size, room = trees[index].size, self.model.max_length - len(row.tokens)
            depth.append(max(0, min(self.config.tail, budget.depth[index] - size, room)))
            nodes.append(max(0, min(self.config.tail, budget.nodes[index] - size)) if depth[-1] else 0)
        context = context_for(rows, range(len(rows)), [0] * len(rows), {})
        tails = self._inner.propose(context, Budget(nodes=nodes, depth=depth))
        for tail, (index, row) in zip(tails, going.items(), strict=True):
            tree, submitted = trees[index], self._rows[row.cache_row].submitted
            assert submitted is not None, "its chain was submitted"
            end = tree.size
            graft(tree, tail, end, since=end)
            for node in range(end + 1, tree.size + 1):
                # Counted apart from the chain's own nodes, all of rank 0: this is the inner drafter's word alone.
                evidence = submitted.evidence[node] = by_draft_prob(Drawn.DETERMINISTIC, 1, tree.confidence[node])
                tree.confidence[node] = submitted.acceptance.estimate(*evidence)


@dataclass(kw_only=True, slots=True)
class _CascadeRow:
    """The state of draft model and inner drafter for one row: `text` committed tokens, and the
    chain behind them.
    """

    text: int = 0
    chain: list[int] = field(default_factory=list)
    submitted: Drafted | None = None


@dataclass(kw_only=True, slots=True)
class InnerRow(Row):
    """A sequence whose next tokens an inner level drafts."""

    outer: Rng  # Random numbers of the outer level's step
    begun: int  # Committed tokens when the draft began
    probs: dict[int, Tensor] = field(default_factory=dict)  # Distribution (V,) of each index of the chain
    drawn: dict[int, int] = field(default_factory=dict)  # Position in the chain -> that token
    certainty: list[float] = field(default_factory=list)  # At temperature 0: the draft model's probability of each

    def rng(self) -> Rng:
        return InnerRng(self)

    def end(self) -> None:
        """End the chain after a failed step, behind what that step drew, whose fate may not depend
        on what followed.
        """
        self.shorten(1)
        while (token := self.drawn.get(len(self.chain))) is not None:
            self.commit([token])

    @property
    def chain(self) -> list[int]:
        return self.tokens[self.begun :]


class InnerRng(Rng):
    """The random numbers of an inner step. The token it draws for a position is the outer level's
    draft draw for it, so whoever drafts inside, the chain is the one that the draft model would
    sample. The inner drafter draws from the next stream.
    """

    def __init__(self, row: InnerRow) -> None:
        self._row, self._offset = row, len(row.tokens) - row.begun
        super().__init__(row.outer.seed, row.outer.position + self._offset, row.outer.draft_stream + 1)

    def draw(self, probs: Tensor, depth: int = 0) -> int:
        """Draw a token from `probs` (V,), which is remembered as the distribution of its position."""
        position = self._offset + depth
        self._row.probs[position] = probs
        token = self._row.drawn[position] = self._row.outer.drafted(probs, position)
        return token


class DraftTarget(TransformersTarget):
    """A draft model that is scored in the token ids of another model."""

    def speak(self, vocabulary: int) -> None:
        """Give logits over `vocabulary` ids from now on: padding is dropped, ids that this model
        lacks are impossible.
        """
        self.known, self.vocab_size = self.vocab_size, vocabulary

    def readable(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens with ids that this model lacks replaced by 0."""
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
