"""Are a chain's logits plain decoding's, bit for bit? And a tree's? Counted, not assumed.

A text is given: plain decoding runs it token by token, then the same text is run as chains of random length of which a
random part is kept, so that rejected tokens are overwritten as in real speculation. Knows no drafter and no rule.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.certify.reference import TIE_EPSILON
from forerun.core.tree import TokenTree
from forerun.model import Buckets, TransformersTarget

MOST = 15
"""Longest chain, in drafted tokens; with the root 16 nodes."""


@dataclass(kw_only=True, slots=True)
class BitCount:
    """How many positions were compared, and how they differ."""

    name: str
    batch: int
    positions: int = 0
    differing: int = 0
    """Positions whose logits differ in at least one bit."""
    largest: float = 0.0
    """Largest difference of a logit."""
    other_argmax: int = 0
    """Positions whose likeliest token differs."""
    gaps: list[float] = field(default_factory=list)
    """Of those: plain decoding's logit of its own choice minus that of the other one."""
    epsilon: float = 0.0

    @property
    def ties(self) -> int:
        """Positions of another likeliest token that the arithmetic explains."""
        return sum(gap < self.epsilon for gap in self.gaps)

    def add(self, plain: Tensor, other: Tensor) -> None:
        """Compare logits (n, V)."""
        self.positions += len(plain)
        differs = (plain != other).any(-1)
        self.differing += int(differs.sum())
        if bool(differs.any()):
            self.largest = max(self.largest, float((plain.float() - other.float()).abs().max()))
        own, their = plain.argmax(-1), other.argmax(-1)
        for index in torch.nonzero(own != their).flatten().tolist():
            self.other_argmax += 1
            self.gaps.append(float(plain[index, own[index]]) - float(plain[index, their[index]]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BitPlan:
    """What to compare."""

    context: int
    """Tokens that are prefilled."""
    positions: int
    """Compared in all, over the rows of the batch."""
    nodes: tuple[int, ...] = (MOST + 1,)
    """`Buckets.nodes`: one number is the reproducible mode, none leaves every pass its own size."""


@torch.inference_mode()
def compare(model: object, texts: Sequence[Sequence[int]], plan: BitPlan) -> list[BitCount]:
    """Chains and trees against plain decoding of `texts`, one row each.

    Args:
        model: a transformers causal LM, packed or not.
        texts: as many as the batch; each at least ``context + positions / batch + MOST + 1`` tokens.
    """
    batch = len(texts)
    steps = -(-plan.positions // batch)
    width = plan.context + steps + 2 * MOST
    target = TransformersTarget(model, rows=batch, slots=width, buckets=Buckets(nodes=plan.nodes))
    plain = _plain(target, texts, plan.context, steps)
    counts = []
    for name, branching in (("chain", False), ("tree", True)):
        epsilon = TIE_EPSILON.get(target.dtype_name, 0.0)
        count = BitCount(name=name, batch=batch, epsilon=epsilon)
        _speculative(target, texts, plain, (plan.context, branching), count)
        counts.append(count)
    return counts


def _plain(target: TransformersTarget, texts: Sequence[Sequence[int]], context: int, steps: int) -> list[Tensor]:
    """Logits (batch, V) of each position."""
    rows = list(range(len(texts)))
    target.truncate(rows, [0] * len(rows))
    target.prefill(rows, [text[:context] for text in texts])
    logits = []
    for place in range(context, context + steps):
        scored = target.score(rows, [TokenTree(text[place]) for text in texts])
        logits.append(scored.logits[:, 0].clone())
        target.commit(rows, [()] * len(rows))
    return logits


def _speculative(
    target: TransformersTarget,
    texts: Sequence[Sequence[int]],
    plain: Sequence[Tensor],
    how: tuple[int, bool],
    count: BitCount,
) -> None:
    context, branching = how
    draw = random.Random(0)
    rows = list(range(len(texts)))
    target.truncate(rows, [0] * len(rows))
    target.prefill(rows, [text[:context] for text in texts])
    done = 0
    while done < len(plain):
        place = context + done
        length = draw.randint(1, 5 if branching else MOST)
        kept = min(draw.randint(0, length), len(plain) - done - 1)
        drafts = [_draft(text[place : place + 1 + length], kept, branching) for text in texts]
        scored = target.score(rows, [tree for tree, _ in drafts])
        for row, (_, path) in enumerate(drafts):
            nodes = [0, *path[:kept]]
            count.add(torch.stack([plain[done + depth][row] for depth in range(kept + 1)]), scored.logits[row, nodes])
        target.commit(rows, [tuple(path[:kept]) for _, path in drafts])
        done += kept + 1


def _draft(tokens: Sequence[int], kept: int, branching: bool) -> tuple[TokenTree, list[int]]:
    """The tree, and its nodes for `tokens` behind the first, which is the root: wrong text where it will be rejected; a
    tree has wrong siblings too."""
    tree = TokenTree(tokens[0])
    path: list[int] = []
    parent = 0
    for depth, token in enumerate(tokens[1:]):
        if branching:
            tree.add((token + 1) % 256, parent)
        parent = tree.add(token if depth < kept else (token + 2) % 256, parent)
        if branching:
            tree.add((token + 3) % 256, parent)
        path.append(parent)
    return tree, path
