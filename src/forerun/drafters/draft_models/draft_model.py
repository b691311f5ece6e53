"""Drafts with a smaller causal LM that has the target's tokenizer: a chain or a tree, deterministic
or sampled.

The draft model is a `Target` with a cache of its own. A row's cache holds the committed tokens except the last one,
followed by the root and the nodes that were run. Accepted nodes stay in the cache, so no token is run twice. Sources:
Leviathan et al. (arXiv 2211.17192), SpecInfer (2305.09781), Sequoia (2402.12374).

On an accelerator one recording (CUDA graph) runs the whole draft: the tokens that the cache lacks, then the tree depth
by depth, with the draws in between. That is a single launch instead of one for each pass.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from forerun.core.acceptance import Proposal
from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree, ancestor_mask
from forerun.decode.drafter import DraftContext, DrafterSetup, LearningDrafter, check_choice
from forerun.devices import constant
from forerun.drafters.drawing import DraftVocabulary, Draws, HostDraws
from forerun.drafters.trees import Descend, FixedTree, Grown, NodeLimits, Submitted, TreeOptions
from forerun.drafters.vocabulary import check_vocabulary
from forerun.errors import ArgumentError
from forerun.model.back_ends import load_target
from forerun.model.inputs import Nodes, scatter_rows
from forerun.model.masks import Block
from forerun.model.recordings import bucket, extend_rows, first_rows, round_tokens, wide
from forerun.model.target import Target
from forerun.model.transformers_target import TransformersTarget, require_layers
from forerun.types import Budget, DraftKind

NextLevel = Callable[[Tensor, range], Tensor]  # (ids (B, K) so far, nodes of the last depth) -> raw logits (B, F, V)


@torch.inference_mode()
def unroll(
    target: TransformersTarget,
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    parents: Sequence[int],
    grow: Callable[..., Grown],
    *numbers: Tensor,
    key: Hashable,
) -> Grown:
    """Append ``tokens[i]``, at least one, to row ``rows[i]``, and draft a tree whose root is the last of them. The
    cache is then in the same state as after `Target.prefill` of the tokens and `Target.score` of the nodes that were
    run.

    Args:
        parents: (N,) parents of the nodes of the whole shape, depth by depth; -1 for the root.
        grow: builds a tree from the raw logits (B, 1, V) after the roots, a `NextLevel` for the logits further down,
            and the `numbers`.
        numbers: (B, ..) tensors on the device that differ between calls with one key.
        key: identifies the operations of `grow`.

    Returns:
        The result of `grow`. If it was recorded, it is valid until the next call.
    """
    count = len(rows)
    counts = [len(chunk) for chunk in tokens]
    batch = min(target.cache.rows, bucket(max(rows) + 1))
    nodes = Nodes.of_prompt(tokens, least=round_tokens(max(counts), batch))
    held = [target.lengths[row] for row in rows]
    added = [fresh - 1 + len(parents) for fresh in counts]
    ends = [length + more for length, more in zip(held, added, strict=True)]
    target.check_room(rows, added, counts)
    target.note_passes(rows, nodes)
    target.cache.touch(rows, ends)
    width = wide(max(*ends, max(held) + nodes.fresh), target.cache.slots)
    passes = _TreePasses(target, tuple(parents), width)

    def work(lengths: Tensor, counts: Tensor, ids: Tensor, index: Tensor, *numbers: Tensor) -> Grown:
        first = passes.root(lengths, counts, ids)
        base = (lengths + counts - 1).clamp_min(0)

        def descend(drafted: Tensor, level: range) -> Tensor:
            fresh = drafted[:, level.start - 1 : level.stop - 1]
            ids = fresh.new_zeros(batch, len(level)).index_copy_(0, index, fresh)
            return passes.below(base, counts > 0, ids, level).index_select(0, index)

        return grow(first.index_select(0, index), descend, *numbers)

    more = bucket(count) - count  # A recording runs more rows: the last one is repeated
    at = torch.tensor([*rows, *[rows[-1]] * more])
    host = [scatter_rows(part, rows, batch) for part in (torch.tensor(held), torch.tensor(counts), nodes.ids)]
    on_device = [extend_rows(values, more) for values in numbers]
    whole_key = "unrolled", key, passes.parents, width, batch, nodes.fresh, len(at)
    with target.pass_lock:
        tree: Grown = target.recordings.run_sent(whole_key, work, [*host, at], target.device, *on_device)
    for row, length, fresh in zip(rows, held, counts, strict=True):
        if tree.run:  # Then the root is node 0 and not committed
            target.hold(row, length + fresh - 1, 1 + tree.run)
        else:
            target.hold(row, length + fresh)
    return first_rows(tree, count) if more else tree


class _TreePasses:
    """The passes over a tree of one shape, without the host, for the first rows of the cache in their order."""

    def __init__(self, target: TransformersTarget, parents: tuple[int, ...], width: int) -> None:
        self.target, self.parents, self._width = target, parents, width

    @cached_property
    def _sees(self) -> Tensor:
        """(N, N) bool on the host: a node attends to itself and its ancestors."""
        return ancestor_mask(torch.tensor([self.parents[1:]], dtype=torch.int64))[0]

    def root(self, lengths: Tensor, counts: Tensor, ids: Tensor) -> Tensor:
        """Return logits (B, 1, V) after token number `counts` (B,) of `ids` (B, N), which follow `lengths` tokens."""
        size, device = ids.shape[1], ids.device
        steps = torch.arange(size, device=device)
        real, places = steps < counts.unsqueeze(1), lengths.unsqueeze(1) + steps
        sees = torch.ones(size, size, dtype=torch.bool, device=device).tril() & real.unsqueeze(2)
        states = self._run(lengths, sees, places, places, real, ids)
        last = (counts - 1).clamp_min(0).view(-1, 1, 1).expand(-1, 1, states.shape[2])
        return self.target.head(states.gather(1, last))

    def below(self, base: Tensor, takes_part: Tensor, ids: Tensor, level: range) -> Tensor:
        """Return logits (B, F, V) after the nodes `level` with tokens `ids` (B, F), of rows whose root is at `base`."""
        device, depths = ids.device, self._sees[: level.stop].sum(-1) - 1
        sees = constant(tuple(self._sees[level.start : level.stop, : level.stop].flatten().tolist()), device)
        places = base.unsqueeze(1) + torch.arange(level.start, level.stop, device=device)
        positions = base.unsqueeze(1) + constant(tuple(depths.tolist()), device)
        real = takes_part.unsqueeze(1).expand_as(ids)
        seen = sees.bool().view(1, len(level), level.stop) & real.unsqueeze(2)
        return self.target.head(self._run(base, seen, positions, places, real, ids))

    def _run(
        self, lengths: Tensor, sees: Tensor, positions: Tensor, places: Tensor, real: Tensor, ids: Tensor
    ) -> Tensor:
        """Return states (B, N, H) after the final norm. `positions` (B, M) are those of the nodes after `lengths`
        tokens, of which the last N are run.
        """
        positions = positions.clamp_max(self.target.max_length - 1)
        block = Block(lengths, sees, positions[:, -ids.shape[1] :], positions)
        slots = torch.where(real, places, self.target.cache.dump)
        return self.target.run_first_rows(block, slots, ids, self._width)


CHUNK = 16  # Rows that lack more tokens than this are prefilled alone, so that others are not padded to their length
Model = TypeVar("Model", bound=Target)


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig(TreeOptions):
    """Options of `draft_model`."""

    model: Any  # Directory, hub id, ``demo-draft``, or a loaded transformers model
    num_speculative_tokens: int = 5  # Length of the chain, tokens; a tree's depth is that of `shape`
    dtype: str = "auto"  # Dtype of the weights: ``auto`` is what the checkpoint says
    stop: str = "never"  # Ends a draft early: ``never``, ``confidence``, ``svip`` or ``adaedl``, see `Stop`
    stop_threshold: float | None = None  # Threshold of `stop`; None takes the rule's default

    def __post_init__(self) -> None:
        self.check("draft_model")

    def check(self, method: str) -> None:
        """Raise ArgumentError, naming `method`, unless the options are valid."""
        self.check_tree(method)
        check_choice(method, self, "stop", [rule.value for rule in Stop])
        never = self.stop == Stop.NEVER
        most = math.inf if self.stop == Stop.SVIP else 1.0
        if self.stop_threshold is not None and (never or not 0 <= self.stop_threshold <= most):
            expected = "none without a rule" if never else f"in 0..{most:g}"
            raise ArgumentError(f"the threshold of stop={self.stop} must be {expected}, got {self.stop_threshold}")


class DraftModelDrafter(LearningDrafter[Proposal]):
    """Drafts with a smaller causal LM, with one forward pass per depth for all rows."""

    name = "draft_model"
    Config = DraftModelConfig
    _slot_ratio: ClassVar[int] = 1  # Slots of the draft model's cache, in multiples of the engine's

    def __init__(self, config: DraftModelConfig, setup: DrafterSetup) -> None:
        super().__init__()
        self.config = config
        self._tree = self._fixed_tree()
        self.model = load_draft(load_target, config, setup, self._slot_ratio * setup.slots + self._draft_slots)
        self._vocabulary = setup.target.vocab_size
        self._shared: DraftVocabulary | None = None
        self._check_vocabulary(setup)
        # Row -> committed tokens in the draft model's cache, in the draft model's tokens
        self._cached = defaultdict[int, int](int)

    def kind(self, sampler: Sampler) -> DraftKind:
        return self._tree.kind(sampler)

    @property
    def remembers(self) -> bool:
        return True

    def grow(self, rows: int, slots: int) -> None:
        self.model.grow(rows, self._slot_ratio * slots + self._draft_slots)

    def memory_bytes(self) -> int:
        return self.model.memory_bytes()

    def extend(self, context: DraftContext) -> None:
        """Keep the accepted nodes of the last proposal in the cache. New tokens are run with the next proposal."""
        rows, paths = list[int](), list[tuple[int, ...]]()
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            cached = self._cached[row_id]
            known_tokens = len(tokens) - fresh
            drafted = self._drafted.get(row_id)
            if (
                isinstance(drafted, Submitted)
                and drafted.run
                and cached == self._draft_length(row_id, known_tokens) - 1
            ):
                rows.append(row_id)
                paths.append(drafted.accepted(tokens[known_tokens:-1]))
                cached += 1 + len(paths[-1])
            self._cached[row_id] = max(0, min(cached, len(self._draft_tokens(row_id, tokens)) - 1))
        if rows:
            self.model.commit(rows, paths)
        super().extend(context)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            kept = min(self._cached[row_id], self._draft_length(row_id, length))
            self._cached[row_id] = self.model.reusable(row_id, kept)
            self.model.truncate([row_id], [self._cached[row_id]])
            self.model.clear(row_id)
            if length == 0:
                del self._cached[row_id]
        super().truncate(rows, lengths)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        texts = [self._draft_tokens(row, tokens) for row, tokens in zip(context.rows, context.tokens, strict=True)]
        within = self._tree.within(dataclasses.replace(context, tokens=texts), budget, self._most_tokens)
        active = [index for index, count in enumerate(within) if count > 0 and texts[index]]
        trees = context.trees()
        if not active:
            return trees
        ending = Ending(self.config, self._tree.shape.levels, [within[index] for index in active])
        grown = self._grow(context, active, [texts[index] for index in active], ending)
        for index, tree, submitted in self._tree.cuts(context, active, grown, ending.nodes):
            trees[index], self._drafted[context.rows[index]] = tree, submitted
        return trees

    def _grow(self, context: DraftContext, active: list[int], texts: list[Sequence[int]], ending: Ending) -> Grown:
        """Grow the first nodes of the shape for the active rows, depth by depth. `texts` are their texts in the draft
        model's tokens.
        """
        rows, within = [context.rows[index] for index in active], list(ending.nodes)
        left = self._catch_up(rows, texts)
        size = self._vocabulary if self._shared is None else self._shared.size

        def drawn(draws: Draws | HostDraws, first: Tensor, descend: Descend) -> Grown:
            return self._tree.grow(draws, max(within), first, descend, self._shared, enough=ending.enough)

        if self.model.records and self.config.stop == Stop.NEVER:
            draws = self._tree.draws(context, active, self.model.device, size, recorded=True)
            if draws.key is not None:
                return self._unroll(rows, texts, left, draws, (max(within), draws.key), drawn)
        appended = not self.model.keeps_states  # Else the root runs as node 0 of a tree
        first = ending.look(self._target_logits(run_last(self.model, rows, left, appended=appended)))
        for row, text in zip(rows, texts, strict=True):
            self._cached[row] = len(text) - 1 + appended

        def descend(ids: Tensor, level: range) -> Tensor:
            if level.start == 1 and appended:  # The root becomes node 0: it keeps its slot but is no longer committed
                for row in rows:
                    self._cached[row] -= 1
                self.model.truncate(rows, [self._cached[row] for row in rows])
            roots = self._embeddable([text[-1] for text in texts])
            parents = self._tree.shape.parents
            nodes = Nodes.of_levels(roots, self._translate(ids), parents, counts=within, start=level.start)
            return ending.look(self._target_logits(self.model.score(rows, nodes).logits))

        return drawn(self._tree.draws(context, active, first.device, size), first, descend)

    def _catch_up(self, rows: list[int], texts: list[Sequence[int]]) -> list[Sequence[int]]:
        """Run the tokens of `texts` that the rows lack, as `catch_up` does. Return those left to run, the root last."""
        most = [min(self._cached[row], len(text) - 1) for row, text in zip(rows, texts, strict=True)]
        cached = [self.model.reusable(row, count) for row, count in zip(rows, most, strict=True)]
        missing = [self._embeddable(text[count:]) for count, text in zip(cached, texts, strict=True)]
        return catch_up(self.model, rows, cached, missing)

    def _unroll(
        self,
        rows: list[int],
        texts: list[Sequence[int]],
        left: list[Sequence[int]],
        draws: Draws | HostDraws,
        key: Hashable,
        drawn: Callable[[Draws | HostDraws, Tensor, Descend], Grown],
    ) -> Grown:
        """Grow the nodes in one recording, which first runs the tokens that are `left`."""

        def grow(first: Tensor, descend: Descend, *numbers: Tensor) -> Grown:
            def below(ids: Tensor, level: range) -> Tensor:
                return self._target_logits(descend(self._translate(ids), level))

            return drawn(draws.with_tensors(numbers), self._target_logits(first), below)

        grown = unroll(
            require_layers(self.model, self.name), rows, left, self._tree.shape.parents, grow, *draws.tensors, key=key
        )
        for row, text in zip(rows, texts, strict=True):
            self._cached[row] = len(text) - bool(grown.run)
        return grown

    def _fixed_tree(self) -> FixedTree:
        """The tree that is drafted."""
        return self.config.fixed_tree()

    @property
    def _draft_slots(self) -> int:
        """Slots that a draft needs after a row's committed tokens."""
        return self._tree.shape.size

    @property
    def _most_tokens(self) -> int:
        """Most tokens of a text together with a drafted path."""
        return min(self.model.max_length, self.model.slots - self._draft_slots)

    def _draft_tokens(self, row_id: int, tokens: Sequence[int]) -> Sequence[int]:
        """Return the committed tokens in the draft model's tokens."""
        return tokens

    def _draft_length(self, row_id: int, length: int) -> int:
        """Return the number of draft tokens for a row's first `length` committed tokens."""
        return length

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens, with 0 instead of ids that the draft model lacks (padding of the target's embedding)."""
        return [token if token < self.model.vocab_size else 0 for token in tokens]

    def _target_logits(self, logits: Tensor) -> Tensor:
        """Map (B, F, V') -> (B, F, V) over the target's ids."""
        return fit_vocabulary(logits, self._vocabulary)

    def _translate(self, ids: Tensor) -> Tensor:
        """Return drafted tokens in the draft model's tokens."""
        return ids

    def _check_vocabulary(self, setup: DrafterSetup) -> None:
        check_vocabulary(setup, self.config.model, self.model.vocab_size)


def load_draft(load: Callable[..., Model], config: Any, setup: DrafterSetup, slots: int) -> Model:
    """Load the draft model that a configuration names on the target's device; a loaded model stays on its own."""
    return load(
        config.model,
        rows=setup.rows,
        slots=slots,
        dtype=config.dtype,
        device=setup.target.device if isinstance(config.model, str | Path) else None,
    )


def fit_vocabulary(logits: Tensor, vocabulary: int) -> Tensor:
    """Map logits (.., V') -> (.., V) over `vocabulary` ids: padding is dropped; ids that the draft model lacks get
    minus infinity.
    """
    missing = vocabulary - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocabulary]


