"""PARD (arXiv 2504.18583): a draft model that drafts all depths in one pass, from masks, for any target of a family.

A mask token that texts do not contain, ``pard_token`` in the model's ``config.json``, is appended after the root once
for each depth but the first. The root predicts the token after it, and a mask at position p the token at p + 1. A mask
attends to the committed tokens and the masks before it. The masks' cache entries are dropped, and the true tokens are
run in their place with the next draft. The checkpoint format is AMD's: a transformers directory with two more keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.core.sampling import Sampler
from forerun.core.tree import TokenTree
from forerun.decode.drafter import DraftContext, DrafterSetup, check_least
from forerun.devices import send_ints
from forerun.drafters.draft_models.draft_model import DraftModelConfig, DraftModelDrafter, Ending, Stop
from forerun.drafters.drawing import Draw
from forerun.drafters.trees import DynamicTree, FixedTree, Grown
from forerun.drafters.vocabulary import spare_token
from forerun.errors import ArgumentError
from forerun.model.inputs import Nodes
from forerun.model.support import text_config
from forerun.model.transformers_target import require_layers
from forerun.types import Budget, DraftKind

# Keys in ``config.json``; the value of the second is "pard", and no engine reads it
KEY, TYPE_KEY = "pard_token", "spd_type"


@dataclass(frozen=True, kw_only=True, slots=True)
class PardConfig(DraftModelConfig):
    """Options of `pard`."""

    num_speculative_tokens: int = 8  # Most tokens on one path; public models were trained for 8 (PARD-2: 16)
    nodes: int = 32  # Nodes of the tree of the likeliest paths, without the root; `shape` or `tree` replaces it

    def __post_init__(self) -> None:
        self.check("pard")
        check_least("pard", self, nodes=1)
        if self.stop != Stop.NEVER and self.shape is None and self.tree is None:
            raise ArgumentError(f"pard: stop={self.stop} ends chains and fixed trees: give it a shape or a tree")


class PardDrafter(DraftModelDrafter):
    """Drafts with a PARD model in one pass for all rows. The default is the tree of the likeliest paths (DDTree, arXiv
    2604.12989), because a further depth is almost free.
    """

    name = "pard"
    Config = PardConfig
    config: PardConfig

    def __init__(self, config: PardConfig, setup: DrafterSetup) -> None:
        self._best: DynamicTree | None = None
        if config.shape is None and config.tree is None:
            self._best = DynamicTree(depth=config.num_speculative_tokens, top_k=config.nodes, nodes=config.nodes)
        super().__init__(config, setup)
        self._mask = mask_token(require_layers(self.model, "pard").model)

    def kind(self, sampler: Sampler) -> DraftKind:
        best = self._likeliest(sampler)
        return super().kind(sampler) if best is None else best.kind(sampler)

    def propose(self, context: DraftContext, budget: Budget) -> list[TokenTree]:
        best = [self._likeliest(sampler) for sampler in context.samplers]
        others = [0 if tree else nodes for tree, nodes in zip(best, budget.nodes, strict=True)]
        trees = super().propose(context, Budget(nodes=others, depth=budget.depth))
        depths = [
            min(tree.depth, depth, self._most_tokens - len(text)) if tree and nodes > 0 else 0
            for tree, nodes, depth, text in zip(best, budget.nodes, budget.depth, context.tokens, strict=True)
        ]
        active = [index for index, depth in enumerate(depths) if depth > 0]
        if not active:
            return trees
        assert self._best is not None, "a row drafts with it"
        texts, wanted = [context.tokens[index] for index in active], [depths[index] for index in active]
        every = self._levels([context.rows[index] for index in active], texts, wanted)
        below = iter(torch.split(every[:, 1:], 1, dim=1))
        grown = self._best.grow(every[:, :1], lambda _tokens, _parents: next(below), None, max(wanted))
        limits = Budget(nodes=budget.nodes, depth=depths)
        for index, tree, drafted in self._best.cuts(context, active, grown, limits):
            trees[index], self._drafted[context.rows[index]] = tree, drafted
        return trees

    def _likeliest(self, sampler: Sampler) -> DynamicTree | None:
        """Return the tree of the likeliest paths for a request at temperature 0, else None: above it a deterministic
        tree is slower (docs/findings.md).
        """
        return self._best if sampler.greedy or self.config.draw == Draw.DETERMINISTIC else None

    def _fixed_tree(self) -> FixedTree:
        config = self.config
        return config.fixed_tree() if self._best is None else self._best.drawn(Draw(config.draw), config.temperature)

    @property
    def _draft_slots(self) -> int:
        return self._tree.depth

    def _grow(self, context: DraftContext, active: list[int], texts: list[Sequence[int]], ending: Ending) -> Grown:
        shape, rows = self._tree.shape, [context.rows[index] for index in active]
        every = self._levels(rows, texts, [shape.depths[count] for count in ending.nodes])

        def descend(_ids: Tensor, level: range) -> Tensor:
            depth = shape.depths[level.start]
            return ending.look(every[:, depth : depth + 1]).expand(-1, len(level), -1)

        draws = self._tree.draws(context, active, every.device, every.shape[-1])
        most = max(ending.nodes)
        grown = self._tree.grow(draws, most, ending.look(every[:, :1]), descend, enough=ending.enough)
        return dataclasses.replace(grown, run=0)  # None of its nodes is in the cache

    def _levels(self, rows: list[int], texts: list[Sequence[int]], depths: list[int]) -> Tensor:
        """Return logits (B, D, V) after the roots and their masks, from one pass. D is the largest of `depths` (B,); in
        rows with fewer depths the last entries are meaningless. Tokens of `texts` that the cache lacked stay there.
        """
        left = self._catch_up(rows, texts)
        masked = [[*tokens, *[self._mask] * (depth - 1)] for tokens, depth in zip(left, depths, strict=True)]
        logits = self.model.score(rows, Nodes.of_prompt(masked)).logits
        self.model.commit(rows, [tuple(range(1, len(tokens))) for tokens in left])
        for row, text in zip(rows, texts, strict=True):
            self._cached[row] = len(text)
        roots = send_ints([len(tokens) - 1 for tokens in left], logits.device).unsqueeze(1)
        index = (roots + torch.arange(max(depths), device=logits.device)).clamp_max(logits.shape[1] - 1)
        return self._target_logits(logits.gather(1, index.unsqueeze(-1).expand(-1, -1, logits.shape[-1])))


def mask_token(model: Any) -> int:
    """Return the mask token of a transformers causal LM. Raises ArgumentError if it is not a PARD model."""
    token = getattr(model.config, KEY, None)
    name = model.name_or_path or "the model"
    if token is None:
        raise ArgumentError(
            f"pard: {name} has no {KEY} in its config.json, so it cannot draft from masks. Take the method "
            f"draft_model, or make a PARD model of it: forerun train pard --draft {name}"
        )
    size = text_config(model).vocab_size
    if not isinstance(token, int) or not 0 <= token < size:
        raise ArgumentError(f"pard: {name} has {KEY} {token!r} in its config.json; expected one of its {size} tokens")
    return token


def mark(model: Any, tokenizer: Any, token: int | None = None) -> None:
    """Write the PARD keys into the configuration of a transformers causal LM. Without a `token` the mask is the one in
    its configuration, or else, as in AMD's models, the first id that the tokenizer does not use, or the padding token,
    or the last token. Raises ArgumentError if the token is not in the model's vocabulary.
    """
    token = getattr(model.config, KEY, None) if token is None else token
    if token is None:
        unused = max(tokenizer.get_vocab().values()) + 1
        token = unused if unused < text_config(model).vocab_size else spare_token(text_config(model))
    setattr(model.config, KEY, token)
    setattr(model.config, TYPE_KEY, "pard")
    mask_token(model)
