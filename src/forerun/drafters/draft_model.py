"""Any smaller causal LM with the target's tokenizer drafts: a chain or a tree, deterministic or sampled.

The draft model is a `Target` of its own, with its own cache. A row's cache holds the committed tokens but the last; the
root and the nodes that were run stand behind them, and what the target kept of them is kept here too, so no token runs
twice. Sources: Leviathan et al. (arXiv 2211.17192), SpecInfer (2305.09781), Sequoia (2402.12374). Knows no rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from forerun.drafters.base import DraftContext, Drafter, DrafterSetup
from forerun.drafters.growth import Draw, Shape
from forerun.drafters.levels import FixedTree, Grown, Submitted
from forerun.drafters.vocabulary import check_sizes, check_tokenizers, tokenizer_beside
from forerun.errors import ArgumentError, nearest
from forerun.tree import TreeBuilder, stack
from forerun.types import Budget, Draft, empty_draft

if TYPE_CHECKING:
    from forerun.target import Target

_CHUNK = 16
"""Rows with more tokens to catch up on than this run them apart: the others need not be padded to their length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftModelConfig:
    """Options of `draft_model`."""

    model: Any
    """Directory, hub id, ``demo-draft``, or a loaded transformers model."""
    num_speculative_tokens: int = 5
    """Length of the chain, tokens; a tree's depth is that of `shape`."""
    shape: Sequence[int] | None = None
    """Children of each node at depth 0, 1, ...; None drafts a chain."""
    draw: str = "auto"
    """``auto``, ``given``, ``iid``, ``without_replacement`` or ``greedy_k``."""
    dtype: str = "auto"
    """Of the weights: ``auto`` is what the checkpoint says."""
    temperature: float | None = None
    """Draft at this temperature instead of the request's; requests at temperature 0 are not touched."""

    def __post_init__(self) -> None:
        kinds = [kind.value for kind in Draw]
        if self.draw not in kinds:
            raise ArgumentError(
                f"draft_model: draw is one of {', '.join(kinds)}, got {self.draw!r}.{nearest(self.draw, kinds)}"
            )
        if self.num_speculative_tokens < 1:
            raise ArgumentError(
                f"draft_model: num_speculative_tokens must be at least 1, got {self.num_speculative_tokens}"
            )
        if self.shape is not None and (not self.shape or min(self.shape) < 1):
            raise ArgumentError(f"draft_model: shape needs at least one depth and one child a node, got {self.shape}")
        if self.temperature is not None and self.temperature <= 0:
            raise ArgumentError(f"draft_model: temperature must be above 0, got {self.temperature}; use draw='given'")


@dataclass(kw_only=True, slots=True)
class _Row:
    """What the draft model's cache knows of one row."""

    cached: int = 0
    """Committed tokens in the cache."""
    drafted: Submitted | None = None
    """The last proposal, until the target has spoken."""