def run_missing(model: Target, rows: Sequence[int], cached: Sequence[int], missing: Sequence[Sequence[int]]) -> Tensor:
    """Cut the rows' caches to `cached` tokens, run the `missing` tokens after them (at least one for each row), and
    return the logits (B, 1, V) after the last token of each.
    """
    return model.prefill(rows, catch_up(model, rows, cached, missing)).logits


def run_last(model: Target, rows: Sequence[int], tokens: Sequence[Sequence[int]], *, appended: bool) -> Tensor:
    """Run ``tokens[i]`` after row ``rows[i]``, and return the logits (B, 1, V) after the last token of each. With
    `appended` that token is committed like the others, else it is scored as the root of a tree.
    """
    if appended:
        return model.prefill(rows, tokens).logits
    before = [(row, one[:-1]) for row, one in zip(rows, tokens, strict=True) if len(one) > 1]
    if before:
        some, pieces = zip(*before, strict=True)
        model.prefill(some, pieces)
    return model.score(rows, [TokenTree(one[-1]) for one in tokens]).logits


def catch_up(
    model: Target, rows: Sequence[int], cached: Sequence[int], missing: Sequence[Sequence[int]]
) -> list[Sequence[int]]:
    """Cut the rows' caches to `cached` tokens and, for rows with many `missing` tokens, run all but the last of these.
    Return the tokens that are left to run, at least one for each row.
    """
    model.truncate(rows, cached)
    rest = list(missing)
    for index, (row, text) in enumerate(zip(rows, missing, strict=True)):
        if len(text) > CHUNK:
            model.prefill([row], [text[:-1]])
            rest[index] = text[-1:]
    return rest


