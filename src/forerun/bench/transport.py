"""How often the token after a node can be one of its drafted children: the optimal-transport bound, and reality.

If the siblings are drawn from a law over token sets, no rule whose emitted token has the target's law p can make that
token one of them more often than ``1 + min_H [p(H) - P(all siblings in H)]``, over every set H of tokens. The minimum
is attained by a prefix of the tokens sorted by p/q (Hu et al., arXiv 2502.18779), so a sort and prefix sums do.
Siblings without replacement are the first arrivals of independent exponential clocks with rates q, which turns the
probability into one smooth integral over time instead of a sum over ordered tuples.

Knows laws and nothing of drafters, targets or trees. Speaks of one level: what rules gain by looking at the levels
below is not in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.drafters.growth import Draw
from forerun.errors import ArgumentError

_STEP = 0.5
"""Of the logarithm of time; the trapezoid rule converges exponentially, this leaves an error below 1e-7."""
_FIRST, _LAST = -24.0, 23.0
"""Logarithms of the earliest and the latest time; clocks of rate 1e-10 still count."""
_CHUNK = 4
"""Nodes whose integrals are in memory at once: times x tokens each, float64."""


def transport_bound(target: Tensor, draft: Tensor, count: int, draw: Draw) -> Tensor:
    """The highest chance that the token after each node is among its `count` children (arXiv 2502.18779).

    Args:
        target: (N, V) laws of the target.
        draft: (N, V) laws that the children are drawn from; where fewer than `count` tokens are possible, there are
            fewer children without replacement.
        count: children of each node, at least 1.
        draw: how they are drawn; never AUTO.

    Returns:
        (N,) float64 in [0, 1]. For given and greedy-k children their rules reach it.

    Raises:
        ArgumentError: shapes differ, no child, or AUTO.
    """
    target, draft = _laws(target, draft, count, draw)
    if draw is Draw.GIVEN:
        return target.gather(1, _likeliest(draft, count)).sum(1).clamp(max=1)
    if draw is Draw.GREEDY_K:
        return _greedy_k(target, draft, count)
    ratio = torch.where(draft > 0, target / draft, torch.inf)
    order = ratio.argsort(dim=1)
    target, draft = target.gather(1, order), draft.gather(1, order)
    inside = _all_inside_iid(draft, count) if draw is Draw.IID else _all_inside_distinct(draft, count)
    gap = (target.cumsum(1) - inside).min(1).values
    return (1 + gap.clamp(max=0)).clamp(min=0)  # the empty set gives 0


def rejection_reach(target: Tensor, draft: Tensor, count: int, draw: Draw, *, samples: int = 64) -> Tensor:
    """The chance that token-by-token rejection keeps one of `count` siblings, all of them leaves.

    That is recursive rejection (SpecInfer, arXiv 2305.09781), and traversal (2505.12398) too: on one level they are the
    same rule. Arguments as `transport_bound`, `draw` IID or WITHOUT_REPLACEMENT.

    Args:
        samples: paths of rejected siblings, over which the chance is averaged without replacement; one sibling, and
            any number of iid ones, are exact without them.

    Returns:
        (N,) float64; the same for the same arguments.
    """
    if draw not in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
        raise ArgumentError(f"rejection judges siblings drawn iid or without replacement, not {draw.value}")
    target, draft = _laws(target, draft, count, draw)
    paths = samples if draw is Draw.WITHOUT_REPLACEMENT and count > 1 else 1
    generator = torch.Generator().manual_seed(0)
    rows = zip(target, draft, strict=True)
    return torch.stack([_reach(p.expand(paths, -1), q.expand(paths, -1), count, draw, generator) for p, q in rows])


def _reach(target: Tensor, draft: Tensor, count: int, draw: Draw, generator: torch.Generator) -> Tensor:
    """Of one node: laws (S, V) of each path."""
    missed = target.new_ones(len(target))
    for index in range(count):
        left = (target - draft).clamp(min=0)
        missed = missed * left.sum(1)
        if index == count - 1:
            break
        if draw is Draw.WITHOUT_REPLACEMENT:
            draft = _without_rejected(target, draft, generator)
        target = _normalised(left, target)
    return 1 - missed.mean()


def _without_rejected(target: Tensor, draft: Tensor, generator: torch.Generator) -> Tensor:
    """The draft law after a sibling was drawn and rejected: it lay where the draft exceeds the target."""
    excess = (draft - target).clamp(min=0)
    # Without excess a rejection has probability zero, or nothing is left to draw: any token will do.
    token = torch.multinomial(excess + (excess.sum(1, keepdim=True) <= 0), 1, generator=generator)
    rest = draft.scatter(1, token, 0.0)
    return rest / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)


def _normalised(values: Tensor, instead: Tensor) -> Tensor:
    """Rows of sum one; `instead` where there is nothing to normalise."""
    mass = values.sum(1, keepdim=True)
    return torch.where(mass > 0, values / mass.clamp_min(torch.finfo(values.dtype).tiny), instead)


def _laws(target: Tensor, draft: Tensor, count: int, draw: Draw) -> tuple[Tensor, Tensor]:
    if target.dim() != 2 or target.shape != draft.shape:
        raise ArgumentError(f"target and draft laws are (nodes, tokens) both, got {target.shape} and {draft.shape}")
    if count < 1:
        raise ArgumentError(f"a node needs at least one child, got {count}")
    if draw is Draw.AUTO:
        raise ArgumentError("how the children are drawn depends on the request: say given, iid, ... instead of auto")
    target, draft = target.double(), draft.double()
    return target / target.sum(1, keepdim=True), draft / draft.sum(1, keepdim=True)


def _likeliest(draft: Tensor, count: int) -> Tensor:
    return draft.topk(min(count, draft.shape[1]), dim=1).indices


def _greedy_k(target: Tensor, draft: Tensor, count: int) -> Tensor:
    """sum over given of p + sum over the rest of min(p, q'), q' the draft law restricted to the rest."""
    rest, given = draft, target.new_zeros(len(target))
    if count > 1:
        best = _likeliest(draft, count - 1)
        given, rest = target.gather(1, best).sum(1), draft.scatter(1, best, 0.0)
    rest = rest / rest.sum(1, keepdim=True).clamp_min(torch.finfo(rest.dtype).tiny)
    return (given + torch.minimum(target, rest).sum(1)).clamp(max=1)


def _all_inside_iid(draft: Tensor, count: int) -> Tensor:
    """(N, V): the chance that all siblings lie in each prefix."""
    return draft.cumsum(1).clamp(max=1) ** count


def _all_inside_distinct(draft: Tensor, count: int) -> Tensor:
    """(N, V): the same for siblings that are drawn one after the other without replacement."""
    possible = (draft > 0).sum(1).clamp(max=count)
    inside = torch.empty_like(draft)
    for siblings in sorted(set(possible.tolist())):
        rows = torch.nonzero(possible == siblings).flatten()
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            inside[part] = 1 - _outsider_among_first(draft[part], siblings)
    return inside


def _outsider_among_first(draft: Tensor, count: int) -> Tensor:
    """(n, V): the chance that the first `count` arrivals are not all in a prefix H.

    An outsider rings at time t at the rate (1 - Q) exp(-(1 - Q) t), Q = q(H); by then fewer than `count` of H have
    arrived with probability exp(-Q t) (e_0 + ... + e_(count - 1)), where e_j is the elementary symmetric polynomial of
    exp(q(x) t) - 1 over H. The e_j of all prefixes are cumulated sums, here of logarithms.
    """
    logs = torch.arange(_FIRST, _LAST, _STEP, dtype=draft.dtype)
    times = logs.exp().view(1, -1, 1)
    rates = draft.unsqueeze(1) * times
    arrivals = rates + torch.log(-torch.expm1(-rates))
    before, total = torch.zeros_like(arrivals), torch.exp(-times).expand_as(arrivals)
    for _ in range(1, count):
        # e_j of the first n tokens = sum over i <= n of (weight of token i) e_(j-1) of the tokens before i.
        few = torch.logcumsumexp(arrivals + before, dim=-1)
        total = total + torch.exp(few - times)
        before = torch.cat([torch.full_like(few[..., :1], -torch.inf), few[..., :-1]], dim=-1)
    outside = draft.flip(1).cumsum(1).flip(1)  # summed from the end: exact where little is left
    outside = torch.cat([outside[:, 1:], torch.zeros_like(outside[:, :1])], dim=1)
    return (outside * (total * times).sum(1) * _STEP).clamp(max=1)