class DraftModelDrafter(Drafter):
    """Drafts with a smaller causal LM, one forward pass per level for all rows."""

    name = "draft_model"
    Config = DraftModelConfig

    def __init__(self, config: DraftModelConfig, setup: DrafterSetup) -> None:
        self.config = config
        shape = Shape(tuple(config.shape) if config.shape else (1,) * config.num_speculative_tokens)
        self._tree = FixedTree(shape=shape, draw=Draw(config.draw), temperature=config.temperature)
        self.model = _load(config, setup, shape)
        self._vocabulary = setup.target.vocab_size
        self._check_vocabulary(setup)
        self._rows: dict[int, _Row] = {}

    def memory_bytes(self) -> int:
        return self.model.memory_bytes()

    def extend(self, context: DraftContext) -> None:
        """Keep of the last proposal what the target kept. New tokens are run when a draft is wanted, not before."""
        rows, paths = list[int](), list[tuple[int, ...]]()
        for row_id, tokens, fresh in zip(context.rows, context.tokens, context.fresh, strict=True):
            row = self._rows.setdefault(row_id, _Row())
            known = len(tokens) - fresh
            drafted, row.drafted = row.drafted, None
            if drafted is not None:
                drafted.learn(self._tree.calibration, tokens[known:])
            if drafted is not None and drafted.run and row.cached == known - 1:
                path = drafted.kept(tokens[known:-1])
                rows.append(row_id)
                paths.append(path)
                row.cached += 1 + len(path)
            row.cached = min(row.cached, len(tokens) - 1)
        if rows:
            self.model.commit(rows, paths)

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        for row_id, length in zip(rows, lengths, strict=True):
            row = self._rows.setdefault(row_id, _Row())
            row.cached, row.drafted = min(row.cached, length), None
            self.model.truncate([row_id], [row.cached])
            if length == 0:
                del self._rows[row_id]

    def propose(self, context: DraftContext, budget: Budget) -> Draft:
        within = self._tree.within(context, budget, self.model.max_length)
        active = [index for index, count in enumerate(within) if count > 0]
        if not active:
            return empty_draft(len(within))
        grown = self._grow(context, active, max(within))
        builders = [TreeBuilder() for _ in within]
        for place, index in enumerate(active):
            builders[index], self._rows[context.rows[index]].drafted = self._tree.cut(grown, place, within[index])
        return stack(builders, device=grown.tokens.device)

    def _grow(self, context: DraftContext, active: Sequence[int], nodes: int) -> Grown:
        """The first `nodes` nodes of the shape for the active rows, level by level."""
        rows, tokens = [context.rows[index] for index in active], [context.tokens[index] for index in active]
        roots = [row_tokens[-1] for row_tokens in tokens]

        def descend(ids: Tensor, level: range) -> Tensor:
            if level.start == 1:
                self._release_roots(rows)
            return self._fit(self.model.score(rows, roots, self._partial(ids), start=level.start).logits)

        return self._tree.grow(context, active, nodes, self._fit(self._catch_up(rows, tokens)), descend)

    def _catch_up(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Run what the cache lacks, the root last: its logits (B, 1, V)."""
        states = [self._rows.setdefault(row, _Row()) for row in rows]
        for state, row_tokens in zip(states, tokens, strict=True):
            state.cached, state.drafted = min(state.cached, len(row_tokens) - 1), None
        self.model.truncate(rows, [state.cached for state in states])
        for row, state, row_tokens in zip(rows, states, tokens, strict=True):
            if len(row_tokens) - state.cached > _CHUNK:
                self.model.prefill([row], [self._readable(row_tokens[state.cached : -1])])
                state.cached = len(row_tokens) - 1
        missing = [self._readable(row_tokens[state.cached :]) for state, row_tokens in zip(states, tokens, strict=True)]
        logits = self.model.prefill(rows, missing).logits
        for state, row_tokens in zip(states, tokens, strict=True):
            state.cached = len(row_tokens)
        return logits

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        """The tokens; ids from the padding of the target's embedding, which the draft model may lack, read as 0."""
        return [token if token < self.model.vocab_size else 0 for token in tokens]

    def _release_roots(self, rows: Sequence[int]) -> None:
        """The root becomes node 0 of a tree: it keeps its slot but is no longer committed."""
        for row in rows:
            self._rows[row].cached -= 1
        self.model.truncate(rows, [self._rows[row].cached for row in rows])

    def _fit(self, logits: Tensor) -> Tensor:
        """(B, F, V) over the target's ids: padding beyond them is dropped, ids that the draft lacks are impossible."""
        missing = self._vocabulary - logits.shape[-1]
        if missing <= 0:
            return logits[..., : self._vocabulary]
        return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)

    def _partial(self, ids: Tensor) -> Draft:
        """The nodes so far, as the draft model's own target sees them."""
        batch, size = ids.shape
        parents = torch.tensor(self._tree.shape.parents[:size], device=ids.device).expand(batch, -1)
        counts = torch.full((batch,), size, device=ids.device)
        return Draft(tokens=ids, parents=parents, counts=counts, drawn=torch.zeros_like(ids, dtype=torch.uint8))

    def _check_vocabulary(self, setup: DrafterSetup) -> None:
        named = isinstance(self.config.model, str | Path)
        theirs = tokenizer_beside(_resolved(self.config.model)) if named else None
        if setup.tokenizer is not None and theirs is not None:
            check_tokenizers(setup.tokenizer, theirs)
        else:
            check_sizes(setup.target.vocab_size, self.model.vocab_size)


def _resolved(name: str | Path) -> str:
    from forerun import demo

    return str(demo.resolve(name))


def _load(config: DraftModelConfig, setup: DrafterSetup, shape: Shape) -> Target:
    from forerun.target import Target

    model = _resolved(config.model) if isinstance(config.model, str | Path) else config.model
    nodes = len(shape.parents)
    return Target.load(model, rows=setup.rows, slots=setup.slots + nodes, dtype=config.dtype)