class Stop(StrEnum):
    """The rules that end a draft early: a confidence threshold, or a bound on acceptance from the distribution's
    entropy. A rule reads the distribution *before* the token is drawn. That token is still drawn and submitted, and
    drafting ends
    after it: to withdraw a sampled token because of its value would bias the output.
    """

    NEVER = "never"  # Only the budget ends the draft
    CONFIDENCE = "confidence"  # The likeliest token has less than the threshold (``assistant_confidence_threshold``)
    SVIP = "svip"  # The square root of the distribution's entropy exceeds the threshold (SVIP, arXiv 2411.18462)
    ADAEDL = "adaedl"  # The bound ``1 - sqrt(0.2 entropy)`` on acceptance is below it (AdaEDL, arXiv 2410.18351)


DEFAULTS = {Stop.CONFIDENCE: 0.4, Stop.SVIP: 0.6, Stop.ADAEDL: 0.4}  # Thresholds; SVIP and AdaEDL tune theirs
ENTROPY_SHARE = 0.2  # AdaEDL's factor before the entropy, gamma in the paper


def goes_on(rule: Stop, probs: Tensor, threshold: float | None = None) -> Tensor:
    """Return (..,) bool: whether to continue after a token drawn from these distributions (.., V), by any rule but
    `NEVER`. Without a threshold the rule's default applies.
    """
    threshold = DEFAULTS[rule] if threshold is None else threshold
    if rule is Stop.CONFIDENCE:
        return probs.amax(-1) >= threshold
    entropy: Tensor = torch.special.entr(probs.float()).sum(-1)
    return entropy.sqrt() <= threshold if rule is Stop.SVIP else 1 - (ENTROPY_SHARE * entropy).sqrt() >= threshold


class Ending(NodeLimits):
    """Counts the nodes that each row may submit under a `Stop` rule: the draft ends with the nodes that are drawn where
    all distributions of one depth say stop.
    """

    def __init__(self, config: DraftModelConfig, levels: Sequence[range], nodes: list[int]) -> None:
        super().__init__(levels, nodes, lambda _: self._ended)
        self._stop, self._threshold = Stop(config.stop), config.stop_threshold
        self._ended: list[bool] = []

    def look(self, logits: Tensor) -> Tensor:
        """Apply the rule to the raw logits (B, F, V) of one depth before anything is drawn, and return them."""
        if self._stop is not Stop.NEVER:
            going = goes_on(self._stop, logits.float().softmax(-1), self._threshold)
            self._ended = (~going.any(-1)).tolist()
        return logits
